"""Readers of on-disk formats: of one container, or of a framework's directory of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptmap.tensors import Leaf, Path, StoredTensor


@dataclass(frozen=True)
class Place:
    """A path to be recognised: the first bytes of a file, or the entries of a directory."""

    path: str
    is_dir: bool
    head: bytes = b""
    names: tuple[str, ...] = ()
    """The entry names of a directory, in natural order."""


@dataclass(frozen=True)
class Index:
    """The contents of a container, from headers alone.

    leaves           every leaf of the nested state dict by its path, tensors and others
    files            every file that belongs to the checkpoint, absolute
    records          ckptmap's own encoding records, by the FQN of the logical tensor
    world            how many ranks wrote it, where the container tells; else 1
    manifest         returns the manifest that lies inside the container itself, for formats of one
                     file: it is as large as the header, and few ask for it
    notes            what a reader should be told: stale files left aside, repaired metadata
    sidecar_dir      the directory whose config and tokenizer belong to the weights; None: the
                     directory of the weights
    units            path of a dict of weights -> the modules in it that FSDP1 wraps, as stored
    unread_files     what none of the leaves holds: files, or `KEY of FILE`
    missing_weights  those of `unread_files` that hold weights of modules that follow the model:
                     without them the model does not load
    file_of          key of an extra value -> the file that holds this value and nothing else
    keeps_order      tells whether a tensor stands where the saved dict had it; None: the container
                     keeps no order
    """

    container: str
    leaves: Mapping[Path, Leaf]
    files: tuple[str, ...]
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: int = 1
    notes: tuple[str, ...] = ()
    manifest: Callable[[], bytes] | None = None
    sidecar_dir: str | None = None
    units: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    unread_files: tuple[str, ...] = ()
    missing_weights: tuple[str, ...] = ()
    file_of: Mapping[str, str] = field(default_factory=dict)
    keeps_order: Callable[[StoredTensor], bool] | None = None


def in_saved_order(stored: StoredTensor) -> bool:
    """Return True: `Index.keeps_order` of a container that keeps the order of a dict."""
    return True


class Container(Protocol):
    """One on-disk format, read."""

    name: str

    def claims(self, place: Place) -> bool:
        """Is the file or directory of this format, by its structure? Never by file extension alone."""

    def index(self, place: Place) -> Index:
        """Return everything it holds, from headers only. Raises SourceError where it is malformed."""


@dataclass(frozen=True)
class Member:
    """A checkpoint inside a framework's directory, and its role there.

    path  absolute; a file or a directory, or the framework's directory itself with `names`
    role  "model", "optimizer" or "extra". A second "model" is a copy of the first: where both
          have a tensor they are compared, and the first is used. "all": weights and optimizer,
          under names of its own
    root  the dict inside that holds it: `("model",)`
    key   the name that an extra gets; empty: its values lie at the top
    names the entries of `path` that it consists of; empty: all
    """

    path: str
    role: str
    root: Path = ()
    key: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Members:
    """The contents of a framework's directory.

    members    in the order of use
    documents  JSON files carried as extra values: key -> entry name
    unread_files  entries that are never read (pickles of foreign classes); where the target has
                  no place for them as they are, the notes name them as left behind
    world         how many ranks wrote it, where file names tell
    sidecar_dir   a directory whose files (config, tokenizer) belong to the weights
    """

    members: tuple[Member, ...]
    documents: Mapping[str, str] = field(default_factory=dict)
    unread_files: Sequence[str] = ()
    world: int = 1
    sidecar_dir: str | None = None


class Directory(Protocol):
    """One framework's directory: it reads no tensor, it lists the checkpoints in it."""

    name: str

    def claims(self, place: Place) -> bool:
        """Has the directory entries that only this framework names so? Never by its own name alone."""

    def members(self, place: Place) -> Members:
        """Return the checkpoints in the directory. Raises SourceError where names contradict each other."""
