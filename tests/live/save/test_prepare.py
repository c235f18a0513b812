"""A manager imports beforehand what its first save needs, so that training does not wait for imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
import ckptmap

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
manager = ckptmap.CheckpointManager(sys.argv[1]) if sys.argv[2] == "manager" else None
before = set(sys.modules)
save = manager.save if manager else ckptmap.save
handle = save(3, model, optimizer) if manager else save(sys.argv[1] + "/out", model, optimizer)
print(len([name for name in set(sys.modules) - before if name.startswith(("ckptmap", "isal", "xx"))]))
handle.wait()
"""


def imported(folder: Path, by: str) -> int:
    """Return how many modules the first save imports."""
    command = [sys.executable, "-c", SCRIPT, str(folder), by]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


def test_the_first_save_of_a_manager_imports_nothing(tmp_path: Path) -> None:
    assert imported(tmp_path, "manager") == 0
    assert imported(tmp_path, "save") > 100, "what is counted is what a bare save imports"
