"""What is known of an optimizer that rounds by position, where `save`, `load` and reports find it.

    optimizer._ckptmap_rounding    on each optimizer that keeps state: those inside of CPUOffloadOptimizer

The step count is not here: it is the parameter's own, in the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmap.errors import RunError
from ckptmap.live.rounding.position_bits import VERSION

if TYPE_CHECKING:
    import torch

    from ckptmap.live.rounding.cut_params import CutBlocks
    from ckptmap.live.rounding.positions import Positions
    from ckptmap.live.rounding.shared_blocks import SharedBlocks

LOWEST = -(1 << 63)
"""The lowest seed; the highest is 2^63 - 1."""
ATTRIBUTE = "_ckptmap_rounding"
HOW = "by position"


@dataclass(frozen=True, eq=False)
class ParamPlace:
    """A parameter's FQN, and where its elements lie in the whole tensor.

    facts      what the rest was computed from: it is computed anew where they change
    positions  None: it is not rounded, or this rank holds none of it
    grid       how its moments are cut into blocks: one of `moments.GRIDS`
    shared     how ranks share these blocks, where they hold some together
    cut        how ranks share them, where each holds a small part of many
    """

    param: torch.Tensor
    fqn: str
    facts: tuple[object, ...]
    positions: Positions | None
    grid: str
    shared: SharedBlocks | None
    cut: CutBlocks | None


@dataclass(eq=False)
class RoundingRecord:
    """The rounding of one optimizer.

    seed            of all bits; `load` restores that of the checkpoint
    same_gradients  the caller states that gradients are the same bits on any number of ranks
    name_of         id of a parameter -> (the parameter, its FQN); looked up anew where it lacks one
    """

    seed: int
    same_gradients: bool
    name_of: Callable[[], dict[int, tuple[torch.Tensor, str]]]
    names: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    places: dict[int, ParamPlace] = field(default_factory=dict)
    went_through: bool = False
    """Has our own step run since the last look? The step hook asks."""


def record_of(optimizer: Any) -> RoundingRecord | None:
    """Return the record of an optimizer that rounds by position; None: it does not."""
    found = getattr(optimizer, "__dict__", {}).get(ATTRIBUTE)
    return found if isinstance(found, RoundingRecord) else None


def described(record: RoundingRecord) -> dict[str, object]:
    """Return what a checkpoint records of it, as plain values."""
    return {"how": HOW, "version": VERSION, "seed": record.seed}


def how(optimizer: Mapping[str, Any]) -> object:
    """Return where the settings of an optimizer say that its random bits come from: text, or whether it
    draws any from the random generators."""
    found = optimizer.get("rounding")
    if isinstance(found, Mapping):
        return f"{found.get('how')}, version {found.get('version')}"
    return optimizer.get("rounds")


def saved_seed(optimizer: object) -> int | None:
    """Return the seed among the saved settings of an optimizer, where this release computes its bits;
    None: it has none."""
    saved = optimizer.get("rounding") if isinstance(optimizer, Mapping) else None
    if not isinstance(saved, Mapping) or (saved.get("how"), saved.get("version")) != (HOW, VERSION):
        return None
    seed = saved.get("seed")
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and LOWEST <= seed < -LOWEST
    return seed if is_seed else None


def seeds(settings: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the seed of each optimizer in the settings of a run; None: it does not round by position."""
    optimizer = settings.get("optimizer") or {}
    several = optimizer.get("several") or {"": optimizer}
    return tuple(map(saved_seed, several.values()))


def require_one_seed(seeds_of: Sequence[tuple[int | None, ...]]) -> None:
    """Raise RunError CKM509 where ranks round with different seeds; `seeds_of` has those of each rank."""
    for rank, found in enumerate(seeds_of):
        if found != seeds_of[0]:
            raise RunError(
                "CKM509",
                f"rounding by position: rank {rank} has seed {_text(found)}, rank 0 {_text(seeds_of[0])}",
                "install it with one seed on all ranks",
            )


def _text(found: Sequence[int | None]) -> str:
    return ", ".join("none" if seed is None else str(seed) for seed in found)
