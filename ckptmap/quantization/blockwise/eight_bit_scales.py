"""Grids of 256 levels, on which scales of blocks are stored in 8 bits: chosen, or found again.

    s [m] f32  ->  centre [] T, size [ceil(m/unit)] T, level of each       T: what is computed in
    torchao        s' = level / size + centre      levels -128 to 127
    bitsandbytes   s' = level * size + centre      those of its dynamic map, T float32

Codes that are kept may go to and fro between libraries any number of times, so that scales which
lie on such a grid must be given the same grid again; else each conversion moves them a little
further. Hence

- the centre is the median: levels keep the order of scales, and one of them is the centre, so that
  the median of what they decode to is the centre again. A mean is not kept;
- the size of a unit is that which gives back its outermost scale to the last bit, where T can, and
  which clips none: what is outermost is so again, and the size a function of it alone;
- a library's own grid, whose centre was the mean of other numbers, is found again by least squares
  and taken where it gives back every scale.

So one grid holds after one conversion. Of two that take turns, the second is made of what the first
has rounded: nearest neighbours on two fixed grids come to rest, after two passes at the latest in
all that was tried, mostly after one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Fitted = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 16
"""Scales at a time."""
_NUDGES = (0, 1, -1, 2, -2)
"""Units in the last place, around a number that was computed with rounding."""
_TURNS = 3
"""Until the ends of a unit stay where they are."""
_FURTHER = (1, -1, 2, -2, 3, -3, 4, -4)
_SHARES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875, 0.0, 1.0)
"""Where in a range of sizes to try."""


@dataclass(frozen=True)
class ScaleCodes:
    """Scales of whole units: the number of each one's level, and what it decodes to."""

    at: torch.Tensor
    decoded: torch.Tensor
    below: torch.Tensor | None = None
    """What the next lower level decodes to."""

    def told(self, scales: torch.Tensor) -> torch.Tensor:
        """The decoded scales, 0 where levels are too far apart to tell a positive one from 0."""
        assert self.below is not None, "only of what `coded` gives"
        return self.decoded.masked_fill(self.below.float() <= -scales, 0)


@dataclass(frozen=True)
class ScaleLevels:
    """`levels` f32 [256], ascending, 0 among them; `unit` scales share a size."""

    levels: torch.Tensor
    unit: int
    dtype: torch.dtype
    divides: bool

    def fitted(self, scales: torch.Tensor) -> Fitted:
        """scales [m] f32 -> centre [] T, sizes [ceil(m/unit)] T."""
        centre = scales.median().to(self.dtype)
        sizes = _joined([self._sizes(part, centre) for part in self._parts(scales, centre)])
        coarse = int(sizes.argmin() if self.divides else sizes.argmax())
        unit = scales[coarse * self.unit :][: self.unit]
        one = self._gives_back(self._blocks(unit, centre), centre, sizes[coarse : coarse + 1])
        if bool(one) and self._holds(scales, centre, sizes):
            return centre, sizes
        return self._found_again(scales, unit) or (centre, sizes)

    def coded(self, scales: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor) -> ScaleCodes:
        """scales [m] f32, sizes [ceil(m/unit)] T -> [m]: the level that decodes to the nearest.
        The outermost of a unit has the outermost level, unless another is its very value."""
        blocks = self._blocks(scales, centre)
        found = self._nearest(blocks, centre, sizes)
        lower = self.levels[(found.at - 1).clamp_(min=0)]
        below = self._decoded(lower, sizes.unsqueeze(-1), centre)
        every = (found.at, found.decoded, below)
        return ScaleCodes(*(one.flatten()[: scales.numel()] for one in every))

    # ------------------------------------------------------------------ decoding

    def _decoded(
        self, level: torch.Tensor, size: torch.Tensor, centre: torch.Tensor
    ) -> torch.Tensor:
        level = level.to(self.dtype)
        return (level / size if self.divides else level * size) + centre

    def _nearest(
        self, blocks: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor
    ) -> ScaleCodes:
        """blocks [u, unit] f32, sizes [u] T."""
        import torch

        level, peak = self._peaks(blocks, centre)
        size = sizes.unsqueeze(-1)
        at = self._index(blocks - centre.float(), size.float()).clamp_(0, len(self.levels) - 1)
        decoded = self._decoded(self.levels[at], size, centre)
        best = (decoded.float() - blocks).abs()
        for nudge in () if self.dtype == torch.float32 else (1, -1):  # 16 bits round levels, too
            tried = (at + nudge).clamp_(0, len(self.levels) - 1)
            found = self._decoded(self.levels[tried], size, centre)
            gap = (found.float() - blocks).abs()
            better = gap < best
            best = torch.where(better, gap, best)
            at, decoded = torch.where(better, tried, at), torch.where(better, found, decoded)
        held = (level != 0) & ~self._full(sizes)
        outer = (blocks == peak.unsqueeze(-1)) & (best != 0) & held.unsqueeze(-1)
        edge = torch.where(level > 0, len(self.levels) - 1, 0).unsqueeze(-1)
        outermost = self._decoded(level, sizes, centre).unsqueeze(-1)
        return ScaleCodes(torch.where(outer, edge, at), torch.where(outer, outermost, decoded))

    def _index(self, distance: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Of the level at, or next to, the nearest."""
        import torch

        if self.divides:
            return (distance * size - self.levels[0]).round_().to(torch.int32)
        middles = (self.levels[:-1] + self.levels[1:]) / 2
        return torch.bucketize(distance / size.clamp(min=1e-38), middles, out_int32=True)

    # ------------------------------------------------------------------ units

    def _blocks(self, scales: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """[m] -> [ceil(m/unit), unit]; a short one is filled up with the centre."""
        import torch

        short = -scales.numel() % self.unit
        if short:
            scales = torch.cat([scales, centre.float().expand(short)])
        return scales.view(-1, self.unit)

    def _parts(self, scales: torch.Tensor, centre: torch.Tensor) -> Iterator[torch.Tensor]:
        step = self.step
        for start in range(0, scales.numel(), step):
            yield self._blocks(scales[start : start + step], centre)

    @property
    def step(self) -> int:
        """Scales at a time: whole units."""
        return max(CHUNK // self.unit, 1) * self.unit

    def _peaks(
        self, blocks: torch.Tensor, centre: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outermost scale of each unit, by its share of the outermost level, and that level;
        of a unit that is the centre throughout, 0."""
        import torch

        high, low = blocks.amax(1), blocks.amin(1)
        top, bottom = self.levels[-1], self.levels[0]
        above, below = (high - centre.float()) / top, (low - centre.float()) / bottom
        level = torch.where(above >= below, top, bottom)
        flat = (above <= 0) & (below <= 0)
        return level.masked_fill(flat, 0), torch.where(above >= below, high, low)

    # ------------------------------------------------------------------ sizes

    def _sizes(self, blocks: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """[u, unit] -> [u] T. More than once: an outermost scale that cannot be given back is
        another one afterwards, perhaps that of the other side, and the size must be that of it."""
        import torch

        ends = torch.stack((blocks.amax(1), blocks.amin(1)), 1)
        sizes = self._size(*self._peaks(ends, centre), centre)
        for _ in range(_TURNS):
            ends = self._nearest(ends, centre, sizes).decoded.float()
            level, peak = self._peaks(ends, centre)
            kept = self._full(sizes) | (level == 0)
            sizes = torch.where(kept, sizes, self._size(level, peak, centre))
        return sizes

    def _full(self, sizes: torch.Tensor) -> torch.Tensor:
        """Which are as large as T has them: the outermost scale has no level of its own there."""
        import torch

        return sizes >= torch.finfo(self.dtype).max

    def _size(self, level: torch.Tensor, peak: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """That gives back the peak best. Of two as near, torchao's grid takes the peak inwards and
        bitsandbytes' outwards, so that they cannot take turns in moving it."""
        import torch

        distance = peak - centre.float()
        exact = level / distance if self.divides else distance / level
        flat = (level == 0) | (distance == 0)
        exact = exact.masked_fill(flat, 1.0 if self.divides else 0.0)
        limit = torch.finfo(self.dtype).max
        first = exact.clamp(max=limit).to(self.dtype)
        best, sizes = torch.full_like(peak, torch.inf), first.clone()
        for nudge in _NUDGES:
            size = _nudged(first, nudge)
            found = self._decoded(level, size, centre).float()
            outside = (found - centre.float()).abs() > distance.abs()
            gap = (found - peak).abs() * torch.where(outside == self.divides, 1.001, 1.0)
            better = (gap < best) & (size > 0) & (size <= limit)
            best, sizes = torch.where(better, gap, best), torch.where(better, size, sizes)
        return torch.where(flat | (exact >= limit), first, sizes)

    # ------------------------------------------------------------------ found again

    def _holds(self, scales: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor) -> bool:
        """Is every scale decoded to itself?"""
        units = self.step // self.unit
        for i, blocks in enumerate(self._parts(scales, centre)):
            if not self._gives_back(blocks, centre, sizes[i * units :][: len(blocks)]).all():
                return False
        return True

    def _gives_back(
        self, blocks: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:
        """[u, unit] -> [u]: which are decoded to themselves."""
        return (self._nearest(blocks, centre, sizes).decoded.float() == blocks).all(1)

    def _found_again(self, scales: torch.Tensor, unit: torch.Tensor) -> Fitted | None:
        """The centre and sizes with which every scale was stored; None: they were not. Asked of
        one unit first."""
        if not bool((scales.to(self.dtype) == scales).all()):
            return None
        first = self._estimated(unit, float(scales.double().mean()))
        if first is None:
            return None
        for nudge in _NUDGES:
            tried = _nudged(first.to(self.dtype), nudge)
            if not tried.isfinite() or not self._possible(self._blocks(unit, tried), tried):
                continue
            parts = [self._exact_sizes(part, tried) for part in self._parts(scales, tried)]
            found = [part for part in parts if part is not None]
            if len(found) == len(parts):
                return tried, _joined(found)
        return None

    def _possible(self, unit: torch.Tensor, centre: torch.Tensor) -> bool:
        """Has `_exact_sizes` one for a single unit, [1, unit]? All are tried at once."""
        import torch

        sizes = torch.cat(list(self._candidates(unit, centre, self._sizes(unit, centre))))
        return bool(self._gives_back(unit.expand(len(sizes), -1), centre, sizes).any())

    def _estimated(self, unit: torch.Tensor, mean: float) -> torch.Tensor | None:
        """Centre of the line through (level, scale) of one unit, whose levels are those from the
        mean of all scales, which is less than half a level off; None: it is no line."""
        import torch

        scales, levels = unit.double(), self.levels.double()
        middles = (levels[:-1] + levels[1:]) / 2
        centre = torch.tensor(mean, dtype=torch.float64)
        for _ in range(3):
            distance = scales - centre
            size = torch.maximum(distance.amax() / levels[-1], distance.amin() / levels[0])
            level = levels[torch.bucketize(distance / size.clamp(min=1e-300), middles)]
            spread = level - level.mean()
            slope = (spread * scales).sum() / spread.square().sum().clamp(min=1e-300)
            centre = scales.mean() - slope * level.mean()
        line = centre + slope * level
        rounding = torch.finfo(self.dtype).eps * (scales.abs() + (slope * level).abs())
        return centre if bool(((line - scales).abs() <= 2 * rounding).all()) else None

    def _exact_sizes(self, blocks: torch.Tensor, centre: torch.Tensor) -> torch.Tensor | None:
        """[u, unit] -> [u] T with which each scale decodes to itself; None: not one for each."""
        import torch

        sizes = self._sizes(blocks, centre)
        left = torch.arange(len(blocks))
        for tried in self._candidates(blocks, centre, sizes):
            found = self._nearest(blocks[left], centre, tried[left])
            good = (found.decoded.float() == blocks[left]).all(1)
            sizes[left[good]] = tried[left[good]]
            left = left[~good]
            if not left.numel():
                return sizes
        return None

    def _candidates(
        self, blocks: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Sizes as they are, then some of those that would give back each scale within half a unit
        of its last place. Levels near 0 say nothing."""
        import torch

        yield sizes
        held = blocks.to(self.dtype)
        half = (_nudged(held, 1).float() - held.float()).abs() / 2
        level = self.levels[self._nearest(blocks, centre, sizes).at].abs()
        distance = (blocks - centre.float()).abs()
        far, near = distance + half, (distance - half).clamp(min=1e-38)
        least, most = (level / far, level / near) if self.divides else (near / level, far / level)
        silent = level < self.levels[-1] / 20
        low = least.masked_fill(silent, 0).amax(1)
        span = most.masked_fill(silent, torch.inf).amin(1) - low
        for share in _SHARES:
            yield _usable((low + share * span).to(self.dtype), sizes)
        for nudge in _FURTHER:
            yield _usable(_nudged((low + span / 2).to(self.dtype), nudge), sizes)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(tuple(parts))


def _usable(sizes: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.where(sizes.isfinite() & (sizes > 0), sizes, otherwise)


def _nudged(values: torch.Tensor, ulps: int) -> torch.Tensor:
    """Positive floats, moved by so many units in their last place; below 0 there are only NaNs."""
    import torch

    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    return (bits + ulps).view(values.dtype)
