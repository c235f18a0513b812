"""Tensors made of parts of other tensors, read from files box by box, against plain indexing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ckptmap.core.rearranged_tensors import Assembled, Rearranged, rearranged
from ckptmap.core.strided_boxes import Piece, StridedBox
from ckptmap.storage.box_reader import fill, run_of
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo
from tests.support.examples import examples
from tests.support.strided_boxes import positions

DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def stored(path: Path, name: str, shape: tuple[int, int], itemsize: int, cut: int) -> StoredTensor:
    """Rows of a file whose elements are their own numbers, in two chunks cut at a row."""
    file = path / name
    file.write_bytes(b"".join(i.to_bytes(itemsize, "little") for i in range(shape[0] * shape[1])))
    chunks = []
    for low, stop in ((0, cut), (cut, shape[0])):
        if stop > low:
            region = Region.contiguous(
                str(file), low * shape[1] * itemsize, (stop - low, shape[1]), itemsize
            )
            chunks.append(Chunk(Box((low, 0), (stop - low, shape[1])), region))
    return StoredTensor(TensorInfo(shape, DTYPES[itemsize]), chunks)


def read(tensor: StoredTensor, box: Box) -> list[int]:
    itemsize = tensor.info.itemsize
    out = bytearray(b"\xee" * (box.numel * itemsize))
    files = Files()
    fill(files, tensor, box, memoryview(out))
    files.close()
    return [int.from_bytes(out[i : i + itemsize], "little") for i in range(0, len(out), itemsize)]


def expected(pieces: list[Piece], shape: tuple[int, int], box: Box) -> list[int]:
    """By walking element by element; what no piece fills is 0."""
    found = {}
    for piece in pieces:
        for (row, column), at in zip(positions(piece.src), positions(piece.dst), strict=True):
            found[at] = row * shape[1] + column
    rows, columns = (range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return [found.get((row, column), 0) for row in rows for column in columns]


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_of_a_rearranged_tensor(tmp_path: Path, data: st.DataObject) -> None:
    """Rows (h, two, r) to (h, r, two), with some of the columns, wherever source and box are cut."""
    h, two, r, width = (data.draw(st.integers(1, 4)) for _ in range(4))
    itemsize = data.draw(st.sampled_from(sorted(DTYPES)))
    rows = h * two * r
    cut = data.draw(st.integers(0, rows))
    source = stored(tmp_path, "s", (rows, width), itemsize, cut)
    src = StridedBox((0, 0), (h, r, two, width), (0, 0, 0, 1), (two * r, 1, r, 1))
    transposed = data.draw(st.booleans())
    dims = (1, 1, 1, 0) if transposed else (0, 0, 0, 1)
    dst = StridedBox((0, 0), (h, r, two, width), dims, (two * r, two, 1, 1))
    piece = Piece("s", src, dst)
    shape = (width, rows) if transposed else (rows, width)
    tensor = rearranged(TensorInfo(shape, DTYPES[itemsize]), [piece.tidy()], {"s": source})
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    assert read(tensor, box) == [
        value % 256**itemsize for value in expected([piece], (rows, width), box)
    ]
    as_boxes = StoredTensor(tensor.info, tensor.chunks)
    assert read(as_boxes, box) == read(tensor, box)


def test_elements_that_no_piece_fills_are_zero(tmp_path: Path) -> None:
    source = stored(tmp_path, "s", (5, 3), 4, 2)
    whole = StridedBox.of_box(Box((0, 0), (5, 3)))
    info = TensorInfo((8, 3), "int32")
    tensor = rearranged(info, [Piece("s", whole, whole)], {"s": source}, Box((5, 0), (3, 3)))
    assert read(tensor, Box.whole((8, 3))) == [*range(15), *[0] * 9]
    assert read(tensor, Box((4, 1), (3, 2))) == [13, 14, 0, 0, 0, 0]


def test_parts_that_are_boxes_are_plain_chunks(tmp_path: Path) -> None:
    """Fused, split and transposed tensors need no more than what the spine has."""
    source = stored(tmp_path, "s", (4, 3), 4, 4)
    both = [
        Piece("s", StridedBox.of_box(Box((0, 0), (4, 3))), StridedBox.of_box(Box((low, 0), (4, 3))))
        for low in (0, 4)
    ]
    tensor = rearranged(TensorInfo((8, 3), "int32"), both, {"s": source})
    assert type(tensor) is Assembled and len(tensor.chunks) == 2
    assert tensor.sources == (source,)
    assert read(tensor, Box.whole((8, 3))) == [*range(12), *range(12)]


def test_it_is_never_one_run(tmp_path: Path) -> None:
    """Nobody may take its first region for the whole."""
    source = stored(tmp_path, "s", (4, 3), 4, 4)
    src = StridedBox((0, 0), (2, 2, 3), (0, 0, 1), (1, 2, 1))
    dst = StridedBox((0, 0), (2, 2, 3), (0, 0, 1), (2, 1, 1))
    tensor = rearranged(TensorInfo((4, 3), "int32"), [Piece("s", src, dst)], {"s": source})
    assert isinstance(tensor, Rearranged)
    assert tensor.extent is None and run_of(tensor, Box.whole((4, 3))) is None


@pytest.mark.parametrize("rows", [64, 65])
def test_few_reads_for_many_rows(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permutation of long rows is read as the rows lie, many at a time."""
    source = stored(tmp_path, "s", (2 * rows, 32), 4, 2 * rows)
    src = StridedBox((0, 0), (rows, 2, 32), (0, 0, 1), (1, rows, 1))
    dst = StridedBox((0, 0), (rows, 2, 32), (0, 0, 1), (2, 1, 1))
    tensor = rearranged(TensorInfo((2 * rows, 32), "int32"), [Piece("s", src, dst)], {"s": source})
    reads = []
    plain = Files.read_into

    def counted(
        self: Files, file: str, offset: int, buffers: list[memoryview], has_gaps: bool = False
    ) -> None:
        reads.append(offset)
        plain(self, file, offset, buffers, has_gaps)

    monkeypatch.setattr(Files, "read_into", counted)
    read(tensor, Box.whole((2 * rows, 32)))
    assert len(reads) == 1
