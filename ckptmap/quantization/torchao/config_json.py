"""The `quantization_config` of torchao's tensors, as `TorchAoConfig` of transformers writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

GONE = frozenset({
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig", "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
})  # fmt: skip
"""Classes whose version 1 torchao 0.18 refuses, as it refuses every `...Layout`."""
_MAX_DEPTH = 8


def is_outdated(config: Mapping[str, object]) -> bool:
    """Return whether the config is of a form that torchao wrote before 0.15 and now refuses.

    That is a type given by its short name, or a class or version that is gone.
    """
    if config.get("quant_method") != "torchao":
        return False
    said = config.get("quant_type")
    return isinstance(said, str) or _has_gone(said)


def _has_gone(said: object, depth: int = 0) -> bool:
    if not isinstance(said, Mapping) or depth > _MAX_DEPTH:
        return False
    kind = said.get("_type")
    if isinstance(kind, str) and (
        kind.endswith("Layout") or (kind in GONE and said.get("_version") == 1)
    ):
        return True
    return any(_has_gone(value, depth + 1) for value in said.values())


def _config(quant_type: Mapping[str, object], dense: Collection[str]) -> dict[str, object]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "modules_to_not_convert": sorted(dense),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _per_row() -> dict[str, object]:
    return {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}


def int8(dense: Collection[str]) -> Mapping[str, object]:
    """Return the config of int8 weights; `dense` are the modules that are not quantized."""
    data = {"group_size": None, "granularity": _per_row(), "set_inductor_config": True}
    quant_type = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": data}
    return _config(quant_type, dense)


def float8(dense: Collection[str]) -> Mapping[str, object]:
    """Return the config of float8 weights; `dense` are the modules that are not quantized."""
    data = {
        "weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
        "set_inductor_config": True,
        "granularity": _per_row(),
    }
    quant_type = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}
    return _config(quant_type, dense)


def microscaled(kind: str, elements: str, dense: Collection[str]) -> Mapping[str, object]:
    """Return the config of MXTensor or NVFP4Tensor weights, `kind`, with codes of the dtype `elements`."""
    if kind == "NVFP4Tensor":
        only = {"_type": "NVFP4WeightOnlyConfig", "_version": 1}
        return _config(only | {"_data": {"use_dynamic_per_tensor_scale": True}}, dense)
    dtype = {"_type": "torch.dtype", "_data": elements}
    data = {
        "block_size": 32,
        "activation_dtype": dtype,
        "weight_dtype": dtype,
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
        "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"},
    }
    quant_type = {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": data}
    return _config(quant_type, dense)
