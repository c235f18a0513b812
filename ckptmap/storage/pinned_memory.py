"""Host memory for copies to and from a device: pinned, so that such copies need not block the host."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_refusals: list[str] = []
"""Why the system refused to pin memory; it is warned of once."""


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new host memory, pinned where the system allows it, else pageable.

    A copy to pageable memory gives the same bytes, and blocks the host. The first refusal is a
    RuntimeWarning.
    """
    import torch

    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # After host memory is really used up, this raises, too.
        memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        _refusals.append(str(error).partition("\n")[0])
        if len(_refusals) == 1:
            warnings.warn(
                f"{memory.nbytes} bytes of host memory could not be pinned ({_refusals[0]}):"
                " pageable memory is used, and copies from and to the device are slower",
                RuntimeWarning,
                stacklevel=2,
            )
        return memory
