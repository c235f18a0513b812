"""Check an encoding whose codes can be kept: what it says about its codes, and codes that it takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ckptmap.core.quantized_codes import Coded, CodeGrid, Recodes
from ckptmap.protocols import Encoding, Refusal
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.storage.lazy_tensor import info_of
from ckptmap.tensors import Box, TensorInfo
from ckptmap.testing.base import expect
from ckptmap.testing.parts import Assembly, Parts
from ckptmap.testing.samples import random_box, same

if TYPE_CHECKING:
    import torch

BOXES = 4
MAX_ERROR = 0.05
"""Largest relative rms error of values whose codes are kept and whose scales are rounded."""


def check_codes(title: str, encoding: Encoding, info: TensorInfo, parts: Parts) -> None:
    """Raise AssertionError unless the codes of an encoding can be kept.

    Codes read by boxes must equal those of the whole tensor, scales must fit the grid, and an encoding that
    takes its own codes and scales must decode to the same values: to equal bits if it says `exact`.
    """
    if not isinstance(encoding, Coded):
        return
    grid = encoding.grid(info)
    if grid is None:
        return
    expect(grid == encoding.grid(info), f"{title}: another grid when asked again")
    whole = _codes(encoding, info, parts, grid, Box.whole(grid.codes.shape))
    draw = random.Random(info.numel)
    for _ in range(BOXES):
        box = random_box(grid.codes.shape, draw)
        part = _codes(encoding, info, parts, grid, box)
        expect(same(part, window(whole, box)), f"{title}: other codes at {box} than the whole has")
    scales = encoding.scales(info, {name: parts[name] for name in encoding.scale_parts(info)})
    expect(info_of(scales) == TensorInfo(grid.scales, "float32"), f"{title}: scales {scales.shape}")
    expect(bool(scales.isfinite().all()), f"{title}: scales of finite values are not finite")
    if isinstance(encoding, Recodes):
        _check_own_codes(title, encoding, info, parts, grid, whole, scales)


def _codes(
    encoding: Coded, info: TensorInfo, parts: Parts, grid: CodeGrid, box: Box
) -> torch.Tensor:
    import torch

    part_boxes = {}
    for name, part in parts.items():
        where = encoding.code_box(info, name, box)
        if where is not None:
            part_boxes[name] = window(part, where).contiguous()
    out = torch.empty(box.sizes, dtype=getattr(torch, grid.codes.dtype))
    encoding.codes(info, part_boxes, box, out)
    return out


def _check_own_codes(
    title: str,
    encoding: Encoding,
    info: TensorInfo,
    parts: Parts,
    grid: CodeGrid,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Check that the encoding takes its own codes and scales."""
    import torch

    assert isinstance(encoding, Recodes)
    recoder = encoding.recoder(info, grid, "cpu")
    expect(recoder is not None, f"{title}: does not take its own codes")
    described = encoding.parts(info)
    assert recoder is not None and not isinstance(described, Refusal)
    fidelities = ("codes", "exact")
    expect(recoder.fidelity in fidelities, f"{title}: fidelity {recoder.fidelity!r}")
    assembly, flat, step = Assembly(title, described, in_order=True), codes.view(-1), recoder.step
    for at in range(0, flat.numel(), 3 * step):
        for write in recoder.feed(at, flat[at : at + 3 * step], scales):
            assembly.take(write)
    for write in recoder.finish(scales):
        assembly.take(write)
    before, after = (_decoded(encoding, info, parts_of) for parts_of in (parts, assembly.parts()))
    if recoder.fidelity == "exact":
        expect(same(before, after), f"{title}: says exact, but its own codes decode differently")
        return
    difference = (before.double() - after.double()).square().mean().sqrt()
    size = before.double().square().mean().sqrt()
    error = float(difference / size) if before.numel() and float(size) else 0.0
    expect(error <= MAX_ERROR, f"{title}: an error of {error:.3f} by its own codes")
    expect(torch.isfinite(after).all().item() is True, f"{title}: values that are not finite")


def _decoded(encoding: Encoding, info: TensorInfo, parts: Parts) -> torch.Tensor:
    import torch

    box = Box.whole(info.shape)
    part_boxes = {}
    for name, part in parts.items():
        where = encoding.part_box(info, name, box)
        assert where is not None
        part_boxes[name] = window(part, where).contiguous()
    out = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
    encoding.decode(info, part_boxes, box, out)
    return out
