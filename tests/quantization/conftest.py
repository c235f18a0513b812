"""What the tests of encodings share: models that the libraries themselves quantized, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`written(form)`: the directory of a model of a form of `tests.support.quantized_models.WRITERS`."""
    from tests.support.quantized_models import WRITERS

    @cache
    def write(form: str) -> Path:
        path = tmp_path_factory.mktemp(form) / "in"
        WRITERS[form](path)
        return path

    return write
