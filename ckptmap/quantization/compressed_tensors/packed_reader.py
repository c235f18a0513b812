"""Read compressed-tensors' packed integers: codes, scales, and the shape, which is a part of its own.

The bits per code, and whether a code may span two words, follow from the number of words in a row and the
config.json beside the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from ckptmap.core.columns import distinct_at, each
from ckptmap.core.encoding_records import records_of
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Group
from ckptmap.protocols.encodings import Record, Records
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise import block_geometry
from ckptmap.quantization.blockwise.group_checks import (
    CONTRADICTORY,
    DAMAGED,
    check_parts,
    contradiction,
    expected_parts,
    file_of,
    malformed,
    refuse_kept_modules,
    refuse_unstated,
)
from ckptmap.quantization.blockwise.read_config import quantization_config, read_each_small
from ckptmap.quantization.blockwise.scaled_encoding import DTYPES
from ckptmap.quantization.blockwise.scaled_record import read_record
from ckptmap.quantization.blockwise.word_packing import WORD, Packing
from ckptmap.quantization.compressed_tensors.config_agreement import (
    Stored,
    kept_modules,
    require_agreement,
)
from ckptmap.quantization.compressed_tensors.config_json import (
    ConfigGroups,
    block_found,
    version_said,
    weights_said,
)
from ckptmap.quantization.compressed_tensors.packed import Packed
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.storage.files import Files
from ckptmap.tensors import StoredTensor, TensorInfo

_OPTIONAL = ("zero_point", "g_idx")
SPILLS_SINCE = (0, 18)
"""The first release of compressed-tensors whose codes may span two words."""


def find_packed(
    stored: Mapping[str, StoredTensor],
    records: Records,
    mounts: Mounts,
) -> Groups:
    """Return the groups of records, then those of other writers. Raises SourceError CKM115."""
    mine = records_of(records, (Packed.scheme,))
    parts = StoredParts.of(stored)
    found = parts.pairs("_packed", "", "_scale", dtypes=("int32",))
    others = [fqn for fqn in found.fqns if fqn not in mine] if mine else found.fqns
    fqns = [*mine, *others] if mine else others
    if not fqns:
        return Groups([], [])
    files = Files(mounts=mounts)
    try:
        shapes = _shapes(fqns, parts, files)
    finally:
        files.close()
    config = quantization_config(stored[f"{fqns[0]}_shape"], mounts)
    said = ConfigGroups(config)
    records_said = [*each(mine.values(), repr), *("" for _ in others)]
    groups = WeightForms(parts).groups(
        fqns,
        lambda fqn, near: _group_of(fqn, mine.get(fqn), shapes[fqn], config, near),
        zip(records_said, map(shapes.__getitem__, fqns), said.kinds(fqns), strict=True),
    )
    refuse_kept_modules(groups, "packed", kept_modules(config), config)
    return groups


def _group_of(
    fqn: str,
    record: Record | None,
    shape: tuple[int, int],
    config: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
) -> Found:
    if record is None:
        group, keys = _found(fqn, shape, stored, config)
    else:
        group, keys = _recorded(fqn, record, shape, stored)
    parts, encoding = group.parts, group.encoding
    assert isinstance(encoding, Packed), "made above"
    shown = Stored(
        group.info, "int", encoding.bits, True, parts["packed"], parts["scale"],
        parts.get("zero_point"), parts.get("g_idx"),
    )  # fmt: skip
    require_agreement(fqn, shown, config)
    return group, keys


def _recorded(
    fqn: str,
    record: Record,
    shape: tuple[int, int],
    stored: Mapping[str, StoredTensor],
) -> Found:
    read = read_record(fqn, record, "ct-packed")
    encoding = Packed(
        read.block, read.scale_dtype, read.dtype("zero_dtype"), bits=read.count("bits", 8),
        ordered=bool(record.get("ordered")), aligned=bool(record.get("aligned")),
    )  # fmt: skip
    group, keys = _group(fqn, read.info, encoding, stored)
    if shape != read.info.shape:
        raise contradiction(
            fqn, f"its encoding record states shape {list(read.info.shape)}",
            f"weight_shape is {list(shape)}", group.parts["shape"],
        )  # fmt: skip
    unstated = {part: f"{fqn}_{part}" for part in _OPTIONAL if part not in group.parts}
    refuse_unstated(fqn, "its encoding record", unstated, stored)
    return group, keys


def _found(
    fqn: str,
    shape: tuple[int, int],
    stored: Mapping[str, StoredTensor],
    config: Mapping[str, object],
) -> Found:
    packed, scale = stored[f"{fqn}_packed"].info, stored[f"{fqn}_scale"].info
    packing = _packing(fqn, shape[1], packed.shape[-1] if packed.shape else 0, config)
    if len(packed.shape) != 2 or packed.shape[0] != shape[0] or packing is None:
        said = f"weight_packed {packed}, expected rows of {list(shape)} in words, as weight_shape"
        file = file_of(stored[f"{fqn}_packed"])
        raise malformed(fqn, f"{said} states: {file}", CONTRADICTORY)
    if scale.dtype not in DTYPES:
        raise malformed(fqn, f"weight_scale {scale}, expected one of {', '.join(DTYPES)}")
    info = TensorInfo(shape, scale.dtype)
    zero = stored.get(f"{fqn}_zero_point")
    encoding = Packed(
        block_found(fqn, info, scale, config), scale.dtype, zero.info.dtype if zero else "",
        bits=packing.bits, ordered=f"{fqn}_g_idx" in stored, aligned=packing.aligned,
    )  # fmt: skip
    return _group(fqn, info, encoding, stored)


def _packing(fqn: str, width: int, words: int, config: Mapping[str, object]) -> Packing | None:
    """Return the packing that gives this many words a row, None where none does.

    Among several, the bits that config.json names win, then 8 bits, then 4.
    """
    fitting = [
        packing
        for bits in range(1, 9)
        for packing in (Packing(bits), Packing(bits, True))
        if packing.words(width) == words and not (packing.aligned and WORD % bits == 0)
    ]
    if len({packing.bits for packing in fitting}) > 1:
        said = [weights.get("num_bits") for weights in weights_said(config, fqn.rpartition(".")[0])]
        for bits in (*said, 8, 4):
            named = [packing for packing in fitting if packing.bits == bits]
            fitting = named or fitting
            if named:
                break
    # A row of few codes may fill the same number of words either way.
    before = version_said(config) < SPILLS_SINCE
    aligned = [packing for packing in fitting if packing.aligned == before]
    return next(iter(aligned or fitting), None)


def _shapes(fqns: Sequence[str], parts: StoredParts, files: Files) -> dict[str, tuple[int, int]]:
    """Return the `weight_shape` of each weight. Raise SourceError CKM115 where it is none."""
    numbers = parts.table.beside(fqns, "_shape")
    for number, kind in distinct_at(parts.kinds(numbers)):
        info = None if kind is None else parts.of_kind[kind]
        if info is None or info.numel != 2 or info.dtype not in ("int64", "int32"):
            raise malformed(
                fqns[number], f"weight_shape, expected two integers, found {info or 'none'}"
            )
    values = read_each_small(parts, numbers, files)
    shapes: dict[int, tuple[int, int]] = {}
    for number, data in distinct_at(values):
        rows, columns = struct.unpack("<2q" if len(data) == 16 else "<2i", data)
        if min(rows, columns) < 1:
            shown = f"weight_shape {[rows, columns]}, expected positive sizes"
            raise malformed(fqns[number], shown, DAMAGED)
        shapes[id(data)] = rows, columns
    return dict(zip(fqns, map(shapes.__getitem__, map(id, values)), strict=True))


def _group(
    fqn: str, info: TensorInfo, encoding: Packed, stored: Mapping[str, StoredTensor]
) -> Found:
    expected = expected_parts(fqn, encoding, info)
    shape = encoding.scale_shape(info)
    tensors = {part: stored.get(encoding.part_key(fqn, part)) for part in expected}
    for part in ("scale", "zero_point") if shape == (1,) else ():
        single = tensors.get(part)
        if single is not None and single.info.numel == 1:
            tensors[part] = block_geometry.reshaped(single, shape)
    stated = tensors["shape"]
    if stated is not None and stated.info == TensorInfo((2,), "int32"):
        raise malformed(fqn, "weight_shape is int32, expected int64", DAMAGED)
    parts = check_parts(fqn, encoding.name, expected, tensors)
    return Group(fqn, info, encoding, parts), tuple(encoding.part_key(fqn, p) for p in parts)
