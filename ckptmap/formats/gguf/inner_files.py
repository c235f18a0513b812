"""Choose what describes a model that is written as GGUF: config.json and tokenizer beside the weights, or the
metadata of another GGUF file.

    --as model.gguf       its metadata, byte for byte
    a GGUF file as source its metadata, or of --config-from; the type that most weights have is stated anew
    else                  config.json and the files of the tokenizer beside the weights, or of --config-from
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ckptmap.core.json_text import JsonError, parse_object
from ckptmap.formats.gguf.key_values import KeyValues, head, read_key_values
from ckptmap.formats.gguf.model_metadata import architecture_of, metadata_of, model_types
from ckptmap.formats.gguf.sentence_pieces import NotSentencePiece, SentencePieces, parse_pieces
from ckptmap.formats.gguf.splits import SPLIT_KEYS, files_of, holds_gguf
from ckptmap.formats.gguf.text_splits import split_name
from ckptmap.formats.gguf.tokenizer_metadata import (
    TOKENIZER,
    Document,
    goes_first,
    splits_text,
    tokens_beyond,
    unwritten,
)
from ckptmap.protocols import CarriedFile
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.storage.files import Files
from ckptmap.storage.sidecar import Sidecar

CONFIG, TOKENIZER_CONFIG, TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
SENTENCEPIECE, ADDED = "tokenizer.model", "added_tokens.json"
TAKEN = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, SENTENCEPIECE, ADDED)
KINDS = ("bpe", "unigram")
"""Kinds of SentencePiece models that are written."""
MAX_NBYTES = 256 << 20
LIKE, SOURCE = "like.gguf", "source.gguf"
"""Names under which the writer is given the metadata of another file: to keep whole, or to state anew in part."""


class GgufInner(ReadsFiles):
    """Gives the writer of GGUF files what it says of the model."""

    def files(
        self, siblings: Sequence[str], given: str | None, source: str | None, like: str | None
    ) -> tuple[Mapping[str, Sidecar], list[str]]:
        """Return the files, or the metadata of another GGUF file as LIKE or SOURCE, and notes.

        Raise SourceError as `header.parse` does.
        """
        if like is not None:
            return {LIKE: self._metadata(like)}, []
        if source is not None and given is None:
            return {SOURCE: self._metadata(source)}, []
        if given is not None and holds_gguf(Path(given), self.mounts):
            return {SOURCE: self._metadata(given)}, []
        folder = None if given is None else Path(given)
        if folder is not None and folder.is_dir():
            siblings = [str(file) for file in folder.iterdir()]
        chosen = {Path(file).name: file for file in siblings if Path(file).name in TAKEN}
        if folder is not None and folder.is_file():
            chosen[CONFIG] = given or ""
        found = {
            name: Sidecar.at(file, self.mounts)
            for name, file in sorted(chosen.items())
            if Path(file).is_file() and Path(file).stat().st_size <= MAX_NBYTES
        }
        return found, _lacking(found)

    def _metadata(self, path: str) -> Sidecar:
        """Return the metadata of a file, or of the first of a split model: what stands before its tensors."""
        place = Path(path).absolute()
        if place.is_dir():
            place = min(place.glob("*.gguf"))
        with closing(Files(mounts=self.mounts)) as files:
            key_values: KeyValues = read_key_values(files, files_of(place)[0])
        return Sidecar.made(head({k: v for k, v in key_values.items() if k not in SPLIT_KEYS}, 0))


def _document(found: Mapping[str, Sidecar]) -> dict[str, object]:
    """Return the config; {} where there is none, or it is no JSON, which the writer refuses."""
    try:
        return parse_object(found[CONFIG].read(), allow_nan=True) if CONFIG in found else {}
    except JsonError:
        return {}


def pieces_of(model: CarriedFile | None, document: Document) -> tuple[SentencePieces | None, str]:
    """Return what a tokenizer.model holds and "", or None and why it is not written: there is none, it is no
    SentencePiece model, or of a kind that llama.cpp has not, or this tokenizer.json goes first."""
    if model is None or not goes_first(document):
        return None, ""
    try:
        pieces = parse_pieces(model.read())
    except NotSentencePiece as error:
        return None, f"{SENTENCEPIECE} is no SentencePiece model: {error}"
    if pieces.kind not in KINDS:
        return (
            None,
            f"{SENTENCEPIECE} is of the kind {pieces.kind}, and {' and '.join(KINDS)} are written",
        )
    return pieces, ""


def _unlike(found: Mapping[str, Sidecar], rows: int) -> list[str]:
    """Return notes on a tokenizer that is not written, or in part, or of whose splitting of text llama.cpp has no
    name; `rows` is the model's vocab_size, 0 where it is not known."""
    try:
        document = parse_object(found[TOKENIZER].read()) if TOKENIZER in found else {}
    except JsonError:  # the writer refuses it
        return []
    pieces, reason = pieces_of(found.get(SENTENCEPIECE), document)
    if pieces is not None:
        return _of_pieces(pieces, rows)
    notes = [f"{reason}: {TOKENIZER} is taken"] if reason and not unwritten(document) else []
    if unwritten(document):
        more = "; give a folder that has one with --config-from PATH" if not document else ""
        reason = reason or unwritten(document)
        return [f"the file has no tokenizer, which llama.cpp needs: {reason}{more}"]
    if beyond := tokens_beyond(document, rows):
        notes.append(_left_out(TOKENIZER, beyond, rows))
    if splits_text(document) and not split_name(document):
        notes.append(
            f"{TOKENIZER}: splits text in a way that has no name here, and tokenizer.ggml.pre says default:"
            " llama.cpp may give other tokens; take the file that its own converter makes for the tokenizer"
        )
    return notes


def _of_pieces(pieces: SentencePieces, rows: int) -> list[str]:
    beyond = len(pieces.texts) - rows if rows else 0
    notes = [_left_out(SENTENCEPIECE, beyond, rows)] if beyond > 0 else []
    if pieces.kind == "unigram":
        notes.append(
            f"{SENTENCEPIECE}: is of the kind unigram, which llama.cpp reads as if it were bpe, as its own converter"
            " writes it: it may give other tokens"
        )
    return notes


def _left_out(file: str, beyond: int, rows: int) -> str:
    return (
        f"{file}: {beyond} of its tokens have numbers from {rows} on, for which the embedding has no rows,"
        " and are left out, since llama.cpp loads no file with more tokens than rows"
    )


def _lacking(found: Mapping[str, Sidecar]) -> list[str]:
    config = _document(found)
    notes = [*metadata_of(config).notes] if architecture_of(config) else []
    if CONFIG not in found:
        notes.append(
            "the file says nothing of the model: it has no config.json; give one with --config-from PATH"
        )
    elif not architecture_of(config):
        notes.append(
            f"the file says nothing of the model, which llama.cpp needs: model_type {config.get('model_type')!r:.40} of"
            f" config.json is none of {', '.join(model_types())}; give another with --config-from PATH"
        )
    rows = config.get("vocab_size")
    return notes + _further_ends(config) + _unlike(found, rows if type(rows) is int else 0)


def _further_ends(config: Mapping[str, object]) -> list[str]:
    """Return a note on tokens that end a text and have no key: GGUF states one."""
    stated = config.get("eos_token_id")
    if not isinstance(stated, list) or len(stated) < 2:
        return []
    return [
        f"config.json: {len(stated)} tokens end a text (eos_token_id {str(stated)[:60]}), and tokenizer.ggml.eos_token_id"
        " states one of them: llama.cpp stops at another only where it knows its text, <|eot_id|> or <|im_end|> for example"
    ]
