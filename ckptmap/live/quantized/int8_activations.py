"""How a live int8 weight quantizes the activations of its linear layer, and what a checkpoint states of it.

    {"act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"granularity": ...}}}
        <->  Int8Tensor.act_quant_kwargs of torchao

Source: torchao 0.18, workflows/int8/int8_tensor.py; the JSON is that of prototype/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.core.json_text import parse_json
from ckptmap.storage.process_guards import quiet_torchao

if TYPE_CHECKING:
    import torch

    from ckptmap.storage.lazy_tensor import LazyTensor

UNKNOWN = "weight-only here: the checkpoint quantizes activations in a way that is not known"
OTHERWISE = "activations as the live weight has them, which differs from the checkpoint"
BOTH = "activations in int8"


def decide(live: torch.Tensor, is_live_int8: bool, source: LazyTensor) -> tuple[object, str]:
    """Return the settings for activations of the weight that a load makes, and how to report them.

    A live int8 weight keeps its own; a dense one gets those of the checkpoint."""
    stated, is_known = _stated(source)
    if is_live_int8:
        own = getattr(live, "act_quant_kwargs", None)
        return own, "" if own == stated and is_known else OTHERWISE
    if not is_known:
        return None, UNKNOWN
    return stated, BOTH if stated is not None else ""


def _stated(source: LazyTensor) -> tuple[object, bool]:
    """Return what the checkpoint states, as torchao's object or None, and whether it is known here."""
    encoding: Any = source.encoding_
    attributes = parse_json(getattr(encoding, "attributes", "") or "{}")
    value = attributes.get("act_quant_kwargs")
    extra = [part[0] for part in getattr(encoding, "extra", ())]
    if getattr(encoding, "activation", "") or "act_quant_scale" in extra:
        return None, False
    if value is None:
        return None, True
    made = _parsed(value)
    return made, made is not None


def _parsed(value: object) -> object:
    """Return torchao's settings of such JSON; None: it is of another form."""
    data = _data(value, "QuantizeTensorToInt8Kwargs")
    granularity = data.get("granularity")
    kind = granularity.get("_type") if isinstance(granularity, Mapping) else None
    mapping, narrow = data.get("mapping_type"), data.get("reduce_range", False)
    name = mapping.get("_data") if isinstance(mapping, Mapping) else None
    per_row = kind == "PerRow" and _data(granularity, "PerRow") in ({}, {"dim": -1})
    if not (per_row or kind == "PerTensor") or type(narrow) is not bool:
        return None
    if name not in ("SYMMETRIC", "ASYMMETRIC"):
        return None
    with quiet_torchao():
        from torchao.quantization import PerRow, PerTensor
        from torchao.quantization.quant_primitives import MappingType
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import (
            QuantizeTensorToInt8Kwargs,
        )
    granular = PerRow() if per_row else PerTensor()
    mappings = {"SYMMETRIC": MappingType.SYMMETRIC, "ASYMMETRIC": MappingType.ASYMMETRIC}
    return QuantizeTensorToInt8Kwargs(granular, mappings[name], narrow)


def _data(value: object, kind: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or value.get("_type") != kind:
        return {}
    data = value.get("_data")
    return data if isinstance(data, Mapping) else {}


def attributes_of(live: Any) -> str | None:
    """Return the settings of a live weight as a checkpoint states them; None: it has none to state."""
    kwargs = getattr(live, "act_quant_kwargs", None)
    if kwargs is None:
        return None
    granularity = type(kwargs.granularity).__name__
    dim = {"dim": kwargs.granularity.dim} if granularity == "PerRow" else {}
    data = {
        "granularity": {"_type": granularity, "_data": dim},
        "mapping_type": {"_type": "MappingType", "_data": kwargs.mapping_type.name},
        "reduce_range": bool(getattr(kwargs, "reduce_range", False)),
    }
    stated = {"_type": type(kwargs).__name__, "_data": data}
    narrow = bool(getattr(live, "reduce_range", False))
    return json.dumps({"act_quant_kwargs": stated, "reduce_range": narrow})
