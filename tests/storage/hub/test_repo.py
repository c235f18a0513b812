"""Reading from the Hub: names, headers by range, values by range; whole files are verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.storage.files import Files
from ckptmap.storage.hub.uri import HubName, parse
from tests.support.hub.client import llama, wide
from tests.support.hub.server import Hub
from tests.support.hub.state import MAIN, Blob


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 2 MiB."""
    return wide(tmp_path_factory.mktemp("hub") / "wide")


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://org/name", HubName("org/name")),
        ("hf://org/name/", HubName("org/name")),
        (str(Path("hf://org/name@v1")), HubName("org/name", "v1")),
        ("hf://models/org/na.me-1", HubName("org/na.me-1")),
        ("hf://org/name@v1.0", HubName("org/name", "v1.0")),
        ("hf://org/name@v1/sub/dir", HubName("org/name", "v1", "sub/dir")),
        ("hf://org/name/sub/a.safetensors", HubName("org/name", "", "sub/a.safetensors")),
        ("hf://org/name@refs/pr/3/sub", HubName("org/name", "refs/pr/3", "sub")),
        ("hf://org/name@feature%2Fx/sub", HubName("org/name", "feature/x", "sub")),
    ],
)
def test_names(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("hf://", "the repository is '/'"),
        ("hf://gpt2", "the repository is 'gpt2/'"),
        ("hf://org/na me", "expected org/name"),
        ("hf://org/a--b", "expected org/name"),
        ("hf://org/name@", "the revision after @ is empty"),
        ("hf://org/name/a/../b", "the path is"),
        ("hf://org/name@v1/.git/hooks", "the path is"),
        ("hf://datasets/org/name", "names one of the Hub's datasets"),
    ],
)
def test_names_that_are_none(text: str, wrong: str) -> None:
    with pytest.raises(SourceError, match=wrong) as caught:
        parse(text)
    assert caught.value.code == "CKM701"


# ------------------------------------------------------------------ headers by range


BESIDE = {"tokenizer.json": b"{}" * 500_000, "generation_config.json": b"{}", "vocab.txt": b"a"}
"""What goes along with weights, and is not looked at before."""


def headers_alone(hub: Hub, large: Path) -> None:
    """What was sent of the shards is their first blocks; else, at most what names their tensors."""
    shards = hub.asked("GET /cdn/")
    assert len(shards) == 4
    assert all(seen.range == "bytes=0-65535" for seen in shards)
    total = sum(file.stat().st_size for file in large.iterdir())
    assert hub.sent() < total / 20
    whole = {
        seen.path.rpartition("/")[2] for seen in hub.asked("GET .*/resolve/") if not seen.range
    }
    assert whole <= {"config.json", "model.safetensors.index.json"}


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "hf://org/m"),
        ("plan", "hf://org/m", "--to", "fsdp2-nf4", "--world-size", "2"),
        ("plan", "hf://org/m", "--to", "hf-bf16"),
        ("diff", "hf://org/m", "LOCAL"),
    ],
)
def test_asking_reads_headers_by_range(
    hub: Hub, large: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    repo = hub.add("org/m", large)
    repo.commit(MAIN, repo.tree() | {name: Blob(c, lfs=False) for name, c in BESIDE.items()})
    assert main([str(large) if arg == "LOCAL" else arg for arg in args]) == 0
    out = capsys.readouterr().out
    assert "layers.{0..3}.weight" in out or "4 tensors agree" in out
    headers_alone(hub, large)


def test_inspect_names_the_commit(
    hub: Hub, large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = hub.add("org/m", large)
    assert main(["inspect", "hf://org/m", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == f"hf://org/m@{repo.refs[MAIN]}"


def test_a_header_longer_than_a_block(hub: Hub, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    names = [f"model.layers.{i}.{'x' * 100}.weight" for i in range(1500)]
    save_file({name: torch.zeros(64) for name in names}, tmp_path / "model.safetensors")
    hub.add("org/m", tmp_path)
    ckpt = ckptmap.open("hf://org/m")
    assert sorted(ckpt) == sorted(names)
    ranges = [seen.range for seen in hub.asked("GET /cdn/")]
    assert ranges[0] == "bytes=0-65535" and len(ranges) == 2
    assert hub.sent("^/cdn/") < (tmp_path / "model.safetensors").stat().st_size


def test_one_file_of_a_repository(hub: Hub, large: Path) -> None:
    hub.add("org/m", large)
    first = next(file.name for file in sorted(large.glob("*.safetensors")))
    with ckptmap.open(f"hf://org/m/{first}") as ckpt:
        assert list(ckpt) == ["layers.0.weight"]


def test_a_folder_of_a_repository(hub: Hub, large: Path, model: Path) -> None:
    repo = hub.add("org/m", model)
    below = {f"sub/dir/{file.name}": Blob(file.read_bytes(), True) for file in large.iterdir()}
    repo.commit("v2", {**repo.tree(), **below})
    with ckptmap.open("hf://org/m@v2/sub/dir") as ckpt:
        assert len(ckpt) == 4
    with ckptmap.open("hf://org/m@v2") as ckpt:
        assert len(ckpt) == 21


@pytest.mark.parametrize("container", ["torch", "dcp", "ranks"])
def test_every_container_is_read_there(hub: Hub, corpus: Any, container: str) -> None:
    """Real checkpoints of torch: a zip, a DCP directory, rank files, opened on the Hub as here."""
    from tests.corpus.case import names

    built = corpus[next(name for name in names(container=container, encoding="dense"))]
    repo = hub.add("org/m", built.path if built.path.is_dir() else None)
    if not built.path.is_dir():
        repo.commit(MAIN, {**repo.tree(), "model.pt": Blob(built.path.read_bytes(), True)})
    with ckptmap.open("hf://org/m") as there, ckptmap.open(built.path) as here:
        assert list(there) == list(here)
        for fqn in here:
            assert torch.equal(there[fqn].read(), here[fqn].read())


# ------------------------------------------------------------------ values by range


def test_values_are_read_by_range(hub: Hub, large: Path) -> None:
    hub.add("org/m", large)
    truth = load_file(sorted(large.glob("*.safetensors"))[1])["layers.1.weight"]
    ckpt = ckptmap.open("hf://org/m")
    before = hub.sent("^/cdn/")
    assert torch.equal(ckpt["layers.1.weight"][500:502], truth[500:502])
    assert hub.sent("^/cdn/") - before <= 2 * 65536
    assert torch.equal(ckpt["layers.1.weight"].read(), truth)


def test_large_values_leave_nothing_on_disk(hub: Hub, tmp_path: Path) -> None:
    wide(tmp_path / "m", shards=1, rows=4096)
    hub.add("org/m", tmp_path / "m")
    ckpt = ckptmap.open("hf://org/m")
    ckpt["layers.0.weight"].read()
    placeholder = Path(ckpt.index.files[0])
    assert placeholder.stat().st_size == (tmp_path / "m/model.safetensors").stat().st_size
    assert placeholder.stat().st_blocks * 512 <= 2 * 65536


def test_diff_with_values(hub: Hub, large: Path, tmp_path: Path) -> None:
    hub.add("org/m", large)
    assert ckptmap.diff("hf://org/m", large, values=True).equal
    wide(tmp_path / "other", rows=512)
    assert not ckptmap.diff("hf://org/m", tmp_path / "other").equal


def test_a_hole_is_never_read(hub: Hub, large: Path) -> None:
    """Whoever reads a placeholder past `ckptmap.storage.files` finds no bytes of it; through it, all."""
    hub.add("org/m", large)
    ckpt = ckptmap.open("hf://org/m")
    placeholder, local = ckpt.index.files[0], sorted(large.glob("*.safetensors"))[0]
    data = local.read_bytes()
    assert Path(placeholder).read_bytes()[65536:] == bytes(len(data) - 65536)
    mounts = ckpt.files.mounts
    assert Files(mounts=mounts).read(placeholder, 70000, 500) == data[70000:70500]
    with Files(mounts=mounts).descriptor(placeholder) as fd:
        import os

        assert os.pread(fd, len(data), 0) == data
    assert mounts.local_copy(placeholder).read_bytes() == data


def test_nobody_reads_sources_past_files() -> None:
    """All that reads a source goes through `ckptmap.storage.files`: there alone what is elsewhere is
    brought. A new place that opens files itself is looked at, then listed."""
    import re

    root = Path(ckptmap.__file__).parent
    direct = re.compile(
        r"(?<!local_copy\()\b\w+(?:\.\w+)*\.(?:read_bytes|read_text)\(|os\.open\(|\.open\("
    )
    found = {
        f"{file.relative_to(root)}"
        for file in root.rglob("*.py")
        for line in file.read_text().splitlines()
        if direct.search(line)
        and "local_copy(" not in line
        and '"wb"' not in line
        and "WorkDirectory" not in line
        and "ckptmap.open" not in line
    }
    reads_no_source = {
        "error_codes.py", "registry.py", "execution/execute.py", "live/save/write_dcp.py",
        "protocols/file_systems.py", "live/manager/manager.py", "operations/report/file.py",
        "live/manager/root_directory.py", "operations/newest_step.py",  # the pointer `latest`, a manager's own
        "checkpoint/base_record.py",  # local files alone: a place on the Hub is named by its commit
    }  # fmt: skip
    rooms = ("testing/", "storage/", "operations/hub/", "mapping/")
    assert not {name for name in found - reads_no_source if not name.startswith(rooms)}
