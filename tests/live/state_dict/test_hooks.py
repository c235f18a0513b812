"""With `hooks.install()`, plain load_state_dict takes names, encodings and optimizers of other setups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torchao.optim import AdamW4bit, AdamW8bit
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from ckptmap.errors import ArgumentError, CkptmapError
from ckptmap.live.state_dict.fsdp1_hooks import set_extra_state
from ckptmap.live.state_dict.hooks import name_by_live
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net, train


@pytest.fixture(autouse=True)
def _eager() -> Any:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def trained(seed: int, make: Callable[..., Any], lr: float = 1e-2) -> tuple[Any, Any]:
    model = net(seed)
    optimizer = make(model.parameters(), lr=lr)
    train(model, optimizer, 0, 3)
    return model, optimizer


def test_training_goes_on_as_it_was() -> None:
    """DDP's and compile's names, state by index: the same losses as without a stop."""
    model, optimizer = trained(0, torch.optim.AdamW)
    other = net(1)
    theirs = torch.optim.AdamW(other.parameters(), lr=5.0)
    with ckptmap.hooks.install(other, theirs) as handle:
        state = {f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}
        assert not other.load_state_dict(state).missing_keys
        theirs.load_state_dict(optimizer.state_dict())
    assert handle.reports["optimizer"].state is not None
    assert train(other, theirs, 3, 6) == train(model, optimizer, 3, 6)


def test_a_state_dict_that_fits_is_loaded_by_torch_alone() -> None:
    model = net(1)
    with ckptmap.hooks.install(model) as handle:
        model.load_state_dict(net(0).state_dict())
        assert "model" not in handle.reports
    assert torch.equal(model.embed.weight, net(0).embed.weight)


def test_removed_they_are_gone() -> None:
    model = net(1)
    state = {f"module.{k}": v for k, v in net(0).state_dict().items()}
    handle = ckptmap.hooks.install(model)
    model.load_state_dict(state)
    handle.remove()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    handle.remove()  # a second time is nothing


def test_strict_is_torchs_own_word() -> None:
    state = {f"module.{k}": v for k, v in net(0).state_dict().items() if k != "calls"}
    state["module.more"] = torch.ones(2)
    model = net(1)
    with ckptmap.hooks.install(model):
        with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"calls"'):
            model.load_state_dict(state)
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["calls"], ["more"])
        state["module.calls"] = torch.ones(5)
        with pytest.raises(RuntimeError, match=r"size mismatch for calls: model float32\[3\]"):
            model.load_state_dict(state, strict=False)


def test_nf4_model_takes_dense_and_keeps_codes() -> None:
    model = net(1, torch.bfloat16)
    up = model.layers[0].up
    up.weight = nn.Parameter(to_nf4(up.weight.detach()), requires_grad=False)
    source = net(0, torch.bfloat16)
    with ckptmap.hooks.install(model):
        model.load_state_dict(source.state_dict())
        want = to_nf4(source.layers[0].up.weight.detach())
        found: Any = model.layers[0].up.weight
        assert torch.equal(found.quantized_data, want.quantized_data)
        again: Any = net(2, torch.bfloat16)
        again.layers[0].up.weight = nn.Parameter(to_nf4(torch.randn(128, 128).bfloat16()), False)
        state = model.state_dict()
        with ckptmap.hooks.install(again):
            again.load_state_dict(state)
        assert torch.equal(again.layers[0].up.weight.quantized_scalers, want.quantized_scalers)


def test_compiled_and_assigned() -> None:
    compiled: Any = torch.compile(net(1), backend="eager")
    with ckptmap.hooks.install(compiled):
        compiled.load_state_dict(net(0).state_dict(), assign=True)
    assert torch.equal(compiled.embed.weight, net(0).embed.weight)
    assert isinstance(compiled.embed.weight, nn.Parameter)


# ------------------------------------------------------------------ optimizers

KINDS: dict[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "ao8": AdamW8bit,
    "ao4": AdamW4bit,
    "bnb8": bitsandbytes.optim.AdamW8bit,
}


PAIRS = [*((kind, kind) for kind in KINDS), *(("adamw", k) for k in KINDS if k != "adamw"),
         *((k, "adamw") for k in KINDS if k != "adamw"), ("bnb8", "ao8")]  # fmt: skip


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_any_optimizer_into_any(there: str, here: str) -> None:
    """Its next step works, in its own format, from the same hyper-parameters."""
    model, optimizer = trained(0, KINDS[there], lr=1e-4)
    other = net(0)
    theirs = KINDS[here](other.parameters(), lr=5.0)
    with ckptmap.hooks.install(other, theirs) as handle:
        other.load_state_dict(model.state_dict())
        theirs.load_state_dict(optimizer.state_dict())
    state = handle.reports["optimizer"].state
    assert state is not None and not state.initialised
    assert float(theirs.param_groups[0]["lr"]) == pytest.approx(1e-4)
    kinds = {type(v).__name__ for s in theirs.state.values() for v in s.values()}
    losses = train(other, theirs, 3, 6)
    assert {type(v).__name__ for s in theirs.state.values() for v in s.values()} >= kinds
    want = train(model, optimizer, 3, 6)
    assert losses == want if here == there else losses == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("flat", [False, True])
def test_state_by_name(flat: bool) -> None:
    """As torch.distributed's state dicts key it, with the names of a compiled model."""
    model, optimizer = trained(0, torch.optim.AdamW)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    named = get_optimizer_state_dict(model, optimizer, options=options)
    other = net(0)
    theirs = torch.optim.AdamW(reversed(list(other.parameters())), lr=5.0)
    with ckptmap.hooks.install(other, theirs):
        theirs.load_state_dict(named)
    by_name = dict(other.named_parameters())
    for name, param in model.named_parameters():
        want, found = optimizer.state[param], theirs.state[by_name[name]]
        assert torch.equal(found["exp_avg"], want["exp_avg"]), name


def test_moments_in_fp32_of_bf16_weights_stay() -> None:
    """torch would cast them to the parameter's dtype; torchao's optimizers step with either."""
    model, optimizer = trained(0, torch.optim.AdamW)
    other = net(0, torch.bfloat16)
    theirs = AdamW8bit(other.parameters(), lr=1e-2)
    with ckptmap.hooks.install(other, theirs):
        theirs.load_state_dict(optimizer.state_dict())
    small = other.layers[0].norm.weight
    assert theirs.state[small]["exp_avg"].dtype == torch.float32
    want = optimizer.state[model.layers[0].norm.weight]["exp_avg"]
    assert torch.equal(theirs.state[small]["exp_avg"], want)


def test_state_by_number_beside_an_empty_group(tmp_path: Path) -> None:
    """As Trainer makes of an adapter: nothing in it is without decay."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}])

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = groups(model)
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    weights = dict(sorted(model.state_dict().items()))
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    again = groups(model)
    with ckptmap.open(tmp_path / "run.pt") as checkpoint:
        assert checkpoint.optimizer_by_index
        ckptmap.load(name_by_live(checkpoint, model, again), model, again)
    for param in model.parameters():
        assert torch.equal(again.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_the_state_dict_is_not_aliased() -> None:
    _, optimizer = trained(0, torch.optim.AdamW)
    state = optimizer.state_dict()
    before = state["state"][0]["exp_avg"].clone()
    other = net(0)
    theirs = torch.optim.AdamW(other.parameters())
    with ckptmap.hooks.install(other, theirs):
        theirs.load_state_dict(state)
    train(other, theirs, 3, 4)
    assert torch.equal(state["state"][0]["exp_avg"], before)


def test_state_that_is_not_there() -> None:
    """Before its first step an optimizer has groups alone: torch's own business."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = net(0)
    theirs = torch.optim.AdamW(other.parameters(), lr=5.0)
    with ckptmap.hooks.install(other, theirs):
        theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 1e-2 and not theirs.state


def test_another_models_state_is_refused() -> None:
    _, optimizer = trained(0, torch.optim.AdamW)
    small = nn.Linear(3, 2)
    theirs = torch.optim.AdamW(small.parameters())
    with (
        ckptmap.hooks.install(small, theirs),
        pytest.raises(CkptmapError, match="state dict: the parameter order"),
    ):
        theirs.load_state_dict(optimizer.state_dict())
    assert not theirs.state


def test_between_meshes() -> None:
    """FSDP2 with compiled layers into HSDP, 8-bit moments included, by plain load_state_dict."""
    run_ranks("tests.ranks.hooks_mesh", 4, timeout=240)


class Counting(nn.Linear):
    """A module with extra state of its own."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_is_set_where_torch_does_not_come() -> None:
    """As FSDP1's hooks do it, by names without wrapper segments."""
    model = nn.Sequential(Counting(2, 2), nn.Tanh(), Counting(2, 2))
    state = {"module._orig_mod.0._extra_state": 7, "module._orig_mod.1._extra_state": 8}
    lost, strange = set_extra_state(nn.Sequential(OrderedDict(module=model)), state)
    assert (lost, strange) == (["2._extra_state"], ["1._extra_state"])
    assert [module.count for module in model if isinstance(module, Counting)] == [7, 0]


@pytest.mark.parametrize("world", [2, 3])
def test_into_fsdp1(world: int) -> None:
    """translate() and hooks, both use_orig_params, whole and sharded state dicts, from foreign
    names, encodings, shards and optimizer keys; compared as torch gathers FSDP1."""
    run_ranks("tests.ranks.hooks_fsdp1", world, timeout=300)


def test_what_is_no_state_dict_of_tensors_is_refused_before_anything_is_loaded() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ckptmap.hooks.install(model)
    before = model.weight.detach().clone()
    arrays = {name: value.numpy() for name, value in other.state_dict().items()}
    for given, text in (
        ({"model": other.state_dict(), "step": 3}, r"state_dict\['model'\]: is a OrderedDict"),
        (arrays, r"state_dict\['weight'\]: is a ndarray, expected a tensor"),
        ({1: torch.zeros(2)}, "state_dict key=1, expected a name"),
    ):
        with pytest.raises(ArgumentError, match=text):
            model.load_state_dict(given)  # type: ignore[arg-type]
    assert torch.equal(model.weight, before)
    model.load_state_dict({**other.state_dict(), "step": 3}, strict=False)  # as torch takes it
    assert torch.equal(model.weight, other.weight)


def test_install_takes_one_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="is a list, expected one torch"):
        ckptmap.hooks.install(model, [optimizer])
    with pytest.raises(ArgumentError, match=r"a StepLR is no torch\.optim\.Optimizer"):
        ckptmap.hooks.install(model, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(ArgumentError, match="to=3, expected a path"):
        ckptmap.translate(model.state_dict(), to=3)  # type: ignore[arg-type]
