"""Define the records that stand in for torch's classes while the pickle `.metadata` is read, so that
no class of torch is imported or called.

Each record keeps only the fields that the reader uses. Source: torch/distributed/checkpoint,
metadata.py and filesystem.py.
"""

from __future__ import annotations

from collections.abc import Mapping


class _Sealed(type):
    """The metaclass of the records. It refuses to set attributes of a class: a pickle could do that to
    a class that it names."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set")


class _Record(metaclass=_Sealed):
    """A record that takes its fields from the pickled state; a field that was never set is None.

    There are five records per tensor. They have slots, because a dict in each would take 100 MB for
    100,000 tensors. They are hashed by identity, which is fast.
    """

    __slots__ = ()

    def __setstate__(self, state: dict[str, object]) -> None:
        names: tuple[str, ...] = self.__slots__
        for name in names:
            setattr(self, name, state.get(name))

    def __getattr__(self, name: str) -> object:
        return None


class Root(_Record):
    """Stands for `Metadata`, the whole file."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")


class Tensor(_Record):
    """Stands for `TensorStorageMetadata`: shape, dtype and chunks of one tensor."""

    __slots__ = ("chunks", "properties", "size")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.chunks, self.size = state.get("chunks"), state.get("size")
        self.properties = state.get("properties")


class Bytes(_Record):
    """Stands for `BytesStorageMetadata`: one value that is not a tensor."""

    __slots__ = ()


class ChunkBox(_Record):
    """Stands for `ChunkStorageMetadata`: offsets and sizes of one chunk, in elements."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.offsets, self.sizes = state.get("offsets"), state.get("sizes")


class Key(_Record):
    """Stands for `MetadataIndex`: the flat key of a tensor or value, and the offsets of one chunk."""

    __slots__ = ("fqn", "index", "offset")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.fqn, self.offset = state.get("fqn"), state.get("offset")
        self.index = state.get("index")


class StorageInfo(_Record):
    """Stands for `_StorageInfo`: the file and byte range of one item."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.relative_path, self.offset = state.get("relative_path"), state.get("offset")
        self.length = state.get("length")
        self.transform_descriptors = state.get("transform_descriptors")


class Properties(_Record):
    """Stands for `TensorProperties`; its state is a tuple that begins with the dtype."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else None


MODULE = "torch.distributed.checkpoint.metadata"
ALLOW: Mapping[tuple[str, str], object] = {
    # There are five sizes per tensor, so this is no Python function. `() + x` returns a tuple x
    # uncopied, and refuses anything else.
    ("torch", "Size"): ().__add__,
    (MODULE, "Metadata"): Root,
    (MODULE, "TensorStorageMetadata"): Tensor,
    (MODULE, "BytesStorageMetadata"): Bytes,
    (MODULE, "ChunkStorageMetadata"): ChunkBox,
    (MODULE, "MetadataIndex"): Key,
    (MODULE, "TensorProperties"): Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
}

MARKS = (1, 2, 3)
"""Placeholders for FQN, offset and length in an entry that stands for many others: see
`metadata_compaction`."""
