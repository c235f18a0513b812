"""transformers' own `save_pretrained`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.corpus.case import case
from tests.corpus.models import llama_truth, tiny_llama

FP32, BF16 = torch.float32, torch.bfloat16
TIED_NAMES = (("lm_head.weight", "model.embed_tokens.weight"),)
TIED_NOTE = "lm_head.weight is not stored: transformers ties it by the config"


def write_tokenizer(folder: Path) -> None:
    """A real fast tokenizer of 6 words, as every published model carries one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ("<unk>", "<s>", "</s>", "a", "b", "c")
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@case("hf_bf16", 1, "hf", truth=partial(llama_truth, False, BF16), notes="with a tokenizer")
def hf_bf16(path: Path) -> None:
    tiny_llama(False, BF16).save_pretrained(path)
    write_tokenizer(path)


@case(
    "hf_tied_fp32", 1, "hf", truth=partial(llama_truth, True, FP32), tied=TIED_NAMES,
    notes=TIED_NOTE,
)  # fmt: skip
def hf_tied_fp32(path: Path) -> None:
    tiny_llama(True, FP32).save_pretrained(path)


@case("hf_sharded_fp32", 1, "hf", truth=partial(llama_truth, False, FP32))
def hf_sharded_fp32(path: Path) -> None:
    tiny_llama(False, FP32).save_pretrained(path, max_shard_size="100KB")


@case(
    "hf_sharded_tied_bf16", 1, "hf", truth=partial(llama_truth, True, BF16), tied=TIED_NAMES,
    notes=TIED_NOTE + "; with a tokenizer",
)  # fmt: skip
def hf_sharded_tied_bf16(path: Path) -> None:
    tiny_llama(True, BF16).save_pretrained(path, max_shard_size="60KB")
    write_tokenizer(path)
