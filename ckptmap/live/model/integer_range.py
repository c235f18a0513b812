"""Integers that another integer dtype does not hold: a cast of torch's wraps them around, and says nothing.

int64 [3, 5_000_000_000]  ->  int32 [3, 705_032_704]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.errors import LoadError

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


def copy_held(out: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Copy values of any dtype into `out`, cast. Raises LoadError CKM502 for an integer that its dtype does not hold."""
    found = outside(values, out.dtype) if narrows(values.dtype, out.dtype) else None
    if found is not None:
        raise LoadError(
            "CKM502",
            f"{name}: holds {found}, which {out.dtype} of the model does not",
            f"register it as {values.dtype} in the model",
        )
    out.copy_(values)


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
