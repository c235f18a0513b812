"""`python -m tests.corpus.rank_main MODULE ARGS`: run a module as a rank, and leave at once.

gloo may abort a process ("terminate called without an active exception") that ends while its models
still refer to process groups, however well it has closed them. So a rank ends without destructors.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback


def main() -> int:
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
