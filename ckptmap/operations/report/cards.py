"""Small pieces of HTML that a notebook shows for a checkpoint, a plan, or a report: `_repr_html_`.

They are made of the same parts as the page. Their size is bounded, whatever a checkpoint holds, and
every name in them is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, human, some
from ckptmap.operations.inspect import InspectReport
from ckptmap.operations.report import html
from ckptmap.operations.report.collect import collect, shown_name
from ckptmap.operations.report.flow import Flow, flow
from ckptmap.operations.report.provenance import dtype_bars
from ckptmap.planning.plan import Plan
from ckptmap.planning.report import Report

TEXT = 240
"""Characters of one text."""
FACTS, ROWS, BARS = 24, 12, 8
"""Facts, rows of the table, and bars at most."""

Fact = tuple[str, str]


def html_of(value: Checkpoint | Plan | Report) -> str:
    """Return the card of a value."""
    if isinstance(value, Checkpoint):
        return _checkpoint(value)
    return _plan(value) if isinstance(value, Plan) else _report(value)


def card(
    title: str,
    facts: Iterable[Fact],
    bars: Sequence[tuple[str, str, float]] = (),
    rows: Sequence[Sequence[str]] = (),
    flow: Flow | None = None,
) -> str:
    """Return a card: a title, facts by name, bars (name, text, percent), rows of a table, a flow."""
    shown = [(_cut(name), _cut(text)) for name, text in facts if text]
    return html.piece(
        "card.html",
        title=_cut(title),
        facts=shown[:FACTS],
        more_facts=len(shown) - FACTS,
        bars=[(_cut(name), text, share) for name, text, share in bars[:BARS]],
        rows=[[_cut(cell) for cell in row] for row in rows[:ROWS]],
        more_rows=len(rows) - ROWS,
        flow=flow,
    )


def _cut(text: str) -> str:
    return shown_name(text, TEXT)


def _checkpoint(ckpt: Checkpoint) -> str:
    report = InspectReport(ckpt)
    bars = dtype_bars(collect(report))
    most = max((nbytes for _, _, nbytes in bars), default=0) or 1
    rows = [
        (row.pattern, f"{row.count:,}", str(list(row.look.shape)), " ".join(row.look.kind))
        for row in report.patterns()
    ]
    return card(
        ckpt.shown,
        report.facts(),
        [
            (name, f"{human(nbytes)}, {counted(count, 'tensor')}", 100 * nbytes / most)
            for name, count, nbytes in bars
        ],
        rows,
    )


def _plan(plan: Plan) -> str:
    return card(f"{plan.ckpt.shown} → {plan.aim.text}", _plan_facts(plan), flow=flow(plan))


def _plan_facts(plan: Plan) -> Iterator[Fact]:
    sizes = f"{human(plan.nbytes_in)} → {human(plan.nbytes_out)}"
    files, ranks = counted(len(plan.files), "file"), counted(plan.world_size, "rank")
    yield "total", f"{counted(len(plan.steps), 'tensor')}, {sizes}, in {files} for {ranks}"
    yield "unresolved", _first(f"{item.key}: {item.reason}" for item in plan.unresolved)
    yield "left out", _first(plan.dropped)
    yield "tied", _first(plan.tied)
    yield from (("note", note) for note in plan.notes)


def _report(report: Report) -> str:
    return card(f"wrote {report.dst}", _report_facts(report))


def _report_facts(report: Report) -> Iterator[Fact]:
    sizes = f"{human(report.nbytes_in)} → {human(report.nbytes_out)}"
    yield "total", f"{counted(report.tensors, 'tensor')}, {sizes} in {report.seconds:.1f} s"
    yield "fidelity", ", ".join(f"{name} {count}" for name, count in report.fidelity.items())
    yield "continued", human(report.continued_nbytes) if report.continued_nbytes else ""
    yield "relative rms", _first(_worst(report.errors))
    yield "left out", _first(report.dropped)
    yield "tied", _first(report.tied)
    yield from (("note", note) for note in report.notes)


def _worst(errors: Mapping[str, float]) -> list[str]:
    """Return the errors as text, the largest first; NaN counts as the largest."""
    order = sorted(errors, key=lambda name: (errors[name] == errors[name], -errors[name]))
    return [f"{errors[name]:.3e} {name}" for name in order]


def _first(items: Iterable[str]) -> str:
    """Return the number of items and the first of them."""
    names = list(items)
    if not names:
        return ""
    return f"{len(names):,}: {some([shown_name(name, 60) for name in names], 3)}"
