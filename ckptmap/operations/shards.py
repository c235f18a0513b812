"""Which file holds which box of which tensor, and how even the files are.

`ckptmap inspect --shards` prints it, and `ckptmap report` draws it. A box is given by its offsets and
sizes in elements of the whole tensor; a quantized tensor is listed part by part, as it is stored.
Nothing but headers is read.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, fitted, human
from ckptmap.core.name_globs import matches
from ckptmap.core.printable import as_lines
from ckptmap.storage.lazy_tensor import LazyTensor

_RANK = re.compile(r"^__(\d+)_\d+\.distcp$|rank_?(\d+)")
"""The rank in the name of a file: of DCP, or of one file a rank."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, or of a stored part of it, in one file.

    part       the stored part of a quantized tensor: "absmax"; "" for a dense one
    file       the path below the checkpoint
    rank       the rank that wrote the file, as far as its name tells; None: one process wrote all
    offset     of the first byte of the box in the file
    nbytes     of the box in the file
    replica    True: another piece holds the same elements
    """

    role: str
    fqn: str
    part: str
    file: str
    offset: int
    box_offsets: tuple[int, ...]
    box_sizes: tuple[int, ...]
    nbytes: int
    replica: bool
    rank: int | None

    def to_json(self) -> dict[str, object]:
        return {
            "role": self.role,
            "fqn": self.fqn,
            "part": self.part,
            "file": self.file,
            "rank": self.rank,
            "offset": self.offset,
            "box": {"offsets": list(self.box_offsets), "sizes": list(self.box_sizes)},
            "nbytes": self.nbytes,
            "replica": self.replica,
        }


@dataclass(frozen=True)
class FileShare:
    """What one file holds of the tensors."""

    file: str
    rank: int | None
    tensors: int
    pieces: int
    nbytes: int


class ShardsReport:
    """The pieces of a checkpoint. `keys` is a glob over names that limits which are listed."""

    def __init__(self, ckpt: Checkpoint, keys: str = "*") -> None:
        self._ckpt, self._keys = ckpt, keys
        self.pieces = list(pieces(ckpt))
        self.files = _shares(self.pieces)

    @property
    def imbalance(self) -> float:
        """The bytes of the fullest file, divided by the mean of all files; 1 is even."""
        sizes = [share.nbytes for share in self.files]
        return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0

    def to_json(self) -> dict[str, object]:
        return {
            "path": self._ckpt.shown,
            "imbalance": self.imbalance,
            "files": [vars(share) for share in self.files],
            "pieces": [piece.to_json() for piece in self._listed()],
        }

    def __str__(self) -> str:
        return as_lines([self._ckpt.shown, *self._facts(), "", *self._file_lines(), *self._lines()])

    def _listed(self) -> Iterable[StoredPiece]:
        return (piece for piece in self.pieces if matches(piece.fqn, self._keys))

    def _facts(self) -> Iterator[str]:
        nbytes = sum(share.nbytes for share in self.files)
        yield f"  files      {counted(len(self.files), 'file')}, {human(nbytes)}"
        yield f"  imbalance  {self.imbalance:.2f} (the fullest file, divided by the mean)"
        replicas = [piece.nbytes for piece in self.pieces if piece.replica]
        if replicas:
            yield f"  replicas   {counted(len(replicas), 'piece')}, {human(sum(replicas))}"

    def _file_lines(self) -> Iterator[str]:
        heads, tails = ["file"], ["rank  tensors  pieces       size"]
        for share in self.files:
            rank = "-" if share.rank is None else str(share.rank)
            heads.append(share.file)
            tails.append(
                f"{rank:>4}  {share.tensors:>7,}  {share.pieces:>6,}  {human(share.nbytes):>9}"
            )
        yield from fitted(heads, tails)

    def _lines(self) -> Iterator[str]:
        """Yield a line for each piece where names were asked for: there may be a million."""
        if self._keys == "*":
            return
        yield ""
        for piece in self._listed():
            name = f"{piece.fqn}:{piece.part}" if piece.part else piece.fqn
            yield (
                f"  {name}  {list(piece.box_offsets)} + {list(piece.box_sizes)}"
                f"  {piece.file} at {piece.offset:,}, {human(piece.nbytes)}"
                + ("  replica" if piece.replica else "")
            )


def pieces(ckpt: Checkpoint) -> Iterator[StoredPiece]:
    """Yield every box that a file holds: of weights, optimizer state and other tensors, in order."""
    below: dict[str, str] = {}
    ranks: dict[str, int | None] = {}
    for role, lazy in tensors_by_role(ckpt):
        for part, stored in lazy.parts.items():
            for replica, chunks in ((False, stored.chunks), (True, stored.replicas)):
                for box, region, _ in chunks:
                    file = region.file
                    if file not in below:
                        below[file], ranks[file] = _below(file, ckpt), _rank(file, ckpt)
                    yield StoredPiece(
                        role, lazy.fqn, part, below[file], region.offset, box.offsets, box.sizes,
                        math.prod(region.sizes) * region.itemsize, replica, ranks[file],
                    )  # fmt: skip


def tensors_by_role(ckpt: Checkpoint) -> Iterator[tuple[str, LazyTensor]]:
    """Yield every tensor with its role: model, optimizer or other. State that is keyed by index is
    left out, because to name its parameters may need a class of transformers."""
    yield from (("model", lazy) for lazy in ckpt.values())
    if not ckpt.optimizer_by_index:
        states = ckpt.optimizer.values()
        yield from (("optimizer", lazy) for state in states for lazy in state.values())
    yield from (("other", lazy) for lazy in ckpt.other.values())


def _rank(file: str, ckpt: Checkpoint) -> int | None:
    match = _RANK.search(PurePath(file).name) if ckpt.world_size > 1 else None
    return None if match is None else int(match[1] or match[2])


def _below(file: str, ckpt: Checkpoint) -> str:
    path, whole = (PurePath(os.path.abspath(given)) for given in (file, ckpt.path))  # noqa: PTH100 (follows no link)
    root = whole if whole in path.parents else whole.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else file


def _shares(held: Iterable[StoredPiece]) -> list[FileShare]:
    by_file: dict[str, list[StoredPiece]] = defaultdict(list)
    for piece in held:
        by_file[piece.file].append(piece)
    return [
        FileShare(
            file, inside[0].rank, len({(piece.role, piece.fqn) for piece in inside}), len(inside),
            sum(piece.nbytes for piece in inside),
        )
        for file, inside in sorted(by_file.items())
    ]  # fmt: skip
