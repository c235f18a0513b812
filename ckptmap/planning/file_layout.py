"""The files of the output: every chunk in its slot, and for each slot where its bytes come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from operator import add, le

from ckptmap import registry
from ckptmap.checkpoint.split_roles import EXTRA_KEY
from ckptmap.core.slot_columns import OutTensors, Slots
from ckptmap.core.state_paths import counts, nest
from ckptmap.core.tensor_columns import nbytes_of
from ckptmap.core.tiling import prove_tiling
from ckptmap.planning.file_plan import Encodes, FilePlan, SlotNumbers, Sources
from ckptmap.planning.layout_builder import TensorLayout
from ckptmap.planning.request import Request
from ckptmap.protocols import CarriedFile, OutState, OutTensor
from ckptmap.tensors import Box, Path, PlainValue


def file_layout(
    request: Request,
    layout: TensorLayout,
    values: Mapping[Path, PlainValue],
    records: Mapping[str, Mapping[str, object]],
    world_size: int,
    stem: str | None,
    inner: Mapping[str, CarriedFile],
) -> tuple[list[FilePlan], Encodes]:
    """Return every file with the source of each slot, and what is encoded into which slots.

    `values` are plain values by path in the output, `records` the metadata of quantized tensors;
    `stem` begins the names of weight files, None: as the writer has them; `inner` is what the writer
    puts into its file besides tensors.
    """
    state = OutState(
        layout.tensors, _whole_dicts(values, layout.tensors), records, world_size,
        request.options.max_shard_nbytes, stem,
        {} if request.reference is None else request.reference.places(), inner,
    )  # fmt: skip
    writer = registry.writer(request.setup.writer)
    files: list[FilePlan] = []
    numbers: list[Sequence[int]] = []
    for out in writer.files(state, "archive"):
        slots = Slots.of(out.slots)
        numbers.append(
            _numbers(layout, slots, numbers[-1][-1] + 1 if numbers and numbers[-1] else 0)
        )
        files.append(FilePlan(out, _sources(layout, slots, numbers[-1])))
    prove_output(layout.tensors, files, numbers)
    encoded = layout.encoded
    slot_numbers = SlotNumbers.of(len(layout.tensors), numbers if encoded else ())
    return files, Encodes(encoded, slot_numbers, files)


def _numbers(layout: TensorLayout, slots: Slots, following: int) -> Sequence[int]:
    """Return the numbers of the tensors in these slots. Mostly they follow each other from `following` on, the number
    after that of the last slot of the file before."""
    numbers = range(following, following + len(slots))
    if list(slots.paths) == layout.tensors.paths[numbers.start : numbers.stop]:
        return numbers
    return list(map(layout.keys.numbers.__getitem__, slots.paths))


def _sources(layout: TensorLayout, slots: Slots, numbers: Sequence[int]) -> Sources:
    """Return where the bytes of each slot come from; `numbers` are those of the tensors in the slots."""
    sources = layout.sources.take(numbers)
    infos = layout.tensors.take(numbers).infos()
    if nbytes_of(infos) == list(slots.sizes):
        return sources
    # A slot that is a part of its tensor is no extent: its box is taken from the whole tensor.
    others, files = list(sources.others), list(sources.files)
    for index, (info, nbytes) in enumerate(zip(infos, slots.sizes, strict=True)):
        if nbytes != info.nbytes and files[index]:
            others[index], files[index] = sources[index], ""
    return replace(sources, others=others, files=files)


def _whole_dicts(
    values: Mapping[Path, PlainValue], tensors: Iterable[OutTensor]
) -> dict[Path, PlainValue]:
    """Return the values, a dict with integer keys as one value: a DCP path cannot say that a key is
    an integer.

    A dict that holds tensors as well stays taken apart, and so does what is in `extra` itself: there
    a DCP directory knows the integer by its text.
    """
    roots = set[Path]()
    for path in values:
        counting = (at for at, s in enumerate(path) if counts(s) and path[:at] != (EXTRA_KEY,))
        roots.update(path[:at] for at in islice(counting, 1))
    if not roots:
        return dict(values)
    for tensor in tensors:
        roots -= {tensor.path[:depth] for depth in range(len(tensor.path))}
    whole: dict[Path, PlainValue] = {}
    dicts: dict[Path, dict[Path, PlainValue]] = {}
    for path, value in values.items():
        at = next((path[:depth] for depth in range(len(path)) if path[:depth] in roots), None)
        if at is None:
            whole[path] = value
        else:
            whole.setdefault(at)
            dicts.setdefault(at, {})[("dict", *path[len(at) :])] = value
    return whole | {path: nest(leaves)["dict"] for path, leaves in dicts.items()}


def prove_output(
    tensors: OutTensors, files: Sequence[FilePlan], numbers: Sequence[Sequence[int]]
) -> None:
    """Assert that no two slots share a byte, and that the slots of each tensor tile it.

    `numbers` are those of the tensors in the slots of each file. Ranks of a mesh may hold the same box, each in its
    own file.
    """
    for file in files:
        _assert_disjoint(file.out.name, file.slots, file.out.nbytes)
    boxes: list[Box | None] = [None] * len(tensors)
    for file, of_file in zip(files, numbers, strict=True):
        for number, held in zip(of_file, file.slots.boxes, strict=True):
            boxes[number] = held
    boxes_of: dict[int, dict[Box, set[int]]] = {}
    if len(boxes) - boxes.count(None) < sum(map(len, numbers)):
        boxes_of = _boxes_of_several(tensors, files, numbers)
    # There are 100,000 tensors of one slot, but few pairs of form and box: each pair is proven once.
    several = map(boxes_of.get, range(len(tensors))) if boxes_of else repeat(None)
    pairs = zip(map(id, tensors.forms), map(id, boxes), map(id, several), strict=False)
    for number in dict(zip(pairs, range(len(tensors)), strict=True)).values():
        form, box = tensors.forms[number], boxes[number]
        tiles = list(boxes_of.get(number, ()))
        if not tiles and box is not None:
            tiles = [box]
        if tiles or (form.alias_of is None and form.info.numel):
            wrong = prove_tiling(form.info.shape, tiles)
            assert wrong is None, f"{tensors.paths[number]}: {wrong}"


def _assert_disjoint(name: str, slots: Slots, nbytes: int) -> None:
    """Assert that the slots of a file do not overlap and lie inside it."""
    offsets, sizes = slots.offsets, slots.sizes
    ends = list(map(add, offsets, sizes))
    if all(map(le, [0, *ends], [*offsets, nbytes])):  # they are in the order of the file, mostly
        return
    end = 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        assert offset >= end, f"{name}: slots overlap at {offset}"
        end = offset + size
    assert end <= nbytes, f"{name}: a slot leaves the file"


def _boxes_of_several(
    tensors: OutTensors, files: Sequence[FilePlan], numbers: Sequence[Sequence[int]]
) -> dict[int, dict[Box, set[int]]]:
    """Return the boxes of each tensor of more than one slot, with the numbers of their files."""
    count = Counter(chain.from_iterable(numbers))
    boxes_of: dict[int, dict[Box, set[int]]] = {at: {} for at, n in count.items() if n > 1}
    for at, (file, of_file) in enumerate(zip(files, numbers, strict=True)):
        for number, box in zip(of_file, file.slots.boxes, strict=True):
            if number not in boxes_of:
                continue
            holders = boxes_of[number].setdefault(box, set())
            again = at in holders or (holders and tensors.forms[number].placement is None)
            assert not again, f"{tensors.paths[number]}: {box} is written twice"
            holders.add(at)
    return boxes_of
