"""Parse the safetensors header with every check; `header_writer` writes it.

Layout (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
a JSON object `{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}` that
starts with `{` and may be padded with spaces, then the data. Offsets are relative to the data; the
ranges tile it without hole or overlap. Stricter here than in safetensors 0.8: duplicate names,
extra fields and unprintable names are refused, where that library takes the last or ignores them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ckptmap.core.json_text import JsonError, parse_json, parse_pairs, parse_strings
from ckptmap.errors import SourceError
from ckptmap.storage.files import Files
from ckptmap.tensors import ITEMSIZE, TensorInfo

MAX_HEADER_NBYTES = 100_000_000
"""safetensors' own cap on the header."""
MAX_TENSORS = 1_000_000
MAX_NAME_NCHARS = 4096
MAX_NUMEL = 2**63 - 1
METADATA = "__metadata__"

TORCH_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
NOT_OF_TORCH = ("F6_E2M3", "F6_E3M2")
"""Dtypes of safetensors 0.6 and newer, of 6 bits an element, for which torch has none."""
NAMES: Mapping[str, str] = {torch: name for name, torch in TORCH_DTYPES.items()}

HINT = "download or save the file again; nothing is read from a damaged one"


@dataclass(frozen=True)
class Header:
    """Columns in the order of the header: key, info and file offset of the bytes of tensor i.

    nbytes  of all tensors
    """

    keys: Sequence[str]
    infos: Sequence[TensorInfo]
    begins: Sequence[int]
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, tuple[TensorInfo, int, int]]:
        """Return name -> (info, begin, end), the file offsets of the bytes."""
        columns = zip(self.keys, self.infos, self.begins, strict=True)
        return {key: (info, begin, begin + info.nbytes) for key, info, begin in columns}


def parse(files: Files, file: str) -> Header:
    """Return the checked header of a file. Raise SourceError CKM101, CKM104 or CKM107."""
    try:
        file_nbytes = os.stat(file).st_size
    except OSError as error:
        raise SourceError(
            "CKM101", f"{file}: cannot be read: {error.strerror}", "check the path"
        ) from error
    if file_nbytes < 8:
        raise SourceError(
            "CKM104", f"{file}: truncated, expected at least 8 bytes, found {file_nbytes}", HINT
        )
    nbytes = int.from_bytes(files.read(file, 0, 8), "little")
    if not 2 <= nbytes <= MAX_HEADER_NBYTES:
        raise _bad(file, f"header length, expected 2 to {MAX_HEADER_NBYTES}, found {nbytes}")
    if 8 + nbytes > file_nbytes:
        raise SourceError(
            "CKM104",
            f"{file}: truncated in its header, expected {8 + nbytes} bytes or more, "
            f"found {file_nbytes}",
            HINT,
        )
    return parse_header(files.read(file, 8, nbytes), file_nbytes, file)


def parse_header(raw: bytes, file_nbytes: int, where: str) -> Header:
    """Return the header from its JSON bytes; `where` names the file in errors."""
    header = _parse_regular(raw, file_nbytes, where)
    return _parse_general(raw, file_nbytes, where) if header is None else header


def _parse_general(raw: bytes, file_nbytes: int, where: str) -> Header:
    """Parse any JSON header, entry by entry; raise an error that names the bad entry."""
    pairs = _load(raw, where)
    data_start = 8 + len(raw)
    metadata: Mapping[str, str] = {}
    tensors: dict[str, tuple[TensorInfo, int, int]] = {}
    infos: dict[tuple[object, ...], tuple[TensorInfo, int]] = {}
    for name, entry in pairs:
        if name == METADATA:
            metadata = _metadata(entry, where)
            continue
        if not name.isprintable() or not name or len(name) > MAX_NAME_NCHARS:
            check_name(name, where)
        dtype, shape, begin, end = _fields(name, entry, where)
        try:
            info, nbytes = infos[(dtype, *shape)]
        except (KeyError, TypeError):
            info = _info(name, dtype, shape, where)
            nbytes = info.nbytes
            infos[(dtype, *shape)] = info, nbytes
        if end - begin != nbytes:
            raise _bad(where, f"tensor {name!r}: {info} takes {nbytes} bytes, found {end - begin}")
        tensors[name] = (info, data_start + begin, data_start + end)
    if len(tensors) + any(name == METADATA for name, _ in pairs) != len(pairs):
        raise _bad(where, f"the name {_first_duplicate(pairs)!r} is there twice, expected once")
    _check_tiling(tensors, data_start, file_nbytes, where)
    columns = [info for info, _, _ in tensors.values()], [begin for _, begin, _ in tensors.values()]
    nbytes = file_nbytes - data_start  # they tile it
    return Header(list(tensors), *columns, nbytes, metadata)


_HEAD = '{"' + METADATA + '":'
_ENTRY = re.compile(r'"([^"]+)":\{([^\]]{1,120}+\][^\[]{1,20}+)\[([^\]]{1,50}+)\]\}(?:,|\Z)')
"""Matches an entry: its name, form and place, which are looked at afterwards."""
_GROUPS = 4
"""Strings into which an entry is split: the three groups, and what stands before it."""
_FORM = re.compile(r'"dtype":"([A-Z0-9_]+)","shape":\[([0-9,]*)\],"data_offsets":')
_IN_NAMES = bytes(byte for byte in range(32, 127) if chr(byte) not in '"\\')
"""Characters that stand in a JSON string as they are, and are printed so."""


def _parse_regular(raw: bytes, file_nbytes: int, where: str) -> Header | None:
    """Return a header as safetensors itself writes it, without spaces, fields and data in order, and names that
    need no escapes; None for any other, which `_parse_general` parses or refuses.

    An entry is a name, a form such as `"dtype":"F32","shape":[2],"data_offsets":`, of which there are few, and a
    place: `0,8`.
    """
    try:
        text = raw.decode("utf-8").rstrip(" ")
        metadata, at = parse_strings(text, len(_HEAD)) if text.startswith(_HEAD) else ((), 0)
    except ValueError:
        return None
    if text[at : at + 2] != (',"' if at else '{"') or not text.endswith("]}}"):
        return None
    cut = _ENTRY.split(text[at + 1 : -1])
    keys, forms, places = cut[1::_GROUPS], cut[2::_GROUPS], cut[3::_GROUPS]
    if any(cut[::_GROUPS]) or len(keys) > MAX_TENSORS or max(map(len, keys)) > MAX_NAME_NCHARS:
        return None
    del cut, text
    if "".join(keys).encode().translate(None, _IN_NAMES):
        return None
    try:
        infos = {form: _info_of(form) for form in set(forms)}
    except (SourceError, ValueError):
        return None
    names = {*keys}
    if len(names) < len(keys) or METADATA in names:
        return None
    nbytes = {form: info.nbytes for form, info in infos.items()}
    sizes = list(map(nbytes.__getitem__, forms))
    if ",".join(places) != _joined_pairs(list(map(str, accumulate(sizes, initial=0)))):
        return None
    start = 8 + len(raw)
    *begins, end = accumulate(sizes, initial=start)
    _check_end(end, file_nbytes, where)
    columns = keys, list(map(infos.__getitem__, forms)), begins
    return Header(*columns, file_nbytes - start, _metadata(metadata, where))


def _joined_pairs(texts: Sequence[str]) -> str:
    """Return each two texts that follow each other, all joined by commas: a, b, c -> a,b,b,c."""
    both = [""] * (2 * len(texts) - 2)
    both[::2], both[1::2] = texts[:-1], texts[1:]
    return ",".join(both)


@lru_cache(maxsize=4096)
def _info_of(form: str) -> TensorInfo:
    """Return shape and dtype from `"dtype":"F32","shape":[2,3],"data_offsets":`; one object for all shards. Raise
    ValueError for another text."""
    match = _FORM.fullmatch(form)
    if match is None:
        raise ValueError(form)
    return _info("", match[1], parse_json(f"[{match[2]}]"), where="")


def _load(raw: bytes, where: str) -> tuple[tuple[str, object], ...]:
    """Return the JSON object as (name, value) pairs. Objects become tuples, so that no duplicate key is
    lost."""
    if not raw.startswith(b"{"):
        raise _bad(
            where, f"header, expected a JSON object that starts with '{{', found {raw[:1]!r}"
        )
    try:
        pairs: tuple[tuple[str, object], ...] = parse_pairs(raw)
    except JsonError as error:
        raise _bad(where, f"header is not JSON: {error}") from error
    if len(pairs) > MAX_TENSORS:
        raise _bad(where, f"expected at most {MAX_TENSORS} tensors, found {len(pairs)}")
    return pairs


def _fields(name: str, entry: Any, where: str) -> tuple[str, list[int], int, int]:
    """Return (dtype, shape, begin, end) of one entry. The types are checked; that shape, dtype and range
    agree is not."""
    try:
        (a, dtype), (b, shape), (c, offsets) = entry
        if a != "dtype" or b != "shape" or c != "data_offsets":
            fields = dict(entry)
            dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        begin, end = offsets
        if type(entry) is not tuple:  # an array of arrays unpacks too
            raise ValueError
    except (ValueError, TypeError, KeyError) as error:
        names = [str(pair[0]) for pair in entry] if isinstance(entry, tuple) else entry
        raise _bad(
            where,
            f"tensor {name!r}: expected the fields dtype, shape and two data_offsets, "
            f"found {_short(names)}",
        ) from error
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= MAX_NUMEL:
        raise _bad(
            where,
            f"tensor {name!r}: data_offsets, expected integers 0 <= begin <= end < 2**63, "
            f"found {_short([begin, end])}",
        )
    if type(shape) is list:
        for n in shape:
            if type(n) is not int:
                break
        else:
            return dtype, shape, begin, end
    raise _bad(where, f"tensor {name!r}: shape, expected a list of integers, found {_short(shape)}")


def _info(name: str, dtype: object, shape: list[int], where: str) -> TensorInfo:
    torch_dtype = TORCH_DTYPES.get(dtype) if isinstance(dtype, str) else None
    if dtype in NOT_OF_TORCH:
        raise SourceError(
            "CKM107",
            f"{where}: tensor {name!r} has dtype {dtype}, 6 bits an element, expected one that torch has",
            "no conversion can read such weights: save them in another dtype with the program that made them",
        )
    if torch_dtype is None:
        raise _bad(
            where,
            f"tensor {name!r}: dtype {_short(dtype)} is unknown, expected one of "
            + " ".join(TORCH_DTYPES),
        )
    numel = 1
    for n in shape:
        if n < 0:
            raise _bad(where, f"tensor {name!r}: negative size in shape {_short(shape)}")
        numel *= n or 1
        if numel > MAX_NUMEL:  # also where another dim is 0: torch refuses such a shape too
            raise _bad(where, f"tensor {name!r}: shape {_short(shape)} overflows 63 bits")
    if torch_dtype != "float4_e2m1fn_x2":
        return TensorInfo(tuple(shape), torch_dtype)
    if not shape or shape[-1] % 2:
        raise _bad(where, f"tensor {name!r}: F4 needs an even last dim, found {_short(shape)}")
    return TensorInfo((*shape[:-1], shape[-1] // 2), torch_dtype)


def _check_tiling(
    tensors: Mapping[str, tuple[TensorInfo, int, int]],
    data_start: int,
    file_nbytes: int,
    where: str,
) -> None:
    """Raise SourceError unless each data byte belongs to exactly one tensor, and the file ends where the
    data does."""
    cursor = data_start
    for name, (_, begin, end) in sorted(tensors.items(), key=_by_range):
        if begin != cursor:
            kind = "overlaps the one before" if begin < cursor else "leaves a hole before it"
            raise _bad(
                where, f"tensor {name!r} {kind}: expected it at byte {cursor}, found {begin}"
            )
        cursor = end
    _check_end(cursor, file_nbytes, where)


def _check_end(end: int, file_nbytes: int, where: str) -> None:
    if end > file_nbytes:
        raise SourceError(
            "CKM104", f"{where}: truncated, expected {end} bytes, found {file_nbytes}", HINT
        )
    if end < file_nbytes:
        raise _bad(where, f"bytes after the last tensor, expected {end} bytes, found {file_nbytes}")


def _by_range(item: tuple[str, tuple[TensorInfo, int, int]]) -> tuple[int, int]:
    return item[1][1:]


def _metadata(entry: object, where: str) -> dict[str, str]:
    if not isinstance(entry, tuple):
        raise _bad(where, f"{METADATA}, expected an object, found {_short(entry)}")
    metadata = dict(entry)
    if len(metadata) != len(entry):
        raise _bad(where, f"{METADATA}: the name {_first_duplicate(entry)!r} is there twice")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _bad(where, f"{METADATA}[{key!r}], expected a string, found {_short(value)}")
    return metadata


def check_name(name: str, where: str) -> None:
    """Refuse names that no library writes and that would break logs, terminals or UTF-8 encoders."""
    if not name or len(name) > MAX_NAME_NCHARS:
        raise _bad(
            where,
            f"tensor name {_short(name)}, expected 1 to {MAX_NAME_NCHARS} characters, "
            f"found {len(name)}",
        )
    if name == METADATA:
        raise _bad(where, f"tensor name {METADATA!r} is that of the file's own metadata")
    for char in name:
        code = ord(char)
        if code < 32 or 127 <= code < 160 or 0xD800 <= code < 0xE000:
            raise _bad(where, f"tensor name {_short(name)} holds the control character {char!r}")


def _first_duplicate(pairs: Sequence[tuple[str, object]]) -> str:
    return Counter(name for name, _ in pairs).most_common(1)[0][0]


def _bad(where: str, problem: str) -> SourceError:
    return SourceError("CKM107", f"{where}: bad safetensors header: {problem}", HINT)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."


assert set(NAMES) <= set(ITEMSIZE)
