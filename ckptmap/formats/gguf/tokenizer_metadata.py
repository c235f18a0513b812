"""Make the keys of a tokenizer from tokenizer.json and tokenizer_config.json.

    BPE over bytes (Llama 3, Qwen, gpt-oss)           tokenizer.ggml.model = gpt2, with merges, and how text is split
    BPE with <0x0A> tokens (Llama 2, Gemma, Phi-3)    tokenizer.ggml.model = llama, with scores

Sources: llama.cpp, gguf-py/gguf/vocab.py and convert_hf_to_gguf.py (`get_vocab_base`), src/llama-vocab.cpp for what
scores do: of all pairs of neighbours, the one with the best score is merged first. So the score of a token is minus
the rank of the first merge that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.formats.gguf.key_values import boolean, f32s, i32s, text, texts, u32
from ckptmap.formats.gguf.text_splits import split_name

Document = Mapping[str, object]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""`llama_token_type` of llama.cpp's include/llama.h."""
SPECIAL = re.compile(r"<[|\uff5c].*[|\uff5c]>|<pad>|<mask>|\[@BOS@\]|<unused\d+>")
"""Texts of tokens that are taken for control tokens, whatever the tokenizer says."""
BYTES = re.compile(r"<0x[0-9A-F]{2}>")
IDS: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name in tokenizer_config.json -> name in GGUF."""
MAX_TOKENS = 1 << 24


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


def tokenizer_keys(
    document: Document, settings: Document, config: Document, rows: int, template: str | None
) -> dict[str, bytes]:
    """Return the keys; those of the config alone where there is no tokenizer, or one of a kind that is not written.

    document  tokenizer.json
    settings  tokenizer_config.json
    rows      rows of the embedding: numbers that no token has get one that is not used, and tokens of other
              numbers are left out, as llama.cpp's converter does (`_create_vocab_sentencepiece`); 0: not known
    template  chat_template.jinja
    """
    if unwritten(document):
        return _settings({}, {}, config, _Tokens({}, {}), None)
    model = _object(document.get("model"))
    tokens, merges = _tokens(document, model).below(rows or MAX_TOKENS + 1), list(_merges(model))
    if not tokens.vocab or max(tokens.vocab) >= MAX_TOKENS:
        return {}
    count = max(rows, max(tokens.vocab) + 1)
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
    return keys | _settings(document, settings, config, tokens, template)


def unwritten(document: Document) -> str:
    """Return why a tokenizer is not written; "": it is."""
    kind = _object(document.get("model")).get("type")
    if kind == "BPE":
        return ""
    return f"tokenizer.json is of the kind {kind!s:.40}, and BPE only is written" if document else "no tokenizer.json"  # fmt: skip


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


def _settings(
    document: Document, settings: Document, config: Document, tokens: _Tokens, template: str | None
) -> dict[str, bytes]:
    """Return the numbers of special tokens, which of them are put around a text, and the chat template."""
    stated = {name: _special(name, settings, config, tokens) for name in IDS}
    numbers = {name: number for name, number in stated.items() if number is not None}
    keys = {f"tokenizer.ggml.{IDS[name]}_token_id": u32(n) for name, n in numbers.items()}
    around = _around(document)
    for name, at in (("bos", 0), ("eos", -1)):
        asked = settings.get(f"add_{name}_token")
        by_template = bool(around) and around[at] == numbers.get(name, "")
        adds = asked if isinstance(asked, bool) else by_template
        if isinstance(asked, bool) or around:
            keys[f"tokenizer.ggml.add_{name}_token"] = boolean(adds)
    template = template or _template(settings.get("chat_template"))
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
