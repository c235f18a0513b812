"""How one tensor differs between two checkpoints, and the lines that tell of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan

from ckptmap.checkpoint.compare_tensors import Difference, same_parts
from ckptmap.core.formatting import fitted
from ckptmap.core.tensor_table import NUMBER, TensorSummary, fold
from ckptmap.storage.lazy_tensor import LazyTensor


@dataclass(frozen=True)
class TensorChange:
    """How a tensor of `a` differs from that of `b`; None for what agrees or was not compared.

    shapes     both shapes
    dtypes     both logical dtypes
    encodings  both encodings
    values     how many decoded values differ, by how much, and the first of them
    numel      elements of the tensor
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtypes: tuple[str, str] | None = None
    encodings: tuple[str, str] | None = None
    values: Difference | None = None
    numel: int = 0

    @property
    def count(self) -> int:
        """How many values differ; 0 where they were not compared."""
        return 0 if self.values is None else self.values.count

    @property
    def max_abs(self) -> float:
        """The largest difference of two values; 0.0 where they were not compared."""
        return 0.0 if self.values is None else self.values.max_abs

    @property
    def rms(self) -> float:
        """rms of the difference over rms of the tensor in `a`; 0.0 where values were not compared."""
        return 0.0 if self.values is None else self.values.relative

    @property
    def first(self) -> tuple[int, ...] | None:
        """Index of the first value that differs, in row-major order."""
        return None if self.values is None else self.values.index

    @property
    def kind(self) -> str:
        """What differs but for the values: `"dtype float32 and bfloat16"`; "" for values alone."""
        if self.shapes is not None:
            return f"shape {list(self.shapes[0])} and {list(self.shapes[1])}"
        pairs = (("dtype", self.dtypes), ("encoding", self.encodings))
        return "; ".join(f"{name} {pair[0]} and {pair[1]}" for name, pair in pairs if pair)

    def to_json(self) -> dict[str, object]:
        """Return the fields, and `first` in place of the index in `values`."""
        document = asdict(self)
        del document["values"]
        return {
            **document, "count": self.count, "max_abs": self.max_abs, "rms": self.rms,
            "first": self.first,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.values is None:
            return self.kind
        differ = (
            f"{self.count} of {self.numel} values differ, by at most {self.max_abs:.3e}"
            f" ({self.rms:.3e} relative rms), the first at {list(self.values.index)}"
        )
        return f"{self.kind}; {differ}" if self.kind else differ


Measure = Callable[[str, LazyTensor, LazyTensor], Difference | None]
"""Compares the values of two tensors that have this name; None: they are bit-equal."""


def change_of(
    name: str, a: LazyTensor, b: LazyTensor, measure: Measure | None
) -> TensorChange | None:
    """Return how two tensors differ; None: they agree. Without `measure` values are not compared.

    Other bytes of the same values are no difference: there are two ways to store them.
    """
    if a.shape != b.shape:
        return TensorChange(shapes=(a.shape, b.shape), numel=a.info.numel)
    dtypes = (a.dtype, b.dtype) if a.dtype != b.dtype else None
    encodings = (a.encoding, b.encoding) if a.encoding != b.encoding else None
    alike = dtypes is None and encodings is None
    differ = None
    if measure is not None and not (alike and same_parts(a, b) is None):
        differ = measure(name, a, b)
    if alike and differ is None:
        return None
    return TensorChange(None, dtypes, encodings, differ, a.info.numel)


# ---------------------------------------------------------------- as text

TITLE = (
    "tensors that differ, with the number of values, the largest difference and the relative rms"
)
"""Heads the table where values were compared; a row of several tensors has the rms of the worst."""


def lines_of(changes: Mapping[str, TensorChange]) -> list[str]:
    """Return a table with a row for each pattern of names whose tensors differ alike, the largest errors first.

    Tensors of other shapes come before all, then those of other dtypes and encodings.
    """
    groups = sorted(_groups(changes), key=lambda group: _order(changes[group[0]]))
    if not groups:
        return []
    rows = [_row(names, [changes[name] for name in names]) for names in groups]
    widest = max(len(count) for _, count, _ in rows)
    tails = [f"{count:>{widest}}  {difference}" for _, count, difference in rows]
    title = TITLE if any(change.values for change in changes.values()) else "tensors that differ"
    return [f"{title}:", *fitted([pattern for pattern, _, _ in rows], tails)]


def _groups(changes: Mapping[str, TensorChange]) -> list[list[str]]:
    """Return the names of each group, the one with the largest error first."""
    by_group: dict[tuple[str, str, bool], list[str]] = {}
    for name, change in changes.items():
        key = (NUMBER.sub("\0", name), change.kind, change.values is None)
        by_group.setdefault(key, []).append(name)
    return [sorted(names, key=lambda name: _order(changes[name])) for names in by_group.values()]


def _order(change: TensorChange) -> tuple[bool, bool, float]:
    error = float("inf") if isnan(change.rms) else change.rms
    return change.shapes is None, not change.kind, -error


def _row(names: Sequence[str], changes: Sequence[TensorChange]) -> tuple[str, str, str]:
    """Return the pattern, the count and the difference of one group; the first name is that of the largest error."""
    look = TensorSummary("", (), (), "", 0)
    pattern = fold(sorted(names), [look] * len(names))[0].pattern
    worst = changes[0]
    told = [worst.kind] if worst.kind else []
    if worst.values is not None:
        count, numel = (sum(getattr(c, name) for c in changes) for name in ("count", "numel"))
        place = f"first at {list(worst.values.index)}"
        if len(names) > 1:
            place = f"worst in {_numbered(names)}"
        largest = max(c.max_abs for c in changes)
        told += [f"{count} of {numel}", f"max {largest:.3e}", f"rms {worst.rms:.3e}", place]
    return pattern, f"{len(names)}x", ", ".join(told)


def _numbered(names: Sequence[str]) -> str:
    """Return the segments of the first name that tell it from the others: `layers.4`."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    differing = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    return ".".join(column[0] for column in columns[max(differing[0] - 1, 0) : differing[-1] + 1])
