"""Writes what is beside this file: a tiny Llama in MXFP4 as Quark 0.13 exported it, and the digests of its values.

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


def main() -> None:
    quark: Any = importlib.import_module("quark.torch")
    settings: Any = importlib.import_module("quark.torch.quantization.config.config")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).bfloat16().eval()
    spec = settings.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    layers = settings.QLayerConfig(weight=spec)
    quantizer = quark.ModelQuantizer(
        settings.QConfig(global_quant_config=layers, exclude=["lm_head"])
    )
    made = quantizer.quantize_model(model, [torch.ones(1, 4, dtype=torch.long)])
    model = quantizer.freeze(made)
    truth = {
        f"{name}.weight": hashlib.sha256(
            module.weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    quark.export_safetensors(model, output_dir=str(HERE / "mxfp4"))
    (HERE / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
