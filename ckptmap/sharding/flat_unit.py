"""One flat parameter of FSDP1 as files hold it: the runs of its elements, and the parameters in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ckptmap.core.state_paths import by_rank
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.sharding.flat_range_boxes import InUnit, rectangles
from ckptmap.sharding.sharded_tensor_spec import Sharded, is_sharded, read_sharded
from ckptmap.tensors import Box, Chunk, Leaf, Path, Region, StoredTensor, TensorInfo

KEY = "_flat_param"


def is_flat(path: Path, leaf: Leaf) -> bool:
    """Return whether a leaf is a flat parameter, in the shards of ranks or joined."""
    if not path or not str(path[-1]).endswith(KEY) or str(path[-1]).split(".")[-1] != KEY:
        return False
    return _is_joined(leaf) or any(map(is_sharded, by_rank(leaf)))


def _is_joined(leaf: Leaf) -> TypeGuard[StoredTensor]:
    """Return whether a flat parameter is one tensor already, as DCP stores it."""
    return isinstance(leaf, StoredTensor) and len(leaf.info.shape) == 1


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Elements [start, stop) of a flat tensor, and the contiguous 1-D region that holds them."""

    start: int
    stop: int
    region: Region

    def cut(self, start: int, stop: int) -> Region:
        return self.region.crop(Box((start - self.start,), (stop - start,)))


@dataclass(frozen=True)
class StoredUnit:
    """A flat parameter of one FSDP unit.

    prefix   the beginning of the plain FQNs of its parameters: `layers.0.`
    stored   the key of the flat parameter in the file
    info     its whole flat shape and dtype
    runs     the runs that hold its elements, in order
    joined   the file holds it as one tensor
    """

    prefix: str
    stored: str
    info: TensorInfo
    runs: Sequence[FlatRun]
    joined: bool = False

    def parameter(self, shape: tuple[int, ...], offset: int) -> StoredTensor:
        """Return the parameter of that shape that begins at flat element `offset`."""
        info = TensorInfo(shape, self.info.dtype)
        share = InUnit(self.stored, self.runs[0].region, offset) if self.runs else None
        return StoredTensor(info, list(chunks_of(info, self.runs, offset)), share=share)


def unit_of(key: str, plain: str, leaf: Leaf) -> StoredUnit:
    """Return the unit of a flat parameter, whose shards are proven to tile it.

    Raises SourceError CKM110 if they do not, CKM112 if a shard is malformed.
    """
    prefix = plain.removesuffix(KEY)
    if _is_joined(leaf):
        pieces = [FlatRun(chunk.box.offsets[0], _end(chunk), chunk.region) for chunk in leaf.chunks]
        runs = sorted(pieces, key=lambda run: run.start)
        return StoredUnit(prefix, key, leaf.info, runs, joined=True)
    parts: list[Sharded] = []
    for rank, value in enumerate(by_rank(leaf)):
        if not is_sharded(value):
            raise _incomplete_error(key, f"rank {rank} holds no flat parameter")
        parts.append(read_sharded(value, key))
    info, world = parts[0].info, parts[0].world
    if any((part.info, part.world) != (info, world) for part in parts):
        raise _incomplete_error(key, "the ranks' flat parameters differ in size")
    if len(info.shape) != 1:
        raise _incomplete_error(key, f"a flat parameter of shape {list(info.shape)}")
    shards = [shard for part in parts for shard in part.shards]
    gap = prove_tiling(info.shape, [box for box, _ in shards])
    if gap is not None or len(parts) < world:
        raise _incomplete_error(key, gap or f"is of {world} ranks, found {len(parts)}")
    runs = [_run(box.offsets[0], tensor) for box, tensor in shards if tensor.info.numel]
    return StoredUnit(prefix, key, info, sorted(runs, key=lambda run: run.start))


def _incomplete_error(key: str, problem: str) -> SourceError:
    return SourceError(
        "CKM110", f"{key}: {problem}", "copy the files of all ranks of one save here"
    )


def _end(chunk: Chunk) -> int:
    return chunk.box.offsets[0] + chunk.box.sizes[0]


def _run(start: int, tensor: StoredTensor) -> FlatRun:
    (chunk,) = tensor.chunks
    return FlatRun(start, start + tensor.info.numel, chunk.region)


def runs_of(slices: Iterable[StoredTensor]) -> list[FlatRun]:
    runs, at = [], 0
    for part in slices:
        if part.info.numel:
            runs.append(_run(at, part))
            at += part.info.numel
    return runs


def chunks_of(info: TensorInfo, runs: Sequence[FlatRun], offset: int) -> Iterable[Chunk]:
    """Yield the chunks of the tensor whose first element is element `offset` of the runs."""
    for run in runs:
        start, stop = max(run.start, offset), min(run.stop, offset + info.numel)
        for box, at in rectangles(info.shape, start - offset, stop - offset):
            piece = run.cut(offset + at, offset + at + box.numel)
            yield Chunk(box, Region.contiguous(piece.file, piece.offset, box.sizes, info.itemsize))
