"""Split the work of a plan over ranks: by output file, balanced by bytes.

The split depends on the plan alone, so every rank computes the same one without communication. If
whole files would leave one rank with much more than its part (one file, or four files for three
ranks), all slots are lined up in file order and cut into stretches of equal bytes. A rank then
writes at most one stretch, and shares pages with other ranks only at the two ends of it. A tensor
whose encoding needs a statistic of the whole tensor goes to one rank, whatever files its parts are
in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptmap.planning.file_plan import Compare, Encode, FilePlan, SlotRef
from ckptmap.protocols import Refusal

UNEVEN = 1.25
"""Files are cut if one rank would get more than so many times the mean bytes: the run takes as long
as that rank does."""


@dataclass(frozen=True)
class Share:
    """The work of one rank.

    slots     for each file, the range of slots that it copies; encoded slots in it are skipped
    encodes   the encodings, each with the name of its unit of work
    compares  the replicas that it compares
    """

    slots: Sequence[range]
    encodes: Sequence[tuple[str, Encode]]
    compares: Sequence[Compare]

    @property
    def files(self) -> list[int]:
        """The indices of the files that this rank may write to."""
        encoded = {target.file for _, step in self.encodes for target in _targets(step)}
        return [file for file, slots in enumerate(self.slots) if slots or file in encoded]


@dataclass(frozen=True, slots=True)
class _Piece:
    """An encoding that one rank does alone.

    at    its first slot if all its slots are in one file, else None
    """

    name: str
    step: Encode
    nbytes: int
    at: SlotRef | None


def split(
    plan: Sequence[FilePlan],
    encodes: Sequence[Encode],
    compares: Sequence[Compare],
    world_size: int,
) -> list[Share]:
    """Return the share of each rank; together they do all work exactly once."""
    pieces = [piece for index, step in enumerate(encodes) for piece in _pieces(plan, index, step)]
    if world_size == 1:
        everything = [range(len(item.out.slots)) for item in plan]
        return [Share(everything, [(piece.name, piece.step) for piece in pieces], compares)]
    work = _line(plan, pieces)
    loose = [piece for piece in pieces if piece.at is None]
    ranks, apart, taken = _by_file(work, loose, world_size)
    if max(taken) * world_size > sum(taken) * UNEVEN:
        ranks, apart, taken = _by_stretch(work, loose, world_size)
    return _shares(work, ranks, list(zip(loose, apart, strict=True)), taken, compares)


_Line = list[list[tuple[int, int, _Piece | None]]]
"""For each file, in slot order: (bytes, slot, the encoding that begins there or None for a copy)."""


def _line(plan: Sequence[FilePlan], pieces: Iterable[_Piece]) -> _Line:
    work: _Line = [
        [
            (slot.nbytes, index, None)
            for index, (slot, source) in enumerate(zip(item.out.slots, item.sources, strict=True))
            if source is not None
        ]
        for item in plan
    ]
    for piece in pieces:
        if piece.at is not None:
            work[piece.at.file].append((piece.nbytes, piece.at.slot, piece))
    for row in work:
        row.sort(key=lambda entry: entry[1])
    return work


def _pieces(plan: Sequence[FilePlan], index: int, step: Encode) -> list[_Piece]:
    """Return the pieces of an encoding.

    That is one for each file if each slot can be encoded alone, else one for the whole tensor.
    """
    files: dict[int, list[SlotRef]] = {}
    for target in _targets(step):
        files.setdefault(target.file, []).append(target)
    if len(files) > 1 and not _splittable(step):
        nbytes = sum(plan[t.file].out.slots[t.slot].nbytes for t in _targets(step))
        return [_Piece(f"encode:{index}", step, nbytes, None)]
    pieces = []
    for file, targets in files.items():
        name, part = f"encode:{index}", step
        if len(files) > 1:
            name, part = f"encode:{index}:{file}", replace(step, targets={"": targets})
        nbytes = sum(plan[file].out.slots[target.slot].nbytes for target in targets)
        first = min(targets, key=lambda target: target.slot)
        pieces.append(_Piece(name, part, nbytes, first))
    return pieces


def _targets(step: Encode) -> list[SlotRef]:
    return [target for targets in step.targets.values() for target in targets]


def _splittable(step: Encode) -> bool:
    """Return whether each slot can be encoded alone.

    It can if the encoding has one part, of the tensor's own shape, and needs no statistic of the
    whole tensor.
    """
    info = step.tensor.info
    parts = step.encoding.parts(info)
    if isinstance(parts, Refusal) or list(parts) != [""] or parts[""].shape != info.shape:
        return False
    return step.encoding.encoder(info, "cpu").splittable


def _deal(weights: Sequence[int], taken: list[int]) -> list[int]:
    """Return the rank of each item: the heaviest is dealt first, to the rank with the least bytes.

    `taken`, the bytes of each rank, is updated.
    """
    owners = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min(range(len(taken)), key=lambda r: (taken[r], r))
        owners[index] = rank
        taken[rank] += weights[index]
    return owners


_Owners = tuple[list[list[int]], list[int], list[int]]
"""The rank of each entry of the line, the rank of each piece over several files, the bytes of each
rank."""


def _by_file(work: _Line, loose: Sequence[_Piece], world_size: int) -> _Owners:
    taken = [0] * world_size
    owners = _deal([sum(nbytes for nbytes, _, _ in row) for row in work], taken)
    ranks = [[owner] * len(row) for owner, row in zip(owners, work, strict=True)]
    return ranks, _deal([piece.nbytes for piece in loose], taken), taken


def _by_stretch(work: _Line, loose: Sequence[_Piece], world_size: int) -> _Owners:
    """Give each entry to the rank whose stretch holds its middle byte."""
    total = max(1, sum(nbytes for row in work for nbytes, _, _ in row))
    taken, at = [0] * world_size, 0
    ranks: list[list[int]] = []
    for row in work:
        ranks.append([])
        for nbytes, _, _ in row:
            rank = min(world_size - 1, (2 * at + nbytes) * world_size // (2 * total))
            ranks[-1].append(rank)
            taken[rank] += nbytes
            at += nbytes
    return ranks, _deal([piece.nbytes for piece in loose], taken), taken


def _shares(
    work: _Line,
    ranks: Sequence[Sequence[int]],
    loose: Sequence[tuple[_Piece, int]],
    taken: list[int],
    compares: Sequence[Compare],
) -> list[Share]:
    world_size = len(taken)
    slots = [[range(0)] * len(work) for _ in range(world_size)]
    encodes: list[list[tuple[str, Encode]]] = [[] for _ in range(world_size)]
    for file, (row, numbers) in enumerate(zip(work, ranks, strict=True)):
        for (_, slot, piece), rank in zip(row, numbers, strict=True):
            if piece is not None:
                encodes[rank].append((piece.name, piece.step))
            else:
                first = slots[rank][file].start if slots[rank][file] else slot
                slots[rank][file] = range(first, slot + 1)
    for piece, rank in loose:
        encodes[rank].append((piece.name, piece.step))
    checks: list[list[Compare]] = [[] for _ in range(world_size)]
    read = [c.replica.box.numel * c.tensor.info.itemsize for c in compares]
    for compare, rank in zip(compares, _deal(read, taken), strict=True):
        checks[rank].append(compare)
    return [Share(*share) for share in zip(slots, encodes, checks, strict=True)]
