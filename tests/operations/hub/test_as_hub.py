"""`--as hf://…`: the release that the output is like lies on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import CkptmapError, PlanError
from tests.support.hub.server import Hub
from tests.support.moe_releases import FILE, kimi

TRAINED = "model.layers.2.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "kimi"
    kimi(folder)
    return folder


@pytest.fixture
def work(release: Path, tmp_path: Path) -> Path:
    """Its values, of which one weight was trained."""
    ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16")
    state = torch.load(tmp_path / "work.pt")
    state[TRAINED] = -state[TRAINED]
    torch.save(state, tmp_path / "work.pt")
    return tmp_path / "work.pt"


def test_as_a_release_on_the_hub(
    hub: Hub, release: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes as with the release on this machine, by the library and on the command line."""
    hub.add("org/kimi", release)
    ckptmap.convert(work, tmp_path / "here", as_=release)
    report = ckptmap.convert(work, tmp_path / "back", as_="hf://org/kimi")
    assert report.likeness is not None
    assert report.likeness.changed == {TRAINED: "quantize"}
    args = ["convert", str(work), str(tmp_path / "shell"), "--as", "hf://org/kimi"]
    assert main(args) == 0
    assert "66 of 67 weights byte-identical to hf://org/kimi@" in capsys.readouterr().out
    for name in ("back", "shell"):
        for file in (FILE, "config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "here" / file).read_bytes()
    given, got = load_file(release / FILE), load_file(tmp_path / "back" / FILE)
    stem = TRAINED.removesuffix("weight")
    differ = {key for key, value in given.items() if not torch.equal(value, got[key])}
    assert differ and all(key.startswith(stem) for key in differ)


def test_a_release_that_is_not_there(hub: Hub, work: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptmapError, match="org/none") as caught:
        ckptmap.convert(work, tmp_path / "back", as_="hf://org/none")
    assert caught.value.exit_code == 2 and not (tmp_path / "back").exists()


@pytest.mark.parametrize("ask", [ckptmap.plan, ckptmap.convert])
def test_neither_to_nor_as(ask: Callable[..., object], work: Path, tmp_path: Path) -> None:
    given = (work, "") if ask is ckptmap.plan else (work, tmp_path / "out", "")
    with pytest.raises(PlanError, match="--to '' and no --as") as caught:
        ask(*given)
    assert caught.value.code == "CKM201" and "--as PATH" in str(caught.value.hint)
