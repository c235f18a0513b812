"""Build the files that a writer plans in memory, and wrap writers so that they are observed or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ckptmap.protocols import OutFile, OutState, Writer
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.storage.crc32 import crc32
from ckptmap.tensors import Path
from ckptmap.testing.base import expect
from ckptmap.testing.samples import raw

if TYPE_CHECKING:
    import torch

Tensors = Mapping[Path, "torch.Tensor"]
"""The tensors in the slots of an output, by the path that the plan gives each."""


def image(
    out: OutFile, tensors: Tensors, background: int = 0, manifest: bytes | None = None
) -> bytes:
    """Return the file that slots and `seal` make; bytes that neither writes are `background`."""
    datas = [raw(window(tensors[slot.path], slot.box)) for slot in out.slots]
    crcs = [crc32(data) for data in datas] if out.needs_crc else []
    pieces = [(offset, bytes(piece)) for offset, piece in out.pieces(crcs, manifest)]
    end = max([out.nbytes, *(offset + len(piece) for offset, piece in pieces)])
    content = bytearray([background]) * end
    for slot, data in zip(out.slots, datas, strict=True):
        at = f"{out.name}: slot of {slot.path}"
        expect(len(data) == slot.nbytes, f"{at}: {slot.nbytes} bytes for {len(data)}")
        content[slot.offset : slot.offset + slot.nbytes] = data
    for offset, piece in pieces:
        for slot in out.slots:
            clear = offset + len(piece) <= slot.offset or slot.offset + slot.nbytes <= offset
            empty = not slot.nbytes or not piece
            expect(clear or empty, f"{out.name}: seal writes over the slot of {slot.path}")
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def check_files(outs: Sequence[OutFile], title: str) -> None:
    """Raise AssertionError for a file name that repeats or leaves the destination, or slots that overlap."""
    names = [out.name for out in outs]
    expect(names, f"{title}: the writer plans no file")
    expect(len(set(names)) == len(names), f"{title}: a file name occurs twice in {sorted(names)}")
    for out in outs:
        path = PurePosixPath(out.name)
        safe = not path.is_absolute() and ".." not in path.parts and path.parts
        expect(safe and "\0" not in out.name, f"{title}: file {out.name!r} leaves the destination")
        for slot in out.slots:
            inside = slot.offset >= 0 and slot.offset + slot.nbytes <= out.nbytes
            expect(inside, f"{title}: {out.name}: the slot of {slot.path} leaves the file")
        filled = sorted((s for s in out.slots if s.nbytes), key=lambda slot: slot.offset)
        for before, after in pairwise(filled):
            expect(
                before.offset + before.nbytes <= after.offset,
                f"{title}: {out.name}: slots overlap: {before.path} and {after.path}",
            )


class WriterProxy:
    """A writer that forwards to another one."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.name, self.one_file = writer.name, writer.one_file
        self.shares_storage = writer.shares_storage

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        return self.writer.files(state, name)


@dataclass(frozen=True)
class WriterCall:
    """One call of a writer: its arguments and its answer."""

    state: OutState
    name: str
    files: Sequence[OutFile]


class Watched(WriterProxy):
    """Records the calls of a writer, and checks its answers before the executor sees them."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self.calls: list[WriterCall] = []

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        files_planned = self.writer.files(state, name)
        check_files(files_planned, self.name)
        self.calls.append(WriterCall(state, name, files_planned))
        return files_planned


class Broken(WriterProxy):
    """Calls `fault` in the middle of sealing the last file, when all tensor data is written."""

    def __init__(self, writer: Writer, fault: Callable[[], None]) -> None:
        super().__init__(writer)
        self.fault = fault

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        *others, last = self.writer.files(state, name)

        def seal(crcs: Sequence[int], manifest: bytes | None) -> Iterator[tuple[int, bytes]]:
            for offset, piece in islice(last.seal(crcs, manifest), 1):
                yield offset, piece[: len(piece) // 2]
            self.fault()

        return [*others, replace(last, seal=seal)]
