"""What is on disk when a run returns: all of it, in order; with --no-sync nothing is waited for.
Threads copy bytes while torch is still being imported."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import DestinationError
from ckptmap.execution import execute as execute_module
from ckptmap.operations.verify import verify
from ckptmap.storage import publish
from ckptmap.storage.direct_io import ALIGN, Buffer
from ckptmap.storage.direct_io import _address as address
from tests.support.hub.client import llama
from tests.support.hub.server import Hub
from tests.support.merge_cases import LINEARS, saved
from tests.support.merge_cases import llama as small_llama

SETUPS = {"hf": {}, "full": {}, "fsdp2-nf4": {"world_size": 2}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slots that go past the page cache and slots that do not."""
    folder = tmp_path_factory.mktemp("sync") / "model"
    folder.mkdir()
    torch.manual_seed(4)
    state = {f"l.{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(4)}
    state |= {"embed.weight": torch.randn(3001, 512).bfloat16(), "l.norm.weight": torch.ones(7)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, path) of every write, sync and rename, in order."""
    found: list[tuple[str, str]] = []
    pwrite, fsync, rename, renameat2 = os.pwrite, os.fsync, os.rename, publish._renameat2

    def path_of(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").readlink())

    def wrote(fd: int, data: memoryview, offset: int) -> int:
        found.append(("write", path_of(fd)))
        return pwrite(fd, data, offset)

    def synced(fd: int) -> None:
        found.append(("sync", path_of(fd)))
        fsync(fd)

    def renamed(old: Path, new: Path) -> None:
        found.append(("rename", str(old)))
        rename(old, new)

    def renamed_at(old: Path, new: Path, flags: int) -> bool:
        found.append(("rename", str(old)))
        return renameat2(old, new, flags)

    monkeypatch.setattr(os, "pwrite", wrote)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(publish, "_renameat2", renamed_at)
    return found


@pytest.mark.parametrize("to", SETUPS)
def test_by_default_all_is_on_disk_before_it_appears(
    source: Path, tmp_path: Path, calls: list[tuple[str, str]], to: str
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to=to, **SETUPS[to])
    (renamed,) = [i for i, (what, at) in enumerate(calls) if what == "rename" and "/out" in at]
    work = Path(calls[renamed][1])
    below = {str(work / name) if name else str(work) for name in content(out)}
    assert below <= {at for what, at in calls[:renamed] if what == "sync"}
    for at in below:
        of_file = [what for what, path in calls[:renamed] if path == at]
        assert of_file[-1] == "sync", "nothing is written after it"
    folders = [at for what, at in calls[:renamed] if what == "sync" and at not in below]
    assert Path(folders[-1]).name.startswith(".out.ckptmap-"), "its entries, and the marker"
    assert calls[renamed + 1 :][0] == ("sync", str(tmp_path))


@pytest.mark.parametrize("to", SETUPS)
def test_without_sync_the_same_bytes_and_nobody_waits(
    source: Path, tmp_path: Path, calls: list[tuple[str, str]], to: str
) -> None:
    options = ["--world-size", "2"] if SETUPS[to] else []
    ckptmap.convert(source, tmp_path / "durable" / "out", to=to, **SETUPS[to])
    calls.clear()
    line = ["convert", str(source), str(tmp_path / "out"), "--to", to, "--quiet", *options]
    assert main([*line, "--no-sync"]) == 0
    assert [at for what, at in calls if what == "sync"] == []
    assert any(what == "write" for what, _ in calls)
    assert content(tmp_path / "out") == content(tmp_path / "durable" / "out")


def test_without_sync_large_writes_go_past_the_page_cache_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: set[int] = set()
    past: list[int] = []
    pwrite, opened = os.pwrite, os.open

    def wrote(fd: int, data: memoryview, offset: int) -> int:
        if fd in direct:
            past.append(memoryview(data).nbytes)
        return pwrite(fd, data, offset)

    def open_(path: str, how: int, *more: int, **named: int) -> int:
        fd = opened(path, how, *more, **named)
        (direct.add if how & os.O_DIRECT else direct.discard)(fd)
        return fd

    monkeypatch.setattr(os, "pwrite", wrote)
    monkeypatch.setattr(os, "open", open_)
    ckptmap.convert(source, tmp_path / "out", to="hf", sync=False)
    if not direct:
        pytest.skip("this filesystem refuses O_DIRECT")
    assert sum(past) > 4 << 20
    assert verify(tmp_path / "out", source).ok


# ------------------------------------------------------------------- what it gives up


def torn(file: Path) -> None:
    """As a power cut leaves a file whose last pages never came to the disk."""
    with file.open("r+b") as stream:
        stream.seek(-4096, os.SEEK_END)
        stream.write(bytes(4096))


def test_bytes_lost_after_publishing_are_found(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to="hf", sync=False)
    torn(out / "model.safetensors")
    assert not verify(out).ok
    with pytest.raises(DestinationError, match="out: exists"):
        ckptmap.convert(source, out, to="hf", sync=False)
    ckptmap.convert(source, out, to="hf", sync=False, overwrite=True)
    assert verify(out, source).ok


def test_a_complete_output_is_synced_when_that_is_wanted_after_all(
    source: Path, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to="hf", sync=False)
    assert "was complete already" in ckptmap.convert(source, out, to="hf", sync=False).notes
    assert "sync" not in {what for what, _ in calls}
    assert "was complete already" in ckptmap.convert(source, out, to="hf").notes
    synced = {at for what, at in calls if what == "sync"}
    assert synced == {str(out), *(str(file) for file in out.iterdir())}


def test_without_digests_nobody_says_that_it_is_complete(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to="hf", sync=False, digest="none")
    torn(out / "model.safetensors")
    with pytest.raises(DestinationError, match="out: exists"):
        ckptmap.convert(source, out, to="hf", digest="none")


# -------------------------------------------------------------------- other commands


def test_merge_and_pull_take_it_too(hub: Hub, tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    saved(tmp_path, small_llama(), target_modules=LINEARS)
    places = [str(tmp_path / name) for name in ("base", "adapter", "merged")]
    hub.add("org/m", llama(tmp_path / "model", "60KB"))
    pulled = str(tmp_path / "pulled")
    calls.clear()
    assert main(["merge", *places, "--quiet", "--no-sync"]) == 0
    assert main(["pull", "hf://org/m", pulled, "--quiet", "--no-sync"]) == 0
    to = ["--to", "full", "--no-sync"]
    assert main(["pull", "hf://org/m", pulled + ".pt", "--quiet", *to]) == 0
    ours = [at for what, at in calls if what == "sync" and "/home/" not in at]
    assert ours == []
    assert verify(places[2]).ok
    assert verify(pulled + ".pt", "hf://org/m").ok
    assert main(["pull", "hf://org/m", pulled, "--quiet"]) == 0
    assert ("sync", pulled) in calls, "it was complete already, and now it is on disk"


# ---------------------------------------------------------------- torch is brought meanwhile


def test_threads_copy_while_torch_is_imported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = threading.Event()
    real, whole = execute_module.copy_stream, execute_module.one_torch_thread
    order: list[str] = []

    def copy(*given: object) -> object:
        order.append("copy")
        found = real(*given)  # type: ignore[arg-type]
        copied.set()
        return found

    @contextmanager
    def slow(wanted: bool) -> Iterator[None]:
        assert copied.wait(60), "nothing was copied before torch was there"
        order.append("torch")
        with whole(wanted):
            yield

    encode = execute_module.encode

    def encoded(*given: object) -> object:
        order.append("encode")
        return encode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(execute_module, "copy_stream", copy)
    monkeypatch.setattr(execute_module, "encode", encoded)
    monkeypatch.setattr(execute_module, "one_torch_thread", slow)
    ckptmap.convert(source, tmp_path / "out", to="fsdp2-nf4", world_size=2, threads=1)
    assert order.index("copy") < order.index("torch") < order.index("encode")
    assert order.count("encode") == 4
    monkeypatch.undo()
    ckptmap.convert(source, tmp_path / "plain", to="fsdp2-nf4", world_size=2)
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_where_torch_cannot_be_brought_nothing_is_published(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(wanted: bool) -> None:
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(execute_module, "one_torch_thread", broken)
    with pytest.raises(ImportError, match="libtorch_cpu"):
        ckptmap.convert(source, tmp_path / "out", to="fsdp2-nf4", world_size=2)
    assert not (tmp_path / "out").exists()
    assert "torch" in sys.modules


# --------------------------------------------------------------------- a thread's memory


def test_parts_of_a_buffer_are_apart_and_aligned() -> None:
    whole = Buffer(1 << 20)
    sizes = [300_000, 1, 500_000, 400_000]
    parts = whole.parts(sizes)
    for number, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
        place = part.at(ALIGN - 1, nbytes)
        assert (address(place) - (ALIGN - 1)) % ALIGN == 0
        place[:] = bytes([number + 1]) * nbytes
    held = bytes(whole.at(0, whole.nbytes))
    for number, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
        assert bytes(part.at(ALIGN - 1, nbytes)) == bytes([number + 1]) * nbytes
        assert (held.count(number + 1) > 0) == (number < 3), "the last has memory of its own"
