"""Read torchao's training weights that are quantized in each forward but stored in full precision.

    Int8MixedPrecisionTrainingLinearWeight [out, in] T  ->  dense [out, in] T

Int8MixedPrecisionTrainingLinearWeight and BitNetTrainingLinearWeight (torchao 0.5 to 0.18,
prototype/quantized_training) and WeightWithDynamicFloat8CastTensor (float8/fsdp_utils.py) hold the weight
itself in one attribute. A `_precomputed_scale` is dropped: it is computed from the weight again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.protocols import Group
from ckptmap.protocols.encodings import Records
from ckptmap.quantization.blockwise.group_checks import malformed
from ckptmap.quantization.dense import Dense
from ckptmap.quantization.read_only import ReadOnlyScheme
from ckptmap.quantization.torchao.rank_join import joined
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo


def _is_one(leaf: Opaque) -> bool:
    return leaf.name in TRAINED_DENSE and leaf.module.startswith("torchao.")


def _data(fqn: str, leaf: Opaque, info: TensorInfo | None) -> StoredTensor:
    data = leaf.state.get(TRAINED_DENSE[leaf.name]) if isinstance(leaf.state, Mapping) else None
    if not isinstance(data, StoredTensor) or data.info != info:
        there = data.info if isinstance(data, StoredTensor) else "none"
        raise malformed(fqn, f"{leaf.class_name}, expected data of {info}, found {there}")
    return data


class TrainedDense(ReadOnlyScheme):
    """Reads such weights as dense tensors; it is not a target."""

    name = "trained-dense"
    unmade = "it is read only: what it stores is dense"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        return []

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return a dense group. Raises SourceError CKM115 where the data is missing or has another shape."""
        if isinstance(leaf, Opaque):
            if not _is_one(leaf):
                return None
            data = _data(fqn, leaf, leaf.info)
            return Group(fqn, data.info, Dense(), {"": data})
        if not all(_is_one(piece) for _, piece in leaf.pieces):
            return None
        dtype = leaf.info.dtype
        pieces = [(b, _data(fqn, each, TensorInfo(b.sizes, dtype))) for b, each in leaf.pieces]
        return Group(fqn, leaf.info, Dense(), {"": joined(leaf.info.shape, pieces)})
