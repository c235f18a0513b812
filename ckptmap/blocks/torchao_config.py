"""What config.json says of torchao's tensors, as transformers' `TorchAoConfig` writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def _config(quant_type: Mapping[str, Any], dense: Collection[str]) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "modules_to_not_convert": sorted(dense),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _per_row() -> dict[str, Any]:
    return {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}


def int8(dense: Collection[str]) -> Mapping[str, Any]:
    """`dense`: the modules whose 2-D weights are not quantized."""
    data = {"group_size": None, "granularity": _per_row(), "set_inductor_config": True}
    quant_type = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": data}
    return _config(quant_type, dense)


def float8(dense: Collection[str]) -> Mapping[str, Any]:
    data = {
        "weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
        "set_inductor_config": True,
        "granularity": _per_row(),
    }
    quant_type = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}
    return _config(quant_type, dense)
