"""Writes what is beside this file: a tiny Llama as AutoGPTQ 0.4.2 saved it, and the digests of its values.

    pip install --target EXTRAS --no-deps auto-gptq==0.4.2 transformers==4.33.3 tokenizers==0.13.3 \\
        huggingface_hub==0.17.3 "fsspec<2024" accelerate==0.23.0 peft==0.5.0 filelock requests
    PYTHONPATH=EXTRAS python tests/golden/autogptq/make_autogptq.py

AutoGPTQ quantized the model by GPTQ itself and wrote all files; it was run on the CPU, so its checks for a GPU are
answered here. This release states nothing in config.json, all in quantize_config.json, names the weights
`gptq_model-4bit-32g.safetensors`, and adds a bias of zeros to each layer that has none. The digests are those of
its own `QuantLinear` on the CPU, which multiplies the unit matrix: SHA-256 of the values of each weight [out, in]
in float16, and of the same cast to bfloat16.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent
CASES: dict[str, dict[str, object]] = {
    "plain": {"bits": 4, "group_size": 32, "desc_act": False},
    "order": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
}
FILE = "gptq_model-4bit-32g.safetensors"


def library() -> Any:
    """AutoGPTQ, without the packages that it imports for its evaluation alone."""
    importlib.import_module("transformers")
    for name in ("datasets", "rouge"):
        module: Any = ModuleType(name)
        module.load_dataset = module.Rouge = None
        module.DatasetDict = module.IterableDatasetDict = dict
        sys.modules[name] = module
    found: Any = importlib.import_module("auto_gptq")
    importlib.import_module("auto_gptq.modeling._base").CUDA_0 = torch.device("cpu")  # type: ignore[attr-defined]
    return found


def write(auto_gptq: Any, dense: str, settings: dict[str, object], into: Path) -> None:
    config = auto_gptq.BaseQuantizeConfig(**settings)
    with patch("torch.cuda.is_available", lambda: True):
        model = auto_gptq.AutoGPTQForCausalLM.from_pretrained(dense, config)
    model.model.float()  # the CPU had no kernels for half precision when this was released
    draw = torch.Generator().manual_seed(1)
    examples = [
        {
            "input_ids": torch.randint(0, 32, (1, 48), generator=draw),
            "attention_mask": torch.ones(1, 48, dtype=torch.long),
        }
        for _ in range(8)
    ]
    with patch("torch.cuda.synchronize", lambda: None):
        model.quantize(examples, cache_examples_on_gpu=False)
    model.model.half()
    model.model.config.torch_dtype = torch.float16
    model.model.config._name_or_path = ""
    model.save_quantized(str(into), use_safetensors=True)
    (into / FILE).chmod(0o644)


def values(state: dict[str, Tensor], stem: str) -> Tensor:
    """The weight [out, in] as AutoGPTQ computes it."""
    module: Any = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    width, rows = len(state[f"{stem}g_idx"]), state[f"{stem}scales"].shape[1]
    layer = module.QuantLinear(4, 32, width, rows, False)
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        setattr(layer, part, state[stem + part])
    with patch.object(torch, "matmul", lambda _, weight: weight):  # a product loses the sign of 0
        return layer(torch.eye(width, dtype=torch.float16)).t().contiguous()  # type: ignore[no-any-return]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    auto_gptq = library()
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    truth = {}
    with tempfile.TemporaryDirectory() as dense:
        transformers.LlamaForCausalLM(config).half().save_pretrained(dense)
        for name, settings in CASES.items():
            shutil.rmtree(HERE / name, ignore_errors=True)
            write(auto_gptq, dense, settings, HERE / name)
            state = load_file(HERE / name / FILE)
            stems = sorted(k.removesuffix("qweight") for k in state if k.endswith("qweight"))
            made = {f"{stem}weight": values(state, stem) for stem in stems}
            truth[name] = {k: [digest(v), digest(v.to(torch.bfloat16))] for k, v in made.items()}
    (HERE / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
