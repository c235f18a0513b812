"""Write one torch.save file per rank, with DTensors that FSDP2 loads under torchrun.

`model_world_size_4_rank_2.pt` holds the state dict of rank 2: DTensors with its local tensors, plain
tensors whole, and plain values. The pickles hold the fields that torch 2.13 writes
(`DTensor.__reduce_ex__`, `DTensorSpec`, `DeviceMesh.__getstate__`), with None for cached hashes.
`torch.load(weights_only=True)` reads them after `import torch.distributed.tensor`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_tree import nest
from ckptmap.errors import PlanError
from ckptmap.formats.pickle.writer import StorageTensor, Unwritable, dump
from ckptmap.formats.rank_files.dtensor_pickle import RankMesh, dtensor
from ckptmap.formats.torch_save.writer import ZipLayout, layout_zip
from ckptmap.protocols import OutFile, OutState, OutTensor, Placement, Setup, Slot
from ckptmap.sharding.mesh_rank_boxes import boxes_by_rank
from ckptmap.storage.crc32 import crc32
from ckptmap.tensors import Box, Path, TensorInfo, contiguous_strides

FSDP2_RANKS = Setup(
    "fsdp2-ranks",
    layout="mesh",
    writer="rank-files",
    sharded=True,
    dense=True,
    live="FSDP2",
    summary="one torch.save file a rank, DTensors on a mesh, as FSDP2 and verl save",
)
RANK_MAP = "ranks"
"""Key of the storage that holds the ranks of the mesh as int32 [world size]."""


class RankFilesWriter:
    """Writes one `model_world_size_W_rank_R.pt` per rank. Bytes that several ranks hold are written
    into the file of each."""

    name = "rank-files"
    one_file = False
    shares_storage = True

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the file of each rank, in rank order.

        Raise PlanError CKM202 for a value that is not plain, CKM114 if one leaf lies in another.
        """
        assert not state.records, "a setup of dense tensors has no encoding records"
        with paused_gc():
            boxes = {t.path: _boxes_of(t) for t in state.tensors}
            return [_file(state, rank, boxes) for rank in range(state.world_size)]


def _boxes_of(tensor: OutTensor) -> list[Box]:
    """Return the box of the tensor that each rank holds."""
    assert tensor.placement is not None, f"{tensor.path}: has no place on a mesh"
    return boxes_by_rank(tensor.placement, tensor.info)


@dataclass(frozen=True)
class _Stored:
    """A storage of one file: its key, and the box of the tensor at `path` that it holds."""

    key: str
    path: Path
    box: Box
    info: TensorInfo


def _file(state: OutState, rank: int, boxes: dict[Path, list[Box]]) -> OutFile:
    stored: dict[Path, _Stored] = {}
    leaves: list[tuple[Path, object]] = []
    meshes: dict[Placement, RankMesh] = {}
    for tensor in state.tensors:
        owner = tensor.alias_of or tensor.path
        if owner not in stored:
            box = boxes[owner][rank]
            info = TensorInfo(box.sizes, tensor.info.dtype)
            stored[owner] = _Stored(str(len(stored)), owner, box, info)
        local = _view(stored[owner])
        leaves.append((tensor.path, _leaf(tensor, local, rank, meshes)))
    leaves += state.extra.items()
    name = f"model_world_size_{state.world_size}_rank_{rank}.pt"
    try:
        pickle = dump(nest(leaves))
    except Unwritable as error:
        raise PlanError("CKM202", str(error), error.hint) from error
    return _laid_out(name, pickle, list(stored.values()), state.world_size if meshes else 0)


def _view(stored: _Stored) -> StorageTensor:
    shape = stored.info.shape
    stride = contiguous_strides([max(n, 1) for n in shape], 1)
    return StorageTensor(stored.key, stored.info.dtype, stored.info.numel, 0, shape, stride)


def _leaf(
    tensor: OutTensor, local: StorageTensor, rank: int, meshes: dict[Placement, RankMesh]
) -> object:
    """Return the tensor of this rank's state dict: a DTensor, or `local` if it is not on a mesh.

    Tensors of one mesh share one DeviceMesh object.
    """
    placement = tensor.placement
    assert placement is not None
    if placement.shards is None:
        return local
    used = Placement(
        placement.mesh, tuple(0 if s != Placement.ABSENT else s for s in placement.shards)
    )
    mesh = meshes.setdefault(used, RankMesh.of(used, rank, RANK_MAP, meshes.values()))
    return dtensor(tensor.info, local, placement, mesh)


def _laid_out(name: str, pickle: bytes, stored: Sequence[_Stored], ranks: int) -> OutFile:
    sizes = [(each.key, each.info.nbytes) for each in stored]
    rank_map = struct.pack(f"<{ranks}i", *range(ranks))
    ready = {RANK_MAP: rank_map} if ranks else {}
    layout = layout_zip(
        name.removesuffix(".pt"),
        pickle,
        [*sizes, *((k, len(d)) for k, d in ready.items())],
        ready=ready,
    )
    slots, order = [], []
    for number, each in enumerate(stored):
        if each.info.nbytes:
            slots.append(Slot(each.path, each.box, layout.offsets[number], each.info.nbytes))
            order.append(number)
    seal = _Seal(layout, tuple(order), rank_map)
    return OutFile(name, layout.nbytes, slots, seal, needs_crc=True)


@dataclass(frozen=True)
class _Seal:
    """Returns the zip structure around the slots, once the CRC-32s of the slots are known.

    order      index of the storage that slot i fills; storages without a slot are empty, or hold
               the ranks of the mesh
    rank_map   the bytes of that last storage; empty if no tensor lies on a mesh
    """

    layout: ZipLayout
    order: tuple[int, ...]
    rank_map: bytes

    def __call__(self, crcs: Sequence[int], manifest: bytes | None) -> Iterable[tuple[int, bytes]]:
        sums = [0] * len(self.layout.offsets)
        for number, crc in zip(self.order, crcs, strict=True):
            sums[number] = crc
        if self.rank_map:
            sums[-1] = crc32(self.rank_map)
        return self.layout.seal(sums, {})
