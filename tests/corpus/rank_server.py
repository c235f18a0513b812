"""A process that has imported what ranks import, and forks a rank for each line of its stdin.

Nearly all the time of a rank in the tests would be the import of torch and of the libraries beside
it: 2 to 5 seconds of a processor, again for every rank. A forked rank finds them imported. It is a
process of its own in all else: its own session, environment, working directory, output files and
exit code. `tests.corpus.ranks` starts the servers and speaks to them; nobody else does.

A request is a line of JSON: `id`, `module`, `args`, `env`, `cwd`, and the files `stdout` and
`stderr`. The answers are lines too: `["started", -1, pid]` once the server has imported all; of each rank
`["started", id, pid]`, then `["ended", id, exit code, processor seconds]`; the code is negative for a
signal as in `subprocess`. The server ends when its stdin does, and its ranks with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import sys
import time
from typing import Any

from tests.corpus import rank_main

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "torchao.optim",
    "torchao.quantization",
    "safetensors.torch",
    "bitsandbytes",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "peft",
)
"""Libraries that ranks use."""
OURS = (
    "ckptmap.checkpoint",
    "ckptmap.core",
    "ckptmap.execution",
    "ckptmap.formats",
    "ckptmap.live",
    "ckptmap.mapping",
    "ckptmap.operations",
    "ckptmap.optim",
    "ckptmap.planning",
    "ckptmap.quantization",
    "ckptmap.sharding",
    "ckptmap.storage",
    "ckptmap.tensors",
)
"""Packages whose modules are imported, no more: 0.7 s of a processor for each rank. What they find out when they are
used, plugins say, each rank finds out by itself."""
POLL_S = 0.02


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    preload()
    answer(answers, "started", -1, os.getpid())
    live: dict[int, int] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([requests], [], [], POLL_S if live else None)
        if ready:
            data = os.read(requests, 1 << 16)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = fork(request, (requests, answers))
                live[pid] = request["id"]
                answer(answers, "started", request["id"], pid)
        reap(live, answers)
    for pid in live:
        os.killpg(pid, signal.SIGKILL)


def preload() -> None:
    """Import what ranks share, before the first of them is forked."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in OURS:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in a fork"
    gc.freeze()  # what is shared stays shared
    gc.set_threshold(
        50_000, 20, 20
    )  # as the command line has it: ranks make many objects and little garbage


def answer(fd: int, *words: Any) -> None:
    os.write(fd, json.dumps(words).encode() + b"\n")


def reap(live: dict[int, int], answers: int) -> None:
    """Say which ranks have ended."""
    while live:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        code, taken_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        answer(answers, "ended", live.pop(pid), code, round(taken_s, 3))


def fork(request: dict[str, Any], ours: tuple[int, int]) -> int:
    """Start the rank; the process id of it."""
    pid = os.fork()
    if pid:
        while os.getsid(pid) != pid:  # its group is there before anybody may end it
            time.sleep(0.001)
        return pid
    code = 1
    try:
        become(request, ours)
        code = rank_main.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(request: dict[str, Any], ours: tuple[int, int]) -> None:
    """Turn this fork of the server into what `python -m tests.corpus.rank_main` would be."""
    os.setsid()
    for fd in ours:
        os.close(fd)
    for fd, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    more = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path and path not in sys.path]
    sys.argv = ["rank_main", request["module"], *request["args"]]
    random.seed()
    numpy: Any = importlib.import_module("numpy")
    numpy.random.seed()


if __name__ == "__main__":
    main()
