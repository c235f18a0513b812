"""A config.json, or another small file beside the weights, that cannot be read: every command says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmap.formats.safetensors.file import LFS_MAGIC
from tests.corpus.models import tiny_llama
from tests.docs.page import output_of_ckptmap

Damage = Callable[[Path], object]
BROKEN: dict[str, tuple[Damage, str]] = {
    "cut": (lambda file: file.write_text('{"a": 1,'), "cannot be read as JSON: line 1, column 9"),
    "empty": (lambda file: file.write_bytes(b""), "cannot be read as JSON: line 1, column 1"),
    "list": (lambda file: file.write_text("[1, 2]"), "cannot be read as JSON: expected a JSON object"),
    "latin-1": (lambda file: file.write_bytes(b'{"a": "\xe9"}'), "expected UTF-8"),
    "pointer": (
        lambda file: file.write_bytes(LFS_MAGIC + b".github.com/spec/v1\n"),
        "is a Git LFS pointer",
    ),
    "directory": (lambda file: file.mkdir(), "is a directory"),
    "link": (lambda file: file.symlink_to("../../blobs/ab12"), "is a link to a file that is not there"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(base, tmp_path / "model")
    monkeypatch.chdir(tmp_path)


def damage(name: str, kind: str) -> str:
    """Damage a file of `model`; return what is to be said of it."""
    file = Path("model") / name
    file.unlink()
    change, said = BROKEN[kind]
    change(file)
    return said


@pytest.mark.parametrize("kind", BROKEN)
def test_inspect_says_that_a_config_cannot_be_read(kind: str) -> None:
    said = damage("config.json", kind)
    code, printed = output_of_ckptmap("ckptmap inspect model")
    notes = [line for line in printed.splitlines() if line.startswith("  note")]
    assert code == 0 and len(notes) == 1, printed
    assert "model/config.json: " in notes[0] and said in notes[0]
    code, printed = output_of_ckptmap("ckptmap inspect model --json")
    assert code == 0 and any(said in note for note in json.loads(printed)["notes"])


@pytest.mark.parametrize("kind", BROKEN)
def test_such_a_config_does_not_reach_the_output_without_a_word(kind: str, base: Path) -> None:
    said = damage("config.json", kind)
    code, printed = output_of_ckptmap("ckptmap convert model out --to hf")
    assert said in printed and "--config-from" in printed
    if kind in ("directory", "link"):  # there is none then
        assert code == 0 and not Path("out/config.json").exists()
    else:
        assert code == 2 and not Path("out").exists(), printed
        code, printed = output_of_ckptmap(f"ckptmap convert model out --to hf --config-from {base}")
        assert code == 0, printed
        assert Path("out/config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["cut", "list", "latin-1", "link"])
def test_another_file_that_cannot_be_read_is_noted(name: str, kind: str) -> None:
    """transformers goes on with defaults in its place, and says little."""
    (Path("model") / name).write_text("{}")
    said = damage(name, kind)
    code, printed = output_of_ckptmap("ckptmap convert model out --to hf")
    notes = [line for line in printed.splitlines() if line.startswith("note: ")]
    assert code == 0 and [name in note and said in note for note in notes] == [True], printed
    assert Path("out", name).exists() == (kind != "link")


def test_sound_files_are_not_noted() -> None:
    for command in ("inspect model", "convert model out --to hf"):
        code, printed = output_of_ckptmap(f"ckptmap {command}")
        assert code == 0 and "note" not in printed
