"""Raw optimizer state of FSDP1's ranks: flat shards become the state of each parameter, by FQN."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.formats.torch_save.module_metadata import fsdp1_units
from ckptmap.formats.torch_save.reader import load
from ckptmap.storage.files import Files
from tests.corpus import Case
from tests.corpus.ranks import run_ranks
from tests.corpus.writers_fsdp1_local import RAW
from tests.formats.rank_files.test_fsdp1 import assert_is, like
from tests.support.same_tensors import assert_same

REFUSED = ("raw_sharded_lost_w2",)
RESOLVED = sorted(set(RAW) - set(REFUSED))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("raw")

    def get(name: str) -> Case:
        spec = RAW[name]
        out = folder / f"world{spec.world_size}"
        if not out.exists():
            args = ["--out", str(out), "--table", "raw"]
            run_ranks("tests.corpus.build_local", spec.world_size, args, 120.0)
        return Case(spec, out)

    return get


def assert_state_is(ckpt: ckptmap.Checkpoint, case: Case) -> None:
    assert case.optimizer and set(ckpt.optimizer) == set(case.optimizer)
    for fqn, states in case.optimizer.items():
        assert set(ckpt.optimizer[fqn]) == set(states)
        for state, value in states.items():
            assert_same(ckpt.optimizer[fqn][state].read(), value, f"{fqn} {state}")


@pytest.mark.parametrize("name", RESOLVED)
def test_flat_state_is_keyed_by_fqn(name: str, raw: Callable[[str], Case], tmp_path: Path) -> None:
    """As it is, and through a plan, its coverage proof and its comparison of replicas."""
    case = raw(name)
    known = like(case, tmp_path / "like.pt")
    with ckptmap.open(case.path, like=known) as ckpt:
        assert not ckpt.optimizer_by_index
        assert ckpt.optimizer_order == case.spec.order
        assert_is(ckpt, case)
        assert_state_is(ckpt, case)
        listed = [fqn for group in ckpt.optimizer_groups for fqn in group["params"]]
        assert set(listed) == set(case.optimizer) and ckpt.optimizer_groups[0]["lr"] == 1e-2
        ckptmap.convert(ckpt, tmp_path / "dcp", to="fsdp2", world_size=3)
    with ckptmap.open(tmp_path / "dcp") as back:
        assert_is(back, case)
        assert_state_is(back, case)


@pytest.mark.parametrize("name", REFUSED)
def test_unresolved_state_is_refused_in_one_line(
    name: str, raw: Callable[[str], Case], tmp_path: Path
) -> None:
    """Sharded weights do not say which of them make a flat parameter; the list of modules does."""
    case = raw(name)
    with pytest.raises(PlanError, match=r"flat shards.*--optimizer drop") as caught:
        ckptmap.convert(case.path, tmp_path / "out", to="full")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with ckptmap.open(case.path) as ckpt:
        (note,) = (note for note in ckpt.notes if "cannot be read: its 4 parameters" in note)
        assert "which list no wrapped modules" in note and note.endswith("with --like")
    for shown in ("raw_sharded_flat_w2", "raw_flat_w2"):  # the list, and the flat parameters
        with ckptmap.open(case.path, like=raw(shown).path) as ckpt:
            assert_state_is(ckpt, case)
    with ckptmap.open(case.path, like=like(case, tmp_path / "like.pt")) as ckpt:
        assert not ckpt.optimizer
    ckptmap.convert(case.path, tmp_path / "out.pt", to="full", optimizer="drop")
    with ckptmap.open(tmp_path / "out.pt") as back:
        assert_is(back, case)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, {}),
        (5, {}),
        ({3: 1, "": {}, "layers": {}}, {}),
        ({"_fsdp_wrapped_module": {}, "a._fsdp_wrapped_module.b": {}}, {("model",): ("",)}),
        ({"a._fsdp_wrapped_module": {}}, {("model",): ("a",)}),
    ],
)
def test_modules_that_a_raw_dict_lists(
    listed: object, expected: dict[tuple[str, ...], tuple[str, ...]], tmp_path: Path
) -> None:
    """What else stands there lists nothing."""
    state: Any = OrderedDict(w=torch.zeros(2))
    state._metadata = listed
    torch.save({"model": state, "step": 3}, tmp_path / "a.pt")
    assert fsdp1_units(load(Files(), str(tmp_path / "a.pt")).tree) == expected


def test_state_of_another_model_is_refused(raw: Callable[[str], Case], tmp_path: Path) -> None:
    """The optimizer's files of the tied model: as many flat parameters, one of another size."""
    case, other = raw("raw_flat_tied_w2"), raw("raw_flat_w2")
    path = Path(shutil.copytree(case.path, tmp_path / "ranks"))
    for file in other.path.glob("optim_*"):
        shutil.copy(file, path)
    known = like(case, tmp_path / "like.pt")
    with ckptmap.open(path, like=known) as ckpt:
        assert not ckpt.optimizer
        with pytest.raises(PlanError, match="do not fit"):
            ckptmap.convert(ckpt, tmp_path / "out", to="full")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda state: state["exp_avg_sq"].resize_(5), "1.exp_avg_sq holds .* elements, expected"),
        (lambda state: state.update(exp_avg=state["exp_avg"].half()), "of different kinds"),
        (lambda state: state.update(step=None, exp_avg=7), "do not fit its order"),
        (lambda state: state["step"].add_(1), "step.*differs|differs.*step"),
    ],
)
def test_ranks_that_disagree_are_refused(
    spoil: Callable[[dict[str, torch.Tensor]], object],
    match: str,
    raw: Callable[[str], Case],
    tmp_path: Path,
) -> None:
    case = raw("raw_flat_w2")
    path = Path(shutil.copytree(case.path, tmp_path / "ranks"))
    file = path / "optim_world_size_2_rank_1.pt"
    state = torch.load(file)
    spoil(state["state"][1])
    torch.save(state, file)
    known = like(case, tmp_path / "like.pt")
    with pytest.raises(CkptmapError, match=match) as caught:
        ckptmap.convert(path, tmp_path / "out", to="fsdp2", like=str(known))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
