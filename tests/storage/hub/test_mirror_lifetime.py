"""A mirror belongs to the checkpoint that was opened: nothing of it is left when that is closed."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.storage.hub.uri import MIRROR_PREFIX
from tests.support.hub.client import connected, wide
from tests.support.hub.server import Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with pytest.MonkeyPatch.context() as patch, connected(tmp_path / "home", patch) as made:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        yield made


def mirrors(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob(f"{MIRROR_PREFIX}*"))


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_closing_a_checkpoint_removes_its_mirror(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/m", wide(tmp_path / "m", shards=2, rows=64))
    with ckptmap.open("hf://org/m") as ckpt:
        assert len(mirrors(tmp_path)) == 1
        assert len(list(ckpt.files.mounts)) == 1
    assert not mirrors(tmp_path)
    assert not ckpt.files.mounts


def test_the_path_in_a_mirror_is_never_read_as_a_local_file(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/m", wide(tmp_path / "m", shards=2, rows=64))
    with ckptmap.open("hf://org/m") as ckpt:
        with pytest.raises(SourceError, match="is the placeholder of a file on the Hub") as caught:
            ckptmap.open(ckpt.path)
        assert caught.value.code == "CKM101"
        with pytest.raises(SourceError, match="is the placeholder of a file on the Hub"):
            ckptmap.convert(ckpt.path, tmp_path / "out", "full")


def test_dropping_a_checkpoint_removes_its_mirror(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/m", wide(tmp_path / "m", shards=2, rows=64))
    ckpt = ckptmap.open("hf://org/m")
    tensor = ckpt[next(iter(ckpt))]
    del ckpt
    gc.collect()
    assert len(mirrors(tmp_path)) == 1, "a tensor still reads from it"
    tensor.read()
    del tensor
    gc.collect()
    assert not mirrors(tmp_path)


def test_two_repositories_do_not_see_each_other(hub: Hub, tmp_path: Path) -> None:
    """The mirrors hold files of the same name; closing the first leaves the second."""
    for name, rows in (("one", 64), ("two", 32)):
        hub.add(f"{name}/m", wide(tmp_path / name, shards=2, rows=rows))
    one, two = ckptmap.open("hf://one/m"), ckptmap.open("hf://two/m")
    assert not set(one.index.files) & set(two.index.files)
    assert all(two.files.mounts.file_system_of(file) is None for file in one.index.files)
    assert all(one.files.mounts.file_system_of(file) is None for file in two.index.files)
    one.close()
    with ckptmap.open(tmp_path / "two") as local, two:
        for fqn in local:
            assert torch.equal(two[fqn].read(), local[fqn].read()), fqn
    assert not mirrors(tmp_path)


@pytest.mark.parametrize("use", ["convert", "plan", "verify", "diff", "pull", "fails"])
def test_nothing_is_left_mounted(use: str, hub: Hub, tmp_path: Path) -> None:
    hub.add("org/m", wide(tmp_path / "m", shards=2, rows=64))
    source, out = "hf://org/m", tmp_path / "out"
    if use == "convert":
        ckptmap.convert(source, out, to="fsdp2", world_size=2)
    elif use == "plan":
        ckptmap.plan(source, "full").ckpt.close()
    elif use == "verify":
        ckptmap.convert(tmp_path / "m", out, to="full")
        assert ckptmap.verify(out, against=source).ok
    elif use == "diff":
        assert ckptmap.diff(source, tmp_path / "m", values=True).equal
    elif use == "pull":
        ckptmap.pull(source, out)
    else:
        with pytest.raises(SourceError, match="nowhere"):
            ckptmap.open(source, root="nowhere")
    assert not mirrors(tmp_path)


def test_opened_and_dropped_checkpoints_leave_no_descriptor(tmp_path: Path) -> None:
    folder = wide(tmp_path / "m", shards=3, rows=64)
    ckptmap.convert(folder, tmp_path / "dcp", to="fsdp2", world_size=2)
    ckptmap.convert(folder, tmp_path / "ranks", to="fsdp2-ranks", world_size=2)
    ckptmap.convert(folder, tmp_path / "full.pt", to="full")
    before = descriptors()
    for _ in range(3):
        for path in (folder, tmp_path / "dcp", tmp_path / "ranks", tmp_path / "full.pt"):
            ckpt = ckptmap.open(path)
            for fqn in ckpt:
                ckpt[fqn].read()
            del ckpt
    assert descriptors() == before
