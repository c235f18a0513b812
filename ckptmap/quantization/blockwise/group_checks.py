"""Check that the stored parts of a quantized tensor (codes, scales) exist and fit, else raise CKM115."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptmap.core.weight_columns import Groups
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.protocols.encodings import part_key
from ckptmap.tensors import Opaque, StoredTensor, TensorInfo

INCOMPLETE = "a quantized tensor needs its codes and all its scales in one checkpoint"
DAMAGED = "the checkpoint's metadata is damaged; convert again from its source"


NOT_FINITE = "it was quantized from values that were not finite, or it is damaged: copy it again"
CONTRADICTORY = (
    "one of the two is damaged or of another save: copy both again from where they were saved,"
    " or save the checkpoint again"
)


def file_of(stored: StoredTensor) -> str:
    """Return the path of the first file that holds the tensor, "" for a tensor without elements."""
    chunk = next(iter(stored.chunks), None)
    return "" if chunk is None else chunk.region.file


def contradiction(fqn: str, stated: str, shown: str, stored: StoredTensor) -> SourceError:
    """Return SourceError CKM115 for two statements about `fqn` that cannot both hold.

    `shown` is the one of `stored`, whose file the message names.
    """
    return malformed(fqn, f"{stated}, but {shown}: {file_of(stored)}", CONTRADICTORY)


def refuse_unstated(
    fqn: str, what: str, keys: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> None:
    """Raise SourceError CKM115 where a part is stored that the metadata of the tensor does not state.

    what   names the metadata
    keys   part -> its stored key, of the parts that are not stated
    """
    for part, key in keys.items():
        if key in stored:
            shown = f"{key} {stored[key].info} is stored"
            raise contradiction(fqn, f"{what} states no part {part!r}", shown, stored[key])


def refuse_kept_modules(
    groups: Groups,
    part: str,
    names: Sequence[str],
    config: Mapping[str, object],
    file: str = "config.json",
) -> None:
    """Raise SourceError CKM115 where a config names the module of a quantized weight as not quantized.

    part   the part of a group that holds its codes
    names  of the lists in the config; patterns and parents among their entries are not matched
    """
    lists = {name: config.get(name) for name in names}
    kept = {
        module: name
        for name, modules in lists.items()
        if isinstance(modules, list)
        for module in modules
        if isinstance(module, str)
    }
    weights = {weight for module in kept for weight in (module, f"{module}.weight")}
    found = weights.intersection(groups.fqns)
    for fqn in sorted(found, key=groups.fqns.index):
        module = fqn.removesuffix(".weight")
        if module in kept:  # unless the list names a weight
            codes = groups[groups.fqns.index(fqn)][0].parts[part]
            stated = f"{file} states {module!r} in {kept[module]}"
            shown = f"its weight is stored as codes, {codes.info}"
            raise contradiction(fqn, stated, shown, codes)


def malformed(fqn: str, message: str, hint: str = INCOMPLETE) -> SourceError:
    """Return SourceError CKM115 for the quantized tensor `fqn`."""
    return SourceError("CKM115", f"{fqn}: {message}", hint)


def check_parts(
    fqn: str, what: str, expected: Mapping[str, TensorInfo], stored: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Return the parts of `stored`, each a plain tensor of the expected shape and dtype.

    Raises SourceError CKM115 for the first that is missing or different; `what` names the format.
    """
    parts = {}
    for name, want in expected.items():
        part = stored.get(name)
        if part is None:
            raise malformed(fqn, f"{what} part {name!r} is missing, expected {want}")
        if not isinstance(part, StoredTensor):
            kind = part.class_name if isinstance(part, Opaque) else type(part).__name__
            raise malformed(
                fqn,
                f"{what} part {name!r}, expected {want}, found {kind}",
                "save it as a plain tensor",
            )
        if part.info != want:
            raise malformed(
                fqn,
                f"{what} part {name!r}, expected {want}, found {part.info} in {file_of(part)}",
                CONTRADICTORY,
            )
        parts[name] = part
    return parts


def expected_parts(fqn: str, encoding: Encoding, info: TensorInfo) -> Mapping[str, TensorInfo]:
    """Return the parts that a stored weight must have. Raises SourceError CKM115 where its encoding holds no such
    tensors."""
    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise malformed(fqn, f"{encoding.name}: {expected.reason}", DAMAGED)
    return expected


def group_by_names(
    fqn: str, info: TensorInfo, encoding: Encoding, stored: Mapping[str, StoredTensor]
) -> tuple[Group, tuple[str, ...]]:
    """Return the group of a weight whose parts are stored by the names that its encoding gives them, and
    their keys. Raises SourceError CKM115 where the encoding has no such tensors, or a part does not fit."""
    expected = expected_parts(fqn, encoding, info)
    keys = {part: part_key(encoding, fqn, part) for part in expected}
    tensors = {part: stored.get(key) for part, key in keys.items()}
    parts = check_parts(fqn, encoding.name, expected, tensors)
    return Group(fqn, info, encoding, parts), tuple(keys.values())


def read_sizes(fqn: str, value: object, what: str) -> tuple[int, ...]:
    """Return foreign data as a tuple of positive sizes. Raises SourceError CKM115 where it is not."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or not all(type(n) is int and n > 0 for n in value)
        or len(value) > 64
    ):
        raise malformed(fqn, f"{what}, expected positive sizes, found {str(value)[:80]}", DAMAGED)
    return tuple(value)
