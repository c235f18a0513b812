"""The conversion of each logical tensor: its encoding in the source and in the output, and its fidelity.

A logical tensor is a weight or optimizer tensor under its FQN, however many tensors store it. A model
of 100,000 of them has a few dozen distinct conversions, so `Steps` keeps two columns: the FQNs, and one
shared `Conversion` for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptmap.core.columns import Columns, distinct


class Conversion(NamedTuple):
    """How tensors of one kind are converted; tensors that are converted alike share it.

    role        "model", "optimizer" or "other"
    source      dtype or encoding in the source: "bfloat16", "nf4(bfloat16)"
    target      the same in the output
    fidelity    "bytes", "exact", "codes", "cast", "quantize" or "requantize"
    nbytes_in   bytes of one tensor in the source
    nbytes_out  bytes of one tensor in the output
    """

    role: str
    shape: tuple[int, ...]
    source: str
    target: str
    fidelity: str
    nbytes_in: int
    nbytes_out: int


class Step(NamedTuple):
    """One logical tensor and its conversion, whose fields can be read from the step, too."""

    fqn: str
    conversion: Conversion

    @property
    def role(self) -> str:
        return self.conversion.role

    @property
    def shape(self) -> tuple[int, ...]:
        return self.conversion.shape

    @property
    def source(self) -> str:
        return self.conversion.source

    @property
    def target(self) -> str:
        return self.conversion.target

    @property
    def fidelity(self) -> str:
        return self.conversion.fidelity

    @property
    def nbytes_in(self) -> int:
        return self.conversion.nbytes_in

    @property
    def nbytes_out(self) -> int:
        return self.conversion.nbytes_out


@dataclass(frozen=True, slots=True, eq=False)
class Steps(Columns[Step]):
    """Step i converts the tensor `fqns[i]` as `conversions[i]` says."""

    fqns: Sequence[str]
    conversions: Sequence[Conversion]

    row = Step

    def counted(self) -> Counter[Conversion]:
        """Count the tensors of each conversion."""
        kinds = distinct(self.conversions)
        counts: Counter[Conversion] = Counter()
        # Hashing 100,000 tuples takes longer than all else here; objects are counted by id first.
        for key, count in Counter(map(id, self.conversions)).items():
            counts[kinds[key]] += count
        return counts

    def weights(self) -> list[str]:
        """Return the FQNs of the model's tensors, in order."""
        columns = zip(self.fqns, self.conversions, strict=True)
        return [fqn for fqn, conversion in columns if conversion.role == "model"]
