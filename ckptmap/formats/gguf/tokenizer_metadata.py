"""Make the keys of a tokenizer from tokenizer.json or tokenizer.model, and tokenizer_config.json.

    BPE over bytes (Llama 3, Qwen, gpt-oss)           tokenizer.ggml.model = gpt2, with merges, and how text is split
    BPE with <0x0A> tokens (Llama 2, Gemma, Phi-3)    tokenizer.ggml.model = llama, with scores
    SentencePiece (tokenizer.model)                   the same, with the scores and types that it states

Of the last two, tokenizer.model goes first, as in llama.cpp's converter. Sources: llama.cpp, gguf-py/gguf/vocab.py and convert_hf_to_gguf.py (`get_vocab_base`), src/llama-vocab.cpp for what
scores do: of all pairs of neighbours, the one with the best score is merged first. So the score of a token is minus
the rank of the first merge that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptmap.errors import PlanError
from ckptmap.formats.gguf.key_values import boolean, f32s, i32s, text, texts, u32
from ckptmap.formats.gguf.sentence_pieces import SentencePieces
from ckptmap.formats.gguf.text_splits import split_name

TOKENIZER = "tokenizer.json"
Document = Mapping[str, object]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""`llama_token_type` of llama.cpp's include/llama.h."""
SPECIAL = re.compile(r"<[|\uff5c].*[|\uff5c]>|<pad>|<mask>|\[@BOS@\]|<2mass>|<unused\d+>")
"""Texts of tokens that are taken for control tokens, whatever the tokenizer says."""
DIGITS = re.compile(r"[0-9]{1,9}")
BYTES = re.compile(r"<0x[0-9A-F]{2}>")
IDS: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name in tokenizer_config.json -> name in GGUF."""
ADDED_SCORE, UNUSED_SCORE = -1000.0, -10000.0
"""Scores that llama.cpp's converter gives to tokens that stand beside a SentencePiece model, and to those of no text."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
MAX_TOKENS = 1 << 24
MAX_UNUSED = 4096
"""So many numbers without a token are filled where the model does not say how many rows its embedding has."""


@dataclass(frozen=True)
class _Tokens:
    """Tokens by number; `added` are those that the tokenizer has beside its vocabulary: number -> is it special."""

    vocab: Mapping[int, str]
    added: Mapping[int, bool]

    def number(self, content: str) -> int | None:
        return next((number for number, each in self.vocab.items() if each == content), None)

    def below(self, rows: int) -> _Tokens:
        """Return those whose numbers are rows of an embedding of so many."""
        if not self.vocab or max(self.vocab) < rows:
            return self
        vocab = {number: token for number, token in self.vocab.items() if number < rows}
        return _Tokens(vocab, {n: special for n, special in self.added.items() if n < rows})


@dataclass(frozen=True)
class TokenizerFiles:
    """What describes a tokenizer.

    document  tokenizer.json
    settings  tokenizer_config.json
    added     added_tokens.json
    pieces    tokenizer.model, if it goes before tokenizer.json
    template  chat_template.jinja
    """

    document: Document = field(default_factory=dict)
    settings: Document = field(default_factory=dict)
    added: Document = field(default_factory=dict)
    pieces: SentencePieces | None = None
    template: str | None = None


def tokenizer_keys(files: TokenizerFiles, config: Document, rows: int) -> dict[str, bytes]:
    """Return the keys; those of the config alone where there is no tokenizer, or one of a kind that is not written.

    rows  rows of the embedding: numbers that no token has get one that is not used, and tokens of other numbers
          are left out, as llama.cpp's converter does (`_create_vocab_sentencepiece`); 0: not known

    Raise PlanError CKM203 where the rows are not known, and tokens have numbers far beyond their count.
    """
    if files.pieces is not None:
        return _of_pieces(files.pieces, files, config, rows)
    document = files.document
    if unwritten(document):
        return _settings(TokenizerFiles(), config, _Tokens({}, {}))
    model = _object(document.get("model"))
    tokens, merges = _tokens(document, model).below(rows or MAX_TOKENS + 1), list(_merges(model))
    if not tokens.vocab:
        return {}
    count = rows or _count(tokens.vocab)
    by_bytes = splits_text(document)
    keys = {
        "tokenizer.ggml.model": text("gpt2" if by_bytes else "llama"),
        "tokenizer.ggml.pre": text(split_name(document) or "default" if by_bytes else "default"),
        "tokenizer.ggml.tokens": texts([tokens.vocab.get(i, f"[PAD{i}]") for i in range(count)]),
    }
    if by_bytes:
        keys["tokenizer.ggml.token_type"] = _types(tokens, model, count, False)
        keys["tokenizer.ggml.merges"] = texts([_joined(pair) for pair in merges])
    else:
        keys["tokenizer.ggml.scores"] = _scores(tokens, merges, count)
        keys["tokenizer.ggml.token_type"] = _types(tokens, model, count, True)
        keys["tokenizer.ggml.add_space_prefix"] = boolean(_prefixes_space(document))
    return keys | _settings(files, config, tokens)


def _count(numbers: Collection[int]) -> int:
    """Return how many tokens a list has that holds these numbers."""
    last = max(numbers)
    if last >= len(numbers) + MAX_UNUSED:
        raise PlanError(
            "CKM203",
            f"{TOKENIZER}: found {len(numbers)} tokens, of which one has number {last}, and config.json states no"
            " vocab_size",
            "give a config.json that states vocab_size: --config-from PATH",
        )
    return last + 1


def goes_first(document: Document) -> bool:
    """Return whether a tokenizer.model goes before this tokenizer.json: all but one over bytes, or none at all."""
    return bool(unwritten(document)) or not splits_text(document)


def _of_pieces(
    pieces: SentencePieces, files: TokenizerFiles, config: Document, rows: int
) -> dict[str, bytes]:
    """Return the keys as llama.cpp's converter makes them (`_create_vocab_sentencepiece`)."""
    added = _beside(pieces, files)
    count = rows or _count({*range(len(pieces.texts)), *added})
    tokens, scores, types = list(pieces.texts), list(pieces.scores), list(pieces.types)
    for number in range(len(tokens), count):
        tokens.append(f"[PAD{number}]")
        scores.append(UNUSED_SCORE)
        types.append(UNUSED)
    types = [NORMAL if kind == USER_DEFINED else kind for kind in types]
    for number, (token, special) in added.items():
        if number < count:
            tokens[number] = token if special else token.replace(SPACE, " ")
            scores[number], types[number] = ADDED_SCORE, CONTROL if special else USER_DEFINED
    keys = {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": texts(tokens[:count]),
        "tokenizer.ggml.scores": f32s(scores[:count]),
        "tokenizer.ggml.token_type": i32s(types[:count]),
    }
    stated = files.settings.get("add_prefix_space")
    if isinstance(stated, bool) or not pieces.adds_space:
        adds = stated if isinstance(stated, bool) else False
        keys["tokenizer.ggml.add_space_prefix"] = boolean(adds)
    return keys | _settings(files, config, _Tokens(dict(enumerate(tokens[:count])), {}))


def _beside(pieces: SentencePieces, files: TokenizerFiles) -> dict[int, tuple[str, bool]]:
    """Return the tokens that stand beside the model: number -> text, and whether it is special."""
    own = range(len(pieces.texts))
    listed = _tokens(files.document, {})
    found = {n: (listed.vocab[n], special) for n, special in listed.added.items() if n not in own}
    for token, number in files.added.items():
        if type(number) is int and number >= 0:
            found[number] = token, False
    for key, entry in _object(files.settings.get("added_tokens_decoder")).items():
        content = _object(entry).get("content")
        if DIGITS.fullmatch(key) and isinstance(content, str):
            special = _object(entry).get("special") is True
            found[int(key)] = content, special or SPECIAL.fullmatch(content) is not None
    return found


def unwritten(document: Document) -> str:
    """Return why a tokenizer is not written; "": it is."""
    kind = _object(document.get("model")).get("type")
    if kind == "BPE":
        return ""
    return f"{TOKENIZER} is of the kind {kind!s:.40}, and BPE only is written" if document else f"there is no {TOKENIZER} beside the weights"  # fmt: skip


def tokens_beyond(document: Document, rows: int) -> int:
    """Return how many tokens have numbers that are no rows of an embedding of so many; 0 where that is not known."""
    tokens = _tokens(document, _object(document.get("model"))).vocab
    return sum(number >= rows for number in tokens) if rows > 0 else 0


def splits_text(document: Document) -> bool:
    """Return whether the tokenizer splits text by an expression, which GGUF names (`text_splits`)."""
    return _object(document.get("model")).get("byte_fallback") is not True


def _tokens(document: Document, model: Document) -> _Tokens:
    vocab = {
        number: token
        for token, number in _object(model.get("vocab")).items()
        if type(number) is int and number >= 0
    }
    added: dict[int, bool] = {}
    listed = document.get("added_tokens")
    for entry in listed if isinstance(listed, list) else ():
        number, content = _object(entry).get("id"), _object(entry).get("content")
        if type(number) is int and number >= 0 and isinstance(content, str):
            vocab[number] = content
            added[number] = _object(entry).get("special") is True
    return _Tokens(vocab, added)


def _merges(model: Document) -> Iterator[tuple[str, str]]:
    listed = model.get("merges")
    for entry in listed if isinstance(listed, list) else ():
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair):
            yield pair[0], pair[1]


def _joined(pair: Sequence[str]) -> str:
    """Return a merge as GGUF has it: two texts with a space between, one inside of them as another character."""
    return " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in pair)


def _types(tokens: _Tokens, model: Document, count: int, has_bytes: bool) -> bytes:
    unknown = model.get("unk_token")
    found = []
    for number in range(count):
        token = tokens.vocab.get(number)
        if token is None:
            found.append(UNUSED)
        elif has_bytes and token == unknown:
            found.append(UNKNOWN)
        elif number in tokens.added:
            special = tokens.added[number] or SPECIAL.fullmatch(token)
            found.append(CONTROL if special else USER_DEFINED)
        else:
            found.append(BYTE if has_bytes and BYTES.fullmatch(token) else NORMAL)
    return i32s(found)


def _scores(tokens: _Tokens, merges: Sequence[tuple[str, str]], count: int) -> bytes:
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    last = len(merges)
    return f32s([-float(ranks.get(tokens.vocab.get(number, ""), last)) for number in range(count)])


def _prefixes_space(document: Document) -> bool:
    """Return whether a space is put before the text: by a step of the normalizer or of the splitter."""
    steps = [*_steps(document.get("normalizer"), "normalizers")]
    steps += _steps(document.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
    return False


def _steps(value: object, key: str) -> Iterator[Document]:
    step = _object(value)
    inner = step.get(key)
    if isinstance(inner, list):
        for each in inner:
            yield from _steps(each, key)
    elif step:
        yield step


# -------------------------------------------------------------------------------- settings


def _settings(files: TokenizerFiles, config: Document, tokens: _Tokens) -> dict[str, bytes]:
    """Return the numbers of special tokens, which of them are put around a text, and the chat template."""
    settings = files.settings
    stated = {name: _special(name, settings, config, tokens) for name in IDS}
    numbers = {name: number for name, number in stated.items() if number is not None}
    keys = {f"tokenizer.ggml.{IDS[name]}_token_id": u32(n) for name, n in numbers.items()}
    around = _around(files.document)
    for name, at in (("bos", 0), ("eos", -1)):
        asked = settings.get(f"add_{name}_token")
        by_template = bool(around) and around[at] == numbers.get(name, "")
        adds = asked if isinstance(asked, bool) else by_template
        if isinstance(asked, bool) or around:
            keys[f"tokenizer.ggml.add_{name}_token"] = boolean(adds)
    template = files.template or _template(settings.get("chat_template"))
    return keys | ({"tokenizer.chat_template": text(template)} if template else {})


def _special(name: str, settings: Document, config: Document, tokens: _Tokens) -> int | None:
    content = settings.get(f"{name}_token")
    content = content.get("content") if isinstance(content, dict) else content
    number = tokens.number(content) if isinstance(content, str) else None
    if number is None:
        stated = config.get(f"{name}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        number = stated if type(stated) is int and 0 <= stated < MAX_TOKENS else None
    return number


def _around(document: Document) -> list[int | None]:
    """Return the numbers of the tokens at both ends of one text; None where the text itself is there."""
    for step in _steps(document.get("post_processor"), "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        single, known = step.get("single"), _object(step.get("special_tokens"))
        if isinstance(single, list) and single:
            return [_number(single[0], known), _number(single[-1], known)]
    return []


def _number(piece: object, known: Document) -> int | None:
    name = _object(_object(piece).get("SpecialToken")).get("id")
    ids = _object(known.get(name) if isinstance(name, str) else None).get("ids")
    return ids[0] if isinstance(ids, list) and ids and type(ids[0]) is int else None


def _template(value: object) -> str:
    """Return the chat template; of several, the default one."""
    if isinstance(value, str):
        return value
    for entry in value if isinstance(value, list) else ():
        template = _object(entry).get("template")
        if _object(entry).get("name") == "default" and isinstance(template, str):
            return template
    return ""


def _object(value: object) -> Document:
    return value if isinstance(value, dict) else {}
