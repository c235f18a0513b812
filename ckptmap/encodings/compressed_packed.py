"""compressed-tensors' packed integers: `bits` a code, densely in int32 words along each row.

    w [out, in] T  ->  weight_packed i32 [out, ceil(in * bits / 32)], weight_scale [out, groups],
                       weight_shape i64 [2], perhaps weight_zero_point i32 [ceil(out * bits / 32), groups]

A code q is stored as q + 2^(bits-1), least significant bits first; bits of one code may lie in two
words. Zero points are packed the same way, but along the rows (compressed-tensors 0.20,
compressors/pack_quantized). With 8 bits a word is four bytes of codes, each with its upper bit
turned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ckptmap.blocks import geometry, values
from ckptmap.blocks.beside import quantization_config, small
from ckptmap.blocks.encoder import Constants, ScaledEncoder, ScaledRecoder, flat
from ckptmap.blocks.errors import DAMAGED, checked, malformed
from ckptmap.blocks.records import read_record
from ckptmap.blocks.rules import Rule, TorchaoInt8
from ckptmap.blocks.scaled import DTYPES, Scaled
from ckptmap.disk.files import Files
from ckptmap.geometry.grids import Grid, Recoder
from ckptmap.protocols import Encoder, Group, Refusal, Write
from ckptmap.tensors import Box, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

WORD = 32


@dataclass(frozen=True)
class Packed(Scaled):
    """Written with 8 bits, read with 1 to 8. `ordered`: `weight_g_idx` says the group of a column."""

    codes_part: ClassVar[str] = "packed"
    scale_part: ClassVar[str] = "scale"
    zero_part: ClassVar[str] = "zero_point"
    scheme: ClassVar[str] = "ct-packed"

    bits: int = 8
    ordered: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"ct-int{self.bits}"

    def part_key(self, key: str, part: str) -> str:
        return f"{key}_{part}"

    def refusal(self, info: TensorInfo) -> Refusal | None:
        if len(info.shape) != 2:
            return Refusal(f"packs matrices, found shape {list(info.shape)}")
        if not 1 <= self.bits <= 8:
            return Refusal(f"packs 1 to 8 bits, found {self.bits}")
        return super().refusal(info)

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        found = super().parts(info)
        if isinstance(found, Refusal):
            return found
        rows, width = info.shape
        groups = self.scale_shape(info)[-1] if len(self.scale_shape(info)) == 2 else 1
        more = {
            "packed": TensorInfo((rows, _words(width, self.bits)), "int32"),
            "shape": TensorInfo((2,), "int64"),
        }
        if self.zero_dtype:
            more["zero_point"] = TensorInfo((_words(rows, self.bits), groups), "int32")
        if self.ordered:
            more["g_idx"] = TensorInfo((width,), "int32")
        return {**found, **more}

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        if part == "shape":
            return Box((0,), (2,))
        if not box.numel:
            parts = self.parts(info)
            assert not isinstance(parts, Refusal)
            zeros = (0,) * len(parts[part].shape)
            return Box(zeros, zeros)
        (row, column), (rows, columns) = box.offsets, box.sizes
        if part == "packed":
            low, count = _span(column, columns, self.bits)
            return Box((row, low), (rows, count))
        if part == "g_idx":
            return Box((column,), (columns,))
        grid = self._grid_box(info, box)
        if part == "zero_point":
            low, count = _span(grid.offsets[0], grid.sizes[0], self.bits)
            return Box((low, grid.offsets[1]), (count, grid.sizes[1]))
        return geometry.stored_box(grid, self.scale_shape(info))

    def _grid_box(self, info: TensorInfo, box: Box) -> Box:
        """Where columns are of any group, all groups of the rows."""
        if self.ordered:
            box = Box((box.offsets[0], 0), (box.sizes[0], info.shape[1]))
        return geometry.grid_box(box, self.block_of(info))

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """One scale is stored as [1]."""
        return (1,) if self.block_of(info) == info.shape else super().scale_shape(info)

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if not box.numel:
            return
        import torch

        codes = unpacked(parts["packed"], self.bits, box.offsets[1], box.sizes[1])
        grid = self._grid_box(info, box)
        scale = geometry.as_grid(parts["scale"], grid).to(torch.float32)
        zero = None
        if self.zero_dtype:
            along = parts["zero_point"].transpose(0, 1).contiguous()
            zero = unpacked(along, self.bits, grid.offsets[0], grid.sizes[0]).transpose(0, 1)
        block = self.block_of(info)
        if self.ordered:
            index = parts["g_idx"].to(torch.int64)
            scale = scale.index_select(1, index)
            zero = None if zero is None else zero.index_select(1, index)
            block = (block[0], 1)
        values.decode(codes, scale, zero, box, block, out)

    # ------------------------------------------------------------------ written, 8 bits

    def rule(self, info: TensorInfo) -> Rule:
        return TorchaoInt8(self.scale_dtype)

    def constants(self, info: TensorInfo) -> Constants:
        return {"shape": ("int64", info.shape)}

    def encoder(self, info: TensorInfo, device: str) -> Encoder:
        inner = ScaledEncoder(
            info,
            self.block_of(info),
            self.rule(info),
            "packed",
            "scale",
            self.constants(info),
            device,
        )
        return PackedEncoder(inner, info.shape[1])

    def grid(self, info: TensorInfo) -> Grid | None:
        if self.zero_dtype or self.ordered:
            return None
        name = "int8" if self.bits == 8 else f"int{self.bits}"
        return Grid(name, TensorInfo(info.shape, "int8"), self.block_of(info), self.values_name)

    def code_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return self.part_box(info, part, box) if part == "packed" else None

    def codes(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        if box.numel:
            out.copy_(unpacked(parts["packed"], self.bits, box.offsets[1], box.sizes[1]))

    def recoder(self, info: TensorInfo, grid: Grid, device: str) -> Recoder | None:
        inner = super().recoder(info, grid, device)
        if self.bits != 8 or not isinstance(inner, ScaledRecoder):
            return None
        return PackedRecoder(inner, info.shape[1])

    def more_record(self, info: TensorInfo) -> Mapping[str, Any]:
        return {
            "native": "compressed-tensors", "bits": self.bits, "zero_dtype": self.zero_dtype,
            "ordered": self.ordered,
        }  # fmt: skip


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD)


def _span(start: int, count: int, bits: int) -> tuple[int, int]:
    """First word and number of words that hold these codes."""
    low = start * bits // WORD
    return low, _words(start + count, bits) - low


def unpacked(words: torch.Tensor, bits: int, start: int, count: int) -> torch.Tensor:
    """words i32 [r, n] from the word of code `start` on -> codes i8 [r, count]."""
    import torch

    first = start * bits // WORD * WORD
    if bits == 8:
        of_bytes = words.contiguous().view(torch.uint8).narrow(1, start - first // 8, count)
        return (of_bytes ^ 0x80).view(torch.int8)
    at = torch.arange(start, start + count, device=words.device) * bits - first
    word, shift = at // WORD, at % WORD
    low = words.index_select(1, word).to(torch.int64).bitwise_and_(0xFFFFFFFF) >> shift
    spills = shift + bits > WORD
    if WORD % bits:
        after = words.index_select(1, (word + spills).clamp_(max=words.shape[1] - 1))
        low |= torch.where(spills, after.to(torch.int64) << (WORD - shift), 0)
    return (low.bitwise_and_((1 << bits) - 1) - (1 << (bits - 1))).to(torch.int8)


def packed_rows(codes: torch.Tensor, width: int) -> torch.Tensor:
    """codes i8 [m], whole rows of `width` -> words i32 [m / width * ceil(width / 4)]."""
    import torch

    turned = codes.view(torch.uint8) ^ 0x80
    if width % 4:
        # The padding of a row is 0 bits, as compressed-tensors' is.
        turned = torch.nn.functional.pad(turned.view(-1, width), (0, -width % 4)).reshape(-1)
    return turned.view(torch.int32)


class PackedEncoder:
    """8-bit codes of whole rows, packed on their way."""

    splittable = True
    state_nbytes = 0

    def __init__(self, inner: ScaledEncoder, width: int) -> None:
        self._inner, self._width = inner, width
        self.step = inner.step if inner.step % width == 0 else width

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        for write in self._inner.feed(offset, values):
            yield _packed(write, self._width) if write.part == "packed" else write

    def finish(self) -> Iterable[Write]:
        return self._inner.finish()


class PackedRecoder:
    """8-bit codes of whole rows as they are, packed."""

    state_nbytes = 0

    def __init__(self, inner: ScaledRecoder, width: int) -> None:
        self._inner, self._width = inner, width
        self.step = width
        self.fidelity = inner.fidelity

    def feed(self, offset: int, codes: torch.Tensor, scales: torch.Tensor) -> Iterable[Write]:
        for write in self._inner.feed(offset, codes, scales):
            yield _packed(write, self._width)

    def finish(self, scales: torch.Tensor) -> Iterable[Write]:
        return self._inner.finish(scales)


def _packed(write: Write, width: int) -> Write:
    words = packed_rows(write.values, width)
    first = write.box.offsets[0] // width * -(-width // 4)
    return Write("packed", flat(first, words.numel()), words)


# ------------------------------------------------------------------------------- recognised


def find_packed(
    stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Group, Sequence[str]]]:
    """Groups of records, then those of other writers. Raises SourceError CKM115."""
    mine = {fqn: r for fqn, r in records.items() if r.get("scheme") == Packed.scheme}
    for fqn, record in mine.items():
        read = read_record(fqn, record, "ct-packed")
        encoding = Packed(
            read.block, read.scale_dtype, read.dtype("zero_dtype"), bits=read.count("bits", 8),
            ordered=bool(record.get("ordered")),
        )  # fmt: skip
        yield _group(fqn, read.info, encoding, stored)
    files = Files()
    try:
        for key in [key for key in stored if key.endswith("_packed")]:
            fqn = key.removesuffix("_packed")
            if fqn not in mine and f"{fqn}_scale" in stored and stored[key].info.dtype == "int32":
                yield _found(fqn, stored, files)
    finally:
        files.close()


def _found(
    fqn: str, stored: Mapping[str, StoredTensor], files: Files
) -> tuple[Group, Sequence[str]]:
    packed, scale = stored[f"{fqn}_packed"].info, stored[f"{fqn}_scale"].info
    shape = _shape(fqn, stored, files)
    bits = next((b for b in range(1, 9) if _words(shape[1], b) == packed.shape[-1]), 0)
    if len(packed.shape) != 2 or packed.shape[0] != shape[0] or not bits:
        raise malformed(fqn, f"weight_packed {packed}, expected rows of {list(shape)} in words")
    if scale.dtype not in DTYPES:
        raise malformed(fqn, f"weight_scale {scale}, expected one of {', '.join(DTYPES)}")
    bits = _said_bits(fqn, stored, shape[1], packed.shape[1]) or bits
    ordered = f"{fqn}_g_idx" in stored
    block = shape if scale.numel == 1 else _block(fqn, shape, scale)
    zero = stored.get(f"{fqn}_zero_point")
    encoding = Packed(block, scale.dtype, "int32" if zero else "", bits=bits, ordered=ordered)
    return _group(fqn, TensorInfo(shape, scale.dtype), encoding, stored)


def _said_bits(fqn: str, stored: Mapping[str, StoredTensor], width: int, words: int) -> int:
    """Short rows fit several numbers of bits: config.json says which."""
    fitting = [b for b in range(1, 9) if _words(width, b) == words]
    if len(fitting) == 1:
        return fitting[0]
    groups = quantization_config(stored[f"{fqn}_packed"]).get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if bits in fitting:
            return int(bits)
    return max((b for b in fitting if b in (4, 8)), default=0)


def _shape(fqn: str, stored: Mapping[str, StoredTensor], files: Files) -> tuple[int, int]:
    part = stored.get(f"{fqn}_shape")
    if part is None or part.info.numel != 2 or part.info.dtype not in ("int64", "int32"):
        found = part.info if part is not None else "none"
        raise malformed(fqn, f"weight_shape, expected two integers, found {found}")
    data, size = small(part, files, fqn), part.info.itemsize
    rows, width = (int.from_bytes(data[i : i + size], "little", signed=True) for i in (0, size))
    if min(rows, width) < 1:
        raise malformed(fqn, f"weight_shape {[rows, width]}, expected positive sizes", DAMAGED)
    return rows, width


def _block(fqn: str, shape: tuple[int, int], scale: TensorInfo) -> tuple[int, int]:
    good = len(scale.shape) == 2 and scale.shape[0] == shape[0] and scale.shape[1] > 0
    if not good or shape[1] % scale.shape[1]:
        raise malformed(fqn, f"weight_scale {scale} of {list(shape)}, expected groups of columns")
    return 1, shape[1] // scale.shape[1]


def _group(
    fqn: str, info: TensorInfo, encoding: Packed, stored: Mapping[str, StoredTensor]
) -> tuple[Group, Sequence[str]]:
    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise malformed(fqn, f"{encoding.name}: {expected.reason}", DAMAGED)
    shape = encoding.scale_shape(info)
    found: dict[str, Any] = {part: stored.get(encoding.part_key(fqn, part)) for part in expected}
    if shape == (1,) and found["scale"] is not None and found["scale"].info.numel == 1:
        found["scale"] = geometry.reshaped(found["scale"], shape)
    if found["shape"] is not None and found["shape"].info == TensorInfo((2,), "int32"):
        raise malformed(fqn, "weight_shape is int32, expected int64", DAMAGED)
    parts = checked(fqn, encoding.name, expected, found)
    return Group(fqn, info, encoding, parts), tuple(encoding.part_key(fqn, p) for p in parts)
