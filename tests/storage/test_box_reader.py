"""`fill` of the box reader against torch indexing: any strides, any chunks, any box."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.core.row_chunks import RowChunks
from ckptmap.core.tiling import prove_rows
from ckptmap.errors import RunError, SourceError
from ckptmap.storage import box_reader, column_reader, files
from ckptmap.storage.box_reader import fill, row_major_boxes, run_of
from ckptmap.storage.files import Files
from ckptmap.storage.tensor_bytes import tensor_bytes
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo
from tests.support.examples import examples

DTYPES = ["uint8", "bfloat16", "float32", "int64", "complex128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gather")


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def as_bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()  # must outlive the view of its memory
    return bytes(tensor_bytes(whole))


def random_tensor(shape: Sequence[int], dtype: str) -> torch.Tensor:
    torch_dtype = getattr(torch, dtype)
    nbytes = torch.Size(shape).numel() * torch_dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(torch_dtype).reshape(shape)


def store(view: torch.Tensor, file: Path, base: torch.Tensor, shift: int) -> Region:
    """Write the storage of `base` at `shift` and describe `view` of it."""
    with file.open("wb") as handle:
        handle.write(b"\x55" * shift + as_bytes(base))
    item: int = view.element_size()
    offset = shift + int(view.storage_offset()) * item
    return Region(
        str(file), offset, tuple(view.shape), tuple(int(s) * item for s in view.stride()), item
    )


def check(tensor: torch.Tensor, stored: StoredTensor, box: Box) -> None:
    expected = as_bytes(tensor[slices(box)])
    out = bytearray(b"\xaa" * len(expected))
    files = Files()
    fill(files, stored, box, memoryview(out))
    files.close()
    assert bytes(out) == expected


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """(a strided view, its contiguous base): permuted, narrowed, stepped, expanded."""
    rank = draw(st.integers(0, 4))
    shape = [draw(st.sampled_from([1, 2, 3, 5, 8, 40])) for _ in range(rank)]
    base = random_tensor(shape, draw(st.sampled_from(DTYPES)))
    view = base
    for dim in range(rank):
        start = draw(st.integers(0, view.shape[dim] - 1))
        view = view[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 3))),)]
    view = view.permute(draw(st.permutations(range(rank))))
    if draw(st.booleans()):
        at = draw(st.integers(0, rank))
        n = draw(st.integers(1, 9))
        view = view.unsqueeze(at).expand(*view.shape[:at], n, *view.shape[at:])
    return view, base


@examples(250)
@given(data=st.data())
def test_any_strided_view(folder: Path, data: st.DataObject) -> None:
    view, base = data.draw(views())
    region = store(view, folder / "view", base, data.draw(st.integers(0, 9)))
    info = TensorInfo(tuple(view.shape), str(view.dtype).removeprefix("torch."))
    stored = StoredTensor(info, [Chunk(Box.whole(info.shape), region)])
    check(view, stored, data.draw(boxes(view.shape)))


@examples(60)
@given(data=st.data())
def test_small_spans_and_iovecs_give_the_same(folder: Path, data: st.DataObject) -> None:
    """The same views with every limit so low that each splitting branch is taken."""
    view, base = data.draw(views())
    region = store(view, folder / "small", base, 3)
    info = TensorInfo(tuple(view.shape), str(view.dtype).removeprefix("torch."))
    stored = StoredTensor(info, [Chunk(Box.whole(info.shape), region)])
    limits = {"SCRATCH": 64, "MAX_GAP": 16, "MIN_RUN": data.draw(st.sampled_from([1, 16, 64]))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**limits, "IOV_MAX": 4}.items():
            patch.setattr(box_reader, name, value)
        check(view, stored, data.draw(boxes(view.shape)))


@examples(100)
@given(data=st.data())
def test_any_chunking(folder: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    tensor = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    pieces = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        pieces = list(cut_one(data, pieces))
    chunks = []
    for number, piece in enumerate(pieces):
        part = tensor[slices(piece)].clone(memory_format=torch.contiguous_format)
        chunks.append(Chunk(piece, store(part, folder / f"chunk{number}", part, number)))
    info = TensorInfo(tuple(shape), str(tensor.dtype).removeprefix("torch."))
    box = data.draw(boxes(shape))
    check(tensor, StoredTensor(info, chunks), box)
    with pytest.MonkeyPatch.context() as patch:  # nearly all that is cut by columns is joined
        for name, value in {
            "MIN_RUN": 1,
            "MAX_RUN": 8,
            "READ": 16,
            "SCRATCH": 64,
            "JOINED": 8,
        }.items():
            patch.setattr(column_reader, name, value)
        check(tensor, StoredTensor(info, chunks), box)
        check(tensor, StoredTensor(info, chunks), Box.whole(shape))
    if len(chunks) > 1:
        with pytest.raises(SourceError, match=r"fill \d+ bytes of the box") as caught:
            check(tensor, StoredTensor(info, chunks[1:]), Box.whole(shape))
        assert caught.value.code == "CKM112"


@examples(100)
@given(data=st.data())
def test_rows_are_chunks_of_rows(folder: Path, data: st.DataObject) -> None:
    """Read, and seen, as the chunks that they stand for."""
    shape = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    shape[0] += 1
    tensor = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    cuts = data.draw(st.sets(st.integers(1, shape[0] - 1), min_size=1))
    chunks = []
    for start, stop in pairwise([0, *sorted(cuts), shape[0]]):
        box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
        part = tensor[start:stop].clone()
        region = store(part, folder / f"rows{start}", part, start)
        chunks.append(Chunk(box, region, start or None))
    info = TensorInfo(tuple(shape), str(tensor.dtype).removeprefix("torch."))
    rows = RowChunks.of(info, chunks)
    assert rows is not None
    assert list(rows) == chunks == rows[:]
    assert list(rows.ends()) == [(c.region.file, c.region.offset + c.region.nbytes) for c in chunks]
    assert prove_rows(info.shape, tuple(rows.bounds)) is None
    check(tensor, StoredTensor(info, rows), data.draw(boxes(shape)))
    check(tensor, StoredTensor(info, rows), Box.whole(shape))
    assert RowChunks.of(info, chunks[1:]) is None
    assert RowChunks.of(info, chunks[::-1]) is None


def test_rows_are_read_whole_or_not_at_all(folder: Path) -> None:
    """Few descriptors; a file that is short, or gone, is named."""
    tensor = random_tensor([10, 4], "uint8")
    parts = [tensor[i : i + 1].clone() for i in range(10)]
    chunks = [
        Chunk(Box((i, 0), (1, 4)), store(part, folder / f"each{i}", part, i))
        for i, part in enumerate(parts)
    ]
    rows = RowChunks.of(TensorInfo((10, 4), "uint8"), chunks)
    assert rows is not None
    stored, files, out = StoredTensor(TensorInfo((10, 4), "uint8"), rows), Files(3), bytearray(40)
    fill(files, stored, Box.whole((10, 4)), memoryview(out))
    assert bytes(out) == as_bytes(tensor)
    assert len(files._open) <= 3
    files.close()
    (folder / "each7").write_bytes(b"x" * 9)
    with pytest.raises(RunError, match="each7: ended at byte 9, expected 11"):
        check(tensor, stored, Box.whole((10, 4)))
    (folder / "each7").unlink()
    with pytest.raises(SourceError, match="each7: cannot be read: No such file"):
        check(tensor, stored, Box.whole((10, 4)))


def cut_one(data: st.DataObject, pieces: list[Box]) -> list[Box]:
    """Split one box along one dim, where it can be split."""
    index = data.draw(st.integers(0, len(pieces) - 1))
    box = pieces[index]
    dim = data.draw(st.integers(0, len(box.sizes) - 1))
    if box.sizes[dim] == 1:
        return pieces
    at = data.draw(st.integers(1, box.sizes[dim] - 1))
    low, high = list(box.sizes), list(box.sizes)
    low[dim], high[dim] = at, box.sizes[dim] - at
    start = list(box.offsets)
    start[dim] += at
    both = [Box(box.offsets, tuple(low)), Box(tuple(start), tuple(high))]
    return pieces[:index] + both + pieces[index + 1 :]


@given(data=st.data())
def test_row_major_boxes_follow_each_other(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=4))
    box = data.draw(boxes(shape))
    limit = data.draw(st.integers(1, 60))
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape)
    cuts = list(row_major_boxes(box, limit))
    assert all(0 < cut.numel <= limit for cut in cuts)
    got = torch.cat([flat[slices(cut)].reshape(-1) for cut in cuts])
    assert torch.equal(got, flat[slices(box)].reshape(-1))


def test_run_of_tells_one_run(folder: Path) -> None:
    tensor = random_tensor([6, 4], "int64")
    region = store(tensor, folder / "run", tensor, 16)
    stored = StoredTensor(TensorInfo((6, 4), "int64"), [Chunk(Box.whole((6, 4)), region)])
    file = str(folder / "run")
    assert run_of(stored, Box((0, 0), (6, 4))) == box_reader.Run(file, 16, 192)
    assert run_of(stored, Box((2, 0), (3, 4))) == box_reader.Run(file, 16 + 64, 96)
    assert run_of(stored, Box((0, 1), (6, 2))) is None
    halves = [Chunk(Box((0, 0), (3, 4)), region), Chunk(Box((3, 0), (3, 4)), region)]
    assert run_of(StoredTensor(stored.info, halves), Box((2, 0), (2, 4))) is None


def test_empty_and_scalar(folder: Path) -> None:
    scalar = random_tensor([], "float32")
    region = store(scalar, folder / "scalar", scalar, 1)
    check(
        scalar, StoredTensor(TensorInfo((), "float32"), [Chunk(Box((), ()), region)]), Box((), ())
    )
    none = StoredTensor(TensorInfo((0, 4), "int8"), [])
    fill(Files(), none, Box.whole((0, 4)), memoryview(bytearray()))


def test_runs_of_a_file_are_read_in_the_order_given(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(range(50)))
    files = Files()
    assert files.read_runs(str(file), [40, 0, 7], [2, 3, 0]) == [b"\x28\x29", b"\0\1\2", b""]
    with pytest.raises(RunError, match="ended at byte 50, expected 60"):
        files.read_runs(str(file), [0, 40], [3, 20])
    with pytest.raises(SourceError, match="cannot be read"):
        files.read_runs(str(tmp_path / "absent"), [0], [3])
    files.close()


def test_truncated_source_is_told(folder: Path) -> None:
    tensor = random_tensor([100], "uint8")
    region = store(tensor, folder / "short", tensor, 0)
    (folder / "short").write_bytes(b"x" * 40)
    stored = StoredTensor(TensorInfo((100,), "uint8"), [Chunk(Box.whole((100,)), region)])
    with pytest.raises(RunError, match="ended at byte 40, expected 100"):
        check(tensor, stored, Box.whole((100,)))


def test_a_directory_as_file_is_told(folder: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        Files().read(str(folder), 0, 4)


def test_descriptors_are_bounded(folder: Path) -> None:
    files = Files(max_open=3)
    for number in range(10):
        (folder / f"fd{number}").write_bytes(bytes([number]))
        assert files.read(str(folder / f"fd{number}"), 0, 1) == bytes([number])
    assert len(files._open) <= 3
    files.close()


@pytest.mark.parametrize(
    ("limit", "most"), [(1024, 307), (256, 76), (1 << 20, 2048), (resource.RLIM_INFINITY, 2048)]
)
def test_descriptors_are_a_share_of_those_allowed(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert files._most_open.__wrapped__() == most


def test_columns_are_read_as_runs_and_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file, few long runs in their order, whatever rows of the tensor are asked for."""
    tensor, reads = random_tensor([900, 1200], "bfloat16"), list[tuple[str, int, list[int]]]()
    chunks = []
    for start, stop in ((0, 500), (500, 800), (800, 1200)):
        part = tensor[:, start:stop].clone(memory_format=torch.contiguous_format)
        region = store(part, folder / f"columns{start}", part, 7)
        chunks.append(Chunk(Box((0, start), (900, stop - start)), region))
    plain = Files.read_into

    def seen(files: Files, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        reads.append((Path(file).name, offset, [buffer.nbytes for buffer in buffers]))
        plain(files, file, offset, buffers)

    monkeypatch.setattr(Files, "read_into", seen)
    check(
        tensor, StoredTensor(TensorInfo((900, 1200), "bfloat16"), chunks), Box((50, 0), (800, 1200))
    )
    rows = column_reader.READ * 3 // 2400
    assert [read for read in reads if read[0] == "columns500"] == [
        ("columns500", 7 + (50 + at) * 600, [min(rows, 800 - at) * 600])
        for at in range(0, 800, rows)
    ]


def test_large_transpose_in_bounded_memory(folder: Path) -> None:
    tensor = random_tensor([3000, 1001], "bfloat16")
    region = store(tensor.t(), folder / "large", tensor, 6)
    stored = StoredTensor(
        TensorInfo((1001, 3000), "bfloat16"), [Chunk(Box.whole((1001, 3000)), region)]
    )
    check(tensor.t(), stored, Box((1, 5), (900, 2990)))


def test_no_torch_is_needed() -> None:
    import subprocess

    code = "import sys, ckptmap.storage.box_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
