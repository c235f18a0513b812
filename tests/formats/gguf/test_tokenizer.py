"""Tokenizers of the `tokenizers` library become the keys that llama.cpp's converter writes for them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

import ckptmap
from ckptmap.formats.gguf.text_splits import split_name
from tests.formats.gguf.test_writer import fields, saved
from tests.support.bnb_cases import refused

TEXTS = ["the cat sat on the mat", "a hat is not a cat, 12345 of them", "théâtre, naïve"] * 3
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The expression in tokenizer.json of Qwen/Qwen2-0.5B; those of Llama 3 and gpt-oss below."""
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def over_bytes(pattern: str = QWEN2) -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=80, special_tokens=["<|end|>", "<|pad|>"])
    )
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def with_byte_tokens() -> Tokenizer:
    """As transformers converts a SentencePiece model of Llama 2."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(4)]
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    made.train_from_iterator(TEXTS, BpeTrainer(vocab_size=70, special_tokens=special[:3]))
    document = json.loads(made.to_str())
    start = max(document["model"]["vocab"].values()) + 1
    document["model"]["vocab"] |= {token: start + n for n, token in enumerate(byte_tokens)}
    made = Tokenizer.from_str(json.dumps(document))
    made.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def written(tmp_path: Path, made: Tokenizer, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The metadata of a tiny Llama with this tokenizer, and the notes."""
    source = saved("llama", tmp_path)
    made.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    report = ckptmap.convert(source, tmp_path / "m.gguf", to="gguf")
    found = fields(tmp_path / "m.gguf")
    return {k: v for k, v in found.items() if k.startswith("tokenizer.")}, list(report.notes)


def test_a_tokenizer_over_bytes(tmp_path: Path) -> None:
    made = over_bytes()
    document = json.loads(made.to_str())
    told, notes = written(
        tmp_path, made, eos_token="<|end|>", pad_token={"content": "<|pad|>"}, add_bos_token=False,
        chat_template="{{ messages }}",
    )  # fmt: skip
    tokens, types = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 96, "rows of the embedding"
    count = made.get_vocab_size()
    assert tokens[:count] == [made.id_to_token(number) for number in range(count)]
    assert tokens[count:] == [f"[PAD{number}]" for number in range(count, 96)]
    kinds = dict(zip(tokens, types, strict=True))
    assert kinds["<|end|>"] == kinds["<|pad|>"] == TokenType.CONTROL
    assert kinds["<tool>"] == TokenType.USER_DEFINED and kinds["[PAD95]"] == TokenType.UNUSED
    assert kinds["a"] == TokenType.NORMAL
    assert told["tokenizer.ggml.merges"] == [" ".join(pair) for pair in document["model"]["merges"]]
    assert told["tokenizer.ggml.model"] == "gpt2" and told["tokenizer.ggml.pre"] == "qwen2"
    assert told["tokenizer.ggml.eos_token_id"] == 0 and told["tokenizer.ggml.padding_token_id"] == 1
    assert told["tokenizer.ggml.bos_token_id"] == 1, "of config.json"
    assert told["tokenizer.ggml.add_bos_token"] is False
    assert told["tokenizer.chat_template"] == "{{ messages }}"
    assert not any("tokenizer" in note for note in notes)


def merged_by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's way (`llm_tokenizer_spm`): the neighbours whose joined token has the best score, the leftmost of
    equals, are joined until none are left."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]  # fmt: skip
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tokenizer_with_byte_tokens(tmp_path: Path) -> None:
    made = with_byte_tokens()
    told, _ = written(tmp_path, made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokens, types = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    kinds = dict(zip(tokens, types, strict=True))
    assert told["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in told
    assert kinds["<unk>"] == TokenType.UNKNOWN and kinds["<s>"] == TokenType.CONTROL
    assert kinds["<0x03>"] == TokenType.BYTE and kinds["a"] == TokenType.NORMAL
    assert told["tokenizer.ggml.add_space_prefix"] is True
    assert (
        told["tokenizer.ggml.add_bos_token"] is True
        and told["tokenizer.ggml.unknown_token_id"] == 0
    )
    scores = dict(zip(tokens, told["tokenizer.ggml.scores"], strict=True))
    for text in ("the cat", "a hat is not a mat, 12", "naïve"):
        expected = made.encode(text, add_special_tokens=False).tokens
        assert merged_by_scores(f"▁{text}".replace(" ", "▁"), scores) == expected


@pytest.mark.parametrize(
    ("pattern", "name"), [(QWEN2, "qwen2"), (LLAMA3, "llama-bpe"), (O200K, "gpt-4o"), ("a+", "")]
)
def test_how_text_is_split(pattern: str, name: str, tmp_path: Path) -> None:
    made = over_bytes(pattern)
    assert split_name(json.loads(made.to_str())) == name
    if not name:
        told, notes = written(tmp_path, made)
        assert told["tokenizer.ggml.pre"] == "default"
        assert any("splits text in a way that has no name here" in note for note in notes)


def test_a_tokenizer_of_another_kind_is_left_out(tmp_path: Path) -> None:
    told, notes = written(tmp_path, Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    assert "tokenizer.ggml.tokens" not in told
    assert any("of the kind WordLevel, and BPE only is written" in note for note in notes)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "numbers beyond all rows": lambda d: d["model"]["vocab"].update(a=1 << 40),
    "negative numbers": lambda d: d["model"]["vocab"].update(a=-1),
    "merges of one": lambda d: d["model"].update(merges=["a", ["b"], 3, [1, 2]]),
    "no vocabulary": lambda d: d["model"].update(vocab=[]),
    "added tokens that are none": lambda d: d.update(added_tokens=[1, {"id": "x"}, {"content": 3}]),
    "a model that is a text": lambda d: d.update(model="BPE"),
    "half a character": lambda d: d["model"]["vocab"].update({"\ud800": 5}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tokenizers_break_nothing(case: str, tmp_path: Path) -> None:
    document = json.loads(over_bytes().to_str())
    HOSTILE[case](document)
    source = saved("llama", tmp_path)
    (source / "tokenizer.json").write_text(json.dumps(document))
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf")
    assert fields(tmp_path / "m.gguf")["general.architecture"] == "llama"


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    (source / "tokenizer.json").write_text("{")
    with refused(ckptmap.CkptmapError, "CKM103", "tokenizer.json: cannot be read as JSON"):
        ckptmap.convert(source, tmp_path / "m.gguf", to="gguf")


def test_tokens_that_the_embedding_has_no_rows_for(tmp_path: Path) -> None:
    """As in Gemma 3 of 1B, whose tokenizer has one token more: llama.cpp loads no file with more tokens than rows."""
    made = over_bytes()
    made.add_tokens([AddedToken(f"<extra{n}>") for n in range(96 - made.get_vocab_size() + 2)])
    told, notes = written(tmp_path, made)
    assert told["tokenizer.ggml.tokens"] == [made.id_to_token(number) for number in range(96)]
    assert len(told["tokenizer.ggml.token_type"]) == 96
    assert any("2 of its tokens have numbers from 96 on" in note for note in notes)
