"""A flipped byte in a source is refused by whoever reads it, wherever the container states a sum."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError, Interrupted, SourceError
from ckptmap.operations.verify import verify
from ckptmap.tensors import StatedSum
from tests.corpus import Corpus
from tests.corpus.ranks import run_ranks
from tests.support.forked import run_code
from tests.support.int8_models import dense

FLIPS = 4
"""Records of each case in which a byte is flipped, the largest first."""
PIECEWISE = {"world_size": 3}
"""Options under which no rank's part is a whole record."""


def records(path: Path) -> Iterator[tuple[str, StatedSum]]:
    """Yield the records that tensors of a checkpoint have bytes in, the largest first."""
    with ckptmap.open(path) as ckpt:
        spans = [
            (region.file, region.offset, region.offset + region.span_nbytes)
            for fqn in ckpt
            for stored in ckpt[fqn].beneath
            for _, region, _ in stored.chunks
        ]
        stated = [(file, one) for file, sums in ckpt.files.mounts.stated.items() for one in sums]
    stated = list(dict.fromkeys(stated))
    for file, record in sorted(stated, key=lambda item: -item[1].nbytes):
        end = record.offset + record.nbytes
        if any(f == file and a < end and record.offset < b for f, a, b in spans):
            yield file, record


def flipped(path: Path, copy: Path, file: str, record: StatedSum) -> Path:
    """Copy a checkpoint, with one bit flipped in the middle of a record."""
    if path.is_dir():
        shutil.copytree(path, copy)
    else:
        copy.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(path, copy)
    damaged = copy / Path(file).relative_to(path) if path.is_dir() else copy
    content = bytearray(damaged.read_bytes())
    content[record.offset + record.nbytes // 2] ^= 0x10
    damaged.write_bytes(content)
    return copy


DAMAGED = "are damaged: expected CRC-32|the replica at .* differs from"
ZIPPED = (
    "torch_plain", "torch_views", "torch_named_optimizer", "dcp_single", "fsdp2_dcp_w4",
    "fsdp2_dcp_shard1_w2", "fsdp1_dcp_optimizer_flat_w2", "fsdp2_ranks_w4",
    "fsdp1_ranks_flat_bf16_w2", "fsdp_tp_ranks_w4", "nf4_torch_bf16", "nf4_fsdp2_ranks_bf16_w2",
    "int8_torch_bf16", "float8_torch_fp32",
)  # fmt: skip


@pytest.mark.parametrize("name", ZIPPED)
def test_a_flipped_byte_of_a_writers_checkpoint_is_refused(
    name: str, corpus: Corpus, tmp_path: Path
) -> None:
    path = corpus[name].path
    tried = list(records(path))[:FLIPS]
    assert tried, "the writer states a CRC-32 for every tensor"
    for number, (file, record) in enumerate(tried):
        bad = flipped(path, tmp_path / f"bad{number}" / path.name, file, record)
        for to, options in (("full", {}), ("fsdp2", PIECEWISE)):
            dst = tmp_path / f"out{number}-{to}"
            with pytest.raises(CkptmapError, match=DAMAGED) as caught:
                ckptmap.convert(bad, dst, to, **options)
            assert caught.value.code in ("CKM105", "CKM310")
            assert not dst.exists()
    report = ckptmap.convert(path, tmp_path / "good", "fsdp2", **PIECEWISE)
    assert not [note for note in report.notes if "checksum" in note]


@pytest.mark.parametrize("to", ["hf", "dcp-hf", "hf-nf4", "full-nf4", "fsdp2-nf4", "ddp-bf16"])
def test_a_flipped_byte_of_an_output_of_ours_is_refused(
    to: str, corpus: Corpus, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    ckptmap.convert(corpus["torch_bf16"].path, source, to)
    for number, (file, record) in enumerate(_written(source)[:FLIPS]):
        bad = flipped(source, tmp_path / f"bad{number}", file, record)
        with pytest.raises(
            SourceError, match=r"(are damaged|are not what ckptmap wrote): expected (CRC-32|xxh3)"
        ):
            ckptmap.convert(bad, tmp_path / f"out{number}", "full")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_relative_path_compares_as_much(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if to == "hf":
        torch.save({"w": torch.randn(8, 32)}, "source.pt")
        ckptmap.convert("source.pt", "ours", to)
        file = Path("ours/model.safetensors")
    else:
        file = Path("ours.gguf")
        ckptmap.convert(dense(tmp_path / "dense"), file, to)
    path = Path("ours") if to == "hf" else file
    offset = _written(path)[0][1].offset
    with file.open("r+b") as stream:
        stream.seek(offset)
        first = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([first[0] ^ 1]))
    with pytest.raises(SourceError, match="are not what ckptmap wrote"):
        ckptmap.convert(path, "out.pt", "full")


def _written(path: Path) -> list[tuple[str, StatedSum]]:
    """Return the chunks of an output of ours as records, from the checkpoint itself."""
    with ckptmap.open(path) as ckpt:
        return [
            (region.file, StatedSum(region.offset, region.nbytes, None))
            for fqn in ckpt
            for stored in ckpt[fqn].beneath
            for _, region, _ in stored.chunks
        ]


def test_a_view_of_a_damaged_storage_is_refused_though_it_is_read_in_parts(tmp_path: Path) -> None:
    fused = torch.arange(6000, dtype=torch.float32)
    path = tmp_path / "views.pt"
    torch.save({"q.weight": fused[:3000], "k.weight": fused[3000:]}, path)
    ((file, record), *_) = records(path)
    assert record.nbytes == fused.nbytes
    bad = flipped(path, tmp_path / "bad" / "views.pt", file, record)
    with pytest.raises(SourceError, match=r"k\.weight \(and 1 more tensor\): .* are damaged"):
        ckptmap.convert(bad, tmp_path / "out", "fsdp2", world_size=2)


def test_part_of_a_record_is_told_and_full_reads_the_rest(tmp_path: Path) -> None:
    fused = torch.arange(60000, dtype=torch.float32)
    path = tmp_path / "views.pt"
    torch.save({"q.weight": fused[:20000], "k.weight": fused[20000:]}, path)
    ((file, record), *_) = records(path)
    bad = flipped(path, tmp_path / "bad" / "views.pt", file, record)  # in k.weight
    report = ckptmap.convert(bad, tmp_path / "part", "full", include="q.*")
    assert any("78.1 KiB were read from parts of records" in note for note in report.notes)
    with pytest.raises(SourceError, match="are damaged"):
        ckptmap.convert(bad, tmp_path / "whole", "full", include="q.*", check_source="full")
    report = ckptmap.convert(path, tmp_path / "good", "full", include="q.*", check_source="full")
    assert not any("records" in note for note in report.notes)


def test_none_converts_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"a.weight": torch.ones(100)}, path)
    ((file, record), *_) = records(path)
    bad = flipped(path, tmp_path / "bad" / "plain.pt", file, record)
    ckptmap.convert(bad, tmp_path / "out", "hf", check_source="none")
    with ckptmap.open(bad) as ckpt, pytest.raises(SourceError, match=r"a\.weight: .* are damaged"):
        ckpt["a.weight"].read()


def test_a_source_without_checksums_is_told(corpus: Corpus, tmp_path: Path) -> None:
    report = ckptmap.convert(corpus["torch_aligned_nocrc"].path, tmp_path / "out", "fsdp2")
    assert any("states no checksum for" in note for note in report.notes)


def test_a_foreign_file_under_our_manifest_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path, hf = tmp_path / "plain.pt", tmp_path / "my model's hf"
    torch.save({"a.weight": torch.ones(100, 10)}, path)
    ckptmap.convert(path, hf, "hf")
    written = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(written[:-4000] + bytes(4000))
    with pytest.raises(SourceError, match="if another program wrote the file after") as caught:
        ckptmap.convert(hf, tmp_path / "out", "full")
    ckptmap.convert(hf, tmp_path / "unchecked", "full", check_source="none")
    kept = (hf / "ckptmap.manifest.json").read_bytes()
    command = str(caught.value.hint).partition("out of date: ")[2].partition(", and run")[0]
    subprocess.run(command, shell=True, check=True)
    assert not (hf / "ckptmap.manifest.json").exists()
    ckptmap.convert(hf, tmp_path / "without", "full")
    (hf / "ckptmap.manifest.json").write_bytes(kept)
    save_file({"a.weight": torch.zeros(100, 10)}, hf / "model.safetensors")
    size = (hf / "model.safetensors").stat().st_size
    assert size != len(written)
    with pytest.raises(SourceError, match=f"has {size} bytes, its .* states {len(written)}"):
        ckptmap.convert(hf, tmp_path / "out", "full")


def test_verify_against_a_damaged_source_is_refused_though_the_values_are_equal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"a.weight": torch.ones(100, 10)}, path)
    ((file, record), *_) = records(path)
    bad = flipped(path, tmp_path / "bad" / "plain.pt", file, record)
    ckptmap.convert(bad, tmp_path / "hf", "hf", check_source="none")
    report = verify(tmp_path / "hf", bad)
    assert not report.ok
    assert any("are damaged: expected CRC-32" in problem for problem in report.problems)


def test_a_continued_run_compares_what_the_killed_one_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({f"{i}.weight": torch.full((1 << 18,), float(i)) for i in range(64)}, path)

    def stop(phase: str, done: int, total: int, name: str) -> None:
        if done > 40 << 20:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        ckptmap.convert(path, tmp_path / "out", "hf", threads=1, progress=stop)
    changed = path.stat()
    bad = bytearray(path.read_bytes())
    with ckptmap.open(path) as ckpt:
        extent = ckpt["0.weight"].parts[""].extent
        assert extent is not None
    bad[extent.offset + 100] ^= 1
    with path.open("r+b") as stream:
        stream.write(bad)
    os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with pytest.raises(SourceError, match=r"0\.weight: .* are damaged"):
        ckptmap.convert(path, tmp_path / "out", "hf", threads=1)
    bad[extent.offset + 100] ^= 1
    with path.open("r+b") as stream:
        stream.write(bad)
    os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    report = ckptmap.convert(path, tmp_path / "out", "hf", threads=1)
    assert not report.continued_nbytes  # the damage was found: nothing was kept
    assert report.source.checked == 64 << 20


def test_ranks_of_a_conversion_put_together_what_each_has_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    torch.save({"a.weight": torch.randn(4000, 100)}, path)
    ((file, record), *_) = records(path)
    bad = flipped(path, tmp_path / "bad" / "plain.pt", file, record)
    outputs = run_ranks("tests.ranks.convert_damaged", 2, [str(path), str(bad), str(tmp_path)])
    assert "a.weight: " in outputs[0].stdout, outputs[0]
    assert "are damaged: expected CRC-32" in outputs[0].stdout
    assert (tmp_path / "good").exists()
    assert not (tmp_path / "worse").exists()


def test_nothing_of_a_damaged_source_is_kept_for_a_good_copy_of_it(tmp_path: Path) -> None:
    """The first half of the record is written and journaled before its damage can be known."""
    fused = torch.arange(1 << 21, dtype=torch.float32)
    path = tmp_path / "halves.pt"
    torch.save({"a.weight": fused[: 1 << 20], "b.weight": fused[1 << 20 :]}, path)
    times, good = path.stat(), path.read_bytes()
    with ckptmap.open(path) as ckpt:
        extent = ckpt["a.weight"].parts[""].extent
        assert extent is not None
    bad = bytearray(good)
    bad[extent.offset + 100] ^= 1
    path.write_bytes(bad)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for to in ("hf", "fsdp2"):
        with pytest.raises(SourceError, match="are damaged"):
            ckptmap.convert(path, tmp_path / to, to, threads=1)
    path.write_bytes(good)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for to in ("hf", "fsdp2"):
        report = ckptmap.convert(path, tmp_path / to, to, threads=1)
        assert not report.continued_nbytes
        assert verify(tmp_path / to, path).ok


KILLED_IN_B = """
import os, signal, sys, ckptmap
def stop(phase, done, total, name):
    if done and name == "b.weight":
        os.kill(os.getpid(), signal.SIGKILL)
ckptmap.convert(sys.argv[1], sys.argv[2], sys.argv[3], threads=1, progress=stop)
"""


@pytest.mark.parametrize("is_replaced", [False, True], ids=["restored", "replaced"])
def test_a_kill_before_the_damage_is_known_keeps_nothing_for_a_good_copy(
    is_replaced: bool, tmp_path: Path
) -> None:
    """Three tensors are one record: the first is journaled when the run is killed in the second."""
    fused = torch.arange(3 << 20, dtype=torch.float32)
    path, good = tmp_path / "fused.pt", tmp_path / "good.pt"
    parts = zip(("a.weight", "b.weight", "c.weight"), fused.split(1 << 20), strict=True)
    torch.save(dict(parts), good)
    times, content = good.stat(), bytearray(good.read_bytes())
    with ckptmap.open(good) as ckpt:
        extent = ckpt["a.weight"].parts[""].extent
        assert extent is not None
    content[extent.offset + 100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for to in ("hf", "full"):
        assert run_code(KILLED_IN_B, path, tmp_path / to, to) == -signal.SIGKILL
        (journal,) = tmp_path.glob(f".{to}.ckptmap-*/journal.jsonl")
        assert journal.read_text().count('"unit"'), "the first tensor is written"
    if is_replaced:
        shutil.copy2(good, tmp_path / "new")
        (tmp_path / "new").replace(path)
    else:
        path.write_bytes(good.read_bytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for to in ("hf", "full"):
        report = ckptmap.convert(path, tmp_path / to, to, threads=1)
        assert not report.continued_nbytes
        assert any("began anew" in note for note in report.notes), report.notes
        assert verify(tmp_path / to, good).ok
        with ckptmap.open(tmp_path / to) as ckpt:
            assert torch.equal(ckpt["a.weight"].read(), fused[: 1 << 20])


def test_the_damage_that_one_rank_finds_voids_what_all_have_written(tmp_path: Path) -> None:
    """The damaged record is read by rank 1 alone; its error reaches rank 0 when that has left."""
    path, source = tmp_path / "plain.pt", tmp_path / "source"
    torch.save({f"{i}.weight": torch.randn(1000, 100) for i in range(8)}, path)
    ckptmap.convert(path, source, "fsdp2", world_size=2)
    file, record = next(item for item in records(source) if "__1_0" in item[0])
    times, good = Path(file).stat(), Path(file).read_bytes()
    bad = bytearray(good)
    bad[record.offset + 10] ^= 1
    copy = shutil.copytree(source, tmp_path / "good-source")
    Path(file).write_bytes(bad)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    outputs = run_ranks("tests.ranks.convert_damaged", 2, [str(copy), str(source), str(tmp_path)])
    assert "are damaged: expected CRC-32" in outputs[0].stdout + outputs[0].stderr
    Path(file).write_bytes(good)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = ckptmap.convert(source, tmp_path / "worse", "fsdp2", world_size=2)
    assert not report.continued_nbytes
    assert verify(tmp_path / "worse", source).ok
