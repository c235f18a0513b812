"""Low-bit moments load on other numbers of ranks, also where a rank holds a parameter's moments plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptmap
from ckptmap.optim.lowbit import LowBit
from tests.corpus.ranks import run_ranks

NAMES = ("ao8", "ao4", "aofp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reshard")
    for world in (2, 3):
        run_ranks("tests.ranks.resume_reshard", world, ["write", str(path), ",".join(NAMES)], 400)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_stored_whatever_the_world_size(name: str, folder: Path) -> None:
    """A weight that both ranks hold in codes is one run of blocks, whatever the world size was; one
    that a rank holds plain is stored as it is held."""
    with ckptmap.open(folder / f"{name}-2") as ckpt:
        whole = ckpt.optimizer["layers.0.up.weight"]["exp_avg"].encoding_
        mixed = ckpt.optimizer["layers.1.up.weight"]["exp_avg"].encoding_
    assert isinstance(whole, LowBit) and not whole.cells
    assert isinstance(mixed, LowBit)
    if name != "ao4":  # its block of 128 fits into both ranks' rows
        assert [cell.quantized for cell in mixed.cells] == [True, False]
    assert ckptmap.verify(folder / f"{name}-2").ok
    manifest = json.loads((folder / f"{name}-2" / "ckptmap.manifest.json").read_text())
    assert "optimizer.state.layers.0.up.weight.exp_avg" in manifest["records"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_other_worlds(world: int, folder: Path) -> None:
    args = ["read", str(folder), ",".join(NAMES)]
    run_ranks("tests.ranks.resume_reshard", world, args, timeout=400)


def test_meshes_and_flat_parameters(tmp_path: Path) -> None:
    run_ranks("tests.ranks.resume_meshes", 4, [str(tmp_path)], timeout=400)
