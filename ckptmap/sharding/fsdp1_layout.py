"""Which FSDP1 unit a tensor's flat parameter is of: what `--fsdp-units` says.

    --fsdp-units 'layers.*'   layers.0.mlp.up_proj.weight -> layers.0, norm.weight -> "" (the root)

A unit is a module that was wrapped; the root always is one, and of units inside each other the
innermost holds a parameter (torch/distributed/fsdp/_flat_param.py). Buffers lie in none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptmap.errors import PlanError
from ckptmap.protocols import FlatUnit
from ckptmap.tensors import BUFFERS, FLOATING, PARAMETERS, Box, Leaf, TensorInfo


@dataclass(frozen=True)
class FlatCut:
    """By unit; `units` are patterns of modules, segment by segment."""

    units: tuple[str, ...] = ()
    named: bool = False
    name: str = "flat"

    def over_units(self, units: Sequence[str], named: bool, names: Collection[str]) -> FlatCut:
        """`named`: use_orig_params. Raises PlanError CKM206 where a pattern is of no module."""
        modules = {module for name in names for module in _modules(name)}
        for pattern in units:
            if not any(_matches(pattern, module) for module in modules):
                raise PlanError(
                    "CKM206",
                    f"--fsdp-units {pattern}: matches no module that holds a tensor",
                    "name modules as `ckptmap inspect` shows them, for example 'layers.*'",
                )
        return FlatCut(tuple(units), named)

    def unit(self, fqn: str, info: TensorInfo, whole: bool = False) -> FlatUnit | None:
        """The unit that holds a parameter; None for a buffer: not floating, a scalar (which FSDP1
        takes as no parameter), called so, or shown to be one by the source (`whole`) and not called
        as parameters are."""
        last = fqn.rpartition(".")[2]
        if info.dtype not in FLOATING or not info.shape or last in BUFFERS:
            return None
        if whole and last not in PARAMETERS:
            return None
        inside = [m for m in _modules(fqn) if any(_matches(each, m) for each in self.units)]
        return FlatUnit(inside[-1] if inside else "", self.named)

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Whole: where a flat parameter is cut is known when all that lies in it is."""
        return [(0, Box.whole(info.shape))]

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """None: flat parameters are taken apart before layouts join."""
        return None


def _modules(fqn: str) -> list[str]:
    """`a.b.weight` -> a, a.b"""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _matches(pattern: str, module: str) -> bool:
    """Segment by segment: `layers.*` is not `layers.0.mlp`."""
    wanted, found = pattern.split("."), module.split(".")
    return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))
