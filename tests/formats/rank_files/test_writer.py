"""`fsdp2-ranks`: files that torch loads into live FSDP2 models, on every mesh, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # torch.load needs it for DTensors
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.protocols import Placement
from ckptmap.sharding.device_mesh import Mesh
from ckptmap.sharding.mesh_rank_boxes import boxes_by_rank
from ckptmap.tensors import TensorInfo
from tests.corpus import names
from tests.corpus.ranks import run_ranks
from tests.support.same_tensors import assert_same

PLAN = """
"layers.*.self_attn.[qkv]_proj" = "colwise"
"layers.*.self_attn.o_proj" = "rowwise"
"layers.*.mlp.gate_proj" = "colwise"
"layers.*.mlp.up_proj" = "colwise"
"layers.*.mlp.down_proj" = "rowwise"
"""
MESHES: Mapping[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "three": {"world_size": 3},
    "hsdp": {"mesh": "replicate=2,shard=2"},
    "named": {"mesh": "fsdp=2"},
    "tp": {"mesh": "tp=2", "tp_plan": PLAN},
    "fsdp-tp": {"mesh": "dp=2,tp=2", "tp_plan": PLAN},
    "all three": {"mesh": "dp_replicate=2,dp_shard=2,tp=2", "tp_plan": PLAN},
}


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return file


def options(mesh: str, plan_file: Path) -> dict[str, Any]:
    found = dict(MESHES[mesh])
    return found | ({"tp_plan": str(plan_file)} if "tp_plan" in found else {})


def files_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Rank -> what torch loads of its file, in this one process."""
    found = {}
    for file in folder.glob("*.pt"):
        rank = re.fullmatch(r"model_world_size_\d+_rank_(\d+)\.pt", file.name)
        assert rank is not None
        found[int(rank[1])] = torch.load(file, weights_only=True)
    return found


# ------------------------------------------------------------------------------ written, read back


@pytest.mark.parametrize("setup", ["fsdp2-ranks", "fsdp2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_reads_back(
    mesh: str, setup: str, corpus: Any, plan_file: Path, tmp_path: Path
) -> None:
    case = corpus["fsdp2_dcp_w2"]
    dst = tmp_path / "out"
    report = ckptmap.convert(case.path, dst, to=setup, **options(mesh, plan_file))
    assert set(report.fidelity) <= {"bytes", "exact"}
    with ckptmap.open(dst) as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, value in case.truth.items():
            assert_same(ckpt[fqn].read(), value, fqn)
    verified = ckptmap.verify(dst, against=case.path)
    assert verified.ok, str(verified)
    plan = ckptmap.plan(case.path, setup, **options(mesh, plan_file))
    slots = [(slot.path, slot.box) for file in plan.files for slot in file.out.slots]
    if setup == "fsdp2":
        assert len(set(slots)) == len(slots), "DCP stores replicas once"


@pytest.mark.parametrize("name", names(container="ranks", world_size=(2, 4), encoding="dense"))
def test_rank_files_of_other_ranks(name: str, corpus: Any, tmp_path: Path) -> None:
    """What was sharded stays so, what was not stays plain, ties stay ties."""
    case = corpus[name]
    ckptmap.convert(case.path, tmp_path / "out", to="fsdp2-ranks", world_size=3, optimizer="drop")
    with ckptmap.open(tmp_path / "out") as ckpt:
        for fqn in ckpt:
            assert_same(ckpt[fqn].read(), case.truth[fqn], fqn)
    found = files_of(tmp_path / "out")
    assert set(found) == {0, 1, 2}
    for state in found.values():
        weights = state.get("model", state)
        plain = {fqn for fqn, value in weights.items() if not isinstance(value, DTensor)}
        assert plain == {"tokens_seen", "causal", "rope.inv_freq"}
        for tied in case.spec.tied:
            held = [weights[fqn].to_local() for fqn in tied]
            assert len({value.untyped_storage().data_ptr() for value in held}) == 1


def test_the_pickles_are_those_of_torch(corpus: Any, tmp_path: Path) -> None:
    """Every field of every DTensor as FSDP2's own file of the same model has it, save hashes."""
    for name, mesh in {
        "fsdp2_ranks_w2": {"world_size": 2},
        "hsdp_ranks_w4": MESHES["hsdp"],
    }.items():
        case = corpus[name]
        ckptmap.convert(corpus["fsdp2_dcp_w2"].path, tmp_path / name, to="fsdp2-ranks", **mesh)
        theirs, mine = files_of(case.path), files_of(tmp_path / name)
        assert set(theirs) == set(mine)
        for rank, state in theirs.items():
            assert set(state) == set(mine[rank])
            for fqn, value in state.items():
                other = mine[rank][fqn]
                assert type(other) is type(value), fqn
                if isinstance(value, DTensor):
                    assert fields(other) == fields(value), fqn
                    assert torch.equal(other.to_local(), value.to_local()), fqn
                else:
                    assert torch.equal(other, value), fqn


def fields(tensor: DTensor) -> dict[str, Any]:
    """Of its spec and mesh; group names of a mesh of two dims depend on what was made before."""
    spec = dict(vars(tensor._spec))
    mesh = dict(vars(spec.pop("mesh")))
    rank_map = mesh.pop("_rank_map").tolist()
    if len(mesh["_coordinate_on_dim"]) > 1:
        mesh.pop("_dim_group_names")
    assert mesh.pop("_pg_registry") == {}
    for values in (spec, mesh):
        values.pop("_hash")
    return {**spec, **mesh, "rank_map": rank_map, "shape": tensor.shape, "stride": tensor.stride()}


def test_casts_reach_every_replica(corpus: Any, tmp_path: Path) -> None:
    case = corpus["fsdp2_dcp_w2"]
    ckptmap.convert(case.path, tmp_path / "out", to="fsdp2-ranks-bf16", mesh="replicate=2,shard=2")
    found = files_of(tmp_path / "out")
    for fqn, value in case.truth.items():
        expected = value.to(torch.bfloat16) if value.is_floating_point() else value
        parts = [found[rank][fqn] for rank in range(4)]
        if isinstance(parts[0], DTensor):
            for pair in (parts[:2], parts[2:]):
                assert_same(torch.cat([part.to_local() for part in pair]), expected, fqn)
        else:
            for part in parts:
                assert_same(part, expected, fqn)


def test_the_same_input_gives_the_same_bytes(corpus: Any, tmp_path: Path) -> None:
    case = corpus["fsdp2_dcp_w2"]
    for name in ("a", "b"):
        ckptmap.convert(case.path, tmp_path / name, to="fsdp2-ranks", world_size=2)
    one, other = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("a", "b")
    )
    assert len(one) >= 2 and one == other


# ------------------------------------------------------------------------------ live models


@pytest.mark.parametrize("world", [2, 4])
def test_live_models_load_them(world: int, corpus: Any, plan_file: Path, tmp_path: Path) -> None:
    """`torch.load(weights_only=True)`, `load_state_dict`, `set_optimizer_state_dict`, a step."""
    case = corpus["fsdp2_dcp_optimizer_w2"]
    truth = tmp_path / "truth.pt"
    torch.save({"model": case.truth, "optimizer": case.optimizer}, truth)
    kinds = {2: {"plain": {"world_size": 2}, "tp": options("tp", plan_file)},
             4: {"hsdp": MESHES["hsdp"], "plain": {"world_size": 4},
                 "fsdp-tp": options("fsdp-tp", plan_file)}}[world]  # fmt: skip
    jobs = []
    for kind, asked in kinds.items():
        keep = "drop" if kind == "tp" else "keep"
        folder = tmp_path / kind
        ckptmap.convert(case.path, folder, to="fsdp2-ranks", optimizer=keep, **asked)
        jobs += [kind, str(folder), str(truth)]
    outputs = run_ranks("tests.ranks.rank_files", world, jobs, timeout=120.0)
    for output in outputs:
        assert output.stdout.count(" ok") == len(kinds)


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("asked", "code", "match"),
    [
        ({"to": "fsdp2", "mesh": "shard"}, "CKM204", "'shard' is not NAME=SIZE"),
        ({"to": "fsdp2", "mesh": "shard=0"}, "CKM204", "'shard=0' is not NAME=SIZE"),
        ({"to": "fsdp2", "mesh": "shard=2,shard=2"}, "CKM204", "expected one of each kind"),
        ({"to": "fsdp2", "mesh": "dp=2,fsdp=2"}, "CKM204", "expected one of each kind"),
        ({"to": "fsdp2", "mesh": "shard=2,replicate=2"}, "CKM204", "expected replicate, then"),
        ({"to": "fsdp2-ranks", "mesh": "shard=2", "world_size": 3}, "CKM204", "has 2 ranks, --wo"),
        ({"to": "fsdp2-ranks", "world_size": 0}, "CKM204", "--world-size 0: expected 1 to"),
        ({"to": "hf", "mesh": "shard=2"}, "CKM204", "setup hf is not cut over ranks"),
        ({"to": "fsdp2", "mesh": "dp=2,tp=2"}, "CKM204", "has dim tp, and no --tp-plan is given"),
        ({"to": "fsdp2", "mesh": "dp=2", "tp_plan": "?"}, "CKM204", "has no dim tp, and a --tp-p"),
        ({"to": "fsdp2", "mesh": "tp=2", "tp_plan": "/no/file"}, "CKM201", "/no/file: .*No such"),
    ],
)
def test_a_mesh_that_cannot_be(
    asked: dict[str, Any], code: str, match: str, corpus: Any, plan_file: Path
) -> None:
    if asked.get("tp_plan") == "?":
        asked = {**asked, "tp_plan": str(plan_file)}
    with pytest.raises(PlanError, match=match) as caught:
        ckptmap.plan(corpus["fsdp2_dcp_w2"].path, **asked)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x = ", "plan.toml: "),
        ('"w" = "sideways"', "w: 'sideways' is none of colwise, rowwise"),
        ("", "holds no patterns"),
        ("[1]", "1: {} is none of colwise"),
    ],
)
def test_a_plan_that_cannot_be_read(text: str, match: str, corpus: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(PlanError, match=match) as caught:
        ckptmap.plan(
            corpus["fsdp2_dcp_w2"].path, "fsdp2", mesh="tp=2", tp_plan=str(tmp_path / "plan.toml")
        )
    assert caught.value.code == "CKM201"


def test_a_pattern_of_nothing_is_refused(corpus: Any, tmp_path: Path) -> None:
    """A misspelt plan would replicate over tp what was to be cut."""
    (tmp_path / "plan.json").write_text('{"model.layers.*.mlp.up_proj": "colwise"}')
    with pytest.raises(PlanError, match=r"model\.layers\.\*\.mlp\.up_proj matches no tensor") as e:
        ckptmap.plan(
            corpus["fsdp2_dcp_w2"].path, "fsdp2", mesh="tp=2", tp_plan=str(tmp_path / "plan.json")
        )
    assert e.value.code == "CKM206"


def test_quantized_tensors_are_refused(corpus: Any, tmp_path: Path) -> None:
    name = names(encoding="nf4", world_size=1)[0]
    with pytest.raises(PlanError, match="fsdp2-ranks holds dense tensors only") as caught:
        ckptmap.plan(corpus[name].path, "fsdp2-ranks", world_size=2)
    assert caught.value.code == "CKM203"
    report = ckptmap.convert(
        corpus[name].path, tmp_path / "out", to="fsdp2-ranks-bf16", world_size=2
    )
    assert report.tensors


# ------------------------------------------------------------------------------ arithmetic

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.data())
def test_boxes_are_those_of_torch(
    shape: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject
) -> None:
    """Any placement in which no two mesh dims cut the same tensor dim."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate, Shard

    free: list[int | None] = [None, *range(len(shape))]
    shards = []
    for _ in sizes:
        shard = data.draw(st.sampled_from(free))
        free = [dim for dim in free if dim is None or dim != shard]
        shards.append(shard)
    mesh = tuple((f"d{axis}", size) for axis, size in enumerate(sizes))
    boxes = boxes_by_rank(Placement(mesh, tuple(shards)), TensorInfo(shape, "float32"))
    kinds = [Replicate() if dim is None else Shard(dim) for dim in shards]
    for rank, box in enumerate(boxes):
        at = [int(n) for n in torch.unravel_index(torch.tensor(rank), sizes)]
        local, offsets = _compute_local_shape_and_global_offset(
            torch.Size(shape), sizes, at.__getitem__, kinds
        )
        assert box.sizes == tuple(local)
        if box.numel:
            assert box.offsets == tuple(offsets)


def test_rows_that_torch_cannot_describe_are_refused() -> None:
    """9 rows over dp 4 x tp 2 (pytorch#161368): rank 6 holds nothing, metadata say row 8."""
    mesh = (("dp", 4), ("tp", 2))
    with pytest.raises(PlanError, match="9 rows over dp 4 x tp 2: torch's placements") as caught:
        boxes_by_rank(Placement(mesh, (0, 0)), TensorInfo((9, 3), "float32"))
    assert caught.value.code == "CKM504"
    assert len(boxes_by_rank(Placement(mesh, (0, 0)), TensorInfo((16, 3), "float32"))) == 8


def test_what_the_source_did_not_cut_is_a_buffer() -> None:
    mesh = Mesh().over(None, None, 2, [])
    table = TensorInfo((128, 64), "float32")
    assert mesh.placement("rope.cos", table, whole=True).shards is None
    assert mesh.placement("rope.cos", table, whole=False).shards == (0,)
    assert mesh.placement("rope.inv_freq", table, whole=False).shards is None
    assert mesh.placement("norm.weight", table, whole=True).shards == (0,)
    assert mesh.placement("causal", TensorInfo((7, 9), "bool"), whole=False).shards is None
    assert mesh.placement("step", TensorInfo((), "float32"), whole=False).shards is None
