"""gpt-oss' MXFP4: we decode it as transformers does, write what it loads, and give canonical codes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptmap
from ckptmap.errors import PlanError, RunError, SourceError
from tests.support.bnb_cases import same
from tests.support.gpt_oss import GATE, Tensors, logits, quantized, write, written
from tests.support.merge_cases import adapted, save_adapter

BOXES = [(slice(1, 3), slice(5, 41), slice(3, 50)), (slice(0, 1), slice(63, 64), slice(0, 192))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_and_exponent_as_transformers_decodes_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The dense tensors tell the dtype. 2^127 overflows, 2^-127 is subnormal."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(2, 1, 16)
    truth = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    dense = torch.zeros(4, dtype=dtype)
    save_file(
        {"w_blocks": blocks, "w_scales": scales, "norm.weight": dense}, tmp_path / "m.safetensors"
    )
    with ckptmap.open(tmp_path / "m.safetensors") as ckpt:
        assert ckpt["w"].encoding == "mxfp4" and ckpt["w"].shape == truth.shape
        same(ckpt["w"].read(), truth)
        for box in (
            (0, slice(30, 100), slice(7, 9)),
            (0, 33, slice(None)),
            (0, slice(0, 0), slice(3, 9)),
        ):
            same(ckpt["w"][box], truth[box])


@pytest.mark.parametrize("to", ["hf", "hf-bf16", "fsdp2", "fsdp2-bf16", "full-fp32"])
def test_moved_as_it_is_or_decoded(to: str, tmp_path: Path) -> None:
    write(tmp_path / "in")
    more = {"world_size": 2} if to.startswith("fsdp2") else {}
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=to, **more)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "in").ok
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt[GATE].encoding == ("dense" if "-" in to else "mxfp4")
        for key, wanted in quantized()[1].items():
            same(ckpt[key].read(), wanted.to(ckpt[key].torch_dtype))
            if wanted.ndim == 3:
                for box in BOXES:
                    same(ckpt[key][box], wanted.to(ckpt[key].torch_dtype)[box])
    if to.startswith("hf"):
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert ("quantization_config" in config) == (to == "hf")


def test_codes_come_back_and_transformers_loads_them(tmp_path: Path) -> None:
    """Random blocks of 32 have a code of 4 or 6, so they are canonical."""
    source = write(tmp_path / "in")
    ckptmap.convert(source, tmp_path / "ranks", to="fsdp2-bf16", world_size=2)
    ckptmap.convert(
        tmp_path / "ranks",
        tmp_path / "back",
        to="hf-mxfp4",
        config_from=str(source),
        max_memory="8MiB",
    )
    before, after = quantized()[0], written(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(after[key], value)
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_a_block_without_large_codes_gets_a_smaller_scale(tmp_path: Path) -> None:
    """Codes of at most 3 are not canonical: the values stay, and each has one more bit."""
    stored = dict(quantized()[0])
    stored[f"{GATE}_blocks"] = stored[f"{GATE}_blocks"] & 0xDD  # 0, 0.5, 2, 3 and their negatives
    write(tmp_path / "in", stored)
    ckptmap.convert(tmp_path / "in", tmp_path / "bf16", to="hf-bf16")
    ckptmap.convert(tmp_path / "bf16", tmp_path / "back", to="hf-mxfp4")
    after = written(tmp_path / "back")
    assert (after[f"{GATE}_scales"] < stored[f"{GATE}_scales"]).any()
    with ckptmap.open(tmp_path / "in") as left, ckptmap.open(tmp_path / "back") as right:
        assert torch.equal(left[GATE].read(), right[GATE].read()), "equal but for the sign of zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_of_the_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    """`downcast_to_mxfp_torch` needs triton; torchao's RCEIL has the same exponents and codes."""
    torch.manual_seed(3)
    weight = torch.randn(2, 96, 40) * torch.tensor([1.0, 1e-3])[:, None, None]
    weight[0, :32], weight[0, 40] = 0, torch.tensor([2.5, 5, 0.25, -3.5] * 10)
    weight = weight.to(dtype)
    save_file({"mlp.experts.gate_up_proj": weight}, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "out", to="hf-mxfp4")
    after = written(tmp_path / "out")
    turned = weight.transpose(1, 2).float().contiguous()
    scale, codes = to_mx(turned, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    same(after["mlp.experts.gate_up_proj_scales"], scale.view(torch.uint8))
    same(after["mlp.experts.gate_up_proj_blocks"].flatten(-2), codes)


def test_the_codes_of_a_square_matrix_are_not_taken_for_its_transpose(tmp_path: Path) -> None:
    """compressed-tensors has blocks along rows, gpt-oss along columns: the shapes alone do not tell."""
    weight = torch.randn(64, 64).bfloat16()
    save_file({"fc.weight": weight}, tmp_path / "in.safetensors")
    ckptmap.convert(tmp_path / "in.safetensors", tmp_path / "ct", to="hf-ct-mxfp4")
    plan = ckptmap.plan(tmp_path / "ct", "full-mxfp4", encode=("fc.weight",))
    assert plan.fidelities() == {"requantize": 1}


def test_what_it_cannot_hold_stays(tmp_path: Path) -> None:
    """transformers loads MXFP4 into gpt-oss alone; 33 rows are no blocks of 32; NaN has no code."""
    save_file({"mlp.experts.down_proj": torch.randn(2, 33, 8)}, tmp_path / "odd.safetensors")
    assert "blocks of 32" in str(ckptmap.plan(tmp_path / "odd.safetensors", "full-mxfp4"))
    stack = torch.randn(2, 32, 8)
    save_file({"model.layers.0.mlp.experts.down_proj": stack}, tmp_path / "m.safetensors")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3_vl_moe"}')  # stacked experts, too
    with pytest.raises(PlanError, match="gpt_oss alone") as caught:
        ckptmap.plan(tmp_path / "m.safetensors", "hf-mxfp4", config_from=str(config))
    assert caught.value.code == "CKM203"
    stack[0, 0, 0] = torch.nan
    save_file({"mlp.experts.down_proj": stack}, tmp_path / "nan.safetensors")
    with pytest.raises(RunError, match="finite values"):
        ckptmap.convert(tmp_path / "nan.safetensors", tmp_path / "out.pt", to="full-mxfp4")


def _cut(tensors: Tensors) -> None:
    tensors[f"{GATE}_scales"] = tensors[f"{GATE}_scales"][:, :-1].contiguous()


def _narrow(tensors: Tensors) -> None:
    tensors[f"{GATE}_blocks"] = tensors[f"{GATE}_blocks"][..., :8].contiguous()


def _flat(tensors: Tensors) -> None:
    tensors[f"{GATE}_blocks"] = tensors[f"{GATE}_blocks"].view(-1, 16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cut, r"part 'scale', expected uint8\[4, 192, 2\], found uint8\[4, 191, 2\]"),
        (_narrow, r"expected \[experts, rows, blocks, 16\]"),
        (_flat, r"expected \[experts, rows, blocks, 16\]"),
    ],
)
def test_parts_that_do_not_fit(
    change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    stored = dict(quantized()[0])
    change(stored)
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.open(write(tmp_path / "in", stored))
    assert caught.value.code == "CKM115" and str(tmp_path / "in") in caught.value.message


def test_an_exponent_of_nan_is_refused(tmp_path: Path) -> None:
    stored = dict(quantized()[0])
    scales = stored[f"{GATE}_scales"] = stored[f"{GATE}_scales"].clone()
    scales[2, 100, 1] = 255
    write(tmp_path / "in", stored)
    with pytest.raises(SourceError, match="255, which is NaN, in 1 of") as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "nothing is left of the run"
    ckptmap.convert(tmp_path / "in", tmp_path / "same", to="hf")
    same(written(tmp_path / "same")[f"{GATE}_scales"], scales)


def test_merged_and_loaded_as_its_bfloat16(tmp_path: Path) -> None:
    """An adapter of stacked experts, and a live model, see the values that transformers decodes."""
    source = write(tmp_path / "in")
    ckptmap.convert(source, tmp_path / "bf16", to="hf-bf16")
    model = GptOssForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptmap.load(source, model)
    for key, value in model.state_dict().items():
        same(value, quantized()[1][key])
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    wrapped = adapted(model, r=4, target_modules=["q_proj"], target_parameters=experts)
    save_adapter(wrapped, tmp_path / "adapter")
    for name in ("in", "bf16"):
        ckptmap.merge(tmp_path / name, tmp_path / "adapter", tmp_path / f"m-{name}", to="hf-bf16")
    merged = [written(tmp_path / f"m-{name}") for name in ("in", "bf16")]
    assert not torch.equal(merged[0][GATE], quantized()[1][GATE])
    for key, value in merged[0].items():
        same(value, merged[1][key])
