"""What can be done with each form of quantized weights, asked of the registry: for the reference.

ct-nvfp4  ->  written with -ct-nvfp4, decoded when it is loaded, codes kept in torchao-nvfp4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.core.quantized_codes import Coded, CodeGrid, KeepsCodes, Recodes
from ckptmap.planning.live_encodings import TABLE, HeldLive
from ckptmap.protocols import Encoding, Refusal, Scheme
from ckptmap.tensors import TensorInfo

SAMPLE = TensorInfo((256, 256), "bfloat16")
"""A weight that every form can hold."""


@runtime_checkable
class HasExample(Protocol):
    """A scheme that is read only, and returns an encoding of its form all the same."""

    def example(self, info: TensorInfo) -> Encoding:
        """Return an encoding that could hold a weight."""


@dataclass(frozen=True)
class EncodingForm:
    """One form.

    suffix     what follows the setup in `--to`; empty: it is read only
    is_live    whether `load` keeps its codes in a live model of its library; else it decodes them
    kept_in    suffixes of other forms that take its codes unchanged
    """

    name: str
    suffix: str
    is_live: bool
    kept_in: Sequence[str]


def encoding_forms() -> list[EncodingForm]:
    """Return the forms of weights, in the order of the registry."""
    schemes = [scheme for scheme in registry.schemes() if isinstance(scheme, HeldLive)]
    return [_form(scheme, schemes) for scheme in schemes]


def _form(scheme: Scheme, schemes: Sequence[Scheme]) -> EncodingForm:
    assert isinstance(scheme, HeldLive), "it was selected so"
    encoding = scheme.example(SAMPLE) if isinstance(scheme, HasExample) else scheme.encoding(SAMPLE)
    kept_in = []
    if not isinstance(encoding, Refusal) and isinstance(encoding, Coded):
        grid = encoding.grid(SAMPLE)
        kept_in = [
            other.suffix
            for other in schemes
            if other is not scheme and other.suffix and grid is not None
            if isinstance(other, KeepsCodes) and _takes(other.keeping(SAMPLE, grid, False), grid)
        ]
    how = TABLE["FSDP2", scheme.live].how
    return EncodingForm(scheme.name, scheme.suffix, not how.startswith("decoded"), kept_in)


def _takes(encoding: object, grid: CodeGrid) -> bool:
    """Return whether an encoding that a scheme chose for these codes takes them unchanged."""
    if not isinstance(encoding, Recodes):
        return False
    return encoding.recoder(SAMPLE, grid, "cpu") is not None
