"""Writes what is beside this file: a tiny Llama in GPTQ's and AWQ's forms, each with the digests of its values.

    pip install --target EXTRAS --no-deps auto-round py-cpuinfo datasets pyarrow dill multiprocess \\
        pandas python-dateutil pytz tzdata six xxhash aiohttp
    PYTHONPATH=EXTRAS python tests/golden/gptq/make_gptq.py

auto-round 0.16.1 was run with torch 2.13 and transformers 5.23 on the CPU. It writes the whole checkpoints
by plain rounding (iters 0). The digests are those of the weights that its own modules multiply by: `QuantLinear`
(auto_round_extension.torch), and for AWQ `dequantize_gemm`, as SHA-256 of the values of each weight [out, in] in
the dtype of the scales, and of the same cast to bfloat16. `gptq-4-v2` and `gptq-4-order` are the
first case rewritten here, since auto-round writes neither: zero points stored without the offset, and inputs in
another order of groups, both decoded by its modules.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
CASES: dict[str, tuple[str, int, bool, str]] = {
    "gptq-4": ("auto_gptq", 4, True, "bfloat16"),
    "gptq-4-asym": ("auto_gptq", 4, False, "float16"),
    "gptq-2": ("auto_gptq", 2, False, "float16"),
    "gptq-3": ("auto_gptq", 3, True, "float16"),
    "gptq-8": ("auto_gptq", 8, True, "float16"),
    "awq-4": ("auto_awq", 4, True, "float16"),
    "awq-4-asym": ("auto_awq", 4, False, "bfloat16"),
}
GROUP = 32


def write(form: str, bits: int, symmetric: bool, dtype: str, into: Path) -> None:
    library: Any = importlib.import_module("auto_round")
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.config._name_or_path = folder
        words = tokenizers.models.WordLevel({str(i): i for i in range(32)}, unk_token="0")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words)
        )
        rounder = library.AutoRound(
            model, tokenizer, bits=bits, group_size=GROUP, sym=symmetric, iters=0,
            device_map="cpu", disable_opt_rtn=True,
        )  # fmt: skip
        rounder.quantize_and_save(folder, format=form)
        made = next(Path(folder).rglob("model.safetensors")).parent
        into.mkdir(parents=True, exist_ok=True)
        for file in ("model.safetensors", "config.json"):
            shutil.copy(made / file, into / file)


def rewrite(into: Path, change: str) -> None:
    """Turn a copy of the first case into the second version, or put its inputs into another order."""
    into.mkdir(exist_ok=True)
    config = json.loads((HERE / "gptq-4" / "config.json").read_text())
    state = load_file(HERE / "gptq-4" / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for key, value in state.items():
        if change == "v2" and key.endswith(".qzeros"):
            state[key] = value + 0x11111111  # each zero point is 7, so none overflows
        if change == "order" and key.endswith(".g_idx"):
            state[key] = value[torch.randperm(len(value), generator=draw)]
    stated = config["quantization_config"]
    stated |= {"checkpoint_format": "gptq_v2"} if change == "v2" else {"desc_act": True}
    save_file(state, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text(json.dumps(config, indent=2))


def values(state: dict[str, Tensor], stem: str, kind: str, bits: int) -> Tensor:
    """The weight [out, in] as the library computes it, in the dtype of the scales."""
    qweight, scales = state[f"{stem}qweight"], state[f"{stem}scales"]
    zeros = state[f"{stem}qzeros"]
    if kind == "awq":
        library: Any = importlib.import_module("auto_round.export.export_to_awq.utils")
        turned: Tensor = library.dequantize_gemm(qweight, zeros, scales, bits, GROUP)
        return turned.t().contiguous()
    module = "qlinear_torch" if kind == "v2" else "qlinear_torch_zp"
    library = importlib.import_module(f"auto_round_extension.torch.{module}")
    width, some = (
        len(state[f"{stem}g_idx"]),
        32,
    )  # of more outputs than inputs it reads the wrong ones
    unit, made = torch.eye(width, dtype=scales.dtype), []
    for row in range(0, scales.shape[1], some):
        layer = library.QuantLinear(bits, GROUP, width, some, bias=False, g_idx=True)
        layer.qweight, layer.scales = qweight[:, row : row + some], scales[:, row : row + some]
        layer.qzeros = zeros[:, row * bits // 32 : (row + some) * bits // 32]
        layer.g_idx = state[f"{stem}g_idx"]
        with patch.object(
            torch, "matmul", lambda _, weight: weight
        ):  # a product loses the sign of 0
            made.append(layer(unit).t())
    return torch.cat(made).contiguous()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(folder: Path, kind: str) -> dict[str, list[str]]:
    state = load_file(folder / "model.safetensors")
    bits = json.loads((folder / "config.json").read_text())["quantization_config"]["bits"]
    found = {}
    for stem in sorted(key.removesuffix("qweight") for key in state if key.endswith("qweight")):
        made = values(state, stem, kind, bits)
        found[f"{stem}weight"] = [digest(made), digest(made.to(torch.bfloat16))]
    return found


def main() -> None:
    truth = {}
    for name, (form, bits, symmetric, dtype) in CASES.items():
        write(form, bits, symmetric, dtype, HERE / name)
        truth[name] = digests(HERE / name, "awq" if form == "auto_awq" else "v1")
    for change in ("v2", "order"):
        rewrite(HERE / f"gptq-4-{change}", change)
        kind = "v2" if change == "v2" else "v1"
        truth[f"gptq-4-{change}"] = digests(HERE / f"gptq-4-{change}", kind)
    (HERE / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
