"""`make demo`: train a Llama under FSDP1 on 4 ranks, then run it as NF4 under FSDP2 on 2.

Every line that begins with `$` is a command, run from the root of the repository.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo"
TIMEOUT_S = 300
FAILED_LINES = 120
"""How much of a failed command's output is shown: torchrun's own traceback, which comes last, is 40."""

PROGRAMS = {
    "ckptmap": [sys.executable, "-m", "ckptmap"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# One thread a rank, ranks on loopback: nothing of this machine decides what comes out.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TRANSFORMERS_VERBOSITY": "error",
}


def say(text: str = "") -> None:
    print(text, flush=True)


def run(line: str) -> None:
    """Show a command, run it, indent what it prints; its noise only where it fails."""
    name, *args = shlex.split(line)
    say(f"   $ {line}")
    if name == "torchrun":
        args = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *args]
    start = time.perf_counter()
    done = subprocess.run(
        [*PROGRAMS[name], *args], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if done.returncode:
        say("\n".join((done.stdout + done.stderr).splitlines()[-FAILED_LINES:]))
        sys.exit(f"demo: that command ended with exit code {done.returncode}")
    for text in done.stdout.splitlines():
        say(f"   {text}")
    say(f"   [{seconds:.1f} s]\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def verdict(result: dict[str, object]) -> str:
    if result["equal"]:
        return "bit for bit the same"
    return f"NOT the same: they differ by up to {result['max_difference']}"


def main() -> int:
    started = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    say("\nFrom FSDP1 on 4 ranks, with compiled layers, to NF4 under FSDP2 on 2 ranks.\n")

    say("1. A small Llama trains for three steps, and saves what such runs save:")
    run("torchrun --nproc-per-node 4 examples/train_fsdp1.py demo/step-3")

    say("2. What is in there? Headers are enough to tell; torch is not even imported:")
    run("ckptmap inspect demo/step-3")

    aim = "--to fsdp2-nf4 --world-size 2 --optimizer drop"
    say("3. What would a conversion do? Every key has a line, or it would be refused:")
    run(f"ckptmap plan demo/step-3 {aim}")

    say("4. Do it. The output appears by one rename, complete:")
    run(f"ckptmap convert demo/step-3 demo/nf4 {aim}")

    say("5. Is it right? Digests, and every value against the source, by its fidelity:")
    run("ckptmap verify demo/nf4 --against demo/step-3")

    say("6. Load it into a sharded model on 2 ranks, with ckptmap.load(path, model), and run it:")
    run("torchrun --nproc-per-node 2 examples/run_fsdp2_nf4.py demo/nf4 demo/reference.pt")

    result = json.loads((OUT / "result.json").read_text())
    say(f"   linear weights are {result['kind']}s; a rank holds {result['local_nbytes']:,} bytes")
    say(f"   logits {result['logits']} against torchao's own to_nf4 of the original weights,")
    say(f"   whole, in one process, without ckptmap: {verdict(result)}\n")
    say(f"That took {time.perf_counter() - started:.0f} s. All of it is in demo/; now look at")
    say("examples/train_fsdp1.py and examples/run_fsdp2_nf4.py, or try: ckptmap --help\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
