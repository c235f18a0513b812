"""Writes one torch.save file a rank as FSDP1's LOCAL_STATE_DICT has it: flat parameters, cut.

    a unit's [n0, ...], [n1, ...], ...  ->  N x ShardedTensor{`<unit>._flat_param` [ceil(numel / N)]}

torch/distributed/fsdp/_flat_param.py: the parameters of a unit in the order of its modules, shared
ones once; with `use_orig_params=True` each starts at a multiple of 16 bytes and the whole divides
by N, with elements of 42 between, and every parameter is there by name, too, as a view of what the
rank holds. What is in no unit, a buffer, is whole in each file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptmap.errors import PlanError
from ckptmap.protocols import OutFile, OutState, OutTensor, Setup, Slot
from ckptmap.tensors import ITEMSIZE, Box, Path, contiguous_strides
from ckptmap.wire.crc_join import join_crc
from ckptmap.wire.flat_rectangles import rectangles
from ckptmap.wire.gc_pause import paused_gc
from ckptmap.wire.pickle_write import StorageTensor, dump
from ckptmap.wire.sharded_write import Shards, flat_sharded
from ckptmap.wire.torch_zip_write import ZipLayout, layout_zip
from ckptmap.wire.tree import nest

FSDP1_LOCAL = Setup(
    "fsdp1-local",
    layout="flat",
    writer="fsdp1-local",
    sharded=True,
    holds_extra=False,
    dense=True,
    summary="one torch.save file a rank, flat parameters as FSDP1's LOCAL_STATE_DICT has them",
)
KEY = "_flat_param"
ALIGNMENT_NBYTES = 16
PADDING = 42
"""Value between parameters with `use_orig_params=True`: torch's, by which it can be told."""


class Fsdp1LocalWriter:
    """One `model_world_size_W_rank_R.pt` a rank."""

    name = "fsdp1-local"
    one_file = False
    shares_storage = True

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Raises PlanError CKM204 for one rank, CKM504 where FSDP1 could not flatten it so."""
        if state.world_size < 2:
            raise PlanError(
                "CKM204",
                "fsdp1-local: FSDP1 cuts nothing over 1 rank and saves whole tensors there",
                "give --world-size, or choose full",
            )
        with paused_gc():
            flats = _flats(state)
            return [_file(state, flats, rank) for rank in range(state.world_size)]


# --------------------------------------------------------------------------------- units


@dataclass
class _Flat:
    """A flat parameter: what begins at which element, and what is padding."""

    path: Path
    dtype: str
    world: int
    members: dict[Path, tuple[OutTensor, int]] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    numel: int = 0

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Elements that the rank holds, without padding on the right."""
        low = min(rank * self.shard_numel, self.numel)
        return low, min(low + self.shard_numel, self.numel)

    def add(self, tensor: OutTensor, aligned: bool) -> None:
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
        if aligned:
            self._pad(self.world)

    @property
    def shards(self) -> Shards:
        bounds = [(rank, *self.bounds(rank)) for rank in range(self.world)]
        return [(rank, low, high - low) for rank, low, high in bounds if high > low]


def _flats(state: OutState) -> dict[str, _Flat]:
    """Flat parameters by unit, in the order of their first tensors."""
    flats: dict[str, _Flat] = {}
    named = False
    for tensor in state.tensors:
        unit = tensor.unit
        if unit is None:
            continue
        named = unit.named
        path = (*tensor.path[:-1], f"{unit.prefix}.{KEY}" if unit.prefix else KEY)
        flat = flats.setdefault(unit.prefix, _Flat(path, tensor.info.dtype, state.world_size))
        if tensor.alias_of is not None:
            _check_tie(tensor, flat)
        elif tensor.info.dtype != flat.dtype:
            raise PlanError(
                "CKM504",
                f"{tensor.path[-1]}: is {tensor.info.dtype}, others of FSDP unit {unit.prefix!r} are"
                f" {flat.dtype}: FSDP1 flattens tensors of one dtype",
                "cast them, for example --to fsdp1-local-bf16, or part them with --fsdp-units",
            )
        else:
            flat.add(tensor, named)
    for flat in flats.values():
        flat.close(named)
    return flats


def _check_tie(tensor: OutTensor, flat: _Flat) -> None:
    if tensor.alias_of not in flat.members:
        raise PlanError(
            "CKM504",
            f"{tensor.path[-1]}: is tied to a tensor of another FSDP unit, which FSDP1 cannot share",
            "give --fsdp-units so that both are in one",
        )


# --------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class _Piece:
    """Part of a storage: bytes of a tensor's box, or known `content`."""

    at: int
    nbytes: int
    path: Path = ()
    box: Box | None = None
    content: bytes = b""


@dataclass(frozen=True)
class _Storage:
    key: str
    nbytes: int
    pieces: Sequence[_Piece]


def _file(state: OutState, flats: dict[str, _Flat], rank: int) -> OutFile:
    storages: list[_Storage] = []
    leaves: list[tuple[Path, Any]] = []
    views: dict[str, StorageTensor] = {}
    whole: dict[Path, StorageTensor] = {}
    for prefix, flat in flats.items():
        low, high = flat.bounds(rank)
        key, nbytes = str(len(storages)), flat.shard_numel * ITEMSIZE[flat.dtype]
        storages.append(_Storage(key, nbytes, list(_pieces(flat, rank))))
        views[prefix] = StorageTensor(
            key, flat.dtype, flat.shard_numel, 0, (high - low,), (1,), requires_grad=True
        )
    for tensor in state.tensors:
        if tensor.unit is None:
            owner = tensor.alias_of or tensor.path
            if owner not in whole:
                whole[owner] = _whole(tensor, storages)
            leaves.append((tensor.path, whole[owner]))
        elif tensor.unit.named:
            leaves.append((tensor.path, _slice(tensor, flats[tensor.unit.prefix], views, rank)))
    leaves += [
        (flat.path, flat_sharded(flat.dtype, flat.numel, flat.shards, views[p], rank, flat.world))
        for p, flat in flats.items()
    ]
    name = f"model_world_size_{state.world_size}_rank_{rank}.pt"
    return _laid_out(name, dump(nest(leaves)), storages)


def _whole(tensor: OutTensor, storages: list[_Storage]) -> StorageTensor:
    info, key = tensor.info, str(len(storages))
    pieces = [_Piece(0, info.nbytes, tensor.path, Box.whole(info.shape))] if info.nbytes else []
    storages.append(_Storage(key, info.nbytes, pieces))
    stride = contiguous_strides([max(n, 1) for n in info.shape], 1)
    return StorageTensor(key, info.dtype, info.numel, 0, info.shape, stride)


def _slice(
    tensor: OutTensor, flat: _Flat, views: dict[str, StorageTensor], rank: int
) -> StorageTensor:
    """A parameter by name: a view of what the rank's shard holds of it, perhaps of nothing."""
    assert tensor.unit is not None
    _, start = flat.members[tensor.alias_of or tensor.path]
    low, high = flat.bounds(rank)
    first, last = max(low, start), min(high, start + tensor.info.numel)
    numel = max(0, last - first)
    view = views[tensor.unit.prefix]
    offset = first - low if numel else 0
    return StorageTensor(view.key, view.dtype, view.numel, offset, (numel,), (1,))


def _pieces(flat: _Flat, rank: int) -> Iterator[_Piece]:
    """What a rank's shard consists of, in order, the padding on its right too."""
    itemsize = ITEMSIZE[flat.dtype]
    low, high = flat.bounds(rank)
    found: list[_Piece] = []
    for tensor, start in flat.members.values():
        first, last = max(low, start), min(high, start + tensor.info.numel)
        for box, at in rectangles(tensor.info.shape, first - start, last - start):
            offset = (start + at - low) * itemsize
            found.append(_Piece(offset, box.numel * itemsize, tensor.path, box))
    for begin, end in flat.gaps:
        numel = max(0, min(high, end) - max(low, begin))
        content = _element(flat.dtype) * numel
        if content:
            found.append(_Piece((max(low, begin) - low) * itemsize, len(content), content=content))
    rest = flat.shard_numel - (high - low)
    if rest:
        found.append(
            _Piece((high - low) * itemsize, rest * itemsize, content=bytes(rest * itemsize))
        )
    yield from sorted(found, key=lambda piece: piece.at)


def _element(dtype: str) -> bytes:
    """PADDING as one element: of every dtype that models are trained in."""
    if dtype == "bfloat16":
        return struct.pack("<f", PADDING)[2:]
    form = {"float16": "<e", "float32": "<f", "float64": "<d"}.get(dtype)
    if form is None:
        raise PlanError(
            "CKM504", f"fsdp1-local: {dtype} parameters with use_orig_params", "cast them first"
        )
    return struct.pack(form, PADDING)


def _laid_out(name: str, pickle: bytes, storages: Sequence[_Storage]) -> OutFile:
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
    """A storage's checksum is joined from those of its slots and of its padding."""

    layout: ZipLayout
    storages: tuple[_Storage, ...]

    def __call__(self, crcs: Sequence[int], manifest: bytes | None) -> Iterable[tuple[int, bytes]]:
        given = iter(crcs)
        sums = []
        for each in self.storages:
            total = 0
            for piece in each.pieces:
                crc = zlib.crc32(piece.content) if piece.box is None else next(given)
                total = join_crc(total, crc, piece.nbytes)
            sums.append(total)
        padding = [
            (self.layout.offsets[number] + piece.at, piece.content)
            for number, each in enumerate(self.storages)
            for piece in each.pieces
            if piece.box is None
        ]
        return sorted([*self.layout.seal(sums, {}), *padding])
