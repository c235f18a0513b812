"""Write the safetensors header byte for byte, from columns: what tensors share is made once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

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
    items = []
    if metadata:
        text = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
        items.append(f'"{METADATA}":{text}')
    _check_written(keys)
    forms = {id(info): _written_form(keys[at], info) for at, info in distinct_at(infos)}
    stops = list(map(str, accumulate(nbytes_of(infos), initial=0)))
    names = map(json.encoder.encode_basestring, keys)
    entries = zip(names, map(forms.__getitem__, map(id, infos)), stops, stops[1:], strict=False)
    one = '%s:%s,"data_offsets":[%s,%s]}'  # one call for all: there may be 100,000
    items += [",".join([one] * len(keys)) % (*chain.from_iterable(entries),)] if keys else []
    raw = ("{" + ",".join(items) + "}").encode("utf-8")
    raw += b" " * (-len(raw) % ALIGN)
    if len(raw) > MAX_HEADER_NBYTES:
        raise PlanError(
            "CKM203",
            f"the safetensors header would take {human(len(raw))}, expected at most {human(MAX_HEADER_NBYTES)}",
            "write more and smaller files: --max-shard-size 2GB",
        )
    return len(raw).to_bytes(8, "little") + raw


def _check_written(keys: Sequence[str]) -> None:
    """Refuse a header that no reader would accept."""
    longest = max(map(len, keys), default=1)
    printable = all(keys) and "".join(keys).isprintable()
    if printable and longest <= MAX_NAME_NCHARS and METADATA not in keys:
        return
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


def _written_form(key: str, info: TensorInfo) -> str:
    """Return how the header's entry of a tensor begins; tensors of one shape and dtype share it."""
    dtype, shape = _stored_form(key, info)
    return f'{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]'


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
