"""Read every stored form of NF4: five plain tensors with a record, torchao's pickled NF4Tensor, its shards.

A pickled NF4Tensor is never built: its attributes are taken as the five parts. torchao moved the class
between releases (`torchao.dtypes.nf4tensor` up to 0.17, `torchao.quantization.quantize_.workflows.nf4.
nf4_tensor` since 0.18), so it is recognized by class name and last module segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.stored_parts import StoredParts
from ckptmap.protocols import Group, Refusal
from ckptmap.protocols.encodings import Record, Records
from ckptmap.quantization.blockwise.group_checks import check_parts, malformed
from ckptmap.quantization.nf4.encoding import (
    DATA,
    FACTOR,
    MEAN,
    NF4,
    PARTS,
    SCALERS,
    TABLE,
    VERSION,
)
from ckptmap.tensors import Box, Chunk, Cut, Opaque, StoredTensor, TensorInfo

# torchao 0.1 gave every NF4Tensor this dtype; the logical one is that of its table.
_PLACEHOLDER = "float8_e5m2fnuz"


def _checked(
    fqn: str, encoding: NF4, info: TensorInfo, tensors: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Return the five parts, each a plain tensor of the shape and dtype that `info` requires."""
    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise malformed(fqn, expected.reason, "the file is damaged, or this is not an NF4 tensor")
    return check_parts(fqn, "NF4", expected, tensors)


# ------------------------------------------------------------------------------- our own form


def stored_groups(
    stored: Mapping[str, StoredTensor], records: Records
) -> list[tuple[Group, Sequence[str]]]:
    """Return a group for each NF4 record; its parts are stored as `FQN.part`."""
    groups: list[tuple[Group, Sequence[str]]] = []
    known = set()
    for fqn, record in records.items():
        if record.get("scheme") != "nf4":
            continue
        encoding, info = _read_record(fqn, record)
        keys = {part: f"{fqn}.{part}" for part in PARTS}
        tensors = {part: stored[key] for part, key in keys.items() if key in stored}
        group = Group(fqn, info, encoding, _checked(fqn, encoding, info, tensors))
        groups.append((group, tuple(keys.values())))
        known.add(fqn)
    _refuse_orphans(stored, known)
    return groups


def _read_record(fqn: str, record: Record) -> tuple[NF4, TensorInfo]:
    if record.get("version") != VERSION:
        raise malformed(
            fqn,
            f"NF4 record of version {record.get('version')!r}, expected {VERSION}",
            "upgrade ckptmap, or convert again with this version",
        )
    shape, dtype = record.get("shape"), record.get("dtype")
    counts = [record.get("block_size"), record.get("scaler_block_size")]
    counts += shape if isinstance(shape, list | tuple) else [None]
    positive = [n for n in counts if type(n) is int and n > 0]
    if len(positive) < len(counts) or not isinstance(dtype, str):
        raise malformed(
            fqn,
            "malformed NF4 record, expected block_size, scaler_block_size, shape and dtype, "
            f"found {dict(record)}",
            "the checkpoint's metadata is damaged; convert again from its source",
        )
    block, scaler_block, *sizes = positive
    return NF4(block, scaler_block, record.get("exact") is True), TensorInfo(tuple(sizes), dtype)


def _refuse_orphans(stored: Mapping[str, StoredTensor], known: set[str]) -> None:
    for key in StoredParts.of(stored).ending(f".{TABLE}"):
        fqn, dot, part = key.rpartition(".")
        if part != TABLE or not dot or fqn in known:
            continue
        if all(f"{fqn}.{name}" in stored for name in PARTS):
            raise malformed(
                fqn,
                "its five NF4 parts have no record, so its shape and block sizes are unknown",
                "put ckptmap.manifest.json beside the weights, or convert again from the source",
            )


# ------------------------------------------------------------------------------- torchao's class


def is_nf4(leaf: Opaque) -> bool:
    """Return whether a pickled object is torchao's NF4Tensor."""
    last = leaf.module.rpartition(".")[2]
    return leaf.name == "NF4Tensor" and last in ("nf4tensor", "nf4_tensor")


@dataclass(frozen=True)
class _Pickled:
    """One NF4Tensor object, checked: all of a tensor, or one rank's rows at `box`."""

    box: Box
    encoding: NF4
    info: TensorInfo
    parts: Mapping[str, StoredTensor]


def adopt_whole(fqn: str, leaf: Opaque) -> Group:
    """Return the group of one pickled NF4Tensor. Raises SourceError CKM115 where its parts do not fit."""
    if leaf.info is None:
        raise malformed(fqn, f"{leaf.class_name} without a shape", "the pickle is damaged")
    whole = _unpack(fqn, leaf, Box.whole(leaf.info.shape), leaf.info.dtype)
    return Group(fqn, whole.info, whole.encoding, whole.parts)


def _unpack(fqn: str, leaf: Opaque, box: Box, wrapper_dtype: str) -> _Pickled:
    state = leaf.state if isinstance(leaf.state, Mapping) else {}
    table = state.get(TABLE)
    block, scaler_block = state.get("block_size"), state.get("scaler_block_size")
    if (
        not isinstance(table, StoredTensor)
        or type(block) is not int
        or type(scaler_block) is not int
    ):
        names = ", ".join(map(str, state)) or "nothing"
        raise malformed(
            fqn,
            f"{leaf.class_name}, expected block_size, scaler_block_size and five tensors, "
            f"found {names}",
            "the pickle is damaged or of an unknown torchao release",
        )
    dtype = table.info.dtype
    for label in {wrapper_dtype, leaf.info.dtype if leaf.info else wrapper_dtype}:
        if label not in (dtype, _PLACEHOLDER):
            raise malformed(
                fqn,
                f"NF4Tensor labelled {label} holds {dtype} parts: module.to() or .half() was "
                "called on it, and which values are meant is unknown",
                "save it again before that call",
            )
    encoding, info = NF4(block, scaler_block), TensorInfo(box.sizes, dtype)
    return _Pickled(box, encoding, info, _checked(fqn, encoding, info, state))


# ------------------------------------------------------------------------------- shards of it


def adopt_cut(fqn: str, cut: Cut) -> Group:
    """Return the group of NF4Tensors that each hold some rows: N x [rows/N, cols] -> [rows, cols].

    Codes, scalers and factors are 1-D and follow each other in row order. The mean and the table are
    global, so they must be equal on all ranks: they become replicas, which the run compares. A box that
    occurs twice (a replicated mesh dim) is a replica, too. Raises SourceError CKM115 where the boxes are
    not rows that tile the tensor, or the ranks' block sizes differ.
    """
    pieces = sorted(
        (_unpack(fqn, leaf, box, cut.info.dtype) for box, leaf in cut.pieces),
        key=lambda piece: piece.box.offsets,
    )
    _check_shapes(fqn, cut)
    distinct = [p for i, p in enumerate(pieces) if i == 0 or p.box != pieces[i - 1].box]
    repeated = [p for i, p in enumerate(pieces) if i > 0 and p.box == pieces[i - 1].box]
    _check_rows(fqn, cut.info, distinct)
    first = distinct[0]
    for piece in pieces:
        if piece.encoding != first.encoding or piece.info.dtype != first.info.dtype:
            raise malformed(
                fqn,
                f"its ranks were quantized differently, {first.encoding} {first.info.dtype} and "
                f"{piece.encoding} {piece.info.dtype}",
                "these ranks are not from one save",
            )
    info = TensorInfo(cut.info.shape, first.info.dtype)
    unit = first.encoding.block_size
    per_part = {DATA: 2, SCALERS: unit, FACTOR: unit * first.encoding.scaler_block_size}
    parts = {name: _joined(name, per, info, distinct, repeated) for name, per in per_part.items()}
    for name in (MEAN, TABLE):
        others = [c for p in pieces if p is not first for c in p.parts[name].chunks]
        parts[name] = StoredTensor(first.parts[name].info, first.parts[name].chunks, others)
    return Group(fqn, info, first.encoding, parts)


def _check_shapes(fqn: str, cut: Cut) -> None:
    for box, leaf in cut.pieces:
        if leaf.info is not None and leaf.info.shape != box.sizes:
            raise malformed(
                fqn,
                f"a rank's NF4Tensor, expected shape {list(box.sizes)}, "
                f"found {list(leaf.info.shape)}",
                "torchao shards rows wrongly where they do not divide by the world size",
            )


def _check_rows(fqn: str, info: TensorInfo, pieces: Sequence[_Pickled]) -> None:
    row = 0
    for piece in pieces:
        box = piece.box
        full = Box((row, *(0 for _ in info.shape[1:])), (box.sizes[0], *info.shape[1:]))
        if box != full:
            raise malformed(
                fqn,
                f"NF4 shards must be rows that follow each other, expected one at row {row}, "
                f"found offsets {list(box.offsets)} sizes {list(box.sizes)} of {list(info.shape)}",
                "check that every rank's file is there",
            )
        row += box.sizes[0]
    if row != info.shape[0]:
        raise malformed(
            fqn,
            f"NF4 shards, expected {info.shape[0]} rows, found {row}",
            "check that every rank's file is there",
        )


def _joined(
    name: str, per: int, info: TensorInfo, pieces: Sequence[_Pickled], repeated: Sequence[_Pickled]
) -> StoredTensor:
    """Return one 1-D part for all rows; it has one element per `per` logical elements."""
    dtype = pieces[0].parts[name].info.dtype
    row = info.numel // info.shape[0]

    def moved(some: Sequence[_Pickled]) -> list[Chunk]:
        return [
            Chunk(Box((c.box.offsets[0] + start,), c.box.sizes), c.region, c.crc32)
            for piece in some
            for start in [piece.box.offsets[0] * row // per]
            for c in piece.parts[name].chunks
        ]

    chunks: Callable[[], Sequence[Chunk]] = lambda: moved(pieces)  # noqa: E731
    return StoredTensor(TensorInfo((info.numel // per,), dtype), chunks, moved(repeated))
