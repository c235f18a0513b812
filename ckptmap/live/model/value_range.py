"""Values that the model's dtype does not hold: a cast of torch's makes others of them, and says nothing.

int64   [3, 5_000_000_000]  ->  int32   [3, 705_032_704]
float32 [3, 70_000]         ->  float16 [3, inf]

Integers are looked at before anything is loaded. Of floats only the cast itself tells, because weights are
too many to be read twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmap.errors import LoadError, RunError

if TYPE_CHECKING:
    import torch


def narrows(stored: torch.dtype, live: torch.dtype) -> bool:
    """Return whether both are integers, and some values of the first are none of the second."""
    import torch

    if any(one.is_floating_point or one.is_complex or one is torch.bool for one in (stored, live)):
        return False
    return not all(_holds(live, bound) for bound in _bounds(stored))


def outside(values: torch.Tensor, live: torch.dtype) -> int | None:
    """Return a value that `live` does not hold, the lowest or highest; None: it holds all."""
    if not values.numel():
        return None
    return next((value for value in _extremes(values) if not _holds(live, value)), None)


def overflows(stored: torch.dtype, live: torch.dtype) -> bool:
    """Return whether both are floats, and the second ends far below the first, as float16 and the float8 dtypes do.

    bfloat16 ends 0.4 % below float32, where no weight is: its casts are not looked at.
    """
    import torch

    if not (stored.is_floating_point and live.is_floating_point):
        return False
    return torch.finfo(live).max < torch.finfo(stored).max / 2


def _most_rounded(dtype: torch.dtype) -> float:
    """Return by how much a value is rounded at most: half of the step between the two largest."""
    import torch

    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(info.max)[1] - 2)


def _is_within(values: torch.Tensor, most: float) -> bool:
    """Return whether all values are numbers of this magnitude at most. Waits for their device."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(low >= -most) and bool(high <= most)


class Casts:
    """Copies parts of one tensor into another dtype, and then tells whether a finite value was lost: beyond the range of
    the other, it became infinite or NaN, or its largest value, as newer releases of torch cast to float8.

    name    of the tensor, in the error
    looks   whether the cast can do that; if not, copying is all
    later   takes the casts on a device that `check` leaves to `check_together`; None: it leaves none
    """

    def __init__(
        self, name: str, stored: torch.dtype, live: torch.dtype, later: list[Casts] | None = None
    ) -> None:
        self.looks = overflows(stored, live)
        self.name, self._stored, self._live, self._later = name, stored, live, later
        self._most = _most_rounded(live) if self.looks else 0.0
        self._has_infinity = not str(live).endswith(("fn", "fnuz"))
        self.lost: torch.Tensor | None = None

    def copy(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` into `out`. Where `looks`, takes buffers of twice the bytes of `values` meanwhile."""
        out.copy_(values)
        self.look(out, values)

    def look(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Look at values that were copied into `out`."""
        if self.looks:  # on the device of the values, and nothing waits for it
            values = values.float() if values.itemsize == 1 else values  # float8 has no arithmetic
            cast = out if out.device == values.device else values.to(out.dtype)
            error = cast.to(values.dtype).sub_(values)
            # On a CPU this takes a fifth of the time of what follows; a device would be waited for.
            if error.is_cpu and _is_within(error, self._most):
                return
            if self._has_infinity:  # what was infinite or NaN differs by NaN
                lost = (error.abs_() > self._most).any()
            else:
                lost = (
                    values.isfinite()
                    .logical_and_((error.abs_() <= self._most).logical_not_())
                    .any()
                )
            self.lost = lost if self.lost is None else lost.logical_or_(self.lost)

    def check(self) -> None:
        """Raise RunError CKM309 if a finite value was lost. Waits for the device, where `looks` and nobody looks
        later."""
        if self.lost is None:
            return
        if self._later is not None and is_waited_for(self.lost):
            self._later.append(self)
        elif bool(self.lost):
            raise self.error

    @property
    def error(self) -> RunError:
        return RunError(
            "CKM309",
            f"{self.name}: holds finite values of {self._stored} that are too large for {self._live} of the model",
            "make the model in torch.bfloat16 or torch.float32 and load it again: it is loaded in part",
        )


def is_waited_for(values: torch.Tensor) -> bool:
    """Return whether the host waits for a device where it asks for a value."""
    return values.device.type != "cpu"


def check_together(casts: Iterable[Casts]) -> None:
    """Raise RunError CKM309 for the first by name that has lost a finite value. Waits once for each device."""
    if found := lost_values(casts):
        raise found[0].error


def lost_values(casts: Iterable[Casts]) -> list[Casts]:
    """Return those that have lost a finite value, by name. Waits once for each device."""
    import torch

    by_device: dict[torch.device, list[tuple[Casts, torch.Tensor]]] = {}
    for one in casts:
        if one.lost is not None:
            by_device.setdefault(one.lost.device, []).append((one, one.lost))
    found = [
        one
        for some in by_device.values()
        for (one, _), is_lost in zip(
            some, torch.stack([lost for _, lost in some]).tolist(), strict=True
        )
        if is_lost
    ]
    return sorted(found, key=lambda one: one.name)


def copy_held(out: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Copy values of any dtype into `out`, cast. Raises LoadError CKM502 for an integer that its dtype does not hold,
    RunError CKM309 for a finite float that becomes infinite."""
    found = outside(values, out.dtype) if narrows(values.dtype, out.dtype) else None
    if found is not None:
        raise LoadError(
            "CKM502",
            f"{name}: holds {found}, which {out.dtype} of the model does not",
            f"register it as {values.dtype} in the model",
        )
    casts = Casts(name, values.dtype, out.dtype)
    casts.copy(out, values)
    casts.check()


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    import torch

    info = torch.iinfo(dtype)
    return info.min, info.max


def _holds(dtype: torch.dtype, value: int) -> bool:
    low, high = _bounds(dtype)
    return low <= value <= high


def _extremes(values: torch.Tensor) -> tuple[int, int]:
    """Return the lowest and the highest value. torch orders no uint64: with the sign bit turned it is an int64."""
    import torch

    if values.dtype == torch.uint64:
        turned = values.contiguous().view(torch.int64) ^ torch.iinfo(torch.int64).min
        low, high = turned.aminmax()
        return int(low) + (1 << 63), int(high) + (1 << 63)
    low, high = values.to(torch.int64).aminmax()
    return int(low), int(high)
