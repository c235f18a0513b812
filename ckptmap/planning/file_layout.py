"""The files of the output: every chunk in its slot, and for each slot where its bytes come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat
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
    files, numbers = [], []
    for out in writer.files(state, "archive"):
        slots = Slots.of(out.slots)
        numbers.append(list(map(layout.numbers.__getitem__, slots.paths)))
        files.append(FilePlan(out, _sources(layout, slots, numbers[-1])))
    prove_output(layout.tensors, files)
    encoded = layout.encoded
    slot_numbers = SlotNumbers.of(len(layout.tensors), numbers if encoded else ())
    return files, Encodes(encoded, slot_numbers, files)


def _sources(layout: TensorLayout, slots: Slots, numbers: Sequence[int]) -> Sources:
    """Return where the bytes of each slot come from; `numbers` are those of the tensors in the slots."""
    sources = layout.sources.take(numbers)
    infos = [layout.tensors.forms[number].info for number in numbers]
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


def prove_output(tensors: OutTensors, files: Sequence[FilePlan]) -> None:
    """Assert that no two slots share a byte, and that the slots of each tensor tile it.

    Ranks of a mesh may hold the same box, each in its own file.
    """
    for file in files:
        _assert_disjoint(file.out.name, file.slots, file.out.nbytes)
    box_of: dict[Path, Box] = {}
    for file in files:
        box_of.update(zip(file.slots.paths, file.slots.boxes, strict=True))
    boxes_of: dict[Path, dict[Box, set[int]]] = {}
    if len(box_of) < sum(len(file.slots) for file in files):
        boxes_of = _boxes_of_several(tensors, files)
    # There are 100,000 tensors of one slot, but few pairs of form and box: each pair is proven once.
    paths, forms, boxes = tensors.paths, tensors.forms, list(map(box_of.get, tensors.paths))
    several = map(boxes_of.get, paths) if boxes_of else repeat(None)
    pairs = zip(map(id, forms), map(id, boxes), map(id, several), strict=False)
    rows = zip(paths, forms, boxes, strict=True)
    for path, form, box in dict(zip(pairs, rows, strict=True)).values():
        tiles = list(boxes_of.get(path, ()))
        if not tiles and box is not None:
            tiles = [box]
        if tiles or (form.alias_of is None and form.info.numel):
            wrong = prove_tiling(form.info.shape, tiles)
            assert wrong is None, f"{path}: {wrong}"


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
    tensors: OutTensors, files: Sequence[FilePlan]
) -> dict[Path, dict[Box, set[int]]]:
    """Return the boxes of each tensor of more than one slot, with the numbers of their files."""
    count = Counter(path for file in files for path in file.slots.paths)
    on_mesh = {tensor.path for tensor in tensors if tensor.placement is not None}
    boxes_of: dict[Path, dict[Box, set[int]]] = {path: {} for path, n in count.items() if n > 1}
    for number, file in enumerate(files):
        for path, box in zip(file.slots.paths, file.slots.boxes, strict=True):
            if path not in boxes_of:
                continue
            holders = boxes_of[path].setdefault(box, set())
            again = number in holders or (holders and path not in on_mesh)
            assert not again, f"{path}: {box} is written twice"
            holders.add(number)
    return boxes_of
