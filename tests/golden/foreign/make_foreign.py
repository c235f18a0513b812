"""Writes what is beside this file: one layer by each of some libraries that no test installs.

    pip install --target EXTRAS --no-deps hqq optimum-quanto ninja termcolor gguf auto-round \\
        py-cpuinfo datasets pyarrow dill multiprocess pandas python-dateutil pytz tzdata six
    PYTHONPATH=EXTRAS python tests/golden/foreign/make_foreign.py [NAME ...]

hqq 0.2.8, optimum-quanto 0.2.7, auto-round 0.16.1 (which packs as GPTQ and as AWQ; autoawq builds CUDA
kernels to be installed), gptqmodel 7.7 (its package unpacked, not installed) and gguf 0.19.0 were run with
torch 2.13 on the CPU.

`sentencepiece.model` is by sentencepiece 0.2.3. `sentencepiece.json` has the files that lay beside it, and the keys
that llama.cpp's convert_hf_to_gguf.py (of llama-cpp-python 0.3.36) then wrote for a Llama of 320 rows.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent


def layer(rows: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, rows), nn.LayerNorm(rows)).half()


def hqq() -> dict[str, Tensor]:
    library: Any = importlib.import_module("hqq.core.quantize")
    config = library.BaseQuantizeConfig(nbits=4, group_size=32)
    model = layer()
    made = library.HQQLinear(model[0], config, compute_dtype=torch.float16, device="cpu")  # type: ignore[index]
    norm = {f"1.{key}": value for key, value in model[1].state_dict().items()}  # type: ignore[index]
    return {f"0.{key}": value for key, value in made.state_dict().items()} | norm


def quanto(kind: str) -> dict[str, Tensor]:
    library: Any = importlib.import_module("optimum.quanto")
    model = layer()
    library.quantize(model, weights=getattr(library, kind))
    library.freeze(model)
    state: dict[str, Tensor] = model.state_dict()
    return state


def grid(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [out, groups] of 4 bits."""
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min(1e-8)
    return scales, (-low / scales).round().clamp(0, 15)


def packed(name: str) -> dict[str, Tensor]:
    rows = size = 32  # its packer of zero points needs 32 rows
    model = layer(rows)
    linear: Any = model[0]  # type: ignore[index]
    scales, zeros = grid(linear.weight.data, size)
    if name == "gptq":
        library: Any = importlib.import_module("auto_round_extension.torch.qlinear_torch")
        made = library.QuantLinear(4, size, 128, rows, bias=True, g_idx=True)
        made.device = torch.device("cpu")  # as its exporter sets it
        made.pack(linear, scales, zeros)
    else:
        library = importlib.import_module("auto_round.export.export_to_awq.utils")
        kind = library.WQLinear_GEMM
        turned = scales.t().contiguous(), zeros.t().contiguous()
        made = kind.from_linear(linear, 4, size, scales=turned[0], zeros=turned[1], device="cpu")
    norm = {f"1.{key}": value for key, value in model[1].state_dict().items()}  # type: ignore[index]
    return {f"0.{key}": value.contiguous() for key, value in made.state_dict().items()} | norm


def planes() -> dict[str, Tensor]:
    """Layers of 3, 5, 6 and 7 bits in gptqmodel's planes, each with the values that its module multiplies by."""
    library: Any = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    form: Any = importlib.import_module("gptqmodel.quantization").FORMAT.GPTQ_P
    state: dict[str, Tensor] = {}
    for bits in (3, 5, 6, 7):
        torch.manual_seed(bits)
        linear = nn.Linear(96, 64, bias=False).half().requires_grad_(False)
        groups = linear.weight.float().unflatten(1, (-1, 32))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
        zeros = (-low / scales).round().clamp(0, 2**bits - 1)
        made = library.TorchLinear(
            bits=bits, group_size=32, sym=False, desc_act=False, in_features=96, out_features=64, format=form
        )  # fmt: skip
        made.pack_original(linear, scales, zeros, torch.arange(96, dtype=torch.int32) // 32)
        state |= {f"layers.{bits}.fc.{key}": value for key, value in made.state_dict().items()}
        made.post_init()
        state[f"values.{bits}"] = made.dequantize_weight().t().contiguous().half()
    return state


def gguf(file: Path) -> None:
    library: Any = importlib.import_module("gguf")
    writer = library.GGUFWriter(str(file), "llama")
    kind = library.GGMLQuantizationType.Q8_0
    values = library.quants.quantize(layer()[0].weight.detach().float().numpy(), kind)  # type: ignore[index]
    writer.add_tensor("blk.0.ffn_up.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece(file: Path) -> None:
    library: Any = importlib.import_module("sentencepiece")
    words = ("the cat", "sat on", "a mat", "théâtre", "naïve", "12345", "of models", "and tokens")
    with file.open("wb") as out:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter([f"{a} {b}" for a in words for b in words]), model_writer=out,
            vocab_size=310, model_type="bpe", byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False,
            normalization_rule_name="identity", user_defined_symbols=["<tool>"], control_symbols=["<ctrl>"],
        )  # fmt: skip


def main() -> None:
    made = {"hqq": hqq, **{name: lambda name=name: packed(name) for name in ("gptq", "awq")}}
    made["gptq-planes"] = planes
    made |= {f"quanto-{k}": lambda k=k: quanto(k) for k in ("qint4", "qint8", "qfloat8")}
    for name in sys.argv[1:] or [*made, "gguf", "sentencepiece"]:
        if name == "gguf":
            gguf(HERE / "q8_0.gguf")
        elif name == "sentencepiece":
            sentencepiece(HERE / "sentencepiece.model")
        else:
            save_file(made[name](), HERE / f"{name}.safetensors")


if __name__ == "__main__":
    main()
