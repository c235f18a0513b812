"""`ckptmap merge` of what people train: QLoRA's own checkpoints, towers, classifiers, ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import LoadError, RunError, SourceError
from ckptmap.merging import merge
from tests.bnb_cases import refused
from tests.merge_cases import LINEARS, llama
from tests.test_hf_families import llava

BERT = dict(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
    vocab_size=128, num_labels=3,
)  # fmt: skip


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))


def trained(model: Any, folder: Path, **config: Any) -> PeftModel:
    """The base saved, an adapter on it that was moved from where it began, saved beside it."""
    model.save_pretrained(folder / "base")
    wrapped = get_peft_model(model, LoraConfig(r=4, **config))
    maker = torch.Generator().manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=maker) * 0.05
    wrapped.save_pretrained(str(folder / "adapter"))
    return wrapped


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (llava, {"target_modules": ["q_proj", "linear_1"]}),
        (bert, {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}),
    ],
)
def test_is_bit_equal_to_peft(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """Llava's modules are called otherwise in memory, by which the adapter goes, than on disk; with
    `bias="all"` peft saves the bias of a whole module three times."""
    torch.manual_seed(0)
    wrapped = trained(make(), tmp_path, **config)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "hf")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "truth")
    truth, found = (load_file(tmp_path / n / "model.safetensors") for n in ("truth", "out"))
    assert truth.keys() == found.keys()
    for name, value in truth.items():
        assert torch.equal(value, found[name]), name


def test_an_embedding_that_peft_unties_is_refused(tmp_path: Path) -> None:
    model = llama()
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": True})
    tied = transformers.LlamaForCausalLM(config)
    trained(tied, tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with refused(SourceError, "CKM322", r"embed_tokens.weight takes the place .* ties to its head"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_the_checkpoint_of_a_qlora_run(tmp_path: Path) -> None:
    """It repeats the frozen NF4 weights: a replica of an NF4 base's codes, left beside a dense one."""
    base, nf4, run = tmp_path / "base", tmp_path / "nf4", tmp_path / "run"
    llama().bfloat16().save_pretrained(base)
    ckptmap.convert(base, nf4, to="fsdp2-nf4", world_size=1)
    model = llama().bfloat16().requires_grad_(False)
    ckptmap.load(nf4, model)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=LINEARS))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.01
    config = tmp_path / "adapter"
    wrapped.save_pretrained(str(config))
    ckptmap.save(run, wrapped, step=1).wait()
    for name in ("base", "nf4"):
        source, one, two = tmp_path / name, tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        merge(source, config, one, "hf-bf16", config_from=str(base))
        report = merge(source, run, two, "hf-bf16", adapter_config=config, config_from=str(base))
        assert ckptmap.diff(one, two, values=True).equal
        assert any("quantized copy" in note for note in report.notes) == (name == "base")
    other = llama().bfloat16()
    other.model.layers[0].mlp.up_proj.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    ckptmap.convert(tmp_path / "other", tmp_path / "wrong", to="fsdp2-nf4", world_size=1)
    with refused(RunError, "CKM310", r"up_proj.weight.*the replica .* differs"):
        merge(tmp_path / "wrong", run, tmp_path / "no", "hf-bf16", adapter_config=config)


def test_what_comes_first_is_said_where_peft_renamed_the_model(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    wrapped = get_peft_model(llama(), LoraConfig(r=4, target_modules=LINEARS))
    with refused(LoadError, "CKM501", "missing") as caught:
        ckptmap.load(tmp_path / "base", wrapped)
    assert "before get_peft_model" in caught.value.hint
    ckptmap.save(tmp_path / "run", wrapped).wait()
    with refused(LoadError, "CKM501", "unexpected") as caught:
        ckptmap.load(tmp_path / "run", llama())
    assert "ckptmap merge" in caught.value.hint
