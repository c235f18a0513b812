r"""Which of llama.cpp's ways to split text, `tokenizer.ggml.pre`, is that of a tokenizer.json.

llama.cpp's converter tells them by the tokens of a sample; here they are told by the expression that tokenizer.json
states, the same expression in both libraries (llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_bpe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_CASES = (
    f"{_HEAD}{_UPPER}*{_LOWER}+%s|{_HEAD}{_UPPER}+{_LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _END
)
_KNOWN: Mapping[str, str] = {
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _WORDS % r"\p{N}": "qwen2",
    _CASES % (f"{_CLITICS}?", f"{_CLITICS}?", r"\p{N}{1,3}"): "gpt-4o",
    _CASES % ("", "", r"\p{N}"): "tekken",
}
"""Expression -> name."""


def split_name(document: Mapping[str, object]) -> str:
    """Return the name of the way in which a tokenizer.json splits text; "" where it is none that is known."""
    steps = list(_steps(document.get("pre_tokenizer")))
    expressions = [
        str(pattern.get("Regex", ""))
        for step in steps
        if step.get("type") == "Split" and isinstance(pattern := step.get("pattern"), dict)
    ]
    if len(expressions) == 1:
        return _KNOWN.get(expressions[0], "")
    plain = len(steps) == 1 and steps[0].get("type") == "ByteLevel"
    return "gpt-2" if plain and steps[0].get("use_regex", True) is True else ""


def _steps(value: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(value, dict):
        return
    inner = value.get("pretokenizers")
    if isinstance(inner, list):
        for each in inner:
            yield from _steps(each)
    else:
        yield value
