"""Metrics of a step, and what a manager saves of it among the extra values.

{"loss": tensor(0.5)}  ->  extra["manager"] = {"metrics": {"loss": 0.5}, "number": 3}
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.errors import ArgumentError


def record(number: int, metrics: Mapping[str, float]) -> dict[str, object]:
    """Return what a manager saves of a step: its metrics, and the number of the save."""
    return {"metrics": dict(metrics), "number": number}


def numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as Python's own numbers. Raises ArgumentError CKM516 for what is none."""
    found: dict[str, float] = {}
    if not isinstance(metrics, Mapping | None):
        raise ArgumentError(
            "CKM516",
            f"metrics: is a {type(metrics).__name__}, expected numbers by name",
            'for example metrics={"loss": loss.item()}',
        )
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
