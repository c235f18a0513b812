"""Read bitsandbytes 4-bit tensors: the codes, their companions, and the JSON in one of them.

Only that JSON (`quant_state`) records the shape, so it is read when the checkpoint is opened: about 100
bytes a tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from ckptmap.core.columns import distinct_at
from ckptmap.core.json_text import parse_object
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Found, Groups
from ckptmap.protocols import Group, Refusal
from ckptmap.protocols.encodings import Records
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.fourbit import table_values
from ckptmap.quantization.blockwise.group_checks import (
    CONTRADICTORY,
    INCOMPLETE,
    NOT_FINITE,
    contradiction,
    file_of,
    malformed,
    refuse_kept_modules,
)
from ckptmap.quantization.blockwise.read_config import (
    model_type,
    quantization_config,
    read_each_small,
)
from ckptmap.quantization.bnb.config_agreement import kept_modules, require_kind
from ckptmap.quantization.bnb.fourbit import (
    ABSMAX,
    DTYPES,
    MAP,
    NESTED_ABSMAX,
    NESTED_MAP,
    STATE,
    FourBit,
    Nested,
)
from ckptmap.quantization.linear_weights import CONV1D, CONV1D_MODELS
from ckptmap.quantization.weight_forms import WeightForms
from ckptmap.storage.files import Files
from ckptmap.tensors import StoredTensor, TensorInfo

MAX_STATE_NBYTES = 1 << 16
TABLE = TensorInfo((16,), "float32")
"""The table that a `quant_map` is."""
TABLE_ERROR = 1e-6
"""How much a stored table may differ from the one that readers use: by rounding, not by a value."""


def find_fourbit(
    stored: Mapping[str, StoredTensor],
    records: Records,
    kind: str,
    nested: bool,
    mounts: Mounts,
) -> Groups:
    """Return the groups of one kind ("nf4" or "fp4"), double quantized (`nested`) or not.

    A record only says whether a tensor is transposed. Raises SourceError CKM115 where parts are missing or
    do not fit.
    """
    suffix, parts = f".{STATE}{kind}", StoredParts.of(stored)
    fqns, numbers = parts.before(suffix)
    doubles = parts.kinds(parts.table.beside(fqns, f".{NESTED_ABSMAX}"))
    mine = [(double is not None) == nested for double in doubles]
    if not all(mine):  # else the table has the modules of these weights
        fqns, numbers = list(compress(fqns, mine)), list(compress(numbers, mine))
    if not fqns:
        return Groups([], [])
    files, models = Files(mounts=mounts), Conv1DModels(mounts, records)
    try:
        blobs = _blobs(fqns, numbers, parts, files)
        tables = _tables(fqns, parts, files)
    finally:
        files.close()
    config = quantization_config(stored[fqns[0] + suffix], mounts)
    states = {id(blob): _state(fqns[at], blob) for at, blob in distinct_at(blobs)}
    alike = {blob: _alike(state) for blob, state in states.items()}
    across = models.are_conv1d(fqns, stored)
    at_of = dict(zip(fqns, range(len(fqns)), strict=True))

    def make(fqn: str, near: Mapping[str, StoredTensor]) -> Found:
        at = at_of[fqn]
        return _group(fqn, kind, states[id(blobs[at])], tables[at], across[at], config, near)

    facts = zip(map(alike.__getitem__, map(id, blobs)), tables, across, strict=True)
    groups = WeightForms(stored).groups(fqns, make, facts)
    refuse_kept_modules(groups, "", kept_modules(config), config)
    return groups


def _group(
    fqn: str,
    kind: str,
    state: Mapping[str, Any],
    table: bytes | None,
    across: bool,
    config: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
) -> Found:
    key = f"{fqn}.{STATE}{kind}"
    payload = stored.get(fqn)
    if payload is None:
        raise malformed(fqn, f"expected the payload of {key}, found none")
    shape = tuple(state["shape"])
    nested = _nested(fqn, state, f"{fqn}.{NESTED_ABSMAX}" in stored)
    absmax = stored.get(f"{fqn}.{ABSMAX}")
    encoding = FourBit(
        kind,
        state["blocksize"],
        nested,
        payload.info.dtype,
        stored[key].info.numel,
        across,
        absmax is not None and absmax.info.dtype == "bfloat16" and len(absmax.info.shape) == 2,
    )
    info = TensorInfo(shape[::-1] if encoding.transposed else shape, state["dtype"])
    if len(encoding.blob(info)) == encoding.written:
        encoding = replace(encoding, written=None)
    keys = {part: f"{fqn}.{part}" if part else fqn for part in _names(encoding)}
    parts = _parts(fqn, encoding, info, keys, stored)
    _require_agreement(fqn, encoding, state, parts, table)
    _require_bias_of(fqn, shape, parts[encoding.state], stored)
    require_kind(fqn, kind, config, payload)
    return Group(fqn, info, encoding, parts), tuple(keys.values())


def _require_agreement(
    fqn: str,
    encoding: FourBit,
    state: Mapping[str, object],
    parts: Mapping[str, StoredTensor],
    table: bytes | None,
) -> None:
    """Raise SourceError CKM115 where the key, the JSON and the table name different kinds of codes."""
    stated = f"the key {fqn}.{encoding.state} states {encoding.kind}"
    kind = state.get("quant_type", encoding.kind)
    if kind != encoding.kind:
        shown = f"its JSON has quant_type {str(kind)[:40]!r}"
        raise contradiction(fqn, stated, shown, parts[encoding.state])
    assert table is not None, "quant_map is float32 [16]: checked with the other parts"
    values = struct.unpack("<16f", table)
    for code, (want, have) in enumerate(zip(table_values(encoding.kind), values, strict=True)):
        if not math.isclose(want, have, abs_tol=TABLE_ERROR):
            stated = f"{encoding.kind} decodes code {code} to {want:.6g}"
            raise contradiction(fqn, stated, f"quant_map has {have:.6g} for it", parts[MAP])


def _require_bias_of(
    fqn: str, shape: tuple[int, ...], state: StoredTensor, stored: Mapping[str, StoredTensor]
) -> None:
    """Raise SourceError CKM115 where the layer's bias has another size than the JSON's shape has rows.

    The sizes of the codes follow from the number of elements alone: [64, 128] and [128, 64] are alike.
    """
    stem, dot, last = fqn.rpartition(".")
    bias = stored.get(f"{stem}{dot}bias")
    if last != "weight" or len(shape) != 2 or bias is None or len(bias.info.shape) != 1:
        return
    if bias.info.shape != shape[:1]:
        stated = f"its quant_state states shape {list(shape)}"
        raise contradiction(fqn, stated, f"the bias of the layer is {bias.info}", state)


def _names(encoding: FourBit) -> tuple[str, ...]:
    nested = (NESTED_ABSMAX, NESTED_MAP) if encoding.nested is not None else ()
    return ("", ABSMAX, MAP, *nested, encoding.state)


def _parts(
    fqn: str,
    encoding: FourBit,
    info: TensorInfo,
    keys: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> dict[str, StoredTensor]:
    expected = encoding.parts(info)
    if isinstance(expected, Refusal):
        raise malformed(fqn, expected.reason, "the file is damaged")
    parts = {}
    for part, want in expected.items():
        have = stored.get(keys[part])
        if have is None:
            raise malformed(fqn, f"{keys[part]} is missing, expected {want}")
        if have.info != want:
            raise malformed(
                fqn,
                f"{keys[part]}, expected {want}, found {have.info} in {file_of(have)}",
                CONTRADICTORY,
            )
        parts[part] = have
    return parts


def _tables(fqns: Sequence[str], parts: StoredParts, files: Files) -> Sequence[bytes | None]:
    """Return the values of the `quant_map` of each weight; None where that is no table."""
    numbers = parts.table.beside(fqns, f".{MAP}")
    fit = {kind for kind, info in enumerate(parts.of_kind) if info == TABLE}
    there = list(map(fit.__contains__, parts.kinds(numbers)))
    read = iter(read_each_small(parts, list(compress(numbers, there)), files))
    return list(read) if all(there) else [next(read) if table else None for table in there]


def _blobs(
    fqns: Sequence[str], numbers: Sequence[int], parts: StoredParts, files: Files
) -> list[bytes]:
    """Return the JSON part of each weight. Raise SourceError CKM115 where it cannot be one."""
    for at, kind in distinct_at(parts.kinds(numbers)):
        assert kind is not None, "they were found by these keys"
        info = parts.of_kind[kind]
        if info.dtype != "uint8" or not 0 < info.numel <= MAX_STATE_NBYTES:
            raise malformed(fqns[at], f"its quant_state, expected JSON in uint8, found {info}")
    return read_each_small(parts, numbers, files)


def _alike(state: Mapping[str, object]) -> str:
    """Return what weights of one form have in common: all but the offset, which is a value."""
    return repr({**state, "nested_offset": ""} if "nested_offset" in state else state)


def _state(fqn: str, data: bytes) -> dict[str, Any]:
    """Return the JSON part, checked."""
    try:
        state = parse_object(data, allow_nan=True)
        shape, block = state["shape"], state["blocksize"]
        good = isinstance(shape, list) and all(type(n) is int and n > 0 for n in (*shape, block))
        good = good and state["dtype"] in DTYPES
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise malformed(
            fqn,
            f"its quant_state, expected JSON with blocksize, dtype and shape, found {bytes(data[:80])!r}",
            "the file is damaged; save it again",
        )
    offset = state.get("nested_offset", 0)
    if not (isinstance(offset, int | float) and type(offset) is not bool and math.isfinite(offset)):
        block = state.get("nested_blocksize")
        hint = NOT_FINITE if isinstance(offset, float) else INCOMPLETE
        said = f"nested offset {offset!r} and blocksize {block!r}, expected numbers"
        raise malformed(fqn, said, hint)
    return dict(state)


def _nested(fqn: str, state: Mapping[str, object], has_parts: bool) -> Nested | None:
    says = "nested_offset" in state
    if says != has_parts:
        raise malformed(
            fqn,
            f"its quant_state says {'double' if says else 'single'} quantization, its companions"
            f" {'double' if has_parts else 'single'}",
        )
    if not has_parts:
        return None
    block, dtype = state.get("nested_blocksize"), state.get("nested_dtype")
    if type(block) is not int or block < 1:
        offset = state["nested_offset"]
        raise malformed(fqn, f"nested offset {offset!r} and blocksize {block!r}, expected numbers")
    if dtype not in DTYPES:
        raise malformed(fqn, f"nested dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    return Nested(block, dtype)


class Conv1DModels:
    """Says which weights are `Conv1D`, by our records or config.json, which is read once a directory."""

    def __init__(self, mounts: Mounts, records: Records | None = None) -> None:
        self._mounts = mounts
        self._records = records or {}
        self._known: dict[Path, bool] = {}

    def are_conv1d(self, fqns: Sequence[str], stored: Mapping[str, StoredTensor]) -> Sequence[bool]:
        """Return `is_conv1d` of each weight."""
        names = "\n".join(fqns)
        if not self._records and not any(f"{module}." in names for module in CONV1D):
            return [False] * len(fqns)
        return [self.is_conv1d(fqn, stored) for fqn in fqns]

    def is_conv1d(self, fqn: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether the stored codes, if there are any, are those of the transpose of the weight."""
        if self._records and self._records.get(fqn, {}).get("transposed") is True:
            return fqn in stored
        if not CONV1D.intersection(fqn.split(".")[-2:-1]):
            return False
        payload = stored.get(fqn)
        if payload is None or not payload.chunks:
            return False
        directory = Path(payload.chunks[0].region.file).parent
        if directory not in self._known:
            self._known[directory] = model_type(payload, self._mounts) in CONV1D_MODELS
        return self._known[directory]
