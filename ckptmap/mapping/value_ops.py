"""The operations of mapping files that change values: the result, its dtype and the inverse.

    add C     w + C, computed in float64 and rounded once to w's dtype; inverse: w - C
    add C T   the same, rounded to dtype T; inverse: w - C in w's own dtype, which is the scheme's
    neg       -w; the inverse is the same
    cast T    w in dtype T; inverse: w as it is, so the scheme's dtype is kept

Other operations come from installed packages, through the entry point group `ckptmap.value_ops`: an
object with `name`, `forward(values)` and `inverse(values)`, elementwise on tensors, keeping the dtype.
They run on the CPU whatever the device is: a GPU may round a function of theirs otherwise.
A mapping file only names an operation; it cannot import anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.tensors import FLOATING, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ValueOp:
    """One operation with its argument; `apply(values, inverse)` keeps shape and device.

    on_host  only the CPU is known to make its bits
    """

    text: str
    apply: Callable[[torch.Tensor, bool], torch.Tensor]
    dtype: str = ""
    """The dtype it casts to, "" where it keeps the dtype."""
    on_host: bool = False

    def result(self, info: TensorInfo, inverse: bool) -> TensorInfo:
        """Return shape and dtype of the result. Raises PlanError CKM613 for a dtype that is not floating."""
        if info.dtype not in FLOATING:
            raise PlanError(
                "CKM613", f"op {self.text!r}: expected floating values, found {info}",
                "correct the mapping file",
            )  # fmt: skip
        return TensorInfo(info.shape, self.dtype) if self.dtype and not inverse else info


@lru_cache(maxsize=256)
def parse_value_op(text: str) -> ValueOp:
    """Parse an operation. Raises PlanError CKM613 where there is no such operation."""
    kind, _, argument = text.partition(" ")
    number, _, dtype = argument.partition(" ")
    if kind == "add" and _is_number(number) and dtype in ("", *FLOATING):
        return ValueOp(
            text, lambda values, inverse: _added(values, float(number), dtype, inverse), dtype
        )
    if text == "neg":
        return ValueOp(text, lambda values, inverse: -values)
    if kind == "cast" and argument in FLOATING:
        return ValueOp(text, lambda values, inverse: _cast(values, argument, inverse), argument)
    installed = _installed(text)
    if installed is not None:
        return ValueOp(
            text,
            lambda values, inverse: (installed.inverse if inverse else installed.forward)(values),
            on_host=True,
        )
    raise PlanError(
        "CKM613",
        f"op {text!r} is none of `add C`, `add C DTYPE`, `neg`, `cast DTYPE`, and no installed package has it",
        "provide an operation of your own as an entry point of group ckptmap.value_ops",
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _added(values: torch.Tensor, number: float, dtype: str, inverse: bool) -> torch.Tensor:
    wide = values.double()
    if inverse or not dtype:
        return (wide - number if inverse else wide + number).to(values.dtype)
    return _cast(wide + number, dtype, False)


def _cast(values: torch.Tensor, dtype: str, inverse: bool) -> torch.Tensor:
    import torch

    return values if inverse else values.to(getattr(torch, dtype))


def _installed(name: str) -> Any:
    """Return the operation that an installed distribution provides under a name, None without one."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="ckptmap.value_ops"):
        if entry.name == name:
            op = registry.loaded(entry)
            if op is None:
                return None
            if not (
                callable(getattr(op, "forward", None)) and callable(getattr(op, "inverse", None))
            ):
                raise PlanError(
                    "CKM613", f"op {name!r}: the installed {entry.value} has no forward and inverse",
                    "give it both methods: a mapping file is used in both directions",
                )  # fmt: skip
            return op
    return None
