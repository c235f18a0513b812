"""The layout of FSDP1's flat parameters: which FSDP unit holds a tensor, as `--fsdp-units` says.

    --fsdp-units 'layers.*'   layers.0.mlp.up_proj.weight -> layers.0, norm.weight -> "" (the root)

A unit is a module that FSDP wraps; the root always is one. Of nested units the innermost holds a
parameter (torch/distributed/fsdp/_flat_param.py). No unit holds buffers.
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
    """The layout by units: `units` are patterns of module names, `named` is `use_orig_params`."""

    units: tuple[str, ...] = ()
    named: bool = False
    name: str = "flat"

    def over_units(self, units: Sequence[str], named: bool, names: Collection[str]) -> FlatCut:
        """Return the layout for these units. Raises PlanError CKM206 if a pattern matches no module."""
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
        """Return the unit that holds a parameter; None for a buffer.

        A buffer is a tensor that is not floating, a scalar (FSDP1 flattens none), one with the name
        of a buffer, or one that the source holds whole (`whole`) and that has no parameter's name."""
        last = fqn.rpartition(".")[2]
        if info.dtype not in FLOATING or not info.shape or last in BUFFERS:
            return None
        if whole and last not in PARAMETERS:
            return None
        enclosing = [
            m for m in _modules(fqn) if any(_matches(pattern, m) for pattern in self.units)
        ]
        return FlatUnit(enclosing[-1] if enclosing else "", self.named)

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """Return the whole tensor: a flat parameter is cut once all tensors in it are known."""
        return [(0, Box.whole(info.shape))]

    def join(self, values: Sequence[Leaf], key: str) -> None:
        """Return None: flat parameters are taken apart before layouts join."""
        return None


def _modules(fqn: str) -> list[str]:
    """Yield the modules around a tensor: `a.b.weight` -> a, a.b."""
    parts = fqn.split(".")[:-1]
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _matches(pattern: str, module: str) -> bool:
    """Return whether the pattern matches segment by segment: `layers.*` does not match `layers.0.mlp`."""
    pattern_segments, segments = pattern.split("."), module.split(".")
    return len(pattern_segments) == len(segments) and all(
        map(fnmatchcase, segments, pattern_segments)
    )
