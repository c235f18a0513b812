"""Choose what describes a model that is written as GGUF: config.json and tokenizer beside the weights, or the
metadata of another GGUF file.

    --as model.gguf       its metadata, byte for byte
    a GGUF file as source its metadata, or of --config-from; the type that most weights have is stated anew
    else                  config.json, tokenizer.json, tokenizer_config.json beside the weights, or of --config-from
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ckptmap.core.json_text import JsonError, parse_object
from ckptmap.formats.gguf.key_values import KeyValues, head, read_key_values
from ckptmap.formats.gguf.model_metadata import architecture_of, metadata_of
from ckptmap.formats.gguf.splits import SPLIT_KEYS, files_of, holds_gguf
from ckptmap.formats.gguf.text_splits import split_name
from ckptmap.formats.gguf.tokenizer_metadata import splits_text, tokens_beyond, unwritten
from ckptmap.protocols.file_systems import ReadsFiles
from ckptmap.storage.files import Files
from ckptmap.storage.sidecar import Sidecar

CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
SENTENCEPIECE = "tokenizer.model"
TAKEN = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, SENTENCEPIECE)
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


def _unlike(tokenizer: Sidecar, rows: int) -> list[str]:
    """Return notes on a tokenizer that is not written, or in part, or of whose splitting of text llama.cpp has no
    name; `rows` is the model's vocab_size, 0 where it is not known."""
    try:
        document = parse_object(tokenizer.read())
    except JsonError:  # the writer refuses it
        return []
    if reason := unwritten(document):
        return [f"the file has no tokenizer, which llama.cpp needs: {reason}"]
    notes = []
    if beyond := tokens_beyond(document, rows):
        notes.append(
            f"{TOKENIZER}: {beyond} of its tokens have numbers from {rows} on, for which the embedding has no rows,"
            " and are left out, since llama.cpp loads no file with more tokens than rows"
        )
    if splits_text(document) and not split_name(document):
        notes.append(
            f"{TOKENIZER}: splits text in a way that has no name here, and tokenizer.ggml.pre says default:"
            " llama.cpp may give other tokens; take the file that its own converter makes for the tokenizer"
        )
    return notes


def _lacking(found: Mapping[str, Sidecar]) -> list[str]:
    config = _document(found)
    notes = [*metadata_of(config).notes] if architecture_of(config) else []
    if CONFIG not in found:
        notes.append(
            "the file says nothing of the model: it has no config.json; give one with --config-from PATH"
        )
    if TOKENIZER in found:
        rows = config.get("vocab_size")
        notes += _unlike(found[TOKENIZER], rows if type(rows) is int else 0)
    else:
        only = f" ({SENTENCEPIECE} alone is not read)" if SENTENCEPIECE in found else ""
        notes.append(
            f"the file has no tokenizer, which llama.cpp needs: there is no {TOKENIZER} beside the weights"
            f"{only}; give a folder that has it with --config-from PATH"
        )
    return notes
