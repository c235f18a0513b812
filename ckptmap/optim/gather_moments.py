"""Group the codes and the scales of each quantized moment, before the keys of the state are read.

state.W.exp_avg.codes, .scale, .qmap and their record  ->  state.W.exp_avg, a Group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ckptmap.protocols import Scheme
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.offers import offers
from ckptmap.tensors import Path, StoredTensor


@runtime_checkable
class FindsMoments(Protocol):
    """A scheme whose library stores quantized moments as tensors without a record."""

    def moments(self, leaves: Mapping[Path, object]) -> Mapping[Path, object]:
        """Return the leaves with a Group in place of the tensors of each moment.

        Raises SourceError CKM115 where the tensors do not fit together.
        """


def gather_moments(
    leaves: Mapping[Path, object],
    records: Records,
    root: Path | None,
    schemes: Sequence[Scheme],
) -> Mapping[Path, Any]:
    """Return the leaves below the optimizer's root with Groups in place of their parts.

    Raises SourceError CKM115 where a record's parts do not add up.
    """
    for scheme in schemes:
        if offers(scheme, FindsMoments):
            leaves = scheme.moments(leaves)
    if root is None:  # no optimizer: every record is a weight's
        return leaves
    prefix = ".".join(map(str, (*root, ""))) if root else ""
    own_records = {k.removeprefix(prefix): r for k, r in records.items() if k.startswith(prefix)}
    if not own_records:
        return leaves
    paths = {
        ".".join(map(str, p)): p for p, leaf in leaves.items() if isinstance(leaf, StoredTensor)
    }
    stored = {
        key: leaf for key, path in paths.items() if isinstance(leaf := leaves[path], StoredTensor)
    }
    gathered = dict(leaves)
    for scheme in schemes:
        for group, consumed in scheme.group(stored, own_records):
            first = paths[consumed[0]]
            part = next(iter(group.parts))
            for key in consumed:
                del gathered[paths[key]]
            gathered[*first[:-1], str(first[-1]).removesuffix(f".{part}")] = group
    return gathered
