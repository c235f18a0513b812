"""Put together what a GGUF file says of its model: keys with values, and the tensors of rotary factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptmap.core.json_text import JsonError, parse_json
from ckptmap.errors import PlanError
from ckptmap.formats.gguf import inner_files as names
from ckptmap.formats.gguf.block_types import BlockType
from ckptmap.formats.gguf.key_values import KeyValues, split_head, u32
from ckptmap.formats.gguf.model_metadata import architecture_of, metadata_of
from ckptmap.formats.gguf.tokenizer_metadata import (
    MAX_TOKENS,
    TOKENIZER,
    TokenizerFiles,
    tokenizer_keys,
)
from ckptmap.protocols import CarriedFile

FILE_TYPE, QUANTIZATION_VERSION = "general.file_type", "general.quantization_version"
FILE_TYPES: Mapping[str, int] = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "MXFP4": 38,
}  # fmt: skip
"""Type of most weights -> `llama_ftype` (llama.cpp, include/llama.h): those that ckptmap makes."""
GGML_VERSION = 2
"""`GGML_QNT_VERSION` of ggml.h."""


class WrittenTensor(Protocol):
    """A tensor of the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> BlockType: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Description:
    """Keys with types and values, and the values of tensors that config.json states, by name."""

    keys: KeyValues
    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)


def describe(inner: Mapping[str, CarriedFile], tensors: Sequence[WrittenTensor]) -> Description:
    """Return what the file says, made of what `GgufInner.files` gave. Raise PlanError CKM103 for a file that is no
    JSON, and as `tokenizer_keys` does."""
    if names.LIKE in inner:
        return Description(split_head(inner[names.LIKE].read()))
    stated = _of_tensors(tensors)
    if names.SOURCE in inner:
        keys = split_head(inner[names.SOURCE].read())
        return Description(keys | stated if stated and FILE_TYPE in keys else keys)
    config = _object(inner, names.CONFIG)
    if not architecture_of(config):
        return Description(stated)
    model = metadata_of(config)
    rows = next((t.shape[0] for t in tensors if getattr(t, "name", "") == "token_embd.weight"), 0)
    vocab = config.get("vocab_size")
    rows = rows or (vocab if type(vocab) is int and 0 < vocab < MAX_TOKENS else 0)
    document = _object(inner, TOKENIZER)
    files = TokenizerFiles(
        document, _object(inner, names.TOKENIZER_CONFIG), _object(inner, names.ADDED),
        names.pieces_of(inner.get(names.SENTENCEPIECE), document)[0],
        inner[names.TEMPLATE].read().decode(errors="replace") if names.TEMPLATE in inner else None,
    )  # fmt: skip
    tokens = tokenizer_keys(files, config, rows)
    return Description({**model.keys, **stated, **tokens}, model.factors)


def _of_tensors(tensors: Sequence[WrittenTensor]) -> dict[str, bytes]:
    """Return the keys that state the type of most weights; none where most are of a type that is not made here."""
    count = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            count[tensor.type.name] += tensor.nbytes // tensor.type.nbytes * tensor.type.numel
    most = count.most_common(1)[0][0] if count else "F32"
    if most not in FILE_TYPES:
        return {}
    return {FILE_TYPE: u32(FILE_TYPES[most]), QUANTIZATION_VERSION: u32(GGML_VERSION)}


def _object(inner: Mapping[str, CarriedFile], name: str) -> dict[str, object]:
    """Return the JSON object of a file; {} where there is none."""
    if name not in inner:
        return {}
    try:
        found = parse_json(inner[name].read(), allow_nan=True)
    except JsonError as error:
        raise PlanError(
            "CKM103", f"{name}: cannot be read as JSON: {error}",
            "download it again, or give a folder with another: --config-from PATH",
        ) from error  # fmt: skip
    return found if isinstance(found, dict) else {}
