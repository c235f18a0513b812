"""On a device, an encoder or decoder launches few kernels for all that is sent at once, and waits for none.

Counted on the meta device, which takes the branches of devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from benchmarks.gpu_session.encoders import decode, placed
from benchmarks.gpu_session.read_forms import more_forms, random_parts
from ckptmap import registry
from ckptmap.protocols import Encoding, Refusal
from ckptmap.quantization.blockwise import chunks, fourbit
from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL
from ckptmap.quantization.compressed_tensors.packed import Packed
from ckptmap.quantization.dense import DenseAs
from ckptmap.quantization.gptq.encodings import Awq
from ckptmap.quantization.nf4.encoding import NF4
from ckptmap.tensors import Box, TensorInfo
from tests.support.dispatched import Kernels, NeverWaits, OneDevice, Traffic, Waited

NAME = "model.layers.0.mlp.up_proj.weight"
DTYPES = ("bfloat16", "float16", "float32")
ROWS, WIDTH = DEVICE_NUMEL // 4096, 4096
FEEDS = 8
INFO = TensorInfo((FEEDS * ROWS, WIDTH), "bfloat16")


COUNTED = frozenset(
    (
        "nf4",
        "bnb-nf4",
        "bnb-nf4-dq",
        "bnb-fp4",
        "bnb-fp4-dq",
        "int8",
        "float8",
        "bnb-int8",
        "ct-int8",
        "ct-fp8",
        "fp8",
    )
)
WIDER = {
    "ct-int4": 25, "ct-mxfp4": 27, "ct-mxfp8": 18, "torchao-mxfp4": 26, "torchao-mxfp8": 18, "fp8-ue8m0": 22,
    "gguf-q8_0": 25, "gguf-q4_0": 25, "gguf-q4_1": 25, "gguf-q5_0": 31, "gguf-q5_1": 31, "gguf-mxfp4": 114,
}  # fmt: skip
"""What the encoders of other forms launch a feed at most. Their decoders wait once a box, to refuse a scale that is
NaN. NVFP4's encoder, whose scale of the whole tensor is looked for first, is timed by `benchmarks.gpu_session`."""


def targets_of_all(dtype: str) -> dict[str, Encoding]:
    """How each scheme that quantizes stores the weight."""
    found: dict[str, Encoding] = {}
    for scheme in registry.schemes():
        made = scheme.target(NAME, TensorInfo(INFO.shape, dtype)) if scheme.suffix else None
        if made is not None and made.name != "dense":
            found[scheme.name] = made
    return found


def targets(dtype: str) -> dict[str, Encoding]:
    """The same of those that are counted."""
    return {name: made for name, made in targets_of_all(dtype).items() if name in COUNTED}


ENCODERS = {name: 17 for name in targets("bfloat16")} | {
    name: 10 for name in targets("bfloat16") if "nf4" in name or "fp4" in name
}
"""The most kernels a feed: a launch takes 5 us of the host, a feed of bfloat16 170 us of the link."""
DECODERS = {name: 10 for name in targets("bfloat16")}


def test_every_block_wise_scheme_is_counted() -> None:
    encoded = set(targets_of_all("bfloat16"))
    assert set(ENCODERS) == set(DECODERS) == COUNTED
    assert encoded == COUNTED | WIDER.keys() | {"ct-nvfp4", "torchao-nvfp4"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ENCODERS, *WIDER])
def test_an_encoder_launches_few_kernels_a_feed(name: str, dtype: str) -> None:
    info = TensorInfo(INFO.shape, dtype)
    held = targets_of_all(dtype)
    if name not in held:
        assert (name.startswith("torchao-mx"), dtype) == (True, "float16"), "torchao has none"
        return
    encoder = held[name].encoder(info, "meta")
    values = torch.empty(DEVICE_NUMEL, dtype=getattr(torch, dtype), device="meta")
    list(encoder.feed(0, values))  # it makes tables
    with Kernels() as kernels, NeverWaits():
        list(encoder.feed(values.numel(), values))
    assert kernels.total <= (ENCODERS | WIDER)[name], dict(kernels.counts)


def test_a_cast_that_may_overflow_launches_few_kernels() -> None:
    encoder = DenseAs("float16").encoder(TensorInfo(INFO.shape, "float32"), "meta")
    values = torch.empty(DEVICE_NUMEL, dtype=torch.float32, device="meta")
    with Kernels() as kernels, NeverWaits():
        list(encoder.feed(0, values))
    assert kernels.total <= 11, dict(kernels.counts)


def on_meta(encoding: Encoding, info: TensorInfo, box: Box) -> Mapping[str, torch.Tensor]:
    """The parts that decoding a box takes."""
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal)
    found = {}
    for name, part in parts.items():
        cut = encoding.part_box(info, name, box)
        assert cut is not None
        found[name] = torch.empty(cut.sizes, dtype=getattr(torch, part.dtype), device="meta")
        if name.startswith("quant_state"):  # JSON, which stays on the CPU
            found[name] = torch.frombuffer(bytearray(encoding.blob(info, 0.5)), dtype=torch.uint8)  # type: ignore[attr-defined]
    return found


def decoded(encoding: Encoding, info: TensorInfo, box: Box) -> Kernels:
    parts = on_meta(encoding, info, box)
    out = torch.empty(box.sizes, dtype=getattr(torch, info.dtype), device="meta")
    encoding.decode(info, parts, box, out)  # it makes tables
    with Kernels() as kernels, NeverWaits():
        encoding.decode(info, parts, box, out)
    return kernels


MEMORY, LINK = 4.8e12, 50e9
"""Bytes a second of an H200's memory, and of its link in each direction."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ENCODERS)
def test_kernels_and_results_hide_behind_the_link(name: str, dtype: str) -> None:
    """What a kernel of our own would have to gain; the table is in `chunks`."""
    encoder = targets(dtype)[name].encoder(TensorInfo(INFO.shape, dtype), "meta")
    values = torch.empty(DEVICE_NUMEL, dtype=getattr(torch, dtype), device="meta")
    list(encoder.feed(0, values))
    with Traffic() as moved:
        writes = list(encoder.feed(values.numel(), values))
    is_short = "4" in name
    share = 1 / 3 if is_short or dtype == "float32" else 0.6  # of the memory's rate
    back = sum(write.values.nbytes for write in writes)
    assert moved.nbytes / (MEMORY * share) + back / LINK <= values.nbytes / LINK
    low, high = (41, 60) if dtype == "float32" else (22, 35) if is_short else (33, 52)
    assert low <= round(moved.nbytes / DEVICE_NUMEL) <= high, "as the table says"


READ = {
    "ct-int4": Packed(bits=4, block=(1, 128), scale_dtype="bfloat16"),
    "ct-int4 zero points": Packed(
        bits=4, block=(1, 128), scale_dtype="bfloat16", zero_dtype="int32"
    ),
    "nf4 exact": NF4(64, 1, exact=True),
}
"""Encodings that are read, beside those that are written."""


@pytest.mark.parametrize("name", [*DECODERS, *READ])
@pytest.mark.parametrize("columns", [WIDTH, 1000])
def test_a_decoder_launches_few_kernels(name: str, columns: int) -> None:
    encoding = READ.get(name) or targets("bfloat16")[name]
    most = 24 if "zero" in name else 12 if name in READ else DECODERS[name]  # zeros: half are small
    one = decoded(encoding, INFO, Box((ROWS, 0), (ROWS, columns)))
    assert one.total <= most, dict(one.counts)
    whole = decoded(encoding, INFO, Box((0, 0), (INFO.shape[0], columns)))
    assert whole.total <= FEEDS * most, dict(whole.counts)


@pytest.mark.parametrize("name", [*DECODERS, *READ])
def test_a_decoder_takes_far_less_than_its_result(name: str) -> None:
    """Which goes back on the stream of the kernels, 2 bytes an element."""
    encoding, box = READ.get(name) or targets("bfloat16")[name], Box((0, 0), (ROWS, WIDTH))
    parts = on_meta(encoding, INFO, box)
    out = torch.empty(box.sizes, dtype=torch.bfloat16, device="meta")
    encoding.decode(INFO, parts, box, out)
    with Traffic() as moved:
        encoding.decode(INFO, parts, box, out)
    low, high = (29, 48) if "int4" in name else (10, 28)
    assert low <= moved.nbytes / DEVICE_NUMEL <= high, "as the table says"
    assert moved.nbytes / MEMORY <= 0.4 * out.nbytes / LINK


def test_codes_are_packed_alike_on_a_device() -> None:
    """`pack` takes another way there; the rest differs by the size of chunks alone."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
    packed = torch.empty(256, dtype=torch.uint8)
    fourbit.pack(codes, torch.empty(512, dtype=torch.int32), packed)
    first, second = codes.view(-1, 2).unbind(1)
    assert torch.equal(packed, torch.add(second, first, alpha=16))
    assert packed.tolist() == list(range(256))


def test_awq_packs_codes_where_they_are() -> None:
    form = Awq(4, 64)
    codes = torch.empty((32, 128), dtype=torch.int8, device="meta")
    with OneDevice():
        assert form.packed_band(codes).shape == (128, 4)
    with OneDevice(), pytest.raises(AssertionError, match="index_select on"):
        codes.index_select(0, torch.tensor([1, 0]))


@pytest.mark.parametrize(
    "wait",
    [
        lambda w: w.sum().item(),
        lambda w: w.cpu(),
        lambda w: w.copy_(torch.ones(4)),
        lambda w: torch.ones(4).copy_(w),
        lambda w: bool(w.any()),
        lambda w: w.nonzero(),
        lambda w: torch.tensor([1.0], device="meta"),
    ],
)
def test_a_wait_is_noticed(wait: object) -> None:
    values = torch.empty(4, device="meta")
    with NeverWaits(), pytest.raises(Waited):
        wait(values)  # type: ignore[operator]


# ------------------------------------------------------------------------------- forms that are only read

ONLY_READ = {f"{name} {encoding!r:.60} {number}": (encoding, info) for number, (name, encoding, info) in enumerate(more_forms())}  # fmt: skip


@pytest.mark.parametrize("title", ONLY_READ)
def test_forms_that_are_read_are_decoded_on_their_device_without_a_wait(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes to the device for each box goes behind the host, by pinned memory."""
    encoding, info = ONLY_READ[title]
    given = placed(encoding, info, random_parts(encoding, info), "meta")
    with OneDevice():
        decode(encoding, info, given, "meta")  # makes tables
    monkeypatch.setattr(
        chunks, "sent", lambda values, device: torch.empty_like(values, device=device)
    )
    with NeverWaits():
        decode(encoding, info, given, "meta")
