"""Check a layout: its cut tiles the tensor, and the shards of all ranks join to the tensor again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import PlanError, SourceError
from ckptmap.protocols import Layout, MeshLayout
from ckptmap.tensors import Box, Leaf, StoredTensor, TensorInfo
from ckptmap.testing.base import expect, required
from ckptmap.testing.parts import stored

SHAPES = ((), (0,), (1,), (7,), (0, 4), (4, 0), (1, 3), (5, 3), (16, 2), (2, 3, 4), (1001, 48))
WORLD_SIZES = (1, 2, 3, 4, 7, 8, 64)
MESHES = ("shard=1", "shard=3", "replicate=2,shard=2", "replicate=4", "ddp=2")

Parts: TypeAlias = Callable[[TensorInfo, int], Sequence[Leaf]]
"""(info, world size) -> each rank's shard of a tensor, as a reader returns it."""


def check_layout(layout: Layout, parts: Parts | None = None) -> None:
    """Raise AssertionError where the layout breaks its protocol.

        from ckptmap.testing import check_layout
        check_layout(MyLayout())
        check_layout(MyLayout(), parts=lambda info, world_size: [my_leaf(info, rank), ...])

    `parts` returns the shards of all ranks for a tensor, or nothing for a tensor that is not sharded. The
    layout must join them to a tensor with the boxes of its own cut, and raise SourceError where the last
    shard is missing.
    """
    with required(f"layout {layout.name}"):
        _check(layout, parts)


def _check(layout: Layout, parts: Parts | None) -> None:
    expect(layout.name, "a layout needs a name")
    for shape in SHAPES:
        info = TensorInfo(shape, "float32")
        for world_size in WORLD_SIZES:
            _check_cut(layout, info, world_size)
    if isinstance(layout, MeshLayout):
        _check_meshes(layout)
    _check_strangers(layout)
    if parts is not None:
        for shape in SHAPES:
            for world_size in (1, 2, 3):
                _check_join(layout, parts, TensorInfo(shape, "float32"), world_size)


def check_chunks(
    chunks: Sequence[tuple[int, Box]], info: TensorInfo, world_size: int, title: str
) -> None:
    """Raise AssertionError unless the (rank, box) are in rank order and tile the tensor without empty boxes."""
    ranks = [rank for rank, _ in chunks]
    expect(ranks == sorted(ranks), f"{title}: ranks {ranks} are not in order")
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    expect(not outside, f"{title}: rank {outside[0] if outside else 0} of {world_size} ranks")
    boxes = [box for _, box in chunks]
    problem = prove_tiling(info.shape, boxes)
    expect(problem is None, f"{title}: {problem}")
    expect(boxes, f"{title}: there is no box; an empty tensor needs one, too")
    empty = [box for box in boxes if not box.numel]
    expect(not info.numel or not empty, f"{title}: an empty box {empty[:1]}")


def _check_cut(layout: Layout, info: TensorInfo, world_size: int) -> None:
    title = f"{layout.name}: {info} over {world_size} ranks"
    chunks = list(layout.cut(info, world_size))
    check_chunks(chunks, info, world_size, title)
    expect(
        list(layout.cut(info, world_size)) == chunks, f"{title}: cut differently when asked again"
    )


def _check_meshes(layout: MeshLayout) -> None:
    for mesh in MESHES:
        mesh_layout = layout.over(mesh, None, None, ["fc.weight", "fc.bias"])
        sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
        expect(
            mesh_layout.world_size == math.prod(sizes),
            f"{layout.name} over {mesh}: a world of {mesh_layout.world_size}",
        )  # fmt: skip
        for shape in SHAPES:
            info = TensorInfo(shape, "float32")
            title = f"{layout.name} over {mesh}: {info}"
            placement = mesh_layout.placement("fc.weight", info, whole=False)
            expect(
                placement.world_size == mesh_layout.world_size,
                f"{title}: placed on {placement.world_size} ranks of {mesh_layout.world_size}",
            )
            check_chunks(
                list(mesh_layout.chunks(placement, info)), info, mesh_layout.world_size, title
            )
    _refuses_meshes(layout)


def _refuses_meshes(layout: MeshLayout) -> None:
    for mesh, world_size in (("shard=2", 3), ("shard=0", None), ("shard", None), ("", None)):
        try:
            layout.over(mesh, None, world_size, ["fc.weight"])
        except PlanError:
            continue
        raise AssertionError(f"{layout.name}: took --mesh {mesh!r} --world-size {world_size}")


def _check_strangers(layout: Layout) -> None:
    """Check that `join` returns None, and raises nothing, for values that are not shards."""
    for values in ([7], [1, 2], ["a", None], [{"a": 1}, {"a": 1}], [None]):
        joined = layout.join(values, "key")
        expect(joined is None, f"{layout.name}: joined {values} to {joined!r}")
    lone = layout.join([stored(TensorInfo((2, 3), "float32"))], "key")
    expect(lone is None, f"{layout.name}: joined a plain tensor of one rank to {lone!r}")


def _check_join(layout: Layout, parts: Parts, info: TensorInfo, world_size: int) -> None:
    title = f"{layout.name}: {info} of {world_size} ranks, joined"
    values = list(parts(info, world_size))
    if not values:
        return
    joined = layout.join(values, "key")
    expect(isinstance(joined, StoredTensor), f"{title}: is {joined!r}, expected a StoredTensor")
    assert isinstance(joined, StoredTensor)
    expect(joined.info == info, f"{title}: is {joined.info}")
    boxes = [chunk.box for chunk in joined.chunks if chunk.box.numel]
    problem = prove_tiling(info.shape, boxes)
    expect(problem is None, f"{title}: {problem}")
    expected = {box for _, box in layout.cut(info, world_size) if box.numel}
    expect(set(boxes) == expected, f"{title}: boxes {boxes}, cut gave {sorted(map(str, expected))}")
    if len(expected) == world_size > 1:
        try:
            layout.join(values[:-1], "key")
        except SourceError:
            return
        raise AssertionError(f"{title}: took {world_size - 1} parts of {world_size} for the whole")
