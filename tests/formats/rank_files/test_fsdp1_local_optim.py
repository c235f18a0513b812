"""`fsdp1-local` with optimizer state: a live FSDP1 run goes on from it, and it reads back by FQN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.checkpoint.fsdp1_wrapping import units_of
from ckptmap.errors import CkptmapError, PlanError, RunError
from ckptmap.protocols.file_systems import Mounts
from tests.corpus.models import Tiny, moments, tiny, trained
from tests.corpus.ranks import run_ranks
from tests.ranks.fsdp1_local_resume import NESTED_UNITS, UNITS
from tests.support.same_tensors import assert_same

KINDS = [(orig, nested) for orig in (False, True) for nested in (False, True)]


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, converted and went on from."""
    folder = tmp_path_factory.mktemp("local")
    done = run_ranks("tests.ranks.fsdp1_local_resume", 2, [str(folder)], 120.0)
    assert done[0].stdout.count("went on") == len(KINDS)
    return folder


def source(path: Path, grouped: bool = False) -> tuple[Path, Tiny, torch.optim.AdamW]:
    """A training run of one process, saved whole."""
    model, optimizer = trained(grouped)
    torch.save({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, path)
    return path, model, optimizer


def convert(src: Path, dst: Path, orig: bool = False, **options: Any) -> ckptmap.Report:
    options = {"world_size": 2, "fsdp_units": UNITS, "use_orig_params": orig, **options}
    return ckptmap.convert(src, dst, to="fsdp1-local", **options)


def assert_moments(ckpt: ckptmap.Checkpoint, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    assert set(ckpt.optimizer) == set(expected)
    for fqn, states in expected.items():
        assert set(ckpt.optimizer[fqn]) == set(states)
        for state, value in states.items():
            assert_same(ckpt.optimizer[fqn][state].read(), value, f"{fqn} {state}")


# ------------------------------------------------------------------------------- live


def test_a_live_run_goes_on(went_on: Path) -> None:
    """Weights and optimizer of each rank as torch holds them, and equal after two more steps."""
    for orig, nested in KINDS:
        names = {file.name for file in (went_on / f"{orig}-{nested}" / "local").glob("*.pt")}
        kinds = ("model", "optim")
        assert names == {f"{kind}_world_size_2_rank_{r}.pt" for kind in kinds for r in (0, 1)}


def test_a_live_run_of_three_ranks_goes_on(tmp_path: Path) -> None:
    done = run_ranks("tests.ranks.fsdp1_local_resume", 3, [str(tmp_path)], 120.0)
    assert done[0].stdout.count("went on") == len(KINDS)


@pytest.mark.parametrize(("orig", "nested"), KINDS)
def test_it_reads_back_whole(orig: bool, nested: bool, went_on: Path, tmp_path: Path) -> None:
    """By name, and to one file and on."""
    folder = went_on / f"{orig}-{nested}"
    assert ckptmap.verify(folder / "local", against=folder / "full.pt").ok
    ckptmap.convert(folder / "local", tmp_path / "back.pt", to="full")
    truth = torch.load(folder / "full.pt", weights_only=False)
    with ckptmap.open(tmp_path / "back.pt") as back:
        for fqn, value in truth["model"].items():
            assert_same(back[fqn].read(), value, fqn)
        assert_moments(back, truth["optimizer"]["state"])
        groups = [set(group["params"]) for group in truth["optimizer"]["param_groups"]]
        assert [set(group["params"]) for group in back.optimizer_groups] == groups


# ------------------------------------------------------------------------------- units of --like


@pytest.mark.parametrize(("orig", "nested"), KINDS)
def test_units_come_from_a_local_checkpoint(
    orig: bool, nested: bool, went_on: Path, tmp_path: Path
) -> None:
    """torch's own LOCAL_STATE_DICT, which has no shapes: the order is the source's own."""
    src, _, _ = source(tmp_path / "src.pt")
    convert(src, tmp_path / "told", orig, fsdp_units=NESTED_UNITS if nested else UNITS)
    like = str(went_on / f"{orig}-{nested}")
    found = units_of(like, Mounts())
    assert found is not None and found.named is orig and len(found.modules) == (10 if nested else 4)
    ckptmap.convert(src, tmp_path / "like", to="fsdp1-local", world_size=2, like=like)
    files = [*(tmp_path / "told").glob("*.pt")]
    assert len(files) >= 2
    for file in files:
        assert (tmp_path / "like" / file.name).read_bytes() == file.read_bytes()


def test_units_come_from_our_own_output(went_on: Path, tmp_path: Path) -> None:
    """With the order of the model, which the safetensors of the source have not."""
    src, _, _ = source(tmp_path / "src.pt")
    ckptmap.convert(src, tmp_path / "hf", to="hf")
    like = str(went_on / "True-True" / "local")
    ckptmap.convert(tmp_path / "hf", tmp_path / "out", to="fsdp1-local", world_size=2, like=like)
    convert(src, tmp_path / "told", True, fsdp_units=NESTED_UNITS, optimizer="drop")
    files = [*(tmp_path / "told").glob("*.pt")]
    assert len(files) >= 2
    for file in files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    local = str(went_on / "True-True")
    with pytest.raises(PlanError, match="does not tell the order"):
        ckptmap.plan(tmp_path / "hf", "fsdp1-local", world_size=2, like=local)


def test_units_of_what_shows_none(tmp_path: Path) -> None:
    src, _, _ = source(tmp_path / "src.pt")
    assert units_of(str(src), Mounts()) is None
    ckptmap.convert(src, tmp_path / "ranks", to="fsdp2-ranks", world_size=2)
    assert units_of(str(tmp_path / "ranks"), Mounts()) is None


# ------------------------------------------------------------------------------- other sources


def test_state_by_name_of_another_world_size(tmp_path: Path) -> None:
    """From DCP of three ranks to flat shards of four, and back to one."""
    src, model, optimizer = source(tmp_path / "src.pt", grouped=True)
    like = tmp_path / "like.pt"
    torch.save(dict(tiny().state_dict()), like)
    ckptmap.convert(src, tmp_path / "dcp", to="fsdp2", world_size=3)
    convert(tmp_path / "dcp", tmp_path / "out", True, world_size=4, like=str(like))
    with ckptmap.open(tmp_path / "out") as back:
        assert_moments(back, moments(model, optimizer))
        assert [g["weight_decay"] for g in back.optimizer_groups] == [0.1, 0.0]


def test_parameters_without_state(tmp_path: Path) -> None:
    """Frozen: listed in a group, or in none."""
    model = tiny()
    frozen = [n for n in dict(model.named_parameters()) if "mlp" in n or n == "embed.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    left = [(n, p) for n, p in model.named_parameters() if n != "embed.weight"]
    optimizer = torch.optim.AdamW(left)
    model(torch.arange(8)[None]).backward()
    optimizer.step()
    src = tmp_path / "src.pt"
    torch.save({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, src)
    convert(src, tmp_path / "out", True)
    with ckptmap.open(tmp_path / "out") as back:
        assert_moments(back, {n: dict(optimizer.state[p]) for n, p in left if p in optimizer.state})
        assert set(back.optimizer_groups[0]["params"]) == {name for name, _ in left}
    with pytest.raises(PlanError, match=r"has no exp_avg, others of its flat parameter") as caught:
        convert(src, tmp_path / "flat")
    assert caught.value.code == "CKM504"


@pytest.mark.parametrize("named", [True, False], ids=["param_names", "index"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_optimizer_that_keeps_no_state(world_size: int, named: bool, tmp_path: Path) -> None:
    """SGD without momentum has its groups alone, which list flat parameters."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "src.pt")
    convert(tmp_path / "src.pt", tmp_path / "local", world_size=world_size)
    files = [*(tmp_path / "local").glob("optim_*.pt")]
    assert len(files) == world_size
    for file in files:
        saved = torch.load(file)
        assert saved["state"] == {} and len(saved["param_groups"][0]["params"]) == 4
        if not named:  # as torch saves it, unless the optimizer was given names
            (tmp_path / "local" / "ckptmap.manifest.json").unlink(missing_ok=True)
            del saved["param_groups"][0]["param_names"]
            torch.save(saved, file)
    if named:
        assert ckptmap.verify(tmp_path / "local", against=tmp_path / "src.pt").ok
    like = {} if named else {"like": tmp_path / "src.pt"}
    ckptmap.convert(
        tmp_path / "local", tmp_path / "back.pt", to="full", optimizer_keys="index", **like
    )  # type: ignore[arg-type]
    back = torch.load(tmp_path / "back.pt")
    found = torch.optim.SGD(tiny().parameters(), lr=7.0)
    found.load_state_dict(back["optimizer"])
    assert found.param_groups[0]["lr"] == 0.1
    for fqn, value in model.state_dict().items():
        assert_same(back["model"][fqn], value, fqn)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.25), foreach=False)
    model(torch.arange(8)[None]).backward()
    optimizer.step()
    src = tmp_path / "src.pt"
    torch.save({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, src)
    convert(src, tmp_path / "out")
    rank = torch.load(tmp_path / "out" / "optim_world_size_2_rank_1.pt", weights_only=True)
    assert_same(rank["param_groups"][0]["lr"], torch.tensor(0.25), "lr")
    assert rank["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert rank["param_groups"][0]["param_names"][:2] == ["_flat_param", "layers.0._flat_param"]


# ------------------------------------------------------------------------------- refused


def refused(match: str, src: Path, tmp_path: Path, **options: Any) -> CkptmapError:
    with pytest.raises(CkptmapError, match=match) as caught:
        convert(src, tmp_path / "refused", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "refused").exists()
    return caught.value


def spoiled(path: Path, spoil: Any) -> Path:
    src, _, _ = source(path)
    state = torch.load(src)
    spoil(state["optimizer"]["state"][5])
    torch.save(state, src)
    return src


def test_groups_that_part_a_unit(tmp_path: Path) -> None:
    src, _, _ = source(tmp_path / "src.pt", grouped=True)
    error = refused("in parameter group 1, .* of the same flat parameter", src, tmp_path)
    assert error.code == "CKM504" and "--use-orig-params" in error.hint
    convert(src, tmp_path / "out", True)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda s: s.update(exp_avg=s["exp_avg"].half()),
            "exp_avg is a float16 tensor, but a float32 tensor for",
        ),
        (lambda s: s.update(step=7), "step is 7, but a float32 scalar for"),
        (lambda s: s.pop("exp_avg_sq"), "has no exp_avg_sq, others of its flat parameter"),
        (lambda s: s.update(exp_avg=torch.zeros(3)), "has shape .3., expected its weight"),
    ],
)
def test_state_that_no_flat_parameter_can_have(spoil: Any, match: str, tmp_path: Path) -> None:
    assert refused(match, spoiled(tmp_path / "src.pt", spoil), tmp_path).code == "CKM504"


def test_step_counts_that_differ(tmp_path: Path) -> None:
    """A flat parameter has one: found by comparing, in the run; parameters have their own."""
    src = spoiled(tmp_path / "src.pt", lambda state: state["step"].add_(1))
    error = refused(r"step .*differ|differ.* step", src, tmp_path)
    assert isinstance(error, RunError) and "--use-orig-params" in error.hint
    convert(src, tmp_path / "out", True)
    assert ckptmap.verify(tmp_path / "out", against=src).ok


def test_more_files_without_an_optimizer_are_not_written(tmp_path: Path) -> None:
    src, _, _ = source(tmp_path / "src.pt")
    convert(src, tmp_path / "out", optimizer="drop")
    assert not list((tmp_path / "out").glob("optim*"))


def test_a_root_is_its_own(tmp_path: Path) -> None:
    src, _, _ = source(tmp_path / "src.pt")
    assert (
        refused(
            "--root net: fsdp1-local writes weights and optimizer into separate files",
            src,
            tmp_path,
            root="net",
        ).code
        == "CKM205"
    )
