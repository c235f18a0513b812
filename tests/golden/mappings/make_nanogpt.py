"""Writes `gpt2/nanogpt.tsv` with nanoGPT's own `GPT.from_pretrained`, and runs both models.

    python -m tests.golden.mappings.make_nanogpt CODE

CODE is a clone of karpathy/nanoGPT (3adf61e1 of 2025-11-12). Its sizes are fixed to the published
models, so that the configuration is replaced; the logits are compared with transformers' on the
same random weights, before the iota values go through it.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.golden.mappings.tables import ROOT, read, rows, write
from tests.support.mapping_configs import TINY, iota

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {"n_layer": 2, "n_head": 12, "n_embd": 120, "vocab_size": 102, "block_size": 64}


def from_pretrained(source: PreTrainedModel, code: str) -> Any:
    """nanoGPT's model with the weights of `source`, by its own conversion."""
    if code not in sys.path:
        sys.path.insert(0, code)
    nano = importlib.import_module("model")
    real = nano.GPTConfig
    hub = SimpleNamespace(from_pretrained=lambda _: source)
    with (
        patch.object(nano, "GPTConfig", lambda **_: real(**SIZES, bias=True, dropout=0.0)),
        patch("transformers.GPT2LMHeadModel", hub),
    ):
        return nano.GPT.from_pretrained("gpt2").eval()


def main() -> None:
    import torch

    source = TINY["gpt2"].build()
    tokens = torch.arange(24).reshape(2, 12)
    theirs = from_pretrained(source, sys.argv[1])(tokens, tokens)[0]
    # nanoGPT computes the exact gelu, transformers' GPT-2 its approximation by tanh.
    torch.testing.assert_close(theirs, source(tokens).logits, rtol=0, atol=1e-4)
    shapes = {key: row.shape for key, row in read(ROOT / "gpt2" / "hf.tsv").items()}
    source.load_state_dict(dict(iota(shapes)), strict=False)
    native = dict(from_pretrained(source, sys.argv[1]).state_dict())
    write(ROOT / "gpt2" / "nanogpt.tsv", rows(native), ["nanoGPT 3adf61e1: GPT.from_pretrained"])


if __name__ == "__main__":
    main()
