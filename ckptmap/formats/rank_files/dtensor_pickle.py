"""Build a DTensor for `pickle.writer.dump`, without torch: the objects that torch 2.13 pickles it as.

A DTensor pickles as a wrapper subclass with two attributes: `_local_tensor` and `_spec`. Cached
hashes are None here: torch computes them anew when it needs them. Sources, below torch/distributed:
tensor/_api.py, tensor/_dtensor_spec.py (`DTensorSpec`, `TensorMeta`, `ShardOrderEntry`),
tensor/placement_types.py, device_mesh.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptmap.formats.pickle.named_values import Call, Global, Instance
from ckptmap.formats.pickle.reader import Device, DType, Size
from ckptmap.formats.pickle.writer import StorageTensor
from ckptmap.protocols import Placement
from ckptmap.sharding.mesh_rank_boxes import coordinate
from ckptmap.tensors import TensorInfo, contiguous_strides

_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_LAYOUT = "torch.distributed._mesh_layout"
DEVICE = "cpu"
"""Device of the mesh and of the tensors. torch.load(map_location=...) moves the tensors."""


@dataclass(frozen=True)
class RankMesh:
    """A DeviceMesh of one rank: the dims `axes` of the whole mesh, on which a tensor lies."""

    axes: tuple[int, ...]
    value: Instance

    @classmethod
    def of(cls, used: Placement, rank: int, rank_map: str, others: Iterable[RankMesh]) -> RankMesh:
        """Return the DeviceMesh of the dims that `used` lies on, as `rank` has it.

        A mesh of some dims refers to the whole mesh as its root. The root is taken from `others` if
        one of them is the whole mesh. `rank_map` is the key of the storage that holds the ranks.
        """
        assert used.shards is not None
        every = tuple(range(len(used.mesh)))
        axes = tuple(axis for axis in every if used.shards[axis] != Placement.ABSENT)
        if axes == every:
            return cls(axes, _device_mesh(used.mesh, axes, rank, rank_map, None))
        root = next((other.value for other in others if other.axes == every), None)
        root = root or _device_mesh(used.mesh, every, rank, rank_map, None)
        return cls(axes, _device_mesh(used.mesh, axes, rank, rank_map, root))


def _device_mesh(
    mesh: Sequence[tuple[str, int]],
    axes: Sequence[int],
    rank: int,
    rank_map: str,
    root: Instance | None,
) -> Instance:
    sizes = [size for _, size in mesh]
    world = Placement(tuple(mesh), None).world_size
    strides = contiguous_strides(sizes, 1)
    at = coordinate(rank, sizes)
    groups = _group_names(sizes, rank)
    named = tuple(mesh[axis][0] for axis in axes)
    layout = [_flat_layout(sizes[axis], strides[axis]) for axis in axes]
    state = {
        "_device_type": DEVICE,
        "_layout": Instance(Global(_LAYOUT, "_MeshLayout"), {"axes": tuple(layout)}),
        "_rank_map": StorageTensor(rank_map, "int32", world, 0, (world,), (1,)),
        "_mesh_dim_names": named if all(named) else None,
        "_root_mesh": root,
        "_flatten_rank_map": tuple(range(world)),
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": [groups[axis] for axis in axes],
        "_rank": rank,
        "_coordinate_on_dim": tuple(at[axis] for axis in axes),
        "_hash": None,
    }
    return Instance(Global("torch.distributed.device_mesh", "DeviceMesh"), state)


def _flat_layout(size: int, stride: int) -> Instance:
    """Return the layout of one mesh dim. torch writes an empty shape for a dim of one rank."""
    state = {"shape": (size,), "stride": (stride,)} if size > 1 else {"shape": (), "stride": ()}
    return Instance(Global(_LAYOUT, "_FlatLayout"), state)


def _group_names(sizes: Sequence[int], rank: int) -> list[str]:
    """Return the name of the process group of each mesh dim, for this rank.

    torch numbers the groups in the order in which it makes them, and this assumes that the mesh is
    made first. Group "0" is the world, which a mesh of one dim uses.
    """
    if len(sizes) == 1:
        return ["0"]
    world = Placement(tuple(("", size) for size in sizes), None).world_size
    at, names, before = coordinate(rank, sizes), [], 1
    for axis, size in enumerate(sizes):
        number = 0
        for other, extent in enumerate(sizes):
            number = number * (1 if other == axis else extent) + (0 if other == axis else at[other])
        names.append(str(before + number))
        before += world // size
    return names


def dtensor(info: TensorInfo, local: StorageTensor, placement: Placement, mesh: RankMesh) -> Call:
    """Return the call of `torch._tensor._rebuild_from_type_v2` that makes the DTensor of `local`."""
    stride = contiguous_strides([max(n, 1) for n in info.shape], 1)
    cls = Global("torch.distributed.tensor", "DTensor")
    outer = (
        cls, DType(info.dtype), info.shape, stride, 0,
        Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        Device(DEVICE), False,
    )  # fmt: skip
    state = (None, {"_local_tensor": local, "_spec": _spec(info, stride, placement, mesh)})
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, cls, outer, state))


def _spec(
    info: TensorInfo, stride: tuple[int, ...], placement: Placement, mesh: RankMesh
) -> Instance:
    assert placement.shards is not None
    shards = [placement.shards[axis] for axis in mesh.axes]
    sizes = [placement.mesh[axis][1] for axis in mesh.axes]
    placements = [_placement(shards, sizes, axis) for axis in range(len(shards))]
    strided = any(each.cls == Global(_PLACEMENTS, "_StridedShard") for each in placements)
    meta = (Size(info.shape), stride, DType(info.dtype))
    state = {
        "mesh": mesh.value,
        "placements": tuple(placements),
        "tensor_meta": Instance(Global(_SPEC, "TensorMeta"), args=meta),
        "shard_order": None if strided else _order(shards),
        "use_strided_shard_as_shard_order": strided,
        "_hash": None,
    }
    return Instance(Global(_SPEC, "DTensorSpec"), state)


def _placement(shards: Sequence[int | None], sizes: Sequence[int], axis: int) -> Instance:
    """Return the placement on mesh dim `axis`.

    FSDP cuts the rows that TP has cut before, although its mesh dim comes first. So its placement is
    a _StridedShard if a later mesh dim cuts the same tensor dim.
    """
    dim = shards[axis]
    if dim is None:
        return Instance(Global(_PLACEMENTS, "Replicate"), {})
    split = 1
    for later in range(axis + 1, len(shards)):
        split *= sizes[later] if shards[later] == dim else 1
    if split == 1:
        return Instance(Global(_PLACEMENTS, "Shard"), {"dim": dim})
    return Instance(Global(_PLACEMENTS, "_StridedShard"), {"dim": dim, "split_factor": split})


def _order(shards: Sequence[int | None]) -> tuple[object, ...]:
    """Return one ShardOrderEntry (tensor dim, mesh dims that cut it) per cut dim, dims ascending."""
    dims = sorted({dim for dim in shards if dim is not None})
    return tuple(
        Instance(
            Global(_SPEC, "ShardOrderEntry"),
            args=(dim, tuple(axis for axis, cut in enumerate(shards) if cut == dim)),
        )
        for dim in dims
    )
