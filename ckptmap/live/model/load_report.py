"""What a load did, tensor by tensor, and what it held in memory while doing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHOWN = 5
"""Names a line of the printed report spells out."""


@dataclass(frozen=True)
class Mismatch:
    """A tensor of another shape, or of a dtype that no cast should cross."""

    fqn: str
    live: str
    stored: str

    def __str__(self) -> str:
        return f"{self.fqn}: model {self.live}, checkpoint {self.stored}"


@dataclass(frozen=True)
class CastTensor:
    """Loaded by `torch.Tensor.to`, because the model's dtype is not the checkpoint's."""

    fqn: str
    stored: str
    live: str

    def __str__(self) -> str:
        return f"{self.fqn}: {self.stored} -> {self.live}"


@dataclass(frozen=True)
class Encoded:
    """Held quantized in the model. `stored` and `live` are scaler blocks: where they differ the
    scales were regrouped, with the same values."""

    fqn: str
    encoding: str
    stored: int
    live: int
    nbytes: int

    def __str__(self) -> str:
        regrouped = f", scaler blocks {self.stored} -> {self.live}" * (self.stored != self.live)
        return f"{self.fqn}: {self.encoding}{regrouped}"


@dataclass(frozen=True)
class Decoded:
    """Quantized in the checkpoint, dense in the model; bytes are those of this rank's shard."""

    fqn: str
    reason: str
    dense_nbytes: int
    encoded_nbytes: int

    def __str__(self) -> str:
        extra = self.dense_nbytes - self.encoded_nbytes
        return f"{self.fqn}: {self.reason}; {extra:,} bytes more on this rank"


@dataclass(frozen=True)
class Recoded:
    """A moment of the optimizer in another form than it was stored in; `error` is the rms of the
    difference over that of the values, on this rank."""

    name: str
    stored: str
    live: str
    error: float

    def __str__(self) -> str:
        return f"{self.name}: {self.stored} -> {self.live}, error {self.error:.1e}"


@dataclass(frozen=True)
class StateReport:
    """What became of the optimizer's state on this rank; names are `FQN.state name`.

    loaded       have the checkpoint's values now
    copied       of these, those whose codes moved as bytes
    cast         loaded in another dtype
    recoded      decoded, or encoded anew, with the error
    derived      made of another optimizer's state
    initialised  begin anew, and why
    left         in the checkpoint, but not used, and why
    settings     hyper-parameters that were different here, and what was done; by which order the
                 parameters are named, where the file only numbers them
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
        found = [f"optimizer: loaded {len(self.loaded)} entries"]
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
                found.append(f"  {title}: {len(items)}: {listed(items)}")
        return found


@dataclass(frozen=True)
class LoadReport:
    """The result of `ckptmap.load`, for this rank.

    loaded        names that have the checkpoint's values now
    missing       names of the model that the checkpoint does not have
    left          left as they are, because the source need not have them: the adapter of a model
                  that peft has wrapped, where a base was loaded; the base, where an adapter was
    unexpected    names of the checkpoint that the model does not have
    mismatched    not loaded, because shapes or kinds of dtype differ
    cast          loaded in the model's dtype
    encoded       loaded as quantized tensors
    decoded       quantized in the checkpoint, dense in the model, with what that costs
    quantized     dense in the checkpoint, quantized because the model's weight is
    tied          (name, the name it shares one tensor with)
    left_on_meta  non-persistent buffers, and tensors that were not loaded, that still have no data
    state         what became of the optimizer's state; None: no optimizer was given
    streams       "restored", "left as they are", or how they were made anew
    inexact       why training does not go on bit for bit; empty: it does
    step, extra   what `ckptmap.save` was given
    names         from which scheme of names to which; empty: they are the model's
    peak_*_nbytes most bytes that load held at once: buffers, and the tensor in the making until it
                  is in the model
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    peak_host_nbytes: int = 0
    peak_device_nbytes: int = 0
    left: tuple[str, ...] = ()
    names: str = ""

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} tensors"]
        lines += [f"  names: {self.names}"] * bool(self.names)
        for title, items in (
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
        ):
            if items:
                lines.append(f"  {title}: {len(items)}: {listed(items)}")
        lines += self.state.lines() if self.state is not None else []
        if self.streams:
            lines.append(f"random streams: {self.streams}")
        if self.inexact:
            lines.append(f"not bit for bit: {listed(self.inexact)}")
        lines.append(
            f"  most bytes held by load: {self.peak_host_nbytes:,} host, "
            f"{self.peak_device_nbytes:,} device"
        )
        return "\n".join(lines)


def listed(items: Sequence[object], shown: int = SHOWN) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more


class Meter:
    """Bytes that load holds now and held at most, host and device apart."""

    def __init__(self) -> None:
        self._now = {True: 0, False: 0}
        self._peak = {True: 0, False: 0}

    @contextmanager
    def hold(self, nbytes: int, device: torch.device) -> Iterator[None]:
        host = device.type == "cpu"
        self._now[host] += nbytes
        self._peak[host] = max(self._peak[host], self._now[host])
        try:
            yield
        finally:
            self._now[host] -= nbytes

    @property
    def peak_host_nbytes(self) -> int:
        return self._peak[True]

    @property
    def peak_device_nbytes(self) -> int:
        return self._peak[False]
