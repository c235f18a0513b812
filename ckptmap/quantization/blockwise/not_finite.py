"""Refuse values that no block of codes can hold, without a wait for the device in each feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted
from ckptmap.errors import RunError

if TYPE_CHECKING:
    import torch


class NotFinite:
    """Counts blocks whose largest absolute value, or scale, is not finite; a device is asked once, at the end."""

    def __init__(self) -> None:
        self._bad: list[
            torch.Tensor
        ] = []  # appended to, because feeds may come from several threads

    def note(self, of_blocks: torch.Tensor) -> None:
        """Count those of `of_blocks`, one number a block.

        A CPU is asked at once: small tensors that stay between large ones that go keep the allocator from using
        the memory of those again.
        """
        bad = of_blocks.isfinite().logical_not_().sum()
        if not bad.is_cpu or bool(bad):
            self._bad.append(bad)

    def require_none(self) -> None:
        """Raise RunError CKM309 where a block was not finite."""
        import torch

        count = int(torch.stack(self._bad).sum()) if self._bad else 0
        if count:
            raise RunError(
                "CKM309",
                f"expected finite values, found NaN or infinity in {counted(count, 'block')}",
                "repair this tensor, or leave it unquantized with --no-encode",
            )
