"""`--as PATH` for every encoding and setup that the registry writes: a new one without it fails here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap import registry
from tests.support.int8_models import dense
from tests.support.same_tensors import assert_same

STACK = "model.layers.0.mlp.experts.down_proj"
CHANGED = "model.layers.0.self_attn.o_proj.weight"
ENCODINGS = [scheme.suffix for scheme in registry.schemes() if scheme.suffix]
SETUPS = [setup.name for setup in registry.setups()]
SHARDED = {setup.name for setup in registry.setups() if setup.sharded}


def trained(path: Path, *names: str) -> Path:
    """A torch.save file in which these weights are others."""
    state = torch.load(path)
    inner = state.get("model", state)  # beside what a trainer keeps
    for name in names:
        inner[name] = inner[name].flip(0).contiguous()
    torch.save(state, path)
    return path


def weights(path: Path) -> Path:
    """Two linear layers and a stack of experts, of which every encoding takes some."""
    torch.manual_seed(0)
    names = {"q_proj": (256, 256), "o_proj": (256, 256)}
    state = {f"model.layers.0.self_attn.{n}.weight": torch.randn(s) for n, s in names.items()}
    state |= {STACK: torch.randn(4, 256, 64), "model.norm.weight": torch.ones(256)}
    save_file({key: tensor.bfloat16() for key, tensor in state.items()}, path)
    return path


@pytest.mark.parametrize("suffix", ENCODINGS)
def test_every_encoding_that_is_written(suffix: str, tmp_path: Path) -> None:
    """What stayed has the stored bytes again; what was trained has the release's encoding."""
    release, work = tmp_path / "release.pt", tmp_path / "work.pt"
    ckptmap.convert(weights(tmp_path / "in.safetensors"), release, to=f"full-{suffix}")
    ckptmap.convert(release, work, to="full-bf16")
    ckptmap.convert(work, tmp_path / "same.pt", as_=release)
    changed = STACK if suffix == "mxfp4" else CHANGED
    report = ckptmap.convert(trained(work, changed), tmp_path / "back.pt", as_=release)
    assert report.likeness is not None
    assert report.likeness.changed.keys() == {changed}
    with (
        ckptmap.open(release) as given,
        ckptmap.open(tmp_path / "same.pt") as same,
        ckptmap.open(tmp_path / "back.pt") as back,
    ):
        assert given[changed].encoding_ == back[changed].encoding_
        for fqn in given:
            assert given[fqn].encoding_ == same[fqn].encoding_ == back[fqn].encoding_
            for other in (same, back):
                if other is same or fqn != changed:
                    assert_same(other[fqn].read(), given[fqn].read(), fqn)
        wanted, got = torch.load(work)[changed].float(), back[changed].read().float()
        assert float((got - wanted).norm() / wanted.norm()) < 0.2


@pytest.mark.parametrize("setup", SETUPS)
def test_every_setup_that_is_written(setup: str, tmp_path: Path) -> None:
    """Written like a release of this setup, it is what `--to` of the setup gives."""
    source = dense(tmp_path / "in", hidden=64)
    more: dict[str, Any] = {"world_size": 2} if setup in SHARDED else {}
    names = {"names": "hf"} if setup == "gguf" else {}
    ckptmap.convert(source, tmp_path / "release", to=setup, **more)
    ckptmap.convert(tmp_path / "release", tmp_path / "work.pt", to="full", **names)
    whole = ckptmap.convert(tmp_path / "work.pt", tmp_path / "same", as_=tmp_path / "release")
    assert whole.likeness is not None and not whole.likeness.changed
    work = trained(tmp_path / "work.pt", CHANGED)
    report = ckptmap.convert(work, tmp_path / "back", as_=tmp_path / "release")
    assert report.likeness is not None
    assert report.likeness.identical == report.likeness.weights - 1
    with ckptmap.open(tmp_path / "release") as given, ckptmap.open(tmp_path / "back") as back:
        assert list(given) == list(back) and given.setup == back.setup
        assert given.world_size == back.world_size
    assert ckptmap.verify(tmp_path / "same", against=tmp_path / "release").ok
