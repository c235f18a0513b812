"""SentencePiece models become the keys that llama.cpp's converter wrote for them (`golden/foreign/make_foreign.py`)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptmap
from ckptmap.formats.gguf.sentence_pieces import NotSentencePiece, parse_pieces
from tests.formats.gguf.test_tokenizer import over_bytes, with_byte_tokens
from tests.formats.gguf.test_writer import fields
from tests.support.bnb_cases import refused
from tests.support.gguf_models import MODELS, build

FOREIGN = Path(__file__).parents[2] / "golden/foreign"
MODEL = (FOREIGN / "sentencepiece.model").read_bytes()
GOLDEN: dict[str, Any] = json.loads((FOREIGN / "sentencepiece.json").read_text())


def source(folder: Path, rows: int = 320) -> Path:
    llama = MODELS["llama"]
    made = replace(llama, config={**llama.config, "vocab_size": rows})
    build(made).save_pretrained(folder / "hf")
    shutil.copy(FOREIGN / "sentencepiece.model", folder / "hf/tokenizer.model")
    for name, content in GOLDEN["beside"].items():
        (folder / "hf" / name).write_text(json.dumps(content))
    return folder / "hf"


def told(folder: Path) -> tuple[dict[str, Any], list[str]]:
    report = ckptmap.convert(folder / "hf", folder / "m.gguf", to="gguf")
    found = fields(folder / "m.gguf")
    return {k: v for k, v in found.items() if k.startswith("tokenizer.")}, list(report.notes)


def test_the_keys_are_those_of_the_converter(tmp_path: Path) -> None:
    source(tmp_path)
    keys, notes = told(tmp_path)
    assert keys.pop("tokenizer.ggml.unknown_token_id") == 0, "the converter leaves it to llama.cpp"
    assert keys == GOLDEN["written"]
    assert not any("tokenizer" in note for note in notes)


def test_which_file_goes_first(tmp_path: Path) -> None:
    folder = source(tmp_path)
    with_byte_tokens().save(str(folder / "tokenizer.json"))
    assert told(tmp_path)[0]["tokenizer.ggml.scores"] == GOLDEN["written"]["tokenizer.ggml.scores"]
    (tmp_path / "m.gguf").unlink()
    over_bytes().save(str(folder / "tokenizer.json"))
    assert told(tmp_path)[0]["tokenizer.ggml.model"] == "gpt2"


def test_more_pieces_than_rows(tmp_path: Path) -> None:
    source(tmp_path, rows=300)
    keys, notes = told(tmp_path)
    assert keys["tokenizer.ggml.tokens"] == GOLDEN["written"]["tokenizer.ggml.tokens"][:300]
    assert any("10 of its tokens have numbers from 300 on" in note for note in notes)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it holds no pieces"),
        (MODEL[:100], "reaches beyond its message"),
        (b"\x0a\x03\x0a\x01\xff", "no UTF-8"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 64 bits"),
        (b"\x08\x01", "a number where a message was expected"),
        (b"\x0a\x02\x18\x09", "a type or a score"),
        (b"IQ== 0\nIg== 1\n", "."),  # tiktoken's, as Meta gives it with Llama 3
    ],
)  # fmt: skip
def test_what_is_no_sentencepiece_model(data: bytes, why: str) -> None:
    with pytest.raises(NotSentencePiece, match=why):
        parse_pieces(data)


def test_a_model_of_another_form_is_told(tmp_path: Path) -> None:
    folder = source(tmp_path)
    (folder / "tokenizer.model").write_bytes(MODEL[:100])
    keys, notes = told(tmp_path)
    assert "tokenizer.ggml.tokens" not in keys
    assert any("tokenizer.model is no SentencePiece model" in note for note in notes)


def test_a_far_number_needs_the_rows_to_be_known(tmp_path: Path) -> None:
    """Without them the list of tokens would be as long as the number says."""
    folder = source(tmp_path)
    made = json.loads(over_bytes().to_str())
    made["added_tokens"].append(
        {**made["added_tokens"][0], "id": (1 << 24) - 2, "content": "<far>"}
    )
    (folder / "tokenizer.json").write_text(json.dumps(made))
    keys, notes = told(tmp_path)
    assert len(keys["tokenizer.ggml.tokens"]) == 320
    assert any("1 of its tokens have numbers from 320 on" in note for note in notes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "vocab_size"}))  # fmt: skip
    with refused(ckptmap.CkptmapError, "CKM203", "config.json states no vocab_size"):
        ckptmap.convert(folder, tmp_path / "far.gguf", to="gguf", include=["output_norm.weight"])
