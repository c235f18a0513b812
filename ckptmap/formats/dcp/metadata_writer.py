"""Write the `.metadata` file of a DCP directory: a pickle, written opcode by opcode and without torch.

The fields are those of torch's `Metadata` (torch/distributed/checkpoint/metadata.py, filesystem.py).
"""

from __future__ import annotations

from ckptmap.formats.dcp.metadata_classes import MODULE
from ckptmap.formats.dcp.metadata_records import Item, Metadata, Offsets, TensorEntry
from ckptmap.formats.pickle.writer import int_op, int_tuple
from ckptmap.tensors import Path

# Objects that every chunk needs are put into the memo once, in this order, before the first object.
# Then a chunk takes about 120 bytes and a few microseconds.
_NAMES = (
    "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "properties", "size",
    "chunks", "torch.strided",
)  # fmt: skip
_GLOBALS = {
    "Metadata": MODULE,
    "TensorStorageMetadata": MODULE,
    "BytesStorageMetadata": MODULE,
    "ChunkStorageMetadata": MODULE,
    "MetadataIndex": MODULE,
    "TensorProperties": MODULE,
    "StorageMeta": MODULE,
    "_MEM_FORMAT_ENCODING": MODULE,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}


def emit_metadata(metadata: Metadata) -> bytes:
    """Return a `.metadata` that `torch.distributed.checkpoint.load` reads (torch 2.3 and later).

    It is a pickle of protocol 2 with torch's class names, and without any path of this machine. The
    same records give the same bytes. Entries come in the order of `tensors`, then `values`. Every
    key gets a path in `planner_data`.
    """
    return _Emitter().emit(metadata)


class _Emitter:
    """Writes opcodes. `self._ref["offsets"]` is the opcode that fetches that object from the memo."""

    def __init__(self) -> None:
        self._ref: dict[str, bytes] = {}
        self._texts: dict[str, bytes] = {}
        self._properties: dict[str, bytes] = {}
        self._count = 0
        self._out: list[bytes] = [b"\x80\x02"]
        for name in _NAMES:
            self._out += (self._text(name), b"0")
            self._ref[name] = self._texts[name]
        for name, module in _GLOBALS.items():
            put, self._ref[name] = self._put()
            self._out += (f"c{module}\n{name}\n".encode(), put, b"0")

    def emit(self, metadata: Metadata) -> bytes:
        """Return the whole pickle. An emitter is used once."""
        out = self._out
        out += (self._new("Metadata"), self._text("state_dict_metadata"), b"}(")
        for key, entry in metadata.tensors.items():
            out += (self._text(key), self._tensor(entry))
        for key in metadata.values:
            out += (self._text(key), self._ref["BytesStorageMetadata"], b")\x81")
        out += (b"u", self._text("planner_data"), b"}(")
        for key in (*metadata.tensors, *metadata.values):
            out += (self._text(key), self._path(metadata.path(key)))
        out += (b"u", self._text("storage_data"), b"}(")
        self._storage(metadata)
        out += (b"u", self._text("storage_meta"), self._new("StorageMeta"))
        for name in ("checkpoint_id", "save_id", "load_id"):
            out += (self._text(name), b"N")
        out += (self._text("modules"), b"]ub", self._text("version"), self._text("1.0.0"), b"ub.")
        return b"".join(out)

    def _storage(self, metadata: Metadata) -> None:
        out = self._out
        for key, entry in metadata.tensors.items():
            for number, (offsets, _, item) in enumerate(entry.chunks):
                out += (self._key(key, self._size(offsets), int_op(number)), self._place(item))
        for key, item in metadata.values.items():
            out += (self._key(key, b"N", b"N"), self._place(item))

    def _key(self, key: str, offset: bytes, index: bytes) -> bytes:
        ref = self._ref
        fields = (ref["fqn"], self._text(key), ref["offset"], offset, ref["index"], index)
        return self._new("MetadataIndex") + b"".join(fields) + b"ub"

    def _place(self, item: Item) -> bytes:
        assert not item.transforms, "only plain items are written"
        ref, file = self._ref, self._text(item.file)
        offset, nbytes = int_op(item.offset), int_op(item.nbytes)
        fields = (ref["relative_path"], file, ref["offset"], offset, ref["length"], nbytes)
        return self._new("_StorageInfo") + b"".join(fields) + b"ub"

    def _tensor(self, entry: TensorEntry) -> bytes:
        ref = self._ref
        parts = [self._new("TensorStorageMetadata"), ref["properties"]]
        parts += (self._properties_of(entry.info.dtype), ref["size"], self._size(entry.info.shape))
        parts += (ref["chunks"], b"](")
        for offsets, sizes, _ in entry.chunks:
            parts += (self._new("ChunkStorageMetadata"), ref["offsets"], self._size(offsets))
            parts += (ref["sizes"], self._size(sizes), b"ub")
        return b"".join(parts) + b"eub"

    def _properties_of(self, dtype: str) -> bytes:
        """Return the TensorProperties `(dtype, layout, requires_grad, memory format, pinned)` of a
        dtype: one object for all tensors of that dtype."""
        known = self._properties.get(dtype)
        if known is not None:
            return known
        ref = self._ref
        parts = [ref["TensorProperties"], b")\x81(", f"ctorch\n{dtype}\n".encode()]
        parts += (ref["_get_layout"], ref["torch.strided"], b"\x85R\x89")
        parts += (ref["_MEM_FORMAT_ENCODING"], int_op(0), b"\x85R\x89tb")
        put, self._properties[dtype] = self._put()
        return b"".join(parts) + put

    def _new(self, name: str) -> bytes:
        """Return the opcodes that make an object and begin the dict of its attributes."""
        return self._ref[name] + b")\x81}("

    def _size(self, sizes: Offsets) -> bytes:
        return self._ref["Size"] + int_tuple(sizes) + b"\x85R"

    def _path(self, path: Path) -> bytes:
        ops = [self._text(s) if isinstance(s, str) else int_op(s) for s in path]
        return b"(" + b"".join(ops) + b"t"

    def _put(self) -> tuple[bytes, bytes]:
        """Return the opcode that puts the object on top of the stack into the memo, and the opcode
        that fetches it."""
        number = self._count
        self._count += 1
        if number < 256:
            return b"q%c" % number, b"h%c" % number
        packed = number.to_bytes(4, "little")
        return b"r" + packed, b"j" + packed

    def _text(self, text: str) -> bytes:
        """Return the opcodes of a string: the text and a memo number the first time, then a fetch."""
        known = self._texts.get(text)
        if known is not None:
            return known
        raw = text.encode("utf-8", "surrogatepass")
        put, self._texts[text] = self._put()
        return b"X" + len(raw).to_bytes(4, "little") + raw + put
