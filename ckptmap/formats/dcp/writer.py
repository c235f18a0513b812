"""Write DCP directories that plain `torch.distributed.checkpoint.load` reads at any world size.

    __R_0.distcp    the chunks of rank R, each a torch.save archive that starts at a multiple of 64 bytes
    .metadata       shape, dtype and chunks of every tensor, and the place of every chunk; last

Source: torch/distributed/checkpoint/filesystem.py and default_planner.py, torch 2.3 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.state_paths import ListIndex, counts
from ckptmap.errors import PlanError
from ckptmap.formats.dcp.metadata_records import Item, Metadata, TensorEntry
from ckptmap.formats.dcp.metadata_writer import emit_metadata
from ckptmap.formats.pickle.writer import StorageTensor, Unwritable, dump
from ckptmap.formats.torch_save.writer import ZipLayout, layout_zip
from ckptmap.protocols import OutFile, OutState, Setup, Slot
from ckptmap.tensors import Box, Path, TensorInfo

RECORD_SUFFIX = ".__ckptmap__"
_SEGMENTS = frozenset({str, ListIndex})
"""Types of path segments that `.metadata` keeps as they are; other integers become strings."""
ROOT = "archive"
"""The folder inside the zip of each item: the name that torch takes when it saves to a stream."""
ALIGN = 64
"""Items, and the data in them, start at multiples of ALIGN bytes. torch packs items without alignment."""

FSDP1 = Setup(
    "fsdp1",
    layout="shard0",
    writer="dcp",
    sharded=True,
    live="FSDP1",
    summary="DCP directory, Shard(0) over N ranks, as FSDP1's SHARDED_STATE_DICT saves",
)
FSDP2 = Setup(
    "fsdp2",
    layout="shard0",
    writer="dcp",
    sharded=True,
    live="FSDP2",
    summary="DCP directory, Shard(0) over N ranks, as FSDP2's DTensors save",
)


class DcpWriter:
    """Writes one `__R_0.distcp` for each rank that has chunks, and `.metadata` last.

    A flat key is a path joined with dots; `.metadata` keeps the path too. Tied tensors are stored
    under both names, as torch stores them. Plain values and encoding records go into rank 0's file.
    Dicts, and lists of dicts, are written leaf by leaf, as torch flattens them, so that
    `dcp.load({"optimizer": optimizer.state_dict()})` finds its keys.
    """

    name = "dcp"
    one_file = False
    shares_storage = False

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the data files in the order of ranks, then `.metadata`.

        Raise PlanError CKM114 if two entries have one flat key or one entry is inside another, CKM203
        for a value that a pickle of plain values cannot hold.
        """
        with paused_gc():
            return _Draft().files(state)


@dataclass(frozen=True)
class _Form:
    """The torch.save archive of a contiguous chunk. `head` is the bytes before its data."""

    layout: ZipLayout
    data_nbytes: int
    head: bytes

    def tail(self, crc: int) -> bytes:
        """Return the bytes after data of this CRC-32."""
        start, piece = self.layout.seal([crc], {})[-1]
        return piece[self.layout.offsets[0] + self.data_nbytes - start :]


@dataclass(slots=True)
class _RankFile:
    """A data file under construction: slots, and the items or ready bytes around them."""

    name: str
    nbytes: int = 0
    slots: list[Slot] = field(default_factory=list)
    forms: list[tuple[int, _Form]] = field(default_factory=list)
    """Offset and archive of the item of each slot."""
    values: list[tuple[int, bytes]] = field(default_factory=list)

    def place(self, nbytes: int) -> Item:
        """Append an item of this size at the next multiple of ALIGN, and return its byte range."""
        start = self.nbytes + -self.nbytes % ALIGN
        self.nbytes = start + nbytes
        return Item(self.name, start, nbytes)


class _Draft:
    """Collects the items of all ranks, and the records of `.metadata` that list them."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankFile] = {}
        self._tensors: dict[str, TensorEntry] = {}
        self._values: dict[str, Item] = {}
        self._paths: dict[str, Path] = {}
        self._refusals: list[tuple[str, str]] = []
        """The path and the reason of each value that no pickle of plain values holds."""

    def files(self, state: OutState) -> list[OutFile]:
        """Return the data files and `.metadata`. A draft is used once."""
        for tensor in state.tensors:
            key = self._key(tensor.path)
            cuts = [(box, self._item(rank, tensor.path, tensor.info.dtype, box))
                    for rank, box in tensor.chunks]  # fmt: skip
            chunks = tuple((box.offsets, box.sizes, item) for box, item in cuts)
            self._tensors[key] = TensorEntry(tensor.info, chunks)
        for path, value in state.extra.items():
            for leaf, plain in _flattened(path, value):
                self._value(leaf, plain)
        for fqn, record in state.records.items():
            self._value((fqn + RECORD_SUFFIX,), _plain(record))
        if self._refusals:
            error = Unwritable(self._refusals)
            raise PlanError("CKM203", str(error), error.hint)
        _require_leaves({*self._paths.values()})
        metadata = emit_metadata(Metadata(self._tensors, self._values, self._paths))
        data = [_out_file(self._ranks[rank]) for rank in sorted(self._ranks)]
        seal = partial(_sealed, metadata)
        return [*data, OutFile(".metadata", len(metadata), (), seal)]

    def _key(self, path: Path) -> str:
        key = ".".join(map(str, path))
        if key in self._paths:
            raise PlanError(
                "CKM114",
                f"{key!r} would be written twice: as {self._paths[key]} and as {path}",
                "drop or rename one of them",
            )
        # An integer in a stored path is an index of a list; torch turns integer keys of dicts into strings.
        known = _SEGMENTS.issuperset(map(type, path))
        self._paths[key] = path if known else tuple(str(s) if counts(s) else s for s in path)
        return key

    def _rank(self, rank: int) -> _RankFile:
        file = self._ranks.get(rank)
        if file is None:
            file = self._ranks[rank] = _RankFile(f"__{rank}_0.distcp")
        return file

    def _item(self, rank: int, path: Path, dtype: str, box: Box) -> Item:
        """Append the torch.save archive of a chunk, and return its item; the data are written later."""
        file = self._rank(rank)
        form = _form(dtype, box.sizes)
        item = file.place(form.layout.nbytes)
        file.forms.append((item.offset, form))
        file.slots.append(Slot(path, box, item.offset + form.layout.offsets[0], form.data_nbytes))
        return item

    def _value(self, path: Path, value: object) -> None:
        key = self._key(path)
        try:
            raw = _archive(dump(value, name=key))
        except Unwritable as error:
            self._refusals += error.refusals
            return
        file = self._rank(0)
        item = self._values[key] = file.place(len(raw))
        file.values.append((item.offset, raw))


def _require_leaves(paths: set[Path]) -> None:
    """Raise PlanError CKM114 if a path is both a leaf and a dict around other leaves. Flat keys could
    hold that; the nested dicts that torch loads could not."""
    above = {path[:-1] for path in paths if len(path) > 1}
    while above:
        for path in above & paths:
            raise PlanError(
                "CKM114",
                f"{'.'.join(map(str, path))!r} would be both a dict and a value",
                "drop or rename one of them",
            )
        above = {path[:-1] for path in above if len(path) > 1}


def _flattened(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """Yield the leaves of a value, as torch's `traverse_state_dict` does.

    Unlike there, an empty dict, which would vanish, and a dict with keys other than strings, which
    would come back as strings, are leaves.
    """
    if isinstance(value, Mapping) and value and all(type(key) is str for key in value):
        for key, item in value.items():
            yield from _flattened((*path, key), item)
    elif isinstance(value, list) and _holds_dicts(value):
        for index, item in enumerate(value):
            yield from _flattened((*path, ListIndex(index)), item)
    else:
        yield path, value


def _holds_dicts(values: list[object]) -> bool:
    return any(
        isinstance(item, Mapping) or (isinstance(item, list) and _holds_dicts(item))
        for item in values
    )


def _plain(record: Mapping[str, object]) -> dict[str, object]:
    """Return a record as plain dicts and lists."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in sorted(record.items())
    }


@lru_cache(maxsize=4096)
def _form(dtype: str, sizes: tuple[int, ...]) -> _Form:
    """Return the archive of a chunk. It is cached: most chunks of a model have one of a few shapes."""
    info = TensorInfo(sizes, dtype)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    stride = tuple(reversed(strides))
    pickle = dump(StorageTensor("0", dtype, info.numel, 0, sizes, stride))
    layout = layout_zip(ROOT, pickle, [("0", info.nbytes)], align=ALIGN)
    _, start = layout.seal([0], {})[0]
    return _Form(layout, info.nbytes, start[: layout.offsets[0]])


def _archive(pickle: bytes) -> bytes:
    """Return the whole torch.save archive of a value without tensors."""
    layout = layout_zip(ROOT, pickle, (), align=ALIGN)
    raw = bytearray(layout.nbytes)
    for offset, piece in layout.seal((), {}):
        raw[offset : offset + len(piece)] = piece
    return bytes(raw)


def _out_file(file: _RankFile) -> OutFile:
    return OutFile(
        file.name,
        file.nbytes,
        file.slots,
        partial(_seal, file),
        needs_crc=bool(file.slots),
        between=partial(_between, file) if file.slots else None,
    )


def _between(file: _RankFile, index: int, crc: int) -> bytes:
    """Return the end of an item, padding, and the start of the next item."""
    (base, form), (after, following) = file.forms[index : index + 2]
    return form.tail(crc) + bytes(after - base - form.layout.nbytes) + following.head


def _seal(
    file: _RankFile, crcs: Sequence[int], manifest: bytes | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes before the data of the first item, and after the data of the last."""
    end = 0
    if file.forms:
        yield file.forms[0][0], file.forms[0][1].head
        base, form = file.forms[-1]
        end = base + form.layout.nbytes
        tail = form.tail(crcs[-1])
        yield end - len(tail), tail
    for base, raw in file.values:
        yield end, bytes(base - end) + raw
        end = base + len(raw)


def _sealed(
    content: bytes, crcs: Sequence[int], manifest: bytes | None
) -> Iterable[tuple[int, bytes]]:
    return ((0, content),)
