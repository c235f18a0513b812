"""The reference readers of quantized releases and GGUF models, and of what is written of them.

HQQ, optimum-quanto, compressed-tensors, transformers and the `gguf` package read theirs themselves. The readers of
GPTQ and AWQ need a GPU or are too heavy to be installed, so their published formulas are here, bit by bit; the
digests of `golden/gptq/truth.json` prove them. Nothing here knows ckptmap. A reader raises where its library refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.torture.readers import Named, read_gguf, read_hf

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of eight whose code lies at each place of a word, the lowest first."""
WORD = 32
FLOATS = ("rms_norm_eps", "rope_theta")
"""Numbers that transformers wants with a point, though JSON has one kind."""


def config_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "config.json").read_text())
    return document


def dtype_of(path: Path, otherwise: torch.dtype) -> torch.dtype:
    """The dtype that config.json states, in which transformers keeps the model."""
    config = config_of(path)
    name = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else otherwise


# ------------------------------------------------------------------------------- GPTQ and AWQ


def read_gptq(path: Path) -> Named:
    """GPTQ of both versions, as `QuantLinear` computes it: (code - zero) * scale in the dtype of the scales."""
    said = config_of(path)["quantization_config"]
    bits, version = _whole(said["bits"]), said.get("checkpoint_format") or "gptq"
    if said["quant_method"] != "gptq" or bits not in (2, 3, 4, 8):
        raise ValueError(f"{said['quant_method']} of {bits} bits")
    offset = {"gptq": 1, "gptq_v2": 0}[version]
    found = dict(read_hf(path))
    for stem in [key.removesuffix("qweight") for key in found if key.endswith("qweight")]:
        words, zeros, scales = (_part(found, stem, n) for n in ("qweight", "qzeros", "scales"))
        codes = _runs(words, bits)
        width, rows = codes.shape
        group = _whole(said["group_size"])
        group = width if group == -1 else group
        index = found.pop(f"{stem}g_idx", torch.arange(width) // group).long()
        zero = _runs(zeros.t(), bits).t() + offset
        if len(index) != width or len(scales) != -(-width // group) or bool((index < 0).any()):
            raise ValueError(f"{stem}: {codes.shape}, groups of {group}, scales {scales.shape}")
        if zero.shape != scales.shape or rows != scales.shape[1]:
            raise ValueError(f"{stem}: {zero.shape}, scales {scales.shape}")
        found[f"{stem}weight"] = _product(codes, zero[index], scales[index], path)
    return found


def read_awq(path: Path) -> Named:
    """AWQ as `dequantize_gemm` computes it: eight outputs in a word, in an order of their own."""
    said = config_of(path)["quantization_config"]
    if said["quant_method"] != "awq" or _whole(said["bits"]) != 4:
        raise ValueError(str(said))
    if str(said.get("version") or "gemm").lower() != "gemm":
        raise ValueError(str(said))
    found = dict(read_hf(path))
    for stem in [key.removesuffix("qweight") for key in found if key.endswith("qweight")]:
        words, zeros, scales = (_part(found, stem, n) for n in ("qweight", "qzeros", "scales"))
        codes, zero = (_eights(each) for each in (words, zeros))
        group = _whole(said["group_size"])
        group = len(codes) if group == -1 else group
        wanted = torch.Size([-(-len(codes) // group), codes.shape[1]])
        if scales.shape != wanted or zero.shape != wanted:
            raise ValueError(f"{stem}: {codes.shape}, {zero.shape}, scales {scales.shape}")
        index = torch.arange(len(codes)) // group
        found[f"{stem}weight"] = _product(codes, zero[index], scales[index], path)
    return found


def _whole(value: object) -> int:
    if type(value) is not int or value == 0 or value < -1:
        raise ValueError(f"no number: {value!r}")
    return value


def _part(found: dict[str, Tensor], stem: str, name: str) -> Tensor:
    part = found.pop(f"{stem}{name}")
    if part.ndim != 2 or (part.dtype != torch.int32) == (name != "scales"):
        raise ValueError(f"{stem}{name}: {part.dtype}, {part.shape}")
    return part


def _runs(words: Tensor, bits: int) -> Tensor:
    """Codes [32 n / bits, m] of words [n, m]: a run of bits down each column, the lowest first."""
    flat = (words[:, None] >> torch.arange(WORD)[None, :, None] & 1).flatten(0, 1)
    codes = flat.unflatten(0, (-1, bits)) << torch.arange(bits)[None, :, None]
    return codes.sum(1)


def _eights(words: Tensor) -> Tensor:
    """Codes [n, 8 m] of words [n, m]."""
    codes = words[:, :, None] >> torch.arange(0, WORD, 4) & 15
    turned = torch.empty_like(codes)
    turned[:, :, list(AWQ_ORDER)] = codes
    return turned.flatten(1)


def _product(codes: Tensor, zero: Tensor, scales: Tensor, path: Path) -> Tensor:
    values = (codes - zero).to(scales.dtype) * scales
    return values.t().contiguous().to(dtype_of(path, scales.dtype))


# ------------------------------------------------------------------------------- HQQ and quanto


def read_hqq(path: Path) -> Named:
    """Each module as `HQQLinear` loads and dequantizes it; what it does not know stays a tensor by itself."""
    from hqq.core.quantize import _META_TYPE, HQQLinear

    known = {"W_q", "bias", "stores_quant_config", *_META_TYPE}
    unused = {"offload_meta": False, "optimize": True, "round_zero": True}
    flags = {name: torch.tensor(value, dtype=torch.uint8) for name, value in unused.items()}
    found = dict(read_hf(path))
    for stem in [key.removesuffix("W_q") for key in found if key.endswith(".W_q")]:
        names = [name for name in sorted(known) if f"{stem}{name}" in found]
        state = {name: found.pop(f"{stem}{name}") for name in names}
        state |= {"encoded_state_dict": torch.tensor(1), **flags}  # no value depends on these
        for name in (*unused, "encoded_state_dict"):
            found.pop(f"{stem}{name}", None)
        linear = HQQLinear(None, None, compute_dtype=torch.float16, device="cpu")
        if (bias := state.get("bias")) is not None:
            found[f"{stem}bias"] = bias
        linear.load_state_dict(state)
        found[f"{stem}weight"] = linear.dequantize()
    return found


@contextmanager
def quanto_in_torch() -> Iterator[None]:
    """Take quanto's words apart in torch, as its `library/unpack.py` does without a compiled operator."""
    from optimum.quanto.library.extensions.cpp import ext

    def unpacked(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

    before = ext._lib
    ext._lib = SimpleNamespace(unpack=unpacked)
    try:
        yield
    finally:
        ext._lib = before


def read_quanto_file(path: Path, model: nn.Module) -> Named:
    """A state dict, loaded by a model of the same modules that quanto has quantized."""
    state = dict(read_hf(path))
    with quanto_in_torch():
        known = {name for name, _ in model.named_buffers()}
        single = {key for key in known if key in state and state[key].numel() == 1}
        coded = {k: v for k, v in state.items() if k.endswith(QUANTO) or k in single}
        model.load_state_dict(coded, strict=False)
        return _of_quanto(model, state, whole=False)


def read_quanto_model(path: Path) -> Named:
    """A model as `QuantizedModelForCausalLM` loads it."""
    from optimum.quanto import QuantizedModelForCausalLM

    state = dict(read_hf(path))
    with quanto_in_torch():
        loaded = QuantizedModelForCausalLM.from_pretrained(path)
        return _of_quanto(loaded._wrapped, state)


QUANTO = ("._data", "._data._data", "._scale", "._shift")


def _of_quanto(model: nn.Module, state: dict[str, Tensor], whole: bool = True) -> Named:
    """The weights that a model has loaded from codes; all else as it is stored, as a dense tensor is.

    whole  whether the model is known to whoever opens the path, so that no dense tensor may be missing
    """
    from optimum.quanto.tensor.qtensor import QTensor

    found = {}
    for name, value in model.named_parameters():
        module = name.rpartition(".")[0]
        if isinstance(value, QTensor):
            parts = [state.pop(f"{name}{part}", None) for part in QUANTO]
            if parts[2] is None or (parts[0] is None and parts[1] is None):
                raise ValueError(f"{name}: {[part is None for part in parts]}")
            found[name] = value.dequantize()
            for scale in ("input_scale", "output_scale"):
                state.pop(f"{module}.{scale}", None)
        elif whole and name not in state:
            raise ValueError(f"{name}: is not there")
    return found | state


# ------------------------------------------------------------------------------- GGUF


def read_gguf_model(path: Path) -> Named:
    """A GGUF file as transformers loads it as a model; with what its config says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return {k: v.bfloat16() for k, v in model.state_dict().items()} | _sizes(model.config)


def read_hf_model(path: Path) -> Named:
    """A directory as transformers loads it as a model; with what its config says."""
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    if told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]:
        raise ValueError(str(told)[:300])
    return dict(model.state_dict()) | _sizes(model.config)


def _sizes(config: Any) -> dict[str, Tensor]:
    """What a config says that a forward pass needs, as tensors."""
    names = (
        "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps",
    )  # fmt: skip
    said = {name: getattr(config, name) for name in names}
    said["theta"] = config.rope_parameters["rope_theta"]
    return {f"config.{name}": torch.tensor(float(value)) for name, value in said.items()}


def read_gguf_with_sizes(path: Path) -> Named:
    """A GGUF file that we wrote, decoded by the `gguf` package, with the numbers of its metadata."""
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    said = {key: field.contents() for key, field in fields.items() if key.startswith("llama.")}
    numbers = {k: torch.tensor(float(v)) for k, v in said.items() if isinstance(v, (int, float))}
    return {**read_gguf(path), **numbers}


def read_as_q8_0(path: Path) -> Named:
    """A Llama as transformers loads it, rounded to Q8_0 by the `gguf` package, under llama.cpp's names."""
    from gguf import GGMLQuantizationType, quants
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.gguf_models import MODELS, named

    document = config_of(path)
    wide = {k: float(v) for k, v in document.items() if k in FLOATS and type(v) is int}
    config = AutoConfig.for_model(**{**document, **wide})
    model, told = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, output_loading_info=True
    )
    if told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]:
        raise ValueError(str(told)[:300])
    found, kind = {}, GGMLQuantizationType.Q8_0
    for name, w in named(MODELS["llama"], model).items():
        values = w.detach().numpy()
        if w.ndim > 1:
            with np.errstate(all="ignore"):
                values = quants.dequantize(quants.quantize(values, kind), kind)
        found[name] = torch.from_numpy(np.array(values))
    return found | _metadata(model.config)


def _metadata(config: Any) -> Mapping[str, Tensor]:
    said = {
        "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads, "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    return {f"llama.{key}": torch.tensor(float(value)) for key, value in said.items()}


# ------------------------------------------------------------------------------- experts


def read_ct_packed(path: Path) -> Named:
    """What compressed-tensors decompresses, in the dtype of the model."""
    from tests.torture.readers import read_compressed

    found = read_compressed(path)
    kind = dtype_of(path, torch.float16)
    return {k: v.to(kind) if k.endswith("_proj.weight") else v for k, v in found.items()}


def read_experts_as_modules(path: Path) -> Named:
    """gpt-oss' experts as transformers decodes them, each a linear layer of its own."""
    from tests.torture.readers import read_mxfp4

    found = {}
    for name, w in read_mxfp4(path).items():
        stem, last = name.rpartition(".")[::2]
        for expert, values in enumerate(w):
            if last == "gate_up_proj":
                found[f"{stem}.{expert}.gate_proj.weight"] = values[:, 0::2].t()
                found[f"{stem}.{expert}.up_proj.weight"] = values[:, 1::2].t()
            else:
                found[f"{stem}.{expert}.{last}.weight"] = values.t()
    return {name: w.contiguous() for name, w in found.items()}


def read_modules_as_experts(path: Path) -> Named:
    """Linear layers of compressed-tensors, stacked as gpt-oss has its experts; each must be there."""
    from tests.torture.readers import read_compressed

    found = dict(read_compressed(path))
    sizes = config_of(path)
    stacked = {}
    for layer in range(sizes["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp.experts"
        each: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
        for expert in range(sizes["num_local_experts"]):
            for name, values in each.items():
                values.append(found.pop(f"{stem}.{expert}.{name}.weight").t())
        pairs = zip(each["gate_proj"], each["up_proj"], strict=True)
        both = [torch.stack(pair, -1).flatten(1) for pair in pairs]
        stacked[f"{stem}.gate_up_proj"] = torch.stack(both)
        stacked[f"{stem}.down_proj"] = torch.stack(each["down_proj"])
    if found:
        raise ValueError(f"not of a layer: {sorted(found)[:3]}")
    return {name: w.contiguous() for name, w in stacked.items()}


# ------------------------------------------------------------------------------- --as


def read_given_back(path: Path) -> Named:
    """What `work.pt` is as `release`, a GPTQ: codes that were not changed, and others rounded to the nearest,
    by the formula of GPTQ's `Quantizer`, as the release's config says."""
    from tests.torture.readers import read_torch

    release, work = read_gptq(path / "release"), read_torch(path / "work.pt")
    if release.keys() != work.keys():
        raise ValueError(f"other names: {sorted(release.keys() ^ work.keys())[:3]}")
    stored, said = read_hf(path / "release"), config_of(path / "release")["quantization_config"]
    found = {}
    for name, w in work.items():
        old = release[name]
        if w.shape != old.shape:
            raise ValueError(f"{name}: {w.shape}, {old.shape}")
        scales = stored.get(f"{name.removesuffix('weight')}scales")
        if torch.equal(w, old.to(w.dtype)):
            found[name] = old
        else:
            found[name] = (
                w.to(old.dtype) if scales is None else _rounded(w, scales, said).to(old.dtype)
            )
    return found


def _rounded(w: Tensor, stored: Tensor, said: Mapping[str, Any]) -> Tensor:
    """The values of codes of `w` [out, in]; `stored` [groups, out] were its scales."""
    most = 2 ** said["bits"] - 1
    groups = w.float().unflatten(1, (len(stored), -1))
    low, high = (
        edge.clamp(*to)
        for edge, to in zip(groups.aminmax(dim=2, keepdim=True), ((None, 0), (0,)), strict=True)
    )
    if said["sym"] is True:
        high = torch.maximum(-low, high)
        low = -high
    empty = high == low
    low, high = torch.where(empty, -1, low), torch.where(empty, 1, high)
    scales = ((high - low) / most).clamp(min=torch.finfo(stored.dtype).tiny)
    first = said.get("checkpoint_format") != "gptq_v2"
    zero = (
        torch.round(-low / scales).clamp(int(first), most)
        if said["sym"] is not True
        else (most + 1) // 2
    )
    scales = scales.to(stored.dtype)
    codes = (torch.round(groups / scales.float()) + zero).clamp(0, most) - zero
    return (codes.int().to(scales.dtype) * scales).flatten(1)  # an integer 0 has no sign
