"""Writers of on-disk formats: the state dict to write, and the files that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ckptmap.protocols.layouts import FlatUnit, Placement
from ckptmap.protocols.setups import CarriedFile
from ckptmap.tensors import Box, Path, TensorInfo

SHARD_NBYTES = 5_000_000_000
"""Bytes of the largest file of a sharded format, where nobody says another size."""


class OutTensor(NamedTuple):
    """A stored tensor to be written: its path in the state dict, shape and dtype, and how it is cut.

    `chunks` tile it once; where `placement` is given, a writer may write some of them again, or
    in parts, as each rank holds them.
    """

    path: Path
    info: TensorInfo
    chunks: Sequence[tuple[int, Box]]
    alias_of: Path | None = None
    """A tie: the same storage as that earlier tensor; set only for a writer that shares it."""
    placement: Placement | None = None
    unit: FlatUnit | None = None
    """Cut with the others of its unit, in the order of the state's tensors; `chunks` is whole."""


@dataclass(frozen=True)
class OutState:
    """Everything a container is asked to write.

    `extra` are plain values by path; `records` go into the container itself, so that a copy
    without its manifest still opens.
    """

    tensors: Sequence[OutTensor]
    extra: Mapping[Path, object] = field(default_factory=dict)
    records: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    world_size: int = 1
    max_shard_nbytes: int | None = None
    """Bytes of the largest file of several; None: as the format has it (`SHARD_NBYTES`, or one file)."""
    stem: str | None = None
    """How names of weight files begin, where the library that loads them looks for one of its own."""
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Dotted key -> (file, offset) in another checkpoint, whose split into files and order in them a
    writer of several files keeps; empty: as the writer has it."""
    inner: Mapping[str, CarriedFile] = field(default_factory=dict)
    """What the writer puts into its own file besides tensors, by name: see `Setup.inner`."""


class Slot(NamedTuple):
    """The place of one chunk in an output file: row-major, `nbytes` from `offset`."""

    path: Path
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OutFile:
    """One file to be written: the places of tensor data, in file order, and all around them.

    `seal(crcs, manifest)` yields (offset, bytes) for everything that is not slot data, once all
    data is written: `crcs` has the CRC-32 of each slot in order (empty unless `needs_crc`),
    `manifest` is the manifest's JSON where `holds_manifest`. `nbytes` is the size before a
    manifest is put in.

    `between(i, crc)`, of a file that `needs_crc`, gives what lies between slot i, of this CRC-32,
    and the next one, so that small slots and what is between them are written at once; `seal`
    leaves that out then.
    """

    name: str
    nbytes: int
    slots: Sequence[Slot]
    seal: Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]
    needs_crc: bool = False
    holds_manifest: bool = False
    between: Callable[[int, int], bytes] | None = None
    mark: str = ""
    """Identifies what is written around the slots, where slots and carried files do not."""

    def pieces(
        self, crcs: Sequence[int], manifest: bytes | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of everything that is not slot data: from `seal` and from `between`."""
        yield from self.seal(crcs, manifest)
        if self.between is not None:
            for index, slot in enumerate(self.slots[:-1]):
                yield slot.offset + slot.nbytes, self.between(index, crcs[index])


class Writer(Protocol):
    """One on-disk format, written."""

    name: str
    one_file: bool
    """True: the destination is a file; False: a directory."""
    shares_storage: bool
    """True: two names of one storage are written once; False: each is written."""

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the files that hold this state, data files first, a commit file last. Deterministic.

        `name` is the destination's own name, for a one-file format.
        """
