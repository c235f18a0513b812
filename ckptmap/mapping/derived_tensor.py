"""Tensors that are computed when they are read: their sources are decoded and rearranged.

This is needed if rows of a quantized tensor move and a quantization block spans rows that move apart:
then no stored part can be copied as it is. If whole blocks of codes stay together, another encoding may
take codes and scales without decoding them (`DerivedCodes`). Otherwise values are decoded box by box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import Coded, CodeGrid, Repairs
from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.mapping import value_ops
from ckptmap.mapping.moved_codes import MovedCodes, by_blocks
from ckptmap.mapping.resolve import MappedTensor
from ckptmap.mapping.row_blocks import part_piece, rows_together
from ckptmap.mapping.scheme_to_scheme import pieces_of
from ckptmap.protocols import Encoder, Encoding, Group, Refusal
from ckptmap.protocols.offers import offers
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

WIDE = 4
"""The bounding box of strided elements is read whole if it is at most this many times larger."""
SMALL = 1 << 16
"""A bounding box of up to this many elements is always read whole."""


@dataclass(frozen=True)
class DerivedEncoding(Repairs):
    """The encoding of a tensor that is not stored in this form; it is written as `dense`."""

    name: str
    dense: Encoding

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        return {"": info}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return box

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        raise AssertionError("a derived tensor is read through its sources")

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        return self.dense.encoder(info, device)

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        return None

    def repaired(self) -> Encoding | None:
        return self.dense


@dataclass(frozen=True)
class DerivedCodesEncoding(DerivedEncoding):
    """The encoding of a derived tensor whose codes can be kept; `DerivedCodes` reads them."""

    codes_grid: CodeGrid | None = None

    def grid(self, info: TensorInfo) -> CodeGrid | None:
        return self.codes_grid

    def scale_parts(self, info: TensorInfo) -> Sequence[str]:
        return ()

    def scales(self, info: TensorInfo, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        raise AssertionError("a derived tensor is read through its sources")

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        raise AssertionError("a derived tensor is read through its sources")


class DerivedTensor(LazyTensor):
    """A tensor that reading computes from its sources: decoded, rearranged, its values changed."""

    __slots__ = ("_dense", "_mapped", "_pieces", "_sources")

    def __init__(
        self,
        mapped: MappedTensor,
        sources: Mapping[str, LazyTensor],
        dense: Encoding,
        encoding: Encoding | None = None,
    ) -> None:
        encoding = encoding or DerivedEncoding(_encoding_title(mapped, sources), dense)
        group = Group(mapped.name, mapped.info, encoding, {})
        super().__init__(mapped.name, group, next(iter(sources.values())).files)
        self._mapped, self._sources, self._dense = mapped, sources, dense
        infos = {key: lazy.info for key, lazy in sources.items()}
        self._pieces = pieces_of(mapped, infos)

    @property
    def why(self) -> str:
        """The remark that a plan shows for this tensor."""
        if self._mapped.ops:
            text = ", ".join(
                f"{op}{' taken back' if back else ''}" for op, back in self._mapped.ops
            )
            return f"values change: {text}"
        return "decoded, because its rows are rearranged across quantization blocks"

    @property
    def lossy(self) -> bool:
        return bool(self._mapped.ops)

    def as_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Return what its sources would hold for these values: value operations undone, in their dtype."""
        for text, inverse in reversed(self._mapped.ops):
            values = value_ops.parse_value_op(text).apply(values, not inverse)
        source = next(iter(self._sources.values()))
        return values.to(source.torch_dtype if self._mapped.ops else self.torch_dtype)

    @property
    def sources(self) -> Iterable[LazyTensor]:
        return self._sources.values()

    @property
    def beneath(self) -> Iterator[StoredTensor]:
        """The stored tensors it is read from."""
        for lazy in self._sources.values():
            yield from lazy.parts.values()

    @property
    def nbytes(self) -> int:
        """Stored bytes of its sources, in proportion to the elements it takes of each."""
        return sum(
            self._sources[piece.source].nbytes
            * piece.numel
            // max(1, self._sources[piece.source].info.numel)
            for piece in self._pieces
        )

    def named(self, fqn: str) -> LazyTensor:
        return type(self)(
            self._mapped._replace(name=fqn), self._sources, self._dense, self.encoding_
        )

    def read_into(self, box: Box, out: torch.Tensor) -> None:
        def read_source(piece: Piece, bounds: Box) -> torch.Tensor:
            return self._sources[piece.source].read(bounds.offsets, bounds.sizes, out.device)

        ops = [(value_ops.parse_value_op(text), inverse) for text, inverse in self._mapped.ops]
        if out.device.type != "cpu" and any(op.on_host for op, _ in ops):
            out.copy_(self._read_on_host(box))
            return
        if self._mapped.zeros is not None:
            out.zero_()
        gather(self._pieces, box, out, read_source)
        for op, inverse in ops:
            out.copy_(op.apply(out, inverse))


class DerivedCodes(DerivedTensor):
    """A derived tensor whose codes stay in whole blocks, so another encoding can take them unchanged."""

    __slots__ = ("_codes", "_scales")

    def __init__(
        self,
        mapped: MappedTensor,
        sources: Mapping[str, LazyTensor],
        dense: Encoding,
        encoding: Encoding | None = None,
    ) -> None:
        super().__init__(mapped, sources, dense, encoding)
        moved = _moved_codes(mapped, sources, self._pieces)
        assert moved is not None, "made by `derive`"
        _, self._codes, self._scales = moved

    @property
    def why(self) -> str:
        return "decoded, because its rows are rearranged across quantization blocks, unless the output takes its codes"

    def read_codes(self, box: Box, out: torch.Tensor) -> None:
        def read_source(piece: Piece, bounds: Box) -> torch.Tensor:
            codes = out.new_empty(bounds.sizes)
            self._sources[piece.source].read_codes(bounds, codes)
            return codes

        gather(self._codes, box, out, read_source)

    def read_scales(self) -> torch.Tensor:
        import torch

        grid = self.encoding_.grid(self.info) if offers(self.encoding_, Coded) else None
        assert grid is not None, "made by `derive`"
        out = torch.empty(grid.scales, dtype=torch.float32)
        whole = {key: lazy.read_scales() for key, lazy in self._sources.items()}

        def read_source(piece: Piece, bounds: Box) -> torch.Tensor:
            scales = whole[piece.source]
            for dim, (at, n) in enumerate(zip(bounds.offsets, bounds.sizes, strict=True)):
                scales = scales.narrow(dim, at, n)
            return scales

        gather(self._scales, Box.whole(grid.scales), out, read_source)
        return out


def derive(
    mapped: MappedTensor, sources: Mapping[str, LazyTensor], dense: Encoding
) -> DerivedTensor:
    """Return the derived tensor, with its codes where whole blocks of them stay together."""
    infos = {key: lazy.info for key, lazy in sources.items()}
    moved = None
    if not mapped.ops and mapped.zeros is None:
        moved = _moved_codes(mapped, sources, pieces_of(mapped, infos))
    if moved is None:
        return DerivedTensor(mapped, sources, dense)
    encoding = DerivedCodesEncoding(_encoding_title(mapped, sources), dense, codes_grid=moved.grid)
    return DerivedCodes(mapped, sources, dense, encoding)


def _encoding_title(mapped: MappedTensor, sources: Mapping[str, LazyTensor]) -> str:
    encoded = sorted({lazy.encoding for lazy in sources.values()} - {"dense"})
    ops = [text for text, _ in mapped.ops]
    return " ".join([*(encoded or ["dense"]), *(ops or ["rearranged"])])


def _moved_codes(
    mapped: MappedTensor, sources: Mapping[str, LazyTensor], pieces: Sequence[Piece]
) -> MovedCodes | None:
    """Return the target's codes, None where a block of them would be split."""
    by_rows = _by_rows(mapped, list(sources.values()), pieces)
    if by_rows is not None:
        return by_rows
    grids: dict[str, CodeGrid] = {}
    for key, lazy in sources.items():
        encoding = lazy.encoding_
        grid = encoding.grid(lazy.info) if offers(encoding, Coded) else None
        if grid is None or grid.zeros:
            return None
        grids[key] = grid
    infos = {key: lazy.info for key, lazy in sources.items()}
    return by_blocks(grids, infos, pieces, mapped.info)


def _by_rows(
    mapped: MappedTensor, lazies: Sequence[LazyTensor], pieces: Sequence[Piece]
) -> MovedCodes | None:
    """Return the moved codes where whole rows move, whatever shape the codes have."""
    encoding, unit = lazies[0].encoding_, rows_together(mapped)
    if unit is None or any(lazy.encoding_ != encoding for lazy in lazies):
        return None
    if not isinstance(encoding, Coded) or isinstance(encoding.parts(mapped.info), Refusal):
        return None
    grid = encoding.grid(mapped.info)
    rows = None if grid is None or grid.zeros else _in_units(grid, mapped.info, unit)
    if grid is None or rows is None:
        return None
    codes = [part_piece(piece, unit, rows[0], grid.codes.shape) for piece in pieces]
    scales = [part_piece(piece, unit, rows[1], grid.scales) for piece in pieces]
    return MovedCodes(grid, codes, scales)


def _in_units(grid: CodeGrid, info: TensorInfo, unit: int) -> tuple[int, int] | None:
    """Return rows of codes and of scales per `unit` rows, None where a block would be split."""
    units, torn = divmod(info.shape[0], unit)
    if torn or not units:
        return None
    codes, torn = divmod(grid.codes.shape[0], units)
    if torn or codes % grid.block[0]:
        return None
    return codes, codes // grid.block[0]


# --------------------------------------------------------------------------------- gathering


def gather(
    pieces: Sequence[Piece],
    box: Box,
    out: torch.Tensor,
    read_box: Callable[[Piece, Box], torch.Tensor],
) -> None:
    """Fill `out` [box.sizes] with a box of the tensor that pieces tile; `read_box` reads a source's box."""
    for piece in pieces:
        for starts, counts in piece.dst.cut(box):
            _gather(piece, starts, counts, box, out, read_box)


def _gather(
    piece: Piece,
    starts: Sequence[int],
    counts: Sequence[int],
    box: Box,
    out: torch.Tensor,
    read_box: Callable[[Piece, Box], torch.Tensor],
) -> None:
    """Copy an index box of a piece, read as the bounding box of its elements in the source.

    Where the bounding box is much larger than the elements, it is read in slices along one axis.
    """
    src, dst = piece.src.crop(starts, counts), piece.dst.crop(starts, counts)
    bounds = src.bounds
    if bounds.numel > max(SMALL, WIDE * src.numel):
        axis = max(range(len(counts)), key=lambda k: (counts[k] - 1) * _weight(src, bounds, k))
        for at in range(counts[axis]):
            part_starts, part_counts = list(starts), list(counts)
            part_starts[axis], part_counts[axis] = starts[axis] + at, 1
            _gather(piece, part_starts, part_counts, box, out, read_box)
        return
    values = read_box(piece, bounds)
    source_view = values.as_strided(counts, _strides(src, values.stride()), values.storage_offset())
    first = sum(
        (at - o) * step for at, o, step in zip(dst.offsets, box.offsets, out.stride(), strict=True)
    )
    target_view = out.as_strided(counts, _strides(dst, out.stride()), out.storage_offset() + first)
    target_view.copy_(source_view)


def _weight(src: StridedBox, bounds: Box, axis: int) -> int:
    """Return how many elements of the bounding box one step along an axis skips."""
    return src.steps[axis] * prod(bounds.sizes[src.dims[axis] + 1 :])


def _strides(strided: StridedBox, strides: Sequence[int]) -> list[int]:
    return [strides[dim] * step for dim, step in zip(strided.dims, strided.steps, strict=True)]
