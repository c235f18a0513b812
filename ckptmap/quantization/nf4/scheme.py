"""NF4 as a scheme: how it is recognised, and which tensors it takes as a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.quantization.linear_weights import is_linear_weight
from ckptmap.quantization.nf4.encoding import NF4, default_encoding
from ckptmap.quantization.nf4.reader import adopt_cut, adopt_whole, is_nf4, stored_groups
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo

__all__ = ["NF4", "NF4Scheme"]


@dataclass(frozen=True)
class NF4Scheme:
    """Recognises NF4 in all its stored forms, and quantizes linear weights to it."""

    name = "nf4"
    suffix = "nf4"
    live = "nf4"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, object]]
    ) -> list[tuple[Group, Sequence[str]]]:
        """Raises SourceError CKM115 where a record's parts are missing or misshapen, or where
        five parts have no record."""
        return stored_groups(stored, records)

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        if isinstance(leaf, Opaque):
            return adopt_whole(fqn, leaf) if is_nf4(leaf) else None
        found = [is_nf4(piece) for _, piece in leaf.pieces]
        if not any(found):
            return None
        if not all(found):
            raise SourceError(
                "CKM115",
                f"{fqn}: only {sum(found)} of {len(found)} ranks hold an NF4Tensor",
                "these ranks are not of one save",
            )
        return adopt_cut(fqn, leaf)

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """The default choice: weights of linear layers, of a multiple of 64 elements."""
        if not is_linear_weight(fqn, info):
            return None
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """The forced choice (`--encode`), whatever the name: the encoding, or why there is none."""
        encoding = default_encoding(info)
        parts = encoding.parts(info)
        return parts if isinstance(parts, Refusal) else encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """The same blocks; `exact`: scaler blocks of 1 in float32, else the largest up to 256."""
        block = grid.block[0] * 2
        if grid.name != "nf4" or info.numel % block:
            return None
        encoding = NF4(block, 1, True) if exact else NF4(block, gcd(256, info.numel // block))
        return None if encoding.recoder(info, grid, "cpu") is None else encoding

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        assert isinstance(encoding, NF4), f"{encoding} is no NF4"
        return NF4(encoding.block_size, 1, True)
