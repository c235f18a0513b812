"""Measure the kernels of 4-bit encodings against torchao's and bitsandbytes', on one CPU thread.

    python benchmarks/kernels_4bit.py                # all; a table on stdout
    python benchmarks/kernels_4bit.py --only decode --size 2048

The weight has 4096 x 4096 elements unless --size is given. Every result is checked against the
libraries' before it is timed. Each contestant runs in a process of its own, so that its peak memory
can be measured. Times are CPU seconds of one thread, the least of `--rounds` calls; on an idle
machine they equal wall time. Memory is the peak of anonymous pages above those before the first
call, minus the result: the memory that a kernel needs in addition to its input and output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BLOCK, SCALER_BLOCK = 64, 256
MIB = 1 << 20


@dataclass(frozen=True)
class Contest:
    """One job and its contestants.

    mine, peers   names of functions of the benchmark module that return a Kernel
    goals         the targets, as a text for the table
    """

    job: str
    mine: str
    peers: tuple[str, ...]
    goals: str


CONTESTS = (
    Contest("encode nf4 (torchao's)", "ours_nf4", ("torchao_nf4", "bnb_nf4"), "20x torchao, 10x bnb, under 20 MiB"),
    Contest("encode nf4 (bitsandbytes')", "ours_bnb_nf4", ("bnb_nf4", "torchao_nf4"), ""),
    Contest("encode fp4", "ours_bnb_fp4", ("bnb_fp4",), ""),
    Contest("decode nf4 (torchao's)", "ours_decode_nf4", ("torchao_decode",), "7x torchao, under 20 MiB"),
    Contest("decode nf4 (bitsandbytes')", "ours_decode_bnb", ("bnb_decode", "torchao_decode"), ""),
)  # fmt: skip
Kernel = tuple[Callable[[], Any], int]
"""The function to time, and the bytes of its result."""


def _weight(size: int, dtype: str) -> Any:
    import torch

    return torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(
        getattr(torch, dtype)
    )


def _info(w: Any) -> Any:
    from ckptmap.tensors import TensorInfo

    return TensorInfo(tuple(w.shape), str(w.dtype).removeprefix("torch."))


def _ours(encoding: Any, w: Any) -> Kernel:
    """Return an encoding as a kernel.

    Values are fed in pieces, as in a conversion, and written to tensors that exist before.
    """
    import torch

    from ckptmap.protocols import LooksFirst

    info = _info(w)
    out = {
        name: torch.zeros(part.numel, dtype=getattr(torch, part.dtype))
        for name, part in encoding.parts(info).items()
    }
    flat, step = w.view(-1), 1 << 19

    def run() -> Any:
        encoder = encoding.encoder(info, "cpu")
        if isinstance(encoder, LooksFirst):
            for at in range(0, flat.numel(), step):
                encoder.look(flat[at : at + step])
        for at in range(0, flat.numel(), step):
            for write in encoder.feed(at, flat[at : at + step]):
                _take(out, write)
        for write in encoder.finish():
            _take(out, write)
        return out

    return run, 0


def _take(out: Any, write: Any) -> None:
    (start,), (count,) = write.box.offsets, write.box.sizes
    out[write.part][start : start + count] = write.values


def ours_nf4(w: Any) -> Kernel:
    from ckptmap.quantization.nf4.encoding import NF4

    return _ours(NF4(BLOCK, SCALER_BLOCK), w)


def ours_bnb_nf4(w: Any) -> Kernel:
    from ckptmap.quantization.bnb.fourbit import FourBit

    return _ours(FourBit("nf4"), w)


def ours_bnb_fp4(w: Any) -> Kernel:
    from ckptmap.quantization.bnb.fourbit import FourBit

    return _ours(FourBit("fp4"), w)


def torchao_nf4(w: Any) -> Kernel:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return lambda: to_nf4(w, BLOCK, SCALER_BLOCK), w.numel() // 2


def _bnb(w: Any, kind: str) -> Kernel:
    from bitsandbytes.functional import quantize_4bit

    return lambda: quantize_4bit(w, quant_type=kind), w.numel() // 2


def bnb_nf4(w: Any) -> Kernel:
    return _bnb(w, "nf4")


def bnb_fp4(w: Any) -> Kernel:
    return _bnb(w, "fp4")


def _decode(encoding: Any, w: Any) -> Kernel:
    """Return a decoding as a kernel: by boxes of rows, as in a conversion, into one tensor."""
    import torch

    from ckptmap.tensors import Box

    info, (encode, _) = _info(w), _ours(encoding, w)
    parts = {name: part.view(encoding.parts(info)[name].shape) for name, part in encode().items()}
    out, rows = torch.zeros_like(w), max(1, (1 << 19) // w.shape[1])

    def run() -> Any:
        for row in range(0, w.shape[0], rows):
            box = Box((row, 0), (min(rows, w.shape[0] - row), w.shape[1]))
            cut = {}
            for name, part in parts.items():
                inner = encoding.part_box(info, name, box)
                for dim, (offset, count) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
                    part = part.narrow(dim, offset, count)
                cut[name] = part
            encoding.decode(info, cut, box, out[row : row + rows])
        return out

    return run, 0


def ours_decode_nf4(w: Any) -> Kernel:
    from ckptmap.quantization.nf4.encoding import NF4

    return _decode(NF4(BLOCK, SCALER_BLOCK), w)


def ours_decode_bnb(w: Any) -> Kernel:
    from ckptmap.quantization.bnb.fourbit import FourBit

    return _decode(FourBit("nf4"), w)


def torchao_decode(w: Any) -> Kernel:
    made = torchao_nf4(w)[0]()
    return made.get_original_weight, w.numel() * w.element_size()


def bnb_decode(w: Any) -> Kernel:
    from bitsandbytes.functional import dequantize_4bit

    packed, state = bnb_nf4(w)[0]()
    return lambda: dequantize_4bit(packed, state), w.numel() * w.element_size()


# ------------------------------------------------------------------------------- checking


def check(w: Any) -> None:
    """Raise AssertionError if our codes, scales or values differ from the libraries' in any bit."""
    import torch

    theirs, mine = torchao_nf4(w)[0](), ours_nf4(w)[0]()
    for name, part in mine.items():
        assert torch.equal(part, getattr(theirs, name).view(-1)), f"torchao's {name}"
    assert torch.equal(ours_decode_nf4(w)[0](), theirs.get_original_weight()), "torchao's values"
    for kind, ours in (("nf4", ours_bnb_nf4), ("fp4", ours_bnb_fp4)):
        (packed, state), mine = _bnb(w, kind)[0](), ours(w)[0]()
        assert torch.equal(mine[""], packed.view(-1)), f"bitsandbytes' {kind} codes"
        assert torch.equal(mine["absmax"], state.absmax), f"bitsandbytes' {kind} absmax"
    assert torch.equal(ours_decode_bnb(w)[0](), bnb_decode(w)[0]()), "bitsandbytes' values"


# ------------------------------------------------------------------------------- measuring


def measure(make: Callable[[Any], Kernel], size: int, dtype: str, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of a call in this process, and the peak MiB minus the result."""
    import torch

    torch.set_num_threads(1)
    w = _weight(size, dtype)
    run, result_nbytes = make(w)
    small = make(_weight(256, dtype))[0]
    small()  # makes tables, imports and allocator arenas before the measurement
    with _Peak() as peak:
        run()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return {"s": min(times), "mib": (peak.nbytes - result_nbytes) / MIB}


class _Peak:
    """The peak of anonymous memory above that at the start of the block, sampled every 200 us."""

    nbytes = 0

    def __enter__(self) -> _Peak:
        self._start, self._stop = _anon(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(2e-4):
            self.nbytes = max(self.nbytes, _anon() - self._start)


def _anon() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def in_own_process(bench: ModuleType, name: str, size: int, dtype: str, rounds: int) -> Any:
    argv = [sys.executable, str(bench.__file__), "--one", name, "--size", str(size)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, "--dtype", dtype, "--rounds", str(rounds)], capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(bench: ModuleType, contest: Contest, size: int, dtype: str, rounds: int) -> None:
    mine = in_own_process(bench, contest.mine, size, dtype, rounds)
    cells = [f"{1e3 * mine['s']:.1f} ms, {mine['mib']:.0f} MiB"]
    for peer in contest.peers:
        found = in_own_process(bench, peer, size, dtype, max(1, rounds // 4))
        cells.append(f"{peer} {1e3 * found['s']:.0f} ms, {found['mib']:.0f} MiB: {found['s'] / mine['s']:.1f}x")  # fmt: skip
    print(f"| {contest.job} | {dtype} | {' | '.join(cells)} | {contest.goals} |", flush=True)


def main(bench: ModuleType) -> None:
    """Run the `CONTESTS` of a benchmark module after its `check` has passed."""
    parser = argparse.ArgumentParser(description=(bench.__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        make = getattr(bench, asked.one)
        print(json.dumps(measure(make, asked.size, asked.dtype, asked.rounds)))
        return
    bench.check(_weight(512, asked.dtype))
    for contest in bench.CONTESTS:
        if asked.only in contest.job:
            compare(bench, contest, asked.size, asked.dtype, asked.rounds)


if __name__ == "__main__":
    main(sys.modules[__name__])
