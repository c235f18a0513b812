"""What reads an on-disk format: a container, or a framework's directory of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptmap.tensors import Index, Path


@dataclass(frozen=True)
class Place:
    """A path to be recognised: its first bytes if it is a file, its entries if a directory."""

    path: str
    is_dir: bool
    head: bytes = b""
    names: tuple[str, ...] = ()
    """Entry names, natural order, of a directory."""


class Container(Protocol):
    """One on-disk format, read."""

    name: str

    def claims(self, place: Place) -> bool:
        """Is this, by structure, of this format? Never by file extension alone."""

    def index(self, place: Place) -> Index:
        """Everything it holds, from headers only. Raises SourceError where it is malformed."""


@dataclass(frozen=True)
class Member:
    """A checkpoint inside a framework's directory, and what it is to the whole.

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
    """What a framework's directory holds.

    members    in the order of use
    documents  JSON files carried as extra values: key -> entry name
    left       entries that are never read (pickles of foreign classes): where no place is for them
               as they are, they are named as left behind
    world      how many ranks wrote it, where file names tell
    beside     a directory whose files count as lying beside the weights (config, tokenizer)
    """

    members: tuple[Member, ...]
    documents: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()
    world: int = 1
    beside: str | None = None


class Directory(Protocol):
    """One framework's directory: it reads no tensor, it says who does."""

    name: str

    def claims(self, place: Place) -> bool:
        """Has it this framework's names? Never by its own name alone."""

    def members(self, place: Place) -> Members:
        """Raises SourceError where the names contradict each other."""
