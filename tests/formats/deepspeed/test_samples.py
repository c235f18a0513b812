"""Checkpoints that DeepSpeed wrote are read as its own functions read them.

`golden/deepspeed` has them, and the script that wrote them. What they must be is what zero_to_fp32.py, or
DeepSpeed's `safe_get_full_optimizer_state`, gave on the run that saved them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ckptmap
from tests.golden import truth
from tests.golden.deepspeed.make_deepspeed import RUNS, STEPS, Run, groups_of, model_of
from tests.golden.truth import under
from tests.support.same_tensors import assert_same

ALL = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)


def opened(samples: Path, run: Run) -> ckptmap.Checkpoint:
    return ckptmap.open(samples / run.name)


@ALL
def test_weights_are_those_of_the_own_script(samples: Path, run: Run) -> None:
    """Buffers and frozen weights keep their dtype, which the script widens."""
    with opened(samples, run) as ckpt:
        expected = truth.weights(samples / run.name)
        assert expected or run.name == "z1-bf16-optimizer"
        for name, value in expected.items():
            assert_same(ckpt[name].read().to(value.dtype), value, name)
        masters = under("masters/", samples / run.name)
        assert masters
        for name, value in masters.items():
            assert_same(ckpt[name].read(), value, name)


@ALL
def test_every_weight_of_the_model_is_there(samples: Path, run: Run) -> None:
    """Those too that the script leaves out: the frozen weights of stage 1."""
    names = list(model_of(run).state_dict())
    if run.exclude_frozen:
        names = [name for name in names if not name.startswith("inner.2.")]
    with opened(samples, run) as ckpt:
        assert list(ckpt) == names
        if run.frozen and not run.exclude_frozen:
            assert_same(ckpt["inner.2.weight"].read(), model_of(run).inner[2].weight.data, "frozen")


@ALL
def test_moments_are_those_of_the_run(samples: Path, run: Run) -> None:
    expected = truth.moments(samples / run.name)
    with opened(samples, run) as ckpt:
        assert set(ckpt.optimizer) == set(expected)
        for name, states in expected.items():
            assert set(ckpt.optimizer[name]) - {"step"} == set(states)
            for state, value in states.items():
                assert_same(ckpt.optimizer[name][state].read(), value, f"{name} {state}")
            if run.optimizer in ("AdamW", "Adagrad"):
                assert_same(ckpt.optimizer[name]["step"].read(), torch.tensor(float(STEPS)), name)


@ALL
def test_groups_hold_the_parameters_that_they_held(samples: Path, run: Run) -> None:
    model = model_of(run)
    name_of: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    expected = [{name_of[p] for p in group["params"]} for group in groups_of(model, run.groups)]
    with opened(samples, run) as ckpt:
        groups = ckpt.optimizer_groups
        assert [set(group["params"]) for group in groups] == expected
        if "elastic" not in run.name:  # that form leaves them out
            assert [group["lr"] for group in groups] == [0.01] * run.groups
        if run.groups == 2 and run.optimizer == "AdamW" and "elastic" not in run.name:
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@ALL
def test_tied_weights_are_one(samples: Path, run: Run) -> None:
    with opened(samples, run) as ckpt:
        assert_tied = ckpt["head.weight"].read().equal(ckpt["embed.weight"].read())
        assert assert_tied is run.tied


@ALL
def test_values_of_the_user_and_of_the_run_are_extra_values(samples: Path, run: Run) -> None:
    with opened(samples, run) as ckpt:
        values = {".".join(map(str, path)): value for path, value in ckpt.plain.items()}
        assert values["epoch"] == 1
        assert values["note.seen"] == [3, 5]
        assert values["deepspeed.global_steps"] == STEPS
        if run.name != "z1-bf16-optimizer":
            scale = values["deepspeed.loss_scaler"]
            assert isinstance(scale, dict)
            assert scale["cur_scale"] == (16 if run.dtype == "fp16" else 1)


def test_tied_weights_of_a_version_that_does_not_name_them(samples: Path, tmp_path: Path) -> None:
    """Before `shared_params`, two names of one storage were all that told."""
    step = shutil.copytree(samples / "z1w3" / "global_step3", tmp_path / "step")
    file = step / "mp_rank_00_model_states.pt"
    tree = torch.load(file, weights_only=False)
    assert tree.pop("shared_params") == {"head.weight": "embed.weight"}
    torch.save(tree, file)
    with ckptmap.open(step) as ckpt, ckptmap.open(samples / "z1w3") as whole:
        assert list(ckpt) == list(whole)
        for name in whole:
            assert_same(ckpt[name].read(), whole[name].read(), name)
