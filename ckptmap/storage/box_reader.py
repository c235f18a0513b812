"""Read a box of a stored tensor into a buffer, however its chunks lie in the files.

Each piece of the box is a strided region of one file, and fills a rectangle of the output. Runs of
bytes are read directly into the output, by preadv into many buffers at once; the small gaps between
them go into a buffer that nobody reads. Single elements, as of a transposed view, are read in dense
spans of bounded size and copied by strided memoryviews, so neither torch nor numpy is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import gcd, prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptmap.core.rearranged_tensors import ZEROS, Rearranged
from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.strided_dims import Dim, Dims, merge_dims
from ckptmap.errors import SourceError
from ckptmap.storage.column_reader import MIN_RUN, fill_columns
from ckptmap.storage.files import Files
from ckptmap.storage.source_sums import GAP
from ckptmap.tensors import Box, Extent, Region, StoredTensor, contiguous_strides

if TYPE_CHECKING:
    import torch

SCRATCH = 1 << 20
"""Bytes of the source that are read at once where single elements must be copied."""
MAX_GAP = GAP.nbytes
"""Bytes between two runs that are cheaper to read and drop than a second system call."""
IOV_MAX = 1024
"""Buffers that one preadv takes on Linux."""

_FORMATS: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Run(NamedTuple):
    """Consecutive bytes of one file."""

    file: str
    offset: int
    nbytes: int


def in_multiples(pieces: Iterable[torch.Tensor], step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (flat offset, flat values) of pieces in row-major order, each but the last a multiple of `step` long."""
    import torch

    offset, held = 0, torch.empty(0)
    for piece in pieces:
        held = torch.cat([held, piece.view(-1)]) if held.numel() else piece.view(-1)
        ready = held.numel() - held.numel() % step
        if ready:
            yield offset, held[:ready]
            offset, held = offset + ready, held[ready:].clone()  # the rest of the buffer is let go
    if held.numel():
        yield offset, held


def fill(files: Files, stored: StoredTensor, box: Box, out: memoryview) -> None:
    """Fill `out` (box.numel * itemsize bytes, row-major) with `box` of the stored tensor.

    Memory beyond `out`: at most SCRATCH bytes. Raises SourceError CKM112 where the chunks leave a
    hole, RunError CKM308 where a file ends early.
    """
    nbytes = box.numel * stored.info.itemsize
    assert out.nbytes == nbytes, f"buffer of {out.nbytes} bytes for a box of {nbytes}"
    filled = 0
    if isinstance(stored, Rearranged):
        filled = _fill_rearranged(files, stored, box, out)
    elif type(held := stored.place) is RowChunks and box.sizes[1:] == stored.info.shape[1:]:
        reads = held.reads(box.offsets[0], box.sizes[0], out)
        files.read_each(reads)
        filled = sum([part.nbytes for _, _, part in reads])
    else:
        rows = box.sizes[1:] if nbytes and box.sizes else None
        row_nbytes = nbytes // box.sizes[0] if rows is not None else 0
        others = []
        for place, region in stored.pieces(box):
            if place.sizes[1:] == rows and region.is_contiguous and region.file != ZEROS:
                start = place.offsets[0] * row_nbytes  # whole rows: what nearly every rank holds
                end = start + place.sizes[0] * row_nbytes
                files.read_into(region.file, region.offset, [out[start:end]])
            else:
                others.append((place, region))
            filled += region.nbytes
        if others[1:] and not files.mounts:  # a request for each of its blocks would cost more
            others = fill_columns(files, others, box.sizes, out)
        for place, region in others:
            _read_region(files, region, place, box.sizes, out)
    if filled != nbytes:
        raise SourceError(
            "CKM112",
            f"chunks of a {stored.info} tensor fill {filled} bytes of the box at "
            f"{list(box.offsets)} of {list(box.sizes)}, expected {nbytes}",
            "the checkpoint is incomplete or damaged: copy it again, or save it again",
        )


def run_of(stored: StoredTensor, box: Box) -> Run | None:
    """Return the one run of bytes that is `box` in row-major order; None: there is no such run."""
    if box.sizes == stored.info.shape:
        place = stored.place
        extent = place if type(place) is Extent else stored.extent
        return extent and Run(extent[0], extent[1], stored.info.nbytes)
    if isinstance(stored, Rearranged):
        return None
    pieces = list(islice(stored.pieces(box), 2))
    if len(pieces) != 1 or pieces[0][0].sizes != box.sizes:
        return None
    region = pieces[0][1]
    return Run(region.file, region.offset, region.nbytes) if region.is_contiguous else None


def row_major_boxes(box: Box, max_numel: int) -> Iterator[Box]:
    """Yield boxes of at most `max_numel` elements that tile `box`, in row-major order."""
    sizes = box.sizes
    if prod(sizes) <= max(1, max_numel):
        yield box
        return
    # The outermost dim of which one index (all inner dims whole) fits the limit.
    dim = next(d for d in range(len(sizes)) if prod(sizes[d + 1 :]) <= max(1, max_numel))
    rows = max(1, max_numel // max(1, prod(sizes[dim + 1 :])))
    for outer in _indices(sizes[:dim]):
        head = tuple(o + i for o, i in zip(box.offsets, outer, strict=False))
        for row in range(0, sizes[dim], rows):
            yield Box(
                (*head, box.offsets[dim] + row, *box.offsets[dim + 1 :]),
                ((1,) * dim + (min(rows, sizes[dim] - row),) + sizes[dim + 1 :]),
            )


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all index tuples of a shape, row-major."""
    if not sizes:
        yield ()
        return
    for outer in _indices(sizes[:-1]):
        for inner in range(sizes[-1]):
            yield (*outer, inner)


# ------------------------------------------------------------------------- one piece


def _fill_rearranged(files: Files, stored: Rearranged, box: Box, out: memoryview) -> int:
    """Fill `out` with a box of a rearranged tensor. Return the number of bytes read."""
    filled, itemsize = 0, stored.info.itemsize
    for file, offset, start, dims, nbytes in stored.copies(box):
        axes = sorted(dims, key=lambda axis: axis[2], reverse=True)
        sizes, src, dst = (tuple(axis[i] for axis in axes) for i in range(3))
        collapsed = merge_dims(sizes, src, dst)
        if file == ZEROS:
            out[start : start + itemsize] = bytes(itemsize)
            _repeat_expanded(out, start, collapsed, (), itemsize)
        else:
            _read_strided(files, file, offset, collapsed, out, start, itemsize)
        filled += nbytes
    return filled


def _read_region(
    files: Files, region: Region, place: Box, sizes: Sequence[int], out: memoryview
) -> None:
    """Read one region into the box `place` of the output, a row-major tensor of `sizes`."""
    itemsize = region.itemsize
    if place.sizes == sizes and region.is_contiguous and region.file != ZEROS:
        files.read_into(region.file, region.offset, [out])
        return
    strides = contiguous_strides(sizes, itemsize)
    start = sum(o * s for o, s in zip(place.offsets, strides, strict=True))
    dims = merge_dims(region.sizes, region.strides, strides)
    expanded = tuple(dim for dim in dims if dim.src == 0)
    strided = tuple(dim for dim in dims if dim.src != 0)
    if region.file == ZEROS:
        out[start : start + itemsize] = bytes(itemsize)
    else:
        _read_strided(files, region.file, region.offset, strided, out, start, itemsize)
    if expanded:
        _repeat_expanded(out, start, expanded, strided, itemsize)


def _read_strided(
    files: Files, file: str, offset: int, dims: Dims, out: memoryview, start: int, itemsize: int
) -> None:
    """Read a strided region of a file to the byte `start` of the output, in runs or by elements."""
    run = itemsize
    # Ascending file order, so that the kernel reads ahead; a dim's two strides travel together.
    ordered = tuple(sorted(dims, key=lambda dim: dim.src, reverse=True))
    if ordered and ordered[-1].src == ordered[-1].dst == itemsize:
        run, ordered = ordered[-1].n * itemsize, ordered[:-1]
    if run >= MIN_RUN or not ordered:
        _read_runs(files, file, offset, ordered, out, start, run)
    else:
        dims = tuple(sorted(dims, key=lambda dim: dim.src, reverse=True))
        _read_elements(files, file, offset, dims, out, start, itemsize)


def _read_runs(
    files: Files, file: str, offset: int, outer: Dims, out: memoryview, start: int, run: int
) -> None:
    """Read runs of `run` bytes, each into its own place; runs with small gaps share one read."""
    if len(outer) == 1 and outer[0].src == run:  # nothing between: columns that a rank holds
        step, some = outer[0].dst, min(IOV_MAX, max(1, SCRATCH // run))
        for first in range(0, outer[0].n, some):
            stop = start + min(outer[0].n, first + some) * step
            places = [out[dst : dst + run] for dst in range(start + first * step, stop, step)]
            files.read_into(file, offset + first * run, places)
        return
    buffers: list[memoryview] = []
    begin = cursor = offset
    has_gaps = False
    for src, dst in _positions(outer, offset, start):
        gap = src - cursor
        if buffers and not (0 <= gap <= MAX_GAP and len(buffers) < IOV_MAX - 1):
            files.read_into(file, begin, buffers, has_gaps)
            buffers, has_gaps = [], False
        if not buffers:
            begin = src
        elif gap:
            buffers.append(GAP[:gap])
            has_gaps = True
        buffers.append(out[dst : dst + run])
        cursor = src + run
    files.read_into(file, begin, buffers, has_gaps)


def _positions(dims: Dims, src: int, dst: int) -> Iterator[tuple[int, int]]:
    """Yield (file offset, output offset) of every index, the last dim fastest."""
    if not dims:
        yield src, dst
        return
    last = dims[-1]
    for s, d in _positions(dims[:-1], src, dst):
        yield from zip(
            range(s, s + last.n * last.src, last.src) if last.src else (s,) * last.n,
            range(d, d + last.n * last.dst, last.dst),
            strict=True,
        )


def _read_elements(
    files: Files, file: str, offset: int, dims: Dims, out: memoryview, start: int, itemsize: int
) -> None:
    """Read single elements: dense spans of at most SCRATCH bytes, copied with strides.

    `dims` in descending order of file stride, none of them 0.
    """
    span = sum((dim.n - 1) * dim.src for dim in dims) + itemsize
    wanted = prod(dim.n for dim in dims) * itemsize
    sparse = span > MAX_GAP and span > 8 * wanted
    if not dims or (span <= SCRATCH and not sparse):
        scratch = memoryview(bytearray(span))
        files.read_into(file, offset, [scratch])
        _copy_strided(scratch, 0, out, start, dims, itemsize)
        return
    first, rest = dims[0], dims[1:]
    inner = span - (first.n - 1) * first.src
    count = 1 if sparse or inner > SCRATCH else max(1, 1 + (SCRATCH - inner) // first.src)
    for index in range(0, first.n, count):
        n = min(count, first.n - index)
        head = (Dim(n, first.src, first.dst),) if n > 1 else ()
        at, to = offset + index * first.src, start + index * first.dst
        _read_elements(files, file, at, (*head, *rest), out, to, itemsize)


def _copy_strided(
    source: memoryview, src: int, out: memoryview, dst: int, dims: Dims, itemsize: int
) -> None:
    """Copy elements between two buffers; strides and starts are in bytes."""
    unit = gcd(itemsize, 8, *(dim.src for dim in dims), *(dim.dst for dim in dims))
    if unit < itemsize:
        dims = (*dims, Dim(itemsize // unit, unit, unit))
    longest = max(dims, key=lambda dim: dim.n, default=Dim(1, unit, unit))
    outer = tuple(dim for dim in dims if dim is not longest)
    a, b = source.cast(_FORMATS[unit]), out.cast(_FORMATS[unit])
    n, a_step, b_step = longest.n, longest.src // unit, longest.dst // unit
    for s, d in _positions(outer, src, dst):
        s, d = s // unit, d // unit
        b[d : d + (n - 1) * b_step + 1 : b_step] = a[s : s + (n - 1) * a_step + 1 : a_step]


def _repeat_expanded(
    out: memoryview, start: int, expanded: Dims, filled: Dims, itemsize: int
) -> None:
    """Fill expanded dims (file stride 0): copy the bytes that are filled, twice as many each time."""
    done = tuple(Dim(dim.n, dim.dst, dim.dst) for dim in filled)
    for dim in expanded:
        have = 1
        while have < dim.n:
            n = min(have, dim.n - have)
            block = (*done, Dim(n, dim.dst, dim.dst)) if n > 1 else done
            _copy_strided(out, start, out, start + have * dim.dst, block, itemsize)
            have += n
        done = (*done, Dim(dim.n, dim.dst, dim.dst))
