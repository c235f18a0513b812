"""`--as PATH`: what a writer put into `__metadata__` of its safetensors files comes back with its weights."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptmap
from tests.corpus.models import tiny_llama
from tests.operations.test_as import FILE, NORM, contents, sharded
from tests.support.quantized_models import WRITERS

WORDS = {"modelspec.title": "snow \u2603 \u00e9", "empty": "", "odd": 'a "b"\\\n\t\x00\x1f\x7f'}


def stated(file: Path) -> dict[str, str] | None:
    """The metadata of a file, as safetensors itself reads it."""
    with safe_open(file, "pt") as opened:
        metadata: dict[str, str] | None = opened.metadata()
    return metadata


def restated(file: Path, metadata: Mapping[str, str] | None) -> None:
    save_file(load_file(file), file, None if metadata is None else dict(metadata))


def patched(file: Path, old: bytes, new: bytes) -> None:
    """Put text into a header that safetensors itself does not write."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + size]
    assert old in header
    header = header.replace(old, new)
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])


def there_and_back(release: Path, folder: Path) -> Path:
    ckptmap.convert(release, folder / "work", to="fsdp2-bf16", world_size=2)
    ckptmap.convert(folder / "work", folder / "back", as_=release)
    return folder / "back"


@pytest.mark.parametrize("metadata", [{"format": "pt", **WORDS}, {"format": "mlx"}, WORDS, None])
@pytest.mark.parametrize("form", ["ct-packed", "bnb-nf4"])
def test_metadata_of_one_file(
    form: str,
    metadata: dict[str, str] | None,
    written: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(written(form), tmp_path / "release")
    restated(tmp_path / "release" / FILE, metadata)
    back = there_and_back(tmp_path / "release", tmp_path)
    assert stated(back / FILE) == metadata
    assert (back / FILE).read_bytes() == (tmp_path / "release" / FILE).read_bytes()


def test_metadata_of_each_shard(tmp_path: Path) -> None:
    """A file that the index does not list says nothing of the others."""
    release = tmp_path / "release"
    tiny_llama().save_pretrained(release, max_shard_size="60KB")
    shards = sorted(release.glob("*.safetensors"))
    for number, file in enumerate(shards):
        restated(file, None if number == 1 else {"format": "pt", "shard": str(number), **WORDS})
    save_file(load_file(shards[0]), release / "stale.safetensors", {"format": "np"})
    ckptmap.convert(release, tmp_path / "work.pt", to="full")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    assert contents(tmp_path / "back").items() <= contents(release).items()
    assert [stated(tmp_path / "back" / file.name) for file in shards] == list(map(stated, shards))


def test_other_files_state_what_all_files_stated(tmp_path: Path) -> None:
    """The names of these shards are none of a set, so that the output is cut into others."""
    release = tmp_path / "release"
    tiny_llama().save_pretrained(release, max_shard_size="60KB")
    index = release / "model.safetensors.index.json"
    for number, file in enumerate(sorted(release.glob("*.safetensors"))):
        restated(file, {"format": "pt", "shard": str(number), "of": "all", f"only {number}": ""})
        file.rename(release / f"part-{number}.safetensors")
        index.write_text(index.read_text().replace(file.name, f"part-{number}.safetensors"))
    back = there_and_back(release, tmp_path)
    assert [stated(file) for file in back.glob("*.safetensors")] == [{"format": "pt", "of": "all"}]


@pytest.mark.parametrize("form", ["torchao", "nf4"])
def test_entries_on_encodings_are_those_of_the_output(form: str, tmp_path: Path) -> None:
    """torchao and ckptmap describe quantized tensors there; the words of others stand beside."""
    WRITERS[form](tmp_path / "one")
    release = sharded(tmp_path / "one", tmp_path / "release")
    for file in release.glob("*.safetensors"):
        restated(file, {**(stated(file) or {}), **WORDS})
    ckptmap.convert(release, tmp_path / "work.pt", to="full-fp32")
    ckptmap.convert(
        tmp_path / "work.pt", tmp_path / "plain", as_=sharded(tmp_path / "one", tmp_path / "silent")
    )
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    for file in release.glob("*.safetensors"):
        plain = stated(tmp_path / "plain" / file.name)
        assert plain is not None and not plain.keys() & WORDS.keys()
        assert stated(tmp_path / "back" / file.name) == {**plain, **WORDS}
    assert ckptmap.verify(tmp_path / "back", against=release).ok


def test_words_that_no_reader_of_safetensors_takes(tmp_path: Path) -> None:
    """Half of a surrogate pair, which ends safetensors' own reader, is left out."""
    tiny_llama().save_pretrained(tmp_path / "release")
    file = tmp_path / "release" / FILE
    restated(file, {"format": "pt", "bad": "MARK", "good": "as before"})
    patched(file, b"MARK", b"\\ud800")
    back = there_and_back(tmp_path / "release", tmp_path)
    assert stated(back / FILE) == {"format": "pt", "good": "as before"}


def test_records_that_the_source_claims_do_not_come_along(tmp_path: Path) -> None:
    """Entries of ckptmap's and torchao's names are read as such, never copied."""
    tiny_llama().save_pretrained(tmp_path / "release")
    file = tmp_path / "release" / FILE
    false = {
        "format": "pt",
        "ckptmap": "{}",
        "tensor_names": json.dumps([NORM]),
        NORM: '{"_type": "Tensor"}',
    }
    restated(file, false)
    back = there_and_back(tmp_path / "release", tmp_path)
    assert stated(back / FILE) == {"format": "pt"}
