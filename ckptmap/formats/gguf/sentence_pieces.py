"""Read the vocabulary of a SentencePiece model, `tokenizer.model`, which is a message of protobuf.

    ModelProto     1 pieces*: 1 text, 2 score f32, 3 type     2 trainer_spec: 3 model_type
                   3 normalizer_spec: 3 add_dummy_prefix

Source: sentencepiece, src/sentencepiece_model.proto. A field is a varint (number << 3 | form) and a value: a varint
(form 0), 8 bytes (1), a varint length and so many bytes (2), or 4 bytes (5). All other fields are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
"""`TrainerSpec.ModelType`."""
TYPES = range(1, 7)
"""`SentencePiece.Type`, which GGUF has taken over: normal, unknown, control, user-defined, unused, byte."""
NORMAL = 1
Field: TypeAlias = tuple[int, int | tuple[int, int]]
"""Number of a field, and its number or the span of its bytes."""


class NotSentencePiece(ValueError):
    """The bytes are no SentencePiece model; the text says why."""


@dataclass(frozen=True)
class SentencePieces:
    """The vocabulary: piece, score and type by number."""

    kind: Literal["unigram", "bpe", "word", "char"] | str
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    adds_space: bool = True
    """Whether a space is put before the text."""


def parse_pieces(data: bytes) -> SentencePieces:
    """Return the vocabulary. Raise NotSentencePiece where the bytes are no such model, or it has no pieces."""
    texts, scores, types = [], [], []
    kind, adds_space = 1, True
    try:
        for number, value in _fields(data, 0, len(data)):
            if number == 1:
                text, score, type_ = _piece(data, *_span(value))
                texts.append(text)
                scores.append(score)
                types.append(type_)
            elif number == 2:
                kind = _third(data, value, kind)
            elif number == 3:
                adds_space = bool(_third(data, value, 1))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise NotSentencePiece("it ends in the middle, or holds text that is no UTF-8") from error
    if not texts:
        raise NotSentencePiece("it holds no pieces")
    return SentencePieces(
        KINDS.get(kind, str(kind)), tuple(texts), tuple(scores), tuple(types), adds_space
    )


def _piece(data: bytes, at: int, end: int) -> tuple[str, float, int]:
    text, score, type_ = "", 0.0, NORMAL
    for number, value in _fields(data, at, end):
        if number == 1:
            start, stop = _span(value)
            text = data[start:stop].decode()
        elif number == 2:
            (score,) = struct.unpack_from("<f", data, _span(value)[0])
        elif number == 3 and isinstance(value, int):
            type_ = value
    if type_ not in TYPES or score != score:
        raise NotSentencePiece("a piece has a type or a score that SentencePiece does not write")
    return text, score, type_


def _third(data: bytes, value: int | tuple[int, int], default: int) -> int:
    """Return the number in field 3 of an inner message."""
    for number, inner in _fields(data, *_span(value)):
        if number == 3 and isinstance(inner, int):
            default = inner
    return default


def _span(value: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, int):
        raise NotSentencePiece("a field is a number where a message was expected")
    return value


def _fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """Yield the fields of a message that lies from one byte to another."""
    while at < end:
        tag, at = _varint(data, at)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, at = _varint(data, at)
            yield number, value
        else:
            nbytes, at = _varint(data, at) if form == 2 else ({1: 8, 5: 4}.get(form, end + 1), at)
            if nbytes > end - at:
                raise NotSentencePiece("a field reaches beyond its message")
            yield number, (at, at + nbytes)
            at += nbytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    found = shift = 0
    while True:
        byte = data[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
        if shift > 63:
            raise NotSentencePiece("a number has more than 64 bits")
