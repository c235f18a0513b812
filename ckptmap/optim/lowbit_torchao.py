"""Read torchao's optimizer states: OptimState8bit, OptimState4bit, OptimStateFp8, whole or cut.

A pickled one is never built: its attributes are taken as the parts. The class moved between
releases (`torchao.prototype.low_bit_optim.subclass_*` up to 0.9, `torchao.optim.subclass_*` since
0.10), so it is known by class name and by torchao's name.

    OptimState8bit  codes u8 [shape], scale f32 [n/256], qmap f32 [256], signed
    OptimState4bit  codes u8 [n/2], scale f32 [n/128], qmap f32 [16], signed, shape
    OptimStateFp8   codes float8_e4m3fn [shape], scale f32 [n/256]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptmap.optim.lowbit import (
    CODES,
    LOGICAL,
    PLAIN,
    QMAP,
    SCALE,
    LowBit,
    LowBitCell,
    LowBitScheme,
    join_cells,
    malformed,
)
from ckptmap.protocols import Group, Refusal
from ckptmap.quantization.torchao.subclass_reader import state_of
from ckptmap.tensors import Box, Chunk, Cut, Opaque, StoredTensor, TensorInfo


class _TorchaoState(LowBitScheme):
    pickled = ""

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return the moment that a pickled object of this class holds; None: it is of another class.

        Raises SourceError CKM115 where the object's tensors do not fit each other.
        """
        if isinstance(leaf, Opaque):
            if not self._is_this_class(leaf) or leaf.info is None:
                return None
            return self._join_pieces(fqn, [(Box.whole(leaf.info.shape), leaf)], leaf.info.shape)
        if not any(self._is_this_class(piece) for _, piece in leaf.pieces):
            return None
        pieces = dict(leaf.pieces)
        foreign = [p for p in pieces.values() if not (self._is_this_class(p) or _is_plain(p))]
        if foreign:
            raise malformed(fqn, f"{self.pickled} on some ranks, {foreign[0].class_name} on others")
        return self._join_pieces(fqn, list(pieces.items()), leaf.info.shape)

    def _is_this_class(self, leaf: Opaque) -> bool:
        return leaf.name == self.pickled and leaf.module.split(".")[0] == "torchao"

    def _join_pieces(
        self, fqn: str, pieces: Sequence[tuple[Box, Opaque]], shape: tuple[int, ...]
    ) -> Group:
        """Return one moment made of the ranks' pieces in row-major order. A rank whose shard is small
        holds it plain."""
        pieces = sorted(pieces, key=lambda piece: piece[0].offsets)
        quantized = [(box, leaf) for box, leaf in pieces if not _is_plain(leaf)]
        plain = [state_of(leaf)[""] for _, leaf in pieces if _is_plain(leaf)]
        parts_of_pieces = [self._parts(fqn, leaf) for _, leaf in quantized]
        blocks = {
            _block(fqn, b.numel, parts)
            for (b, _), parts in zip(quantized, parts_of_pieces, strict=True)
        }
        signed = {bool(state_of(leaf).get("signed", True)) for _, leaf in quantized}
        if len(blocks) != 1 or len(signed) != 1:
            raise malformed(fqn, f"its ranks were quantized differently, blocks {sorted(blocks)}")
        block = blocks.pop()
        cells = join_cells(
            [LowBitCell(box, not _is_plain(leaf)) for box, leaf in pieces], shape, block
        )
        dtype = plain[0].info.dtype if plain else LOGICAL
        encoding = LowBit(self.name, block, signed.pop(), cells, dtype)
        parts = {
            part: _join_flat([piece_parts[part] for piece_parts in parts_of_pieces])
            for part in (CODES, SCALE)
        }
        if QMAP in parts_of_pieces[0]:
            replicas = [
                chunk for piece_parts in parts_of_pieces[1:] for chunk in piece_parts[QMAP].chunks
            ]
            parts[QMAP] = StoredTensor(
                parts_of_pieces[0][QMAP].info, parts_of_pieces[0][QMAP].chunks, replicas
            )
        if plain:
            parts[PLAIN] = _join_flat(plain)
        return self._check_parts(fqn, Group(fqn, TensorInfo(shape, LOGICAL), encoding, parts))

    def _check_parts(self, fqn: str, group: Group) -> Group:
        expected = group.encoding.parts(group.info)
        assert not isinstance(expected, Refusal)
        stored_infos = {part: stored.info for part, stored in group.parts.items()}
        if stored_infos != dict(expected):
            raise malformed(fqn, f"expected {dict(expected)}, found {stored_infos}")
        return group

    def _parts(self, fqn: str, leaf: Opaque) -> Mapping[str, StoredTensor]:
        parts = {}
        for name in (CODES, SCALE, QMAP):
            part = state_of(leaf).get(name)
            if isinstance(part, StoredTensor):
                parts[name] = part
            elif name != QMAP or self.name != "adamfp8":
                raise malformed(fqn, f"{leaf.class_name} without {name}")
        return parts


class Adam8bit(_TorchaoState):
    name = "adam8bit"
    pickled = "OptimState8bit"


class Adam4bit(_TorchaoState):
    name = "adam4bit"
    pickled = "OptimState4bit"


class AdamFp8(_TorchaoState):
    name = "adamfp8"
    pickled = "OptimStateFp8"


def _is_plain(leaf: Opaque) -> bool:
    """Return whether this is a plain tensor among subclass objects, as `as_inert` makes it."""
    return leaf.class_name == "torch.Tensor" and isinstance(state_of(leaf).get(""), StoredTensor)


def _block(fqn: str, numel: int, parts: Mapping[str, StoredTensor]) -> int:
    """Return the number of elements a scale, derived as torchao derives it."""
    blocks = parts[SCALE].info.numel
    if not blocks or numel % blocks:
        raise malformed(fqn, f"{blocks} scales for {numel} elements")
    return numel // blocks


def _join_flat(pieces: Sequence[StoredTensor]) -> StoredTensor:
    """Return one flat tensor of the pieces in order; a piece may have any shape."""
    total = sum(piece.info.numel for piece in pieces)

    def chunks() -> list[Chunk]:
        flat_chunks, at = [], 0
        for piece in pieces:
            flat_chunks += [_flat(chunk, piece.info.shape, at) for chunk in piece.chunks]
            at += piece.info.numel
        return flat_chunks

    make: Callable[[], Sequence[Chunk]] = chunks
    return StoredTensor(TensorInfo((total,), pieces[0].info.dtype), make)


def _flat(chunk: Chunk, shape: Sequence[int], at: int) -> Chunk:
    """Return a chunk that is a whole row-major piece as a range of the flat tensor."""
    from ckptmap.tensors import Region

    region = chunk.region
    if chunk.box.sizes != tuple(shape) or not region.is_contiguous:
        raise malformed(region.file, "codes in pieces, expected one row-major tensor")
    flat = Region.contiguous(region.file, region.offset, (chunk.box.numel,), region.itemsize)
    return Chunk(Box((at,), (chunk.box.numel,)), flat, chunk.crc32)
