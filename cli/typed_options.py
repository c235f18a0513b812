"""Commands that take options of a conversion: their parameters come from `option_table`.

`takes_options` gives a command the parameters that typer needs, and hands the typed values to it as
one `TypedOptions`, which makes the library's `Options` and `RunOptions` of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from ckptmap.planning.options import Options, RunOptions

from .option_table import GROUPS, TABLE, Value, read_param_order
from .shared_parameters import number

if TYPE_CHECKING:
    from ckptmap.checkpoint.checkpoint import Checkpoint

Command = Callable[..., None]
OPTION_TYPES, RUN_OPTION_TYPES = get_type_hints(Options), get_type_hints(RunOptions)
FIELD_TYPES = {**OPTION_TYPES, **RUN_OPTION_TYPES}
FIELD_DEFAULTS = {
    field.name: field.default for kind in (Options, RunOptions) for field in fields(kind)
}


def field_of(name: str) -> str:
    """Return the field of `Options` or `RunOptions` that an option sets."""
    return TABLE[name].field or name


PLAN_OPTIONS = tuple(name for name in TABLE if field_of(name) in OPTION_TYPES)
"""Options that say what is written, in the order of the help."""


def _repeats(name: str) -> bool:
    return TABLE[name].kind is None and FIELD_TYPES[field_of(name)] == tuple[str, ...]


def _default(name: str) -> Value:
    """Return the default of an option in the form in which it is typed."""
    option = TABLE[name]
    if _repeats(name):
        return None
    if option.default is not None or option.kind is not None:
        return option.default
    return FIELD_DEFAULTS[field_of(name)]


def _parameter(name: str, help: str) -> inspect.Parameter:
    """Return the parameter of an option, annotated as typer reads it."""
    option = TABLE[name]
    kind = option.kind or FIELD_TYPES[field_of(name)]
    if _repeats(name):
        kind = list[str] | None
    about = typer.Option(
        *(option.names or ("--" + name.replace("_", "-"),)),
        metavar=option.metavar or (None if option.at_least is None else "N"),
        help=help or option.help,
        rich_help_panel=next(title for title, group in GROUPS.items() if name in group),
        show_default=option.show_default,
        callback=option.check,
        parser=None if option.at_least is None else number(int, option.at_least),
        autocompletion=option.complete,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=_default(name),
        annotation=Annotated[kind, about],
    )


@dataclass(frozen=True)
class TypedOptions:
    """Options of a conversion as they were typed, by the names of `option_table`."""

    values: Mapping[str, Value]

    def _given(self, kinds: Mapping[str, object]) -> dict[str, Value]:
        return {
            field_of(name): _value(name, typed)
            for name, typed in self.values.items()
            if field_of(name) in kinds and typed not in ([], _default(name))
        }

    def options_given(self) -> dict[str, Value]:
        """Return the fields of `Options` that were typed, with their values."""
        return self._given(OPTION_TYPES)

    def options(self, to: str) -> Options:
        return Options(to=to, **self.options_given())

    def run_options(self) -> RunOptions:
        return RunOptions(**self._given(RUN_OPTION_TYPES))


def _value(name: str, typed: Value) -> Value:
    read = TABLE[name].read
    if read is not None:
        return read(typed)
    return tuple(typed) if _repeats(name) else typed


def takes_options(*names: str, **help: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command options of a conversion.

    The command receives them as its argument `typed`. They stand in its help where `typed` stands
    in its signature, in the order of `names`. `help` replaces texts of the table.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        among = [_parameter(name, help.get(name, "")) for name in names]
        parameters: list[inspect.Parameter] = []
        for parameter in own.values():
            parameters += among if parameter.name == "typed" else [parameter]
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]

        @functools.wraps(command)
        def run(**given: Value) -> None:
            values = {item.name: given.get(item.name, item.default) for item in parameters}
            typed = {name: values.pop(name) for name in names}
            command(**values, typed=TypedOptions(typed))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


@contextmanager
def opened_source(path: str, typed: TypedOptions) -> Iterator[Checkpoint | str]:
    """Give a checkpoint, opened with the options that name its parts; its path without any."""
    root, like, order = (typed.values.get(name) for name in ("source_root", "like", "param_order"))
    if root is None and like is None and order is None:
        yield path
        return
    import ckptmap

    given = None if order is None else read_param_order(order)
    with ckptmap.open(path, root=root, like=like, param_order=given) as ckpt:
        yield ckpt


def typed_names(typed: TypedOptions) -> dict[str, Value]:
    """Return the options that change names by prefix and pattern, as arguments of a Python call."""
    names = {name: typed.values.get(name) for name in ("strip_prefix", "rename", "add_prefix")}
    return {name: value for name, value in names.items() if value}
