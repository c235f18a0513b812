"""What can be done with each form of quantized weights, asked of the registry: for the reference.

ct-nvfp4  ->  decoded, written with -ct-nvfp4, values when it is loaded, codes kept in torchao-nvfp4

`tests/quantization/test_forms_table.py` tries each cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptmap import registry
from ckptmap.core.quantized_codes import Coded, CodeGrid, EncodesSome, KeepsCodes, Recodes
from ckptmap.planning.live_encodings import TABLE, HeldLive
from ckptmap.protocols import Encoding, Refusal, Scheme
from ckptmap.protocols.encodings import Encoded, TakesDtype
from ckptmap.protocols.offers import offers
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

    suffix      what follows the setup in `--to`; empty: no `--to` writes it
    is_decoded  whether its values are read; else it moves as bytes
    is_encoded  whether values are encoded in it: by `--as`, and where an adapter is merged into it
    is_live     whether `load` keeps its codes in a live model, its library's or another's of the same codes; else it
                decodes them
    kept_in     suffixes of other forms that take its codes unchanged
    """

    name: str
    suffix: str
    is_decoded: bool
    is_encoded: bool
    is_live: bool
    kept_in: Sequence[str]


def encoding_forms() -> list[EncodingForm]:
    """Return the forms of weights, in the order of the registry."""
    schemes = [scheme for scheme in registry.schemes() if isinstance(scheme, HeldLive)]
    return [_form(scheme, schemes) for scheme in schemes]


def example_of(scheme: Scheme) -> Encoded | None:
    """Return an encoding of a scheme with the weight that it holds, SAMPLE or the like; None: it has none."""
    encoding = scheme.example(SAMPLE) if isinstance(scheme, HasExample) else scheme.encoding(SAMPLE)
    if isinstance(encoding, Refusal):
        return None
    held = encoding.takes if offers(encoding, TakesDtype) else SAMPLE.dtype
    return encoding, TensorInfo(SAMPLE.shape, held)


def _form(scheme: Scheme, schemes: Sequence[Scheme]) -> EncodingForm:
    made = example_of(scheme)
    is_decoded = made is not None and not isinstance(made[0].parts(made[1]), Refusal)
    is_encoded = made is not None and is_decoded and _is_encoded(*made)
    kept_in = []
    if made is not None and isinstance(made[0], Coded):
        grid = made[0].grid(SAMPLE)
        kept_in = [
            other.suffix
            for other in schemes
            if other is not scheme and other.suffix and grid is not None
            if isinstance(other, KeepsCodes) and _takes(other.keeping(SAMPLE, grid, False), grid)
        ]
    holders = [each for each in schemes if each is scheme or each.suffix in kept_in]
    return EncodingForm(
        scheme.name, scheme.suffix, is_decoded, is_encoded, any(map(_is_live, holders)), kept_in
    )


def _is_live(scheme: Scheme) -> bool:
    """Return whether a live model holds codes of a scheme."""
    assert isinstance(scheme, HeldLive), "it was selected so"
    return not TABLE["FSDP2", scheme.live].how.startswith("decoded")


def _is_encoded(encoding: Encoding, info: TensorInfo) -> bool:
    return not offers(encoding, EncodesSome) or encoding.cannot_encode(info) is None


def _takes(encoding: object, grid: CodeGrid) -> bool:
    """Return whether an encoding that a scheme chose for these codes takes them unchanged."""
    if not isinstance(encoding, Recodes):
        return False
    return encoding.recoder(SAMPLE, grid, "cpu") is not None
