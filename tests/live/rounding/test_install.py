"""Rounding by position in torchao's optimizers: what it does to a run, and what it cannot be put into."""

from __future__ import annotations

import copy
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import ArgumentError, LoadError
from ckptmap.live.rounding import install, torchao_source
from ckptmap.live.rounding.position_bits import key_of, round_at
from ckptmap.live.rounding.record import record_of
from tests.support.resume_optimizers import ROUNDING, SR, same_state, torchao

NAMES = ("0.weight", "0.bias", "1.weight")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def net(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second = nn.Linear(64, 96), nn.Linear(96, 5, bias=False)
    return nn.Sequential(first, second).to(dtype)


def adamw(params: Any, **options: Any) -> Any:
    return torchao("_AdamW", **{**SR, **options})(params)


def grads(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    """Steps first..last-1, while the random generators go elsewhere each time."""
    for step in range(first, last):
        torch.seed()
        grads(model, step)
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def trained(
    steps: int = 5, build: Callable[[Any], Any] = adamw, seed: int = 3
) -> tuple[Any, Any, Any]:
    model = net()
    optimizer = build(model.parameters())
    rounding = install(optimizer, seed=seed, model=model)
    train(model, optimizer, 0, steps)
    return model, optimizer, rounding


# ------------------------------------------------------------------------------- what is rounded


@pytest.mark.parametrize("name", ROUNDING)
def test_only_the_seed_decides(name: str) -> None:
    one, two, other = (trained(build=ROUNDING[name], seed=seed) for seed in (3, 3, 4))
    assert equal(values(one[0]), values(two[0])) and not same_state(one[1], two[1])
    assert not equal(values(one[0]), values(other[0]))


def test_it_is_torchaos_arithmetic_with_other_bits() -> None:
    """What torchao would have stored in float32, rounded by the words of step, name and position."""
    wide, model = net(dtype=torch.float32), net()
    for into, source in zip(wide.parameters(), model.parameters(), strict=True):
        into.data.copy_(source.data)
    exact, optimizer = torchao("_AdamW")(wide.parameters()), adamw(model.parameters())
    install(optimizer, seed=3, model=model)
    grads(model, 0)
    for into, source in zip(wide.parameters(), model.parameters(), strict=True):
        into.grad = source.grad.float()  # type: ignore[union-attr]
    exact.step()
    optimizer.step()
    for fqn, want, found in zip(NAMES, wide.parameters(), model.parameters(), strict=True):
        key, start = key_of(3, 1, fqn).tensors(), torch.zeros(1, dtype=torch.int32)
        assert torch.equal(found, round_at(want.detach(), start, want.numel(), key)), fqn
        assert not torch.equal(found, want.to(torch.bfloat16)), fqn


def test_small_updates_arrive_on_average() -> None:
    """An update of an eighth of the gap between two numbers is lost by nearest rounding, for ever."""
    weight = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    optimizer = torchao("_AdamW", weight_decay=0.0, **SR)([weight])
    optimizer.param_groups[0]["lr"].fill_(2**-11)  # below 1 the gap is 2^-8
    install(optimizer, seed=0, fqns={"weight": weight})
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert abs(weight.double().mean().item() - (1 - 64 * 2**-11)) < 5 * 2**-8 * 64**0.5 / 2**7


def test_weights_in_float32_are_not_rounded() -> None:
    model = net()
    model[1].float()
    optimizer, plain = adamw(model.parameters()), copy.deepcopy(model)
    theirs = adamw(plain.parameters())
    install(optimizer, seed=3, model=model)
    train(model, optimizer, 0, 3)
    train(plain, theirs, 0, 3)
    assert torch.equal(model[1].weight, plain[1].weight)
    assert not torch.equal(model[0].weight, plain[0].weight)


# ------------------------------------------------------------------------------- odd runs


def test_parameters_without_gradients_and_groups_of_their_own() -> None:
    """Each counts its own steps: which others are stepped, and in which group, changes none of its bits."""
    model = net()
    optimizer = adamw([{"params": [p]} for p in reversed(list(model.parameters()))])
    install(optimizer, seed=3, model=model)
    whole, _, _ = trained(3)
    for step in range(3):
        for name in NAMES:
            grads(model, step)
            for other, param in model.named_parameters():
                param.grad = param.grad if other == name else None
            optimizer.step()
    assert equal(values(model), values(whole))


def test_a_group_that_is_added_later() -> None:
    model = net()
    optimizer = adamw(model[0].parameters())
    install(optimizer, seed=3, model=model)
    optimizer.add_param_group({"params": [model[1].weight]})
    train(model, optimizer, 0, 5)
    assert equal(values(model), values(trained()[0]))
    stranger = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [stranger]})
    grads(model, 5)
    stranger.grad = torch.ones_like(stranger)
    before = values(model)
    with pytest.raises(LoadError, match=r"a parameter \(3,\) has no FQN") as refused:
        optimizer.step()
    assert refused.value.code == "CKM520" and equal(values(model), before)
    model.register_parameter("late", stranger)
    optimizer.step()


def test_names_come_from_the_model_a_mapping_or_the_optimizer() -> None:
    """Wrapped or not, and tied: the first name counts."""
    want, _, _ = trained()
    for how in ("fqns", "named", "compiled", "tied"):
        model: Any = net()
        params: Any = model.named_parameters() if how == "named" else model.parameters()
        optimizer = adamw(params)
        outer: Any = torch.compile(model) if how == "compiled" else model
        if how == "tied":
            model.register_module("again", model[0])
        names = {"fqns": {"fqns": dict(model.named_parameters())}, "named": {}}
        install(optimizer, seed=3, **names.get(how, {"model": outer}))
        train(model, optimizer, 0, 5)
        assert equal(values(model), values(want)), how


def test_a_closure_and_hooks_run_around_the_step() -> None:
    """Clipping in a hook that is registered after the rounding still comes before the step."""
    model, want = net(), net()
    optimizer, theirs = adamw(model.parameters()), adamw(want.parameters())
    install(optimizer, seed=3, model=model)
    install(theirs, seed=3, model=want)

    def closure() -> float:
        assert torch.is_grad_enabled()
        grads(model, 0)
        return 1.25

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    assert optimizer.step(closure) == 1.25
    optimizer.register_step_pre_hook(clip)
    grads(model, 1)
    optimizer.step()
    train(want, theirs, 0, 1)
    grads(want, 1)
    nn.utils.clip_grad_norm_(want.parameters(), 0.5)
    theirs.step()
    assert equal(values(model), values(want))


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_scheduler_goes_along(when: str) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rounding = install(optimizer, seed=3, model=model)
    if when == "between":
        rounding.uninstall()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        rounding = install(optimizer, seed=3, model=model)
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, optimizer, step, step + 1)
            scheduler.step()
    again = net()
    theirs = adamw(again.parameters())
    install(theirs, seed=3, model=again)
    for step in range(3):
        train(again, theirs, step, step + 1)
        theirs.param_groups[0]["lr"].mul_(0.5)
    assert equal(values(model), values(again))
    rounding.uninstall()
    torch.manual_seed(0)
    grads(model, 9)
    optimizer.step()
    assert record_of(optimizer) is None and optimizer.state[model[0].weight]["step"] == 4


def test_uninstalled_it_is_torchaos_own_again() -> None:
    model, plain = net(), net()
    optimizer, theirs = adamw(model.parameters()), adamw(plain.parameters())
    before = dict(vars(optimizer))
    with install(optimizer, seed=3, model=model):
        assert vars(optimizer).keys() != before.keys()
    assert vars(optimizer).keys() == before.keys()
    for one, its in ((model, optimizer), (plain, theirs)):
        torch.manual_seed(0)
        grads(one, 0)
        its.step()
    assert equal(values(model), values(plain))


def test_a_step_that_somebody_kept_is_noticed() -> None:
    """`optimizer.step` from before goes around the rounding."""
    model = net()
    optimizer = adamw(model.parameters())
    kept = optimizer.step
    install(optimizer, seed=3, model=model)
    train(model, optimizer, 0, 2)
    grads(model, 2)
    with pytest.raises(LoadError, match="its own step was called"):
        kept()


def test_a_step_counts_beyond_256_in_a_process_of_16_bits() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, optimizer, _ = trained(1)
        state = optimizer.state[model[0].weight]
        assert state["step"].dtype == torch.float32
        state["step"] = torch.tensor(256.0, dtype=torch.bfloat16)  # as torchao would have counted
        grads(model, 1)
        optimizer.step()
        assert state["step"].item() == 257
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------- saved and loaded


@pytest.mark.parametrize("name", ROUNDING)
def test_state_dicts_of_torch_go_on(name: str) -> None:
    """Without ckptmap: the step is in the state; the seed is the caller's to keep. (torchao's quantized
    moments do not know amsgrad.)"""
    build = torchao(ROUNDING_CLASSES[name], **SR, amsgrad=name == "ao")
    want, whole, _ = trained(6, build)
    model, optimizer, _ = trained(3, build)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    again = net(1)
    theirs = build(again.parameters())
    install(theirs, seed=3, model=again)
    again.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    train(again, theirs, 3, 6)
    assert equal(values(again), values(want)) and not same_state(theirs, whole)


ROUNDING_CLASSES = {"ao": "_AdamW", "ao8": "AdamW8bit", "ao4": "AdamW4bit", "aofp8": "AdamWFp8"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer, _ = trained(3)
    ckptmap.save(tmp_path / "three", model, optimizer, step=3).wait()
    return tmp_path / "three"


def test_save_and_load_carry_seed_and_step(saved: Path) -> None:
    want, _, _ = trained(6)
    model = net(1)
    optimizer = adamw(model.parameters())
    rounding = install(optimizer, seed=99, model=model)
    report = ckptmap.load(saved, model, optimizer, exact=True)
    assert report.rounding == "by position, seed 3, was 99" and rounding.seed == 3
    assert report.streams == "restored" and "stochastic rounding: by position" in str(report)
    train(model, optimizer, 3, 6)
    assert equal(values(model), values(want))


def test_a_run_that_rounds_in_another_way_is_said(saved: Path, tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    said = "optimizer rounds: was by position, version 1, is True"
    assert said in ckptmap.load(saved, model, optimizer).inexact
    with pytest.raises(LoadError, match=said) as refused:
        ckptmap.load(saved, model, optimizer, exact=True)
    assert refused.value.code == "CKM507"
    ckptmap.save(tmp_path / "own", model, optimizer).wait()
    install(optimizer, seed=5, model=model)
    report = ckptmap.load(tmp_path / "own", model, optimizer)
    assert "optimizer rounds: was True, is by position, version 1" in report.inexact
    assert report.rounding == "by position, seed 5; the checkpoint has none"


# ------------------------------------------------------------------------------- refused


def refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    def other(build: Callable[[Any], Any]) -> Callable[[], Any]:
        model = net()
        return lambda: install(build(model.parameters()), seed=0, model=model)

    def stepping(params: Any) -> Any:
        optimizer = adamw(params)
        optimizer.step = lambda closure=None: None
        return optimizer

    def twice(params: Any) -> Any:
        optimizer = adamw(params)
        install(
            optimizer,
            seed=0,
            fqns={str(n): p for n, p in enumerate(optimizer.param_groups[0]["params"])},
        )
        return optimizer

    def subclass(params: Any) -> Any:
        from torchao.optim import _AdamW

        class Other(_AdamW):  # type: ignore[misc]
            def step(self, closure: Any = None) -> Any: ...

        return Other(params, **SR)

    def several() -> Any:
        optimizers: Any = {name: adamw(net().parameters()) for name in "ab"}
        return install(optimizers, seed=0, model=net())

    def stranger() -> Any:
        return install(adamw(net().parameters()), seed=0, model=net())

    return {
        "torch": (other(torch.optim.AdamW), "AdamW is none of torchao's Adam optimizers"),
        "nearest": (other(torchao("AdamW8bit")), "AdamW8bit does not round stochastically"),
        "replaced": (other(stepping), "something has replaced its step"),
        "subclass": (other(subclass), "something has replaced its step"),
        "several": (several, "several optimizers: a, b"),
        "twice": (other(twice), "has it already"),
        "stranger": (stranger, "has no FQN"),
        "quantized": (quantized, "0.weight is a .*, which draws random bits of its own"),
    }


def quantized() -> Any:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = net()
    quantize_(model, int8_weight_only_quantized_training())
    return install(adamw(model.parameters()), seed=0, model=model)


@pytest.mark.parametrize("name", sorted(refusals()))
def test_what_it_cannot_be_put_into(name: str) -> None:
    call, text = refusals()[name]
    with pytest.raises(LoadError, match=text) as refused:
        call()
    assert refused.value.code == "CKM520"


def test_arguments_that_mean_nothing() -> None:
    model = net()
    optimizer = adamw(model.parameters())
    for arguments, text in (
        ({"seed": "7", "model": model}, "an integer"),
        ({"seed": 7}, "expected one of them, got none"),
        ({"seed": 7, "model": model, "fqns": {}}, "leave out one|expected one of them"),
        ({"seed": 7, "model": 5}, "model="),
    ):
        with pytest.raises(ArgumentError, match=text):
            install(optimizer, **arguments)
    assert record_of(optimizer) is None and "step" not in vars(optimizer)


def test_another_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose arithmetic or loop says something else; comments and layout do not count."""
    from torchao.optim import adam

    model = net()
    monkeypatch.setattr(torchao_source, "KNOWN", frozenset({"another"}))
    with pytest.raises(
        LoadError, match=r"torchao 0\..*: its optimizers are not as this ckptmap knows"
    ):
        install(adamw(model.parameters()), seed=0, model=model)
    monkeypatch.undo()
    monkeypatch.delattr(adam, "single_param_adam")
    with pytest.raises(LoadError, match="AttributeError") as refused:
        install(adamw(model.parameters()), seed=0, model=model)
    assert refused.value.code == "CKM520"


def test_layout_of_code_does_not_count(tmp_path: Path) -> None:
    texts = ("def f(a):\n    return a + 1\n", "def f(a):  # said\n\n        return a+1\n")
    one, same, other = (
        _function(tmp_path / f"layout_{number}.py", text)
        for number, text in enumerate((*texts, texts[0].replace("1", "2")))
    )
    assert torchao_source.digest([one]) == torchao_source.digest([same])
    assert torchao_source.digest([one]) != torchao_source.digest([other])


def _function(file: Path, text: str) -> Any:
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f
