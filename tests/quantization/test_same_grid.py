"""Every ordered pair of forms that share a grid: codes move, and the report says truthfully what became of the values.

Codes and scales are taken out of the stored tensors by the formulas of this file, which imports no encoding: the
published layout of each form, in float64. `exact` is claimed where each product of code and scale is the same
number, `codes` where codes are the same and scales are near.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors import safe_open
from torch import Tensor

import ckptmap
from tests.quantization.test_forms_table import FORMS, LAYER, WEIGHT, folder, written

__all__ = ["folder"]  # the fixture

SIDES = (256, 256)
PAIRS = [(form.name, suffix) for form in FORMS.values() for suffix in form.kept_in]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Decoded = tuple[Tensor, Tensor]
"""The codes as numbers, and the scale of each."""


def spread(scales: Tensor) -> Tensor:
    """Give each element the scale of its block."""
    wide = scales.double().reshape(1, 1) if scales.numel() == 1 else scales.double()
    wide = wide[:, None] if wide.ndim == 1 else wide
    for dim in (0, 1):
        wide = wide.repeat_interleave(SIDES[dim] // wide.shape[dim], dim)
    return wide


def nibbles(packed: Tensor) -> Tensor:
    low, high = packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4
    return torch.stack([low, high], -1).flatten(-2).long()


def fields(words: Tensor, bits: int, order: range | tuple[int, ...] | None = None) -> Tensor:
    shifts = order or range(32 // bits)
    mask = (1 << bits) - 1
    return torch.stack([words.long() >> bits * at & mask for at in shifts], -1).flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.view(torch.uint8).double() - 127)


def fp4(packed: Tensor, scales: Tensor) -> Decoded:
    return torch.tensor(E2M1, dtype=torch.float64)[nibbles(packed)], spread(scales)


def packed(stored: dict[str, Tensor]) -> Decoded:
    """compressed-tensors' forms with packed codes."""
    words, scale = stored[f"{WEIGHT}_packed"], stored[f"{WEIGHT}_scale"]
    if scale.dtype == torch.uint8:
        return fp4(words, powers(scale))
    if scale.dtype == torch.float8_e4m3fn:
        return fp4(words, scale.float() / stored[f"{WEIGHT}_global_scale"])
    bits = words.shape[1] * 32 // SIDES[1]
    codes, zero = fields(words, bits), stored.get(f"{WEIGHT}_zero_point")
    zeros = spread(fields(zero.t(), bits).t()) if zero is not None else 1 << (bits - 1)
    return codes.double() - zeros, spread(scale)


def gptq(stored: dict[str, Tensor]) -> Decoded:
    words, zeros, scales = (stored[f"{LAYER}.{name}"] for name in ("qweight", "qzeros", "scales"))
    bits = words.shape[0] * 32 // SIDES[1]
    is_awq = words.shape[1] < SIDES[0]
    if is_awq:
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        codes, zero = fields(words, 4, order).t(), fields(zeros, 4, order).t()
    else:
        codes, zero = fields(words.t(), bits), fields(zeros, bits).t() + 1
    return codes.double() - spread(zero), spread(scales.t())


def torchao(stored: dict[str, Tensor], entry: dict[str, object]) -> Decoded:
    codes, scale = stored[f"{LAYER}._weight_qdata"], stored[f"{LAYER}._weight_scale"]
    if entry["_type"] == "NVFP4Tensor":
        overall = stored[f"{LAYER}._weight_per_tensor_scale"].float()
        return fp4(codes, scale.float() * overall)
    if codes.dtype == torch.uint8:
        return fp4(codes, powers(scale))
    is_power = entry["_type"] == "MXTensor"
    return codes.double(), spread(powers(scale) if is_power else scale)


def fourbit(stored: dict[str, Tensor]) -> Decoded:
    """bitsandbytes' table and absmax; the even element is in the high half of a byte."""
    import bitsandbytes.functional as F

    parts = {
        k.removeprefix(f"{WEIGHT}."): t for k, t in stored.items() if k.startswith(f"{WEIGHT}.")
    }
    state = F.QuantState.from_dict(parts, device=torch.device("cpu"))
    absmax = state.absmax
    if state.nested:
        absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return high_first(stored[WEIGHT], parts["quant_map"], absmax)


def high_first(packed: Tensor, table: Tensor, absmax: Tensor) -> Decoded:
    codes = nibbles(packed.flatten()).view(-1, 2).flip(1).flatten()
    levels = table.double()[codes].view(SIDES)
    return levels, absmax.double().repeat_interleave(codes.numel() // absmax.numel()).view(SIDES)


def nf4(stored: dict[str, Tensor]) -> Decoded:
    import bitsandbytes.functional as F

    names = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean")
    packed, scalers, factor, mean = (stored[f"{WEIGHT}.{name}"] for name in names)
    table = F.get_4bit_type("nf4", device="cpu")  # torchao rounds it to the dtype of the weight
    absmax = scalers.float().view(factor.numel(), -1) / factor.float().view(-1, 1) + mean.float()
    return high_first(packed, table, absmax.flatten())


def plain(codes: str, scale: str) -> Callable[[dict[str, Tensor]], Decoded]:
    return lambda stored: (stored[codes].double(), spread(stored[scale]))


BY_PART: dict[str, Callable[[dict[str, Tensor]], Decoded]] = {
    f"{WEIGHT}_packed": packed,
    f"{LAYER}.qweight": gptq,
    f"{WEIGHT}.quant_map": fourbit,
    f"{WEIGHT}.nf4": nf4,
    f"{LAYER}.SCB": lambda stored: (stored[WEIGHT].double(), spread(stored[f"{LAYER}.SCB"] / 127)),
    f"{WEIGHT}._data": plain(f"{WEIGHT}._data", f"{WEIGHT}._scale"),
    f"{LAYER}.scale": lambda stored: fp4(stored[WEIGHT], powers(stored[f"{LAYER}.scale"])),
    f"{WEIGHT}_scale_2": lambda stored: fp4(
        stored[WEIGHT], stored[f"{WEIGHT}_scale"].float() * stored[f"{WEIGHT}_scale_2"]
    ),
}
"""A stored key by which a form is known -> its decoder."""


def decoded(path: Path) -> Decoded:
    stored: dict[str, Tensor] = {}
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            stored |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    record = json.loads(metadata.get("ckptmap", "{}")).get(WEIGHT, {})
    if record.get("scheme") == "gguf":
        kind = GGMLQuantizationType[record["type"]]
        values = torch.from_numpy(quants.dequantize(stored[WEIGHT].numpy(), kind).copy())
        return values.double(), torch.ones(SIDES, dtype=torch.float64)
    for part, decode in BY_PART.items():
        if part in stored:
            return decode(stored)
    if f"{LAYER}._weight_qdata" in stored:
        return torchao(stored, json.loads(metadata[WEIGHT]))
    name = next(key for key in (f"{WEIGHT}_scale", f"{WEIGHT}_scale_inv") if key in stored)
    is_power = stored[name].dtype in (torch.uint8, torch.float8_e8m0fnu)
    scales = powers(stored[name]) if is_power else stored[name]
    if stored[WEIGHT].dtype == torch.int32:  # Quark's, as AWQ's
        parts = zip(("qweight", "qzeros", "scales"), ("", "_zero_point", "_scale"), strict=True)
        return gptq({f"{LAYER}.{part}": stored[f"{WEIGHT}{end}"] for part, end in parts})
    if stored[WEIGHT].dtype == torch.uint8 and not is_power:  # ModelOpt's, two rows to one of bytes
        pairs = torch.stack([stored[WEIGHT] & 15, stored[WEIGHT] >> 4], 1).flatten(0, 1).double()
        return torch.where(pairs > 7, pairs - 16, pairs), spread(scales)
    if stored[WEIGHT].dtype == torch.uint8:  # Quark's, two to a byte
        return fp4(stored[WEIGHT], scales)
    return stored[WEIGHT].double(), spread(scales)


@pytest.mark.parametrize(("name", "suffix"), PAIRS)
def test_codes_move(name: str, suffix: str, folder: Path, tmp_path: Path) -> None:
    path = written(name, folder).path
    ckptmap.convert(path, tmp_path / "in", to="hf")
    report = ckptmap.convert(path, tmp_path / "out", to=f"hf-{suffix}", encode=(WEIGHT,))
    (fidelity,) = set(report.fidelity) - {"bytes"}
    assert fidelity in ("codes", "exact")
    (codes, scales), (new_codes, new_scales) = decoded(tmp_path / "in"), decoded(tmp_path / "out")
    if not name.startswith("gguf"):  # whose values the `gguf` package gives without codes
        assert torch.equal(codes, new_codes)
        assert torch.equal(codes.signbit(), new_codes.signbit())
    values, new_values = codes * scales, new_codes * new_scales
    if fidelity == "exact":
        assert torch.equal(values, new_values)
    bound = 0.1 if "nf4" in suffix or suffix.endswith("-dq") else 2**-22
    assert ((values - new_values).abs() <= values.abs() * bound).all()
    assert (values != 0).any()


def test_the_pairs_are_many() -> None:
    assert len(PAIRS) >= 50
