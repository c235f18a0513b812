"""Check that encoders make the same bytes on a GPU as on the CPU, and measure their speed there.

    python benchmarks/gpu.py                    # all; without a GPU it prints so and exits with 0
    python benchmarks/gpu.py --size 8192 --dtype float32
    python benchmarks/gpu.py --device cpu --size 256 --rounds 1     # a quick test of this program

The check comes first. Each quantization scheme that takes the weight must make the same parts on
both devices, bit for bit, and decode them to the same values. Nothing in the loop over boxes may
wait for the device: torch's sync debug mode raises if it does. Then these are timed by CUDA events,
and the median of `--rounds` is printed:

    link      a copy from pinned host memory to the device: an upper bound for a conversion
    staged    the same copy, with every box encoded on arrival; the goal is 80 % of the link's rate
    kernel    encode or decode of values on the device, and the kernels of torchao and bitsandbytes
    convert   a whole `ckptmap.convert` of a file in the page cache: read, encode, write
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FEED = 1 << 22
"""Elements in each call of `feed`: a GPU needs more at once than a CPU cache holds."""
NAME = "model.layers.0.mlp.up_proj.weight"
MEMORY = 256 << 20
"""The buffers of a conversion here, in bytes: a GPU takes larger boxes than a CPU."""
GOAL = 0.8
"""The share of the link's rate that bf16 to NF4 should reach."""


def encodings(info: Any) -> dict[str, Any]:
    """Return the encoding that each registered scheme would use for this weight, by scheme name."""
    from ckptmap import registry

    found = {}
    for scheme in registry.schemes():
        encoding = scheme.target(NAME, info) if scheme.suffix else None
        if encoding is not None and encoding.name != "dense":
            found[scheme.name] = encoding
    return found


def encode(encoding: Any, info: Any, w: Any, sync: Callable[[str], None]) -> dict[str, Any]:
    """Return the encoded values of each part, flat, on the CPU.

    `sync` is called with "error" when waiting for the device is forbidden, else with "default".
    """
    import torch

    encoder, flat = encoding.encoder(info, str(w.device.type)), w.reshape(-1)
    step = max(1, FEED // encoder.step) * encoder.step
    writes = []
    for at in range(0, flat.numel(), step):
        sync("error" if at else "default")  # the first feed makes tables
        writes += encoder.feed(at, flat[at : at + step])
    sync("default")
    writes += encoder.finish()
    parts: dict[str, list[Any]] = {}
    for write in writes:
        parts.setdefault(write.part, []).append(write.values.cpu().reshape(-1))
    return {name: torch.cat(values) for name, values in parts.items()}


def decode(encoding: Any, info: Any, parts: Mapping[str, Any], device: str) -> Any:
    import torch

    from ckptmap.tensors import Box

    whole, out = Box.whole(info.shape), torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)  # fmt: skip
    cut = {}
    for name, part in encoding.parts(info).items():
        box = encoding.part_box(info, name, whole)
        values = parts[name].to(device).view(part.shape)
        for dim, (offset, count) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            values = values.narrow(dim, offset, count)
        cut[name] = values
    encoding.decode(info, cut, whole, out)
    return out


def sync_mode(device: str) -> Callable[[str], None]:
    """Return the function that forbids waiting for the device, and allows it again."""
    import torch

    return torch.cuda.set_sync_debug_mode if device.startswith("cuda") else lambda mode: None


def check(w: Any, info: Any, device: str) -> list[str]:
    """Return a line for each difference between the devices; print each comparison."""
    wrong = []
    for name, encoding in encodings(info).items():
        there = encode(encoding, info, w.to(device), sync_mode(device))
        here = encode(encoding, info, w, lambda mode: None)
        bad = [part for part, values in here.items() if not _same(values, there[part])]
        if not _same(
            decode(encoding, info, here, "cpu"), decode(encoding, info, here, device).cpu()
        ):
            bad.append("decoded values")
        print(f"{name:14s} {info}: {'the same bytes as the CPU' if not bad else f'DIFFERS: {bad}'}")
        wrong += [f"{name} {info}: {part}" for part in bad]
    return wrong


def _same(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


# ------------------------------------------------------------------------------- timing


def timed(run: Callable[[], Any], rounds: int, device: str) -> float:
    """Return the median seconds of a call, by CUDA events, or by the clock on the CPU."""
    import torch

    run()
    if not device.startswith("cuda"):
        return statistics.median(clocked(run) for _ in range(rounds))
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def clocked(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def staged(encoding: Any, info: Any, pinned: Any, device: str) -> Callable[[], Any]:
    """Return a run that copies boxes from pinned memory, two ahead, and encodes each on arrival.

    It uses the two streams of `ckptmap.execution.cuda_ring`, as a conversion does.
    """
    import torch

    from ckptmap.execution.cuda_ring import DEPTH, Lanes

    flat = pinned.view(-1)

    def run() -> None:
        way, encoder = Lanes(device), encoding.encoder(info, device)
        step = max(1, FEED // encoder.step) * encoder.step
        places = [torch.empty(step, dtype=flat.dtype, device=device) for _ in range(DEPTH)]
        free = [way.mark()] * DEPTH
        for turn, at in enumerate(range(0, flat.numel(), step)):
            given = flat[at : at + step]
            place = places[turn % DEPTH][: given.numel()]
            way.upload(place, given, free[turn % DEPTH])
            list(encoder.feed(at, place))
            free[turn % DEPTH] = way.mark()

    return run


def link(pinned: Any, device: str) -> Callable[[], Any]:
    import torch

    place = torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
    return lambda: place.copy_(pinned, non_blocking=True)


def converted(w: Any, device: str, rounds: int) -> tuple[float, bool]:
    """Return the median seconds of a conversion of one weight to full-nf4, and whether the CPU
    writes the same file.

    The source is in the page cache, and no digests are computed.
    """
    import torch

    import ckptmap

    with tempfile.TemporaryDirectory() as folder:
        torch.save({NAME: w}, f"{folder}/in")

        def run(where: str = device) -> None:
            ckptmap.convert(
                f"{folder}/in", f"{folder}/out", to="full-nf4", device=where, overwrite=True,
                max_memory=MEMORY, digest="none",
            )  # fmt: skip

        run("cpu")
        expected = Path(f"{folder}/out").read_bytes()
        run()
        same = Path(f"{folder}/out").read_bytes() == expected
        return statistics.median(clocked(run) for _ in range(rounds)), same


def library_kernels(w: Any) -> dict[str, Callable[[], Any]]:
    """Return the 4-bit kernels of torchao and bitsandbytes that can be run here, by name."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        made = to_nf4(w, 64, 256)
        found["torchao to_nf4"] = lambda: to_nf4(w, 64, 256)
        found["torchao get_original_weight"] = made.get_original_weight
    except Exception as error:
        print(f"torchao: not run: {error}")
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(w, quant_type="nf4")
        found["bitsandbytes quantize_4bit"] = lambda: quantize_4bit(w, quant_type="nf4")
        found["bitsandbytes dequantize_4bit"] = lambda: dequantize_4bit(packed, state)
    except Exception as error:
        print(f"bitsandbytes: not run: {error}")
    return found


def against_libraries(w: Any, info: Any, device: str) -> None:
    """Print how many codes differ from those of bitsandbytes' kernel on the device.

    All-zero blocks differ.
    """
    import torch

    mine = encodings(info)
    try:
        from bitsandbytes.functional import quantize_4bit
    except Exception as error:
        print(f"bitsandbytes: not compared: {error}")
        return
    for kind in ("nf4", "fp4"):
        packed, state = quantize_4bit(w.to(device), quant_type=kind)
        found = encode(mine[f"bnb-{kind}"], info, w.to(device), lambda mode: None)
        differ = int((found[""] != packed.cpu().view(-1)).sum())
        same = torch.equal(found["absmax"], state.absmax.cpu())
        print(f"bitsandbytes' {device} {kind}: {differ} of {packed.numel()} bytes of codes differ, absmax {'equal' if same else 'DIFFERS'}")  # fmt: skip


def time_all(w: Any, info: Any, rounds: int, device: str) -> list[str]:
    """Print all times; return a line for each difference from the CPU's result."""
    nbytes, there = w.numel() * w.element_size(), w.to(device)
    on_gpu = device.startswith("cuda")
    pinned = w.pin_memory() if on_gpu else w
    base = timed(link(pinned, device), rounds, device)
    print(f"link: {nbytes / base / 1e9:.1f} GB/s from pinned memory")
    for name, encoding in encodings(info).items():
        if on_gpu:
            took = timed(staged(encoding, info, pinned, device), rounds, device)
            goal = f", goal {GOAL:.0%}" if name == "nf4" and info.dtype == "bfloat16" else ""
            rate = f"{nbytes / took / 1e9:.1f} GB/s, {base / took:.0%} of the link{goal}"
            print(f"staged {name}: {rate}")
        time_kernels(name, encoding, info, there, rounds, device)
    for name, run in library_kernels(there).items():
        print(f"kernel {name}: {1e3 * timed(run, rounds, device):.2f} ms")
    took, same = converted(w, device, rounds)
    print(f"convert to nf4: {nbytes / took / 1e9:.1f} GB/s, {base / took:.0%} of the link")
    return [] if same else ["convert: the file differs from the CPU's"]


def time_kernels(name: str, encoding: Any, info: Any, there: Any, rounds: int, device: str) -> None:
    parts = encode(encoding, info, there, lambda mode: None)
    onto = {part: values.to(device) for part, values in parts.items()}
    feed = timed(lambda: encode_only(encoding, info, there), rounds, device)
    back = timed(lambda: decode(encoding, info, onto, device), rounds, device)
    print(f"kernel {name}: encode {1e3 * feed:.2f} ms, decode {1e3 * back:.2f} ms")


def encode_only(encoding: Any, info: Any, w: Any) -> None:
    """Call `feed` for the whole weight, without `finish`, which copies statistics to the CPU."""
    encoder, flat = encoding.encoder(info, str(w.device.type)), w.view(-1)
    step = max(1, FEED // encoder.step) * encoder.step
    for at in range(0, flat.numel(), step):
        list(encoder.feed(at, flat[at : at + step]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    import torch

    on_gpu = asked.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("CUDA: not run")
        return 0
    from ckptmap.tensors import TensorInfo

    name = torch.cuda.get_device_name() if on_gpu else asked.device
    print(f"{name}, torch {torch.__version__}")
    maker, wrong = torch.Generator().manual_seed(1), []
    side = min(1024, asked.size)
    for dtype in ("bfloat16", "float16", "float32"):
        w = torch.randn(side, side, generator=maker).mul_(0.02)
        w[3] = 0
        wrong += check(w.to(getattr(torch, dtype)), TensorInfo((side, side), dtype), asked.device)
    w = torch.randn(asked.size, asked.size, generator=maker).to(getattr(torch, asked.dtype))
    info = TensorInfo(tuple(w.shape), asked.dtype)
    against_libraries(w, info, asked.device)
    wrong += time_all(w, info, asked.rounds, asked.device)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
