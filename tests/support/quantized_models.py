"""Small models that the libraries themselves quantized and saved, one of each form; and edited copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.quantization import Int8WeightOnlyConfig

import ckptmap
from tests.quantization.test_fp8_static import static
from tests.support import bnb_cases
from tests.support.int8_models import bnb_int8, compressed, dense, torchao_hf

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path], object]


def _ct(form: str, activations: QuantizationArgs | None = None, **args: object) -> Writer:
    return lambda path: compressed(path, QuantizationArgs(**args), form, activations)


WRITERS: dict[str, Writer] = {
    "ct-packed": _ct(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "ct-int8": _ct(
        "int-quantized",
        QuantizationArgs(num_bits=8, strategy="tensor"),
        num_bits=8,
        strategy="channel",
    ),
    "ct-fp8": _ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-nvfp4": _ct(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "fp8": static,
    "bnb-nf4": lambda path: bnb_cases.quantized(
        dense(path.parent / "dense"), "nf4", False
    ).save_pretrained(path),
    "bnb-int8": lambda path: bnb_int8(path, torch.float16),
    "torchao": lambda path: torchao_hf(path, Int8WeightOnlyConfig(version=2)),
    "nf4": lambda path: ckptmap.convert(dense(path.parent / "dense"), path, to="hf-nf4"),
}


def edited(source: Path, to: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of a checkpoint with other tensors in its only file, and the same metadata."""
    shutil.copytree(source, to)
    file = next(to.glob("*.safetensors"))
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)
    return to


def reconfigured(source: Path, to: Path, change: Mapping[str, object]) -> Path:
    """A copy of a checkpoint whose config.json states something else of its quantization."""
    shutil.copytree(source, to)
    file = to / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    return to
