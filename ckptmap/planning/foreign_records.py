"""Carry the metadata of quantized tensors that cannot be decoded here, and are copied as bytes.

torchao's safetensors files describe each flattened tensor in their header. A tensor of a class that
no scheme here decodes keeps its entry, since nobody could read its parts without it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ckptmap import registry


@runtime_checkable
class KeepsRecords(Protocol):
    """A scheme whose library describes in metadata all tensors that it wrote."""

    def kept_record(
        self, fqn: str, record: Mapping[str, object]
    ) -> tuple[Mapping[str, object], Sequence[str]] | None:
        """Return the record to write and the keys of the tensor's parts; None: another scheme's."""


def foreign_records(
    records: Mapping[str, Mapping[str, object]], decoded: Container[str], written: Collection[str]
) -> dict[str, Mapping[str, object]]:
    """Return the records of tensors that are not `decoded`, and whose parts are all `written` as
    bytes and under their own names."""
    carried: dict[str, Mapping[str, object]] = {}
    if not records:  # all schemes are imported only to ask about a record
        return carried
    schemes = [scheme for scheme in registry.schemes() if isinstance(scheme, KeepsRecords)]
    for fqn, record in records.items():
        answers = (scheme.kept_record(fqn, record) for scheme in schemes)
        answer = next(
            (answer_of_scheme for answer_of_scheme in answers if answer_of_scheme is not None), None
        )
        if answer is not None and fqn not in decoded and all(key in written for key in answer[1]):
            carried[fqn] = answer[0]
    return carried
