"""The report of a run: what was written where, with which fidelity, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ckptmap import registry
from ckptmap.checkpoint.compare_tensors import worst
from ckptmap.core.formatting import counted, human
from ckptmap.core.printable import as_lines
from ckptmap.core.short_repr import ShortRepr
from ckptmap.core.tensor_table import listed
from ckptmap.planning.conversion import Steps
from ckptmap.planning.reference import Reference
from ckptmap.storage.source_sums import SourceCheck

SAMPLE_NUMEL = 1 << 14
"""Values of a quantized tensor that the error is measured on."""


@dataclass(frozen=True)
class Likeness:
    """What a conversion with --as found of the weights, compared with the reference.

    reference  the checkpoint that the output is like
    weights    how many were written
    identical  how many of them are the bytes of the reference, because they decode to the same bits
    changed    the others, by FQN, with the fidelity of their conversion
    """

    reference: str
    weights: int
    identical: int
    changed: Mapping[str, str]

    @classmethod
    def of(cls, reference: Reference, steps: Steps) -> Likeness:
        fidelity = {
            fqn: kind.fidelity
            for fqn, kind in zip(steps.fqns, steps.conversions, strict=True)
            if kind.role == "model"
        }
        changed = {fqn: how for fqn, how in fidelity.items() if not reference.keeps(fqn)}
        return cls(reference.shown, len(fidelity), len(fidelity) - len(changed), changed)

    def __str__(self) -> str:
        return f"{self.identical:,} of {counted(self.weights, 'weight')} byte-identical to {self.reference}"


@dataclass(frozen=True, repr=False)
class Report(ShortRepr):
    """What a conversion did."""

    dst: str
    tensors: int
    nbytes_in: int
    nbytes_out: int
    seconds: float
    fidelity: Mapping[str, int]
    continued_nbytes: int
    """Bytes that an earlier, interrupted run had written already."""
    dropped: Mapping[str, str]
    tied: Mapping[str, str]
    notes: Sequence[str] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    """Quantized tensor, by FQN -> rms of its error over rms of its values, on a sample of at most
    SAMPLE_NUMEL values."""
    source: SourceCheck = field(default_factory=SourceCheck)
    """Bytes of the source that were compared with the checksums that it states."""
    likeness: Likeness | None = None
    """With --as: how many weights are the bytes of the reference, and which are not."""

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "dst": self.dst, "tensors": self.tensors, "nbytes_in": self.nbytes_in,
            "nbytes_out": self.nbytes_out, "seconds": round(self.seconds, 3),
            "fidelity": dict(self.fidelity), "continued_nbytes": self.continued_nbytes,
            "dropped": dict(self.dropped), "tied": dict(self.tied), "notes": list(self.notes),
            "errors": dict(self.errors), "source_check": asdict(self.source),
            **({} if self.likeness is None else {"as": asdict(self.likeness)}),
        }  # fmt: skip

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it."""
        return registry.card(self)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in self.fidelity.items())
        line = (
            f"wrote {self.dst}: {counted(self.tensors, 'tensor')}, {human(self.nbytes_in)} ->"
            f" {human(self.nbytes_out)} in {self.seconds:.1f} s; {kinds}"
        )
        lines = [line]
        if self.continued_nbytes:
            lines.append(f"continued: {human(self.continued_nbytes)} of an earlier run were kept")
        if self.errors:
            fqn = worst(self.errors)
            lines.append(
                f"lossy: {counted(len(self.errors), 'tensor')}, worst {fqn}:"
                f" {self.errors[fqn]:.3e} relative rms on a sample"
            )
        if self.likeness is not None:
            lines += [str(self.likeness), *listed("changed", self.likeness.changed)]
        lines += listed("dropped", self.dropped)
        return as_lines([*lines, *(f"note: {note}" for note in self.notes)])
