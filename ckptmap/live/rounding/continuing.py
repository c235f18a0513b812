"""Rounding by position in a run that goes on from a checkpoint: its seed, and other numbers of ranks.

The bits of weight number i in step t are the same on any number of ranks. So is the run, where its
gradients are, which the caller of `install` states, and where moments are quantized by the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.core.formatting import some
from ckptmap.live.optimizer.gradients import AVERAGED
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.unwrap import each_of, inner_optimizers
from ckptmap.live.rounding.record import RoundingRecord, record_of, saved_seed

CUT = ("world_size", "mesh", "layout")
"""Settings of a run that say how tensors are cut over ranks."""
EXACT_WORLDS = (1, 2, 4)
"""Numbers of ranks that can average equal gradients without rounding, in any order of the sum. With three,
3g is rounded; with eight, which is a power of two, a ring rounds 5g, 6g and 7g on its way to 8g, and what it
loses there is more than 8g can round away."""


@dataclass(frozen=True, eq=False)
class SavedRounding:
    """The rounding of one live optimizer, and that of the same one in the checkpoint.

    records  of the optimizers that keep its state; empty: it does not round by position
    saved    the seed of the checkpoint; None: it was saved without
    """

    records: Sequence[RoundingRecord]
    saved: int | None

    @property
    def is_known(self) -> bool:
        return bool(self.records) and self.saved is not None

    @property
    def states_gradients(self) -> bool:
        return self.is_known and all(record.same_gradients for record in self.records)

    def finish(self) -> None:
        if self.saved is not None:
            for record in self.records:
                record.seed = self.saved

    def note(self) -> str:
        if not self.records:
            return ""
        mine = self.records[0].seed
        if self.saved is None:
            return f"by position, seed {mine}; the checkpoint has none"
        return f"by position, seed {self.saved}" + (f", was {mine}" if mine != self.saved else "")


@dataclass(frozen=True, eq=False)
class RoundingContinuation:
    """The rounding of a run that goes on, of one optimizer or several.

    is_cut_otherwise  do other ranks, or ranks with other shards, go on with the run?
    worlds            how many ranks saved it, and how many go on with it
    """

    optimizers: Sequence[SavedRounding] = ()
    is_cut_otherwise: bool = False
    worlds: tuple[object, object] = (1, 1)

    @classmethod
    def of(
        cls, optimizer: object, saved: Mapping[str, Any], live: Mapping[str, Any]
    ) -> RoundingContinuation:
        """Return it for an `unwrapped` optimizer, from the settings that are saved and those that are
        live."""
        ones = each_of(optimizer) if optimizer is not None else []
        theirs: Sequence[object] = [saved.get("optimizer")]
        if isinstance(optimizer, SeveralOptimizers):
            several = _mapping(_mapping(theirs[0]).get("several"))
            theirs = [several.get(name) for name in optimizer.by_name]
        found = [
            SavedRounding(_records(one), saved_seed(settings))
            for one, settings in zip(ones, theirs, strict=bool(ones))
        ]
        otherwise = any(saved.get(key, live.get(key)) != live.get(key) for key in CUT)
        return cls(found, otherwise, (saved.get("world_size"), live.get("world_size")))

    @property
    def goes_on_elsewhere(self) -> bool:
        """Does the run go on bit for bit although tensors are cut otherwise, if the caller is right?"""
        stated = [one.states_gradients for one in self.optimizers]
        return self.is_cut_otherwise and bool(stated) and all(stated)

    @property
    def settled(self) -> Collection[str]:
        """The settings that may differ."""
        return (*CUT, AVERAGED) if self.goes_on_elsewhere else ()

    def reasons(self, other_blocks: Sequence[str]) -> Iterator[str]:
        """Yield why the run does not go on bit for bit where tensors are cut otherwise."""
        if not self.is_cut_otherwise or not any(one.is_known for one in self.optimizers):
            return
        if not self.goes_on_elsewhere:
            yield (
                "gradients are not known to be the same bits on these ranks: where their sums do not depend on"
                " the order, say so for every optimizer: rounding.install(optimizer, seed=...,"
                f" same_gradients=True){self._rounded_sums(' (')}"
            )
        if other_blocks:
            yield (
                f"moments that are not in blocks of the whole tensor, {len(other_blocks)}:"
                f" {some(other_blocks)} (they are in blocks of each rank's shard, in the checkpoint or"
                " here: without exact=True they are decoded into float32)"
            )

    def caveats(self) -> Iterator[str]:
        """Yield what is believed of the gradients although these numbers of ranks speak against it."""
        if self.goes_on_elsewhere and (text := self._rounded_sums("")):
            yield (
                "same_gradients=True is believed: the run goes on bit for bit only where gradients are no sums"
                f" over ranks; it was {text}"
            )

    def _rounded_sums(self, opening: str) -> str:
        """Return why sums of gradients depend on their order; empty: those of equal batches do not."""
        saved, live = self.worlds
        if saved in EXACT_WORLDS and live in EXACT_WORLDS:
            return ""
        text = (
            f"saved by {saved} ranks, {live} now, and only 1, 2 and 4 ranks sum equal gradients without"
            " rounding"
        )
        return f"{opening}{text})" if opening else text

    def finish(self) -> None:
        """Restore the seeds."""
        for one in self.optimizers:
            one.finish()

    def note(self) -> str:
        """Return the text of the report, before `finish`; empty: nothing rounds by position."""
        return "; ".join(filter(None, (one.note() for one in self.optimizers)))


def _records(optimizer: Any) -> list[RoundingRecord]:
    found = map(record_of, inner_optimizers(optimizer))
    return [record for record in found if record is not None]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
