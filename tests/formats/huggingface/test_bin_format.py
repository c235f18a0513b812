"""Hugging Face directories of torch.save shards, as huggingface_hub writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict

import ckptmap
from ckptmap.errors import SourceError
from tests.corpus.models import tiny_llama
from tests.support.same_tensors import assert_same

INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = dict(tiny_llama().state_dict())
    folder = tmp_path / "bin"
    folder.mkdir()
    save_torch_state_dict(state, folder, safe_serialization=False, max_shard_size="100KB")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert (folder / INDEX).exists()
    return folder, state


def test_shards_are_one_checkpoint(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, state = saved
    with ckptmap.open(folder) as ckpt:
        assert set(ckpt) == set(state)
        for fqn, value in state.items():
            assert_same(ckpt[fqn].read(), value, fqn)
    ckptmap.convert(folder, tmp_path / "out", to="hf")
    assert ckptmap.diff(folder, tmp_path / "out", values=True).equal
    assert (tmp_path / "out" / "config.json").exists()


def test_an_index_of_any_name(tmp_path: Path) -> None:
    """diffusers' `save_pretrained(safe_serialization=False)`, by the function that it calls."""
    state = dict(tiny_llama().state_dict())
    pattern = "diffusion_pytorch_model{suffix}.bin"
    save_torch_state_dict(
        state, tmp_path, filename_pattern=pattern, safe_serialization=False, max_shard_size="100KB"
    )
    with ckptmap.open(tmp_path) as ckpt:
        assert set(ckpt) == set(state)
        for fqn, value in state.items():
            assert_same(ckpt[fqn].read(), value, fqn)
    first = tmp_path / "diffusion_pytorch_model.bin.index.json"
    (tmp_path / "diffusion_pytorch_model.bin.index.fp16.json").write_text(first.read_text())
    with pytest.raises(SourceError, match=r"expected one index, found \d: diffusion_pytorch"):
        ckptmap.open(tmp_path)


def test_one_file_beside_its_config(tmp_path: Path) -> None:
    state = dict(tiny_llama().state_dict())
    save_torch_state_dict(state, tmp_path, safe_serialization=False)
    with ckptmap.open(tmp_path) as ckpt:
        assert set(ckpt) == set(state)


def test_index_and_shards_that_disagree(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = saved
    index = json.loads((folder / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    key = next(k for k, name in index["weight_map"].items() if name == names[0])
    moved = {**index, "weight_map": {**index["weight_map"], key: names[1]}}
    (folder / INDEX).write_text(json.dumps(moved))
    with pytest.raises(
        SourceError, match=rf"'{key}' is stored in '{names[0]}', expected '{names[1]}'"
    ):
        ckptmap.open(folder)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / names[0]).unlink()
    with pytest.raises(SourceError, match=f"the shard '{names[0]}' is missing"):
        ckptmap.open(folder)
    index["weight_map"][key] = "../" + names[0]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError, match="leads out of the directory"):
        ckptmap.open(folder)


def test_a_set_without_its_index(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Complete by its names, or refused: no shard passes for the model."""
    folder, state = saved
    (folder / INDEX).unlink()
    with ckptmap.open(folder) as ckpt:
        assert set(ckpt) == set(state)
    last = sorted(folder.glob("*.bin"))[-1]
    last.rename(folder / "kept")
    with pytest.raises(SourceError, match=f"the shard '{last.name}' is missing"):
        ckptmap.open(folder)
    (folder / "kept").rename(folder / "pytorch_model-00001-of-00009.bin")
    with pytest.raises(
        SourceError, match="expected an index or one set of shards, found shards of 2 sets"
    ):
        ckptmap.open(folder)
