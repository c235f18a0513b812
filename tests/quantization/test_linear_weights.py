"""The weights that are quantized by default: no embedding and no head, whatever their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import ckptmap
from ckptmap.quantization.linear_weights import is_linear_weight
from ckptmap.tensors import TensorInfo

MODELS = (
    "BertForMaskedLM", "BioGptForCausalLM", "ChatGLMLike", "DistilBertForMaskedLM",
    "ElectraForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "MusicgenForCausalLM",
    "SamModel", "T5ForConditionalGeneration", "T5GemmaForConditionalGeneration",
    "WhisperForConditionalGeneration", "XLMWithLMHeadModel", "XLNetLMHeadModel",
)  # fmt: skip
"""Between them they have every name that the rule knows of the 932 classes that were looked at."""


class ChatGLMLike(nn.Module):
    """`output_layer` and `tok_emb`, as Megatron, ChatGLM and minGPT call them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(128, 64)
        self.dense_h_to_4h = nn.Linear(64, 128)
        self.output_layer = nn.Linear(64, 128)

    def get_output_embeddings(self) -> nn.Module:
        return self.output_layer


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        if name == "ChatGLMLike":
            return ChatGLMLike()
        cls = getattr(transformers, name)
        return cls(cls.config_class())


@pytest.mark.parametrize("name", MODELS)
def test_no_embedding_and_no_head(name: str) -> None:
    model = on_meta(name)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    taken = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            info = TensorInfo(tuple(weight.shape), "bfloat16")
            if is_linear_weight(f"{path}.weight", info):
                assert not isinstance(module, nn.Embedding) and module is not head, path
                taken.append(path)
    assert len(taken) > 0


class Tied(nn.Module):
    """Names from which only the embedding can be told."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(128, 64)
        self.fc = nn.Linear(64, 64, bias=False)
        self.vocabulary = nn.Linear(64, 128, bias=False)
        self.vocabulary.weight = self.tok_emb.weight
        self.requires_grad_(False)


@pytest.mark.parametrize("to", ["full-nf4", "fsdp2-nf4", "full-int8", "hf-nf4"])
def test_a_head_that_is_one_tensor_with_an_embedding_stays_it(to: str, tmp_path: Path) -> None:
    """Quantized alone it would differ from the embedding, and no tied model could load both."""
    torch.manual_seed(0)
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    plan = ckptmap.plan(tmp_path / "m.pt", to)
    assert any("vocabulary.weight: is one tensor with tok_emb.weight" in n for n in plan.notes)
    plan.execute(tmp_path / "out")
    with ckptmap.open(tmp_path / "out") as ckpt:
        dense = {fqn for fqn, lazy in ckpt.items() if lazy.encoding == "dense"}
        assert dense == {"tok_emb.weight", "vocabulary.weight"}
    live = Tied()
    ckptmap.load(tmp_path / "out", live)
    assert live.vocabulary.weight is live.tok_emb.weight
    assert torch.equal(live.tok_emb.weight, model.tok_emb.weight)


def test_a_tie_is_no_reason_where_all_or_none_of_it_is_taken(tmp_path: Path) -> None:
    torch.save(Tied().state_dict(), tmp_path / "m.pt")
    cast = ckptmap.plan(tmp_path / "m.pt", "full-bf16")
    assert {step.target for step in cast.steps} == {"bfloat16"}
    asked = ckptmap.plan(tmp_path / "m.pt", "full-nf4", encode=("*",))
    assert {step.target for step in asked.steps} == {"nf4(float32)"}
    kept = ckptmap.plan(tmp_path / "m.pt", "full-nf4", no_encode=("fc.*",))
    assert {step.target for step in kept.steps} == {"float32"}
