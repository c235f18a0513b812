"""What an adapter must be: a container, a layout, an encoding scheme, a setup.

One format is one file that holds one of these and one line in `registry.py`. The spine (checkpoint,
plan, execute) speaks to these protocols only and names no format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ckptmap.tensors import Box, Cut, Index, Leaf, Opaque, Path, StoredTensor, TensorInfo

if TYPE_CHECKING:
    from pathlib import Path as FilePath

    import torch

    from ckptmap.disk.siblings import Sibling

# ------------------------------------------------------------------------------- reading


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


# ------------------------------------------------------------------------------- directories


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


# ------------------------------------------------------------------------------- layouts


class Layout(Protocol):
    """One way of cutting a logical tensor over ranks."""

    name: str

    def cut(self, info: TensorInfo, world_size: int) -> Sequence[tuple[int, Box]]:
        """(rank, box) in rank order; the boxes tile the tensor exactly once, none is empty
        unless the tensor is."""

    def join(self, values: Sequence[Leaf], key: str) -> StoredTensor | Cut | Opaque | None:
        """The tensor that these values, one a rank, are the parts of; None: not this layout's.
        Raises SourceError where the parts do not fit together."""


@runtime_checkable
class MeshLayout(Layout, Protocol):
    """A layout that cuts by name, over a mesh of ranks."""

    def over(
        self,
        mesh: str | None,
        tp_plan: str | None,
        world_size: int | None,
        names: Collection[str],
    ) -> MeshLayout:
        """For the mesh that is asked for: `"replicate=2,shard=4"`; None: one dim of the world
        size. `tp_plan` is a file, of which every pattern must match one of `names`. Raises
        PlanError CKM204 where they do not fit together, CKM201 and CKM206 for the plan."""

    @property
    def world_size(self) -> int: ...

    def placement(self, fqn: str, info: TensorInfo, whole: bool) -> Placement:
        """`whole`: no rank of the source held only a part of it, though of others they did."""

    def chunks(self, placement: Placement, info: TensorInfo) -> Sequence[tuple[int, Box]]:
        """(rank, box) that tile the tensor once, each on the first rank that holds it. Raises
        PlanError CKM504 where torch cannot hold it so."""


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """An FSDP1 unit, by the name of its module ("" the root), which flattens the parameters in it.

    `named`: with `use_orig_params=True`, each is there by its own name, too.
    """

    prefix: str
    named: bool


# ------------------------------------------------------------------------------- encodings


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
    """Bytes for a part, of its dtype: flat `values` go to the run `box` of its flat elements."""

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
    """What it keeps between feeds, in bytes."""

    def feed(self, offset: int, values: torch.Tensor) -> Iterable[Write]:
        """`values`: flat, row-major, of the logical dtype, starting at flat element `offset`."""

    def finish(self) -> Iterable[Write]:
        """What is known only after the last element: scales of scales, means."""


class Encoding(Protocol):
    """One scheme with its parameters: a frozen value that stands for how one tensor is stored."""

    @property
    def name(self) -> str: ...

    def parts(self, info: TensorInfo) -> Mapping[str, TensorInfo] | Refusal:
        """Part name -> what would be stored for a logical tensor; no data. Part names are
        suffixes: part `p` of FQN `w` is stored under `w.p`, part `""` under `w` itself."""

    def part_box(self, info: TensorInfo, part: str, box: Box) -> Box | None:
        """The box of a part that holds what `box` of the logical tensor needs; None: the part
        cannot be cut there."""

    def decode(
        self, info: TensorInfo, parts: Mapping[str, torch.Tensor], box: Box, out: torch.Tensor
    ) -> None:
        """Fill `out` (box.sizes, logical dtype) from parts cut by `part_box(info, p, box)`."""

    def encoder(self, info: TensorInfo, device: str) -> Encoder: ...

    def record(self, info: TensorInfo) -> Mapping[str, Any] | None:
        """JSON that says how to read the parts again; None where the parts say it themselves."""


# Encodings whose codes another can keep bit for bit, and how: see `ckptmap.geometry.grids`.


@runtime_checkable
class NamesParts(Protocol):
    """An encoding whose parts have names of their library's: `fc._weight_qdata` of `fc.weight`."""

    def part_key(self, key: str, part: str) -> str:
        """The stored name of a part of the tensor `key`."""


def part_key(encoding: Encoding, key: str, part: str) -> str:
    """The stored name of a part: `w.part` of `w`, where the encoding does not say otherwise."""
    if isinstance(encoding, NamesParts):
        return encoding.part_key(key, part)
    return f"{key}.{part}" if part else key


class Scheme(Protocol):
    """One tensor encoding as the registry knows it: recognises it, and makes it a target.

    `suffix` names it in `--to SETUP-SUFFIX`; empty: it is no target.
    """

    name: str
    suffix: str

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, Any]]
    ) -> list[tuple[Group, Sequence[str]]]:
        """Groups found among plainly stored tensors, each with the keys that it consumes. Asked
        only where there is a record, or a tensor that is no float of 16 bits or more."""

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        """The group that a pickled tensor subclass holds; None: not this scheme's class.
        Raises SourceError where it is this scheme's but malformed."""

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """How this scheme would store the tensor; None: it leaves tensors like this as they are
        (an integer buffer under a cast, a norm under a 4-bit scheme)."""

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """How it would store any tensor that the user names, or why it cannot."""


# ------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Placement:
    """How the ranks of a mesh hold a tensor, for a writer that gives each rank a file of its own.

    mesh    (name, size) of the mesh dims, ranks row-major; a name may be ""
    shards  for each mesh dim the tensor dim that it cuts, None: replicated, ABSENT: the tensor
            knows nothing of this mesh dim, its ranks hold the same. None instead of all of them:
            a plain tensor, whole on every rank
    """

    mesh: tuple[tuple[str, int], ...]
    shards: tuple[int | None, ...] | None

    ABSENT: ClassVar[int] = -1

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.mesh)


class OutTensor(NamedTuple):
    """A stored tensor to be written: where in the state dict, what, and cut how.

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
    extra: Mapping[Path, Any] = field(default_factory=dict)
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world_size: int = 1
    max_shard_nbytes: int = 5_000_000_000
    stem: str | None = None
    """How names of weight files begin, where the library that loads them looks for one of its own."""


class Slot(NamedTuple):
    """Where one chunk's bytes go in an output file: row-major, `nbytes` from `offset`."""

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

    def pieces(
        self, crcs: Sequence[int], manifest: bytes | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of all that is not slot data: what `seal` gives and what is between."""
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
        """The files that hold this state, data files first, a commit file last. `name` is the
        destination's own name, for a one-file format. Deterministic."""


class Declared(Protocol):
    """The weights that are written, as what lies beside them must declare them."""

    def config(
        self, present: Mapping[str, Any] | None, heads: Collection[str]
    ) -> Mapping[str, Any] | None:
        """Their `quantization_config`, for the one that the source had, and for the modules whose
        weight is tied to another; None: there must be none."""

    def undeclared(
        self, present: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None
    ) -> Sequence[str]:
        """What should be said of what `present` declares and `wanted` does not."""

    def check(self, document: Mapping[str, Any]) -> None:
        """Raises PlanError CKM203 where a model of this config could not load them."""


class Carrier(Protocol):
    """What a framework keeps beside the weights, and what it says about them.

    `siblings` are the source's files beside its weights; `beside`, if given, is a directory or
    config file to take them from instead.
    """

    def ties(
        self, infos: Mapping[str, TensorInfo], siblings: Sequence[str], beside: str | None
    ) -> Mapping[str, str]:
        """FQN -> the FQN it is declared tied to; the first is not written if both are equal."""

    def files(
        self,
        siblings: Sequence[str],
        beside: str | None,
        dtypes: Collection[str],
        quantized: Declared,
        untied: Collection[str],
    ) -> tuple[dict[str, Sibling], list[str]]:
        """Files by name, and notes; `dtypes` are those of the matrices that are written, `untied`
        heads that are no longer tied to an embedding."""

    def stem(self, carried: Mapping[str, Sibling]) -> str | None:
        """How names of weight files must begin for who loads them beside these files; None: as
        the writer has them."""


class Filing(Protocol):
    """How a framework's directory keeps what is neither weight nor optimizer state: in files, each
    by the key of its value."""

    def file_of(self, key: str) -> str | None:
        """`"scheduler"` -> `"scheduler.bin"`; None: it has no place for such a value."""

    def rank_of(self, key: str) -> int | None:
        """The one rank whose value it is; None: it is that of all."""

    def new_rank(self, rank: int, first: str) -> tuple[str, Sibling] | None:
        """Name and content of what a rank needs that the source had not, by the file of its rank 0;
        None: nothing."""

    def notes(self, keys: Collection[str], before: int, after: int) -> list[str]:
        """What should be said of values that go along from one number of ranks to another."""


class Grouping(Protocol):
    """How what loads a setup groups the parameters of its optimizer, where it counts them."""

    def groups(self, config: FilePath, infos: Mapping[str, TensorInfo]) -> list[list[str]] | None:
        """The parameters `infos`, one list a group, by the model of a config.json; None: it is of
        another model."""


@dataclass(frozen=True)
class Setup:
    """A point on the axes, as `--to` names it."""

    name: str
    layout: str
    writer: str
    wrap: tuple[str, ...] = ()
    """Segments put before every name, outermost first: `("module",)`."""
    sharded: bool = False
    """True: cut over `--world-size` ranks."""
    holds_extra: bool = True
    """False: has no place for what is not a weight (optimizer, step)."""
    carrier: Carrier | None = None
    """Who carries files beside the weights over; None: the setup has no place for them."""
    rooted: bool = False
    """True: the weights are at `model` and the optimizer at `optimizer`, whatever there is."""
    places: tuple[str, ...] | None = None
    """Extra values that it has a place for, plain ones only; None: any."""
    filing: Filing | None = None
    """Who says in which files it keeps extra values, one each; None: they are with the weights."""
    dense: bool = False
    """True: its own loader knows plain tensors only, no payload with scales beside it."""
    optimizer_keys: str = ""
    """The one key form of optimizer state that it takes; empty: any."""
    grouping: Grouping | None = None
    """Who knows the groups that its loader makes; None: the source's are kept."""
    live: str = ""
    """What wraps the live model that it is for: "plain", "compiled", "DDP", "FSDP1" or "FSDP2"; empty:
    nothing is known of what such a model holds."""
    summary: str = ""

    @property
    def head(self) -> str:
        """The first segment that its wrappers put before names; empty without wrappers."""
        return self.wrap[0] if self.wrap else ""

    def has_place_for(self, path: Path, tensor: bool = False) -> bool:
        """Is there a place for this extra value?"""
        if self.filing is not None:
            name = self.filing.file_of(str(path[0]))
            return name is not None and not (tensor and name.endswith(".json"))
        if not self.holds_extra or self.places is None:
            return self.holds_extra
        return path[0] in self.places and not tensor
