"""The command line as one rank of several: python -m tests.ranks.command_line ARGS

It is `python -m ckptmap ARGS` with the interpreter's exit functions, which a forked rank leaves out: by
them a rank that fails says its last words.
"""

from __future__ import annotations

import atexit

from ckptmap.__main__ import main
from ckptmap.execution import ranks

ranks.GRACE_S = 60.0
"""On a busy machine a rank may meet an error, or hear that it must stop, many seconds after another."""

if __name__ == "__main__":
    atexit._clear()  # those of the process that this one was forked from
    try:
        main()
    finally:
        atexit._run_exitfuncs()
