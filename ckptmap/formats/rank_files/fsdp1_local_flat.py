"""Compute where the parameters of a model lie in the flat parameters of FSDP1, and lay out the files
of ranks that hold parts of them.

FSDP1 wraps a group of modules as a unit, and joins the parameters of the unit into one vector:

    parameters of a unit [n0, ...], [n1, ...]  ->  [numel], cut into N x [ceil(numel / N)]

The parameters come in the order of the unit's modules, a shared one once. With
`use_orig_params=True` each parameter starts at a multiple of 16 bytes and N divides the length of
the vector. Elements of value 42 fill the gaps. Source: torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.formats.pickle.writer import StorageTensor
from ckptmap.formats.rank_files.sharded_tensor_pickle import Shards
from ckptmap.formats.torch_save.writer import ZipLayout, layout_zip
from ckptmap.protocols import OutFile, OutTensor, Slot
from ckptmap.sharding.flat_range_boxes import rectangles
from ckptmap.sharding.flat_unit import KEY
from ckptmap.storage.crc32 import crc32, crc32_combine
from ckptmap.tensors import ITEMSIZE, Box, Path, contiguous_strides

ALIGNMENT_NBYTES = 16
PADDING = 42
"""Value of the elements between parameters with `use_orig_params=True`, as torch writes them."""


@dataclass
class Flat:
    """A flat parameter, filled by `add` and then `close`.

    members   path -> (tensor, the element at which it begins)
    gaps      (begin, end) of each run of padding elements
    """

    path: Path
    dtype: str
    world: int
    members: dict[Path, tuple[OutTensor, int]] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    numel: int = 0

    @property
    def shard_numel(self) -> int:
        """Return the number of elements of each rank's shard, the zeros that pad it included."""
        return -(-self.numel // self.world)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return (begin, end) of the rank's elements, without the zeros that pad its shard."""
        low = min(rank * self.shard_numel, self.numel)
        return low, min(low + self.shard_numel, self.numel)

    def add(self, tensor: OutTensor, aligned: bool) -> None:
        """Append a tensor; `aligned` lets it begin at a multiple of 16 bytes."""
        if aligned:
            self._pad(ALIGNMENT_NBYTES // ITEMSIZE[self.dtype])
        self.members[tensor.path] = (tensor, self.numel)
        self.numel += tensor.info.numel

    def _pad(self, multiple: int) -> None:
        gap = -self.numel % max(multiple, 1)
        if gap:
            self.gaps.append((self.numel, self.numel + gap))
            self.numel += gap

    def close(self, aligned: bool) -> None:
        """End the flat parameter; `aligned` pads it to a multiple of the number of ranks."""
        if aligned:
            self._pad(self.world)

    @property
    def shards(self) -> Shards:
        """Return (rank, offset, numel) of each shard that is not empty."""
        bounds = [(rank, *self.bounds(rank)) for rank in range(self.world)]
        return [(rank, low, high - low) for rank, low, high in bounds if high > low]


def flats_of(tensors: Sequence[OutTensor], world_size: int) -> dict[str, Flat]:
    """Return unit prefix -> flat parameter, in the order of `FSDP.parameters()`: a unit comes before
    the units inside it. Raise PlanError CKM504 if FSDP1 cannot flatten these units."""
    flats: dict[str, Flat] = {}
    named = False
    for tensor in tensors:
        unit = tensor.unit
        if unit is None:
            continue
        named = unit.named
        path = (*tensor.path[:-1], f"{unit.prefix}.{KEY}" if unit.prefix else KEY)
        flat = flats.setdefault(unit.prefix, Flat(path, tensor.info.dtype, world_size))
        if tensor.alias_of is not None:
            _check_tie(tensor, flat)
        elif tensor.info.dtype != flat.dtype:
            raise PlanError(
                "CKM504",
                f"{tensor.path[-1]}: is {tensor.info.dtype}, but others of FSDP unit {unit.prefix!r} are"
                f" {flat.dtype}: FSDP1 flattens tensors of one dtype",
                "cast them, for example with --to fsdp1-local-bf16, or put them into different units with"
                f" --fsdp-units; leave out a buffer with {advised(exclude=str(tensor.path[-1]))}",
            )
        else:
            flat.add(tensor, named)
    for flat in flats.values():
        flat.close(named)
    order = Traversal(tensors)
    return {prefix: flats[prefix] for prefix in sorted(flats, key=order.at)}


class Traversal:
    """The position of modules and tensors in the order of modules, taken from the tensors' names."""

    def __init__(self, tensors: Sequence[OutTensor]) -> None:
        self._first: dict[str, int] = {}
        for number, tensor in enumerate(tensors):
            segments = str(tensor.path[-1]).split(".")
            for depth in range(len(segments) + 1):
                self._first.setdefault(".".join(segments[:depth]), number)

    def at(self, name: str) -> tuple[int, int]:
        """Return a sort key for a module or tensor. A module comes before the modules inside it, of
        which the first begins with the same tensor."""
        return self._first[name], len(name)


def _check_tie(tensor: OutTensor, flat: Flat) -> None:
    if tensor.alias_of not in flat.members:
        raise PlanError(
            "CKM504",
            f"{tensor.path[-1]}: is tied to a tensor of another FSDP unit, which FSDP1 cannot share",
            "give --fsdp-units that put both into one unit",
        )


# --------------------------------------------------------------------------------- bytes


@dataclass(frozen=True)
class FlatPiece:
    """A run of `nbytes` bytes from byte `at` of a storage: a box of a tensor, or the known `content`."""

    at: int
    nbytes: int
    path: Path = ()
    box: Box | None = None
    content: bytes = b""


@dataclass(frozen=True)
class Storage:
    """The zip member `data/<key>` of a torch.save file, and the pieces that fill it in order."""

    key: str
    nbytes: int
    pieces: Sequence[FlatPiece]


def pieces_of(flat: Flat, rank: int) -> list[FlatPiece]:
    """Return the pieces of a rank's shard in order, the zeros that pad it last."""
    itemsize = ITEMSIZE[flat.dtype]
    low, high = flat.bounds(rank)
    pieces = [
        FlatPiece(piece.at, piece.nbytes, tensor.path, piece.box)
        for tensor, start in flat.members.values()
        for piece in pieces_in_range(tensor, start, low, high)
    ]
    for begin, end in flat.gaps:
        numel = max(0, min(high, end) - max(low, begin))
        content = _element(flat.dtype) * numel
        if content:
            pieces.append(
                FlatPiece((max(low, begin) - low) * itemsize, len(content), content=content)
            )
    padding = flat.shard_numel - (high - low)
    if padding:
        pieces.append(
            FlatPiece(
                (high - low) * itemsize, padding * itemsize, content=bytes(padding * itemsize)
            )
        )
    return sorted(pieces, key=lambda piece: piece.at)


def pieces_in_range(tensor: OutTensor, start: int, low: int, high: int) -> Iterator[FlatPiece]:
    """Yield the pieces of a tensor that lie in elements [low, high) of a flat vector.

    The tensor begins at element `start` of the vector. Offsets count from element `low`, which is
    the first element of the storage.
    """
    info = tensor.info
    first, last = max(low, start), min(high, start + info.numel)
    for box, at in rectangles(info.shape, first - start, last - start):
        offset = (start + at - low) * info.itemsize
        yield FlatPiece(offset, box.numel * info.itemsize, tensor.path, box)


def _element(dtype: str) -> bytes:
    """Return the bytes of one PADDING element. Raise PlanError CKM504 for a dtype that models are not
    trained in."""
    if dtype == "bfloat16":
        return struct.pack("<f", PADDING)[2:]
    form = {"float16": "<e", "float32": "<f", "float64": "<d"}.get(dtype)
    if form is None:
        raise PlanError(
            "CKM504",
            f"fsdp1-local: parameters are {dtype}, expected a floating dtype of 16 to 64 bits with"
            " --use-orig-params",
            "cast them, for example with --to fsdp1-local-bf16",
        )
    return struct.pack(form, PADDING)


def whole(tensor: OutTensor, storages: list[Storage]) -> StorageTensor:
    """Append a storage that holds the whole tensor to `storages`. Return the tensor in it."""
    info, key = tensor.info, str(len(storages))
    pieces = [FlatPiece(0, info.nbytes, tensor.path, Box.whole(info.shape))] if info.nbytes else []
    storages.append(Storage(key, info.nbytes, pieces))
    stride = contiguous_strides([max(n, 1) for n in info.shape], 1)
    return StorageTensor(key, info.dtype, info.numel, 0, info.shape, stride)


def laid_out(name: str, pickle: bytes, storages: Sequence[Storage]) -> OutFile:
    """Return the torch.save file of a pickle and storages, with a slot for each box of a tensor."""
    sizes = [(each.key, each.nbytes) for each in storages]
    layout = layout_zip(name.removesuffix(".pt"), pickle, sizes)
    slots = [
        Slot(piece.path, piece.box, layout.offsets[number] + piece.at, piece.nbytes)
        for number, each in enumerate(storages)
        for piece in each.pieces
        if piece.box is not None
    ]
    return OutFile(name, layout.nbytes, slots, _Seal(layout, tuple(storages)), needs_crc=True)


@dataclass(frozen=True)
class _Seal:
    """Returns the bytes around the slots: the zip structure and the padding, in file order.

    The CRC-32 of a storage is combined from those of its slots and of its padding.
    """

    layout: ZipLayout
    storages: tuple[Storage, ...]

    def __call__(self, crcs: Sequence[int], manifest: bytes | None) -> Iterable[tuple[int, bytes]]:
        given = iter(crcs)
        sums = []
        for each in self.storages:
            total = 0
            for piece in each.pieces:
                crc = crc32(piece.content) if piece.box is None else next(given)
                total = crc32_combine(total, crc, piece.nbytes)
            sums.append(total)
        padding = [
            (self.layout.offsets[number] + piece.at, piece.content)
            for number, each in enumerate(self.storages)
            for piece in each.pieces
            if piece.box is None
        ]
        return sorted([*self.layout.seal(sums, {}), *padding])
