"""The first module of a command: until `main` is there to answer it, Ctrl-C ends the process as the
system does, without a word of Python's about whichever import it met."""

from __future__ import annotations

import signal


def run() -> None:
    """The command line of a process of its own. Does not return."""
    ours = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else it is ignored: nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import leave

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave()
