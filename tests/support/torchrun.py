"""torchrun on one machine, whose ranks share one import of torch and transformers: 3 s of a processor for all of them.

python tests/support/torchrun.py --nproc-per-node N --master-addr A --master-port P FILE ARGS

The ranks of the demo are run by it; `tests.execution.test_ranks` and pages of docs run torch's own torchrun.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder

from tests.corpus import rank_server  # noqa: E402


def rank(number: int, options: argparse.Namespace) -> int:
    """Run the program as one rank; the exit code."""
    about = {
        "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks,
        "MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port,
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in about.items()})
    sys.argv = options.program
    try:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(number: int, options: argparse.Namespace) -> int:
    """Fork one rank; its process id."""
    pid = os.fork()
    if not pid:
        code = rank(number, options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def main() -> int:
    """Run all ranks; the exit code of the first that fails, which ends the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", dest="ranks", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rank_server.preload()
    running = {start(number, options) for number in range(options.ranks)}
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
