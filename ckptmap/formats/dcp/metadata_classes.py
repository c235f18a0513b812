"""What the classes that a `.metadata` names become when it is read: records of what we want of them
(torch/distributed/checkpoint/metadata.py and filesystem.py)."""

from __future__ import annotations

from collections.abc import Mapping


class _Sealed(type):
    """Types of our stand-ins: a pickle can set attributes of a class that it names, if let."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set")


class _Record(metaclass=_Sealed):
    """Takes what we want of its state into slots: there are five a tensor, and a dict in each
    would be 100 MB of 100,000 tensors. Hashed by identity, which makes them quick to use as keys.
    What was never set is None."""

    __slots__ = ()

    def __setstate__(self, state: dict[str, object]) -> None:
        names: tuple[str, ...] = self.__slots__
        for name in names:
            setattr(self, name, state.get(name))

    def __getattr__(self, name: str) -> object:
        return None


class Root(_Record):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")


class Tensor(_Record):
    __slots__ = ("chunks", "properties", "size")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.chunks, self.size = state.get("chunks"), state.get("size")
        self.properties = state.get("properties")


class Bytes(_Record):
    __slots__ = ()


class ChunkBox(_Record):
    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.offsets, self.sizes = state.get("offsets"), state.get("sizes")


class Key(_Record):
    __slots__ = ("fqn", "index", "offset")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.fqn, self.offset = state.get("fqn"), state.get("offset")
        self.index = state.get("index")


class Place(_Record):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.relative_path, self.offset = state.get("relative_path"), state.get("offset")
        self.length = state.get("length")
        self.transform_descriptors = state.get("transform_descriptors")


class Properties(_Record):
    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else None


MODULE = "torch.distributed.checkpoint.metadata"
ALLOW: Mapping[tuple[str, str], object] = {
    # Five to a tensor, so no Python function: `() + x` gives a tuple back, uncopied, and refuses
    # anything else.
    ("torch", "Size"): ().__add__,
    (MODULE, "Metadata"): Root,
    (MODULE, "TensorStorageMetadata"): Tensor,
    (MODULE, "BytesStorageMetadata"): Bytes,
    (MODULE, "ChunkStorageMetadata"): ChunkBox,
    (MODULE, "MetadataIndex"): Key,
    (MODULE, "TensorProperties"): Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Place,
}

MARKS = (1, 2, 3)
"""Fqn, offset and length of places that stand for many: see `dcp_metadata_short`."""
