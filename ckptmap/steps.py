"""What a plan consists of: files to be written, and where the bytes of each slot come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptmap.grids import Grid
from ckptmap.lazy import LazyTensor
from ckptmap.protocols import Encoding, OutFile
from ckptmap.tensors import Chunk, StoredTensor


@dataclass(frozen=True)
class FilePlan:
    """One output file; `sources[i]` holds the bytes of slot i as they are (the slot's box is in
    that stored tensor's coordinates), None: an Encode step writes it."""

    out: OutFile
    sources: Sequence[StoredTensor | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A slot: `plan.files[file].out.slots[slot]`."""

    file: int
    slot: int


@dataclass(frozen=True)
class Encode:
    """Encode one logical tensor anew, from its values or from its codes; `targets[part]` are the
    slots that tile it."""

    tensor: LazyTensor
    encoding: Encoding
    targets: Mapping[str, Sequence[Target]]
    fidelity: str
    """exact, codes, cast, quantize or requantize."""
    keeps: Grid | None = None
    """The codes that are kept bit for bit; None: decoded and encoded anew."""


@dataclass(frozen=True)
class Compare:
    """A replica that must hold the same bytes as the tensor it repeats."""

    key: str
    tensor: StoredTensor
    replica: Chunk
    hint: str = "the ranks did not hold the same values: find out which is right, or drop the key"
