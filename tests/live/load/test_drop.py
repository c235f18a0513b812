"""`load(drop=...)`: a pattern that matches nothing is misspelt, and refused as `convert` refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def saved(folder: Path) -> tuple[Path, nn.Sequential]:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    ckptmap.save(folder / "run", model, optimizer, gradients=False).wait()
    return folder / "run", model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("drop", ["2.wieght", ["0.*", "2.wieght"], ["typo*"]])
def test_a_pattern_of_nothing_is_refused(tmp_path: Path, drop: Any, strict: bool) -> None:
    path, _ = saved(tmp_path)
    model = net(1)
    with pytest.raises(LoadError) as refused:
        ckptmap.load(path, model, drop=drop, strict=strict)
    assert refused.value.code == "CKM206"
    assert f"drop={'typo*' if 'typo*' in drop else '2.wieght'!r}" in refused.value.message
    assert "2.weight" in str(refused.value.hint)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), net(1).parameters(), strict=True)
    )


def test_the_manager_refuses_it_too(tmp_path: Path) -> None:
    manager = ckptmap.CheckpointManager(tmp_path)
    manager.save(1, net(0))
    manager.save(2, net(1))
    with pytest.raises(LoadError, match=r"drop='typo\*'"):
        manager.restore(net(2), drop=["typo*"])
    manager.close()


def test_names_and_ranges_of_inspect_match(tmp_path: Path) -> None:
    path, model = saved(tmp_path)
    other = net(1)
    optimizer = torch.optim.AdamW(other[0].parameters())
    report = ckptmap.load(path, other, optimizer, drop=["{1..2}.*"], strict=False)
    assert report.missing == ("2.weight", "2.bias") and not report.unexpected
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[arg-type]


def test_weights_of_the_base_alone_match(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    model = net(1)
    ckptmap.load(path, model)
    ckptmap.save(tmp_path / "part", model, only="2.*").wait()
    report = ckptmap.load(tmp_path / "part", net(2), drop=["0.*"], strict=False)
    assert report.missing == ("0.weight", "0.bias")


def test_state_whose_weight_is_not_there_matches(tmp_path: Path) -> None:
    """A file may hold optimizer state of a weight that it does not hold."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = {name: optimizer.state_dict()["state"][at] for at, name in enumerate(names)}
    weights = {name: value for name, value in model.state_dict().items() if name[0] == "0"}
    torch.save(
        {"model": weights, "optimizer": {"state": state, "param_groups": []}}, tmp_path / "a.pt"
    )
    first = nn.Sequential(net(1)[0])
    report = ckptmap.load(
        tmp_path / "a.pt", first, torch.optim.AdamW(first.parameters()), drop=["2.*"]
    )
    assert len(report.loaded) == 2 and not report.unexpected


def test_a_grown_vocabulary(tmp_path: Path) -> None:
    """Not strict, the weights that have another shape here keep their values, and their state begins anew. With an
    optimizer that was refused, and its hint was to leave all state behind."""
    path, model = saved(tmp_path)
    grown = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5))
    before = grown[2].weight.detach().clone()
    optimizer = torch.optim.AdamW(grown.parameters())
    with pytest.raises(LoadError, match="strict=False") as refused:
        ckptmap.load(path, grown, optimizer)
    assert refused.value.code == "CKM502"
    report = ckptmap.load(path, grown, optimizer, strict=False)
    assert torch.equal(grown[0].weight, model[0].weight) and torch.equal(grown[2].weight, before)
    assert [one.fqn for one in report.mismatched] == ["2.weight", "2.bias"]
    assert report.state is not None
    assert report.state.initialised == (
        "2.weight: the weight does not fit", "2.bias: the weight does not fit",
    )  # fmt: skip
    assert "2.weight: state begins anew" in report.inexact
    assert [param in optimizer.state for param in grown.parameters()] == [True, True, False, False]
    with pytest.raises(LoadError, match="cannot go on bit for bit"):
        ckptmap.load(path, grown, optimizer, strict=False, exact=True)


def test_no_state_at_all(tmp_path: Path) -> None:
    """The hint is not to name parameters of what is not there."""
    ckptmap.save(tmp_path / "run", net(0)).wait()
    model = net(1)
    with pytest.raises(LoadError, match="it has none") as refused:
        ckptmap.load(tmp_path / "run", model, torch.optim.AdamW(model.parameters()))
    assert refused.value.hint == "load the model alone"
