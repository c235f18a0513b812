"""Entry point of the `ckptmap` command.

Ctrl-C during the imports ends the process silently, as the system does it: Python would print a
traceback from whichever import it interrupted. Once `main` is imported, it answers Ctrl-C.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Run the command line of this process and exit."""
    # Another handler means that SIGINT is to be ignored: under nohup, for one.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import leave

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave()
