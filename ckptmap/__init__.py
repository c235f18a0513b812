"""ckptmap: checkpoint conversion and state-dict mapping for PyTorch.

    ckpt = ckptmap.open("runs/step-2000")            # a Mapping of plain FQN -> LazyTensor
    ckptmap.convert("runs/step-2000", "out/", to="hf")
    ckptmap.load("out/", model)                      # into a live model

Importing it does not import torch. Every byte of an output is accounted for, or nothing is
published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmap.version import __version__

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint
    from ckptmap.checkpoint.open import open
    from ckptmap.errors import CkptmapError
    from ckptmap.live.load.load import load
    from ckptmap.live.manager.manager import CheckpointManager
    from ckptmap.live.save.save import save
    from ckptmap.live.state_dict import hooks as hooks
    from ckptmap.live.state_dict.translate import translate
    from ckptmap.operations.convert import convert
    from ckptmap.operations.diff import diff
    from ckptmap.operations.hub.pull import pull
    from ckptmap.operations.hub.push import push
    from ckptmap.operations.merge import merge
    from ckptmap.operations.report.page import report
    from ckptmap.operations.verify import verify
    from ckptmap.planning.plan import Plan
    from ckptmap.planning.planner import plan
    from ckptmap.planning.report import Report
    from ckptmap.storage.lazy_tensor import LazyTensor

__all__ = [
    "Checkpoint", "CheckpointManager", "CkptmapError", "LazyTensor", "Plan", "Report", "__version__",
    "convert", "diff", "load", "merge", "open", "plan", "pull", "push", "report", "save", "translate",
    "verify",
]  # fmt: skip

# No module may bear the name of a function here: importing it would shadow the function.
_HOMES = {
    "Checkpoint": "checkpoint.checkpoint", "CheckpointManager": "live.manager.manager",
    "CkptmapError": "errors", "LazyTensor": "storage.lazy_tensor",
    "Plan": "planning.plan", "Report": "planning.report", "convert": "operations.convert",
    "diff": "operations.diff", "load": "live.load.load", "merge": "operations.merge", "open": "checkpoint.open",
    "plan": "planning.planner", "pull": "operations.hub.pull", "push": "operations.hub.push",
    "report": "operations.report.page", "save": "live.save.save",
    "translate": "live.state_dict.translate", "verify": "operations.verify",
}  # fmt: skip


_ROOMS = {
    "hooks": "live.state_dict.hooks",
    "integrations": "integrations",
    "ranks": "ranks",
}
"""Modules by the name that they have here."""


def __dir__() -> list[str]:
    """Return the public names, which tab completion shows."""
    return sorted({*__all__, *_ROOMS})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import ckptmap` costs nothing."""
    if name not in _HOMES and name not in _ROOMS:
        raise AttributeError(f"module 'ckptmap' has no attribute {name!r}")
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"ckptmap.{_ROOMS[name]}")
    value = getattr(importlib.import_module(f"ckptmap.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
