"""Signatures of public calls that take the fields of a dataclass as `**keywords`.

`inspect.signature`, `help()` and editors then show every keyword with its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Called = TypeVar("Called", bound=Callable[..., object])


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
