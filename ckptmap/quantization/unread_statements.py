"""Find forms that config.json alone tells apart from one that is read: their codes must not be decoded as that one.

    auto-round's MXINT4      its parts are those of MXFP4; a code is a sign and quarters, not E2M1
    weights in a rotated basis   w R is stored, and the model computes (x R) (w R)': only with R are they its weights

Sources: `MXINT4QuantLinear` and `RotationConfig` of auto-round 0.16; `TransformConfig` and `TransformLocation` of
compressed-tensors 0.20 (transform/transform_args.py). Rotations that were merged into weights on both sides, as
SpinQuant's R1 and R2 are, need nothing at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptmap.core.short_repr import short
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.read_config import quantization_config
from ckptmap.tensors import StoredTensor

MXINT = "MXINT4 (auto-round)"
ROTATED = "rotated"
_DTYPES = frozenset({"uint8", "int8", "int32", "float8_e4m3fn", "float8_e5m2"})
_OF_INPUTS = ("input", "output")
"""Places of a transform that is computed with the activations of a linear layer."""


def unread_statement(stored: Mapping[str, StoredTensor], mounts: Mounts) -> str:
    """Return the name of the form that config.json beside these codes states, where nobody decodes it; "" elsewhere.

    stored  the tensors of a checkpoint; where none may hold codes, nothing is read
    """
    codes = next((t for t in stored.values() if t.info.dtype in _DTYPES and t.info.shape), None)
    return "" if codes is None else unread_form(quantization_config(codes, mounts))


def unread_form(config: Mapping[str, object]) -> str:
    """Return the name of the form that a `quantization_config` states, where nobody decodes it; "" elsewhere."""
    if config.get("quant_method") == "auto-round":
        if any("mx_int" in str(layer.get("data_type")) for layer in _layers(config)):
            return MXINT
        if any(layer.get("rotation_config") for layer in _layers(config)):
            return f"{ROTATED} (rotation_config of auto-round)"
    names = [name for name, transform in _transforms(config) if _at_run_time(transform)]
    return f"{ROTATED} (transform_config {short(', '.join(names))})" if names else ""


def _layers(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the settings of all layers, then those of single ones."""
    yield config
    more = config.get("extra_config")
    for layer in more.values() if isinstance(more, Mapping) else ():
        if isinstance(layer, Mapping):
            yield layer


def _transforms(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    stated = config.get("transform_config")
    groups = stated.get("config_groups") if isinstance(stated, Mapping) else None
    for name, transform in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(transform, Mapping):
            yield str(name), transform


def _at_run_time(transform: Mapping[str, object]) -> bool:
    places = transform.get("apply")
    return any(
        isinstance(place, Mapping) and place.get("location") in _OF_INPUTS
        for place in (places if isinstance(places, list) else [])
    )
