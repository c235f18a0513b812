"""Run `ckptmap COMMAND` and turn every outcome into an exit code.

0 ok · 1 the answer is no · 2 usage, or refused, and nothing is left written · 3 failed while
working, run again to continue · 130 interrupted, likewise. Only the module of the command in use
is imported, and this package itself never imports torch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from ckptmap.core import requirements
from ckptmap.core.printable import join, printable, quote
from ckptmap.errors import CkptmapError, Interrupted
from ckptmap.storage.resource_limits import resource_error
from ckptmap.typed_options import typed_options

from .printer import Printer, Unprintable
from .without_typer import run_without_typer

GC_THRESHOLD = (200_000, 20, 20)
"""Opening a checkpoint creates objects by the 100,000 and no garbage: collections are lost time."""
USAGE, WORKING = 2, 3
ENDING = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP")]
"""Signals that end a run as Ctrl-C does (`storage.process_guards` has them for the library)."""
UNPRINTED = (
    "send it elsewhere and run it again; a conversion is complete if its destination is there"
)
INTERRUPTED = Interrupted.exit_code


class _EscapedRecord(logging.LogRecord):
    """A line that a library logs, with names in it escaped."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


@typed_options()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, by default the process's own; return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    gc.set_threshold(*GC_THRESHOLD)
    logging.setLogRecordFactory(_EscapedRecord)
    Printer.printed, Printer.args, Printer.typed = False, tuple(args), _typed(args)
    out = Printer(json="--json" in args)
    before = {number: _answer(number, _interrupt) for number in ENDING}
    try:
        return _run(args, out)
    finally:
        for number, handler in before.items():
            _answer(number, handler)


def _run(args: list[str], out: Printer) -> int:
    """Run the command; return its exit code, whatever comes of it."""
    try:
        code = run_without_typer(args)
        if code is None:
            from .typer_app import build

            code = build(args)(args, prog_name="ckptmap", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _expected(Interrupted("CKM307", "interrupted"), args, out)
    except CkptmapError as error:
        return _expected(error, args, out)
    except ModuleNotFoundError as error:
        library = (error.name or "ckptmap").partition(".")[0]
        if library.startswith("ckptmap"):
            return _unexpected(error, args, out)
        missing = requirements.not_installed(library)
        incomplete = requirements.import_failure(error) if "." in (error.name or "") else None
        return _expected(incomplete or missing, args, out)
    except Exception as error:
        if isinstance(error, Unprintable):
            out.error("", f"stdout cannot be written: {error}", UNPRINTED)
            return WORKING
        short = _closed(error) or resource_error(error) or requirements.import_failure(error)
        if short is not None:
            return _expected(short, args, out)
        refuse = _usage if hasattr(error, "format_message") else _unexpected
        return refuse(error, args, out)


def leave() -> NoReturn:
    """Run the command line of this process and end it at once.

    Freeing the objects of 100,000 tensors would take longer than opening them. One of several ranks
    ends the ordinary way: the others may still read what it has said.
    """
    warnings.showwarning = _show_warning
    # Threads of numpy's OpenBLAS would spin, and there is no work for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = main()
    except KeyboardInterrupt:  # before `main` could answer it, or a second time while it did
        code = INTERRUPTED
    if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    """Open streams that the caller has closed (`>&-`): nobody reads them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (until the end)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _answer(number: int, handler: object) -> object:
    """Set the handler of a signal and return the one before; what is ignored, as under nohup, stays so."""
    try:
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]
    except (ValueError, TypeError):  # not in the main thread, or a handler of C code
        return None
    return before


def _typed(args: Sequence[str]) -> dict[str, str]:
    """Return absolute path -> as typed, for arguments that may be relative paths."""
    names = [arg for arg in args[1:] if arg and not os.path.isabs(arg) and arg[0] != "-"]
    try:
        as_typed = {str(Path(name).absolute()): name.rstrip("/") for name in names}
    except OSError:  # the working directory is gone
        return {}
    return dict(sorted(as_typed.items(), key=lambda item: -len(item[0])))


def _usage(error: Any, args: Sequence[str], out: Printer) -> int:
    """Print what the parser refuses in the form of every other error; return the exit code.

    `error` is an exception of click's; releases of typer differ in where its class lives.
    """
    from .usage_hints import usage_hint, usage_message

    if len(args) == 0:
        error.show()
        return USAGE
    message = usage_message(error.format_message())
    hint = usage_hint(message, args)
    out.error("usage", message, hint)
    return USAGE


def _expected(error: CkptmapError, args: Sequence[str], out: Printer) -> int:
    hint = error.hint
    if isinstance(error, Interrupted) and args[:1] in (["convert"], ["merge"], ["pull"], ["push"]):
        hint = f"the same command continues it: ckptmap {join(args)}"
    out.error(error.code, error.message, hint)
    _trace(error)
    return error.exit_code


def _closed(error: Exception) -> CkptmapError | None:
    """Return the error of a file that the process may neither read nor write, where nothing else named it."""
    if not isinstance(error, PermissionError) or not error.filename:
        return None
    name = os.fsdecode(error.filename)
    hint = f"check its permissions, and those of its directory: ls -ld {quote(name)}"
    return CkptmapError("CKM101", f"{name}: permission denied", hint)


def _unexpected(error: Exception, args: Sequence[str], out: Printer) -> int:
    text = str(error).strip().splitlines() or [""]
    hint = f"please report it with the output of: CKPTMAP_DEBUG=1 ckptmap {join(args)}"
    out.error("", f"{type(error).__name__}: {text[0]}", hint)
    _trace(error)
    return WORKING


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of any library as `warnings.showwarning` does, with names in it escaped."""
    Printer().note(f"{category.__name__}: {message}")


def _trace(error: Exception) -> None:
    if os.environ.get("CKPTMAP_DEBUG", "") not in ("", "0"):
        import traceback

        Printer().traceback("".join(traceback.format_exception(error)))
