"""Conversions, loads and saves on a device whose order of events is checked, not its timing: see
`tests.support.simulated`.

What is left out here is one kind of wait at a time: then races must be found, else the stand-in sees nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

LIMIT_S = 200
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} has no devices in Python",
)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Return what a process of `tests.support.simulated.runs` has found."""
    command = [sys.executable, "-m", "tests.support.simulated.runs", name, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["convert", "load", "save", "only"])
def test_the_order_of_events_is_enough_and_the_bytes_are_those_of_the_cpu(
    name: str, tmp_path: Path
) -> None:
    found = run(name, tmp_path)
    assert found["races"] == [] and found["wrong"] == []
    if name == "save":
        waits = found["waits"]
        assert len(waits) == 6 and waits["save 0"], "it is not in the background"
        later = [waits[one] for one in ("save 1", "save 2", "managed 1", "managed 2")]
        assert not any(later), "training waits for no work of the device"
    if name == "only":
        assert len(found["waits"]) == 6
        waits = [one for some in found["waits"].values() for one in some if "local_digest" in one]
        brought = [one for one in waits if "copy of" in one and "unsaved_buffers" not in one]
        assert not brought, "frozen weights are looked at where they are"


def test_a_wait_that_is_left_out_is_found(tmp_path: Path) -> None:
    found = run("without", tmp_path)["found"]
    assert len(found) == 4 and all(found.values()), found
