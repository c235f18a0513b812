"""A manager imports beforehand what its first save needs, so that training does not wait for imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import sys
import threading
import torch
import ckptmap

late, start = [], threading.Thread.start  # what writes in the background is not what training waits for
threading.Thread.start = lambda one: late.append(one) if one.name == "ckptmap-save" else start(one)

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
for by in ("manager", "save"):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    try:
        manager = ckptmap.CheckpointManager(sys.argv[1]) if by == "manager" else None
        before = set(sys.modules)
        save = manager.save if manager else ckptmap.save
        handle = save(3, model, optimizer) if manager else save(sys.argv[1] + "/out", model, optimizer)
        after = set(sys.modules) - before
        print(len([name for name in after if name.startswith(("ckptmap", "isal", "xx"))]), flush=True)
        start(*late)
        handle.wait()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
"""
"""Prints how many modules the first save imports: of a manager, and a bare one. Both begin with one import of torch."""


def test_the_first_save_of_a_manager_imports_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    by_manager, bare = map(int, done.stdout.split())
    assert by_manager == 0
    assert bare > 100, "what is counted is what a bare save imports"
