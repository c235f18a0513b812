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
    from ckptmap.checkpoint import Checkpoint, open
    from ckptmap.conversion import Report, convert
    from ckptmap.difference import diff
    from ckptmap.errors import CkptmapError
    from ckptmap.hub.pull import pull
    from ckptmap.hub.push import push
    from ckptmap.lazy import LazyTensor
    from ckptmap.merging import merge
    from ckptmap.planning.planner import plan
    from ckptmap.planning.plans import Plan
    from ckptmap.resume import hooks as hooks
    from ckptmap.resume.load import load
    from ckptmap.resume.save import save
    from ckptmap.resume.translate import translate
    from ckptmap.verification import verify

__all__ = [
    "Checkpoint", "CkptmapError", "LazyTensor", "Plan", "Report", "__version__", "convert",
    "diff", "load", "merge", "open", "plan", "pull", "push", "save", "translate", "verify",
]  # fmt: skip

# No module may bear the name of a function here: importing it would shadow the function.
_HOMES = {
    "Checkpoint": "checkpoint", "CkptmapError": "errors", "LazyTensor": "lazy",
    "Plan": "planning.plans", "Report": "conversion", "convert": "conversion",
    "diff": "difference", "load": "resume.load", "merge": "merging", "open": "checkpoint",
    "plan": "planning.planner", "pull": "hub.pull", "push": "hub.push", "save": "resume.save",
    "translate": "resume.translate", "verify": "verification",
}  # fmt: skip


_ROOMS = {"hooks": "resume.hooks", "integrations": "integrations"}
"""Modules by the name that they have here."""


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `import ckptmap` costs nothing."""
    if name not in _HOMES and name not in _ROOMS:
        raise AttributeError(f"module 'ckptmap' has no attribute {name!r}")
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"ckptmap.{_ROOMS[name]}")
    value = getattr(importlib.import_module(f"ckptmap.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
