"""What ranks tell each other before a save is written: whether they were given the same values, and what each
holds that all must know, as records and settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.checkpoint import base_record
from ckptmap.live.model.load_report import listed
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.optimizer import run_settings
from ckptmap.live.optimizer.local_state import STATE, LocalState
from ckptmap.live.options import SaveOptions
from ckptmap.live.rounding import record as rounding
from ckptmap.live.save import extra_values, pending_gradients
from ckptmap.live.save.assign_writers import Offer, drifted_buffers
from ckptmap.live.save.collect import put
from ckptmap.live.save.overlapping_meshes import require_alike
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of its values, before anything is written.

    extra, states  digests of the caller's values by name
    evidence       of gradients that are pending
    bases          of a save of a part of the weights; rank 0 has taken the digests
    """

    step: int | None
    extra: Mapping[str, str]
    states: Mapping[str, str]
    evidence: pending_gradients.Evidence
    bases: object

    @classmethod
    def of(
        cls,
        options: SaveOptions,
        states: Mapping[str, object],
        evidence: pending_gradients.Evidence,
        held: LocalState,
    ) -> Told:
        extra = extra_values.digests(options.extra or {})
        bases = held.settings.get(base_record.KEY)
        return cls(options.step, extra, extra_values.digests(states), evidence, bases)


def require_same_values(held: LocalState, told: Sequence[Told], options: SaveOptions) -> None:
    """Compare what all ranks told.

    Raises ArgumentError CKM516 where they differ, CKM518 where gradients are pending."""
    extra_values.require_same_step([one.step for one in told])
    extra_values.require_same([one.extra for one in told])
    if told[0].bases:
        held.settings[base_record.KEY] = told[0].bases
    pending = pending_gradients.told([one.evidence for one in told])
    if options.gradients is None:
        pending_gradients.refuse(pending)
    if pending and not options.gradients:
        held.settings[run_settings.WITHOUT] = pending


def share(
    held: LocalState,
    offers: Sequence[Sequence[Offer]],
    model: torch.nn.Module,
    peers: RankGroup,
    replicas: str,
) -> list[str]:
    """Exchange plain values, records and settings, so that every rank has those of all, and return
    the names of the buffers that differ between ranks. Raises RunError CKM509 where replicas do."""
    everything = peers.all((held.values, held.records))
    settings_of = peers.all(
        (held.settings["layout"], bool(held.decoded), replicas, held.placements, held.simplified)
    )
    rounding.require_one_seed(peers.all(rounding.seeds(held.settings)))
    if any(wanted == "check" for _, _, wanted, *_ in settings_of):
        require_alike(held, offers, peers)
    with peers.together():
        drifted = [] if _broadcasts_buffers(model) else drifted_buffers(offers)
        described = {
            **held.settings,
            "layout": [layout for layout, *_ in settings_of],
            "decoded": any(decoded for _, decoded, *_ in settings_of),
            run_settings.PLACEMENTS: {k: v for *_, some, _ in settings_of for k, v in some.items()},
            run_settings.FORMS: list(
                dict.fromkeys(name for *_, some in settings_of for name in some)
            ),
            "buffers": drifted,
            run_settings.UNLIKE: _unlike([values for values, _ in everything]),
        }
        put(held, ("extra", run_settings.KEY), described)
        for values, records in reversed(everything):
            held.records.update(records)
            held.values |= values
    return drifted


def _broadcasts_buffers(model: torch.nn.Module) -> bool:
    """Return whether DDP broadcasts rank 0's buffers before each forward, so that those of other ranks
    need not be saved."""
    return any(getattr(module, "broadcast_buffers", False) for module in model.modules())


def lost_buffers(buffers: Sequence[str]) -> tuple[str, ...]:
    """Return the note of buffers that differ between ranks; none where there are none."""
    if not buffers:
        return ()
    what = "buffer differs" if len(buffers) == 1 else "buffers differ"
    return (
        f"{len(buffers)} {what} between ranks, those of the lowest were saved: {listed(buffers)}",
    )


def _unlike(values_of: Sequence[Mapping[Path, object]]) -> list[str]:
    """Return the names of the plain values of optimizer state that differ between ranks."""
    first: dict[Path, object] = {}
    differing = {
        ".".join(map(str, path[2:])): None
        for values in values_of
        for path, value in values.items()
        if path[: len(STATE)] == STATE and repr(first.setdefault(path, value)) != repr(value)
    }
    return [*differing]
