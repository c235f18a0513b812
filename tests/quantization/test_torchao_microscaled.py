"""torchao's MXTensor and NVFP4Tensor: decoded as `dequantize` does, and written as torchao reads them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)
from torchao.quantization import Float8Tensor
from torchao.quantization.granularity import PerRow

import ckptmap
from ckptmap.errors import SourceError
from tests.support.bnb_cases import same
from tests.support.int8_models import QUERY, dense, loaded, logits, plain, weights
from tests.support.paths import ROOT

Tensors = dict[str, torch.Tensor]
RCEIL = ScaleCalculationMode.RCEIL
FP4 = torch.float4_e2m1fn_x2


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Weights with outliers, a block of zeros, and a saturated one."""
    made = weights(shape or (136, 160), dtype, "heavy")
    made[..., 3, :32], made[..., 4, 32:64] = 0, made.abs().max()
    return made


def mx(weight: torch.Tensor, elements: torch.dtype, swizzled: bool) -> Any:
    return MXTensor.to_mx(weight, elements, 32, RCEIL, is_swizzled_scales=swizzled)


def nvfp4(weight: torch.Tensor, swizzled: bool, overall: bool = True) -> Any:
    scale = per_tensor_amax_to_scale(weight.abs().max()) if overall else None
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=swizzled)


MAKERS: dict[str, Callable[[torch.Tensor, bool], Any]] = {
    "torchao-mxfp8": lambda w, s: mx(w, torch.float8_e4m3fn, s),
    "torchao-mxfp8-e5m2": lambda w, s: mx(w, torch.float8_e5m2, s),
    "torchao-mxfp4": lambda w, s: mx(w, FP4, s),
    "torchao-nvfp4": nvfp4,
    "torchao-nvfp4 alone": lambda w, s: nvfp4(w, s, False),
}
BOXES = [
    (slice(5, 131), slice(3, 50)),
    (slice(129, 130), slice(159, 160)),
    (slice(0, 0), slice(0, 9)),
]


def pickle(path: Path, made: Any) -> Path:
    torch.save({"fc.weight": made, "fc.bias": torch.ones(3)}, path)
    return path


def flatten(path: Path, made: Any) -> Path:
    tensors, metadata = flatten_tensor_state_dict({"fc.weight": made, "fc.bias": torch.ones(3)})
    save_file(tensors, path, {"format": "pt", **metadata})
    return path


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_decoded_as_it_dequantizes(
    name: str, dtype: torch.dtype, swizzled: bool, tmp_path: Path
) -> None:
    made = MAKERS[name](values(dtype), swizzled)
    truth = made.dequantize()
    for file in (pickle(tmp_path / "m.pt", made), flatten(tmp_path / "m.safetensors", made)):
        with ckptmap.open(file) as ckpt:
            assert ckpt["fc.weight"].encoding == name.removesuffix(" alone")
            same(ckpt["fc.weight"].read(), truth)
            for box in BOXES:
                same(ckpt["fc.weight"][box], truth[box])


def test_experts_have_a_scale_each(tmp_path: Path) -> None:
    weight = values(torch.bfloat16, 3, 128, 64)
    scale = per_tensor_amax_to_scale(weight.abs().amax((1, 2))).view(3, 1, 1)
    made: Any = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=True)
    truth = made.dequantize()
    with ckptmap.open(flatten(tmp_path / "m.safetensors", made)) as ckpt:
        same(ckpt["fc.weight"].read(), truth)
        same(ckpt["fc.weight"][1:3, 7:9, 20:64], truth[1:3, 7:9, 20:64])


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("name", MAKERS)
def test_moved_and_given_back_to_torchao(name: str, swizzled: bool, tmp_path: Path) -> None:
    """A pickle becomes torchao's flattened form by way of ranks; its attributes stay."""
    made = MAKERS[name](values(torch.bfloat16, 128, 64), swizzled)
    pickle(tmp_path / "m.pt", made)
    ckptmap.convert(tmp_path / "m.pt", tmp_path / "ranks", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "hf", to="hf")
    state = unflattened(tmp_path / "hf")
    (again,) = (value for key, value in state.items() if key == "fc.weight")
    assert type(again) is type(made) and again.is_swizzled_scales == swizzled
    assert again.act_quant_kwargs == made.act_quant_kwargs
    same(again.dequantize(), made.dequantize())
    ckptmap.convert(tmp_path / "ranks", tmp_path / "bf16.pt", to="full-bf16")
    same(torch.load(tmp_path / "bf16.pt")["fc.weight"], made.dequantize())


def unflattened(path: Path) -> dict[str, Any]:
    with safe_open(path / "model.safetensors", "pt") as opened:
        found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        state, left = unflatten_tensor_state_dict(found, opened.metadata())
    assert not left
    return dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["torchao-mxfp8", "torchao-mxfp4", "torchao-nvfp4"])
def test_written_with_its_codes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = dense(tmp_path / "dense", dtype)
    ckptmap.convert(source, tmp_path / "out", to=f"hf-{name}")
    assert ckptmap.verify(tmp_path / "out", against=source).ok
    ours = unflattened(tmp_path / "out")[QUERY]
    with ckptmap.open(source) as ckpt:
        theirs = MAKERS[name](ckpt[QUERY].read(), False)
    for part in ("qdata", "scale"):
        same(getattr(ours, part).view(torch.uint8), getattr(theirs, part).view(torch.uint8))
    if name == "torchao-nvfp4":
        same(ours.per_tensor_scale, theirs.per_tensor_scale)
    if dtype == torch.bfloat16:
        model = loaded(tmp_path / "out")
        with ckptmap.open(tmp_path / "out") as ckpt:
            read = {key: ckpt[key].read() for key in ckpt}
        same(model.state_dict()[QUERY].dequantize(), read[QUERY])
        if name == "torchao-nvfp4":  # MX layers quantize activations, and want a Blackwell GPU
            assert torch.equal(logits(model), logits(plain(read)))


@pytest.mark.parametrize(
    ("first", "second", "fidelity"),
    [
        ("torchao-mxfp4", "ct-mxfp4", "exact"),
        ("torchao-mxfp8", "ct-mxfp8", "exact"),
        ("torchao-nvfp4", "ct-nvfp4", "codes"),
    ],
)
def test_codes_go_to_compressed_tensors_and_back(
    first: str, second: str, fidelity: str, tmp_path: Path
) -> None:
    """Between the names of two libraries no value is rounded again."""
    ckptmap.convert(dense(tmp_path / "dense"), tmp_path / "one", to=f"hf-{first}")
    report = ckptmap.convert(tmp_path / "one", tmp_path / "two", to=f"hf-{second}")
    assert report.fidelity[fidelity] == 7 and set(report.fidelity) == {"bytes", fidelity}
    ckptmap.convert(tmp_path / "two", tmp_path / "three", to=f"hf-{first}")
    before, after = unflattened(tmp_path / "one")[QUERY], unflattened(tmp_path / "three")[QUERY]
    for part in ("qdata", "scale"):
        same(getattr(after, part).view(torch.uint8), getattr(before, part).view(torch.uint8))
    if first == "torchao-nvfp4":
        assert torch.allclose(after.per_tensor_scale, before.per_tensor_scale, rtol=2**-22, atol=0)


@pytest.mark.parametrize("form", ["pickled", "flattened"])
def test_float8_in_e5m2(form: str, tmp_path: Path) -> None:
    weight = values(torch.bfloat16)
    made: Any = Float8Tensor.from_hp(weight, torch.float8_e5m2, PerRow())
    file = tmp_path / ("m.pt" if form == "pickled" else "m.safetensors")
    (pickle if form == "pickled" else flatten)(file, made)
    with ckptmap.open(file) as ckpt:
        assert ckpt["fc.weight"].encoding == "float8-e5m2"
        same(ckpt["fc.weight"].read(), made.dequantize())
    ckptmap.convert(file, tmp_path / "hf", to="hf")
    same(unflattened(tmp_path / "hf")["fc.weight"].dequantize(), made.dequantize())


def float8_e5m2(weight: torch.Tensor) -> Any:
    return Float8Tensor.from_hp(weight, torch.float8_e5m2, PerRow())


@pytest.mark.parametrize("make", [float8_e5m2, lambda w: mx(w, torch.float8_e5m2, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_changed_weight_is_given_back_in_e5m2(
    make: Callable[[torch.Tensor], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The codes and scales are those that torchao makes of the trained values."""
    weight = values(dtype)
    pickle(tmp_path / "release.pt", make(weight))
    trained = weight.flip(0).contiguous() * 1.5
    bias = torch.load(tmp_path / "release.pt", weights_only=False)["fc.bias"]
    torch.save({"fc.weight": trained, "fc.bias": bias}, tmp_path / "work.pt")
    ckptmap.convert(tmp_path / "work.pt", tmp_path / "back.pt", as_=tmp_path / "release.pt")
    wanted = make(trained)
    with ckptmap.open(tmp_path / "back.pt") as ckpt:
        parts = ckpt["fc.weight"].parts
        assert parts["qdata"].info.dtype == "float8_e5m2"
        same(ckpt["fc.weight"].read(), wanted.dequantize())


def _cut(tensors: Tensors) -> None:
    tensors["fc._weight_scale"] = tensors["fc._weight_scale"].view(torch.uint8)[:, :-1].contiguous()


def _nan(tensors: Tensors) -> None:
    tensors["fc._weight_scale"].view(torch.uint8)[3, 1] = 255


@pytest.mark.parametrize("name", ["torchao-mxfp8", "torchao-mxfp4"])
@pytest.mark.parametrize(
    ("change", "said"), [(_cut, "part 'scale', expected"), (_nan, "255, which is NaN, in 1 of")]
)
def test_bad_parts_are_refused(
    name: str, change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    made = MAKERS[name](values(torch.bfloat16), False)
    tensors, metadata = flatten_tensor_state_dict({"fc.weight": made})
    change(tensors)
    save_file(tensors, tmp_path / "m.safetensors", metadata)
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "out.pt", to="full-bf16")
    assert caught.value.code == "CKM115" and caught.value.message.startswith("fc.weight")


def test_the_kernels_that_are_timed_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timed = importlib.import_module("kernels_microscaled")
    timed.check(timed.kernels._weight(256, "bfloat16"))
    assert all(getattr(timed, name) for c in timed.CONTESTS for name in (c.mine, *c.peers))
    sys.modules.pop("kernels_microscaled"), sys.modules.pop("kernels_4bit")
