"""A file that may not be read, a place that may not be written: one line that names it, and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from tests.support.merge_cases import llama, saved
from tests.support.paths import ROOT

HF = ("--to", "hf")
READ: Mapping[str, tuple[str, ...]] = {
    "base/model.safetensors": ("inspect", "base"),
    "base/config.json": ("convert", "base", "o", *HF),
    "base/generation_config.json": ("convert", "base", "o", *HF),
    "config.json": ("convert", "m.pt", "o", *HF, "--config-from", "config.json"),
    "folder": ("convert", "m.pt", "o", *HF, "--config-from", "folder"),
    "like.json": ("plan", "m.pt", "--to", "full", "--names", "meta", "--config-from", "like.json"),
    "m.pt": ("inspect", "m.pt"),
    "whole": ("inspect", "whole"),
    "sharded/.metadata": ("inspect", "sharded"),
    "sharded/__1_0.distcp": ("convert", "sharded", "o.pt", "--to", "full"),
    "order.txt": ("plan", "m.pt", "--to", "full", "--param-order", "order.txt"),
    "tp.json": ("plan", "base", "--to", "fsdp2", "--mesh", "tp=2", "--tp-plan", "tp.json"),
    "plan.json": ("convert", "base", "o.pt", "--plan", "plan.json"),
    "mine.toml": ("plan", "base", "--to", "full", "--names", "mine.toml"),
    "made/ckptmap.manifest.json": ("verify", "made"),
    "made/model.safetensors": ("diff", "base", "made", "--values"),
    "adapter/adapter_config.json": ("merge", "base", "adapter", "o"),
    "adapter/adapter_model.safetensors": ("merge", "base", "adapter", "o"),
}  # fmt: skip
"""What the process may not read -> a command that needs it."""
WRITTEN: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "directory": ("ro", 0o555, ("convert", "base", "ro/out", *HF)),
    "directories": ("ro", 0o555, ("convert", "base", "ro/a/b/out.pt", "--to", "full")),
    "closed": ("ro", 0, ("convert", "base", "ro/out.pt", "--to", "full")),
    "plan": ("ro", 0o555, ("plan", "base", *HF, "-o", "ro/plan.json")),
    "report": ("ro", 0o555, ("report", "base", "-o", "ro/page.html")),
    "closed report": ("ro", 0, ("report", "base", "-o", "ro/page.html")),
    "merge": ("ro", 0o555, ("merge", "base", "adapter", "ro/merged")),
    "replaced": ("made", 0o555, ("convert", "base", "made", "--to", "hf-fp16", "--overwrite")),
}
"""What may not be written, its mode, and a command that would."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[int, str]]:
    """Exit code and stderr of each command, by one process that permissions bind."""
    folder = tmp_path_factory.mktemp("permissions")
    saved(folder, llama(torch.bfloat16), target_modules=["q_proj"])
    torch.save(load_file(folder / "base" / "model.safetensors"), folder / "m.pt")
    ckptmap.convert(folder / "base", folder / "sharded", "fsdp2", world_size=2)
    ckptmap.convert(folder / "base", folder / "made", "hf")
    for name in ("folder", "whole"):
        shutil.copytree(folder / "base", folder / name)
    for name in ("config.json", "like.json"):
        shutil.copy(folder / "base" / "config.json", folder / name)
    for name in ("order.txt", "tp.json", "plan.json", "mine.toml"):
        (folder / name).write_text("{}")
    (folder / "ro").mkdir()
    cases = {name: (name, 0, line) for name, line in READ.items()} | dict(WRITTEN)
    command = [
        sys.executable,
        "-m",
        "tests.support.without_override",
        json.dumps([*cases.values()]),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", READ)
def test_a_file_that_may_not_be_read(name: str, results: Mapping[str, tuple[int, str]]) -> None:
    code, err = results[name]
    assert code == 2
    line, hint = err.strip().splitlines()
    assert line.startswith(f"error[CKM101]: {name}: ") and line.lower().endswith(
        "permission denied"
    )
    assert hint == f"  hint: check its permissions: ls -ld {name}"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_place_that_may_not_be_written(name: str, results: Mapping[str, tuple[int, str]]) -> None:
    """Refused before a byte, also where a directory that is to be replaced cannot be moved."""
    code, err = results[name]
    target = next(word for word in WRITTEN[name][2] if word.startswith(WRITTEN[name][0]))
    assert code == 2
    line, _ = err.strip().splitlines()
    assert line.startswith(f"error[CKM304]: {target}: cannot be written: ")
    assert "permission denied" in line.lower()
