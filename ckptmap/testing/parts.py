"""Assemble the parts of an encoded tensor from the writes of an encoder, and lay them down in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.protocols import Encoding, Write, part_key
from ckptmap.storage.lazy_tensor import info_of
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo
from ckptmap.testing.base import expect
from ckptmap.testing.samples import raw

if TYPE_CHECKING:
    import torch

Parts = dict[str, "torch.Tensor"]
"""Part name -> the stored tensor."""


class Assembly:
    """Parts assembled from writes, which must be flat ranges, cover each element once, and keep order."""

    def __init__(self, title: str, infos: Mapping[str, TensorInfo], in_order: bool) -> None:
        import torch

        self._title, self._infos, self._in_order = title, infos, in_order
        self._flat = {
            name: torch.empty(info.numel, dtype=getattr(torch, info.dtype))
            for name, info in infos.items()
        }
        self._seen = {
            name: torch.zeros(info.numel, dtype=torch.uint8) for name, info in infos.items()
        }
        self._end = dict.fromkeys(infos, 0)

    def take(self, write: Write) -> None:
        """Copy one write into its part. Raises AssertionError where it does not fit."""
        title = f"{self._title}: a write to {write.part!r}"
        expect(write.part in self._infos, f"{title}: parts() does not name it")
        start, count = (write.box.offsets or (0,))[0], write.box.numel
        flat, info = self._flat[write.part], self._infos[write.part]
        expect(len(write.box.sizes) <= 1, f"{title}: box {write.box}, expected a flat range")
        expect(write.values.numel() == count, f"{title}: {write.values.numel()} values for {count}")
        expect(write.values.dtype == flat.dtype, f"{title}: {write.values.dtype}, expected {info}")
        expect(start + count <= info.numel, f"{title}: ends at {start + count} of {info.numel}")
        late = self._in_order and start != self._end[write.part]
        expect(not late, f"{title}: at {start}, expected {self._end[write.part]}: not in order")
        self._end[write.part] = start + count
        flat[start : start + count] = write.values.reshape(-1)
        self._seen[write.part][start : start + count] += 1

    def parts(self) -> Parts:
        """Return the parts. Raises AssertionError where an element was not written exactly once."""
        for name, seen in self._seen.items():
            once = int((seen == 1).sum())
            expect(
                once == seen.numel(),
                f"{self._title}: part {name!r}: {once} of {seen.numel()} elements written once",
            )
        return {name: self._flat[name].reshape(info.shape) for name, info in self._infos.items()}


def stored(info: TensorInfo, file: str = "nowhere", offset: int = 0) -> StoredTensor:
    """Return a tensor stored as one chunk, by default in a file that does not exist."""
    region = Region.contiguous(file, offset, info.shape, info.itemsize)
    return StoredTensor(info, [Chunk(Box.whole(info.shape), region)])


def on_disk(file: Path, encoding: Encoding, parts: Parts, fqn: str) -> dict[str, StoredTensor]:
    """Write the parts into one file and return them as a container would index them."""
    tensors, content = {}, bytearray()
    for name, part in parts.items():
        key = part_key(encoding, fqn, name)
        tensors[key] = stored(info_of(part), str(file), len(content))
        content += raw(part)
    file.write_bytes(content)
    return tensors
