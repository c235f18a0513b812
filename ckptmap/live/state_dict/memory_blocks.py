"""Live tensors as the stored tensors of a checkpoint in memory.

path, box, tensor  ->  a block, which readers of checkpoints read as if it were a file
LiveStored         ->  all blocks of one path that this rank has now: its own, and those that
                       other ranks have sent
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmap.errors import RunError, SourceError
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.model.value_range import copy_held
from ckptmap.protocols.file_systems import Fingerprint
from ckptmap.storage.box_reader import fill
from ckptmap.storage.device_copies import HoldsValues
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, Chunk, Path, Region, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch

ROOT = "/ckptmap-live"
"""Where the blocks of a memory are mounted, among the files of its own checkpoint."""
Block = tuple[Box, "torch.Tensor", str]
"""Box of the whole tensor, its values, and the name of the file that they appear as."""


class Memory:
    """The blocks of this rank by stored path: its own, and those that came from other ranks.

    It is the `ckptmap.protocols.file_systems.FileSystem` of its blocks.
    """

    origin = "state dict"

    def __init__(self) -> None:
        self._blocks: dict[Path, list[Block]] = {}
        self._received: dict[Path, list[Block]] = {}
        self._files: dict[str, torch.Tensor] = {}
        self._names = itertools.count()

    def add_own(self, path: Path, box: Box, values: torch.Tensor) -> None:
        """Add a box that this rank holds of the tensor, once."""
        known = self._blocks.setdefault(path, [])
        if all(box != other for other, _, _ in known):
            known.append(self._block(box, values))

    def add_received(self, path: Path, box: Box, values: torch.Tensor) -> None:
        """Add a box that another rank has sent; `clear` drops it."""
        self._received.setdefault(path, []).append(self._block(box, values))

    def _block(self, box: Box, values: torch.Tensor) -> Block:
        name = f"{ROOT}/{next(self._names)}"
        if values.is_conj() or values.is_neg():
            values = values.resolve_conj().resolve_neg()
        self._files[name] = values.detach()
        return box, self._files[name], name

    def clear(self) -> None:
        """Drop the blocks that came from other ranks."""
        for blocks in self._received.values():
            for _, _, name in blocks:
                del self._files[name]
        self._received.clear()

    # ------------------------------------------------------------------ boxes

    def blocks(self, path: Path, box: Box) -> list[Block]:
        """Return blocks that cover the box: one that contains it, else this rank's own, which do not
        overlap."""
        found = [*self._received.get(path, ()), *self._blocks.get(path, ())]
        for block in found:
            if block[0].intersect(box) == box:
                return [block]
        return [block for block in self._blocks.get(path, ()) if block[0].intersect(box)]

    def has(self, path: Path, box: Box) -> bool:
        """Return whether one block contains the box."""
        found = self.blocks(path, box)
        return len(found) == 1 and found[0][0].intersect(box) == box

    def copy(self, path: Path, box: Box, out: torch.Tensor) -> None:
        """Copy `box` into `out` (box.sizes, any device and dtype). Raises RunError CKM513 where this
        rank does not have all of it."""
        count = 0
        for own, values, _ in self.blocks(path, box):
            common = own.intersect(box)
            assert common is not None
            to = window(out, common.relative_to(box.offsets))
            copy_held(to, window(values, common.relative_to(own.offsets)), shown(path))
            count += common.numel
        if count != box.numel:
            raise RunError(
                "CKM513",
                f"{shown(path)}: this rank has {count} of the {box.numel} elements of"
                f" {list(box.offsets)}+{list(box.sizes)}",
                "nothing was published; this is a defect of ckptmap, please report it",
            )

    # ------------------------------------------------------------------ as files

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        values = self._files.get(file)
        if values is None:
            raise SourceError("CKM101", f"{file}: is not on this rank", "gather it first")
        if values.device.type == "cpu" and not values.is_contiguous():
            values = self._files[file] = values.contiguous()
        for buffer in buffers:
            buffer[:] = _span(values, offset, buffer.nbytes)
            offset += buffer.nbytes

    def fingerprint(self, file: str) -> Fingerprint | None:
        return Fingerprint(self._files[file].nbytes, 0, 0) if file in self._files else None

    def held(self, file: str) -> str | None:
        return None

    def fetch(self, file: str) -> str:
        raise SourceError("CKM101", f"{file}: is no file", "it is in memory")

    def fetch_all(self, files: Sequence[str], into: object) -> None:
        self.fetch(", ".join(files))

    def discard(self, file: str) -> None:
        """Do nothing: blocks are never fetched from elsewhere."""

    def close(self) -> None:
        self._files.clear()


def _span(values: torch.Tensor, offset: int, nbytes: int) -> memoryview:
    """Return a range of a tensor's row-major bytes; from a device only the range is copied."""
    import torch

    if values.device.type == "cpu":
        return tensor_bytes(values)[offset : offset + nbytes]
    flat = values.contiguous().view(-1).view(torch.uint8)
    return tensor_bytes(flat[offset : offset + nbytes].cpu())


class LiveStored(HoldsValues):
    """The stored tensor at `path`; the blocks that this rank has can be read."""

    __slots__ = ("memory", "path")

    def __init__(self, info: TensorInfo, path: Path, memory: Memory, share: object) -> None:
        super().__init__(info, (), (), share)
        self.path = path
        self.memory = memory

    @property
    def place(self) -> Sequence[Chunk]:
        """The chunks that this rank has at the moment."""
        return self.near(Box.whole(self.info.shape))

    def copy_into(self, box: Box, out: torch.Tensor) -> None:
        """Fill `out` as `HoldsValues` says. Raises RunError CKM513 where this rank lacks values."""
        if box.numel:
            self.memory.copy(self.path, box, out)

    def near(self, box: Box) -> Sequence[Chunk]:
        return [
            Chunk(own, Region.contiguous(name, 0, own.sizes, self.info.itemsize))
            for own, _, name in self.memory.blocks(self.path, box)
        ]


def shown(path: Path) -> str:
    """Return the name of a tensor in errors: an FQN for a weight."""
    return ".".join(map(str, path[path[0] == "model" :]))


class LiveReader(TensorReader):
    """Reads blocks on their device, without a copy through the host."""

    def __init__(self, files: Files, max_memory: int, memory: Memory) -> None:
        super().__init__(files, max_memory)
        self._memory = memory

    def _stored(self, stored: StoredTensor, box: Box, out: torch.Tensor, name: str) -> None:
        import torch

        if isinstance(stored, LiveStored):
            self._memory.copy(stored.path, box, out)
            return
        values = torch.empty(box.sizes, dtype=getattr(torch, stored.info.dtype))
        fill(self.files, stored, box, tensor_bytes(values))  # no live block: through the host
        copy_held(out, values, name)

    def same(self, first: LazyTensor, other: LazyTensor, box: Box) -> bool:
        """Compare where this rank has both boxes; other ranks compare the rest."""
        for lazy in (first, other):
            for part in lazy.parts.values():
                if isinstance(part, LiveStored) and not self._memory.has(part.path, box):
                    return True
        return super().same(first, other, box)
