"""The NF4 scheme: which stored tensors are NF4, and which dense tensors become NF4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.quantization.linear_weights import LinearLayerScheme, is_linear_weight
from ckptmap.quantization.nf4.encoding import NF4, default_encoding
from ckptmap.quantization.nf4.reader import adopt_cut, adopt_whole, is_nf4, stored_groups
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo

__all__ = ["NF4", "NF4Scheme"]


@dataclass(frozen=True)
class NF4Scheme(LinearLayerScheme):
    """Recognizes every stored form of NF4. Quantizes the weights of linear layers whose number of
    elements is a multiple of 64."""

    name = "nf4"
    suffix = "nf4"
    live = "nf4"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> list[tuple[Group, Sequence[str]]]:
        """Return a group for each NF4 record.

        Raises SourceError CKM115 where parts are missing or have wrong shapes, or five parts lack a record.
        """
        return stored_groups(stored, records)

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return the group of a pickled NF4Tensor, or of the shards of one. Raises SourceError CKM115."""
        if isinstance(leaf, Opaque):
            return adopt_whole(fqn, leaf) if is_nf4(leaf) else None
        are_nf4 = [is_nf4(piece) for _, piece in leaf.pieces]
        if not any(are_nf4):
            return None
        if not all(are_nf4):
            raise SourceError(
                "CKM115",
                f"{fqn}: only {sum(are_nf4)} of {len(are_nf4)} ranks hold an NF4Tensor",
                "copy the files of all ranks of one save here",
            )
        return adopt_cut(fqn, leaf)

    def takes_layer(self, fqn: str, info: TensorInfo) -> bool:
        return is_linear_weight(fqn, info)

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """Return the encoding that `--encode` forces whatever the name, or why there is none."""
        encoding = default_encoding(info)
        parts = encoding.parts(info)
        return parts if isinstance(parts, Refusal) else encoding

    def keeping(self, info: TensorInfo, grid: CodeGrid, exact: bool) -> Encoding | None:
        """Return NF4 with the same blocks, exact or with the largest scaler block up to 256; None if unfit."""
        block = grid.block[0] * 2
        if grid.name != "nf4" or info.numel % block:
            return None
        encoding = NF4(block, 1, True) if exact else NF4(block, gcd(256, info.numel // block))
        return None if encoding.recoder(info, grid, "cpu") is None else encoding

    def exactly(self, encoding: Encoding, info: TensorInfo) -> Encoding:
        assert isinstance(encoding, NF4), f"{encoding} is no NF4"
        return NF4(encoding.block_size, 1, True)
