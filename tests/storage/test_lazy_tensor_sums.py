"""A whole tensor that is read through LazyTensor has the checksums that are stated for its bytes."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.errors import CkptmapError, SourceError
from ckptmap.operations.verify import verify
from ckptmap.tensors import Region

KEY = "layers.1.weight"
SETUPS = (
    "hf", "dcp-hf", "full", "ddp", "fsdp2", "fsdp2-ranks", "accelerate",
    "trainer", "hf-nf4", "full-nf4", "dcp-hf-nf4",
)  # fmt: skip
DAMAGED = rf"^{KEY}: .*(are damaged|are not what ckptmap wrote): expected (CRC-32|xxh3)"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file; two of its tensors have more rows than one preadv takes buffers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("source") / "source.pt"
    torch.save({f"layers.{i}.weight": torch.randn(2304, 128) for i in range(2)}, path)
    return path


def regions(path: Path) -> list[Region]:
    with ckptmap.open(path) as ckpt:
        return [
            region
            for stored in ckpt[KEY].beneath
            for _, region, _ in stored.chunks
            if region.nbytes
        ]


def damaged(path: Path, copy: Path, region: Region) -> Path:
    """Copy a checkpoint, with one bit of a region flipped."""
    shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    file = copy / Path(region.file).relative_to(path) if path.is_dir() else copy
    content = bytearray(file.read_bytes())
    content[region.offset + region.span_nbytes // 2] ^= 4
    file.write_bytes(content)
    return copy


@pytest.mark.parametrize("to", SETUPS)
def test_a_flip_in_an_output_of_ours_is_refused_by_read(
    to: str, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    ckptmap.convert(source, path, to)
    for number, region in enumerate(regions(path)):
        bad = damaged(path, tmp_path / f"bad{number}", region)
        with ckptmap.open(bad) as ckpt:
            ckpt["layers.0.weight"].read()
            for _ in range(2):
                with pytest.raises(SourceError, match=DAMAGED):
                    ckpt[KEY].read()
            if not to.endswith("nf4"):  # a part of a record has no checksum of its own
                ckpt[KEY].read((1, 0), (3, 128))
    with ckptmap.open(path) as ckpt:
        for _ in range(2):
            assert ckpt[KEY].read().shape == (2304, 128)


def test_a_transposed_tensor_is_compared_though_it_is_read_element_by_element(
    tmp_path: Path,
) -> None:
    """Its record is read in spans, some of them twice: it is read once more at the end."""
    path = tmp_path / "view.pt"
    torch.save({KEY: torch.randn(1200, 600).t()}, path)
    bad = damaged(path, tmp_path / "bad.pt", regions(path)[0])
    with ckptmap.open(bad) as ckpt, pytest.raises(SourceError, match=DAMAGED):
        ckpt[KEY].read()
    with ckptmap.open(path) as ckpt:
        ckpt[KEY].read()


def test_threads_that_read_one_tensor_find_its_damage(source: Path, tmp_path: Path) -> None:
    for to in ("hf", "fsdp2"):
        path = tmp_path / to
        ckptmap.convert(source, path, to)
        bad = damaged(path, tmp_path / f"bad-{to}", regions(path)[-1])
        with ckptmap.open(bad) as ckpt, ThreadPoolExecutor(4) as pool:
            tried = [pool.submit(ckpt[KEY].read) for _ in range(8)]
            errors = [one.exception() for one in tried]
        assert all(isinstance(error, SourceError) for error in errors)


def test_a_damaged_manifest_is_refused_when_a_value_is_read(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "hf"
    ckptmap.convert(source, path, "hf")
    manifest = path / "ckptmap.manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-30] + b"}")
    with ckptmap.open(path) as ckpt:
        assert ckpt[KEY].shape == (2304, 128)
        for _ in range(2):
            with pytest.raises(
                SourceError, match=r"its manifest (is damaged|cannot be read)"
            ) as caught:
                ckpt[KEY].read()
            assert caught.value.code == "CKM403"
    manifest.unlink()
    with ckptmap.open(path) as ckpt:
        ckpt[KEY].read()


def test_verify_against_an_output_of_ours_compares_its_digests(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "hf"
    ckptmap.convert(source, path, "hf")
    bad = damaged(path, tmp_path / "bad", regions(path)[0])
    ckptmap.convert(bad, tmp_path / "out", "full", check_source="none")
    report = verify(tmp_path / "out", bad)
    assert any("are not what ckptmap wrote" in problem for problem in report.problems), report
    assert verify(tmp_path / "out", path).problems  # the values differ


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, "CKM101"), (errno.EMFILE, "CKM313")])
def test_a_header_that_cannot_be_read_is_told_by_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    ckptmap.convert(source, tmp_path / "out", "hf")

    def failing(*_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ckptmap.storage.manifest_file.digest_around", failing)
    with ckptmap.open(tmp_path / "out") as ckpt, pytest.raises(CkptmapError) as refused:
        ckpt[KEY].read()
    assert refused.value.code == code


def rename_in_zip(file: Path, old: bytes, new: bytes) -> None:
    """Edit the pickle of a torch.save file, and each CRC-32 of it."""
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read(f"{archive.namelist()[0].partition('/')[0]}/data.pkl")
    edited = pickled.replace(old, new)
    assert edited != pickled
    sums = [zlib.crc32(content).to_bytes(4, "little") for content in (pickled, edited)]
    assert data.count(sums[0]) >= 2, "in the directory, and beside the record"
    file.write_bytes(data.replace(pickled, edited).replace(*sums))
    assert zipfile.ZipFile(file).testzip() is None


@pytest.mark.parametrize("to", ["hf", "fsdp2", "full"])
def test_a_bit_that_is_flipped_in_a_header_of_ours_is_no_other_name(
    to: str, tmp_path: Path
) -> None:
    """The digest of the bytes around tensors counts as stated, too: in a load, a conversion, a read."""
    torch.save({f"layers.{i}.weight": torch.randn(64, 32) for i in range(4)}, tmp_path / "in.pt")
    out = tmp_path / "out"
    ckptmap.convert(tmp_path / "in.pt", out, to, **({"world_size": 2} if to == "fsdp2" else {}))
    file = {"hf": out / "model.safetensors", "fsdp2": out / ".metadata", "full": out}[to]
    if to == "full":  # the CRC-32s of the pickle are made right: what is left is the digest
        rename_in_zip(file, b"layers.2.weight", b"layers.2.weighu")
    else:
        data = file.read_bytes()
        file.write_bytes(data.replace(b"layers.2.weight", b"layers.2.weighu", 1))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 0)})
    model["layers"].extend(torch.nn.Linear(32, 64, bias=False) for _ in range(4))
    attempts = {
        "convert": lambda: ckptmap.convert(out, tmp_path / "again", "full"),
        "read": lambda: [ckpt[fqn].read() for fqn in ckpt],
        "load": lambda: ckptmap.load(out, model, strict=False),
    }
    for name, attempt in attempts.items():
        with ckptmap.open(out) as ckpt, pytest.raises(SourceError) as refused:
            attempt()
        assert refused.value.code == "CKM105", name
        assert f"{file.name}: its bytes around the tensors are damaged" in refused.value.message
    assert not (tmp_path / "again").exists()
    ckptmap.convert(out, tmp_path / "again", "hf", check_source="none")
