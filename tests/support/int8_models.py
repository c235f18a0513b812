"""Tiny models that the libraries themselves quantized and saved, with the values they decode to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.tensors import Box, TensorInfo

Truth = dict[str, torch.Tensor]
IDS = torch.arange(12)[None]
QUERY = "model.layers.0.self_attn.q_proj.weight"


def llama(dtype: torch.dtype = torch.bfloat16, hidden: int = 64, **more: Any) -> LlamaForCausalLM:
    """One layer; row 3 of a weight is zero, one value of it an outlier."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, **more,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        query = model.model.layers[0].self_attn.q_proj.weight
        query[3] = 0
        query[4, 5] = 3.0
    return model.to(dtype)


def dense(path: Path, dtype: torch.dtype = torch.bfloat16, hidden: int = 64) -> Path:
    llama(dtype, hidden).save_pretrained(path)
    return path


def loaded(path: Path, dtype: torch.dtype | str = "auto", **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu", **more)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def plain(values: Mapping[str, torch.Tensor], hidden: int = 64) -> Any:
    """A dense model of these values."""
    dtype = values["model.embed_tokens.weight"].dtype
    model = llama(torch.float32, hidden)
    for parameter in model.parameters():  # not the rotary frequencies, which stay in float32
        parameter.data = parameter.data.to(dtype)
    model.load_state_dict(dict(values))
    return model.eval()


# ------------------------------------------------------------------------------- bitsandbytes


def bnb_int8(path: Path, dtype: torch.dtype) -> Truth:
    from bitsandbytes.functional import int8_vectorwise_dequant
    from transformers import BitsAndBytesConfig

    source = dense(path.parent / f"{path.name}-dense", dtype)
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = loaded(source, dtype, quantization_config=config)
    model.save_pretrained(path)
    truth = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt":
            scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            truth[f"{name}.weight"] = int8_vectorwise_dequant(module.weight.data, scb).to(dtype)
    assert truth
    return truth


# ------------------------------------------------------------------------------- torchao


def torchao_hf(path: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> Truth:
    """Saved by transformers, in torchao's safetensors flattening."""
    from transformers import TorchAoConfig

    source = dense(path.parent / f"{path.name}-dense", dtype)
    model = loaded(source, dtype, quantization_config=TorchAoConfig(config))
    model.save_pretrained(path)
    state: dict[str, Any] = model.state_dict()
    return {
        key: value.dequantize() if hasattr(value, "qdata") else value
        for key, value in state.items()
    }


# ------------------------------------------------------------------------------- compressed-tensors


def compressed(
    path: Path,
    weights: Any,
    form: str,
    activations: Any = None,
    dtype: Any = torch.bfloat16,
    cache: Any = None,
    compress: bool = True,
) -> Truth:
    """Saved as llmcompressor does it: scales of the weights as they are, compressed, config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=form,
        quantization_status="frozen", kv_cache_scheme=cache,
    )  # fmt: skip
    model = llama(dtype)
    apply_quantization_config(model, config)
    modules = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    for module in modules:
        if hasattr(module, "k_scale"):
            module.k_scale.data.fill_(0.02)
            module.v_scale.data.fill_(0.003)
        else:
            _calibrate(module, weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    if compress:
        compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))
    if compress:
        compressor.decompress_model(model)
    return {key: value for key, value in model.state_dict().items() if key.endswith(".weight")}


def _calibrate(module: Any, args: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, strategy = module.weight.data, str(args.strategy)
    overall: dict[str, Any] = {}
    if hasattr(module, "weight_global_scale"):  # NVFP4
        overall = {"global_scale": generate_gparam(weight.amin(), weight.amax())}
        module.weight_global_scale.data.copy_(overall["global_scale"])
    if strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif strategy == "tensor":
        low, high = weight.amin().view(1), weight.amax().view(1)
    elif strategy in ("group", "tensor_group"):
        groups = weight.view(weight.shape[0], -1, args.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
    else:
        rows, columns = args.block_structure
        tiles = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args, **overall)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)


# ------------------------------------------------------------------------------- encoders


def weights(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    maker = torch.Generator().manual_seed(shape[0])
    values = torch.randn(shape, generator=maker) * 0.02
    if kind == "heavy":
        values *= torch.randn(shape, generator=maker).exp() * 20
    return values.to(dtype)


def info_of(values: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(values.shape), str(values.dtype).removeprefix("torch."))


def encoded(
    encoding: ScaledEncoding, values: torch.Tensor, split: int = 0, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """All parts, fed `split` steps at a time."""
    info = info_of(values)
    expected = encoding.parts(info)
    assert not isinstance(expected, Refusal), expected
    encoder = encoding.encoder(info, device)
    parts = {k: torch.empty(p.numel, dtype=getattr(torch, p.dtype)) for k, p in expected.items()}
    flat, count = values.reshape(-1), encoder.step * split if split else values.numel()
    starts = range(0, values.numel(), count)
    writes = [w for at in starts for w in encoder.feed(at, flat[at : at + count])]
    for write in [*writes, *encoder.finish()]:
        (start,), (size,) = write.box.offsets, write.box.sizes
        parts[write.part][start : start + size] = write.values
    return {k: parts[k].view(p.shape) for k, p in expected.items()}


def decoded(
    encoding: ScaledEncoding, info: TensorInfo, parts: Truth, box: Box | None = None
) -> torch.Tensor:
    """A box, from parts cut as `part_box` says."""
    box = box or Box.whole(info.shape)
    cut = {}
    for name, part in parts.items():
        inner = encoding.part_box(info, name, box)
        assert inner is not None
        at = tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.sizes, strict=True))
        cut[name] = part[at].clone()
    out = torch.full(box.sizes, torch.nan, dtype=getattr(torch, info.dtype))
    encoding.decode(info, cut, box, out)
    return out


def quantized_copy(model: nn.Module, config: Any) -> nn.Module:
    from torchao.quantization import quantize_

    made = copy.deepcopy(model)
    quantize_(made, config)
    return made
