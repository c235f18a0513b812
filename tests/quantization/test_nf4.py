"""NF4 arithmetic: bit-equal to torchao in both directions, for any box and any size of input chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.errors import RunError
from ckptmap.protocols import Refusal
from ckptmap.quantization.nf4 import kernels as nf4_codes
from ckptmap.quantization.nf4.encoding import FACTOR, PARTS, NF4Encoder, default_encoding
from ckptmap.quantization.nf4.scheme import NF4
from ckptmap.storage.process_guards import one_torch_thread
from ckptmap.tensors import Box, TensorInfo
from tests.conftest import Device
from tests.support.examples import examples
from tests.support.nf4_cases import (
    DTYPES,
    MODULE,
    assert_same_parts,
    decode,
    info_of,
    quantize,
    slices,
    weights,
)

SHAPES = ((64, 64), (1001, 64), (48, 128), (4096, 64), (128, 1024), (16384,), (192, 96))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """torchao's mean depends on the thread count; ours is that of one thread."""
    with one_torch_thread(True):
        yield


# ------------------------------------------------------------------------------- encoding


@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_equal_to_torchao_both_ways(dtype: torch.dtype, shape: Any, kind: str) -> None:
    w = weights(shape, dtype, kind)
    if kind == "tiny" and dtype is torch.float16:
        w[w == 0] = w.abs().max()  # blocks of zeros are coded otherwise on purpose
    encoding = default_encoding(info_of(w))
    reference = MODULE.to_nf4(w, 64, encoding.scaler_block_size)
    parts, _ = quantize(w)
    assert_same_parts(parts, reference)
    whole = decode(info_of(w), encoding, parts, Box.whole(shape))
    assert torch.equal(whole, reference.get_original_weight())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_quotient_has_torchaos_code(dtype: torch.dtype) -> None:
    """All 16-bit quotients; for fp32 all those within 200 ulp of a midpoint, where a table on the
    upper bits could go wrong, and a million others."""
    table = nf4_codes.value_table(dtype)
    if dtype is torch.float32:
        middle = ((table[1:] + table[:-1]) / 2).view(torch.int32)
        near = (middle.unsqueeze(1) + torch.arange(-200, 201, dtype=torch.int32)).flatten()
        values = torch.cat([near.view(torch.float32), torch.rand(1 << 20) * 2 - 1])
    else:
        values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.abs() <= 1]
    pad = -values.numel() % 63
    values = torch.cat([values, values.new_ones(pad)]).view(-1, 63)
    blocks = torch.cat(
        [values, values.new_ones(values.shape[0], 1)], dim=1
    )  # absmax 1: w = w/absmax
    parts, _ = quantize(blocks, NF4(64, 1))
    packed = parts["quantized_data"]
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(blocks.shape)
    wanted = torch.cat([nf4_codes.nearest(c) for c in torch.split(blocks, 4096)])
    reference = MODULE.NF4Tensor.quantize_tensor_nearest(blocks[:512].flatten(), table)
    assert torch.equal(wanted[:512].flatten(), reference)
    assert torch.equal(codes.long(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_off_the_default_size(dtype: torch.dtype) -> None:
    w = weights((96, 128), dtype)
    for encoding in (NF4(32, 4), NF4(128, 1), NF4(16, 256), NF4(48, 2), NF4(2, 1)):
        reference = MODULE.to_nf4(w, encoding.block_size, encoding.scaler_block_size)
        parts, _ = quantize(w, encoding, split=encoding.block_size * 5)
        assert_same_parts(parts, reference)
        whole = decode(info_of(w), encoding, parts, Box.whole(w.shape))
        assert torch.equal(whole, reference.get_original_weight())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [64, 64 * 7, 64 * 1001])
def test_how_it_is_fed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, split: int
) -> None:
    w = weights((1001, 128), dtype, "heavy")
    whole, _ = quantize(w)
    monkeypatch.setattr(nf4_codes, "CHUNK_NUMEL", 64 * 13)
    parts, _ = quantize(w, split=split)
    assert all(torch.equal(parts[name], whole[name]) for name in PARTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows_decode_to_torchaos_bits_elsewhere_and_have_the_code_of_zero(
    dtype: torch.dtype,
) -> None:
    w = weights((256, 64), dtype, "heavy")
    w[[0, 17, 255]] = 0
    w[17, ::2] = -0.0
    reference = MODULE.to_nf4(w, 64, 256)
    parts, _ = quantize(w)
    rows = parts["quantized_data"].view(256, 32)
    wanted = reference.quantized_data.view(256, 32).clone()
    assert (wanted[[0, 17, 255]] == 0).all(), "torchao's own: 0/0 has the lowest code"
    wanted[[0, 17, 255]] = 0x77
    assert torch.equal(rows, wanted)
    for name in set(PARTS) - {"quantized_data"}:
        assert torch.equal(parts[name], getattr(reference, name))
    out = decode(info_of(w), NF4(), parts, Box.whole(w.shape))
    assert (out[[0, 17, 255]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_a_constant_magnitude_decodes_exactly(dtype: torch.dtype, value: float) -> None:
    w = torch.full((64, 64), value, dtype=dtype)
    w[:, 1::2] *= -1
    parts, _ = quantize(w)
    reference = MODULE.to_nf4(w, 64, 64)
    assert parts[FACTOR].isinf().all() and torch.equal(parts[FACTOR], reference.quantization_factor)
    assert torch.equal(parts["quantized_scalers"], reference.quantized_scalers)
    assert torch.equal(decode(info_of(w), NF4(64, 64), parts, Box.whole(w.shape)), w)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_refused_with_their_block(dtype: torch.dtype, bad: float) -> None:
    w = weights((64, 64), dtype)
    w[3, 5] = w[9, 0] = bad
    with pytest.raises(RunError, match=r"in 2 blocks of 64, .* elements 192 to 255") as caught:
        quantize(w)
    assert caught.value.code == "CKM309"


def test_scales_that_leave_fp16_are_refused() -> None:
    w = torch.full((64, 64), 1.0, dtype=torch.float16)
    w[0] = 65504
    reference = MODULE.to_nf4(w, 64, 64).get_original_weight()
    assert not reference.isfinite().all(), "what torchao makes of it"
    with pytest.raises(RunError, match=r"block scales overflow float16, .* 65504") as caught:
        quantize(w)
    assert caught.value.code == "CKM309"


def test_sign_flips_are_counted() -> None:
    w = weights((256, 64), torch.float32).abs() + 0.1
    assert quantize(w)[1].sign_flips == 0
    w[7] = 1e6
    parts, encoder = quantize(w)
    scale = nf4_codes.scales(
        parts["quantized_scalers"], parts[FACTOR], parts["scaler_mean"], 256, 0
    )
    assert encoder.sign_flips == int((scale <= 0).sum()) > 0


def test_the_thread_count_changes_no_byte() -> None:
    """65536 scales: torch splits such a sum over threads, which changes about half of these means."""
    torch.manual_seed(0)
    for w in torch.randn(6, 1 << 17):
        parts, _ = quantize(w, NF4(2, 256))
        encoder = NF4(2, 256).encoder(info_of(w), "cpu")
        list(encoder.feed(0, w))
        torch.set_num_threads(2)
        try:
            mean = next(write.values for write in encoder.finish() if write.part == "scaler_mean")
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(1)
        assert torch.equal(mean, parts["scaler_mean"].view(1))


# ------------------------------------------------------------------------------- boxes


@st.composite
def boxed(draw: st.DrawFn) -> tuple[tuple[int, ...], NF4, Box]:
    shape = draw(st.sampled_from([(48, 128), (128, 96), (10, 320), (8192,), (3, 4096)]))
    encoding = draw(st.sampled_from([NF4(64, s) for s in (1, 2, 4)] + [NF4(32, 2), NF4(16, 16)]))
    if isinstance(encoding.parts(TensorInfo(shape, "float32")), Refusal):
        encoding = NF4(64, 1)
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, encoding, Box(offsets, sizes)


@given(case=boxed(), dtype=st.sampled_from(DTYPES), chunk=st.sampled_from([1, 100, 1 << 18]))
@examples(120)
def test_any_box_is_a_slice_of_torchaos_decode(
    case: tuple[tuple[int, ...], NF4, Box], dtype: torch.dtype, chunk: int
) -> None:
    shape, encoding, box = case
    reference = MODULE.to_nf4(
        weights(shape, dtype), encoding.block_size, encoding.scaler_block_size
    )
    parts = {name: getattr(reference, name) for name in PARTS}
    info = TensorInfo(shape, str(dtype).removeprefix("torch."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nf4_codes, "CHUNK_NUMEL", chunk)
        found = decode(info, encoding, parts, box)
    assert torch.equal(found, reference.get_original_weight()[slices(box)])


def test_rows_that_end_on_blocks_are_cut_exactly() -> None:
    info, encoding = TensorInfo((512, 128), "bfloat16"), NF4(64, 256)
    boxes = [Box((row, 0), (128, 128)) for row in range(0, 512, 128)]
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal)
    for name in ("quantized_data", "quantized_scalers", "quantization_factor"):
        cuts = [encoding.part_box(info, name, box) for box in boxes]
        size = parts[name].numel // 4
        assert cuts == [Box((i * size,), (size,)) for i in range(4)]
    assert encoding.part_box(info, "nf4", boxes[1]) == Box((0,), (16,))
    assert encoding.part_box(info, "scaler_mean", boxes[1]) == Box((), ())


# ------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_made_where_the_values_are(device: Device, dtype: torch.dtype) -> None:
    """A fake device holds no values: an `.item()` in the loop would fail."""
    info = TensorInfo((256, 64), str(dtype).removeprefix("torch."))
    with device.mode():
        encoder = NF4Encoder(NF4(), info, device.name)
        values = torch.ones(256 * 64, dtype=dtype, device=device.name)
        (write,) = encoder.feed(0, values)
        assert write.values.device.type == device.name and write.values.shape == (8192,)
    if device.fake:
        made = nf4_codes._lookups
        assert (dtype, device.name) not in made, "a fake table must not outlive its mode"


@pytest.mark.parametrize("where", ["meta", "cuda"])
def test_a_box_is_decoded_where_its_parts_are(where: str) -> None:
    """The meta device holds no values either, and unlike a fake GPU it works in a CPU build of
    torch, where `copy_` to a fake GPU fails in torch's own device guard."""
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    info, encoding, box = TensorInfo((256, 64), "bfloat16"), NF4(64, 32), Box((3, 7), (200, 10))
    parts, _ = quantize(weights((256, 64), torch.bfloat16), encoding)
    cuts = {name: encoding.part_box(info, name, box) for name in parts}
    there = {name: parts[name][slices(cut)].to(where) for name, cut in cuts.items() if cut}
    out = torch.empty(box.sizes, dtype=torch.bfloat16, device=where)
    encoding.decode(info, there, box, out)
    if where == "cuda":
        assert torch.equal(out.cpu(), decode(info, encoding, parts, box))


def test_a_gpu_writes_the_same_bytes_as_the_cpu(device: Device) -> None:
    if device.fake:
        pytest.skip("a fake device holds no values")
    for dtype in DTYPES:
        w = weights((1001, 64), dtype, "heavy")
        info, wanted = info_of(w), quantize(w)[0]
        encoder = default_encoding(info).encoder(info, device.name)
        writes = [*encoder.feed(0, w.to(device.name).view(-1)), *encoder.finish()]
        for name in PARTS:
            found = torch.cat([x.values.cpu() for x in writes if x.part == name])
            assert torch.equal(found, wanted[name].view(-1)), name
