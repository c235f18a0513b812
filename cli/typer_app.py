"""The typer application: one module a command, of which only the one in use is imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from ckptmap.errors import Interrupted
from ckptmap.version import __version__

from .printer import Printer

COMMANDS = (
    "inspect", "plan", "convert", "verify", "diff", "merge", "report", "mappings", "pull", "push", "ls",
    "doctor", "explain",
)  # fmt: skip
"""Modules of this package; each has a function `command` and `EXAMPLES`."""
HELP = {"help_option_names": ["-h", "--help"]}
FLAT = 16
"""Up to this many options are listed without titles."""


class _Grouped(TyperCommand):
    """A command whose help has options below titles, where there are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        options = [param for param, record in shown if record and isinstance(param, TyperOption)]
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param, record in shown:
            if record is None:
                continue
            title = "Options" if param in options else "Arguments"
            if param in options and len(options) > FLAT:
                title = param.rich_help_panel or title
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def build(args: Sequence[str]) -> typer.Typer:
    """Return the application with the command that `args` begins with, or else with all."""
    app = typer.Typer(
        help="Convert PyTorch checkpoints between training setups: every byte of the output is "
        "accounted for, or nothing is published.",
        epilog=_lines(
            "Examples:",
            "ckptmap inspect runs/step-2000",
            "ckptmap convert runs/step-2000 out/ --to fsdp2-nf4 --world-size 8",
            "ckptmap COMMAND --help",
        )
        + "\n\n"
        + _lines(
            "Exit codes:",
            "0 ok   1 the answer is no   2 usage, or refused and nothing left written",
            "3 failed while working, run again to continue   130 interrupted, likewise",
        ),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=HELP,
    )
    app.callback()(_root)
    for name in args[:1] if args and args[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        examples = _lines("Examples:", *module.EXAMPLES)
        command = _interruptible(module.command)
        app.command(name, cls=_Grouped, epilog=examples, context_settings=HELP)(command)
    return app


def _show_version(flag: bool) -> None:
    if flag:
        Printer().text(f"ckptmap {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def _lines(title: str, *lines: str) -> str:
    """Return text that the help shows line by line, not as a paragraph."""
    return "\b\n" + "\n".join([title, *(f"  {line}" for line in lines)])


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Let Ctrl-C reach `main`, which says how to continue; typer would answer it itself."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise Interrupted("CKM307", "interrupted") from error

    return run
