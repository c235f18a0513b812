"""Cut the target tensors of one rule out of its sources: transpose, interleave, fuse, split, stack.

    q [h*d, i], k [g*d, i], v [g*d, i]  ->  qkv [(h+2g)*d, i]

The axes of the rule span a space, and each tensor of either side is a box in it. Extents come from
`[dims]`, from captures that are axes of the other side, and from the shapes of the sources. Where the
box of a source meets the box of a target, a `Piece` says which elements move where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from ckptmap.core.strided_boxes import Piece
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import PlanError
from ckptmap.mapping.axes import Axes, Slice
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expressions import Unknown
from ckptmap.mapping.rule_errors import missing_config, wrong_shape
from ckptmap.mapping.rule_tensors import AxisBox, RuleSource, RuleTarget, is_whole
from ckptmap.mapping.rules import NamingScheme, Rule, Term
from ckptmap.tensors import Box, TensorInfo

MAX_STACKED = 1 << 16
"""Most tensors that may be stacked into one: more experts than any model has. A hostile config that
claims a billion would keep us rendering their names."""


def build_targets(
    scheme: NamingScheme,
    rule: Rule,
    to_hub: bool,
    dims: Dims,
    sources: Sequence[RuleSource],
    captures: Mapping[str, int],
) -> list[RuleTarget]:
    """Return all targets of a rule for one set of shared captures. Raises PlanError CKM605 to CKM607."""
    return _AxisSpace(scheme, rule, to_hub, dims, sources, captures).targets()


def stacked_captures(rule: Rule, hub: bool) -> tuple[str, ...]:
    """Return the captures of one side that are axes of the other, as an expert's number is."""
    side = rule.side(hub)[0]
    return tuple(name for name in side.captures if name not in rule.shared)


class _AxisSpace:
    def __init__(
        self,
        scheme: NamingScheme,
        rule: Rule,
        to_hub: bool,
        dims: Dims,
        sources: Sequence[RuleSource],
        captures: Mapping[str, int],
    ) -> None:
        self.scheme, self.rule, self.to_hub, self.dims = scheme, rule, to_hub, dims
        self.sources, self.captures = sources, captures
        self.terms = rule.side(not to_hub), rule.side(to_hub)
        self.size: dict[str, int] = {}
        self._sizes()
        self._complete()
        self._check_shapes()

    # ------------------------------------------------------------------ sizes

    def _sizes(self) -> None:
        """Determine the extent of every axis. Raises PlanError CKM605 where one stays unknown."""
        names = [axis for terms in self.terms for term in terms for axis in _axes(term).names()]
        for axis in (*names, *(s.axis for terms in self.terms for t in terms for s in t.slices)):
            size = self.dims.size(axis)
            if size is not None:
                self.size[axis] = size
        for at, axis in enumerate(stacked_captures(self.rule, not self.to_hub)):
            self._count(axis, max((source.stack[at] for source in self.sources), default=-1) + 1)
        for axis in stacked_captures(self.rule, self.to_hub):
            size = self.dims.size(axis)
            if size is not None:
                self.size[axis] = size
        while self._solve() or self._ends():
            pass
        for axis in (*stacked_captures(self.rule, True), *stacked_captures(self.rule, False)):
            if self.size.get(axis, 0) > MAX_STACKED:
                raise PlanError(
                    "CKM614",
                    f"{self.scheme.title}: {self.rule.label}: {self.size[axis]} tensors of {axis!r},"
                    f" expected at most {MAX_STACKED}; {self.dims.describe()}",
                    "correct the config value, or the mapping file",
                )
        unknown = [axis for axis in dict.fromkeys(names) if axis not in self.size]
        if unknown:
            missing = [name for axis in unknown for name in self.dims.needed(axis)]
            where = "".join(f" {list(s.info.shape)} of {s.key}" for s in self.sources[:1])
            raise missing_config(
                self.scheme, missing,
                f"{self.rule.label}: the shape{where} does not determine the extent of {unknown[0]!r}",
            )  # fmt: skip

    def _count(self, axis: str, count: int) -> None:
        """Set the extent of a stacked capture: its dim, else how many the sources have."""
        known = self.dims.size(axis)
        if known is not None and count > known:
            raise PlanError(
                "CKM607",
                f"{self.scheme.title}: {self.rule.label}: {axis} {count - 1} exists, expected"
                f" {axis} below {known}; {self.dims.describe()}",
                "give the config.json of exactly this model with --config-from",
            )
        self.size[axis] = count if known is None else known

    def _solve(self) -> bool:
        """Solve a dim with one unknown axis for it, by a source's shape; return whether one was solved."""
        for source in self.sources[: 4 * len(self.terms[0])]:
            term = self.terms[0][source.term]
            axes = _axes(term)
            if len(axes.dims) != len(source.info.shape):
                continue
            extent = self._extents(term)
            sliced = {cut.axis for cut in term.slices}
            for dim, n in zip(axes.dims, source.info.shape, strict=True):
                unknown = [axis for axis in Axes("", (dim,)).names() if axis not in extent]
                if len(unknown) != 1 or unknown[0] not in dim:
                    continue
                axis = unknown[0]
                if axis in sliced or axis in self.rule.pad:
                    continue
                (known,) = Axes("", (dim,)).shape({**extent, axis: 1})
                if known and n % known == 0:
                    self.size[axis] = n // known
                    return True
        return False

    def _ends(self) -> bool:
        """Let an axis that only slices mention end where the last slice ends; return whether one did."""
        for terms in self.terms:
            cuts: dict[str, list[Slice]] = {}
            for term in terms:
                for cut in term.slices:
                    cuts.setdefault(cut.axis, []).append(cut)
            for axis, slices in cuts.items():
                if axis not in self.size:
                    try:
                        self.size[axis] = max(self._ends_at(cut)[1] for cut in slices)
                    except Unknown:
                        continue
                    return True
        return False

    def _ends_at(self, cut: Slice) -> tuple[int, int]:
        """Return (low, high) of a slice. Raises Unknown."""
        low = self.dims.number(cut.low, self.size)
        return low, (low + 1 if cut.high is None else self.dims.number(cut.high, self.size))

    def _extents(self, term: Term) -> dict[str, int]:
        """Return the extents of the axes within one tensor: those of its slices where it has some."""
        extent = dict(self.size)
        for cut in term.slices:
            try:
                low, high = self._ends_at(cut)
            except Unknown:
                extent.pop(cut.axis, None)
                continue
            if not low <= high <= self.size.get(cut.axis, high):
                raise PlanError(
                    "CKM614",
                    f"{self.scheme.title}: {self.rule.label}: slice {cut.axis}[{low}:{high}] of"
                    f" {cut.axis} {self.size.get(cut.axis, high)}; {self.dims.describe()}",
                    "correct the config value, or the mapping file",
                )
            extent[cut.axis] = high - low
        return extent

    def _padded(self, hub: bool) -> dict[str, int]:
        """Return the padded extents, which the scheme's side has in place of the plain ones."""
        if hub:
            return {}
        padded = {}
        for axis, multiple in self.rule.pad.items():
            try:
                step = max(1, self.dims.number(multiple, self.size))
            except Unknown as unknown:
                raise missing_config(self.scheme, unknown.names, self.rule.label) from unknown
            if axis not in self.size:
                raise missing_config(self.scheme, self.dims.needed(axis), self.rule.label)
            padded[axis] = -(-self.size[axis] // step) * step
        return padded

    # ------------------------------------------------------------------ sources

    def _complete(self) -> None:
        """Raise PlanError CKM607 where a source is missing."""
        present = {(source.term, source.stack) for source in self.sources}
        axes = stacked_captures(self.rule, not self.to_hub)
        for number, term in enumerate(self.terms[0]):
            for stack in product(*(range(self.size[axis]) for axis in axes)):
                if (number, stack) not in present:
                    key = self._name(term, dict(zip(axes, stack, strict=True)))
                    total = len(self.terms[0]) * prod(self.size[axis] for axis in axes)
                    raise PlanError(
                        "CKM607",
                        f"{self.scheme.title}: {self.rule.label}: {key} is missing, found"
                        f" {len(present)} of {total} tensors, among them {self.sources[0].key};"
                        f" {self.dims.describe()}",
                        "the checkpoint is incomplete: get the missing file or rank",
                    )

    def _check_shapes(self) -> None:
        for source in self.sources:
            term = self.terms[0][source.term]
            expected = self._shape(term, not self.to_hub)
            if expected != source.info.shape and not self._filled(term, source, expected):
                raise wrong_shape(
                    self.scheme, self.rule, source.key, source.info, expected,
                    _axes(term), self.dims,
                )  # fmt: skip

    def _filled(self, term: Term, source: RuleSource, expected: tuple[int, ...]) -> bool:
        """Return whether a source is padded further than the rule pads.

        Megatron-LM's multiple grows with its tensor-parallel ranks. The padding is cut off all the same.
        """
        shape, dims = source.info.shape, _axes(term).dims
        if not self.to_hub or len(shape) != len(expected):
            return False
        for size, needed, axes in zip(shape, expected, dims, strict=True):
            axis = axes[0] if len(axes) == 1 else None
            pad = self.rule.pad.get(axis) if isinstance(axis, str) else None
            step = 0 if pad is None else max(1, self.dims.number(pad, self.size))
            if size != needed and not (step and size > needed and size % step == 0):
                return False
        return True

    def _shape(self, term: Term, hub: bool) -> tuple[int, ...]:
        return _axes(term).shape({**self._extents(term), **self._padded(hub)})

    def _name(self, term: Term, stack: Mapping[str, int]) -> str:
        name = term.names[0]
        try:
            return name.render({**self.captures, **stack}, name.shifts(self.dims))
        except Unknown as unknown:
            raise missing_config(self.scheme, unknown.names, name.text) from unknown

    # ------------------------------------------------------------------ targets

    def targets(self) -> list[RuleTarget]:
        axes = stacked_captures(self.rule, self.to_hub)
        unknown = [axis for axis in axes if axis not in self.size]
        if unknown:
            raise missing_config(self.scheme, unknown, self.rule.label)
        return [
            self._target(term, dict(zip(axes, stack, strict=True)))
            for term in self.terms[1]
            for stack in product(*(range(self.size[axis]) for axis in axes))
        ]

    def _target(self, term: Term, stack: Mapping[str, int]) -> RuleTarget:
        name = self._name(term, stack)
        pieces: list[Piece] = []
        for sheet in range(max(1, _axes(term).segments)):
            target_box = self._cell(term, stack, sheet)
            if not target_box.box.numel:
                continue
            met: list[Box] = []
            for source in self.sources:
                piece = self._meet(source, target_box, sheet, met)
                if piece is not None:
                    pieces.append(piece)
            self._tiles(name, target_box.box, met)
        info = TensorInfo(self._shape(term, self.to_hub), self._dtype(name, pieces))
        pieces = [piece.tidy() for piece in pieces]
        return RuleTarget(
            name,
            term,
            stack,
            info,
            tuple(pieces),
            self._zeros(term, info),
            self._whole(pieces, info),
        )

    def _tiles(self, name: str, box: Box, met: Sequence[Box]) -> None:
        wrong = prove_tiling(box.sizes, [part.relative_to(box.offsets) for part in met])
        if wrong is not None:
            raise PlanError(
                "CKM602",
                f"{self.scheme.title}: {self.rule.label}: the sources do not tile {name}:"
                f" {wrong}, over the axes {', '.join(sorted(self.size))}",
                "correct the slices in the mapping file",
            )

    def _dtype(self, name: str, pieces: Sequence[Piece]) -> str:
        used = {piece.source for piece in pieces} or {self.sources[0].key}
        dtypes = {s.info.dtype: s.key for s in self.sources if s.key in used}
        if len(dtypes) > 1:
            listed = ", ".join(f"{key} is {dtype}" for dtype, key in sorted(dtypes.items()))
            raise PlanError(
                "CKM606",
                f"{self.scheme.title}: {self.rule.label}: {name}: {listed}; expected one dtype",
                "cast them first (convert with --to SETUP-bf16 or --to SETUP-fp32), then map the names",
            )
        return next(iter(dtypes))

    def _meet(
        self, source: RuleSource, target_box: AxisBox, sheet: int, met: list[Box]
    ) -> Piece | None:
        """Return the piece of a target that a source supplies, None where their boxes do not meet."""
        axes = stacked_captures(self.rule, not self.to_hub)
        stack = dict(zip(axes, source.stack, strict=True))
        source_box = self._cell(self.terms[0][source.term], stack, sheet)
        low = {axis: max(a, source_box.low[axis]) for axis, a in target_box.low.items()}
        sizes = {
            axis: min(
                target_box.low[axis] + target_box.size[axis],
                source_box.low[axis] + source_box.size[axis],
            )
            - at
            for axis, at in low.items()
        }
        if min(sizes.values(), default=1) <= 0:
            return None
        order = tuple(target_box.low)
        met.append(Box(tuple(low[a] for a in order), tuple(sizes[a] for a in order)))
        moving = [axis for axis in order if sizes[axis] > 1]
        return Piece(
            source.key,
            source_box.strided(low, sizes, moving),
            target_box.strided(low, sizes, moving),
        )

    def _cell(self, term: Term, stack: Mapping[str, int], sheet: int) -> AxisBox:
        low, size = {}, {}
        axes = _axes(term)
        cuts = {cut.axis: self._ends_at(cut) for cut in term.slices}
        for axis in sorted({*axes.of_sheet(sheet), *cuts, *stack}):
            if axis in stack:
                low[axis], size[axis] = stack[axis], 1
            elif axis in cuts:
                low[axis], size[axis] = cuts[axis][0], cuts[axis][1] - cuts[axis][0]
            else:
                low[axis], size[axis] = 0, self.size[axis]
        layout = axes.lay(self._extents(term), sheet)
        return AxisBox(low, size, layout.offsets, layout.axes)

    def _zeros(self, term: Term, info: TensorInfo) -> Box | None:
        """Return the box of zeros that pads the target, None without padding."""
        for axis, padded in self._padded(self.to_hub).items():
            dim = next((d for d, f in enumerate(_axes(term).dims) if f == (axis,)), None)
            if dim is not None and padded > self.size[axis]:
                offsets, sizes = [0] * len(info.shape), list(info.shape)
                offsets[dim], sizes[dim] = self.size[axis], padded - self.size[axis]
                return Box(tuple(offsets), tuple(sizes))
        return None

    def _whole(self, pieces: Sequence[Piece], info: TensorInfo) -> str | None:
        if len(pieces) != 1:
            return None
        source = next(s for s in self.sources if s.key == pieces[0].source)
        return source.key if is_whole(pieces[0], source.info, info) else None


def example_sources(scheme: NamingScheme, rule: Rule, hub: bool, dims: Dims) -> list[RuleSource]:
    """Return sources of one side with the extents that `dims` gives; shared captures are 0."""
    space = _AxisSpace.__new__(_AxisSpace)
    space.scheme, space.rule, space.to_hub, space.dims = scheme, rule, not hub, dims
    space.terms, space.sources = (rule.side(hub), rule.side(not hub)), ()
    space.captures = dict.fromkeys(rule.shared, 0)
    space.size = {}
    space._sizes()
    axes = stacked_captures(rule, hub)
    return [
        RuleSource(
            space._name(term, dict(zip(axes, stack, strict=True))),
            number, stack, TensorInfo(space._shape(term, hub), "uint8"),
        )
        for number, term in enumerate(rule.side(hub))
        for stack in product(*(range(space.size[axis]) for axis in axes))
    ]  # fmt: skip


def _axes(term: Term) -> Axes:
    assert term.axes is not None, f"{term.names[0].text}: proven to have axes"
    return term.axes
