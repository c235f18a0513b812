"""Double quantization: store the scales of blocks in 8 bits, so that repeated conversions do not drift.

    s [m] f32  ->  centre [] T, size [ceil(m/unit)] T, code of each scale      T: the dtype computed in
    torchao NF4    s' = level / size + centre      levels -128 to 127
    bitsandbytes   s' = level * size + centre      levels of its dynamic map, T float32

Weights whose codes are kept may go to and fro between libraries any number of times. Scales that already
lie on such a grid must get the same grid again, or each conversion moves them a little further. Hence:

- The centre is the median. Levels keep the order of scales and one scale is the centre, so the median of
  the decoded scales is the centre again. A mean is not preserved.
- The size of a unit is the one that reproduces its outermost scale to the last bit, where T can, and
  clips none. The outermost scale is then outermost again, and the size depends on it alone.
- A library's own grid, whose centre was the mean of other numbers, is recovered by least squares and
  used where it reproduces every scale.

So one grid is stable after one conversion. Where two grids alternate, the second is made of what the
first has rounded: nearest neighbours on two fixed grids settle, after two passes at most in everything
we tried, mostly after one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.quantization.blockwise.exact_division import divide

if TYPE_CHECKING:
    import torch

    Fitted = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 16
"""Scales at a time."""
_NUDGES = (0, 1, -1, 2, -2)
"""Offsets in units in the last place (ulp) to try around a number that was computed with rounding."""
_TURNS = 3
"""Iterations until the outermost scales of a unit no longer change."""
_FURTHER = (1, -1, 2, -2, 3, -3, 4, -4)
_SHARES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875, 0.0, 1.0)
"""Positions within a range of possible sizes that are tried."""


@dataclass(frozen=True)
class ScaleCodes:
    """The codes of scales: the index of each one's level, and the scale it decodes to."""

    at: torch.Tensor
    decoded: torch.Tensor
    below: torch.Tensor | None = None
    """The scale that the next lower level decodes to."""

    def distinguishable(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the decoded scales, 0 where levels are too coarse to distinguish a positive scale from 0."""
        assert self.below is not None, "only `coded` fills it"
        return self.decoded.masked_fill(self.below.float() <= -scales, 0)


@dataclass(frozen=True)
class ScaleLevels:
    """The 256 levels of a library and how scales follow from them.

    levels   f32 [256], ascending, 0 among them
    unit     number of scales that share one size
    dtype    T, the dtype that decoding computes in
    divides  True: level / size + centre (torchao); False: level * size + centre (bitsandbytes)
    """

    levels: torch.Tensor
    unit: int
    dtype: torch.dtype
    divides: bool

    def fitted(self, scales: torch.Tensor) -> Fitted:
        """Fit the levels: scales [m] f32 -> centre [] T, sizes [ceil(m/unit)] T."""
        centre = scales.median().to(self.dtype)
        sizes = _joined([self._sizes(part, centre) for part in self._parts(scales, centre)])
        coarse = int(sizes.argmin() if self.divides else sizes.argmax())
        unit = scales[coarse * self.unit :][: self.unit]
        one = self._gives_back(self._blocks(unit, centre), centre, sizes[coarse : coarse + 1])
        if bool(one) and self._holds(scales, centre, sizes):
            return centre, sizes
        return self._recovered(scales, unit) or (centre, sizes)

    def coded(self, scales: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor) -> ScaleCodes:
        """Encode scales [m] f32, sizes [ceil(m/unit)] T -> the codes [m] that decode nearest.

        The outermost scale of a unit gets the outermost level, unless another level is exact.
        """
        blocks = self._blocks(scales, centre)
        nearest = self._nearest(blocks, centre, sizes)
        lower = self.levels[(nearest.at - 1).clamp_(min=0)]
        below = self._decoded(lower, sizes.unsqueeze(-1), centre)
        every = (nearest.at, nearest.decoded, below)
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
        """Return the nearest codes of blocks [u, unit] f32, for sizes [u] T."""
        import torch

        level, peak = self._peaks(blocks, centre)
        size = sizes.unsqueeze(-1)
        at = self._index(blocks - centre.float(), size.float()).clamp_(0, len(self.levels) - 1)
        decoded = self._decoded(self.levels[at], size, centre)
        best = (decoded.float() - blocks).abs()
        for nudge in () if self.dtype == torch.float32 else (1, -1):  # 16 bits round levels, too
            tried = (at + nudge).clamp_(0, len(self.levels) - 1)
            values = self._decoded(self.levels[tried], size, centre)
            gap = (values.float() - blocks).abs()
            better = gap < best
            best = torch.where(better, gap, best)
            at, decoded = torch.where(better, tried, at), torch.where(better, values, decoded)
        held = (level != 0) & ~self._full(sizes)
        outer = (blocks == peak.unsqueeze(-1)) & (best != 0) & held.unsqueeze(-1)
        edge = torch.where(level > 0, len(self.levels) - 1, 0).unsqueeze(-1)
        outermost = self._decoded(level, sizes, centre).unsqueeze(-1)
        return ScaleCodes(torch.where(outer, edge, at), torch.where(outer, outermost, decoded))

    def _index(self, distance: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Return the index of the nearest level, or of its neighbour."""
        import torch

        if self.divides:
            return (distance * size - self.levels[0]).round_().to(torch.int32)
        middles = (self.levels[:-1] + self.levels[1:]) / 2
        return torch.bucketize(distance / size.clamp(min=1e-38), middles, out_int32=True)

    # ------------------------------------------------------------------ units

    def _blocks(self, scales: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """Cut into units: [m] -> [ceil(m/unit), unit]; a short unit is padded with the centre."""
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
        """Scales per chunk, in whole units."""
        return max(CHUNK // self.unit, 1) * self.unit

    def _peaks(
        self, blocks: torch.Tensor, centre: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outermost level of each unit (0 where all scales equal the centre), and its scale.

        A scale is compared by its distance from the centre as a share of the outermost level.
        """
        import torch

        high, low = blocks.amax(1), blocks.amin(1)
        top, bottom = self.levels[-1], self.levels[0]
        above, below = (high - centre.float()) / top, (low - centre.float()) / bottom
        level = torch.where(above >= below, top, bottom)
        flat = (above <= 0) & (below <= 0)
        return level.masked_fill(flat, 0), torch.where(above >= below, high, low)

    # ------------------------------------------------------------------ sizes

    def _sizes(self, blocks: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """[u, unit] -> sizes [u] T.

        Repeated, because rounding an outermost scale can make the scale of the other side the outermost
        one, and the size must then belong to that.
        """
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
        """Return which sizes are the largest of T; the outermost scale has no level of its own there."""
        import torch

        return sizes >= torch.finfo(self.dtype).max

    def _size(self, level: torch.Tensor, peak: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """Return the size that reproduces the peak best.

        Of two equally near, torchao's grid moves the peak inwards and bitsandbytes' outwards, so that
        alternating conversions do not keep moving it.
        """
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
            values = self._decoded(level, size, centre).float()
            outside = (values - centre.float()).abs() > distance.abs()
            gap = (values - peak).abs() * torch.where(outside == self.divides, 1.001, 1.0)
            better = (gap < best) & (size > 0) & (size <= limit)
            best, sizes = torch.where(better, gap, best), torch.where(better, size, sizes)
        return torch.where(flat | (exact >= limit), first, sizes)

    # ------------------------------------------------------------------ found again

    def _holds(self, scales: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor) -> bool:
        """Return whether every scale decodes to itself."""
        units = self.step // self.unit
        for i, blocks in enumerate(self._parts(scales, centre)):
            if not self._gives_back(blocks, centre, sizes[i * units :][: len(blocks)]).all():
                return False
        return True

    def _gives_back(
        self, blocks: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:
        """Return which units decode to themselves: [u, unit] -> [u]."""
        return (self._nearest(blocks, centre, sizes).decoded.float() == blocks).all(1)

    def _recovered(self, scales: torch.Tensor, unit: torch.Tensor) -> Fitted | None:
        """Return the centre and sizes that the scales were stored with, None where there are none.

        One unit is tried first, which is cheap.
        """
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
            fitted = [part for part in parts if part is not None]
            if len(fitted) == len(parts):
                return tried, _joined(fitted)
        return None

    def _possible(self, unit: torch.Tensor, centre: torch.Tensor) -> bool:
        """Return whether a single unit [1, unit] has an exact size; all candidates are tried at once."""
        import torch

        sizes = torch.cat(list(self._candidates(unit, centre, self._sizes(unit, centre))))
        return bool(self._gives_back(unit.expand(len(sizes), -1), centre, sizes).any())

    def _estimated(self, unit: torch.Tensor, mean: float) -> torch.Tensor | None:
        """Return the centre of the line through (level, scale) of one unit, None where it is not a line.

        The levels are first assigned by the mean of all scales, which is less than half a level off.
        """
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
        """Return sizes: [u, unit] -> sizes [u] T with which each scale decodes to itself, None where a unit has none."""
        import torch

        sizes = self._sizes(blocks, centre)
        left = torch.arange(len(blocks))
        for tried in self._candidates(blocks, centre, sizes):
            nearest = self._nearest(blocks[left], centre, tried[left])
            good = (nearest.decoded.float() == blocks[left]).all(1)
            sizes[left[good]] = tried[left[good]]
            left = left[~good]
            if not left.numel():
                return sizes
        return None

    def _candidates(
        self, blocks: torch.Tensor, centre: torch.Tensor, sizes: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the given sizes, then sizes that reproduce each scale within half an ulp.

        Levels near 0 are ignored: they do not determine the size.
        """
        import torch

        yield sizes
        held = blocks.to(self.dtype)
        half = (_nudged(held, 1).float() - held.float()).abs() / 2
        level = self.levels[self._nearest(blocks, centre, sizes).at].abs()
        distance = (blocks - centre.float()).abs()
        far, near = distance + half, (distance - half).clamp(min=1e-38)
        least, most = (level / far, level / near) if self.divides else (near / level, far / level)
        silent = level < divide(self.levels[-1], 20.0)
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
    """Return positive floats moved by `ulps` units in the last place; below 0 there are only NaNs."""
    import torch

    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    return (bits + ulps).view(values.dtype)
