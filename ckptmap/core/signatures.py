"""Keywords of public calls: each is shown by `help()`, and a wrong one is answered by the nearest.

A call that takes the fields of a dataclass as `**keywords` has all of them in its signature, with
their defaults, for `inspect.signature`, `help()` and editors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptmap.core import argument_checks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Called = TypeVar("Called", bound=Callable[..., object])
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def spelled_out(
    *options: type[DataclassInstance], only: Collection[str] | None = None
) -> Callable[[Called], Called]:
    """Show the fields of dataclasses in the signature of a call in place of its `**keywords`.

    only  the names of the fields that the call takes; None: all. A field that the call names
          itself, as `to`, is not shown twice
    """

    def decorate(call: Called) -> Called:
        signature = inspect.signature(call)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {parameter.name for parameter in parameters}
        for field in (field for option_class in options for field in fields(option_class)):
            if field.name in names or (only is not None and field.name not in only):
                continue
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=field.type,
                )
            )
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def nearest_keyword(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a call answer an unknown keyword by ArgumentError CKM516 with the nearest name."""
    parameters = inspect.signature(call).parameters.values()
    known = [
        item.name
        for item in parameters
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]

    @functools.wraps(call)
    def checked(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        if keywords:
            argument_checks.known_keywords(keywords, known, f"{call.__name__}()")
        return call(*args, **keywords)

    return checked
