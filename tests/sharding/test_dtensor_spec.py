"""DTensors on meshes of several dims (strided shards, TP, HSDP): our rows are the rows torch cuts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.formats.rank_files.dtensor_layout import DTensorLayout
from ckptmap.sharding.dtensor_spec import cut_runs
from ckptmap.tensors import Box, Chunk, Opaque, Region, StoredTensor, TensorInfo
from tests.corpus import names
from tests.support.same_tensors import assert_same

MESHES = ["tp_ranks_w2", "fsdp_tp_ranks_w4", "hsdp_ranks_w4", "fsdp_tp_dcp_w4", "hsdp_dcp_w4"]
_TYPES = "torch.distributed.tensor.placement_types"


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_is_read_and_converted(name: str, corpus: Any, tmp_path: Path) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, value in case.truth.items():
            assert_same(ckpt[fqn].read(), value, fqn)
            if value.ndim == 2:
                assert_same(ckpt[fqn][2:, 1:6], value[2:, 1:6], fqn)
        ckptmap.convert(ckpt, tmp_path / "hf", to="hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "dcp", to="fsdp2", world_size=3)
    with ckptmap.open(tmp_path / "dcp") as back:
        for fqn, value in case.truth.items():
            assert_same(back[fqn].read(), value, fqn)


def test_the_corpus_has_strided_shards(corpus: Any) -> None:
    """Else the tests above prove less than they say."""
    from ckptmap.formats.detect import look
    from ckptmap.formats.rank_files.reader import RankFiles

    leaves = RankFiles().index(look(corpus["fsdp_tp_ranks_w4"].path)).leaves
    placements = {
        placement.name
        for leaf in leaves.values()
        if isinstance(leaf.values[0], Opaque)
        for placement in leaf.values[0].state["_spec"].state["placements"]
    }
    assert placements == {"Shard", "_StridedShard"}
    assert "fsdp_tp_optimizer_dcp_w4" in names(optimizer="fqn")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank_of_a_mesh_is_named(corpus: Any, rank: int, tmp_path: Path) -> None:
    path = Path(shutil.copytree(corpus["fsdp_tp_ranks_w4"].path, tmp_path / "ranks"))
    for r in range(4):
        (path / f"model_world_size_4_rank_{r}.pt").rename(path / f"rank{r}.pt")
    (path / f"rank{rank}.pt").unlink()
    with pytest.raises(SourceError, match=rf"rank {rank} of 4 is missing") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM110"


def test_a_rank_of_another_mesh_is_refused(corpus: Any, tmp_path: Path) -> None:
    """4 ranks each: HSDP's first in place of that of FSDP and TP."""
    path = Path(shutil.copytree(corpus["fsdp_tp_ranks_w4"].path, tmp_path / "ranks"))
    shutil.copy(corpus["hsdp_ranks_w4"].path / "model_world_size_4_rank_0.pt", path)
    with pytest.raises(SourceError, match="was saved on a mesh of") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM110"


# ------------------------------------------------------------------------------ arithmetic


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_runs_are_those_of_torch(size: int, parts: int, split: int, before: int) -> None:
    """Of rows that a Shard has cut before: the rows that torch's own _StridedShard gives."""
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = _StridedShard(0, split_factor=split)
    for at in range(before):
        runs = cut_runs(((0, size),), before, at)
        rows = torch.tensor([n for start, length in runs for n in range(start, start + length)])
        expected, _ = strided._split_tensor(rows.long(), parts, with_padding=False)
        for index in range(parts):
            found = cut_runs(runs, parts, index, split)
            held = [n for start, length in found for n in range(start, start + length)]
            assert held == expected[index].tolist()


def mesh_dtensor(
    info: TensorInfo, at: tuple[int, int], mesh: tuple[int, int], rows: list[int]
) -> Opaque:
    """(_StridedShard(0), Shard(0)) on a mesh of (dp, tp), of a rank that holds these rows."""
    shape = (len(rows), *info.shape[1:])
    region = Region.contiguous(f"rank{at}", 0, shape, info.itemsize)
    local = StoredTensor(TensorInfo(shape, info.dtype), [Chunk(Box.whole(shape), region)])
    state = {
        "mesh": Opaque("torch.distributed.device_mesh", "DeviceMesh", state={
            "mesh": StoredTensor(TensorInfo(mesh, "int32"), []),
            "_flatten_mesh_list": tuple(range(mesh[0] * mesh[1])),
            "_coordinate_on_dim": list(at),
        }),
        "placements": (
            Opaque(_TYPES, "_StridedShard", state={"dim": 0, "split_factor": mesh[1]}),
            Opaque(_TYPES, "Shard", state={"dim": 0}),
        ),
    }  # fmt: skip
    spec = Opaque("torch.distributed.tensor._dtensor_spec", "DTensorSpec", state=state)
    whole = {"_local_tensor": local, "_spec": spec}
    return Opaque("torch.distributed.tensor", "DTensor", (), whole, info)


def rows_of_fsdp_tp(size: int, dp: int, tp: int, at: tuple[int, int]) -> list[int]:
    """What FSDP2 holds of what TP has cut: torch.chunk twice."""
    cut = torch.arange(size)
    for parts, index in ((tp, at[1]), (dp, at[0])):
        chunks = cut.chunk(parts)
        cut = chunks[index] if index < len(chunks) else cut[:0]
    return [int(n) for n in cut]


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_strided_shards_are_joined_or_refused_never_wrong(size: int, dp: int, tp: int) -> None:
    """Where torch's metadata disagree with what the ranks hold, nothing may be read."""
    info = TensorInfo((size, 3), "float32")
    held = {(d, t): rows_of_fsdp_tp(size, dp, tp, (d, t)) for d in range(dp) for t in range(tp)}
    values = [mesh_dtensor(info, at, (dp, tp), rows) for at, rows in held.items()]
    try:
        joined = DTensorLayout().join(values, "w")
    except SourceError as error:
        assert size % tp or size % (dp * tp), error
        assert "torch saves wrong metadata" in str(error)
        return
    assert isinstance(joined, StoredTensor)
    for at, rows in held.items():
        mine = [chunk for chunk in joined.chunks if chunk.region.file == f"rank{at}"]
        found = [
            n for c in mine for n in range(c.box.offsets[0], c.box.offsets[0] + c.box.sizes[0])
        ]
        assert found == rows
    assert sum(chunk.box.numel for chunk in joined.chunks) == info.numel


def test_the_known_wrong_metadata_are_refused() -> None:
    """9 rows over dp 4 x tp 2: rank 6 holds nothing, its metadata say row 8 (pytorch#161368)."""
    info = TensorInfo((9, 3), "float32")
    values = [
        mesh_dtensor(info, (d, t), (4, 2), rows_of_fsdp_tp(9, 4, 2, (d, t)))
        for d in range(4)
        for t in range(2)
    ]
    with pytest.raises(SourceError, match=r"w: rank \d holds .*; torch saves wrong metadata") as e:
        DTensorLayout().join(values, "w")
    assert e.value.code == "CKM112"


def test_two_by_two_is_never_affected() -> None:
    for size in range(1, 60):
        info = TensorInfo((size, 3), "float32")
        values = [
            mesh_dtensor(info, (d, t), (2, 2), rows_of_fsdp_tp(size, 2, 2, (d, t)))
            for d in range(2)
            for t in range(2)
        ]
        assert isinstance(DTensorLayout().join(values, "w"), StoredTensor)
