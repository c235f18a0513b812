"""The report of a load: what became of every tensor, and how much memory the load took."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING

from ckptmap.core.formatting import counted, human, some
from ckptmap.core.printable import as_lines
from ckptmap.core.short_repr import ShortRepr
from ckptmap.storage.source_sums import SourceCheck

if TYPE_CHECKING:
    import torch

SHOWN = 5
"""Names that a line of the printed report lists."""


@dataclass(frozen=True)
class Mismatch:
    """A tensor whose shape differs, or whose dtype is of another kind: floating, integer, boolean.

    holds  an integer of it that the model's dtype has not; None: it is of another shape or kind
    """

    fqn: str
    live: str
    stored: str
    holds: int | None = None

    def __str__(self) -> str:
        what = f"{self.fqn}: model {self.live}, checkpoint {self.stored}"
        return what if self.holds is None else f"{what}, which holds {self.holds}"

    @property
    def has_other_shape(self) -> bool:
        """Return whether more than the dtype differs: "float32[4, 3]" has the shape last."""
        return self.live.partition("[")[2] != self.stored.partition("[")[2]


@dataclass(frozen=True)
class CastTensor:
    """A tensor that was cast by `torch.Tensor.to`, because the model's dtype is not the checkpoint's."""

    fqn: str
    stored: str
    live: str

    def __str__(self) -> str:
        return f"{self.fqn}: {self.stored} -> {self.live}"


@dataclass(frozen=True)
class Encoded:
    """A weight that is quantized in the model. `stored` and `live` are sizes of scaler blocks; where
    they differ the scales were regrouped, with the same values."""

    fqn: str
    encoding: str
    stored: int
    live: int
    nbytes: int

    def __str__(self) -> str:
        if self.stored == self.live:
            return f"{self.fqn}: {self.encoding}"
        return f"{self.fqn}: {self.encoding}, scaler blocks {self.stored} -> {self.live}"


@dataclass(frozen=True)
class Decoded:
    """A weight that is quantized in the checkpoint and dense in the model; bytes of this rank's shard."""

    fqn: str
    reason: str
    dense_nbytes: int
    encoded_nbytes: int

    def __str__(self) -> str:
        extra = self.dense_nbytes - self.encoded_nbytes
        return f"{self.fqn}: {self.reason}; {human(extra)} more on this rank"


@dataclass(frozen=True)
class Recoded:
    """A moment that was quantized anew. `error` is the rms of the difference, divided by the rms of the
    values, on this rank."""

    name: str
    stored: str
    live: str
    error: float

    def __str__(self) -> str:
        return f"{self.name}: {self.stored} -> {self.live}, error {self.error:.1e}"


@dataclass(frozen=True, repr=False)
class StateReport(ShortRepr):
    """What became of the optimizer's state on this rank; names are `FQN.state name`.

    loaded       entries that have the checkpoint's values now
    copied       those of them whose codes were copied as bytes
    cast         entries that were loaded in another dtype
    recoded      entries that were decoded or quantized anew, with the error
    derived      entries that were computed from another optimizer's state
    initialised  entries that begin anew, and why
    left         entries of the checkpoint that were not used, and why
    settings     hyper-parameters that differed here, and what was done; the order that named the
                 parameters, where the file only numbers them
    """

    loaded: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    cast: tuple[CastTensor, ...] = ()
    recoded: tuple[Recoded, ...] = ()
    derived: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the lines of the printed report: a count and the first names of each kind."""
        found = [f"optimizer: loaded {counted(len(self.loaded), 'entry')}"]
        for title, items in (
            ("codes copied", self.copied),
            ("cast", self.cast),
            ("recoded", self.recoded),
            ("derived", self.derived),
            ("initialised", self.initialised),
            ("left", self.left),
            ("settings", self.settings),
        ):
            if items:
                found.append(f"  {title}: {len(items)}: {some(items)}")
        return found


RESTORED = ("loaded", "copied", "settings")
"""Fields of a StateReport that name what is as it was when it was saved. All others name what is not."""
NO_CHANGES = (
    "loaded", "encoded", "tied", "state", "streams", "inexact", "step", "extra", "extra_per_rank",
    "gradients", "skipped", "notes", "names", "renamed", "source", "rounding",
    "peak_host_nbytes", "peak_device_nbytes",
)  # fmt: skip
"""Likewise of a LoadReport. What `inexact`, `names` and `renamed` tell is decided before the load."""


@dataclass(frozen=True, repr=False)
class LoadReport(ShortRepr):
    """The result of `ckptmap.load`, for this rank.

    loaded        names that have the checkpoint's values now
    missing       names of the model that the checkpoint does not have
    left          names that keep their values, because the checkpoint need not have them: those of
                  a peft adapter where a base was loaded, those of the base where an adapter was
    unexpected    names of the checkpoint that the model does not have
    mismatched    tensors that were not loaded, because shapes or kinds of dtype differ, or an integer is
                  out of the range of the model's dtype
    cast          tensors that were cast to the model's dtype
    encoded       weights that were loaded as quantized tensors
    decoded       weights that are quantized in the checkpoint and dense in the model
    quantized     names of weights that were quantized here, because the model's weight is
    tied          (name, the name it shares one tensor with)
    left_on_meta  names of tensors without data: non-persistent buffers, and what was not loaded
    state         what became of the optimizer's state; None: no optimizer was given
    streams       random streams: "restored", "left as they are", or how they were made anew
    rounding      stochastic rounding by position, and its seed; empty: the optimizer has none
    inexact       reasons why training does not go on bit for bit; empty: it does
    notes         what to see to before the next step: other modules in evaluation mode than were
    step, extra   the arguments of `ckptmap.save`
    extra_per_rank  that of the rank of the same number, where as many ranks saved; else empty
    gradients     names of the parameters whose gradients were restored, those of an accumulation
                  that the save came into
    skipped       newer checkpoints that `CheckpointManager.restore` passed over, and why
    names         the schemes of names that were translated; empty: the names are the model's
    renamed       the prefixes and patterns that changed the checkpoint's names: "strip_prefix='student'"
    source        bytes that were compared with the checksums that the checkpoint states, counted
                  over all ranks; on the first rank of the model only
    peak_*_nbytes the most bytes that the load held at once: buffers, and a tensor until it is in
                  the model
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    cast: tuple[CastTensor, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    decoded: tuple[Decoded, ...] = ()
    quantized: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    left_on_meta: tuple[str, ...] = ()
    state: StateReport | None = None
    streams: str = ""
    inexact: tuple[str, ...] = ()
    step: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    extra_per_rank: Mapping[str, object] = field(default_factory=dict)
    peak_host_nbytes: int = 0
    peak_device_nbytes: int = 0
    left: tuple[str, ...] = ()
    names: str = ""
    renamed: str = ""
    skipped: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    source: SourceCheck = field(default_factory=SourceCheck)
    rounding: str = ""
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        """What the load left out or changed, by the name of the list that tells of it; empty: nothing."""
        lists = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NO_CHANGES}
        if self.state is not None:
            of_state = (f.name for f in fields(self.state) if f.name not in RESTORED)
            lists |= {f"optimizer, {name}": getattr(self.state, name) for name in of_state}
        return tuple(f"{name}: {some(items)}" for name, items in lists.items() if items)

    def to_json(self) -> dict[str, object]:
        """Return one JSON document, `"schema": 1`. Of `extra` and `extra_per_rank` it has the names: their
        values may be anything."""
        own = asdict(replace(self, extra={}, extra_per_rank={}))
        beside = {name: [*map(str, getattr(self, name))] for name in ("extra", "extra_per_rank")}
        return {"schema": 1, **own, **beside}

    def _listed(self) -> Iterator[tuple[str, str]]:
        """Yield a title with the count and the first names of each kind that there is."""
        for title, items in (
            ("passed over", self.skipped),
            ("missing", self.missing),
            ("left as they are", self.left),
            ("unexpected", self.unexpected),
            ("mismatched", self.mismatched),
            ("cast", self.cast),
            ("quantized form", self.encoded),
            ("decoded", self.decoded),
            ("quantized here", self.quantized),
            ("tied", tuple(f"{name} = {to}" for name, to in self.tied)),
            ("left on meta", self.left_on_meta),
            ("pending gradients restored", self.gradients),
        ):
            if items:
                yield title, f"{len(items)}: {some(items)}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it."""
        from ckptmap.operations.report.cards import card

        facts = [("names", self.names), ("renamed", self.renamed), *self._listed()]
        facts += [("", line) for line in self.state.lines()] if self.state is not None else []
        facts += [("random streams", self.streams), ("stochastic rounding", self.rounding)]
        facts += [("not bit for bit", some(self.inexact)), ("note", "; ".join(self.notes))]
        return card(f"loaded {counted(len(self.loaded), 'tensor')}", facts)

    def __str__(self) -> str:
        lines = [f"loaded {counted(len(self.loaded), 'tensor')}"]
        if self.names:
            lines.append(f"  names: {self.names}")
        if self.renamed:
            lines.append(f"  renamed: {self.renamed}")
        lines += [f"  {title}: {text}" for title, text in self._listed()]
        lines += self.state.lines() if self.state is not None else []
        if self.streams:
            lines.append(f"random streams: {self.streams}")
        if self.rounding:
            lines.append(f"stochastic rounding: {self.rounding}")
        if self.inexact:
            lines.append(f"not bit for bit: {some(self.inexact)}")
        lines += [f"note: {note}" for note in self.notes]
        if self.source.unchecked:
            lines.append(
                f"  not compared with checksums: {human(self.source.unchecked)} of records that"
                ' were read in part; verify="full" reads their rest'
            )
        held = {"host": self.peak_host_nbytes, "device": self.peak_device_nbytes}
        if any(held.values()):
            places = [f"{human(nbytes)} on the {place}" for place, nbytes in held.items() if nbytes]
            lines.append(f"buffers: at most {', '.join(places)}")
        return as_lines(lines)


class Meter:
    """Counts the bytes that the threads of a load hold now and held at most, for host and device."""

    def __init__(self) -> None:
        self._now = {True: 0, False: 0}
        self._peak = {True: 0, False: 0}
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, nbytes: int, device: torch.device) -> Iterator[None]:
        """Count `nbytes` on the device as held while the context lasts."""
        host = device.type == "cpu"
        with self._lock:
            self._now[host] += nbytes
            self._peak[host] = max(self._peak[host], self._now[host])
        try:
            yield
        finally:
            with self._lock:
                self._now[host] -= nbytes

    @property
    def peak_host_nbytes(self) -> int:
        return self._peak[True]

    @property
    def peak_device_nbytes(self) -> int:
        return self._peak[False]
