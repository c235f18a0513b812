"""Check that the stored parts of a quantized tensor (codes, scales) exist and fit, else raise CKM115."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.errors import SourceError
from ckptmap.tensors import Opaque, StoredTensor, TensorInfo

INCOMPLETE = "a quantized tensor needs its codes and all its scales in one checkpoint"
DAMAGED = "the checkpoint's metadata is damaged; convert again from its source"


def malformed(fqn: str, message: str, hint: str = INCOMPLETE) -> SourceError:
    """Return SourceError CKM115 for the quantized tensor `fqn`."""
    return SourceError("CKM115", f"{fqn}: {message}", hint)


def check_parts(
    fqn: str, what: str, expected: Mapping[str, TensorInfo], stored: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Return the parts of `stored`, each a plain tensor of the expected shape and dtype.

    Raises SourceError CKM115 for the first that is missing or different; `what` names the format.
    """
    parts = {}
    for name, want in expected.items():
        part = stored.get(name)
        if part is None:
            raise malformed(fqn, f"{what} part {name!r} is missing, expected {want}")
        if not isinstance(part, StoredTensor):
            kind = part.class_name if isinstance(part, Opaque) else type(part).__name__
            raise malformed(
                fqn,
                f"{what} part {name!r}, expected {want}, found {kind}",
                "save it as a plain tensor",
            )
        if part.info != want:
            raise malformed(fqn, f"{what} part {name!r}, expected {want}, found {part.info}")
        parts[name] = part
    return parts


def read_sizes(fqn: str, value: object, what: str) -> tuple[int, ...]:
    """Return foreign data as a tuple of positive sizes. Raises SourceError CKM115 where it is not."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or not all(type(n) is int and n > 0 for n in value)
        or len(value) > 64
    ):
        raise malformed(fqn, f"{what}, expected positive sizes, found {str(value)[:80]}", DAMAGED)
    return tuple(value)
