"""The report of a load says what makes a resume inexact, and `exact=True` refuses it. Names and shapes
that do not match are refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import OptimizerParam
from ckptmap.live.optimizer.stored_state import step_like
from ckptmap.live.optimizer.torch_optim import TorchAdam
from tests.conftest import Device
from tests.corpus.ranks import run_ranks
from tests.support.resume_optimizers import step_at_random, torchao


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


class Small(nn.Module):
    def __init__(self, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.fc = nn.Linear(64, width, dtype=dtype)
        self.out = nn.Linear(width, 4, bias=False, dtype=dtype)


ao8 = torchao("AdamW8bit", bf16_stochastic_round=True)


def stepped(
    model: Any = None, build: Callable[[Any], Any] = ao8, steps: int = 1
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Small() if model is None else model
    optimizer = build(model.parameters())
    step_at_random(model, optimizer, steps)
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "ao8"
    torch.compiler.set_stance("force_eager")
    model, optimizer = stepped()
    ckptmap.save(path, model, optimizer, step=1).wait()
    return path


def test_the_same_is_exact(saved: Path) -> None:
    report = ckptmap.load(saved, *stepped(), exact=True)
    assert report.inexact == () and report.streams == "restored"
    assert "random streams: restored" in str(report)


INEXACT: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "flag": (
        lambda: stepped(build=torchao("AdamW8bit")),
        {},
        "bf16_stochastic_round: was True, is False",
    ),
    "block": (
        lambda: stepped(build=torchao("AdamW8bit", block_size=128, bf16_stochastic_round=True)),
        {},
        "block_size: was 256, is 128",
    ),
    "class": (
        lambda: stepped(build=torchao("AdamWFp8", bf16_stochastic_round=True)),
        {},
        "class: was AdamW8bit, is AdamWFp8",
    ),
    "dtype": (lambda: stepped(Small(dtype=torch.float32)), {}, "weights cast"),
    "precision": (stepped, {"precision": "fp32"}, "precision='fp32'"),
    "streams": (stepped, {"random": "leave"}, "random streams are left as they are"),
    "fresh": (stepped, {"random": "fresh"}, "random streams are made anew"),
}


@pytest.mark.parametrize("name", INEXACT)
def test_an_inexact_resume_is_reported(name: str, saved: Path) -> None:
    build, options, reason = INEXACT[name]
    report = ckptmap.load(saved, *build(), **options)
    assert any(reason in text for text in report.inexact), report.inexact
    model, optimizer = build()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(LoadError, match="cannot go on bit for bit") as refused:
        ckptmap.load(saved, model, optimizer, exact=True, **options)
    assert refused.value.code == "CKM507" and reason in str(refused.value)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_compile_mode_is_recorded(saved: Path) -> None:
    torch.compiler.set_stance("default")
    model = Small()
    with pytest.raises(LoadError, match="stance: was force_eager, is default"):
        ckptmap.load(saved, model, ao8(model.parameters()), exact=True)


def test_a_scheduler_belongs_to_it(saved: Path) -> None:
    model, optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(LoadError, match="there is no scheduler in the checkpoint"):
        ckptmap.load(saved, model, optimizer, scheduler, exact=True)
    with pytest.raises(LoadError, match="no optimizer was given"):
        ckptmap.load(saved, model, exact=True)


def test_a_foreign_checkpoint_is_never_exact(tmp_path: Path) -> None:
    model, optimizer = stepped()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    with pytest.raises(LoadError, match="records no settings"):
        ckptmap.load(tmp_path / "a.pt", *stepped(), exact=True)
    again, theirs = stepped(steps=3)
    report = ckptmap.load(tmp_path / "a.pt", again, theirs)
    assert report.streams.startswith("fresh, seed")  # it rounds by chance, and nothing is recorded
    first = torch.rand(3)
    ckptmap.load(tmp_path / "a.pt", again, theirs)
    assert torch.equal(torch.rand(3), first)
    ckptmap.load(tmp_path / "a.pt", again, theirs, seed=1)
    assert not torch.equal(torch.rand(3), first)
    with pytest.raises(LoadError, match="has no random streams of rank 0 of 1"):
        ckptmap.load(tmp_path / "a.pt", again, theirs, random="recorded")


def test_an_optimizer_that_does_not_round_keeps_its_streams(tmp_path: Path) -> None:
    adamw: Callable[[Any], Any] = torch.optim.AdamW
    model, optimizer = stepped(build=adamw)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    again, theirs = stepped(build=adamw)
    before = torch.get_rng_state()
    report = ckptmap.load(tmp_path / "a.pt", again, theirs)
    assert report.streams == "left as they are"
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_that_were_different_are_named(saved: Path) -> None:
    model = Small()
    optimizer = torchao("AdamW8bit", betas=(0.5, 0.6))(model.parameters())
    optimizer.param_groups[0]["lr"].fill_(0.25)
    report = ckptmap.load(saved, model, optimizer)
    assert report.state is not None
    assert "group 0 lr: was 0.25 here, now 0.01" in report.state.settings
    assert "group 0 betas: was (0.5, 0.6) here, now (0.9, 0.999)" in report.state.settings
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    plain = torch.optim.AdamW(model.parameters(), lr=3.0)
    ckptmap.load(saved, model, plain)
    assert plain.param_groups[0]["lr"] == 0.01 and type(plain.param_groups[0]["lr"]) is float


# ------------------------------------------------------------------------------- names and shapes


def test_state_that_does_not_match(saved: Path) -> None:
    class More(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lora = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)

    model = More()
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(LoadError, match=r"1 missing: lora\.weight"):
        ckptmap.load(saved, model, adamw)
    report = ckptmap.load(saved, model, adamw, strict=False)
    assert report.missing == ("lora.weight",) and len(adamw.state) == 3
    assert report.state is not None
    assert report.state.initialised == ("lora.weight: the checkpoint has none",)
    small = Small()
    half = torch.optim.AdamW([small.fc.weight])
    with pytest.raises(LoadError, match=r"2 unexpected: fc\.bias, out\.weight") as refused:
        ckptmap.load(saved, small, half)
    assert refused.value.code == "CKM506"
    report = ckptmap.load(saved, small, half, strict=False)
    assert report.unexpected == () and report.state is not None
    assert {"fc.bias: not in the optimizer", "out.weight: not in the optimizer"} <= {
        *report.state.left
    }
    with pytest.raises(LoadError, match=r"state of fc\.bias is not loaded"):
        ckptmap.load(saved, small, ao8([small.fc.weight]), strict=False, exact=True)


def test_a_checkpoint_without_state(tmp_path: Path) -> None:
    model = Small()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(LoadError, match="no optimizer state can be loaded from it: it has none"):
        ckptmap.load(tmp_path / "weights.pt", model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_of_another_model(saved: Path) -> None:
    with pytest.raises(LoadError, match="is not the model's") as refused:
        ckptmap.load(saved, Small(), ao8(Small().parameters()))
    assert refused.value.code == "CKM508"
    with pytest.raises(LoadError, match=r"list is no torch\.optim\.Optimizer"):
        ckptmap.load(saved, Small(), [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision='half'"):
        model = Small()
        ckptmap.load(saved, model, ao8(model.parameters()), precision="half")


def _tensors(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


AdamW = torch.optim.AdamW
CONTINUED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "one group of two": (
        lambda m: AdamW([{"params": m.fc.parameters(), "lr": 0.5}, {"params": [m.out.weight]}]),
        lambda m: AdamW(m.parameters(), lr=0.25),
        r"group 0 lr: its parameters had 0\.5, 0\.001; kept 0\.25",
    ),
    "a number for a tensor": (
        lambda m: AdamW(m.parameters(), lr=torch.tensor(0.003)),
        lambda m: AdamW(m.parameters(), lr=0.003),
        "group 0 lr: was a float32 tensor, is no tensor",
    ),
    "numbers for betas that are tensors": (
        lambda m: AdamW(m.parameters(), betas=_tensors(0.8, 0.9), foreach=False),
        lambda m: AdamW(m.parameters(), betas=(0.8, 0.9), foreach=False),
        "group 0 betas: was a float32 tensor, is no tensor",
    ),
    "a key of the user's, in an optimizer of another class": (
        lambda m: AdamW([{"params": m.parameters(), "lr_scale": 0.5}]),
        lambda m: type("Mine", (AdamW,), {})(m.parameters()),
        r"group 0 lr_scale: was 0\.5, is not there",
    ),
    "frozen": (
        lambda m: AdamW(m.parameters()),
        lambda m: AdamW(m.requires_grad_(False).parameters()),
        r"gradients parameters that are trained: was 3 \(\w+\), is 0",
    ),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_groups_that_another_optimizer_cannot_take_exactly(name: str, tmp_path: Path) -> None:
    """Each would step on with other bits."""
    before, after, reason = CONTINUED[name]
    model = Small(dtype=torch.float32)
    model, optimizer = stepped(model, lambda _: before(model), steps=2)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again = Small(dtype=torch.float32)
    ckptmap.load(tmp_path / "out", again, before(again), exact=True)
    with pytest.raises(LoadError, match=reason) as refused:
        ckptmap.load(tmp_path / "out", again, after(again), exact=True)
    assert refused.value.code == "CKM507"


class Odd(torch.optim.Optimizer):
    """Of nobody's making: keeps what it likes, one of it of another shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                    state["rows"] = torch.zeros(param.shape[0])
                    state["seen"] = 0
                state["mean"] += param.grad
                state["rows"] += 1
                state["seen"] += 1


def test_an_optimizer_that_nobody_knows(tmp_path: Path) -> None:
    model, optimizer = stepped(build=Odd, steps=3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, theirs = stepped(build=Odd)
    report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert report.state is not None and len(report.state.loaded) == 6
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        mine, other = optimizer.state[a], theirs.state[b]
        assert mine.keys() == other.keys() and mine["seen"] == other["seen"] == 3
        assert torch.equal(mine["mean"], other["mean"]) and torch.equal(mine["rows"], other["rows"])


def test_its_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """What a probe of one step shows to be like the parameter must have its shape."""
    model, optimizer = stepped(build=Odd)
    optimizer.state[model.fc.weight]["mean"] = torch.zeros(3, 3)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    with pytest.raises(LoadError, match=r"fc\.weight\.mean: model \[64, 64\], checkpoint \[3, 3\]"):
        ckptmap.load(tmp_path / "out", *stepped(build=Odd))


@pytest.mark.parametrize("build", [torch.optim.Adafactor, torchao("AdamW8bit")])
def test_a_step_count_is_not_narrowed(build: Callable[[Any], Any], tmp_path: Path) -> None:
    """Under a default dtype of bfloat16 the count of 1001 would be 1000, and stay it."""
    model, optimizer = stepped(build=build)
    for state in optimizer.state.values():
        state["step"].fill_(1001)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again = Small()
    theirs = build(again.parameters())
    torch.set_default_dtype(torch.bfloat16)
    try:
        ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    finally:
        torch.set_default_dtype(torch.float32)
    steps = [state["step"] for state in theirs.state.values()]
    assert len(steps) == 3 and all(step.dtype == torch.float32 for step in steps)
    assert [step.item() for step in steps] == [1001] * 3


def test_a_count_too_large_for_its_form_is_kept_wider() -> None:
    for number, dtype in ((256, torch.bfloat16), (1001, torch.float32), (2**24 + 1, torch.float64)):
        made = step_like(torch.zeros((), dtype=torch.bfloat16), number)
        assert made.dtype == dtype and made.item() == number


def test_the_order_that_named_numbered_state_is_said(tmp_path: Path) -> None:
    """Of equal shapes nothing but the order tells which is which; it may be another than built."""
    model, optimizer = stepped(build=torch.optim.AdamW)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    report = ckptmap.load(tmp_path / "a.pt", *stepped(build=torch.optim.AdamW))
    text = "parameters are named by the order of the saved model dict: the file has no names"
    assert report.state is not None and text in report.state.settings and text in str(report)
    with ckptmap.open(tmp_path / "a.pt", param_order=[["fc.weight", "fc.bias", "out.weight"]]) as c:
        report = ckptmap.load(c, *stepped(build=torch.optim.AdamW))
    assert report.state is not None and not report.state.settings


def rmsprop(params: Any) -> Any:
    return torch.optim.RMSprop(params, lr=0.25, momentum=0.5)


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def muon(params: Any) -> Any:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.125)


@pytest.mark.parametrize(("before", "after"), [(sgd, muon), (muon, sgd), (rmsprop, sgd)])
def test_a_momentum_buffer_of_another_algorithm_is_not_taken(
    before: Callable[[Any], Any], after: Callable[[Any], Any], tmp_path: Path
) -> None:
    """SGD's is a sum, Muon's an average, RMSprop's a sum of scaled steps; none is another's."""
    model = nn.Linear(4, 4, bias=False)
    model, optimizer = stepped(model, before)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again = nn.Linear(4, 4, bias=False)
    theirs = after(again.parameters())
    rate = theirs.param_groups[0]["lr"]
    state = ckptmap.load(tmp_path / "out", again, theirs).state
    assert state is not None and not state.loaded and not theirs.state
    assert "has another momentum_buffer than the checkpoint's" in state.initialised[0]
    assert theirs.param_groups[0]["lr"] == rate
    same = before(again.parameters())
    ckptmap.load(tmp_path / "out", again, same, exact=True)


def test_groups_that_share_a_tensor_get_their_own_values(tmp_path: Path) -> None:
    """torch gives all groups the one tensor of its default; filled in place, the last would win."""

    def build(rate: float) -> Any:
        groups = [{"params": [layer.weight]} for layer in layers]
        return torch.optim.SGD(groups, lr=torch.tensor(rate))

    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    model, optimizer = nn.Sequential(*layers), build(1.0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again = build(0.5)
    ckptmap.load(tmp_path / "out", model, again)
    assert [float(group["lr"]) for group in again.param_groups] == [0.25, 1.0]


def test_a_group_without_parameters(tmp_path: Path) -> None:
    """A run that unfreezes layers later has a group for them, whose settings are restored, too; an optimizer
    without such a group is not the one that was saved."""

    def build(rate: float, empty: int = 1) -> Any:
        none = [{"params": [], "lr": rate, "betas": (rate, 0.9)} for _ in range(empty)]
        first, last = ({"params": [layer.weight], "lr": rate} for layer in layers)
        return torch.optim.AdamW([first, *none, last])

    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    model, optimizer = nn.Sequential(*layers), build(0.5)
    optimizer.param_groups[1]["lr"] = 0.125
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again = build(0.25)
    report = ckptmap.load(tmp_path / "out", model, again, exact=True)
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.125, 0.5]
    assert again.param_groups[1]["betas"] == (0.5, 0.9) and report.inexact == ()
    for other in (0, 2):
        with pytest.raises(LoadError, match=f"the checkpoint has 1, the optimizer {other}"):
            ckptmap.load(tmp_path / "out", model, build(0.25, other), exact=True)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert [len(group["params"]) for group in ckpt.optimizer_groups] == [1, 0, 1]
    ckptmap.convert(tmp_path / "out", tmp_path / "full.pt", to="full", optimizer_keys="index")
    state = torch.load(tmp_path / "full.pt")["optimizer"]
    theirs = build(0.25)
    theirs.load_state_dict(state)
    assert [group["lr"] for group in theirs.param_groups] == [0.5, 0.125, 0.5]


def test_foreign_values_under_our_names(tmp_path: Path) -> None:
    """Whatever a file has where ckptmap keeps settings, streams and schedulers."""
    model, optimizer = stepped(build=torch.optim.AdamW)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    strange = {"ckptmap": 5, "scheduler": [1, 2], "rng": {"rank0": {"cpu": torch.zeros(3)}}}
    torch.save({**state, **strange, "step": "seven"}, tmp_path / "a.pt")
    again, theirs = stepped(build=torch.optim.AdamW)
    report = ckptmap.load(tmp_path / "a.pt", again, theirs)
    assert report.step is None and report.extra["ckptmap"] == 5
    assert report.extra["scheduler"] == [1, 2]
    assert report.streams == "left as they are"  # no world size is recorded
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    torch.save({**state, "lr_scheduler": scheduler.state_dict()}, tmp_path / "b.pt")
    other = torch.optim.lr_scheduler.StepLR(theirs, 7)
    ckptmap.load(tmp_path / "b.pt", again, theirs, other)
    assert other.step_size == 2
    states = [scheduler.state_dict(), {"step_size": 9}]
    for count, size in ((1, 2), (2, 7)):  # Lightning keeps a list; of several, which one?
        torch.save({**state, "lr_schedulers": states[:count]}, tmp_path / "c.pt")
        other = torch.optim.lr_scheduler.StepLR(theirs, 7)
        report = ckptmap.load(tmp_path / "c.pt", again, theirs, other)
        assert other.step_size == size
        assert len(report.extra.get("lr_schedulers", ())) == (2 if count == 2 else 0)
        assert ("there is no scheduler in the checkpoint" in report.inexact) == (count == 2)
    two: list[Any] = [torch.optim.lr_scheduler.StepLR(theirs, n) for n in (1, 2)]
    sequence = torch.optim.lr_scheduler.SequentialLR(theirs, two, [3])
    with pytest.raises(LoadError, match="SequentialLR cannot take the saved scheduler's state"):
        ckptmap.load(tmp_path / "b.pt", again, theirs, sequence)


# ------------------------------------------------------------------------------- with ranks


def test_the_fix_and_equal_streams_of_replicas() -> None:
    run_ranks("tests.ranks.resume_streams", 2, timeout=400)


@pytest.mark.parametrize("setting", ["capturable", "fused", ""])
def test_the_step_count_lies_where_the_optimizer_wants_it(setting: str, device: Device) -> None:
    """torch counts steps on the CPU, but for a capturable or fused optimizer on the parameter's
    device, where one on the CPU would break the next step."""
    with device.mode():
        param = nn.Parameter(torch.zeros(8, 8, device=device.name))
        group: dict[str, Any] = {setting: True} if setting else {}
        part = OptimizerParam(torch.optim.AdamW([param]), TorchAdam(), group, param, param)
        made = TorchAdam().blank(part, {})
        assert made["step"].device.type == (device.name if setting else "cpu")
        assert made["step"].shape == () and made["step"].dtype == torch.float32
        assert {made[name].device.type for name in TorchAdam.moments} == {device.name}


def test_a_capturable_optimizer_takes_the_state_of_one_that_is_not(tmp_path: Path) -> None:
    """It cannot step on a CPU; what it then holds is what its own first step there would make."""
    model, optimizer = stepped(build=torch.optim.AdamW, steps=3)
    ckptmap.save(tmp_path / "a", model, optimizer, step=3).wait()
    live = Small()
    other = torch.optim.AdamW(live.parameters(), lr=0.5, capturable=True)
    report = ckptmap.load(tmp_path / "a", live, other)
    assert report.state is not None and not report.state.initialised, report
    assert other.param_groups[0]["capturable"] is True and other.param_groups[0]["lr"] == 1e-3
    for ours, theirs in zip(live.parameters(), model.parameters(), strict=True):
        found, want = other.state[ours], optimizer.state[theirs]
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
        assert found["step"].dtype == torch.float32 and found["step"].item() == 3
