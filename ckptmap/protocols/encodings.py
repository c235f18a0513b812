"""Encodings: how a logical tensor is stored as payload and scales, and decoded again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptmap.protocols.offers import offers
from ckptmap.tensors import Box, Cut, Opaque, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Refusal:
    """Why an encoding cannot hold a tensor."""

    reason: str


class Group(NamedTuple):
    """Stored parts that together make one logical tensor of dtype and shape `info`; a tuple,
    because there may be 100,000 of them."""

    fqn: str
    info: TensorInfo
    encoding: Encoding
    parts: Mapping[str, StoredTensor]
    """Part name -> stored tensor; a dense tensor has the one part `""`."""


@dataclass(frozen=True)
class Write:
    """Values of a part, in its dtype: flat `values` go to the run `box` of the part's flat elements."""

    part: str
    box: Box
    values: torch.Tensor


class Encoder(Protocol):
    """Turns one logical tensor into its parts, box by box, in row-major order."""

    step: int
    """A box must hold a multiple of this many elements, counted row-major (the last may not)."""
    splittable: bool
    """True: any box can be encoded alone, in any order; False: needs the whole tensor's statistics."""
    state_nbytes: int
    """Bytes that the encoder keeps between feeds."""

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """Return the writes that are known so far. `values` are flat, row-major, of the logical dtype,
        and start at flat element `offset`."""

    def finish(self) -> Iterable[Write]:
        """Return the writes that are known only after the last element: scales of scales, means."""


@runtime_checkable
class LooksFirst(Protocol):
    """An encoder whose codes depend on a statistic of the whole tensor: it sees all values twice."""

    def look(self, values: torch.Tensor) -> None:
        """Take note of values, flat, in any order; every one is shown once before the first `feed`."""


class Encoding(Protocol):
    """One scheme with its parameters: a frozen value that stands for how one tensor is stored."""

    @property
    def name(self) -> str: ...

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        """Return shape and dtype of every part that would be stored for a logical tensor; no data.

        Part names are suffixes: part `p` of FQN `w` is stored under `w.p`, part `""` under `w`.
        """

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """Return the box of a part that holds what `box` of the logical tensor needs; None: the part
        cannot be cut there."""

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Fill `out` (box.sizes, logical dtype) from parts cut by `part_box(info, p, box)`."""

    def encoder(self, info: TensorInfo, device: str) -> Encoder: ...

    def record(self, info: TensorInfo) -> Mapping[str, object] | None:
        """Return JSON that says how to read the parts again; None: the parts say it themselves."""


@runtime_checkable
class KeepsOnHost(Protocol):
    """An encoding that reads some parts as plain values, JSON for one, wherever it decodes."""

    @property
    def host_parts(self) -> Collection[str]:
        """The parts that `decode` takes on the CPU; it takes the others on the device of `out`."""


@runtime_checkable
class TakesDtype(Protocol):
    """An encoding of values of one dtype, to which others are cast first."""

    takes: ClassVar[str]


@runtime_checkable
class DecodesOnHost(Protocol):
    """An encoding whose values the CPU computes wherever they are wanted, because another device would
    make other bits: it sums in another order."""

    decodes_on_host: ClassVar[bool]


Record: TypeAlias = Mapping[str, object]
"""What `Encoding.record` returned of a weight."""
Records: TypeAlias = Mapping[str, Record]
"""The records of a checkpoint, by FQN."""
Encoded: TypeAlias = tuple[Encoding, TensorInfo]
"""An encoding, and the logical shape and dtype of the weight in it."""


# Encodings whose codes another can keep bit for bit, and how: see `ckptmap.core.quantized_codes`.


@runtime_checkable
class NamesParts(Protocol):
    """An encoding whose parts have names of their library's: `fc._weight_qdata` of `fc.weight`."""

    def part_key(self, key: str, part: str) -> str:
        """Return the stored name of a part of the tensor `key`."""


def beside(key: str, name: str) -> str:
    """Return the name of a tensor of the same module: `fc.input_scale` beside `fc.weight`."""
    module, dot, _ = key.rpartition(".")
    return f"{module}{dot}{name}"


def part_key(encoding: object, key: str, part: str) -> str:
    """Return the stored name of a part: `w.part` of `w`, unless the encoding names it otherwise."""
    if offers(encoding, NamesParts):
        return encoding.part_key(key, part)
    return f"{key}.{part}" if part else key


class Scheme(Protocol):
    """One tensor encoding as the registry knows it: recognises it, and makes it a target.

    `suffix` names it in `--to SETUP-SUFFIX`; empty: it is no target.
    """

    name: str
    suffix: str

    def group(
        self, stored: Mapping[str, StoredTensor], records: Records
    ) -> Sequence[tuple[Group, Sequence[str]]]:
        """Return the logical tensors among stored tensors, each with the keys of its parts.

        Called only if there is a record, or a tensor that is no float of 16 bits or more.
        """

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """Return the parts that a pickled tensor subclass holds; None: the class is not this scheme's.

        Raises SourceError where it is this scheme's but malformed.
        """

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return how this scheme would store the tensor; None: it leaves tensors like this as they
        are (an integer buffer under a cast, a norm under a 4-bit scheme)."""

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """Return how it would store any tensor that the user names, or why it cannot."""
