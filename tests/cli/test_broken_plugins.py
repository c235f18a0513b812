"""A distribution with a broken entry point: named, skipped, listed by `doctor`; the command works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptmap.core.requirements import not_installed
from tests.support.paths import ROOT

PLUGINS = {
    "raises": "raise RuntimeError('no\\x1b[2J\\x9b good')",
    "imports what is not there": "import sharded_llama_utils",
    "exits": "raise SystemExit(3)",
    "lacks the attribute": "",
    "fails in its constructor": "class Thing:\n    def __init__(self):\n        raise ValueError('x')",
    "is no Python": "def (",
}


def distribution(folder: Path, source: str, group: str) -> Path:
    """Lay a distribution as pip does: a module, and a dist-info with its entry points."""
    (folder / "broken_plugin.py").write_text(source)
    info = folder / "broken_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[ckptmap.{group}]\nodd = broken_plugin:Thing\n")
    return folder


def ckptmap(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "ckptmap", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize("source", PLUGINS.values(), ids=PLUGINS)
def test_a_command_goes_on_without_it(source: str, tmp_path: Path) -> None:
    folder = distribution(tmp_path, source, "containers")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    done = ckptmap(folder, "inspect", str(tmp_path / "a.pt"))
    assert done.returncode == 0 and "1 tensor" in done.stdout, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "broken-plugin 1.2: its entry point odd = broken_plugin:Thing" in done.stderr
    assert "in ckptmap.containers cannot be loaded and is skipped" in done.stderr
    assert "pip install" not in done.stderr
    assert "\x1b" not in done.stderr and "\x9b" not in done.stderr


def test_doctor_lists_it(tmp_path: Path) -> None:
    folder = distribution(tmp_path, PLUGINS["imports what is not there"], "live_forms")
    done = ckptmap(folder, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    [broken] = json.loads(done.stdout)["broken_entry_points"]
    assert broken["distribution"] == "broken-plugin 1.2" and broken["group"] == "ckptmap.live_forms"
    assert broken["why"] == "ModuleNotFoundError: No module named 'sharded_llama_utils'"
    assert "pip install" not in done.stdout + done.stderr


def test_pip_is_hinted_for_libraries_of_ours_alone() -> None:
    assert not_installed("torch").hint == "pip install torch"
    assert not_installed("compressed_tensors").hint == "pip install compressed-tensors"
    assert "pip install" not in not_installed("sharded_llama_utils").hint
