"""Writes the pickles beside this file, with one release of torchao at a time:

    pip install --target /tmp/ao07 --no-deps torchao==0.7.0
    PYTHONPATH=/tmp/ao07 python tests/golden/torchao/make.py

`<release>-<case>.pt` is what `torch.save` makes of a state dict whose weights `quantize_` has
replaced; `truth-<release>.safetensors` has what that release itself decodes them to, as
`<case>/<key>`. Releases 0.7, 0.9, 0.13 to 0.18 were run with torch 2.13 on the CPU.
`0.14-int6x-v2.safetensors` is the state dict of that pickle as torchao flattens it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchao
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
Q: Any = importlib.import_module("torchao.quantization")
API: Any = importlib.import_module("torchao.quantization.quant_api")


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    made = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 16), nn.Linear(16, 24, bias=False))
    with torch.no_grad():
        made[1].weight[5] = 0
        made[1].weight[6, 3] = 40.0
    return made.to(dtype)


def linear(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear)


def embedding(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Embedding)


Make = Callable[[nn.Module], None]


def quantized(config: Any, keep: Callable[[nn.Module, str], bool] = linear) -> Make:
    return lambda made: API.quantize_(made, config, keep)


def nf4(made: Any) -> None:
    try:
        library: Any = importlib.import_module("torchao.dtypes.nf4tensor")
    except ImportError:  # since 0.18
        workflows = "torchao.quantization.quantize_.workflows"
        library = importlib.import_module(f"{workflows}.nf4.nf4_tensor")
    for layer in made[1:]:
        quantized = library.to_nf4(layer.weight.detach(), 32, 4)
        layer.weight = nn.Parameter(quantized, requires_grad=False)


def old() -> Iterator[tuple[str, Make]]:
    """Up to 0.9: functions; AffineQuantizedTensor."""
    yield "nf4", nf4
    yield "int8wo", quantized(Q.int8_weight_only())
    yield "int8wo-group", quantized(Q.int8_weight_only(group_size=16))
    yield "int8dyn", quantized(Q.int8_dynamic_activation_int8_weight())
    yield "float8wo", quantized(Q.float8_weight_only())


def middle() -> Iterator[tuple[str, Make]]:
    """0.10 to 0.14: configs without versions."""
    yield "nf4", nf4
    yield "int8wo", quantized(Q.Int8WeightOnlyConfig())
    yield "int8dyn", quantized(Q.Int8DynamicActivationInt8WeightConfig())
    yield from intx()
    yield "int6x-v2", quantized(asymmetric(version=2))


def newer() -> Iterator[tuple[str, Make]]:
    """0.15 to 0.17: both classes."""
    yield "nf4", nf4
    yield "int8wo", quantized(Q.Int8WeightOnlyConfig(version=1))
    yield "int8wo-group", quantized(Q.Int8WeightOnlyConfig(group_size=16, version=1))
    yield "int8wo-v2", quantized(Q.Int8WeightOnlyConfig(version=2))
    yield "int8dyn", quantized(Q.Int8DynamicActivationInt8WeightConfig(version=1))
    yield "int8dyn-v2", quantized(Q.Int8DynamicActivationInt8WeightConfig(version=2))
    yield "float8wo", quantized(Q.Float8WeightOnlyConfig())
    yield from intx()


def newest() -> Iterator[tuple[str, Make]]:
    """0.18: Int8Tensor alone."""
    yield "nf4", nf4
    granular = importlib.import_module("torchao.quantization.granularity")
    yield "int8wo", quantized(Q.Int8WeightOnlyConfig())
    for name, how in (("tensor", granular.PerTensor()), ("group", granular.PerGroup(16))):
        yield f"int8wo-{name}", quantized(Q.Int8WeightOnlyConfig(granularity=how))
    yield "int8wo-embedding", quantized(Q.Int8WeightOnlyConfig(), embedding)
    yield "int8dyn", quantized(Q.Int8DynamicActivationInt8WeightConfig())
    yield "float8wo", quantized(Q.Float8WeightOnlyConfig())
    yield from intx()
    yield from training()


def asymmetric(**more: Any) -> Any:
    granular = importlib.import_module("torchao.quantization.granularity")
    mapping = importlib.import_module("torchao.quantization.quant_primitives").MappingType
    return API.IntxWeightOnlyConfig(
        torch.int6, granular.PerGroup(8), mapping_type=mapping.ASYMMETRIC, **more
    )


def intx() -> Iterator[tuple[str, Make]]:
    granular = importlib.import_module("torchao.quantization.granularity")
    yield "int8x-group", quantized(API.IntxWeightOnlyConfig(torch.int8, granular.PerGroup(8)))
    yield "int4x-axis", quantized(API.IntxWeightOnlyConfig(torch.int4, granular.PerAxis(0)))
    yield "int6x-asymmetric", quantized(asymmetric())


def training() -> Iterator[tuple[str, Make]]:
    kinds = importlib.import_module("torchao.prototype.quantized_training")
    yield "int8qt", quantized(kinds.int8_weight_only_quantized_training())
    yield "int8mp", quantized(kinds.int8_mixed_precision_training())
    yield "bitnet", quantized(kinds.bitnet_training())


def decoded(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "_data"):  # trains in full precision
        return tensor._data.detach().clone()
    if hasattr(tensor, "get_original_weight"):
        return tensor.get_original_weight().detach().clone()
    if hasattr(tensor, "original_weight_tensor"):
        return tensor.original_weight_tensor.dequantize().detach().clone()
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor.dequantize().detach().clone()
    return tensor.detach().clone()


def main() -> None:
    release = ".".join(torchao.__version__.split(".")[:2])
    minor = int(release.split(".")[1])
    cases = next(
        cases()
        for last, cases in ((9, old), (14, middle), (17, newer), (99, newest))
        if minor <= last
    )
    truth = {}
    while True:
        try:
            name, make = next(cases)
        except StopIteration:
            break
        wide = name == "int8wo" and release in ("0.7", "0.18")
        for dtype in (torch.bfloat16, torch.float32) if wide else (torch.bfloat16,):
            label = f"{release}-{name}" + ("-fp32" if dtype is torch.float32 else "")
            made = model(dtype)
            try:
                make(made)
            except Exception as error:
                print(f"{label}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
                continue
            state = made.state_dict()
            torch.save(state, HERE / f"{label}.pt")
            if label == "0.14-int6x-v2":
                name = "torchao.prototype.safetensors.safetensors_support"
                library: Any = importlib.import_module(name)
                tensors, metadata = library.flatten_tensor_state_dict(state)
                save_file(tensors, HERE / f"{label}.safetensors", metadata)
            for key, value in state.items():
                if type(value) not in (torch.Tensor, nn.Parameter):
                    truth[f"{label}/{key}"] = decoded(value)
    save_file(truth, HERE / f"truth-{release}.safetensors")


if __name__ == "__main__":
    main()
