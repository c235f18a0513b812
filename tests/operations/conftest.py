"""What the tests of merging share: a model and its adapter, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama_and_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ as transformers saves it, adapter/ as peft does; tests read it or copy it."""
    from tests.support.merge_cases import LINEARS, llama, saved

    folder = tmp_path_factory.mktemp("merge")
    saved(folder, llama(), target_modules=LINEARS)
    return folder


@pytest.fixture
def folder(llama_and_adapter: Path, tmp_path: Path) -> Path:
    """base/ and adapter/ of a Llama, a copy that a test may change."""
    return shutil.copytree(llama_and_adapter, tmp_path, dirs_exist_ok=True)
