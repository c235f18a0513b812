"""Write the safetensors header byte for byte, from columns: what tensors share is made once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ckptmap.core.columns import distinct_at
from ckptmap.core.formatting import human
from ckptmap.core.printable import advised
from ckptmap.core.tensor_columns import nbytes_of
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.safetensors.header import (
    MAX_HEADER_NBYTES,
    MAX_NAME_NCHARS,
    METADATA,
    NAMES,
    check_name,
)
from ckptmap.tensors import TensorInfo

ALIGN = 8


def emit(keys: Sequence[str], infos: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the 8 length bytes and the header of tensors that lie in the given order without gaps.

    Spaces pad it, so that the data starts at a multiple of 8 bytes, as safetensors does. Raise PlanError
    CKM203 for a dtype that the format has no name for (complex128), a name that no reader accepts, or a
    header that is too long.
    """
    about = ""
    if metadata:
        text = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
        about = f'"{METADATA}":{text}{"," if keys else ""}'
    raw = ("{" + about + "".join(_entries(keys, infos)) + "}").encode("utf-8")
    raw += b" " * (-len(raw) % ALIGN)
    if len(raw) > MAX_HEADER_NBYTES:
        raise PlanError(
            "CKM203",
            f"the safetensors header would take {human(len(raw))}, expected at most {human(MAX_HEADER_NBYTES)}",
            "write more and smaller files: --max-shard-size 2GB",
        )
    return len(raw).to_bytes(8, "little") + raw


def _entries(keys: Sequence[str], infos: Sequence[TensorInfo]) -> list[str]:
    """Return the texts that make up the entries of these tensors: some for each, which are joined once for all, because
    there may be 100,000.

        "a    ":{"dtype":"F32","shape":[2],"data_offsets":[    0    ,    8    ]},    "b    ...
    """
    if not keys:
        return []
    names = _as_text(keys)
    if '"' in names or "\\" in names:
        keys = [json.encoder.encode_basestring(key)[1:-1] for key in keys]
    forms = {id(info): _written_form(keys[at], info) for at, info in distinct_at(infos)}
    stops = list(map(str, accumulate(nbytes_of(infos), initial=0)))
    texts = [","] * (6 * len(keys))
    texts[0::6], texts[2::6], texts[4::6] = keys, stops[:-1], stops[1:]
    texts[1::6] = map(forms.__getitem__, map(id, infos))
    texts[5::6] = [']},"'] * len(keys)
    return ['"', *texts[:-1], "]}"]


def _as_text(keys: Sequence[str]) -> str:
    """Return all keys, joined. Refuse a header that no reader would accept."""
    text = "".join(keys)
    printable = all(keys) and text.isprintable()
    if printable and max(map(len, keys)) <= MAX_NAME_NCHARS and METADATA not in keys:
        return text
    try:
        for key in keys:
            if not key.isprintable() or key == METADATA or not 0 < len(key) <= MAX_NAME_NCHARS:
                check_name(key, "the output")
    except SourceError as error:
        raise PlanError(
            "CKM203",
            error.message,
            f"leave it out with {advised(exclude=key)}, or choose --to full",
        ) from error
    return text


def _written_form(key: str, info: TensorInfo) -> str:
    """Return what follows a name in its entry; tensors of one shape and dtype share it."""
    dtype, shape = _stored_form(key, info)
    return f'":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def _stored_form(key: str, info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as the header writes them; a float4 pair counts as two elements."""
    dtype = NAMES.get(info.dtype)
    if dtype is None:
        raise PlanError(
            "CKM203",
            f"{key}: safetensors has no dtype for {info.dtype}",
            "choose a setup that writes torch.save or DCP files (--to full, --to fsdp2)",
        )
    if info.dtype != "float4_e2m1fn_x2":
        return dtype, info.shape
    if not info.shape:
        raise PlanError(
            "CKM203",
            f"{key}: safetensors cannot hold a float4 of 0 dimensions",
            f"leave it out with {advised(exclude=key)}",
        )
    return dtype, (*info.shape[:-1], info.shape[-1] * 2)
