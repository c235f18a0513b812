"""HQQ's weights, quantized and saved by hqq itself: bit-equal to its own `dequantize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptmap
from ckptmap.errors import PlanError, SourceError
from tests.support.bnb_cases import same

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"


def layers(
    nbits: float, axis: int, dtype: torch.dtype = torch.float16, group: int | None = 64, **more: Any
) -> nn.ModuleDict:
    """Two layers by hqq: one with a bias, one whose rows no group divides; and a norm."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    torch.manual_seed(7)
    made = nn.ModuleDict()
    for name, shape in (("a", (128, 80)), ("b", (96, 64))):
        linear = nn.Linear(*shape, bias=name == "a").to(dtype)
        config = BaseQuantizeConfig(nbits=nbits, group_size=group, axis=axis, **more)
        made[name] = HQQLinear(linear, config, compute_dtype=dtype, device="cpu")
    made["norm"] = nn.LayerNorm(64).to(dtype)
    return made


def written(folder: Path, model: nn.Module) -> Tensors:
    """Save as hqq's `save_to_safetensors` does, and return the values."""
    folder.mkdir()
    save_file(model.state_dict(), folder / FILE, {"format": "pt"})
    truth = {k: v for k, v in model.state_dict().items() if k.startswith("norm.")}
    truth["a.bias"] = model["a"].bias  # type: ignore[index, assignment]
    return truth | {f"{n}.weight": model[n].dequantize() for n in "ab"}  # type: ignore[index, operator]


def assert_values(path: Path, truth: Tensors) -> None:
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth)
        assert ckpt["a.weight"].encoding == ckpt["b.weight"].encoding == "hqq"
        for key, wanted in truth.items():
            same(ckpt[key].read(), wanted.detach())
        for rows, columns in ((slice(3, 4), slice(5, 77)), (slice(37, 43), slice(0, 128))):
            same(ckpt["a.weight"][rows, columns], truth["a.weight"][rows, columns])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1.58, 1])
def test_every_width(nbits: float, axis: int, tmp_path: Path) -> None:
    assert_values(tmp_path / "in", written(tmp_path / "in", layers(nbits, axis)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("nbits", [4, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_dtype(dtype: torch.dtype, nbits: int, axis: int, tmp_path: Path) -> None:
    assert_values(tmp_path / "in", written(tmp_path / "in", layers(nbits, axis, dtype)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "more", [{"group": None}, {"group": 16}, {"group": 32, "view_as_float": True}]
)
def test_every_group(more: dict[str, Any], axis: int, tmp_path: Path) -> None:
    """Whole rows or columns; groups that lie in several rows; and words that are stored as floats."""
    assert_values(tmp_path / "in", written(tmp_path / "in", layers(4, axis, **more)))


def test_decoded_by_conversion_and_kept_by_others(tmp_path: Path) -> None:
    truth = written(tmp_path / "in", layers(4, 1))
    ckptmap.convert(tmp_path / "in", tmp_path / "dense", to="hf-fp16")
    for key, value in load_file(tmp_path / "dense" / FILE).items():
        same(value, truth[key].detach())
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=3)
    assert_values(tmp_path / "dcp", truth)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    before, after = (load_file(tmp_path / name / FILE) for name in ("in", "out"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        same(value, after[key])


def test_hqq_reads_what_is_moved(tmp_path: Path) -> None:
    from hqq.core.quantize import HQQLinear

    truth = written(tmp_path / "in", layers(3, 0))
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    state = load_file(tmp_path / "out" / FILE)
    linear = HQQLinear(None, None, compute_dtype=torch.float16, device="cpu")
    linear.load_state_dict({k[2:]: v for k, v in state.items() if k.startswith("a.")})
    same(linear.dequantize(), truth["a.weight"])


def _text(value: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)


BAD: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "packing": (lambda s: s.update({"a.packing": _text("2bit_u8")}), "nbits 4 and packing '2bit_u8'"),
    "dtype": (lambda s: s.update({"a.compute_dtype": _text("torch.int8")}), "compute_dtype 'torch.int8'"),
    "axis": (lambda s: s.update({"a.axis": torch.tensor(0, dtype=torch.int32)}), "hqq part 'W_q'"),
    "group": (lambda s: s.update({"a.group_size": torch.tensor(-64, dtype=torch.int32)}), "group_size -64"),
    "divides": (lambda s: s.update({"a.group_size": torch.tensor(63, dtype=torch.int32)}), "groups of 63"),
    "shape": (lambda s: s.update({"a.shape": torch.tensor([80, 1 << 61])}), "hqq"),
    "kind": (lambda s: s.update({"a.nbits": torch.tensor(4)}), "nbits, expected int32"),
    "scale": (lambda s: s.update({"a.scale": s["a.scale"][:-1].clone()}), "hqq part 'scale'"),
    "control": (lambda s: s.update({"a.packing": _text("4bit\x1b[2J")}), r"'4bit\\x1b"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_metadata_that_does_not_fit(name: str, tmp_path: Path) -> None:
    written(tmp_path / "in", layers(4, 1))
    edit, said = BAD[name]
    state = load_file(tmp_path / "in" / FILE)
    edit(state)
    save_file(state, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.plan(tmp_path / "in", "hf-bf16")
    assert caught.value.code == "CKM115" and "a.weight" in str(caught.value)


@pytest.mark.parametrize("flag", ["quant_scale", "channel_wise"])
def test_forms_that_are_not_decoded_are_named(flag: str, tmp_path: Path) -> None:
    """Scales that are quantized themselves, which older releases made: only the flag is imitated here."""
    written(tmp_path / "in", layers(4, 1))
    state = load_file(tmp_path / "in" / FILE)
    state[f"a.{flag}"] = 1 - state[f"a.{flag}"]
    save_file(state, tmp_path / "in" / FILE, {"format": "pt"})
    plan = ckptmap.plan(tmp_path / "in", "hf-bf16")
    assert {item.key for item in plan.unresolved} == {
        key for key in state if key.startswith("a.") and key != "a.bias"
    }
    assert all("HQQ" in item.reason for item in plan.unresolved)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    for key, value in load_file(tmp_path / "out" / FILE).items():
        same(value, state[key])


def test_metadata_without_codes_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "in", layers(4, 1))
    state = load_file(tmp_path / "in" / FILE)
    del state["a.W_q"]
    save_file(state, tmp_path / "in" / FILE, {"format": "pt"})
    with pytest.raises(
        PlanError, match="is part of a quantized weight that is not whole"
    ) as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out.pt", to="full")
    assert caught.value.code == "CKM202" and "W_q" in str(caught.value)
