"""Group stored tensors into weights: the codes and the scales of a quantized weight are one group.

fc.weight, fc.weight.absmax, fc.weight.quant_map  ->  fc.weight, a Group of encoding bnb-nf4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from ckptmap import registry
from ckptmap.checkpoint.logical_tensors import LogicalTensors, PlacedWeights
from ckptmap.core.columns import distinct, few, met
from ckptmap.core.encoding_records import EncodingRecords
from ckptmap.core.formatting import some
from ckptmap.core.quantized_codes import Repairs
from ckptmap.core.state_paths import described, join, opaques
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.core.weight_columns import Groups, LoneWeight, WeightForm
from ckptmap.errors import SourceError
from ckptmap.protocols import Group
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import Mounts, through
from ckptmap.protocols.offers import offers
from ckptmap.quantization.activation_statements import activation_notes
from ckptmap.quantization.stray_parts import REPAIR, stray_parts
from ckptmap.tensors import Cut, Leaf, Opaque, Path, StoredTensor, TensorInfo

VALUES = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})
"""A scheme is asked only where there is a record, or a tensor of another dtype: for codes."""


@dataclass(frozen=True)
class RefusedLeaf:
    """A leaf that cannot be converted: a plan lists it, and is refused unless `--drop` names its key.

    repair        the next step that mends the checkpoint, where there is one
    place         the path of an entry that is neither a weight nor optimizer state: an output without a place
                  for it leaves it out as any other such entry, unread; None: the output needs the leaf
    of_optimizer  whether it is a leaf of the optimizer's state
    """

    key: str
    reason: str
    droppable: bool
    repair: str = ""
    place: Path | None = None
    of_optimizer: bool = False


def group_parts(
    leaves: Mapping[Path, Leaf],
    records: Records,
    root: Path,
    where: str,
    refused: list[RefusedLeaf],
    said: Mapping[str, str],
    mounts: Mounts,
) -> LogicalTensors:
    """Return the logical tensors by stored key, in stored order; add what no scheme knows to `refused`.

    `records` are encoding records by FQN, the FQN counted from above `root`. `said` are strings
    that lie beside the tensors; each becomes a record `{"value": text}` under its key. Raises
    SourceError CKM114 for a key that occurs twice, and what a scheme raises for malformed parts.
    """
    columns = leaves if isinstance(leaves, PlainTensors) else None
    stored: Mapping[str, StoredTensor]
    if columns is not None:
        stored, infos, extents = columns.by_name, columns.infos, columns.known_extents
    else:
        stored = {join(path): t for path, t in leaves.items() if isinstance(t, StoredTensor)}
        infos, extents = [tensor.info for tensor in stored.values()], None
    if len(stored) == len(leaves) and not records and _is_plain(met(infos)):
        return LogicalTensors(stored if columns is None else columns)
    places: Sequence[int] = range(len(stored))
    placed = PlacedWeights[WeightForm | LoneWeight](len(leaves))
    if len(stored) < len(leaves):
        places = _among_leaves(leaves, where, refused, placed)
    mine = EncodingRecords(records_below(records, root))
    mine |= {key: {"value": text} for key, text in said.items() if key not in mine}
    left = StoredParts(stored, infos, extents)
    unread = "" if mine or _is_plain(met(infos)) else _unread(stored, mounts)
    for scheme in () if unread else registry.schemes_in(left.lasts, mine.by_scheme):
        groups = Groups.of(through(scheme, mounts).group(left, mine))
        modules = left.table.modules(groups.fqns)
        for form, at in groups.by_form():
            of_form = modules if len(at) == len(modules) else [modules[i] for i in at]
            parts = [*form.consumed_numbers(of_form, left.table)]
            for numbers in parts:
                left.take(numbers)
            fqns = groups.fqns if len(at) == len(modules) else [groups.fqns[i] for i in at]
            placed.add(map(places.__getitem__, parts[0]), fqns, repeat(form))
    numbers = left.left()
    keys = map(left.table.keys.__getitem__, numbers)
    dense = dict(zip(keys, map(left.table.tensors.__getitem__, numbers), strict=True))
    at_places = map(places.__getitem__, numbers)
    return LogicalTensors.in_order(placed, at_places, dense, shares=columns is None)


def _unread(stored: Mapping[str, StoredTensor], mounts: Mounts) -> str:
    """Return the name of the form of codes that config.json states, where nobody decodes it; "" elsewhere."""
    from ckptmap.quantization.unread_statements import unread_statement  # few have codes

    return unread_statement(stored, mounts)


def _unread_notes(groups: LogicalTensors, mounts: Mounts) -> list[str]:
    """Return a note on codes that config.json states to be of a form that nobody decodes."""
    plain = groups.forms() or _is_plain(few(groups.infos()))
    unread = "" if plain else _unread(groups.dense(), mounts)
    return (
        [f"config.json states codes that are {unread}: they move as bytes only"] if unread else []
    )


def _among_leaves(
    leaves: Mapping[Path, Leaf],
    where: str,
    refused: list[RefusedLeaf],
    placed: PlacedWeights[WeightForm | LoneWeight],
) -> list[int]:
    """Return the place of each stored tensor among the leaves; add the weights of others to `placed`.

    Add those that no scheme knows to `refused`. Raise SourceError CKM114 for a key that occurs twice.
    """
    places: list[int] = []
    keys = set[str]()
    for place, (path, leaf) in enumerate(leaves.items()):
        key = join(path)
        if key in keys:
            raise SourceError(
                "CKM114",
                f"{where}: key {key!r} occurs twice",
                "rename one of the two, and save it again",
            )
        if isinstance(leaf, StoredTensor):
            places.append(place)
        else:
            group = _adopted(key, leaf, refused)
            if group is None:
                continue
            placed.add([place], [group.fqn], [LoneWeight(group, ())])
        keys.add(key)
    return places


def records_below(records: Records, root: Path) -> dict[str, Mapping[str, object]]:
    """Return the records of the tensors below `root`, by FQN counted from there."""
    if not root:
        return dict(records)
    prefix = join(root) + "."
    return {k.removeprefix(prefix): r for k, r in records.items() if k.startswith(prefix)}


def without_stray_parts(
    groups: LogicalTensors,
    records: Records,
    refused: list[RefusedLeaf],
    mounts: Mounts,
) -> tuple[LogicalTensors, list[str]]:
    """Return the logical tensors without parts of quantized weights that are not whole, and notes.

    Those parts are added to `refused`: they are no weights. `records` are encoding records by FQN.
    """
    strays, notes = stray_parts(groups.dense(), groups.infos(), records, mounts)
    refused += [RefusedLeaf(key, why, droppable=True, repair=REPAIR) for key, why in strays]
    notes += [*activation_notes(groups.forms(), mounts), *_unread_notes(groups, mounts)]
    return (groups.without({key for key, _ in strays}) if strays else groups), notes


def string_records(rest: Mapping[Path, object], root: Path) -> dict[str, str]:
    """Return the strings in a model's dict by key.

    bitsandbytes 0.38 to 0.42 names the order of its int8 codes by such a string.
    """
    depth = len(root)
    return {
        join(path[depth:]): leaf
        for path, leaf in rest.items()
        if isinstance(leaf, str) and len(path) > depth and path[:depth] == root
    }


def _adopted(key: str, leaf: Leaf, refused: list[RefusedLeaf]) -> Group | None:
    """Return the group that a scheme makes of a pickled tensor subclass; None: it is refused."""
    if isinstance(leaf, Opaque | Cut):
        for scheme in registry.schemes():
            group = scheme.adopt(key, leaf)
            if group is not None:
                return group
    first = leaf.pieces[0][1] if isinstance(leaf, Cut) else next(opaques(leaf), None)
    name = type(leaf).__name__ if first is None else first.class_name
    # Its class may be known, and the form of its codes not: float8_e5m2, for one.
    reason = f"a tensor of unknown class or form, {name}"
    if first is not None and first.is_unresolved:
        reason = described(first)
    refused.append(RefusedLeaf(key, reason, droppable=False))
    return None


def _is_plain(infos: Iterable[TensorInfo]) -> bool:
    """Return whether all dtypes have 16 bits or more: no tensor can be codes of a quantized one."""
    return all(info.dtype in VALUES for info in infos)


def encoding_notes(forms: Mapping[str, WeightForm | LoneWeight]) -> list[str]:
    """Return what encodings say about tensors that they had to repair, one note for equal remarks."""
    kinds = distinct([form.encoding for form in few(forms)])
    remarks = {
        key: encoding.remark
        for key, encoding in kinds.items()
        if encoding.name != "dense" and offers(encoding, Repairs) and encoding.remark
    }
    by_remark: dict[str, list[str]] = {}
    for fqn, form in forms.items() if remarks else ():
        if id(form.encoding) in remarks:
            by_remark.setdefault(remarks[id(form.encoding)], []).append(fqn)
    return [f"{some(fqns, 1)}: {remark}" for remark, fqns in by_remark.items()]
