"""A download that a failed or killed run began is continued within the file, by range, wherever it does
not go through huggingface_hub's cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ckptmap_cli.main import main

from tests.support.hub.client import environment, wide
from tests.support.hub.server import Fault, Hub
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 8 MiB: what is read of it by range is its first 64 KiB."""
    return wide(tmp_path_factory.mktemp("hub") / "one", shards=1, rows=4096)


LOW_DISK = ["convert", "hf://org/m", "OUT", "--to", "hf", "--low-disk"]
COMMANDS = {"pull": ["pull", "hf://org/m", "OUT"], "low-disk": LOW_DISK}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_failed_run_is_continued_within_a_file(
    hub: Hub, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what it keeps of a cut body
    hub.add("org/m", large)
    hub.faults += [
        Fault("GET /cdn/", drop_after=5_000_000, skip=1),
        Fault("GET .*/resolve/.*safetensors", status=403, skip=2),
    ]
    args = [str(tmp_path / "out") if arg == "OUT" else arg for arg in COMMANDS[command]]
    assert main([*args, "-q"]) == 3 and not (tmp_path / "out").exists()
    hub.faults.clear()
    before = len(hub.seen)
    assert main([*args, "-q"]) == 0
    ranges = [seen.range for seen in hub.seen[before:] if seen.path.startswith("/cdn/")]
    assert ranges == ["bytes=0-65535", "bytes=5000000-"], "the header, and the rest of the file"
    assert weights(tmp_path / "out") == weights(large)
    assert not list(tmp_path.glob(".out.*"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_killed_pull_is_continued_within_a_file(hub: Hub, tmp_path: Path) -> None:
    """SIGKILL in the midst of a body: huggingface_hub writes 10 MiB at a time."""
    folder, chunk = wide(tmp_path / "m", shards=1, rows=8192), 10 << 20
    hub.add("org/m", folder)
    hub.faults.append(Fault("GET /cdn/", drop_after=chunk + 1000, hold=True, skip=1))
    out, args = tmp_path / "out", ["pull", "hf://org/m", str(tmp_path / "out"), "-q"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmap", *args], env=environment(hub, tmp_path / "home2"), cwd=ROOT
    )
    while not any(part.stat().st_size == chunk for part in tmp_path.glob(".out.*/coming/.*.part")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = len(hub.seen)
    assert main(args) == 0 and weights(out) == weights(folder)
    ranges = [seen.range for seen in hub.seen[before:] if seen.path.startswith("/cdn/")]
    assert ranges == ["bytes=0-65535", f"bytes={chunk}-"]
    assert not list(tmp_path.glob(".out.*"))
