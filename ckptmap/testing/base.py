"""The base of all checks: failures that say what went wrong, and adapters registered for a while."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import merge_members
from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.formats.detect import look
from ckptmap.optim.state import KeyForm
from ckptmap.protocols import Container, Directory, Index, Layout, Scheme, Setup, Writer
from ckptmap.sharding.reference_model import Unflattener
from ckptmap.storage.files import Files
from ckptmap.tensors import StoredTensor

Adapter: TypeAlias = (
    Container | Directory | KeyForm | Layout | Scheme | Setup | Unflattener | Writer
)

_MARKS = (
    ("containers", "index"),
    ("directories", "members"),
    ("layouts", "cut"),
    ("schemes", "adopt"),
    ("writers", "one_file"),
    ("key_forms", "whole"),
    ("unflatteners", "unflatten"),
)
"""(registry group, an attribute that only adapters of that group have)."""


def expect(holds: object, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, under `python -O` too."""
    if not holds:
        raise AssertionError(message)


@contextmanager
def required(title: str) -> Iterator[None]:
    """Turn any other exception of the block into an AssertionError that says what was being checked."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{title}: {type(error).__name__}: {error}") from error


def run_all(kit: Any) -> None:
    """Run every check of a kit, in order."""
    for name in kit.CHECKS:
        with required(f"{type(kit).__name__}.{name}"):
            getattr(kit, name)()


def group_of(adapter: Adapter) -> str:
    """Return the registry group of an adapter, by the attributes it has."""
    if isinstance(adapter, Setup):
        return "setups"
    groups = [group for group, mark in _MARKS if hasattr(adapter, mark)]
    kinds = ", ".join(group.replace("_", " ") for group, _ in _MARKS)
    expect(
        groups, f"{adapter!r} is not a setup, and has no attribute that marks one of the {kinds}"
    )
    return groups[0]


@contextmanager
def registered(*adapters: Adapter) -> Iterator[None]:
    """Register adapters for the block, before all others and in place of those of the same name.

    This changes the registry of the whole process, so only one thread may use it at a time.
    """
    own_adapters: dict[str, list[Any]] = {}
    for adapter in adapters:
        own_adapters.setdefault(group_of(adapter), []).append(adapter)
    registered_adapters = registry._all

    def own_first(specs: Iterable[str], group: str) -> Iterator[object]:
        first = own_adapters.get(group, [])
        yield from first
        own_names = {adapter.name for adapter in first}
        yield from (
            other
            for other in registered_adapters(specs, group)
            if getattr(other, "name", "") not in own_names
        )

    registry._all = own_first
    try:
        yield
    finally:
        registry._all = registered_adapters


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Yield `[n]`, where n counts the bytes that the block reads from files, except through mmap.

    Without /proc it counts only the reads of `Files`.
    """
    counter = [0]
    read_before, original = _rchar(), Files.read_into

    def counted(
        self: Files, file: str, offset: int, buffers: Sequence[memoryview], has_gaps: bool = False
    ) -> None:
        counter[0] += sum(buffer.nbytes for buffer in buffers)
        original(self, file, offset, buffers, has_gaps)

    Files.read_into = counted  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        Files.read_into = original  # type: ignore[method-assign]
        counter[0] = max(counter[0], _rchar() - read_before)


def _rchar() -> int:
    """Return the bytes that this process has read, as Linux counts them; 0 elsewhere."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(lines[0].split()[1])


def claims(reader: Container | Directory, path: Path) -> bool:
    """Return whether the reader claims a path."""
    return reader.claims(look(path))


def indexed(reader: Container | Directory, path: Path) -> Index:
    """Return the index that the reader itself gives for a path."""
    place = look(path)
    with registered(reader):
        return reader.index(place) if hasattr(reader, "index") else merge_members(reader, place)


def opened(path: str | os.PathLike[str], *adapters: Adapter) -> Checkpoint:
    """Open a checkpoint with these adapters registered."""
    with registered(*adapters):
        return open_checkpoint(path)


def stored_tensors(ckpt: Checkpoint) -> list[tuple[str, StoredTensor]]:
    """Return (FQN, stored tensor) for every stored tensor of the weights."""
    return [(fqn, part) for fqn in ckpt for part in ckpt.group(fqn).parts.values()]
