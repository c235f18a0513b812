"""Tensors as they lie in files, what else a state dict can hold, and the index of a container."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptmap.tensors.boxes import (
    Box,
    Chunk,
    Extent,
    Region,
    TensorInfo,
)

BUFFERS = (
    "inv_freq", "original_inv_freq", "running_mean", "running_var", "e_score_correction_bias",
)  # fmt: skip
"""Last segments of the FQNs of buffers in every known model: floating, but never sharded."""

PARAMETERS = ("weight", "bias")
"""Last segments of the FQNs of parameters, in every known model."""

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a leaf of a nested state dict: `("model", "layers.0.weight")`."""


FEW_CHUNKS = 16
"""Up to this many chunks, a scan of all of them is faster than a search."""


@dataclass(frozen=True, slots=True)
class _Search:
    """Chunks sorted along the dim with the most cuts, to find those near a box by bisection."""

    dim: int
    chunks: Sequence[Chunk]
    starts: Sequence[int]
    longest: int

    @classmethod
    def over(cls, chunks: Sequence[Chunk]) -> _Search:
        ndim = len(chunks[0].box.sizes)
        dim = max(range(ndim), key=lambda d: len({chunk.box.offsets[d] for chunk in chunks}))
        ordered = sorted(chunks, key=lambda chunk: chunk.box.offsets[dim])
        longest = max(chunk.box.sizes[dim] for chunk in ordered)
        return cls(dim, ordered, [chunk.box.offsets[dim] for chunk in ordered], longest)

    def near(self, box: Box) -> Sequence[Chunk]:
        low, size = box.offsets[self.dim], box.sizes[self.dim]
        first = bisect_right(self.starts, low - self.longest)
        return self.chunks[first : bisect_left(self.starts, low + size)]


Places: TypeAlias = Extent | Sequence[Chunk]


class StoredTensor:
    """A tensor as it is stored in files: chunks that tile it, and replicas that must equal them.

    Its place is an extent, or chunks, or a function that returns one of these. The function is
    called once, when the place is first needed, because it may have to read a header.
    """

    __slots__ = ("_place", "_search", "_share", "info", "replicas")

    def __init__(
        self,
        info: TensorInfo,
        place: Places | Callable[[], Places],
        replicas: Sequence[Chunk] = (),
        share: object = None,
    ) -> None:
        self.info = info
        self._place = place
        self._search: _Search | None = None
        self.replicas = replicas if replicas == () else tuple(replicas)
        self._share = share

    @property
    def share(self) -> object:
        """A value equal for two tensors that are one view of one storage, or None: a stated tie."""
        return self._share

    @property
    def place(self) -> Places:
        """The extent or the chunks. Unlike `chunks`, this creates no chunk for an extent."""
        place = self._place
        if type(place) is Extent:
            return place
        if callable(place):
            place = self._place = place()
        return place

    @property
    def chunks(self) -> Sequence[Chunk]:
        place = self.place
        if type(place) is not Extent:
            return place  # type: ignore[return-value]
        info = self.info
        region = Region.contiguous(place.file, place.offset, info.shape, info.itemsize)
        return (Chunk(Box.whole(info.shape), region, place.crc32),)

    @property
    def extent(self) -> Extent | None:
        """The one extent of all bytes; None if they are in several, or not in row-major order."""
        place = self.place
        if type(place) is Extent:
            return place
        if len(place) != 1:
            return None
        box, region, crc32 = place[0]
        if box != Box.whole(self.info.shape) or not region.is_contiguous:
            return None
        return Extent(region.file, region.offset, crc32)

    def pieces(self, box: Box) -> Iterator[tuple[Box, Region]]:
        """Yield the regions that tile `box`, each with its box relative to `box`."""
        whole = box.sizes == self.info.shape
        for held, region, _ in self.near(box):
            if whole and held.lies_in(box.sizes):
                yield held, region
                continue
            common = held.intersect(box)
            if common is None:
                continue
            if common.sizes != held.sizes:
                region = region.crop(common.relative_to(held.offsets))
            yield common if whole else common.relative_to(box.offsets), region

    def near(self, box: Box) -> Sequence[Chunk]:
        """Return the chunks that may share elements with `box`; by a search if there are many."""
        if len(self.chunks) < FEW_CHUNKS or not box.sizes:
            return self.chunks
        if self._search is None:
            self._search = _Search.over(self.chunks)
        return self._search.near(box)

    def __repr__(self) -> str:
        return f"StoredTensor({self.info})"


@dataclass(frozen=True, eq=False)
class Opaque:
    """A pickled object as an inert record: its class is never imported or called.

    `args` are the arguments of the call that the pickle asks for, `state` the state that it would
    set (usually a dict of attributes), `info` the outer shape and dtype of a tensor subclass.
    """

    module: str
    name: str
    args: tuple[Leaf, ...] = ()
    state: Leaf = None
    info: TensorInfo | None = None

    @property
    def class_name(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_empty(self) -> bool:
        """Whether it is a tensor on the meta device: torch saves no values of such a tensor."""
        return self.class_name == "torch._utils._rebuild_meta_tensor_no_storage"

    @property
    def is_unresolved(self) -> bool:
        """Whether it is a view that torch conjugates or negates on use, and saves without that."""
        bits = self.args[-1] if self.args and self.module == "torch._utils" else None
        return isinstance(bits, dict) and bool(bits.get("conj") or bits.get("neg"))

    def __repr__(self) -> str:
        return f"<{self.class_name}>"


@dataclass(frozen=True)
class Cut:
    """A tensor whose stored chunks are objects of a tensor subclass: one NF4Tensor of each rank."""

    info: TensorInfo
    pieces: tuple[tuple[Box, Opaque], ...]


def as_inert(value: Opaque | StoredTensor) -> Opaque:
    """Return a piece of a `Cut` as an Opaque. A plain tensor becomes an Opaque whose state has the
    stored tensor under ""."""
    if isinstance(value, Opaque):
        return value
    return Opaque("torch", "Tensor", state={"": value}, info=value.info)


@dataclass(frozen=True)
class PerRank:
    """The values that the ranks of one save hold under one key, in rank order; None: no value."""

    values: Sequence[Leaf]


@dataclass(frozen=True)
class StateNote:
    """A leaf that notes how the parameters of the optimizer state beside it were named (`order`),
    or why that state cannot be used (`refused`)."""

    order: str = ""
    refused: str = ""


PlainValue: TypeAlias = (
    bool | int | float | complex | str | bytes
    | Sequence["Leaf"] | Set["Leaf"] | Mapping[Any, "Leaf"] | None
)  # fmt: skip
"""A value that is no tensor. A list, set or dict may hold other leaves."""

Leaf: TypeAlias = StoredTensor | Opaque | Cut | PerRank | StateNote | PlainValue
"""A value that a state dict holds under one path."""


@dataclass(frozen=True)
class Index:
    """The contents of a container, from headers alone.

    leaves           every leaf of the nested state dict by its path, tensors and others
    files            every file that belongs to the checkpoint, absolute
    records          ckptmap's own encoding records, by the FQN of the logical tensor
    world            how many ranks wrote it, where the container tells; else 1
    manifest         returns the manifest that lies inside the container itself, for formats of one
                     file: it is as large as the header, and few ask for it
    manifest_spans   returns (offset, nbytes) of the parts of the file that no digest in such a
                     manifest can cover: its own bytes, in one span that comes first, and its CRC-32s
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
    module_order     returns path of a dict of weights -> its modules, as stored, in the order of the model:
                     those dicts for which the container lists them
    about            what the container says of the model, in one line; "" where it says nothing
    metadata         what it says besides tensors that is no leaf: key -> value, long ones cut short
    naming           the naming scheme of all containers of the format; "": they have any names
    unmapped_model   the model that the container says it holds, where no scheme of `naming` is for it
    setup            the nearest setup, where it is none of those that write the container; "": one of them
    made_files       returns files that lie beside the weights elsewhere (config.json), made of the
                     container's own metadata: name -> content
    made_tensors     names of tensors that a writer makes of metadata, no weights of a model: a manifest does not
                     list those that it made
    """

    container: str
    leaves: Mapping[Path, Leaf]
    files: tuple[str, ...]
    records: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    world: int = 1
    notes: tuple[str, ...] = ()
    manifest: Callable[[], bytes] | None = None
    manifest_spans: Callable[[], Sequence[tuple[int, int]]] | None = None
    sidecar_dir: str | None = None
    units: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    unread_files: tuple[str, ...] = ()
    missing_weights: tuple[str, ...] = ()
    file_of: Mapping[str, str] = field(default_factory=dict)
    keeps_order: Callable[[StoredTensor], bool] | None = None
    module_order: Callable[[], Mapping[Path, Sequence[str]]] | None = None
    about: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    naming: str = ""
    unmapped_model: str = ""
    setup: str = ""
    made_files: Callable[[], Mapping[str, bytes]] | None = None
    made_tensors: frozenset[str] = frozenset()


def in_saved_order(stored: StoredTensor) -> bool:
    """Return True: `Index.keeps_order` of a container that keeps the order of a dict."""
    return True
