"""Carry the metadata of quantized tensors that cannot be decoded here, and are copied as bytes.

torchao's safetensors files describe each flattened tensor in their header. A tensor of a class that
no scheme here decodes keeps its entry, since nobody could read its parts without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.planning.output_names import OutputNames
from ckptmap.planning.weight_encodings import WeightEncodings
from ckptmap.protocols.offers import offers


@runtime_checkable
class KeepsRecords(Protocol):
    """A scheme whose library describes in metadata all tensors that it wrote."""

    def kept_record(
        self, fqn: str, record: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Sequence[str]] | None:
        """Return the record to write and the keys of the tensor's parts; None: another scheme's."""


def foreign_records(
    ckpt: Checkpoint, names: OutputNames, encodings: WeightEncodings
) -> dict[str, Mapping[str, object]]:
    """Return the records of tensors that the checkpoint does not decode, and whose parts are all written as bytes.

    Raises PlanError CKM618 where a part has another name in the output: nobody could read the tensor, because
    its record names it.
    """
    carried: dict[str, Mapping[str, object]] = {}
    if not ckpt.index.records:  # all schemes are imported only to ask about a record
        return carried
    origins = ckpt.origins
    written = {
        key: names.weights[fqn] for fqn in encodings.written for key in origins.get(fqn, (fqn,))
    }
    schemes = [scheme for scheme in registry.schemes() if offers(scheme, KeepsRecords)]
    for fqn, record in ckpt.index.records.items():
        answers = (scheme.kept_record(fqn, record) for scheme in schemes)
        answer = next((one for one in answers if one is not None), None)
        if answer is None or fqn in ckpt or not all(key in written for key in answer[1]):
            continue
        for key in answer[1]:
            if written[key] != key:
                raise PlanError(
                    "CKM618",
                    f"{key}: would be written as {written[key]!r}, and the metadata of {fqn}, which cannot"
                    " be decoded here, names its parts",
                    f"leave names as they are, or leave it behind with {advised(exclude=key)}",
                )
        carried[fqn] = answer[0]
    return carried
