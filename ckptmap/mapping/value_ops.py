"""The few operations that change values: what they give, how exact they are, their inverse.

    add C     w + C, computed in float64 and rounded once to w's dtype; back: w - C
    neg       -w; back: the same
    cast T    w in dtype T; back: as it is, the scheme's dtype is kept

Other ops come from installed packages only, by the entry point group `ckptmap.value_ops`: an object
with `name`, `forward(values)` and `inverse(values)`, elementwise on tensors, dtype kept. A mapping
file names an op; it can import nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptmap.errors import PlanError
from ckptmap.tensors import FLOATING, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ValueOp:
    """One op with its argument; `apply(values, inverse)` keeps shape and device."""

    text: str
    apply: Callable[[torch.Tensor, bool], torch.Tensor]
    dtype: str = ""
    """The dtype that it casts to; "" keeps the dtype."""

    def result(self, info: TensorInfo, inverse: bool) -> TensorInfo:
        """What it makes of a tensor. Raises PlanError CKM613 where it is not floating."""
        if info.dtype not in FLOATING:
            raise PlanError(
                "CKM613", f"op {self.text!r}: expected floating values, found {info}",
                "correct the mapping file",
            )  # fmt: skip
        return TensorInfo(info.shape, self.dtype) if self.dtype and not inverse else info


@lru_cache(maxsize=256)
def parse_value_op(text: str) -> ValueOp:
    """Raises PlanError CKM613 where there is no such op."""
    kind, _, argument = text.partition(" ")
    if kind == "add" and _is_number(argument):
        return ValueOp(text, lambda values, inverse: _added(values, float(argument), inverse))
    if text == "neg":
        return ValueOp(text, lambda values, inverse: -values)
    if kind == "cast" and argument in FLOATING:
        return ValueOp(text, lambda values, inverse: _cast(values, argument, inverse), argument)
    found = _installed(text)
    if found is not None:
        return ValueOp(
            text, lambda values, inverse: (found.inverse if inverse else found.forward)(values)
        )
    raise PlanError(
        "CKM613",
        f"op {text!r} is none of `add C`, `neg`, `cast DTYPE`, and no installed package has it",
        "an op of your own is an entry point of group ckptmap.value_ops",
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _added(values: torch.Tensor, number: float, inverse: bool) -> torch.Tensor:
    wide = values.double()
    return (wide - number if inverse else wide + number).to(values.dtype)


def _cast(values: torch.Tensor, dtype: str, inverse: bool) -> torch.Tensor:
    import torch

    return values if inverse else values.to(getattr(torch, dtype))


def _installed(name: str) -> Any:
    """An op that an installed distribution brings, with both directions."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="ckptmap.value_ops"):
        if entry.name == name:
            found = entry.load()
            found = found() if isinstance(found, type) else found
            if not (
                callable(getattr(found, "forward", None))
                and callable(getattr(found, "inverse", None))
            ):
                raise PlanError(
                    "CKM613", f"op {name!r}: the installed {entry.value} has no forward and inverse",
                    "an op without an inverse is none",
                )  # fmt: skip
            return found
    return None
