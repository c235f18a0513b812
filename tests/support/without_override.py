"""A process that permissions bind, also where tests run as root: it gives up the capabilities to pass them over.

    python -m tests.support.without_override '[["x.pt", 0, ["inspect", "x.pt"]]]'

Runs each command line while a path has a mode; prints one JSON list, [exit code, stderr] of each.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import sys
from pathlib import Path

DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER = 1, 2, 3
VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def give_up() -> None:
    """Drop the capabilities of this thread and of those that it starts. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(VERSION_3, 0), (_Data * 2)()
    if libc.capget(ctypes.byref(header), data):
        raise OSError(ctypes.get_errno(), "capget")
    dropped = 1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH | 1 << FOWNER
    for name in ("effective", "permitted", "inheritable"):
        setattr(data[0], name, getattr(data[0], name) & ~dropped)
    if libc.capset(ctypes.byref(header), data):
        raise OSError(ctypes.get_errno(), "capset")


def main(cases: list[tuple[str, int, list[str]]]) -> list[tuple[int, str]]:
    """Return exit code and stderr of each command line, run while its path has its mode."""
    from ckptmap_cli.main import main as ckptmap

    give_up()
    results = []
    for name, mode, line in cases:
        path, err = Path(name), io.StringIO()
        before = path.stat().st_mode
        path.chmod(mode)
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            results.append((ckptmap(line), err.getvalue()))
        path.chmod(before)
    return results


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
