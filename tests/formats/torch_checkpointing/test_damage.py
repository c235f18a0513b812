"""A save that is not whole, or mixed with another one, is refused by the name of what is wrong."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import CkptmapError, SourceError

pytestmark = pytest.mark.ranks
Saves = Callable[[int, str], Path]


@pytest.fixture
def copy(saves: Saves, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a save to a folder of its own: of two steps there is one alone."""

    def copied(world: int, name: str, step: int = 10, to: str = "alone/save") -> Path:
        target = tmp_path / to
        shutil.copytree(saves(world, name) / f"step-{step}", target)
        return target

    return copied


Copy = Callable[..., Path]


def refused(path: Path, code: str, *words: str) -> SourceError:
    with pytest.raises(SourceError) as caught:
        ckptmap.open(path)
    assert caught.value.code == code, caught.value
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in caught.value.message and caught.value.hint
    return caught.value


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("file", ["model_1.pt", "optimizer_0.pt", "ema_1.pt"])
def test_a_missing_rank_file(copy: Copy, step: int, file: str) -> None:
    save = copy(2, "fsdp2", step)
    (save / file).unlink()
    refused(save, "CKM110", file)


def test_a_missing_file_of_an_item_of_every_rank(copy: Copy) -> None:
    save = copy(4, "fsdp2")
    (save / "dataloader_2.pt").unlink()
    refused(save, "CKM110", "dataloader_2.pt")


def test_a_missing_file_that_metadata_lists(copy: Copy) -> None:
    save = copy(2, "layouts")
    (save / "rank_1/optimizer.pt").unlink()
    refused(save, "CKM110", "rank_1/optimizer.pt")


def test_no_file_of_a_listed_item(copy: Copy) -> None:
    save = copy(2, "fsdp2")
    for file in save.glob("model_*.pt"):
        file.unlink()
    refused(save, "CKM110", "'model'", "model_0.pt, model_1.pt")


@pytest.mark.parametrize("step", [10, 20])
def test_a_file_of_one_rank_too_many(copy: Copy, step: int) -> None:
    save = copy(2, "fsdp2", step)
    shutil.copy(save / "model_1.pt", save / "model_2.pt")
    refused(save, "CKM110", "model_2.pt")


@pytest.mark.parametrize("step", [10, 20])
def test_swapped_rank_files(copy: Copy, step: int) -> None:
    save = copy(2, "fsdp2", step)
    (save / "model_0.pt").rename(save / "x")
    (save / "model_1.pt").rename(save / "model_0.pt")
    (save / "x").rename(save / "model_1.pt")
    refused(save, "CKM110", "model_0.pt")


@pytest.mark.parametrize("file", ["model_1.pt", "step_1.pt", "metadata.pkl", "model_1.safetensors"])
@pytest.mark.parametrize("left", [0, 0.3, 0.98])
def test_a_truncated_file(copy: Copy, file: str, left: float) -> None:
    save = copy(2, "layouts" if file.endswith("safetensors") else "fsdp2")
    data = (save / file).read_bytes()
    (save / file).write_bytes(data[: int(left * len(data))])
    with pytest.raises(SourceError, match=file) as caught:
        ckptmap.open(save)
    assert caught.value.code in ("CKM101", "CKM104", "CKM105", "CKM106", "CKM107", "CKM117")


def test_metadata_of_another_world(copy: Copy) -> None:
    save, other = copy(2, "fsdp2"), copy(4, "fsdp2", to="other")
    shutil.copy(other / "metadata.pkl", save)
    refused(save, "CKM110", "model_2.pt")


def test_files_of_another_world(copy: Copy) -> None:
    save, other = copy(2, "fsdp2"), copy(4, "fsdp2", to="other")
    shutil.copy(other / "model_1.pt", save)
    refused(save, "CKM110", "4")


@pytest.mark.parametrize("other", ["plain", "flat", "layouts"])
def test_metadata_of_another_save(copy: Copy, other: str) -> None:
    save = copy(2, "fsdp2")
    shutil.copy(copy(2, other, to="other") / "metadata.pkl", save)
    error = refused(save, "CKM110" if other != "plain" else "CKM109")
    assert "metadata.pkl" in error.message


def _change(save: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = pickle.loads((save / "metadata.pkl").read_bytes())
    change(tree)
    (save / "metadata.pkl").write_bytes(pickle.dumps(tree))


def _weight(tree: dict[str, Any]) -> dict[str, Any]:
    groups = tree["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]']
    data: dict[str, Any] = groups[0]["sharding_metadata"]["data"]
    return data


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "shape": (lambda tree: _weight(tree).update(global_shape=[12, 8]), "CKM109"),
    "dtype": (lambda tree: _weight(tree).update(dtype="torch.float64"), "CKM109"),
    "placement": (lambda tree: _weight(tree).update(placements=[{"type": "Shard", "dim": 1}]), "CKM109"),
    "replicated": (lambda tree: _weight(tree).update(placements=[{"type": "Replicate"}]), "CKM109"),
    "partial": (lambda tree: _weight(tree).update(placements=[{"type": "Partial"}]), "CKM109"),
    "ranks": (
        lambda tree: _weight(tree).update(mesh_spec={**_weight(tree)["mesh_spec"], "mesh_data": (1, 0)}),
        "CKM109",
    ),
    "mesh": (lambda tree: _weight(tree).update(mesh_spec={"mesh_shape": (3,), "mesh_data": (0,)}), "CKM109"),
    "no tensor": (
        lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].pop('["embed.weight"]'),
        "CKM109",
    ),
    "one more": (
        lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"].update(
            {'["more"]': tree["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]']}
        ),
        "CKM109",
    ),
    "version": (lambda tree: tree.update(version="3.0"), "CKM109"),
    "world": (lambda tree: tree.update(world_size=3), "CKM110"),
    "smaller": (lambda tree: tree.update(world_size=1), "CKM110"),
    "sharding": (
        lambda tree: tree["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]'][0][
            "sharding_metadata"
        ].update(type="default_tensor_v1"),
        "CKM109",
    ),
    "path": (lambda tree: _layout(tree, "../model_0.pt"), "CKM116"),
    "absolute": (lambda tree: _layout(tree, "/tmp/model_0.pt"), "CKM116"),
    "json": (lambda tree: _layout(tree, "step_0.pt", "JsonSerialization"), "CKM109"),
    "gone": (lambda tree: _layout(tree, "nowhere.pt"), "CKM110"),
}  # fmt: skip


def _layout(tree: dict[str, Any], name: str, form: str = "") -> None:
    layouts = tree["metadata"]["model"]["rank_to_layout_info"]
    own = layouts[1] or {"serialization_format": {"type": "TorchSerialization"}}
    kept = own["serialization_format"]
    layouts[0] = {"file_path": name, "serialization_format": {"type": form} if form else kept}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("case", ["fsdp2", "layouts"])
def test_metadata_that_says_something_else(copy: Copy, kind: str, case: str) -> None:
    save = copy(2, case)
    change, code = CHANGES[kind]
    _change(save, change)
    with pytest.raises(SourceError) as caught:
        ckptmap.open(save)
    assert caught.value.code == code, caught.value


def test_a_link_out_of_the_directory(copy: Copy, tmp_path: Path) -> None:
    save = copy(2, "layouts")
    (save / "model_0.safetensors").rename(tmp_path / "outside.safetensors")
    (save / "model_0.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(save, "CKM116", "model_0.safetensors")


@pytest.mark.parametrize(
    "value", [[], {}, {"metadata": []}, {"world_size": 2, "metadata": {"model": 3}}]
)
def test_a_pickle_of_something_else(copy: Copy, value: object) -> None:
    save = copy(2, "fsdp2")
    (save / "metadata.pkl").write_bytes(pickle.dumps(value))
    refused(save, "CKM109", "metadata.pkl")


def test_a_pickle_that_would_run_code(copy: Copy) -> None:
    save = copy(2, "fsdp2")
    (save / "metadata.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    refused(save, "CKM106", "metadata.pkl")


def test_copies_that_drifted_apart(copy: Copy, tmp_path: Path) -> None:
    """Every rank of `plain` holds the whole model: the run compares the copies, as those of rank files."""
    save = copy(2, "plain")
    tree = torch.load(save / "model_1.pt")
    tree["head.bias"][1] += 1
    torch.save(tree, save / "model_1.pt")
    with pytest.raises(CkptmapError, match=r"head\.bias") as caught:
        ckptmap.convert(save, tmp_path / "out", to="full")
    assert caught.value.code == "CKM310" and not (tmp_path / "out").exists()


def test_a_save_that_was_killed(copy: Copy) -> None:
    save = copy(2, "fsdp2", to="tmp_step-30")
    (save / "optimizer_1.pt").unlink()
    error = refused(save, "CKM110", "optimizer_1.pt", "killed half way")
    assert "earlier checkpoint" in error.hint


def test_one_file_of_a_save(copy: Copy) -> None:
    save = copy(2, "layouts")
    error = refused(save / "model_0.safetensors", "CKM111", "one file of a torch_checkpointing")
    assert error.hint.endswith(str(save))
