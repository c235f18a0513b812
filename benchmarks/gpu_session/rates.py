"""Rates: the link, values encoded as they arrive, kernels alone, and whole conversions.

link      a copy between host memory and the device: an upper bound for a conversion
staged    pinned memory to the device in boxes, each encoded on arrival; the goal is for bf16 -> NF4
kernel    encode or decode of values on the device, and the kernels of torchao and bitsandbytes
convert   a whole `ckptmap.convert` of a file in memory: read, encode, write
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.encoders import (
    NAME,
    decode,
    encode,
    encode_only,
    encodings,
    feeds,
    looking,
    placed,
)
from benchmarks.gpu_session.importable import is_importable
from benchmarks.gpu_session.memory import peaks
from benchmarks.gpu_session.session import StepRun
from benchmarks.gpu_session.timing import clocked, link_s_per_byte, timed, weight

GOAL = 0.8
"""The share of the pinned link's rate that bf16 to NF4 should reach, staged."""
LINK_NBYTES = 1 << 30
FEEDS = (1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24)
"""Elements at once, of which the middle is what conversions use."""
WAYS = ("nf4", "int8", "bnb-nf4")
"""Encodings whose conversions are timed, there and back."""


def run(step: StepRun) -> None:
    from ckptmap.tensors import TensorInfo

    side, rounds = (256, 1) if step.is_tiny else (16384, 5)
    link_s = links(step)
    w = weight(side, "bfloat16")
    info = TensorInfo(tuple(w.shape), "bfloat16")
    staged_rates(step, info, w, link_s, rounds)
    staged_by_feed(step, info, w, link_s, rounds)
    kernel_times(step, info, w.to(step.device), link_s, rounds)
    if is_importable("xxhash"):
        conversions(step, w, link_s)
    else:
        step.result.note("conversions: not run: need xxhash")


def links(step: StepRun) -> float:
    """Report the link's rates; return the seconds of a byte from pinned memory to the device."""
    nbytes = 1 << 16 if step.is_tiny else LINK_NBYTES
    base = link_s_per_byte(step.device, nbytes)
    step.result.figure("link: pinned memory to the device", 1e-9 / base, "GB/s")
    for what, pinned, up in (
        ("the device to pinned memory", True, False),
        ("pageable memory to the device", False, True),
        ("the device to pageable memory", False, False),
    ):
        took = link_s_per_byte(step.device, nbytes, pinned=pinned, up=up)
        step.result.figure(
            f"link: {what}", 1e-9 / took, "GB/s", ratio=base / took, of="the pinned link"
        )
    return base


def staged_rates(step: StepRun, info: Any, w: Any, link_s: float, rounds: int) -> None:
    """Report how fast values come from pinned memory and are encoded."""
    if not step.on_cuda:
        return
    pinned = w.pin_memory()
    nbytes = w.numel() * w.element_size()
    for name, encoding in encodings(info).items():
        with step.result.attempt(f"staged {name}"):
            took = timed(staged(encoding, info, pinned, step.device), rounds, step.device)
            step.result.figure(
                f"staged {name}", nbytes / took / 1e9, "GB/s", ratio=nbytes * link_s / took,
                of="the pinned link", goal=GOAL if name == "nf4" else None,
            )  # fmt: skip


def staged_by_feed(step: StepRun, info: Any, w: Any, link_s: float, rounds: int) -> None:
    """Report how bf16 to NF4 depends on the elements that are sent and computed at once."""
    if not step.on_cuda:
        return
    from ckptmap.quantization.blockwise import chunks

    pinned, encoding, usual = w.pin_memory(), encodings(info)["nf4"], chunks.DEVICE_NUMEL
    try:
        for feed in FEEDS:
            chunks.DEVICE_NUMEL = feed
            run = staged(encoding, info, pinned, step.device, feed)
            took = timed(run, rounds, step.device)
            step.result.figure(
                f"staged nf4, {feed >> 20}M elements at once", pinned.nbytes / took / 1e9, "GB/s",
                ratio=pinned.nbytes * link_s / took, of="the pinned link",
            )  # fmt: skip
    finally:
        chunks.DEVICE_NUMEL = usual


def staged(
    encoding: Any, info: Any, pinned: Any, device: str, feed: int | None = None
) -> Callable[[], Any]:
    """Return a run that copies boxes from pinned memory, two ahead, and encodes each on arrival.

    An encoder that looks at all values first has them copied twice, as in a conversion. It uses the two streams of `ckptmap.storage.device_copies`, as a conversion does.
    """
    import torch

    from ckptmap.storage.device_copies import DEPTH, Lanes

    flat = pinned.view(-1)

    def run() -> None:
        way, encoder = Lanes(device), encoding.encoder(info, device)
        runs = list(feeds(encoder, flat.numel(), feed))
        places = [torch.empty(runs[0][1], dtype=flat.dtype, device=device) for _ in range(DEPTH)]
        free = [way.mark()] * DEPTH
        look = looking(encoder)
        looks = len(runs) if look else 0
        for turn, (start, end) in enumerate(runs * 2 if look else runs):
            place = places[turn % DEPTH][: end - start]
            with way.uploading(free[turn % DEPTH]):
                way.upload(place, flat[start:end])
            if turn < looks:
                look(place)
            else:
                list(encoder.feed(start, place))
            free[turn % DEPTH] = way.mark()

    return run


def kernel_times(step: StepRun, info: Any, there: Any, link_s: float, rounds: int) -> None:
    """Report encode and decode on the device alone, and the kernels of the libraries here.

    Where these take longer than the link takes for the dense values (a ratio below 1), torch's ops cost
    more than the link, and a kernel of our own would pay: see `ckptmap.quantization.blockwise.chunks`.
    """
    nbytes = there.numel() * there.element_size()
    for name, encoding in encodings(info).items():
        with step.result.attempt(f"kernel {name}"):
            parts = encode(encoding, info, there)
            given = placed(encoding, info, parts, step.device)
            jobs: dict[str, Callable[[], Any]] = {
                "encode": lambda e=encoding: encode_only(e, info, there),
                "decode": lambda e=encoding, g=given: decode(e, info, g, step.device),
            }
            for job, call in jobs.items():
                took = timed(call, rounds, step.device)
                step.result.figure(
                    f"kernel {name} {job}", 1e3 * took, "ms", ratio=nbytes * link_s / took,
                    of="the pinned link", goal=1,
                )  # fmt: skip
    library_kernels(step, there, rounds)


def library_kernels(step: StepRun, there: Any, rounds: int) -> None:
    """Report the 4-bit kernels of torchao and bitsandbytes, where they are installed and run."""
    for name, make in (("torchao", torchao_kernels), ("bitsandbytes", bitsandbytes_kernels)):
        try:
            for what, call in make(there).items():
                step.result.figure(
                    f"kernel of {name}: {what}", 1e3 * timed(call, rounds, step.device), "ms"
                )
        except Exception as error:
            step.result.note(f"kernels of {name}: not run: {type(error).__name__}: {error}")


def torchao_kernels(w: Any) -> dict[str, Callable[[], Any]]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    made = to_nf4(w, 64, 256)
    return {"to_nf4": lambda: to_nf4(w, 64, 256), "get_original_weight": made.get_original_weight}


def bitsandbytes_kernels(w: Any) -> dict[str, Callable[[], Any]]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(w, quant_type="nf4")
    return {
        "quantize_4bit": lambda: quantize_4bit(w, quant_type="nf4"),
        "dequantize_4bit": lambda: dequantize_4bit(packed, state),
    }


# ------------------------------------------------------------------------------- conversions


def conversions(step: StepRun, w: Any, link_s: float) -> None:
    """Report whole conversions of one weight, there and back, on the CPU and on the device."""
    import torch

    source = step.work / "source"
    torch.save({NAME: w}, source)
    nbytes = w.numel() * w.element_size()
    for name in WAYS:
        compare_devices(step, source, f"full-{name}", nbytes, link_s)
        compare_devices(step, step.work / f"full-{name}-cpu", "full-bf16", nbytes, link_s, of=name)
        for left in step.work.glob("full-*"):
            left.unlink()


def compare_devices(
    step: StepRun, source: Path, to: str, nbytes: int, link_s: float, of: str = ""
) -> None:
    """Convert a file on the CPU and on the device; check that both write the same bytes.

    nbytes  bytes of the dense values, by which rates are counted
    """
    from ckptmap.planning.options import DEVICE_MEMORY

    what = f"convert {of or 'bf16'} -> {to.partition('-')[2]}"
    out = {where: step.work / f"{to}-{where.partition(':')[0]}" for where in ("cpu", step.device)}
    with step.result.attempt(what):
        took = {}
        for where, path in out.items():
            bounded = peaks(step, f"{what}, {where}", DEVICE_MEMORY)
            with bounded if where != "cpu" else nullcontext():
                took[where] = seconds(source, path, to, where, step)
        for where in dict.fromkeys(("cpu", step.device)):
            step.result.figure(f"{what}, {where}", nbytes / took[where] / 1e9, "GB/s",
                               ratio=nbytes * link_s / took[where], of="the pinned link")  # fmt: skip
        if step.on_cuda:
            step.result.figure(f"{what}, the CPU's seconds", took["cpu"], "s",
                               ratio=took["cpu"] / took[step.device], of="the device's")  # fmt: skip
        same = out["cpu"].read_bytes() == out[step.device].read_bytes()
        step.result.check(f"{what}: the CPU's bytes", same)


def seconds(source: Path, out: Path, to: str, device: str, step: StepRun) -> float:
    """Return the seconds of the quicker of two conversions: the first makes tables and buffers."""
    import ckptmap

    def once() -> None:
        shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)
        ckptmap.convert(source, out, to=to, device=device, sync=False)

    return min(clocked(once, device) for _ in range(1 if step.is_tiny else 3))
