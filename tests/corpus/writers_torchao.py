"""torchao's Int8Tensor and Float8Tensor as users store them: pickled, and flattened into
safetensors by torchao itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tests.corpus.case import Container, case
from tests.corpus.models import Recipe, State, nf4_names, tiny

BF16 = Recipe(256, 64, 128, 2, dtype=torch.bfloat16)
FP32 = Recipe(256, 64, 128, 2)


def quantized(recipe: Recipe, config: str) -> nn.Module:
    """The linear weights inside the layers, by torchao's own `quantize_`."""
    import torchao.quantization as ao

    model: nn.Module = tiny(recipe)
    names = {name.removesuffix(".weight") for name in nf4_names(model)}
    ao.quantize_(model, getattr(ao, config)(), lambda module, name: name in names)
    return model


def truth(recipe: Recipe, config: str) -> State:
    return dict(quantized(recipe, config).state_dict())


def dotted(recipe: Recipe, config: str) -> State:
    """Without buffers of the model itself: torchao's reader of safetensors needs a dot in a name."""
    return {key: value for key, value in truth(recipe, config).items() if "." in key}


def save(recipe: Recipe, config: str, path: Path) -> None:
    torch.save(quantized(recipe, config).state_dict(), path)


def save_flattened(recipe: Recipe, config: str, path: Path) -> None:
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flattened: Any = flatten_tensor_state_dict(dotted(recipe, config))
    tensors, metadata = flattened
    save_file(tensors, path, {"format": "pt", **metadata})


def save_blobs(recipe: Recipe, config: str, path: Path) -> None:
    save_dcp(quantized(recipe, config).state_dict(), checkpoint_id=path, no_dist=True)


INT8, FLOAT8 = "Int8WeightOnlyConfig", "Float8WeightOnlyConfig"


def add(name: str, container: Container, recipe: Recipe, config: str, write: Any) -> None:
    file = {"torch": "model.pt", "safetensors": "model.safetensors"}.get(container, "")
    values = dotted if container == "safetensors" else truth
    register = case(
        name, 1, container, file=file, encoding=name.partition("_")[0],
        truth=partial(values, recipe, config),
    )  # fmt: skip
    register(partial(write, recipe, config))


add("int8_torch_bf16", "torch", BF16, INT8, save)
add("int8_dcp_fp32", "dcp", FP32, INT8, save_blobs)
add("float8_torch_fp32", "torch", FP32, FLOAT8, save)
add("float8_safetensors_bf16", "safetensors", BF16, FLOAT8, save_flattened)
