"""A plan is executed: bytes, digests, bounded memory, recovery from faults.

The files are laid out by hand: a head, slots with or without gaps, CRCs in the tail.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from ckptmap.errors import DestinationError, Interrupted, RunError, SourceError
from ckptmap.execution import copy as copying
from ckptmap.execution import execute as execute_module
from ckptmap.execution.execute import execute
from ckptmap.execution.written_slots import Executed
from ckptmap.planning.file_plan import Compare, Encode, FilePlan, SlotRef
from ckptmap.planning.options import RunOptions
from ckptmap.protocols import Encoding, Group, OutFile, Slot, Write
from ckptmap.protocols.progress import COPYING
from ckptmap.quantization.dense import Dense, DenseAs
from ckptmap.storage import direct_io as sink
from ckptmap.storage.direct_io import ALIGN, Buffer, OutputFile, Stream, Sums
from ckptmap.storage.files import Files
from ckptmap.storage.journal import Journal, Written
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo, contiguous_strides

HEAD = b"head" * 5


def as_bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()  # must outlive the view of its memory
    return bytes(tensor_bytes(whole))


def info_of(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def stored_in(file: Path, tensors: Sequence[torch.Tensor], gap: int = 0) -> list[StoredTensor]:
    """Write tensors one after the other and describe where they lie."""
    found, offset = [], 0
    with file.open("wb") as handle:
        for tensor in tensors:
            data, info = as_bytes(tensor), info_of(tensor)
            handle.write(data + b"\x77" * gap)
            region = Region.contiguous(str(file), offset, info.shape, info.itemsize)
            found.append(StoredTensor(info, [Chunk(Box.whole(info.shape), region)]))
            offset += len(data) + gap
    return found


def shards_in(folder: Path, tensor: torch.Tensor, parts: int, dim: int) -> StoredTensor:
    """One file a shard."""
    chunks, at = [], 0
    for rank, shard in enumerate(tensor.chunk(parts, dim)):
        offsets = tuple(at if d == dim else 0 for d in range(tensor.ndim))
        (stored,) = stored_in(folder / f"rank{rank}", [shard])
        chunks.append(Chunk(Box(offsets, tuple(shard.shape)), stored.chunks[0].region))
        at += shard.shape[dim]
    return StoredTensor(info_of(tensor), chunks)


def out_file(
    name: str, boxes: Sequence[tuple[str, Box, int]], gap: int = 0, needs_crc: bool = False
) -> OutFile:
    """HEAD, then slots of (key, box, itemsize); gaps are filled with b"g", CRCs follow the data."""
    slots, offset = [], len(HEAD)
    for key, box, itemsize in boxes:
        slots.append(Slot((key,), box, offset, box.numel * itemsize))
        offset += box.numel * itemsize + gap
    end = offset

    def seal(crcs: Sequence[int], manifest: bytes | None) -> Iterable[tuple[int, bytes]]:
        yield 0, HEAD
        for slot in slots:
            yield slot.offset + slot.nbytes, b"g" * gap
        yield end, b"".join(crc.to_bytes(4, "little") for crc in crcs) + (manifest or b"")

    return OutFile(name, end, slots, seal, needs_crc, holds_manifest=True)


def copy_plan(stored: Sequence[StoredTensor], gap: int = 0, needs_crc: bool = False) -> FilePlan:
    boxes = [
        (f"t{i}", Box.whole(item.info.shape), item.info.itemsize) for i, item in enumerate(stored)
    ]
    return FilePlan(out_file("out.bin", boxes, gap, needs_crc), stored)


def run(
    folder: Path,
    plan: Sequence[FilePlan],
    encodes: Sequence[Encode] = (),
    compares: Sequence[Compare] = (),
    direct: bool = True,
    manifest: Callable[[Executed], bytes] | None = None,
    **how: Any,
) -> Executed:
    folder.mkdir(exist_ok=True)
    files = Files()
    try:
        with Journal(folder / "journal", "plan") as journal:
            return execute(
                plan, encodes, compares, files, folder / "out", journal,
                RunOptions(**{"threads": 2, **how}), direct=direct, manifest=manifest,
            )  # fmt: skip
    finally:
        files.close()


def expected_file(payloads: Sequence[bytes], gap: int = 0, needs_crc: bool = False) -> bytes:
    body = b"".join(payload + b"g" * gap for payload in payloads)
    crcs = b"".join(zlib.crc32(p).to_bytes(4, "little") for p in payloads) if needs_crc else b""
    return HEAD + body + crcs


# ---------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("gap", "needs_crc"), [(0, False), (0, True), (133, True), (9000, False)])
def test_copies_of_all_sizes(tmp_path: Path, gap: int, needs_crc: bool, direct: bool) -> None:
    sizes = [0, 1, 7, 4096, 1, 300_001, 700_000, 1_500_003, 3, 2_000_000, 5, 900_000]
    tensors = [random_tensor(n) for n in sizes] + [random_tensor()]
    stored = stored_in(tmp_path / "src", tensors, gap=11)
    payloads = [as_bytes(tensor) for tensor in tensors]
    done = run(tmp_path / "work", [copy_plan(stored, gap, needs_crc)], direct=direct)
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert found == expected_file(payloads, gap, needs_crc)
    assert list(done.digests[0]) == [xxhash.xxh3_64_hexdigest(payload) for payload in payloads]
    assert list(done.crcs[0]) == [zlib.crc32(p) if needs_crc else 0 for p in payloads]
    assert done.continued_nbytes == 0


@pytest.mark.parametrize("digest", ["xxh3", "none"])
@pytest.mark.parametrize("needs_crc", [True, False])
def test_large_slots_that_follow_each_other_are_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_crc: bool, digest: str
) -> None:
    """With few small ones between them; a damaged one, found in the journal, is written anew."""
    monkeypatch.setattr(execute_module, "PARTS", 1)
    sizes = [3, 700_001, 5, 2_000_000, 900_000] + [1] * 20 + [800_000]
    tensors = [random_tensor(n) for n in sizes]
    head = random_tensor(len(HEAD) // 2)  # so that the kernel may copy
    stored = stored_in(tmp_path / "src", [head, *tensors])[1:]
    plan = [copy_plan(stored, needs_crc=needs_crc)]
    payloads = [as_bytes(tensor) for tensor in tensors]
    done = run(tmp_path / "work", plan, digest=digest)
    path = tmp_path / "work" / "out" / "out.bin"
    assert path.read_bytes() == expected_file(payloads, needs_crc=needs_crc)
    if digest == "none":
        return
    assert list(done.digests[0]) == [xxhash.xxh3_64_hexdigest(payload) for payload in payloads]
    lines = (tmp_path / "work" / "journal").read_text().splitlines()[1:]
    units = [json.loads(line)["unit"] for line in lines]
    assert sorted(units) == ["copy:0:0-5", "copy:0:25-26", "copy:0:5-25"]
    good = path.read_bytes()
    path.write_bytes(good[:90_000] + bytes([good[90_000] ^ 1]) + good[90_001:])
    mended = run(tmp_path / "work", plan)
    assert mended.continued_nbytes == sum(map(len, payloads[5:]))
    assert path.read_bytes() == good


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("max_memory", [1, 2 << 20, 64 << 20])
@pytest.mark.parametrize("dim", [0, 1])
def test_resharding_under_any_budget(
    tmp_path: Path, dim: int, max_memory: int, threads: int
) -> None:
    """3 shards along one dim become 2 along the other, byte for byte."""
    tensor = random_tensor(1201, 900)
    stored = shards_in(tmp_path, tensor, 3, dim)
    halves = [Box((0, 0), (1201, 449)), Box((0, 449), (1201, 451))]
    if dim:
        halves = [Box((0, 0), (600, 900)), Box((600, 0), (601, 900))]
    plans = [
        FilePlan(out_file(f"rank{i}.bin", [("t", box, 2)], needs_crc=True), [stored])
        for i, box in enumerate(halves)
    ]
    run(tmp_path / "work", plans, max_memory=max_memory, threads=threads)
    for index, (box, item) in enumerate(zip(halves, plans, strict=True)):
        (r, c), (h, w) = box.offsets, box.sizes
        payload = as_bytes(tensor[r : r + h, c : c + w])
        found = (tmp_path / "work" / "out" / item.out.name).read_bytes()
        assert found == expected_file([payload], needs_crc=True), index


def test_transposed_source_needs_no_torch(tmp_path: Path) -> None:
    tensor = random_tensor(700, 1300)
    stored_in(tmp_path / "src", [tensor])
    base = contiguous_strides((700, 1300), 2)
    region = Region(str(tmp_path / "src"), 0, (1300, 700), (base[1], base[0]), 2)
    turned = StoredTensor(
        TensorInfo((1300, 700), "bfloat16"), [Chunk(Box.whole((1300, 700)), region)]
    )
    run(tmp_path / "work", [copy_plan([turned])], max_memory=2 << 20)
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert found == expected_file([as_bytes(tensor.t())])


def test_manifest_knows_all_digests(tmp_path: Path) -> None:
    stored = stored_in(tmp_path / "src", [random_tensor(10), random_tensor(20)])
    calls = []

    def manifest(done: Executed) -> bytes:
        calls.append(done)
        return " ".join(done.digests[0]).encode()

    done = run(tmp_path / "work", [copy_plan(stored)], manifest=manifest)
    assert calls == [done]
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert found.endswith(" ".join(done.digests[0]).encode())


def test_a_longer_file_of_an_earlier_run_is_cut(tmp_path: Path) -> None:
    plan = [copy_plan(stored_in(tmp_path / "src", [random_tensor(10)]))]
    run(tmp_path / "work", plan, manifest=lambda done: b"m" * 1000)
    run(tmp_path / "work", plan, manifest=lambda done: b"n")
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert len(found) == plan[0].out.nbytes + 1


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    stored = stored_in(tmp_path / "src", [random_tensor(n) for n in (10, 3_000_000, 20)])
    seen: list[tuple[str, int, int, str]] = []
    run(tmp_path / "w", [copy_plan(stored)], progress=lambda *told: seen.append(told))
    copied = [told for told in seen if told[0] == COPYING]
    assert copied[0] == (COPYING, 0, 6_000_060, "") and copied[-1][1] == 6_000_060
    assert {name for _, _, _, name in copied[1:]} == {"t0", "t1", "t2"}
    assert [done for _, done, _, _ in copied] == sorted(done for _, done, _, _ in copied)


def test_many_files_with_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "MAX_OPEN", 3)
    tensors = [random_tensor(5) for _ in range(20)]
    stored = stored_in(tmp_path / "src", tensors)
    plans = [
        FilePlan(out_file(f"deep/rank{i}.bin", [("t", Box.whole((5,)), 2)]), [item])
        for i, item in enumerate(stored)
    ]
    before = len(os.listdir("/proc/self/fd"))
    run(tmp_path / "work", plans, threads=4)
    assert len(os.listdir("/proc/self/fd")) == before
    for item, tensor in zip(plans, tensors, strict=True):
        found = (tmp_path / "work" / "out" / item.out.name).read_bytes()
        assert found == expected_file([as_bytes(tensor)])


# ---------------------------------------------------------------------------------- errors


def test_damaged_source_is_found_for_free(tmp_path: Path) -> None:
    """A zip record's CRC-32 is held against the bytes where the target needs a CRC anyway."""
    for size in (50, 2_000_000):
        (stored,) = stored_in(tmp_path / "src", [random_tensor(size)])
        wrong = StoredTensor(stored.info, [stored.chunks[0]._replace(crc32=123)])
        with pytest.raises(
            SourceError, match="src: t0: bytes are damaged: expected CRC-32 0000007b"
        ):
            run(tmp_path / f"work{size}", [copy_plan([wrong], needs_crc=True)])
        run(tmp_path / f"free{size}", [copy_plan([wrong])])


@pytest.mark.parametrize("rows", [7, 30_000])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("digest", ["xxh3", "none"])
def test_a_bool_is_0_or_1(rows: int, parts: int, digest: str, tmp_path: Path) -> None:
    """In a span and in a stream, in one run and gathered, and where the kernel would copy."""
    mask = torch.arange(rows * 100).view(rows, 100) % 3 == 0
    good = shards_in(tmp_path, mask, parts, dim=1)
    done = run(tmp_path / "good", [copy_plan([good])], digest=digest)
    assert done.digests and (tmp_path / "good" / "out" / "out.bin").is_file()
    strange = mask.view(torch.uint8).clone()
    strange[rows - 2, 99] = 255
    bad = shards_in(tmp_path, strange, parts, dim=1)
    bad = StoredTensor(TensorInfo(bad.info.shape, "bool"), bad.chunks)
    says = rf"rank{parts - 1}: t0: BOOL element \[{rows - 2}, 99\] is the byte 255, expected 0 or 1"
    with pytest.raises(RunError, match=says) as caught:
        run(tmp_path / "bad", [copy_plan([bad])], digest=digest)
    assert caught.value.code == "CKM318"


def test_truncated_source(tmp_path: Path) -> None:
    stored = stored_in(tmp_path / "src", [random_tensor(1_000_000)])
    os.truncate(tmp_path / "src", 1_500_000)
    with pytest.raises(RunError, match=r"src: ended at byte \d+, expected \d+") as caught:
        run(tmp_path / "work", [copy_plan(stored)])
    assert caught.value.code == "CKM308"


def test_the_file_system_refuses_the_size(tmp_path: Path) -> None:
    """RLIMIT_FSIZE below the output: refused when space is reserved, before a byte."""
    stored = stored_in(tmp_path / "src", [random_tensor(1_000_000)])
    with limit_of_files(1 << 20), pytest.raises(DestinationError, match=r"needs 1\.9 MiB"):
        run(tmp_path / "work", [copy_plan(stored)])


@pytest.mark.parametrize("direct", [True, False])
def test_a_write_that_fails_is_told_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    tensors = [random_tensor(600_000) for _ in range(4)]
    plan = [copy_plan(stored_in(tmp_path / "src", tensors))]
    with monkeypatch.context() as patch:
        patch.setattr(sink, "_reserve", lambda fd, nbytes: None)
        with limit_of_files(3 << 20), pytest.raises(RunError, match="write failed: File too large"):
            run(tmp_path / "work", plan, direct=direct, threads=1)
    done = run(tmp_path / "work", plan, direct=direct)
    assert done.continued_nbytes > 0
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert found == expected_file([as_bytes(tensor) for tensor in tensors])


class limit_of_files:
    """RLIMIT_FSIZE for a while; Python ignores SIGXFSZ, so a write fails with EFBIG."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_first_error_stops_the_rest(tmp_path: Path) -> None:
    stored = stored_in(tmp_path / "src", [random_tensor(1_000_000) for _ in range(40)])
    calls = []

    def fail(phase: str, done: int, total: int, name: str) -> None:
        if not done:
            return
        calls.append(name)
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError, match="boom"):
        run(tmp_path / "work", [copy_plan(stored)], progress=fail, threads=4)
    assert len(calls) <= 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_and_continued(tmp_path: Path, number: signal.Signals) -> None:
    tensors = [random_tensor(600_000) for _ in range(20)]
    plan = [copy_plan(stored_in(tmp_path / "src", tensors))]
    calls = []

    def slow(phase: str, done: int, total: int, name: str) -> None:
        calls.append(name)
        if len(calls) == 5:
            os.kill(os.getpid(), number)
        time.sleep(0.02)

    with pytest.raises(Interrupted, match="the destination is as it was") as caught:
        run(tmp_path / "work", plan, progress=slow)
    assert caught.value.exit_code == 130
    assert len(calls) < 20
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} == {
        signal.SIG_DFL
    }
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptmap")]
    done = run(tmp_path / "work", plan)
    assert done.continued_nbytes > 0
    found = (tmp_path / "work" / "out" / "out.bin").read_bytes()
    assert found == expected_file([as_bytes(tensor) for tensor in tensors])


# ------------------------------------------------------------------------------ continuing


def test_journal_is_verified_before_it_is_believed(tmp_path: Path) -> None:
    tensors = [random_tensor(600_000), random_tensor(600_000), random_tensor(9)]
    plan = [copy_plan(stored_in(tmp_path / "src", tensors), needs_crc=True)]
    first = run(tmp_path / "work", plan)
    path = tmp_path / "work" / "out" / "out.bin"
    good = path.read_bytes()
    again = run(tmp_path / "work", plan)
    assert again.continued_nbytes == 2_400_018
    path.write_bytes(good[:500_000] + b"\x00\x01" + good[500_002:])
    mended = run(tmp_path / "work", plan)
    assert mended.continued_nbytes == 1_200_018
    assert path.read_bytes() == good
    path.unlink()
    assert run(tmp_path / "work", plan).continued_nbytes == 0
    assert path.read_bytes() == good
    assert first.digests == again.digests == mended.digests


def test_journal_of_another_plan_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    one, two = [Written(0, 0, "ab", 1)], [Written(0, 1, "cd", 2), Written(1, 0, "ef", 3)]
    with Journal(path, "plan") as journal:
        assert journal.entries == {}
        journal.add("u1", one)
        journal.add("u2", two)
    whole = path.read_bytes()
    with Journal(path, "plan") as journal:
        assert journal.entries == {"u1": tuple(one), "u2": tuple(two)}
    assert path.read_bytes() == whole
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, "plan") as journal:
            assert set(journal.entries) <= {"u1", "u2"}
            assert journal.entries.get("u2", tuple(two)) == tuple(two)
            journal.add("u3", one)
        with Journal(path, "plan") as journal:
            assert journal.entries["u3"] == tuple(one)
    path.write_bytes(whole.replace(b'"u1"', b"\xff\x00"))
    with Journal(path, "plan") as journal:
        assert journal.entries == {}
    with Journal(path, "other") as journal:
        assert journal.entries == {}


def test_hostile_journal_is_not_believed(tmp_path: Path) -> None:
    plan = [copy_plan(stored_in(tmp_path / "src", [random_tensor(9)]))]
    (tmp_path / "work").mkdir()
    with Journal(tmp_path / "work" / "journal", "plan") as journal:
        journal.add("copy:0:0-1", [Written(7, -3, "ab", 1)])
    assert run(tmp_path / "work", plan).continued_nbytes == 0


SIZES = [700_000, 30, 5_000, 800_001, 2_000_000, 1, 600_000, 900_000, 44, 1_200_000]


def kill_plan(source: Path) -> FilePlan:
    stored, offset = [], 0
    for size in SIZES:
        region = Region.contiguous(str(source), offset, (size,), 2)
        info = TensorInfo((size,), "bfloat16")
        stored.append(StoredTensor(info, [Chunk(Box.whole((size,)), region)]))
        offset += size * 2
    return copy_plan(stored, gap=3, needs_crc=True)


def test_killed_at_any_point_and_continued(tmp_path: Path) -> None:
    """SIGKILL after growing delays; the next run gives the same bytes, and keeps what was done."""
    data = os.urandom(sum(SIZES) * 2)
    (tmp_path / "src").write_bytes(data)
    plan = kill_plan(tmp_path / "src")
    run(tmp_path / "whole", [plan])
    whole = (tmp_path / "whole" / "out" / "out.bin").read_bytes()
    kept, killed, delay = [], 0, 0.0
    for _ in range(24):
        child = os.fork()
        if not child:
            try:
                run(tmp_path / "work", [plan], progress=lambda *told: time.sleep(0.001))
            finally:
                os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        done = run(tmp_path / "work", [plan])
        kept.append(done.continued_nbytes)
        assert (tmp_path / "work" / "out" / "out.bin").read_bytes() == whole
        shutil.rmtree(tmp_path / "work")
        delay += 0.001 if any(kept) or delay < 0.01 else delay  # a busy machine
    assert killed > 3
    assert max(kept) > 0


# ------------------------------------------------------------------------------- encodings


def lazy(fqn: str, stored: StoredTensor, files: Files) -> LazyTensor:
    return LazyTensor(fqn, Group(fqn, stored.info, Dense(), {"": stored}), files)


def cast_plan(
    boxes: Sequence[Box], stored: StoredTensor, to: str, files: Files
) -> tuple[list[FilePlan], Encode]:
    itemsize = TensorInfo((), to).itemsize
    plans = [
        FilePlan(out_file(f"r{i}.bin", [("w", box, itemsize)], needs_crc=True), [None])
        for i, box in enumerate(boxes)
    ]
    targets = {"": [SlotRef(index, 0) for index in range(len(boxes))]}
    return plans, Encode(lazy("model.w", stored, files), DenseAs(to), targets, "cast")


@pytest.mark.parametrize("max_memory", [1 << 20, 64 << 20])
@pytest.mark.parametrize("columns", [True, False])
def test_cast_into_any_boxes(tmp_path: Path, columns: bool, max_memory: int) -> None:
    tensor = random_tensor(1000, 700, dtype=torch.float32)
    stored = shards_in(tmp_path, tensor, 3, 0)
    cut = [Box((0, 0), (1000, 300)), Box((0, 300), (1000, 400))]
    boxes = cut if columns else [Box((0, 0), (333, 700)), Box((333, 0), (667, 700))]
    plans, step = cast_plan(boxes, stored, "bfloat16", Files())
    seen: list[int] = []
    before = torch.get_num_threads()
    run(
        tmp_path / "work", plans, [step], max_memory=max_memory,
        progress=lambda phase, done, total, name: seen.append(done),
    )  # fmt: skip
    assert torch.get_num_threads() == before
    assert max(seen) == 1_400_000
    for item, box in zip(plans, boxes, strict=True):
        (r, c), (h, w) = box.offsets, box.sizes
        payload = as_bytes(tensor.to(torch.bfloat16)[r : r + h, c : c + w])
        found = (tmp_path / "work" / "out" / item.out.name).read_bytes()
        assert found == expected_file([payload], needs_crc=True)


def test_an_encoder_that_refuses_names_the_tensor(tmp_path: Path) -> None:
    tensor = random_tensor(100, dtype=torch.float32)
    tensor[3] = 1e20
    (stored,) = stored_in(tmp_path / "src", [tensor])
    plans, step = cast_plan([Box.whole((100,))], stored, "float16", Files())
    with pytest.raises(RunError, match=r"model\.w: 1 finite value overflows float16") as caught:
        run(tmp_path / "work", plans, [step])
    assert caught.value.code == "CKM309"


@dataclass(frozen=True)
class Halves:
    """A scheme that needs the whole tensor: low bytes as they come, row maxima of 48 at the end."""

    name: str = "halves"

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo]:
        peaks = -(-info.numel // 48)
        return {
            "low": TensorInfo((info.numel, 2), "uint8"),
            "peaks": TensorInfo((peaks,), "float32"),
            "mean": TensorInfo((), "float32"),
        }

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        return None

    def decode(self, *_: object) -> None:
        raise NotImplementedError

    def encoder(self, info: TensorInfo, device: str) -> HalvesEncoder:
        return HalvesEncoder()

    def record(self, info: TensorInfo) -> None:
        return None


class HalvesEncoder:
    step = 48
    splittable = False
    state_nbytes = 0

    def __init__(self) -> None:
        self.peaks: list[torch.Tensor] = []
        self.offset = 0

    def feed(self, offset: int, values: torch.Tensor) -> Iterator[Write]:
        assert offset == self.offset, "fed in order"
        assert values.ndim == 1
        self.offset += values.numel()
        low = values.to(torch.bfloat16).view(torch.uint8)
        yield Write("low", Box((offset * 2,), (low.numel(),)), low)
        padded = torch.nn.functional.pad(values, (0, -values.numel() % 48))
        self.peaks.append(padded.view(-1, 48).amax(1))

    def finish(self) -> Iterator[Write]:
        peaks = torch.cat(self.peaks)
        yield Write("peaks", Box((0,), (peaks.numel(),)), peaks)
        yield Write("mean", Box((), ()), peaks.mean())


@pytest.mark.parametrize("shape", [(500, 77), (1, 5), (38_500,), (7, 5, 1100)])
def test_encoding_that_needs_the_whole_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Rows that are no multiple of the step; parts cut over two files, one of them thrice."""
    tensor = torch.rand(shape)
    stored = shards_in(tmp_path, tensor, 2, 0)
    encoding: Encoding = Halves()  # type: ignore[assignment]
    n, peaks = tensor.numel(), -(-tensor.numel() // 48)
    cuts = [0, n // 3, n // 2, n]
    lows = [Box((a, 0), (b - a, 2)) for a, b in pairwise(cuts)]
    one = out_file("one.bin", [("low", lows[0], 1), ("low", lows[1], 1)], needs_crc=True)
    rest = [("low", lows[2], 1), ("peaks", Box((0,), (peaks,)), 4), ("mean", Box((), ()), 4)]
    two = out_file("two.bin", rest, gap=5, needs_crc=True)
    plans = [FilePlan(one, [None] * 2), FilePlan(two, [None] * 3)]
    targets = {
        "low": [SlotRef(1, 0), SlotRef(0, 0), SlotRef(0, 1)],
        "peaks": [SlotRef(1, 1)],
        "mean": [SlotRef(1, 2)],
    }
    step = Encode(lazy("w", stored, Files()), encoding, targets, "quantize")
    run(tmp_path / "work", plans, [step], max_memory=1 << 16)
    low = as_bytes(tensor.to(torch.bfloat16))
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, -n % 48)).view(-1, 48).amax(1)
    first, second = (low[: 2 * cuts[1]], low[2 * cuts[1] : 2 * cuts[2]])
    found = (tmp_path / "work" / "out" / "one.bin").read_bytes()
    assert found == expected_file([first, second], needs_crc=True)
    payloads = [low[2 * cuts[2] :], as_bytes(flat), as_bytes(flat.mean())]
    found = (tmp_path / "work" / "out" / "two.bin").read_bytes()
    assert found == expected_file(payloads, gap=5, needs_crc=True)


def test_encoding_is_continued_too(tmp_path: Path) -> None:
    tensor = random_tensor(100, dtype=torch.float32)
    (stored,) = stored_in(tmp_path / "src", [tensor])
    plans, step = cast_plan([Box.whole((100,))], stored, "bfloat16", Files())
    run(tmp_path / "work", plans, [step])
    assert run(tmp_path / "work", plans, [step]).continued_nbytes == 200


# ----------------------------------------------------------------------------- comparisons


def replica_of(folder: Path, tensor: torch.Tensor, row: int, crc: int | None = None) -> Chunk:
    (stored,) = stored_in(folder / "replica", [tensor])
    return Chunk(Box((row, 0), tuple(tensor.shape)), stored.chunks[0].region, crc)


def test_replicas_are_compared_by_bytes(tmp_path: Path) -> None:
    tensor = random_tensor(900, 1000)
    stored = shards_in(tmp_path, tensor, 2, 0)
    twin = tensor[100:].clone()
    plan = [copy_plan([stored])]
    compare = Compare("model.w", stored, replica_of(tmp_path, twin, 100))
    run(tmp_path / "work", plan, compares=[compare])
    twin[-1, -1] += 1
    compare = Compare("model.w", stored, replica_of(tmp_path, twin, 100))
    message = r"model\.w: the replica at \[100, 0\] in .*replica differs from .*rank1"
    with pytest.raises(RunError, match=message) as caught:
        run(tmp_path / "work", plan, compares=[compare])
    assert caught.value.code == "CKM310"


def test_replicas_are_compared_by_crc_where_both_have_one(tmp_path: Path) -> None:
    tensor = random_tensor(9, 10)
    (stored,) = stored_in(tmp_path / "src", [tensor])
    stored = StoredTensor(stored.info, [stored.chunks[0]._replace(crc32=5)])
    wrong = random_tensor(9, 10)
    run(tmp_path / "w1", [copy_plan([stored])], compares=[
        Compare("w", stored, replica_of(tmp_path, wrong, 0, crc=5))])  # fmt: skip
    with pytest.raises(RunError, match="w: the replica at"):
        run(tmp_path / "w2", [copy_plan([stored])], compares=[
            Compare("w", stored, replica_of(tmp_path, tensor, 0, crc=6))])  # fmt: skip
    with pytest.raises(RunError, match="w: the replica at"):
        run(tmp_path / "w3", [copy_plan([stored])], compares=[
            Compare("w", stored, replica_of(tmp_path, wrong, 0))])  # fmt: skip


# ------------------------------------------------------------------------------------ sink


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 1, ALIGN - 1, ALIGN, ALIGN + 513])
def test_stream_of_pieces(tmp_path: Path, offset: int, direct: bool) -> None:
    """Neighbours share the pages at both ends and keep their bytes."""
    sizes = [1, 5000, 300_000, 0, 70_001, 12 * ALIGN, 400_003, 1_000_000]
    data = os.urandom(sum(sizes))
    output = OutputFile(tmp_path / "f", offset + len(data) + 3, direct)
    output.write_at(0, memoryview(b"a" * offset))
    output.write_at(offset + len(data), memoryview(b"zzz"))
    stream = Stream(output, offset, Buffer(512 << 10), Sums(wants_crc=True))
    at = 0
    for size in sizes:
        stream.append(memoryview(data)[at : at + size])
        at += size
        assert stream.position == offset + at
    sums = stream.finish()
    output.close()
    assert (tmp_path / "f").read_bytes() == b"a" * offset + data + b"zzz"
    assert (sums.digest, sums.crc32) == (xxhash.xxh3_64_hexdigest(data), zlib.crc32(data))


def test_direct_writes_happen_and_may_be_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        calls.append((fd, memoryview(data).nbytes, offset))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    output = OutputFile(tmp_path / "f", 1 << 20, direct=True)
    if output._direct is None:
        pytest.skip("this filesystem refuses O_DIRECT")
    buffer = Buffer(1 << 20)
    place = buffer.at(100, (1 << 20) - 100)
    place[:] = os.urandom(place.nbytes)
    output.write_at(100, place)
    assert (output._direct, (1 << 20) - ALIGN, ALIGN) in calls
    output.write_at(100, memoryview(bytearray(place))[: 1 << 19])  # not aligned in memory
    monkeypatch.setattr(os, "pwrite", real)
    os.close(output._direct)
    output._direct = os.open(tmp_path / "f", os.O_RDONLY)  # now writing there fails
    with pytest.raises(RunError, match="f: write failed: Bad file descriptor"):
        output.write_at(100, place)
    output._declined = True
    output.write_at(100, place)
    output.close()
    assert (tmp_path / "f").read_bytes()[100:] == bytes(place)


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        OutputFile(tmp_path / "f", 10).close()
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_output_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError, match="link: cannot be created"):
        OutputFile(tmp_path / "link", 10)


def test_memory_file_system_is_written_buffered(tmp_path: Path) -> None:
    """/dev/shm refuses O_DIRECT on many kernels; either way the bytes are right."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs")
    path = shm / f"ckptmap-test-{os.getpid()}"
    data = os.urandom(1 << 20)
    try:
        output = OutputFile(path, len(data))
        stream = Stream(output, 0, Buffer(1 << 19), Sums(wants_crc=False))
        stream.append(memoryview(data))
        stream.finish()
        output.close()
        assert path.read_bytes() == data
    finally:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------- scale


def test_no_torch_for_byte_moves_and_speed_of_small_slots(tmp_path: Path) -> None:
    """100 000 tensors of 4 KB in a fresh process; prints what one costs."""
    code = f"""
import sys, time
from pathlib import Path
from ckptmap.execution.execute import execute
from ckptmap.storage.files import Files
from ckptmap.storage.journal import Journal
from ckptmap.protocols import OutFile, Slot
from ckptmap.planning.options import RunOptions
from ckptmap.planning.file_plan import FilePlan
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo
N, folder = 100_000, Path({str(tmp_path)!r})
with open(folder / "src", "wb") as handle:
    handle.truncate(N * 4096)
info, box = TensorInfo((2048,), "bfloat16"), Box.whole((2048,))
stored = [StoredTensor(info, [Chunk(box, Region.contiguous(str(folder / "src"), i * 4096, (2048,), 2))])
          for i in range(N)]
slots = [Slot((f"t{{i}}",), box, 20 + i * 4096, 4096) for i in range(N)]
out = OutFile("out.bin", 20 + N * 4096, slots, lambda crcs, manifest: [(0, b"h" * 20)])
cpu = time.process_time()
with Journal(folder / "journal", "p") as journal:
    how = RunOptions(threads=2)
    done = execute([FilePlan(out, stored)], [], [], Files(), folder, journal, how)
print(f"{{(time.process_time() - cpu) / N * 1e6:.1f}} us of CPU a tensor")
assert (folder / "out.bin").stat().st_size == 20 + N * 4096
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_limits_are_consistent() -> None:
    assert execute_module.SMALL <= execute_module.SPAN <= copying.MAX_BUFFER
    assert copying.MAX_BUFFERS < 1024
