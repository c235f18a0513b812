"""What tests and examples shard stays on the CPU, on a machine with a GPU too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "examples")


def without_mesh(source: str) -> Iterator[int]:
    """Yield the lines of calls of torch's `fully_shard` that leave the mesh to torch: all GPUs."""
    if "fully_shard" not in source:  # most files: to parse all takes seconds
        return
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {
        alias.asname or alias.name
        for node in imports
        if (node.module or "").startswith("torch.")
        for alias in node.names
        if alias.name == "fully_shard"
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in names and "mesh" not in {keyword.arg for keyword in node.keywords}:
            yield node.lineno


def test_the_check_finds_them() -> None:
    source = "from torch.distributed.fsdp import fully_shard as f\nf(x)\nf(x, mesh=m)\nf(x, **how)"
    assert list(without_mesh(source)) == [2, 4]


def test_no_call_of_fully_shard_leaves_the_mesh_to_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in without_mesh(path.read_text())
    ]
    assert not found, f"use tests.support.cpu_sharding, or give a mesh: {found}"
