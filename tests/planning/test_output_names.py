"""The names of weights and of extra values in an output: none takes the place of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError
from tests.corpus.loaders import load_dcp, load_ranks, load_torch

Tree = dict[str, Any]
LOADERS = {"full": load_torch, "fsdp2": load_dcp, "fsdp2-ranks": load_ranks}


OURS: Tree = {"keep_layout": False}
"""Entries beside the weights go below `extra`."""


def saved(path: Path, **beside: Any) -> Path:
    """Weights, and values beside them."""
    torch.save({"model": {"a.weight": torch.arange(4.0), "b": torch.ones(2)}, **beside}, path)
    return path


@pytest.mark.parametrize("to", LOADERS)
def test_an_extra_of_the_users_own_takes_the_place_of_nothing(to: str, tmp_path: Path) -> None:
    """Our outputs have a dict `extra`; so may any file, and the same names beside it."""
    src = saved(tmp_path / "s.pt", step=2, extra={"step": 1, "extra": {"step": 0}})
    ckptmap.convert(src, tmp_path / "one", to, **OURS)
    ckptmap.convert(tmp_path / "one", tmp_path / "two", to)
    for out in (tmp_path / "one", tmp_path / "two"):
        assert LOADERS[to](out)["extra"] == {
            "step": 2, "extra": {"step": 1, "extra": {"step": 0}}
        }  # fmt: skip
        assert ckptmap.verify(out, against=src).ok
        with ckptmap.open(out) as ckpt:
            assert ckpt.extra["step"] == 2


@pytest.mark.parametrize("to", LOADERS)
def test_a_root_of_any_name_is_found_beside_tensors_in_extra(to: str, tmp_path: Path) -> None:
    src = saved(tmp_path / "s.pt", rng={"cpu": torch.arange(3)})
    ckptmap.convert(src, tmp_path / "out", to, root="net")
    assert ckptmap.verify(tmp_path / "out", against=src).ok
    assert list(LOADERS[to](tmp_path / "out")["net"]) == ["a.weight", "b"]


@pytest.mark.parametrize(
    ("to", "root", "says"),
    [
        ("full", "optimizer", "readers take no tensor below 'optimizer' for a weight"),
        ("fsdp2", "app/optim", "readers take no tensor below 'optim' for a weight"),
        ("full", "extra", "readers take no tensor below 'extra' for a weight"),
        ("hf", "model", "hf holds names at its top level only, no dicts"),
        ("dcp-hf", "app/net", "dcp-hf holds names at its top level only, no dicts"),
    ],
)
def test_a_root_that_would_not_be_read_as_one_is_refused(
    to: str, root: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        ckptmap.plan(saved(tmp_path / "s.pt"), to, root=root)
    assert refused.value.code == "CKM205"


def test_what_a_flat_reference_has_no_place_for_is_left_behind_by_the_options_told(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "flat.pt")
    saved = {"model": model.state_dict(), "step": 3, "rng": {"cpu": torch.ones(2)}}
    torch.save(saved, tmp_path / "extra.pt")
    torch.save({**saved, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    for name in ("extra.pt", "run.pt"):  # optimizer state stays behind unasked, as in the reference
        src, flat = tmp_path / name, tmp_path / "flat.pt"
        with pytest.raises(PlanError, match="holds weights at its top level alone") as refused:
            ckptmap.plan(src, as_=flat)
        assert refused.value.code == "CKM205"
        assert refused.value.hint == "leave these behind: --drop rng --drop step"
        ckptmap.convert(src, tmp_path / f"as-{name}", as_=flat, drop=["rng", "step"])
        assert [*torch.load(tmp_path / f"as-{name}")] == ["weight", "bias"]


TWICE: dict[str, Tree] = {
    "dots": {"x": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}},
    "numbers": {"x": {1: torch.ones(2), "1": torch.zeros(2)}},
}


@pytest.mark.parametrize("to", LOADERS)
@pytest.mark.parametrize("name", TWICE)
def test_two_tensors_of_one_joined_name_are_refused(name: str, to: str, tmp_path: Path) -> None:
    """A manifest goes by joined names."""
    with pytest.raises(PlanError, match=r"'extra\.x.*' would be written twice: as .* and as") as no:
        ckptmap.plan(saved(tmp_path / "s.pt", **TWICE[name]), to, **OURS)
    assert no.value.code == "CKM114"


@pytest.mark.parametrize("to", LOADERS)
def test_nothing_lies_inside_a_tensor(to: str, tmp_path: Path) -> None:
    """DCP's flat keys would hold that, but torch could not nest them again."""
    tensors = {"model": {"extra": torch.ones(2)}, "rng": torch.ones(3)}  # which `extra` has to hold
    torch.save(tensors, tmp_path / "s.pt")
    with pytest.raises(PlanError, match=r"extra.*(already is|both a dict and a value)") as refused:
        ckptmap.plan(tmp_path / "s.pt", to, root="")
    assert refused.value.code == "CKM114"


@pytest.mark.parametrize("to", ["full-nf4", "ddp", "hf"])
def test_a_module_called_module_stays_one(to: str, tmp_path: Path) -> None:
    """Where it alone is taken along, nothing tells it from DDP's wrapper any more."""
    torch.save(
        {"module.a.weight": torch.ones(64, 64), "n.weight": torch.ones(2)}, tmp_path / "s.pt"
    )
    with pytest.raises(PlanError, match=r"module\.a\.weight: all names that are left begin") as no:
        ckptmap.plan(tmp_path / "s.pt", to, include=("module.*",))
    assert no.value.code == "CKM114"
    ckptmap.convert(tmp_path / "s.pt", tmp_path / "out", to)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "s.pt").ok


def test_a_nan_that_all_ranks_have_is_one_value(tmp_path: Path) -> None:
    nan = float("nan")
    src = saved(tmp_path / "s.pt", best={"loss": nan, "all": [1.0, nan]})
    ckptmap.convert(src, tmp_path / "ranks", "fsdp2-ranks", world_size=2)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "out.pt", "full")
    assert (
        str(load_torch(tmp_path / "out.pt")["extra"])
        == "{'best': {'loss': nan, 'all': [1.0, nan]}}"
    )
    assert ckptmap.verify(tmp_path / "out.pt", against=src).ok
