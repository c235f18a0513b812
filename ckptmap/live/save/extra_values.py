"""The caller's own values in a save: `extra`, which all ranks share, and `extra_per_rank`.

extra.NAME                        the values of rank 0; ranks that give any must give the same
extra.per_rank.rank3.NAME         those of rank 3: the position of its data loader, for one
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.core import argument_checks
from ckptmap.core.state_paths import ListIndex
from ckptmap.errors import ArgumentError
from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.model.tensor_reader import as_bytes
from ckptmap.live.model.values_in_memory import without_values
from ckptmap.tensors import Path

if TYPE_CHECKING:
    import torch


def shared(
    step: int | None, extra: Mapping[str, object] | None, own: frozenset[str]
) -> dict[str, object]:
    """Return the values of `step` and `extra` by name. `own` are the names that ckptmap uses itself.

    Raises ArgumentError CKM516 for what cannot be saved."""
    values = argument_checks.extra(extra, () if step is None else ("step",))
    if reserved := sorted(own & set(values)):
        raise ArgumentError(
            "CKM516", f"extra: {reserved} are names of ckptmap's own", "use other names"
        )
    if step is None:
        return values
    return {"step": argument_checks.integer("step", step, 0), **values}


def digests(values: Mapping[str, object]) -> dict[str, str]:
    """Return a digest of each value, by which ranks compare them: of shapes, dtypes and bytes of
    tensors, of the text of plain values. Raises ArgumentError CKM516 for a tensor that is not plain."""
    found = {}
    for name, value in values.items():
        digest = hashlib.blake2b(digest_size=16)
        for piece in _pieces(("extra", name), value):
            digest.update(len(piece).to_bytes(8, "little") + piece)
        found[name] = digest.hexdigest()
    return found


def _pieces(path: Path, value: object) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        require_plain(path, value)
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        yield bytes(as_bytes(value))
    elif isinstance(value, Mapping):
        yield b"dict"
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces((*path, key), item)
    elif isinstance(value, list | tuple):
        yield b"list %d" % len(value)
        for number, item in enumerate(value):
            yield from _pieces((*path, ListIndex(number)), item)
    elif isinstance(value, bool | int | float | str | bytes | None):
        yield repr(value).encode("utf-8", "surrogatepass")
    else:  # refused by its name when it is written; its text may hold an address
        yield type(value).__name__.encode()


def require_plain(path: Path, value: torch.Tensor) -> None:
    """Raise ArgumentError CKM516 for a tensor whose values are not plain bytes on this rank."""
    if not (odd := without_values(value)):
        return
    hint = "give its values as a plain tensor: to_dense(), dequantize()"
    if is_dtensor(value):
        hint = (
            "give its full_tensor(), taken on every rank, or save the model that it is of by a"
            " ckptmap.save of its own"
        )
    where = ".".join(map(str, path))
    raise ArgumentError("CKM516", f"{where}: is a tensor {odd}, expected a plain tensor", hint)


def require_same(digests_of: Sequence[Mapping[str, str]]) -> None:
    """Raise ArgumentError CKM516 where ranks give different `extra` values, or another rank gives values
    and rank 0 none. Other ranks may give none at all."""
    first = digests_of[0]
    for rank, theirs in enumerate(digests_of):
        if not theirs:
            continue
        names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if names:
            raise ArgumentError(
                "CKM516",
                f"extra[{names[0]!r}]: differs between rank 0 and rank {rank}, expected the same on"
                " all ranks",
                "pass what belongs to one rank as extra_per_rank=",
            )


def require_same_step(steps: Sequence[int | None]) -> None:
    """Raise ArgumentError CKM516 where ranks give different steps, or another rank gives one and rank 0
    none. Other ranks may give none."""
    for rank, step in enumerate(steps):
        if step is not None and step != steps[0]:
            raise ArgumentError(
                "CKM516",
                f"step: is {steps[0]} on rank 0 and {step} on rank {rank}, expected the same on all"
                " ranks",
                "pass the count of optimizer steps, which all ranks make together",
            )
