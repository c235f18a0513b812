"""The samples that DeepSpeed wrote, unpacked once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.deepspeed.make_deepspeed import unpack


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that has one folder for each run."""
    folder = tmp_path_factory.mktemp("deepspeed")
    unpack(folder)
    yield folder
