"""What `verify` says of that which is no tensor: values beside the weights, other files, old manifests."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.execution.manifest import NAME, NOT_TAKEN
from ckptmap.execution.phases import Phases
from ckptmap.formats.zip.reader import read_records
from ckptmap.operations.check_digests import check_digests
from ckptmap.operations.verify import read_manifest
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.files import Files

# ------------------------------------------------------------------ trainer_state.json


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers' Trainer saved."""
    from tests.corpus.writers_directories import trainer_single

    folder = tmp_path_factory.mktemp("trainer") / "run"
    trainer_single(folder)
    (saved,) = folder.glob("checkpoint-*")
    return saved


def changed_loss(state: Any) -> None:
    state["log_history"][1]["loss"] += 1e-9


def whole_as_float(state: Any) -> None:
    state["global_step"] = float(state["global_step"])


def true_as_one(state: Any) -> None:
    state["is_world_process_zero"] = 1


def one_key_less(state: Any) -> None:
    del state["epoch"]


def one_key_more(state: Any) -> None:
    state["note"] = None


EDITS = {
    changed_loss: r"trainer_state\.log_history\.1\.loss: .*, the source has",
    whole_as_float: r"trainer_state\.global_step: 2, the source has 2\.0",
    true_as_one: r"trainer_state\.is_world_process_zero: True, the source has 1",
    one_key_less: r"trainer_state\.epoch: 0\.5 is in the output only",
    one_key_more: r"trainer_state\.note: .* is not in the output",
}


@pytest.mark.parametrize("to", ["trainer", "full", "fsdp2"])
def test_every_value_of_the_trainers_state_is_compared(to: str, run: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", run / "trainer_state.json"
    options: dict[str, Any] = {"world_size": 2} if to == "fsdp2" else {}
    ckptmap.convert(run, out, to, **options)
    good = file.read_text()
    assert ckptmap.verify(out, run).ok
    for edit, expected in EDITS.items():
        state = json.loads(good)
        edit(state)
        file.write_text(json.dumps(state))
        try:
            (problem,) = ckptmap.verify(out, run).problems
        finally:
            file.write_text(good)
        with pytest.raises(AssertionError, match=expected):
            raise AssertionError(problem)


# ------------------------------------------------------------------ other files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "weights.pt"
    torch.manual_seed(0)
    torch.save({"model.norm.weight": torch.randn(64), "lm_head.weight": torch.randn(8, 64)}, path)
    return path


def empty(place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    place.touch()


NAMED: dict[str, Callable[[Path], None]] = {
    "config.json": empty, "pytorch_model.bin": empty, "model-00002-of-00002.safetensors": empty,
    "modeling_llama.py": empty, "more/": Path.mkdir, "link.safetensors": lambda p: p.symlink_to("x"),
    "notes.txt": empty, "model.safetensors~": empty,
}  # fmt: skip
BESIDE = ("README.md", "LICENSE", "tokenizer.json", ".gitattributes", ".cache/x", "__pycache__/x")


@pytest.mark.parametrize("to", ["hf", "dcp-hf", "fsdp2", "trainer"])
def test_files_that_do_not_belong_to_an_output_are_named(
    to: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, to)
    for name in BESIDE:
        empty(out / name)
    assert ckptmap.verify(out).ok
    for name, make in NAMED.items():
        make(out / name)
    report = ckptmap.verify(out)  # with a second set of weights some cannot be opened any more
    assert sorted(report.extra) == sorted(NAMED)
    problems = [p for p in report.problems if "does not belong to the output: move it" in p]
    assert len(problems) == len(NAMED)
    assert report.intact == (len(problems) == len(report.problems))
    assert report.intact or to in ("dcp-hf", "trainer")
    assert not report.ok


# ------------------------------------------------------------------ what a manifest does not have


def without_new_members(text: str) -> str:
    """The manifest as releases wrote it that had no digests of the bytes around tensors."""
    document = json.loads(text)
    for entry in document["files"].values():
        del entry["around"]
    document.pop("around", None)
    del document["self"]
    return json.dumps(document, separators=(",", ":"))


def test_a_manifest_of_an_older_release_says_what_was_not_checked(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(source, out, "hf")
    manifest = out / NAME
    manifest.write_text(without_new_members(manifest.read_text()))
    report = ckptmap.verify(out)
    assert report.ok
    assert report.checks == (
        "structure", "digests",
        "no digest of the bytes around tensors, since an older release wrote it",
    )  # fmt: skip
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (out / "model.safetensors").write_bytes(content)
    assert not ckptmap.verify(out).ok  # the digests of tensors are compared as before
    with pytest.raises(SourceError, match="are not what ckptmap wrote"):
        ckptmap.convert(out, tmp_path / "again", "full")


def test_a_format_that_does_not_tell_where_its_manifest_is(source: Path, tmp_path: Path) -> None:
    """Its manifest is of this release: nobody is told that an older one wrote it."""
    ckptmap.convert(source, tmp_path / "out.pt", "full")
    with ckptmap.open(tmp_path / "out.pt") as ckpt:
        document = {**read_manifest(ckpt), "around": NOT_TAKEN}
        checks, problems = check_digests(ckpt, document, 1, Phases())
    assert not problems
    assert checks[1].endswith("since its format does not tell where its manifest is")


# ------------------------------------------------------------------ spans of a member


def spans(file: Path, name: str) -> list[tuple[int, int]]:
    with closing(Files()) as files:
        return read_records(files, str(file)).spans(name)


def test_the_spans_of_a_member_are_its_bytes_and_each_crc_of_them(tmp_path: Path) -> None:
    by_torch, by_zipfile = tmp_path / "torch.pt", tmp_path / "zipfile.pt"
    torch.save({"a": torch.arange(100.0)}, by_torch)
    with zipfile.ZipFile(by_torch) as there, zipfile.ZipFile(by_zipfile, "w") as here:
        for one in there.namelist():
            here.writestr(one, there.read(one))
    for file, crcs in ((by_torch, 2), (by_zipfile, 1)):  # torch writes a data descriptor, too
        content = file.read_bytes()
        (at, nbytes), *rest = spans(file, "data/0")
        assert content[at : at + nbytes] == torch.arange(100.0).numpy().tobytes()
        assert len(rest) == crcs
        for start, size in rest:
            stated = int.from_bytes(content[start : start + size], "little")
            assert stated == crc32(content[at : at + nbytes])
    with pytest.raises(SourceError, match="has no member 'data/7'"):
        spans(by_torch, "data/7")
