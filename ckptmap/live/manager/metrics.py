"""Metrics of a step, and what a manager saves of it among the extra values.

{"loss": tensor(0.5)}  ->  extra["manager"] = {"metrics": {"loss": 0.5}, "number": 3}
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.core import argument_checks
from ckptmap.errors import ArgumentError
from ckptmap.operations.step_directories import MANAGER


def with_record(
    number: int, metrics: Mapping[str, float] | None, extra: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the extra values of a save, with those of the manager. Raises ArgumentError CKM516."""
    values = argument_checks.extra(extra, (MANAGER,))
    return {**values, MANAGER: {"metrics": numbers(metrics), "number": number}}


def numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as Python's own numbers. Raises ArgumentError CKM516 for what is none."""
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ArgumentError(
                "CKM516",
                f"metrics[{name!r}]: is a {type(value).__name__}, expected a number",
                "pass float(value)",
            ) from None
    return found
