"""Rank files that FSDP2 wrote are joined to the tensors that were trained, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmap
from ckptmap import registry
from ckptmap.errors import SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.rank_files.dtensor_layout import DTensorLayout
from ckptmap.formats.rank_files.reader import RankFiles
from ckptmap.formats.torch_save.format import TorchZip
from ckptmap.protocols import Index
from ckptmap.sharding.full import Full
from ckptmap.sharding.shard0 import Shard0
from ckptmap.tensors import Box, Chunk, Cut, Leaf, Opaque, PerRank, Region, StoredTensor, TensorInfo
from tests.corpus import names
from tests.support.container_io import read_leaf, same

RANK_CASES = names(container="ranks", encoding="dense")
NF4_CASES = names(container="ranks", encoding="nf4")


def index(path: Path) -> Index:
    place = look(path)
    assert RankFiles().claims(place)
    return RankFiles().index(place)


def joined(leaf: Leaf, key: str) -> Any:
    values = leaf.values if isinstance(leaf, PerRank) else (leaf,)
    found = (layout.join(values, key) for layout in registry.layouts())
    return next((tensor for tensor in found if tensor is not None), leaf)


# ------------------------------------------------------------------------------ real rank files


@pytest.mark.parametrize("name", RANK_CASES)
def test_weights_are_what_was_saved(corpus: Any, name: str) -> None:
    case = corpus[name]
    found = index(case.path)
    assert found.world == case.world_size
    root = case.spec.root
    leaves = {path: leaf for path, leaf in found.leaves.items() if path[: len(root)] == root}
    keys = {path: case.spec.clean(".".join(map(str, path[len(root) :]))) for path in leaves}
    tensors = {path: key for path, key in keys.items() if key in case.truth}
    assert set(tensors.values()) == set(case.truth)
    for path, key in tensors.items():
        tensor = joined(leaves[path], key)
        assert isinstance(tensor, StoredTensor)
        assert sum(chunk.box.numel for chunk in tensor.chunks) == tensor.info.numel
        assert same(read_leaf(tensor), case.truth[key]), key
        for replica in tensor.replicas:
            whole = StoredTensor(
                TensorInfo(replica.box.sizes, tensor.info.dtype),
                [Chunk(Box.whole(replica.box.sizes), replica.region)],
            )
            part = case.truth[key]
            for dim, (offset, size) in enumerate(
                zip(replica.box.offsets, replica.box.sizes, strict=True)
            ):
                part = part.narrow(dim, offset, size)
            assert same(read_leaf(whole), part), key


def test_replicas_are_all_accounted_for(corpus: Any) -> None:
    """(Replicate, Shard(0)) on 2 x 2 ranks: each byte twice; plain buffers four times."""
    leaves = index(corpus["hsdp_ranks_w4"].path).leaves
    for path, leaf in leaves.items():
        assert isinstance(leaf, PerRank)
        tensor = joined(leaf, str(path))
        sharded = isinstance(leaf.values[0], Opaque)
        held = sum(chunk.box.numel for chunk in tensor.replicas)
        assert held == tensor.info.numel * (1 if sharded else 3), path


def test_ties_inside_the_files_are_seen(corpus: Any) -> None:
    case = corpus["fsdp2_ranks_tied_w2"]
    leaves = index(case.path).leaves
    [tied] = case.spec.tied
    shares = {joined(leaves[(name,)], name).share for name in tied}
    assert len(shares) == 1 and None not in shares
    others = [joined(x, str(p)).share for p, x in leaves.items() if p[0] not in tied]
    assert len(set(others)) == len(others) and not shares & set(others)


@pytest.mark.parametrize("name", NF4_CASES)
def test_shards_of_subclasses_are_a_cut(corpus: Any, name: str) -> None:
    case = corpus[name]
    leaves = index(case.path).leaves
    cuts = {path[0]: joined(leaf, str(path)) for path, leaf in leaves.items()}
    quantized = {key: cut for key, cut in cuts.items() if isinstance(cut, Cut)}
    assert set(quantized) == set(case.nf4)
    for cut in quantized.values():
        assert sum(box.numel for box, _ in cut.pieces) == cut.info.numel
        assert all(piece.name == "NF4Tensor" for _, piece in cut.pieces)


def test_optimizer_and_plain_values(corpus: Any) -> None:
    leaves = index(corpus["fsdp2_ranks_nested_w2"].path).leaves
    assert leaves[("step",)] == 3
    moment = joined(leaves["optimizer", "state", 0, "exp_avg"], "m")
    assert isinstance(moment, StoredTensor)
    assert isinstance(leaves["optimizer", "param_groups"], list)


# ------------------------------------------------------------------------------ sets of files


@pytest.fixture
def four(corpus: Any, tmp_path: Path) -> Path:
    """A copy of the rank files of 4 ranks, to be spoiled."""
    source = corpus["fsdp2_ranks_w4"].path
    return Path(shutil.copytree(source, tmp_path / "four"))


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_rank_is_named(four: Path, rank: int, renamed: bool) -> None:
    """By the number in the names; without one, by the mesh of the DTensors inside."""
    name = "model_world_size_4_rank_{}.pt"
    if renamed:
        for r in range(4):
            (four / name.format(r)).rename(four / f"ckpt-rank{r}.bin")
        name = "ckpt-rank{}.bin"
    (four / name.format(rank)).unlink()
    missing = name.format(rank).replace(".", r"\.")
    with pytest.raises(SourceError, match=rf"rank {rank} of 4 is missing \({missing}\)") as caught:
        index(four)
    assert caught.value.code == "CKM110"


def test_a_single_rank_file_says_that_others_are_missing(four: Path) -> None:
    found = TorchZip().index(look(four / "model_world_size_4_rank_1.pt"))
    path, leaf = next((p, x) for p, x in found.leaves.items() if isinstance(x, Opaque))
    with pytest.raises(SourceError, match=r"cut over the 4 ranks.*3 rank files are missing"):
        DTensorLayout().join((leaf,), str(path[0]))


def test_one_missing_file_is_told_in_the_singular(four: Path) -> None:
    parts = []
    for rank in range(3):
        found = TorchZip().index(look(four / f"model_world_size_4_rank_{rank}.pt"))
        path, leaf = next((p, x) for p, x in found.leaves.items() if isinstance(x, Opaque))
        parts.append(leaf)
    with pytest.raises(SourceError, match=r"the parts of 3; 1 rank file is missing"):
        DTensorLayout().join(tuple(parts), str(path[0]))


def test_a_stale_rank_is_refused(four: Path) -> None:
    extra = four / "model_world_size_4_rank_4.pt"
    shutil.copy(four / "model_world_size_4_rank_3.pt", extra)
    with pytest.raises(SourceError, match=r"rank_4\.pt: rank 4, expected ranks below 4"):
        index(four)


def test_files_of_ranks_that_were_exchanged_are_refused(four: Path) -> None:
    one, three = (four / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 3))
    one.rename(four / "kept")
    three.rename(one)
    (four / "kept").rename(three)
    with pytest.raises(SourceError, match=r"was written by rank 3, its name says rank 1") as caught:
        index(four)
    assert caught.value.code == "CKM110"


def test_an_absurd_rank_number_is_one_error(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "rank0.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "rank99999999999.pt")
    with pytest.raises(SourceError, match="rank 1 of 100000000000 is missing"):
        index(tmp_path)


def test_files_of_other_saves_are_refused(corpus: Any, four: Path) -> None:
    two = corpus["fsdp2_ranks_w2"].path
    for file in two.glob("*.pt"):
        shutil.copy(file, four)
    with pytest.raises(SourceError, match="rank files of several saves"):
        index(four)


def test_ranks_of_different_saves_under_one_name_are_refused(corpus: Any, tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2 + rank)}, tmp_path / f"rank{rank}.pt")
    leaf = index(tmp_path).leaves[("w",)]
    with pytest.raises(SourceError, match=r"w: ranks hold different tensors: .*\[2\] on rank 0"):
        DTensorLayout().join(leaf.values, "w")
    wide = index(corpus["fsdp2_ranks_w4"].path).leaves[("embed.weight",)].values[:2]
    narrow = index(corpus["fsdp2_ranks_w2"].path).leaves[("embed.weight",)].values[:2]
    with pytest.raises(SourceError, match="saved on a mesh of") as caught:
        DTensorLayout().join((wide[0], narrow[1]), "embed.weight")
    assert caught.value.code == "CKM110"


def test_roles_by_name(tmp_path: Path) -> None:
    for rank in range(2):
        for stem, tree in {
            "model": {"w": torch.ones(2)},
            "optim": {"state": {0: {"m": torch.ones(2)}}},
            "extra_state": {"rng": rank, "epoch": 3},
        }.items():
            torch.save(tree, tmp_path / f"{stem}_world_size_2_rank_{rank}.pt")
    found = index(tmp_path)
    assert set(found.leaves) == {
        ("w",),
        ("optimizer", "state", 0, "m"),
        ("extra", "extra_state", "rng"),
        ("extra", "extra_state", "epoch"),
    }
    assert found.leaves["extra", "extra_state", "rng"] == PerRank((0, 1))
    assert found.leaves["extra", "extra_state", "epoch"] == 3
    assert len(found.files) == 6 and found.world == 2


def test_an_optimizer_that_is_none_in_one_file_and_state_in_another(tmp_path: Path) -> None:
    state = {"state": {"w": {"m": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": None}, tmp_path / "model_rank_0.pt")
    torch.save(state, tmp_path / "optim_rank_0.pt")
    with ckptmap.open(tmp_path) as ckpt:
        assert list(ckpt) == ["w"] and list(ckpt.optimizer["w"]) == ["m"]


def test_what_is_no_rank_file_is_left_alone(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "notes_rank_0.txt").write_text("no zip")
    assert not RankFiles().claims(look(tmp_path))


# ------------------------------------------------------------------------------ arithmetic

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 12))
def test_cuts_are_those_of_torch_chunk(shape: tuple[int, ...], world_size: int) -> None:
    info = TensorInfo(shape, "float32")
    cut = Shard0().cut(info, world_size)
    if not shape or not info.numel:
        assert cut == [(0, Box.whole(shape))]
        return
    chunks = torch.arange(shape[0]).chunk(world_size)
    assert [rank for rank, _ in cut] == list(range(len(chunks)))
    for (_, box), rows in zip(cut, chunks, strict=True):
        assert (box.offsets[0], box.sizes[0]) == (int(rows[0]), len(rows))
        assert box.sizes[1:] == shape[1:] and not any(box.offsets[1:])
    assert list(Full().cut(info, world_size)) == [(0, Box.whole(shape))]


def placed(info: TensorInfo, mesh: tuple[int, ...], rank: int, shards: list[int | None]) -> Opaque:
    """A DTensor as torch before 2.9 pickles it; its local tensor has the shape torch computes."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate, Shard

    ranks = int(torch.tensor(mesh).prod())
    at = tuple(int(n) for n in torch.unravel_index(torch.tensor(rank), mesh))
    kinds = [Replicate() if dim is None else Shard(dim) for dim in shards]
    shape, offsets = _compute_local_shape_and_global_offset(
        torch.Size(info.shape), mesh, lambda dim: at[dim], kinds
    )
    region = Region.contiguous(f"rank{rank}", 0, shape, info.itemsize)
    local = StoredTensor(TensorInfo(tuple(shape), info.dtype), [Chunk(Box.whole(shape), region)])
    state = {
        "mesh": Opaque("torch.distributed.device_mesh", "DeviceMesh", state={
            "mesh": StoredTensor(TensorInfo(mesh, "int32"), []),
            "_flatten_mesh_list": tuple(range(ranks)),
            "_coordinate_on_dim": list(at),
        }),
        "placements": tuple(
            Opaque("torch.distributed.tensor.placement_types", type(kind).__name__, state={"dim": dim})
            for kind, dim in zip(kinds, shards, strict=True)
        ),
    }  # fmt: skip
    spec = Opaque("torch.distributed.tensor._dtensor_spec", "DTensorSpec", state=state)
    leaf_state = {"_local_tensor": local, "_spec": spec, "offsets": tuple(offsets)}
    return Opaque("torch.distributed._tensor.api", "DTensor", (), leaf_state, info)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
    st.data(),
)
def test_boxes_of_any_mesh_are_those_of_torch(
    shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject
) -> None:
    info = TensorInfo(shape, "float32")
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    shards = [data.draw(dims) for _ in mesh]
    values = [placed(info, mesh, r, shards) for r in range(int(torch.tensor(mesh).prod()))]
    tensor = DTensorLayout().join(values, "w")
    assert isinstance(tensor, StoredTensor)
    counts = torch.zeros(shape, dtype=torch.int64)
    for chunk in tensor.chunks:
        counts[tuple(slice(o, o + n) for o, n in zip(*_parts(chunk.box), strict=True))] += 1
    assert bool((counts == 1).all())
    boxes = {chunk.region.file: chunk.box for chunk in (*tensor.chunks, *tensor.replicas)}
    for rank, value in enumerate(values):
        box = boxes.get(f"rank{rank}")
        if box is not None:
            assert box.offsets == value.state["offsets"]
            assert box.sizes == value.state["_local_tensor"].info.shape
        else:
            assert value.state["_local_tensor"].info.numel == 0


def _parts(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.sizes


def test_placements_that_are_not_known_are_named() -> None:
    info = TensorInfo((4,), "float32")
    for kind in ("_StridedShard", "Partial"):
        leaf = placed(info, (2,), 0, [0])
        unknown = Opaque("torch.distributed.tensor.placement_types", kind, state={"dim": 0})
        leaf.state["_spec"].state["placements"] = (unknown,)
        with pytest.raises(SourceError, match=f"placement {kind} on mesh dim 0"):
            DTensorLayout().join((leaf, leaf), "w")


def test_a_local_shape_that_is_not_as_predicted_is_refused() -> None:
    info = TensorInfo((9, 2), "float32")
    leaves = [placed(info, (2,), rank, [0]) for rank in range(2)]
    leaves[1].state["_local_tensor"] = leaves[0].state["_local_tensor"]
    with pytest.raises(SourceError, match=r"rank 1 holds \[5, 2\], expected \[4, 2\] at \[5, 0\]"):
        DTensorLayout().join(leaves, "w")
    assert DTensorLayout().join((3, 4), "step") is None
