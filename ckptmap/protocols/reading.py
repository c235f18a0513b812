"""Readers of on-disk formats: of one container, or of a framework's directory of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptmap.protocols.file_systems import Mounts
from ckptmap.tensors import Index, Path


@dataclass(frozen=True)
class Place:
    """A path to be recognised: the first bytes of a file, or the entries of a directory."""

    path: str
    is_dir: bool
    head: bytes = b""
    names: tuple[str, ...] = ()
    """The entry names of a directory, in natural order."""
    mounts: Mounts = field(default_factory=Mounts, repr=False, compare=False)
    """The file systems to read its files through."""


class Container(Protocol):
    """One on-disk format, read."""

    name: str

    def claims(self, place: Place) -> bool:
        """Return whether the file or directory has this format's structure, not its extension alone."""

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
        """Return whether the directory has entries that only this framework names so."""

    def members(self, place: Place) -> Members:
        """Return the checkpoints in the directory. Raises SourceError where names contradict each other."""
