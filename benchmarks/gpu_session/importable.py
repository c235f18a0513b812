"""Which libraries this Python has, and a folder from which ckptmap's packages can be imported.

On a machine that somebody lends for ten minutes nothing is installed for us: the repository's
folder is all there is. `ckptmap` lies in it under its own name; `ckptmap_cli` and
`ckptmap_mappings` are the folders `cli` and `mappings`, to which links are made.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = {"ckptmap_cli": "cli", "ckptmap_mappings": "mappings"}
"""Packages whose folder in the repository has another name."""
LIBRARIES = (
    "torch", "numpy", "triton", "safetensors", "xxhash", "isal", "typer", "rich", "huggingface_hub",
    "pytest", "hypothesis", "packaging", "transformers", "accelerate", "peft", "torchao", "bitsandbytes",
    "compressed_tensors",
)  # fmt: skip


def is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # something forbids it, or it is half installed
        return False


def versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Return the version of each library that can be imported; "?" where its files name none."""
    return {name: _version(name) for name in names if is_importable(name)}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?"


def python_path(folder: Path) -> str:
    """Make the links in the folder; return the PYTHONPATH by which all of ckptmap is importable.

    A PYTHONPATH that is set stays behind it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package, place in LINKED.items():
        if not (folder / package).is_symlink():
            (folder / package).symlink_to(ROOT / place, target_is_directory=True)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))
