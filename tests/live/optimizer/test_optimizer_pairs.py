"""Every optimizer's state loads into every other: the next step works, the state has the form of the
destination, and 20 more steps end where a run that never switched ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from tests.support.resume_optimizers import ALL, BNB, BNB_OTHERS, ROUNDING, TORCH, same_value

ADAM = ("adamw", "adamw-foreach", "adamw-fused", "adam", *ROUNDING, *BNB)
"""Those that mean the same by exp_avg and exp_avg_sq."""
OTHERS = tuple(name for name in ALL if name not in ADAM)
BEFORE, AFTER = 6, 20


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """One thread, too: two that wait for each other take most of the time of tensors so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(threads)


def run(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A weight that low-bit optimizers quantize, 64 x 64, and small ones that they do not."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    return model, ALL[name](model.parameters())


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Steps of learning a fixed map, over inputs that depend on the step alone; the losses."""
    generator = torch.Generator().manual_seed(99)
    target = torch.randn(64, 8, generator=generator) / 8
    losses = []
    for step in range(first, last):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss: Any = (model(x.bfloat16()).float() - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each optimizer after 6 steps."""
    path = tmp_path_factory.mktemp("pairs")
    for name in ALL:
        model, optimizer = run(name)
        train(model, optimizer, 0, BEFORE)
        ckptmap.save(path / name, model, optimizer, step=BEFORE).wait()
    return path


@pytest.fixture(scope="module")
def never_switched() -> dict[str, float]:
    """Mean loss of the last five of 26 steps."""
    found = {}
    for name in ALL:
        model, optimizer = run(name)
        found[name] = mean(train(model, optimizer, 0, BEFORE + AFTER))
    return found


def mean(losses: list[float]) -> float:
    return sum(losses[-5:]) / 5


def own_form(name: str) -> dict[str, Any]:
    """Types and dtypes of the state that the optimizer makes itself."""
    model, optimizer = run(name)
    train(model, optimizer, 0, 1)
    return forms(model, optimizer)


def forms(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        f"{fqn}.{key}": (type(value).__name__, getattr(value, "dtype", None))
        for fqn, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


@pytest.mark.parametrize("target", ADAM)
def test_adam_to_adam(target: str, folder: Path, never_switched: dict[str, float]) -> None:
    want = own_form(target)
    for source in ADAM:
        model, optimizer = run(target, seed=1)
        report = ckptmap.load(folder / source, model, optimizer, precision="target")
        assert report.state is not None and not report.state.initialised, (source, report)
        losses = train(model, optimizer, BEFORE, BEFORE + AFTER)
        assert forms(model, optimizer) == want, (source, target)
        between = sorted((never_switched[source], never_switched[target]))
        assert between[0] - 0.25 < mean(losses) < between[1] + 0.25, (source, target, between)


ALIKE = (
    {"sgd", "sgd8", "lars8"},
    {"rmsprop", "rmsprop8"},
    {"adagrad", "adagrad8"},
)
"""Those whose one state means the same."""


def carried(source: str, target: str) -> bool:
    """Can the target go on with what the source kept?"""
    if source == target or any({source, target} <= some for some in ALIKE):
        return True
    adam = source in ADAM or source == "ademamix8"  # which keeps Adam's moments, and one more
    return adam and target in {*ADAM, *ALIKE[0], "lion8"}


@pytest.mark.parametrize("target", ALL)
def test_every_other_pair(target: str, folder: Path, never_switched: dict[str, float]) -> None:
    """What another optimizer cannot use begins anew, and is named; its own form is kept."""
    want = own_form(target)
    for source in ALL:
        if source in ADAM and target in ADAM:
            continue  # above
        model, optimizer = run(target, seed=1)
        report = ckptmap.load(folder / source, model, optimizer, precision="target")
        assert report.state is not None
        if carried(source, target):
            assert report.state.loaded and not report.state.initialised, (source, report)
        else:
            assert len(report.state.initialised) == len(list(model.parameters())), (source, report)
            assert any("kept as is" in text for text in report.state.settings), (source, report)
        losses = train(model, optimizer, BEFORE, BEFORE + AFTER)
        assert forms(model, optimizer) == want, (source, target)
        assert mean(losses) < max(never_switched[source], never_switched[target]) + 0.25, source


@pytest.mark.parametrize(("source", "target"), [("sgd", "sgd8"), ("rmsprop8", "rmsprop")])
def test_one_algorithm_in_the_words_of_two_libraries(
    source: str, target: str, folder: Path
) -> None:
    """bitsandbytes calls momentum and alpha a beta."""
    model, optimizer = run(target, seed=1)
    group = optimizer.param_groups[0]
    group |= {"betas": (0.5, 0.0)} if "betas" in group else {"alpha": 0.5}
    group["lr"] = 5.0
    report = ckptmap.load(folder / source, model, optimizer)
    theirs = run(source)[1].param_groups[0]
    first = theirs["momentum"] if source == "sgd" else theirs["betas"][0]
    assert group["lr"] == theirs["lr"]
    assert (group["betas"][0] if "betas" in group else group["alpha"]) == first
    assert report.state is not None and len(report.state.settings) == 2, report.state.settings


def test_nesterov_momentum_into_bitsandbytes_is_reported(tmp_path: Path) -> None:
    model, _ = run("sgd")
    options: Any = {"lr": 1e-2, "momentum": 0.9, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    train(model, optimizer, 0, 1)
    ckptmap.save(tmp_path / "sgd", model, optimizer).wait()
    again, theirs = run("sgd8", seed=1)
    report = ckptmap.load(tmp_path / "sgd", again, theirs)
    assert report.state is not None
    assert any("nesterov: was True, is not known" in text for text in report.state.settings)


@pytest.mark.parametrize("target", ["bnb8", "bnb32"])
def test_bitsandbytes_steps_with_moments_that_were_narrow(target: str, folder: Path) -> None:
    """With a state in bfloat16 its step would do nothing, and say nothing."""
    model, optimizer = run(target, seed=1)
    ckptmap.load(folder / "adamw", model, optimizer, precision="keep")
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, BEFORE, BEFORE + 1)
    for old, param in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, param)
        assert optimizer.state[param]["state1"].dtype in (torch.float32, torch.uint8)


def test_adam_to_sgd_takes_the_average_along(folder: Path) -> None:
    model, optimizer = run("sgd", seed=1)
    report = ckptmap.load(folder / "adamw", model, optimizer)
    assert report.state is not None and report.state.derived
    with ckptmap.open(folder / "adamw") as ckpt:
        for fqn, param in model.named_parameters():
            want = ckpt.optimizer[fqn]["exp_avg"].read() * (1 / (1 - 0.9))
            assert torch.equal(optimizer.state[param]["momentum_buffer"], want), fqn


@pytest.mark.parametrize(
    "name", ["ao8", "ao4", "aofp8", "bnb8", "lamb8", "ademamix8", "lion8", "sgd8", "adagrad8"]
)
def test_codes_of_the_same_scheme_are_copied(name: str, folder: Path) -> None:
    """A round trip through values would change them: torchao's signed codes have no fixed point."""
    model, optimizer = run(name, seed=1)
    report = ckptmap.load(folder / name, model, optimizer)
    again, theirs = run(name)
    train(again, theirs, 0, BEFORE)
    assert report.state is not None and not report.state.recoded
    moments = [key for key in report.state.copied if key.startswith("0.weight.")]
    count = {"ademamix8": 3, "lion8": 1, "sgd8": 1, "adagrad8": 1}.get(name, 2)
    assert len(moments) == count, report.state.copied
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in theirs.state[b].items():
            if name in {
                **BNB,
                **BNB_OTHERS,
            }:  # which draw no random numbers, so that the second run is the first
                assert same_value(optimizer.state[a][key], value), key


def test_the_error_is_measured(folder: Path) -> None:
    """rms of the difference over rms of the values, as said for each moment."""
    model, optimizer = run("ao8", seed=1)
    report = ckptmap.load(folder / "bnb32", model, optimizer)
    assert report.state is not None
    said = {entry.name: entry for entry in report.state.recoded}
    entry = said["0.weight.exp_avg"]
    with ckptmap.open(folder / "bnb32") as ckpt:
        want = ckpt.optimizer["0.weight"]["exp_avg"].read()
    live = optimizer.state[model.get_parameter("0.weight")]["exp_avg"].dequantize()
    error = float((live - want).norm() / want.norm())
    assert entry.error == pytest.approx(error) and 1e-4 < error < 0.05
    assert (entry.stored, entry.live) == ("float32", "adam8bit")
    assert "error" in str(entry) and "recoded" in str(report)


def test_moments_in_codes_are_named_by_their_encoding(folder: Path) -> None:
    """Their values are float32 in both cases."""
    report = ckptmap.load(folder / "bnb8", *run("adamw", seed=1))
    assert "0.weight.exp_avg: bnb8bit becomes bfloat16" in report.inexact
    assert "2.weight.exp_avg: float32 becomes bfloat16" in report.inexact, "it is small"


def test_fp32_moments_for_those_that_can_step_with_them(folder: Path) -> None:
    model, optimizer = run("ao8", seed=1)
    ckptmap.load(folder / "bnb32", model, optimizer, precision="fp32")
    with ckptmap.open(folder / "bnb32") as ckpt:
        for fqn, param in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[param][key], ckpt.optimizer[fqn][key].read())
    train(model, optimizer, BEFORE, BEFORE + 2)


def test_moments_are_not_cast_to_the_parameters_dtype_where_they_need_not_be(folder: Path) -> None:
    """torch's `load_state_dict` casts every floating state to the parameter's dtype."""
    model, optimizer = run("bnb32", seed=1)
    report = ckptmap.load(folder / "bnb32", model, optimizer)
    assert report.state is not None and not report.state.cast
    assert {
        t.dtype for p in model.parameters() for k, t in optimizer.state[p].items() if k != "step"
    } == {torch.float32}


def test_every_optimizer_is_in_the_tables() -> None:
    assert {*ADAM, *OTHERS} == set(ALL) == {*TORCH, *ROUNDING, *BNB, *BNB_OTHERS}
