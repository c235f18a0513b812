"""Which rank writes which box: every rank computes the same assignment from the offers of all ranks.

offers of all ranks  ->  stored tensors, each box with the one rank that writes it  ->  OutState
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ckptmap.core.strided_dims import flat_span
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import RunError
from ckptmap.live.optimizer.local_state import STATE, LocalCodes, LocalState, LocalTensor
from ckptmap.live.save.replica_digests import Digest, differ, digests_of
from ckptmap.optim.lowbit import QMAP, LowBit, LowBitCell, join_cells
from ckptmap.protocols import OutState, OutTensor, Refusal
from ckptmap.tensors import Box, Path, TensorInfo

if TYPE_CHECKING:
    import torch

Boxes = list[tuple[int, Box]]


@dataclass(frozen=True)
class Offer:
    """A LocalTensor without its values, as it is sent to the other ranks.

    coded  scheme, block size and sign of a moment's codes
    span   flat positions of its blocks, where they are no box because a shard ends inside a block
    cuts_blocks  is its box one that cuts blocks of the whole tensor?
    is_own  may each rank have other values?
    """

    path: Path
    info: TensorInfo
    boxes: tuple[Box, ...]
    primary: bool | None
    checked: bool
    digest: Digest = ()
    coded: tuple[str, int, bool] | None = None
    span: tuple[int, int] | None = None
    is_buffer: bool = False
    cuts_blocks: bool = False
    is_own: bool = False

    @property
    def is_whole(self) -> bool:
        """Does each rank that has the tensor hold all of it?"""
        return self.primary is None


def offers_of(holdings: Sequence[LocalTensor]) -> list[Offer]:
    """Return what other ranks are told of the tensors that this rank holds."""
    return with_digests(bare_offers(holdings), compared_digests(holdings))


def bare_offers(holdings: Sequence[LocalTensor]) -> list[Offer]:
    """Return the offers of these tensors without their digests: what is the same from one save to the next."""
    return [_offer(one) for one in holdings]


def compared_digests(holdings: Sequence[LocalTensor]) -> list[Digest]:
    """Return the digests of the tensors that other ranks may hold whole, too, in their order."""
    return digests_of([one.pieces for one in holdings if is_compared(one)])


def is_compared(one: LocalTensor | Offer) -> bool:
    """Return whether ranks compare their values of a tensor, which each of them holds whole."""
    return one.primary is None and (one.checked or one.is_buffer or one.is_own)


def with_digests(offers: Sequence[Offer], digests: Sequence[Digest]) -> list[Offer]:
    """Return the offers with the digests of those that are compared."""
    rest = iter(digests)
    return [replace(one, digest=next(rest)) if is_compared(one) else one for one in offers]


def _offer(holding: LocalTensor) -> Offer:
    first = holding.pieces[0] if holding.pieces else None
    coded = span = None
    cuts_blocks = False
    if isinstance(first, LocalCodes):
        codes = first.codes
        coded, span = (codes.scheme, codes.block_size, codes.signed), codes.span
        cuts_blocks = codes.segments is not None
    boxes = tuple(piece.box for piece in holding.pieces)
    return Offer(
        holding.path, holding.info, boxes, holding.primary, holding.checked,
        (), coded, span, holding.is_buffer, cuts_blocks, holding.is_own,
    )  # fmt: skip


class Drifted(NamedTuple):
    """The names of what differs between ranks that hold all of it, and of which one is saved: buffers, and other
    replicas, of which `save(replicas="first")` has that of the lowest rank."""

    buffers: Sequence[str] = ()
    others: Sequence[str] = ()


def drifted(offers: Sequence[Sequence[Offer]]) -> Drifted:
    """Return what differs between ranks."""
    first: dict[Path, Offer] = {}
    buffers, others = dict[str, None](), dict[str, None]()
    for some in offers:
        for one in some:
            known = first.setdefault(one.path, one)
            if is_compared(one) and differ(one.digest, known.digest):
                (buffers if one.is_buffer else others)[title_of(one)] = None
    return Drifted([*buffers], [*others])


def title_of(one: LocalTensor | Offer) -> str:
    """Return the name of a tensor for the user: an FQN, or that of an entry of optimizer state."""
    return ".".join(map(str, one.path[2 if one.path[: len(STATE)] == STATE else 1 :]))


class ValuesPlace(NamedTuple):
    """Where this rank finds values that it writes: numbers of the tensor it holds and of its piece, and the part
    of a piece of codes ("": the piece is values).

    is_flat  whether they are written as one row
    """

    holding: int
    piece: int
    part: str = ""
    is_flat: bool = False

    def values(self, holdings: Sequence[LocalTensor]) -> torch.Tensor:
        """Return the values, a view of what the rank holds."""
        piece = holdings[self.holding].pieces[self.piece]
        if isinstance(piece, LocalCodes):
            return piece.codes.parts[self.part].view(-1)
        return piece.values.reshape(-1) if self.is_flat else piece.values


@dataclass
class Assignment:
    """The stored tensors, and in `mine` the values that this rank writes, by stored path and box.

    places  where those values are among what the rank holds; the same for every save of one structure
    """

    tensors: list[OutTensor] = field(default_factory=list)
    records: dict[str, Mapping[str, object]] = field(default_factory=dict)
    mine: dict[tuple[Path, Box], torch.Tensor] = field(default_factory=dict)
    places: dict[tuple[Path, Box], ValuesPlace] = field(default_factory=dict)

    def state(
        self, values: Mapping[Path, object], world: int, beside: Sequence[OutTensor] = ()
    ) -> OutState:
        return OutState([*self.tensors, *beside], values, self.records, world)


class Assigner:
    """Assigns every box to one rank that holds it, the one with the fewest bytes so far."""

    def __init__(self, rank: int, world: int, held: LocalState) -> None:
        self._rank = rank
        self._load = [0] * world
        self._holdings = held.holdings
        self._held = {holding.path: number for number, holding in enumerate(held.holdings)}
        self._found = Assignment(records=dict(held.records))

    def assign(self, offers: Sequence[Sequence[Offer]]) -> Assignment:
        """Return the assignment for the offers of all ranks, in order of rank.

        Raises RunError CKM509 where replicas differ, CKM510 where boxes do not tile a tensor."""
        by_path: dict[Path, list[tuple[int, Offer]]] = {}
        for rank, some in enumerate(offers):
            for one in some:
                by_path.setdefault(one.path, []).append((rank, one))
        for path, found in by_path.items():
            self._check(path, found)
            if any(one.coded for _, one in found):
                self._moment(path, found)
            else:
                self._dense(path, found)
        places = self._found.places.items()
        self._found.mine = {key: place.values(self._holdings) for key, place in places}
        return self._found

    def _check(self, path: Path, found: Sequence[tuple[int, Offer]]) -> None:
        """Raise RunError where replicas differ in values, shape, dtype or in how a mesh cuts them."""
        name = ".".join(map(str, path))
        rank, first = found[0]
        for other, one in found[1:]:
            if one.checked and differ(one.digest, first.digest):
                raise RunError(
                    "CKM509",
                    f"{name}: ranks {rank} and {other} hold replicas that differ",
                    f"{_why_apart(path)}; save with replicas='first' to keep the lowest rank's",
                )
            if one.checked and path[0] == "model" and one.is_whole != first.is_whole:
                ranks = (rank, other) if first.is_whole else (other, rank)
                raise RunError(
                    "CKM510",
                    f"{name}: rank {ranks[0]} holds all of it, rank {ranks[1]} a shard of it",
                    "build the same model, on the same mesh, on every rank",
                )
            if one.info.shape != first.info.shape or (
                one.info.dtype != first.info.dtype and not (one.coded or first.coded)
            ):
                raise RunError(
                    "CKM510",
                    f"{name}: is {first.info} on rank {rank}, {one.info} on rank {other}",
                    "build the same model, on the same mesh, on every rank",
                )

    def _owned(self, found: Sequence[tuple[int, Offer]], nbytes: int) -> list[tuple[int, Offer]]:
        if found[0][1].primary is not None:
            return [(rank, one) for rank, one in found if one.primary]
        checked = found[0][1].checked
        owner = min(found, key=lambda f: (self._load[f[0]], f[0])) if checked else found[0]
        self._load[owner[0]] += nbytes
        return [owner]

    def _dense(self, path: Path, found: Sequence[tuple[int, Offer]]) -> None:
        info = found[0][1].info
        owned = self._owned(found, info.nbytes)
        by_box: dict[Box, int] = {}
        for rank, one in owned:  # of two meshes, neither knows the replicas of the other
            for box in one.boxes:
                by_box.setdefault(box, rank)
        chunks = [(rank, box) for box, rank in by_box.items()]
        self._add(path, info, sorted(chunks, key=lambda c: (c[1].offsets, c[0])))
        if self._rank in by_box.values():
            holding = self._held[path]
            for number, piece in enumerate(self._holdings[holding].pieces):
                assert not isinstance(piece, LocalCodes)
                if by_box[piece.box] == self._rank:
                    self._found.places[path, piece.box] = ValuesPlace(holding, number)

    def _add(self, path: Path, info: TensorInfo, chunks: Boxes) -> None:
        wrong = prove_tiling(info.shape, [box for _, box in chunks])
        if wrong is not None:
            raise RunError(
                "CKM510",
                f"{'.'.join(map(str, path))}: {wrong}, expected to fill {info}",
                "call save on every rank that holds a shard of the model",
            )
        self._found.tensors.append(OutTensor(path, info, chunks))

    # ------------------------------------------------------------------ moments in codes

    def _moment(self, path: Path, found: Sequence[tuple[int, Offer]]) -> None:
        """Join the cells of all ranks into one encoding, and assign each rank's runs of its parts."""
        info = TensorInfo(found[0][1].info.shape, "float32")
        owned = self._owned(found, info.numel)
        scheme, block, signed = next(one.coded for _, one in found if one.coded)
        spans = {one.span: rank for rank, one in owned if one.span and one.span[0] < one.span[1]}
        cells: dict[LowBitCell, int] = {}
        for rank, one in owned:
            for box in () if spans else one.boxes:
                cells.setdefault(LowBitCell(box, one.coded is not None), rank)
        plain = next((one.info.dtype for _, one in owned if not one.coded), "float32")
        whole = info.shape if any(one.cuts_blocks for _, one in owned) else ()
        together = join_cells(list(cells), info.shape, 0 if whole else block)
        encoding = LowBit(scheme, block, signed, together, plain, whole)
        parts = encoding.parts(info)
        assert not isinstance(parts, Refusal)
        chunks: dict[str, Boxes] = {part: [] for part in parts}
        for span, rank in spans.items():
            self._put(path, rank, None, encoding.run(*span), chunks)
        for cell, rank in cells.items():
            self._put(path, rank, cell, _places(encoding, info, cell), chunks)
        if QMAP in parts:
            first = min(
                [*spans.values(), *(rank for cell, rank in cells.items() if cell.quantized)]
            )
            self._put(path, first, None, {QMAP: Box.whole(parts[QMAP].shape)}, chunks)
        for part, part_info in parts.items():
            where = sorted(chunks[part], key=lambda chunk: chunk[1].offsets)
            self._add((*path[:-1], f"{path[-1]}.{part}"), part_info, where)
        self._found.records[".".join(map(str, path))] = encoding.record(info)

    def _put(
        self, path: Path, rank: int, cell: LowBitCell | None,
        places: Mapping[str, Box], chunks: Mapping[str, Boxes],
    ) -> None:  # fmt: skip
        for part, box in places.items():
            chunks[part].append((rank, box))
            self._keep(path, rank, cell, part, box)

    def _keep(self, path: Path, rank: int, cell: LowBitCell | None, part: str, box: Box) -> None:
        if rank != self._rank:
            return
        where = (*path[:-1], f"{path[-1]}.{part}")
        holding = self._held[path]
        for number, piece in enumerate(self._holdings[holding].pieces):
            if isinstance(piece, LocalCodes):
                self._found.places[where, box] = ValuesPlace(holding, number, part)
            elif cell is not None and piece.box == cell.box:
                self._found.places[where, box] = ValuesPlace(holding, number, is_flat=True)


def _why_apart(path: Path) -> str:
    """Return what makes replicas differ that ought to be alike."""
    drifted = "the replicas have drifted apart (stochastic rounding needs equal random streams)"
    of_shard = ", or the optimizer computes it from each rank's shard alone"
    return drifted + (of_shard if path[: len(STATE)] == STATE else "")


def _places(encoding: LowBit, info: TensorInfo, cell: LowBitCell) -> Mapping[str, Box]:
    """Return the box of a cell's codes and scales in each stored part."""
    if encoding.cells:
        return encoding.place(encoding.cells.index(cell))
    return encoding.run(*flat_span(info.shape, cell.box))
