"""Find where each parameter lies in the vectors of the ranks, and prove that they tile it.

    stages 1, 2   group: p0 | p1 | gap | p2 | end, cut into N equal parts; the padding at the end may be
                  left out of the files
    stage 3       rank r: share r of p0 | share r of p1 | ..., each ceil(numel / N) elements

Under stages 1 and 2 each rank's file also says which elements of its vectors belong to which parameter
(`param_slice_mappings`): these must be the computed ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from ckptmap.core.formatting import counted
from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.flat_vectors import FlatParameter, along_ranks, over_ranks
from ckptmap.formats.deepspeed.model_states import ModelStates, Shapes
from ckptmap.formats.deepspeed.optimizer_states import VECTORS_3, RankPartition
from ckptmap.formats.deepspeed.step_files import ONE_SAVE, StepFiles, missing_rank

MAPPINGS, GAPS = "param_slice_mappings", "param_alignment_paddings"
ALIGNMENT = 2
"""Each rank's part of a vector is a multiple of so many elements."""


def members_of(
    model: ModelStates, ranks: Sequence[RankPartition], files: StepFiles
) -> list[FlatParameter]:
    """Return every parameter that the optimizer trains.

    Raise SourceError CKM110 if the files are not those of all ranks of one save.
    """
    _check_worlds(model, ranks, files)
    stage = ranks[0].stage
    if stage == 3:
        return list(_of_stage_3(model.trained, ranks))
    if len(model.trained) != len(ranks[0].vectors):
        raise _unlike(
            ranks[0],
            f"holds {counted(len(ranks[0].vectors), 'flat group')}, but param_shapes has"
            f" {len(model.trained)}",
        )
    members = list(
        chain.from_iterable(_of_group(g, model, ranks) for g in range(len(model.trained)))
    )
    _check_mappings(members, ranks)
    return members


def _check_worlds(model: ModelStates, ranks: Sequence[RankPartition], files: StepFiles) -> None:
    """Raise SourceError CKM110 unless there are as many files as ranks, all of one form."""
    first = ranks[0]
    world = max(first.counts, default=model.world) or len(ranks)
    if world > len(ranks):
        name = first.pickled.name.replace("rank_0_mp", "rank_{}_mp", 1)
        raise missing_rank(files.root, len(ranks), world, name)
    for partition in ranks:
        number = max(partition.counts, default=world)
        if number != len(ranks):
            raise _unlike(
                partition,
                f"is of {counted(number, 'rank')}, expected {len(ranks)} as there are files",
            )
        if partition.stage != first.stage or len(partition.vectors) != len(first.vectors):
            raise _unlike(partition, f"holds other vectors than {first.pickled.name}")
    if model.world not in (0, len(ranks)):
        raise SourceError(
            "CKM110",
            f"{model.ranks[0].file}: is of {counted(model.world, 'rank')}, found {len(ranks)} partitions",
            ONE_SAVE,
        )
    if model.of_ranks and len(model.ranks) != len(ranks):
        raise missing_rank(
            files.root, len(model.ranks), len(ranks), "zero_pp_rank_{}_mp_rank_00_model_states.pt"
        )


# ------------------------------------------------------------------ stages 1 and 2


def _of_group(
    number: int, model: ModelStates, ranks: Sequence[RankPartition]
) -> Iterator[FlatParameter]:
    shapes = model.trained[number]
    counts = [rank.vectors[number].info.numel for rank in ranks]
    gaps = _gaps(number, shapes, ranks[0])
    at = 0
    for (fqn, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = math.prod(shape)
        yield FlatParameter(fqn, shape, number, tuple(along_ranks(at, numel, counts)))
        at += numel + gap
    rest = sum(counts) - at
    if not 0 <= rest < ALIGNMENT * len(ranks):
        raise _unlike(
            ranks[0],
            f"group {number} has {sum(counts)} elements on {counted(len(ranks), 'rank')}, expected"
            f" {at} of the parameters in it",
        )


def _gaps(number: int, shapes: Shapes, first: RankPartition) -> Sequence[int]:
    """Return the elements after each parameter that belong to none."""
    inner = first.inner
    listed = inner.sequence(GAPS)
    if not listed:
        return [0] * len(shapes)
    gaps = listed[number] if number < len(listed) else None
    if not isinstance(gaps, list | tuple) or len(gaps) != len(shapes):
        inner.malformed(GAPS, f"{len(shapes)} gaps in group {number}")
    return [inner.count(gap, GAPS) for gap in gaps]


def _check_mappings(members: Sequence[FlatParameter], ranks: Sequence[RankPartition]) -> None:
    """Raise SourceError CKM110 if a rank says that its vectors hold other elements.

    With `round_robin_gradients` DeepSpeed states the order before it was changed."""
    if _is_reordered(ranks[0]):
        return
    expected: list[dict[tuple[int, str], tuple[int, int]]] = [{} for _ in ranks]
    for member in members:
        for piece in member.pieces:
            expected[piece.rank][member.vector, member.fqn] = (piece.at, piece.numel)
    for partition, pieces in zip(ranks, expected, strict=True):
        inner = partition.inner
        stated = {
            (number, str(fqn)): inner.fragment(value, MAPPINGS)
            for number, group in enumerate(inner.mappings(MAPPINGS))
            for fqn, value in group.items()
        }
        if stated and stated != pieces:
            key = next(k for k in (*stated, *pieces) if stated.get(k) != pieces.get(k))
            raise _unlike(
                partition,
                f"{MAPPINGS} has {_shown(stated.get(key))} of {key[1]}, expected"
                f" {_shown(pieces.get(key))} by the files of the other ranks",
            )


def _is_reordered(first: RankPartition) -> bool:
    zero = first.pickled.inside("ds_config").mapping("zero_optimization")
    return bool(zero.get("round_robin_gradients"))


def _shown(fragment: tuple[int, int] | None) -> str:
    return "nothing" if fragment is None else f"{fragment[1]} elements from {fragment[0]}"


# ------------------------------------------------------------------ stage 3


def _of_stage_3(
    trained: Sequence[Shapes], ranks: Sequence[RankPartition]
) -> Iterator[FlatParameter]:
    world = len(ranks)
    sizes = [sum(-(-math.prod(shape) // world) for shape in shapes.values()) for shapes in trained]
    for partition in ranks:
        held = [vector.info.numel for vector in partition.vectors]
        if held != sizes:
            offloaded = sum(held) < sum(sizes) and 0 in held
            raise _unlike(
                partition,
                f"{VECTORS_3} holds {held} elements, expected {sizes} by param_shapes",
                "its optimizer was offloaded to NVMe: save with offload_optimizer on the CPU"
                if offloaded
                else ONE_SAVE,
            )
    for number, shapes in enumerate(trained):
        at = 0
        for fqn, shape in shapes.items():
            numel = math.prod(shape)
            yield FlatParameter(fqn, shape, number, tuple(over_ranks(at, numel, world)))
            at += -(-numel // world)


def _unlike(partition: RankPartition, problem: str, hint: str = ONE_SAVE) -> SourceError:
    return SourceError("CKM110", f"{partition.pickled.file}: {problem}", hint)
