"""A plan as a flow: from the kinds of tensors in the source to those in the output, by fidelity.

The page draws it without a script: the geometry is worked out here, in units of the drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptmap.core.formatting import counted, human
from ckptmap.planning.plan import FIDELITIES, Plan

WIDTH, HEIGHT = 760, 220
"""Of the drawing; the height grows with the number of bands."""
LEFT, RIGHT, NODE = 190, 570, 10
"""Where the bands begin and end, and the width of a node."""
GAP, THIN = 14, 18
"""Between two nodes, and of the thinnest band."""
BANDS = 24
"""Bands at most; the smallest others are drawn as one."""


@dataclass(frozen=True)
class Band:
    """Tensors of one kind that become another kind with one fidelity.

    path is that of an SVG `path` element, filled
    """

    source: str
    target: str
    fidelity: str
    count: int
    nbytes_in: int
    nbytes_out: int
    path: str = ""
    label_y: float = 0.0

    @property
    def text(self) -> str:
        sizes = f"{human(self.nbytes_in)} → {human(self.nbytes_out)}"
        return f"{self.source} → {self.target}: {counted(self.count, 'tensor')}, {sizes}, {self.fidelity}"


@dataclass(frozen=True)
class Node:
    """A kind of tensors on one side of the flow."""

    title: str
    text: str
    y: float
    height: float


@dataclass(frozen=True)
class Flow:
    """The drawing of one plan."""

    bands: Sequence[Band]
    sources: Sequence[Node]
    targets: Sequence[Node]
    height: float
    fidelities: Mapping[str, int]


def flow(plan: Plan) -> Flow:
    """Return the drawing of a plan, its bands from lossless to lossy."""
    bands = _bands(plan)
    most = max([band.nbytes_in for band in bands] + [band.nbytes_out for band in bands] or [1]) or 1
    thickness = [
        max(THIN, max(band.nbytes_in, band.nbytes_out) / most * HEIGHT * 0.6) for band in bands
    ]
    sources = _nodes(bands, thickness, "source")
    targets = _nodes(bands, thickness, "target")
    height = max((node.y + node.height for node in (*sources, *targets)), default=0.0)
    return Flow(
        _drawn(bands, thickness, sources, targets),
        sources,
        targets,
        height + GAP,
        plan.fidelities(),
    )


def _bands(plan: Plan) -> list[Band]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for kind, count in plan.steps.counted().items():
        total = totals.setdefault((kind.source, kind.target, kind.fidelity), [0, 0, 0])
        total[0] += count
        total[1] += kind.nbytes_in * count
        total[2] += kind.nbytes_out * count
    largest = sorted(totals, key=lambda key: -totals[key][2])
    for key in largest[BANDS:]:
        rest = totals.setdefault(("other", "other", key[2]), [0, 0, 0])
        for i, value in enumerate(totals.pop(key)):
            rest[i] += value
    bands = [
        Band(*key, count, size_in, size_out) for key, (count, size_in, size_out) in totals.items()
    ]
    return sorted(bands, key=lambda band: (band.source, FIDELITIES.index(band.fidelity)))


def _nodes(bands: Sequence[Band], thickness: Sequence[float], side: str) -> list[Node]:
    """Return the nodes of one side, each as high as its bands together."""
    nodes: list[Node] = []
    y = float(GAP)
    for title in dict.fromkeys(getattr(band, side) for band in bands):
        here = [i for i, band in enumerate(bands) if getattr(band, side) == title]
        height = sum(thickness[i] for i in here)
        nbytes = sum(bands[i].nbytes_in if side == "source" else bands[i].nbytes_out for i in here)
        count = counted(sum(bands[i].count for i in here), "tensor")
        nodes.append(Node(title, f"{count}, {human(nbytes)}", y, height))
        y += height + 2 * GAP
    return nodes


def _drawn(
    bands: Sequence[Band],
    thickness: Sequence[float],
    sources: Sequence[Node],
    targets: Sequence[Node],
) -> list[Band]:
    left = {node.title: node.y for node in sources}
    right = {node.title: node.y for node in targets}
    a, b, middle = LEFT + NODE, RIGHT, (LEFT + NODE + RIGHT) / 2
    drawn = []
    for band, thick in zip(bands, thickness, strict=True):
        y, z = left[band.source], right[band.target]
        left[band.source] += thick
        right[band.target] += thick
        path = (
            f"M{a} {y:.1f}C{middle} {y:.1f} {middle} {z:.1f} {b} {z:.1f}V{z + thick:.1f}"
            f"C{middle} {z + thick:.1f} {middle} {y + thick:.1f} {a} {y + thick:.1f}Z"
        )
        label_y = (y + z + thick) / 2 + 4
        drawn.append(replace(band, path=path, label_y=label_y))
    return drawn
