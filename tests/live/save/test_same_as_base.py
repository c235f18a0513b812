"""`save(only=...)` leaves out only weights that are the base's, bit for bit, whoever changed the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from tests.corpus.ranks import run_ranks
from tests.live.quantized.test_nf4 import fourbit
from tests.live.save.test_only_trained import net, same
from tests.support.live_model import QUANTIZED, write
from tests.support.live_model import net as quantized_net


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense and NF4 weights of the model with quantized layers."""
    path = tmp_path_factory.mktemp("weights")
    write(path)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    ckptmap.save(tmp_path / "base", net(0)).wait()
    return tmp_path / "base"


def trained_by_sgd(model: Any) -> None:
    model[2].requires_grad_(True)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    model.zero_grad()


def written_through_data(model: Any) -> None:
    """No version counter sees it."""
    model[2].weight.data.add_(1)


def one_nan(model: Any) -> None:
    model[2].weight.data[1, 1] = float("nan")


def minus_zero(model: Any) -> None:
    """Equal to the base's by value, and not by its bits."""
    model[2].bias.data[0] = -0.0


@pytest.mark.parametrize("change", [trained_by_sgd, written_through_data, one_nan])
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "base="])
def test_a_changed_weight_is_saved(
    change: Callable[[Any], None], loaded: bool, base: Path, tmp_path: Path
) -> None:
    """It is frozen when it is saved, no optimizer is given, and `only` does not name it."""
    model: Any = net(0) if not loaded else net(1)
    if loaded:
        ckptmap.load(base, model)
    change(model)
    model[2].requires_grad_(False)
    given = {} if loaded else {"base": base}
    notes = ckptmap.save(tmp_path / "c", model, only="trainable", **given).wait()
    assert any("not those of the base: " in note and "2.weight" in note for note in notes)
    again = net(3)
    ckptmap.load(tmp_path / "c", again)
    found = {**again.state_dict()}
    for name, value in model.state_dict().items():
        assert found[name].numpy().tobytes() == value.numpy().tobytes(), name


def test_a_change_between_two_saves(base: Path, tmp_path: Path) -> None:
    """The second save has a proof of the first, and looks again; a zero with another sign is a change."""
    model: Any = net(1)
    with torch.no_grad():
        model[2].bias[0] = 0.0
    ckptmap.save(base, model, overwrite=True).wait()
    ckptmap.load(base, model)
    model[2].requires_grad_(False)
    for path, expected in (("a", False), ("b", True)):
        ckptmap.save(tmp_path / path, model, only="trainable").wait()
        with ckptmap.open(tmp_path / path) as ckpt:
            assert ("2.bias" in ckpt) is expected and "0.weight" not in ckpt
        minus_zero(model)
    again: Any = net(3)
    ckptmap.load(tmp_path / "b", again)
    assert torch.signbit(again[2].bias[0])


def test_buffers_that_no_pattern_names(base: Path, tmp_path: Path) -> None:
    model: Any = net(1)
    ckptmap.load(base, model)
    model(torch.randn(8, 4))
    ckptmap.save(tmp_path / "c", model, only="2.*").wait()
    again = net(3)
    ckptmap.load(tmp_path / "c", again)
    assert same(model, again)


def test_a_base_that_is_written_anew_between_two_saves(base: Path, tmp_path: Path) -> None:
    """The proof was of other files: the weights are compared with the new ones, and saved."""
    model: Any = net(0)
    ckptmap.save(tmp_path / "a", model, only="1.*", base=base).wait()
    ckptmap.save(base, net(5), overwrite=True).wait()
    ckptmap.save(tmp_path / "b", model, only="1.*", base=base).wait()
    again = net(3)
    ckptmap.load(tmp_path / "b", again)
    assert same(model, again)


def test_a_cast_is_the_base(tmp_path: Path) -> None:
    """A bfloat16 model of a float32 base, whose every save is small."""
    ckptmap.save(tmp_path / "base", net(0)).wait()
    model: Any = net(0).to(torch.bfloat16)
    for name in ("a", "b"):
        ckptmap.save(tmp_path / name, model, only="1.*", base=tmp_path / "base").wait()
        with ckptmap.open(tmp_path / name) as ckpt:
            assert all(fqn.startswith("1.") for fqn in ckpt)


def nf4(folder: Path) -> Any:
    model = quantized_net(4)
    ckptmap.load(folder / "nf4.pt", model)
    return model


def bnb_of_dense(folder: Path) -> Any:
    """bitsandbytes' layers, quantized by themselves, then loaded from dense values."""
    model = fourbit()
    for name in QUANTIZED:
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.to("cpu")
    ckptmap.load(folder / "dense.pt", model)
    return model


@pytest.mark.parametrize("given", [False, True], ids=["loaded", "base="])
@pytest.mark.parametrize("make", [nf4, bnb_of_dense])
def test_quantized_weights(
    make: Callable[[Path], Any], given: bool, folder: Path, tmp_path: Path
) -> None:
    """Codes that a load has made are the base's, also after a forward, which rounds bitsandbytes' scales
    on the CPU, and where nobody remembers the load; changed codes are not."""
    model = make(folder)
    source = folder / ("nf4.pt" if make is nf4 else "dense.pt")
    if given:
        from ckptmap.live.model import loaded_bases

        loaded_bases._BASES.clear()
        loaded_bases._PROOFS.clear()
    options = {"base": source} if given else {}
    model(torch.arange(8)[None])
    ckptmap.save(tmp_path / "a", model, only="norm.*", **options).wait()
    with ckptmap.open(tmp_path / "a") as ckpt:
        assert list(ckpt) == ["norm.weight"]
    weight = model.up.weight
    codes = weight.data if make is bnb_of_dense else weight.quantized_data
    codes.view(-1)[0] ^= 0x11
    ckptmap.save(tmp_path / "b", model, only="norm.*", **options).wait()
    with ckptmap.open(tmp_path / "b") as ckpt:
        assert sorted(ckpt) == ["norm.weight", "up.weight"]


@pytest.mark.ranks
def test_ranks(tmp_path: Path) -> None:
    """The shard of one rank alone is changed, under FSDP2 and FSDP1: tests/ranks/same_as_base.py."""
    run_ranks("tests.ranks.same_as_base", 2, [str(tmp_path)], timeout=240)
