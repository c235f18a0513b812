"""Writes what is beside this file: a tiny Llama in several forms as Quark 0.13 exported it, and the digests of its values.

    pip install --target EXTRAS --no-deps amd-quark==0.13 onnx onnxscript onnx_ir onnxslim ml_dtypes protobuf datasets \\
        multiprocess dill xxhash pyarrow pandas python-dateutil six evaluate joblib plotly scipy zstandard pydantic \\
        pydantic-core annotated-types typing-inspection rich sympy colorama
    PYTHONPATH=EXTRAS python tests/golden/quark/make_quark.py

It ran on the CPU. The digests are SHA-256 of the bfloat16 values that its own frozen model computes with.
ModelOpt 0.47 exports `MXFP4_DEFAULT_CFG` with the same names, dtypes and order of codes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent


def specs(settings: Any) -> dict[str, Any]:
    integers = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
    groups = {**integers, "ch_axis": -1, "group_size": 32}
    return {
        "mxfp4": settings.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "fp8-rows": settings.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        "int8-rows": settings.Int8PerChannelSpec(symmetric=True, ch_axis=0, **integers),
        "int4": settings.Int4PerGroupSpec(symmetric=True, **groups),
        "uint4": settings.Uint4PerGroupSpec(symmetric=False, **groups),
    }


def main() -> None:
    quark: Any = importlib.import_module("quark.torch")
    settings: Any = importlib.import_module("quark.torch.quantization.config.config")
    truths = {}
    for name, described in specs(settings).items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config).bfloat16().eval()
        layers = settings.QLayerConfig(weight=described.to_quantization_spec())
        quantizer = quark.ModelQuantizer(
            settings.QConfig(global_quant_config=layers, exclude=["lm_head"])
        )
        made = quantizer.quantize_model(model, [torch.ones(1, 4, dtype=torch.long)])
        model = quantizer.freeze(made)
        truths[name] = {
            f"{module_name}.weight": hashlib.sha256(
                module.weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for module_name, module in model.named_modules()
            if module_name.endswith("_proj")
        }
        quark.export_safetensors(model, output_dir=str(HERE / name))
    (HERE / "truth.json").write_text(json.dumps(truths.pop("mxfp4"), indent=1) + "\n")
    (HERE / "truth_of_integers.json").write_text(json.dumps(truths, indent=1) + "\n")


if __name__ == "__main__":
    main()
