"""bitsandbytes' optimizers with one state, and AdEMAMix, as their `state_dict()` files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise
from torch import Tensor

import ckptmap
from ckptmap.errors import SourceError
from tests.support.resume_model import net, train
from tests.support.resume_optimizers import ALL, bnb, same_state

NAMES: dict[str, dict[str, tuple[str, int | None]]] = {
    "ademamix8": {"exp_avg": ("1", 0), "exp_avg_slow": ("1", 1), "exp_avg_sq": ("2", None)},
    "lion8": {"exp_avg": ("1", None)},
    "sgd8": {"momentum_buffer": ("1", None)},
    "rmsprop8": {"square_avg": ("1", None)},
    "adagrad8": {"sum": ("1", None)},
}
"""Name of each moment -> number of the state that holds it, and which row of it."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(folder: Path, make: Any) -> tuple[Any, Any, Path]:
    model = net(0)
    optimizer = make(model.parameters())
    train(model, optimizer, 0, 2)
    path = folder / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer, path


def decoded(state: dict[str, Any], number: str, row: int | None) -> Tensor:
    """By the library's own arithmetic, all of a state at once."""
    value, absmax = state[f"state{number}"], state.get(f"absmax{number}")
    if row is not None:
        value, absmax = value[row], None if absmax is None else absmax[row]
    found: Tensor = value
    if absmax is not None:
        table = state[f"qmap{number}"]
        found = dequantize_blockwise(value, absmax=absmax, code=table, blocksize=256)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_named_and_read_as_it_is_meant(name: str, tmp_path: Path) -> None:
    """Bit for bit; then it goes on as if it had never stopped, and so it does after a conversion."""
    model, optimizer, path = saved(tmp_path, ALL[name])
    encodings = set()
    with ckptmap.open(path) as ckpt:
        for fqn, param in model.named_parameters():
            tensors = set(ckpt.optimizer[fqn])
            assert tensors == set(NAMES[name]), fqn
            for key, (number, row) in NAMES[name].items():
                lazy = ckpt.optimizer[fqn][key]
                encodings.add(lazy.encoding)
                want = decoded(optimizer.state[param], number, row)
                assert torch.equal(lazy.read(), want), (fqn, key)
                if param.dim() == 2:
                    assert torch.equal(lazy.read((5, 3), (17, 60)), want[5:22, 3:63]), (fqn, key)
    assert encodings == {"dense", "bnb8bit"}
    ckptmap.convert(path, tmp_path / "two", to="fsdp2", world_size=2)
    assert ckptmap.verify(tmp_path / "two", against=path).ok
    losses = train(model, optimizer, 2, 4)
    for source in (path, tmp_path / "two"):
        again = net(1)
        theirs = ALL[name](again.parameters())
        report = ckptmap.load(source, again, theirs)
        assert report.state is not None and not report.state.initialised, report
        assert not report.state.recoded and not report.state.cast, report
        assert train(again, theirs, 2, 4) == losses
        assert not same_state(optimizer, theirs)


def test_a_state_that_nobody_names_is_taken_by_its_own_kind_alone(tmp_path: Path) -> None:
    """A second beta of 0.5 could be Lion's, or the dampening of an SGD."""
    make = bnb("Lion8bit", lr=1e-3, betas=(0.9, 0.5))
    model, optimizer, path = saved(tmp_path, make)
    with ckptmap.open(path) as ckpt:
        assert set(ckpt.optimizer["layers.0.up.weight"]) == {"state1"}
    again = net(1)
    theirs = make(again.parameters())
    report = ckptmap.load(path, again, theirs)
    assert report.state is not None and not report.state.initialised
    assert train(again, theirs, 2, 4) == train(model, optimizer, 2, 4)
    other = net(1)
    sgd = torch.optim.SGD(other.parameters(), lr=1e-3, momentum=0.9)
    report = ckptmap.load(path, other, sgd)
    assert report.state is not None
    assert "SGD needs momentum_buffer, the checkpoint has" in report.state.initialised[0]


def test_from_its_own_state_dict_by_hooks(tmp_path: Path) -> None:
    """In memory, as torch would load it: into another algorithm, too."""
    model, optimizer, _ = saved(tmp_path, ALL["ademamix8"])
    again = net(1)
    theirs = ALL["bnb32"](again.parameters())
    with ckptmap.hooks.install(again, theirs) as handle:
        again.load_state_dict(model.state_dict())
        theirs.load_state_dict(optimizer.state_dict())
    assert handle.reports["optimizer"].state is not None
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        for number, row in (("1", 0), ("2", None)):
            want = decoded(optimizer.state[one], number, row)
            assert torch.equal(theirs.state[two][f"state{number}"], want), number


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    _, _, path = saved(tmp_path, ALL["ademamix8"])
    state = torch.load(path, weights_only=True)
    for entry in state["optimizer"]["state"].values():
        hidden = entry["__bnb_optimizer_quant_state__"]
        if "absmax1" in hidden:
            hidden["absmax1"] = hidden["absmax1"][:, :-1].clone()
    torch.save(state, path)
    with (
        pytest.raises(SourceError, match=r"scale, expected float32\[25\], found float32\[24\]"),
        ckptmap.open(path) as ckpt,
    ):
        _ = ckpt.optimizer
