"""Folders of models as downloads and hands leave them: the Hub's cache, links to nothing, shards under other names."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.corpus.models import tiny_llama
from tests.docs.page import output_of_ckptmap


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(path / "whole")
    tiny_llama().save_pretrained(path / "sharded", max_shard_size="40KB")
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cache(model: Path, commits: tuple[str, ...] = ("0123abcd",)) -> Path:
    """What huggingface_hub keeps of `org/name`: blobs under their digests, and links of each commit."""
    root = Path("hub/models--org--name")
    (root / "blobs").mkdir(parents=True)
    for commit in commits:
        (root / "snapshots" / commit).mkdir(parents=True)
        for file in model.iterdir():
            blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (root / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{blob.name}")
    return root


@pytest.mark.parametrize(
    "given", ["hub", "hub/models--org--name", "hub/models--org--name/snapshots"]
)
def test_a_folder_of_the_cache_is_opened_at_its_snapshot(given: str, models: Path) -> None:
    """A blob is a weight file, too, and has no config beside it."""
    cache(models / "whole")
    code, printed = output_of_ckptmap(f"ckptmap convert {given} out --to hf")
    assert code == 0 and Path("out/config.json").exists(), printed
    assert re.search(r"opened .*0123abcd, the only checkpoint", printed)


def test_of_several_snapshots_one_is_to_be_named(models: Path) -> None:
    cache(models / "whole", ("0123abcd", "4567cdef"))
    code, printed = output_of_ckptmap("ckptmap inspect hub")
    assert code == 2 and "snapshots/0123abcd" in printed and "blobs" not in printed
    named = printed.partition("give the path of one: ")[2].strip()
    assert output_of_ckptmap(f"ckptmap inspect {named}")[0] == 0


def test_a_link_to_a_blob_that_was_not_loaded(models: Path) -> None:
    root = cache(models / "whole")
    (blob,) = {file.resolve() for file in root.glob("snapshots/*/model.safetensors")}
    blob.rename(f"{blob}.incomplete")
    code, printed = output_of_ckptmap(f"ckptmap inspect {root}/snapshots/0123abcd")
    assert code == 2 and "the file 'model.safetensors' is missing; the folder has a link" in printed
    assert "finish the download" in printed and "of 1 shards" not in printed


def test_missing_shards_are_counted(models: Path) -> None:
    shutil.copytree(models / "sharded", "m")
    for file in sorted(Path("m").glob("*.safetensors"))[1:]:
        file.unlink()
    code, printed = output_of_ckptmap("ckptmap inspect m")
    assert code == 2 and " more are missing" in printed and "finish the download" in printed


@pytest.mark.parametrize("count", [1, 2])
def test_shards_under_other_names_are_found_by_the_index(count: int, models: Path) -> None:
    shutil.copytree(models / "sharded", "a model")
    files = sorted(Path("a model").glob("*.safetensors"))
    assert len(files) > 3
    for number, file in enumerate(files[:count]):
        file.rename(f"a model/part {number} (1).safetensors")
    shutil.copy(models / "whole/config.json", "a model/stray.safetensors")  # no header: passed over
    code, printed = output_of_ckptmap("ckptmap inspect 'a model'")
    command = printed.partition("under other names: ")[2].strip()
    assert code == 2 and command.count("mv ") == count, printed
    subprocess.run(["bash", "-c", command], check=True)
    assert output_of_ckptmap("ckptmap inspect 'a model'")[0] == 0


def test_a_shard_with_other_tensors_is_not_taken_for_the_missing_one(models: Path) -> None:
    shutil.copytree(models / "sharded", "m")
    first, second, *_ = sorted(Path("m").glob("*.safetensors"))
    os.replace(first, "m/other.safetensors")
    shutil.copy(second, "m/other.safetensors")
    code, printed = output_of_ckptmap("ckptmap inspect m")
    assert code == 2 and "mv " not in printed and "finish the download" in printed
