"""Codes in blocks follow their tensor when it is transposed, cut or stacked: no weight is quantized twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from torchao.prototype.mx_formats.mx_tensor import MXTensor

import ckptmap
from ckptmap.core.quantized_codes import CodeGrid
from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.mapping.moved_codes import by_blocks
from ckptmap.tensors import TensorInfo
from tests.support.bnb_cases import same
from tests.support.gpt_oss import GATE, Tensors, quantized, write, written

LAYER = "model.layers.0.mlp.experts"
MODULES = """
schema = 1
family = "gpt_oss"
scheme = "modules"
summary = "experts as linear modules of their own, as llm-compressor quantizes them"

[dims]
n = "num_hidden_layers"
i = "hidden_size"
f = "intermediate_size"
e = "num_local_experts"

[[rule]]
hf = "model.layers.{n}.mlp.experts.gate_up_proj :: e i (f two)"
modules = [
  "model.layers.{n}.mlp.experts.{e}.gate_proj.weight :: f i @ two[0]",
  "model.layers.{n}.mlp.experts.{e}.up_proj.weight :: f i @ two[1]",
]

[[rule]]
hf = "model.layers.{n}.mlp.experts.down_proj :: e f i"
modules = "model.layers.{n}.mlp.experts.{e}.down_proj.weight :: i f"
"""


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Path, str]:
    """The experts of a gpt-oss, and a mapping file that makes modules of them."""
    names = tmp_path / "modules.toml"
    names.write_text(MODULES)
    stored = {
        key: t for key, t in quantized()[0].items() if ".experts." in key and "bias" not in key
    }
    return write(tmp_path / "in", stored), str(names)


def truth(name: str, expert: int) -> torch.Tensor:
    """A module's weight [out, in] as transformers decodes the stack."""
    whole = quantized()[1]
    if name == "down_proj":
        return whole[f"{LAYER}.down_proj"][expert].t()
    return whole[GATE][expert, :, ("gate_proj", "up_proj").index(name) :: 2].t()


def ct_decoded(parts: Tensors, stem: str) -> torch.Tensor:
    """The weight as compressed-tensors decodes it."""
    compressor = BaseCompressor.load_from_registry("mxfp4-pack-quantized")
    state = {k.removeprefix(f"{stem}."): v for k, v in parts.items() if k.startswith(f"{stem}.")}
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    decoded: torch.Tensor = compressor.decompress(state, scheme)["weight"]
    return decoded


def ao_decoded(parts: Tensors, stem: str) -> torch.Tensor:
    """The weight as torchao decodes it."""
    codes, scale = parts[f"{stem}._weight_qdata"], parts[f"{stem}._weight_scale"]
    tensor = MXTensor(codes, scale, torch.float4_e2m1fn_x2, 32, torch.bfloat16, None, None, False)
    return tensor.dequantize(torch.bfloat16)


@pytest.mark.parametrize("to", ["hf-ct-mxfp4", "full-torchao-mxfp4"])
def test_experts_of_gpt_oss_as_modules_and_back(
    to: str, experts: tuple[Path, str], tmp_path: Path
) -> None:
    """Transposed, taken apart and stacked again: the destination's library decodes equal values."""
    is_ct = to == "hf-ct-mxfp4"
    source, names = experts
    chosen = ("*_proj.weight",)
    report = ckptmap.convert(
        source, tmp_path / "out", to=to, names=names, encode=chosen, max_memory="8MiB"
    )
    assert report.fidelity == {"exact": 12}, report.fidelity
    parts = written(tmp_path / "out") if is_ct else torch.load(tmp_path / "out")
    decoded = ct_decoded if is_ct else ao_decoded
    for name in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(4):
            same(decoded(parts, f"{LAYER}.{expert}.{name}"), truth(name, expert).contiguous())
    report = ckptmap.convert(
        tmp_path / "out", tmp_path / "back", to="hf-mxfp4", names_from=names, names="hf",
        config_from=str(source),
    )  # fmt: skip
    assert report.fidelity == {"exact": 2}, report.fidelity
    before, after = written(source), written(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(after[key], value)


def test_every_move_that_keeps_blocks_whole_and_no_other() -> None:
    """By blocks of 2 x 4 elements in a tensor of [4, 8]; two elements of a row in one entry."""
    grid = CodeGrid("c", TensorInfo((4, 4), "uint8"), (2, 2))
    info = TensorInfo((4, 8), "bfloat16")

    def moved(src: StridedBox, dst: StridedBox, shape: tuple[int, ...]) -> CodeGrid | None:
        found = by_blocks({"w": grid}, {"w": info}, [Piece("w", src, dst)], TensorInfo(shape, "x"))
        return None if found is None else found.grid

    whole = StridedBox((0, 0), (4, 8), (0, 1), (1, 1))
    turned = StridedBox((0, 0), (4, 8), (1, 0), (1, 1))
    assert moved(whole, turned, (8, 4)) == CodeGrid(
        "c", TensorInfo((4, 4), "uint8"), (2, 2), axes=(1, 0)
    )
    assert moved(whole, whole, (4, 8)) == grid
    half = StridedBox((2, 4), (2, 4), (0, 1), (1, 1))
    there = StridedBox((0, 0), (2, 4), (0, 1), (1, 1))
    assert moved(half, there, (2, 4)) == CodeGrid("c", TensorInfo((2, 2), "uint8"), (2, 2))
    pairs = StridedBox((0, 0), (2, 2, 8), (0, 0, 1), (2, 1, 1))  # rows 0 1 | 2 3
    exchanged = StridedBox((0, 0, 0), (2, 2, 8), (1, 0, 2), (1, 1, 1))
    assert moved(pairs, exchanged, (2, 2, 8)) == CodeGrid(
        "c", TensorInfo((2, 2, 4), "uint8"), (2, 1, 2)
    )
    for src, dst, shape in [
        (StridedBox((1, 0), (2, 8), (0, 1), (1, 1)), StridedBox((0, 0), (2, 8), (0, 1), (1, 1)), (2, 8)),
        (StridedBox((0, 2), (4, 4), (0, 1), (1, 1)), StridedBox((0, 0), (4, 4), (0, 1), (1, 1)), (4, 4)),
        (StridedBox((0, 0), (2, 8), (0, 1), (2, 1)), StridedBox((0, 0), (2, 8), (0, 1), (1, 1)), (2, 8)),
        (StridedBox((0, 0), (1, 8), (0, 1), (1, 1)), StridedBox((0, 0), (1, 8), (0, 1), (1, 1)), (1, 8)),
        (whole, StridedBox((0,), (4, 8), (0, 0), (8, 1)), (32,)),
        (whole, StridedBox((0,), (4, 8), (0, 0), (1, 4)), (32,)),
    ]:  # fmt: skip
        assert moved(src, dst, shape) is None, (src, dst)
