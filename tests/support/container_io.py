"""Write the files that a Writer planned, and read leaves back, without planning or execution."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ckptmap.protocols import Layout, OutFile, OutTensor
from ckptmap.storage.box_reader import fill
from ckptmap.storage.files import Files
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, Path, StoredTensor, TensorInfo

if TYPE_CHECKING:
    import torch


def info_of(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def out_tensors(
    tensors: Mapping[Path, torch.Tensor], layout: Layout, world_size: int = 1
) -> list[OutTensor]:
    infos = {path: info_of(tensor) for path, tensor in tensors.items()}
    return [OutTensor(path, info, layout.cut(info, world_size)) for path, info in infos.items()]


def materialise(
    outs: Sequence[OutFile], directory: FilePath, tensors: Mapping[Path, torch.Tensor]
) -> None:
    """Every byte of every file must come from a slot or from what is sealed, and from one of them."""
    directory.mkdir(parents=True, exist_ok=True)
    for out in outs:
        covered = 0
        crcs = []
        with open(directory / out.name, "wb") as file:
            os.truncate(file.fileno(), out.nbytes)
            for slot in out.slots:
                data = box_bytes(tensors[slot.path], slot.box)
                assert len(data) == slot.nbytes
                crcs.append(zlib.crc32(data))
                covered += os.pwrite(file.fileno(), data, slot.offset) if data else 0
            for offset, piece in out.pieces(crcs if out.needs_crc else (), None):
                covered += os.pwrite(file.fileno(), piece, offset)
        assert covered == out.nbytes == os.stat(directory / out.name).st_size


def box_bytes(tensor: torch.Tensor, box: Box) -> bytes:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return raw(tensor)


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes; `tensor_bytes` looks at memory that its tensor must keep alive."""
    held = tensor.contiguous()
    return bytes(tensor_bytes(held))


def read_leaf(leaf: StoredTensor) -> torch.Tensor:
    """The whole tensor, from its chunks; their checksums are compared where there are any."""
    import torch

    files = Files()
    out = torch.empty(leaf.info.shape, dtype=getattr(torch, leaf.info.dtype))
    fill(files, leaf, Box.whole(leaf.info.shape), tensor_bytes(out))
    for chunk in leaf.chunks:
        if chunk.crc32 is not None:
            raw = files.read(chunk.region.file, chunk.region.offset, chunk.region.nbytes)
            assert zlib.crc32(raw) == chunk.crc32
    files.close()
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return info_of(a) == info_of(b) and raw(a) == raw(b)
