"""Output layers that no file holds: the directory tells transformers that they are tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.tied_heads import of_config, unstored
from tests.support.bnb_cases import refused

BERT = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=4, max_position_embeddings=64,
)  # fmt: skip
MODERN = BERT | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
DISTIL = dict(vocab_size=128, dim=64, hidden_dim=128, n_layers=1, n_heads=4)
FAMILIES = {"Bert": BERT, "Roberta": BERT, "DistilBert": DISTIL, "ModernBert": MODERN}


@pytest.mark.parametrize("scheme", ["bnb-nf4", "ct-fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_models_whose_head_is_tied(
    family: str, scheme: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    made: Any = getattr(transformers, f"{family}ForMaskedLM")
    made(config).bfloat16().save_pretrained(tmp_path / "in")
    model = made.from_pretrained(tmp_path / "in", dtype=torch.bfloat16).eval()
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to=f"hf-{scheme}")
    loaded, said = made.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(said.values()), said
    head = loaded.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert torch.equal(head.weight, model.get_input_embeddings().weight)
    words = torch.arange(1, 9)[None]
    with torch.no_grad():
        theirs, found = model(words).logits.float(), loaded(words).logits.float()
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), 0) > 0.97


def test_heads_are_those_that_are_not_stored() -> None:
    names = ["cls.predictions.transform.dense.weight", "cls.predictions.bias", "pre.lm_head.weight"]
    heads = of_config({"model_type": "bert"})
    assert heads == ("lm_head",) and unstored(names, heads) == ["cls.predictions.decoder"]
    stored = [*names, "cls.predictions.decoder.weight"]
    assert unstored(stored, heads) == []
    assert of_config({"text_config": {"tie_word_embeddings": False}}) == ()
    assert unstored(names, ()) == []
    assert of_config({"model_type": "whisper", "is_encoder_decoder": True}) == (
        "lm_head", "proj_out",
    )  # fmt: skip


def test_linear_layers_of_a_class_of_their_own_are_refused(tmp_path: Path) -> None:
    """Falcon's: transformers leaves them out, and could not load their codes."""
    config = transformers.FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.FalconForCausalLM(config).bfloat16().save_pretrained(tmp_path / "in")
    for scheme in ("bnb-nf4", "int8", "ct-int8"):
        with refused(PlanError, "CKM203", match=f"cannot be {scheme} .*falcon"):
            ckptmap.plan(tmp_path / "in", f"hf-{scheme}")
        ckptmap.plan(tmp_path / "in", f"full-{scheme}").require_resolved()
