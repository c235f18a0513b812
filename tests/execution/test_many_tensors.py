"""The cost of 100,000 tensors: no object, read or write for each of them; and conversion without digests."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import save as dcp_save

import ckptmap
from ckptmap.checkpoint.logical_tensors import LogicalTensors
from ckptmap.errors import SourceError
from ckptmap.execution.manifest import emit
from ckptmap.formats.zip.reader import read_records
from ckptmap.operations.verify import verify
from ckptmap.protocols import Group
from ckptmap.storage import direct_io as sink
from ckptmap.storage.files import Files
from ckptmap.tensors import Chunk, Extent, Region, StoredTensor, TensorInfo

MANY = 3000


def small_tensors(count: int = MANY) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, 24, generator=generator)
    return {f"blocks.{i}.w": values[i].clone() for i in range(count)}


def big_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(n, 1024, generator=generator)
        for name, n in (("a.w", 1024), ("b.w", 700), ("c.w", 1))
    }


def safetensors(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each was called."""
    counts: dict[str, int] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    for name in ("pread", "preadv", "pwrite", "copy_file_range"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return counts


# ----------------------------------------------------------------------------- many tensors


def test_gaps_between_small_slots_are_written_with_them(
    tmp_path: Path, system_calls: dict[str, int]
) -> None:
    state = small_tensors()
    source = safetensors(tmp_path / "hf", state)
    ckptmap.convert(source, tmp_path / "out.pt", to="full")
    assert system_calls["pwrite"] < 100, "one write a tensor, or one a header, would be 3000"
    assert system_calls["pread"] + system_calls["preadv"] < 100
    loaded = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("threads", [1, 3])
def test_slots_of_every_size_are_written(tmp_path: Path, threads: int) -> None:
    """Slots of every size, empty ones too, so that units of all kinds meet."""
    numels = [3, 0, 400_000, 5, 7, 0, 300_000, 280_000, 1, *[30_000] * 60, 2]
    state = {f"t{i}": torch.arange(n, dtype=torch.float32) + i for i, n in enumerate(numels)}
    torch.save(state, tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full", threads=threads)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
    assert verify(tmp_path / "out.pt", tmp_path / "in.pt").ok


@pytest.mark.parametrize("container", ["torch.save", "dcp"])
def test_headers_of_small_items_are_read_in_blocks(
    tmp_path: Path, system_calls: dict[str, int], container: str
) -> None:
    state, path = small_tensors(), tmp_path / "source"
    if container == "dcp":
        dcp_save(state, checkpoint_id=path, no_dist=True)
    else:
        torch.save(state, path)
    with ckptmap.open(path) as ckpt:
        system_calls.clear()
        for fqn in ckpt:
            (chunk,) = ckpt[fqn].parts[""].chunks
            assert chunk.crc32
        assert sum(system_calls.values()) < MANY / 10
        assert torch.equal(ckpt["blocks.7.w"].read(), state["blocks.7.w"])


def test_a_local_header_that_contradicts_is_found_in_a_block(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(small_tensors(200), path)
    record = read_records(Files(), str(path))["data/77"]
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"m/data/77", 0, record.offset)
    raw[at : at + 9] = b"m/data/78"
    path.write_bytes(raw)
    with ckptmap.open(path) as ckpt, pytest.raises(SourceError, match="data/77: its local header"):
        list(ckpt["blocks.77.w"].parts[""].chunks)


def test_a_group_is_made_when_it_is_asked_for(tmp_path: Path) -> None:
    with ckptmap.open(safetensors(tmp_path / "hf", small_tensors(10))) as ckpt:
        group = ckpt.group("blocks.3.w")
        assert group == Group("blocks.3.w", group.info, group.encoding, group.parts)
        assert group.encoding.name == "dense" and ckpt.group("blocks.3.w") is not group
        assert ckpt.encodings == ("dense",)
        with pytest.raises(KeyError, match=r"no tensor 'blocks\.99\.w'"):
            ckpt["blocks.99.w"]


def test_groups_hold_both_kinds_in_order() -> None:
    stored = StoredTensor(TensorInfo((2,), "float32"), Extent("f", 0))
    plain = LogicalTensors({"a": stored})["a"]
    other = plain._replace(fqn="b")
    groups = LogicalTensors({"a": stored, "b": other}).renamed({"a": "x.a", "b": "x.b"})
    assert list(groups) == ["x.a", "x.b"] and list(groups.forms()) == ["x.b"]
    assert groups["x.b"] == other._replace(fqn="x.b") and groups["x.a"].parts == {"": stored}
    assert groups.infos() == {"x.a": stored.info, "x.b": stored.info}


def test_an_extent_and_its_chunk_say_the_same() -> None:
    info = TensorInfo((2, 3), "int16")
    tensor = StoredTensor(info, Extent("f", 40, 7))
    (chunk,) = tensor.chunks
    assert chunk.region == Region.contiguous("f", 40, (2, 3), 2) and chunk.crc32 == 7
    assert StoredTensor(info, [chunk]).extent == tensor.extent == Extent("f", 40, 7)
    across = Chunk(chunk.box, Region("f", 40, (2, 3), (2, 4), 2))
    assert StoredTensor(info, [across]).extent is None


def test_inspect_holds_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Live Python memory a tensor: the rule is 2 KiB in all, its name and the index included."""
    count = 20_000
    path = safetensors(tmp_path / "hf", {f"layers.{i}.w": torch.zeros(1) for i in range(count)})
    tracemalloc.start()
    try:
        with ckptmap.open(path) as ckpt:
            held, _ = tracemalloc.get_traced_memory()
            assert len(ckpt) == count
    finally:
        tracemalloc.stop()
    assert held / count < 1024
    assert main(["inspect", str(path)]) == 0
    assert f"layers.{{0..{count - 1}}}.w  {count}x" in capsys.readouterr().out


# ----------------------------------------------------------------------------- no digests


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix != ".json"]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("to", ["hf", "fsdp2", "hf-bf16", "fsdp2-nf4"])
def test_without_digests_the_same_is_written(tmp_path: Path, to: str) -> None:
    source = safetensors(tmp_path / "in", {**big_tensors(), **small_tensors(20)})
    ckptmap.convert(source, tmp_path / "with", to=to)
    ckptmap.convert(source, tmp_path / "without", to=to, digest="none")
    assert content(tmp_path / "with") == content(tmp_path / "without")
    manifest = json.loads((tmp_path / "without" / "ckptmap.manifest.json").read_text())
    found = {chunk[5] for entry in manifest["tensors"].values() for chunk in entry["chunks"]}
    assert found == {""}


def test_verify_says_what_it_cannot_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = safetensors(tmp_path / "in", big_tensors()), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", "hf", "--digest", "none"]) == 0
    capsys.readouterr()
    assert main(["verify", str(out)]) == 0
    assert "structure, no digests, since it was written with --digest none" in (
        capsys.readouterr().out
    )
    file = out / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert main(["verify", str(out)]) == 0, "no digest tells"
    assert main(["verify", str(out), "--against", str(source)]) == 1, "the source does"
    file.write_bytes(raw[:-4])
    assert main(["verify", str(out)]) == 1


def test_bytes_that_nobody_looks_at_stay_in_the_kernel(
    tmp_path: Path, system_calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = big_tensors()
    source = safetensors(tmp_path / "in", state)
    ckptmap.convert(source, tmp_path / "read", to="hf")
    assert "copy_file_range" not in system_calls
    ckptmap.convert(source, tmp_path / "copied", to="hf", digest="none")
    assert system_calls["copy_file_range"] >= 2, "of both tensors of more than a MiB"
    assert content(tmp_path / "copied") == content(tmp_path / "read")

    def refused(*args: object) -> int:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refused)
    ckptmap.convert(source, tmp_path / "fallen", to="hf", digest="none")
    assert content(tmp_path / "fallen") == content(tmp_path / "read")
    loaded = load_file(tmp_path / "fallen" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_bytes_that_lie_otherwise_in_their_blocks_are_read(
    tmp_path: Path, system_calls: dict[str, int]
) -> None:
    """Unaligned, the kernel copies slower than reading and writing does; and a zip wants CRCs."""
    torch.save(big_tensors(), tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "hf", to="hf", digest="none")
    source = safetensors(tmp_path / "aligned", big_tensors())
    ckptmap.convert(source, tmp_path / "out.pt", to="full", digest="none")
    assert "copy_file_range" not in system_calls
    assert verify(tmp_path / "out.pt", source).ok


def test_a_killed_run_without_digests_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = safetensors(tmp_path / "in", big_tensors()), tmp_path / "out"
    truncate = sink.OutputFile.truncate

    def killed(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(sink.OutputFile, "truncate", killed)
    with pytest.raises(MemoryError):
        ckptmap.convert(source, out, to="hf", digest="none")
    monkeypatch.setattr(sink.OutputFile, "truncate", truncate)
    (work,) = tmp_path.glob(".out.ckptmap-*")
    written = work / "out" / "model.safetensors"
    written.write_bytes(b"\xff" * written.stat().st_size)  # pages that never reached the disk
    report = ckptmap.convert(source, out, to="hf", digest="none")
    assert report.continued_nbytes == 0
    assert verify(out, source).ok


# ----------------------------------------------------------------------------- the manifest


def test_the_manifest_is_what_its_entries_say(tmp_path: Path) -> None:
    """Entries of many tensors are written as text, straight: the same as JSON of each."""
    state = {**small_tensors(1100), 'odd "name" \\ ü\N{SNOWMAN}': torch.ones(3)}
    torch.save(state, tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp2", world_size=3)
    raw = (tmp_path / "out" / "ckptmap.manifest.json").read_bytes()
    document = json.loads(raw)
    assert emit(document) == raw
    assert set(document["logical"]) == set(state)
    for entry in document["tensors"].values():
        offsets = sorted((chunk[0], chunk[1]) for chunk in entry["chunks"])
        assert len(offsets) == 3 and all(a != b for a, b in pairwise(offsets))
