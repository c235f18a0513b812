"""`ckptmap merge` of what people train: QLoRA's checkpoints, vision towers, classifiers, tied weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import LoadError, RunError, SourceError
from ckptmap.operations.merge import merge, plan_merge
from ckptmap.operations.verify import verify
from tests.formats.huggingface.test_model_families import llava, t5
from tests.support.bnb_cases import refused
from tests.support.merge_cases import LINEARS, llama, save_adapter

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
    save_adapter(wrapped, folder / "adapter")
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


def tied_llama() -> Any:
    config = {**llama().config.to_dict(), "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def tied_llava() -> Any:
    made = llava()
    made.config.tie_word_embeddings = made.config.text_config.tie_word_embeddings = True
    return transformers.LlavaForConditionalGeneration(made.config)


def tied_t5() -> Any:
    torch.manual_seed(0)
    return t5()


SMALL = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}


def tied_gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))


def tied_openai() -> Any:
    return transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**SMALL))


def tied_mamba() -> Any:
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def tied_modernbert() -> Any:
    config = transformers.ModernBertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


HEAD, EMBEDDING = {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}


@pytest.mark.parametrize(
    ("make", "config", "to"),
    [
        (tied_llama, {"target_modules": ["q_proj"], **HEAD}, "hf"),
        (tied_llama, {"target_modules": ["q_proj", "lm_head"]}, "hf-bf16"),
        (tied_llama, {"target_modules": ["q_proj"], **EMBEDDING}, "hf"),
        (tied_llama, {"target_modules": ["lm_head"], **EMBEDDING}, "hf"),
        (tied_llava, {"target_modules": ["q_proj", "lm_head"]}, "hf"),
        (tied_gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}, "hf"),
        (tied_gpt2, {"target_modules": ["c_attn"], **HEAD}, "hf"),
        (tied_openai, {"target_modules": ["c_attn"], "modules_to_save": ["tokens_embed"]}, "hf"),
        (tied_mamba, {"target_modules": ["in_proj"], "modules_to_save": ["embeddings"]}, "hf"),
        (
            tied_modernbert,
            {"target_modules": ["Wqkv"], "modules_to_save": ["tok_embeddings"]},
            "hf",
        ),
    ],
)
def test_a_head_that_peft_unties_is_a_tensor_of_its_own(
    make: Any, config: dict[str, Any], to: str, tmp_path: Path
) -> None:
    """peft's own merge writes the head back into the embedding, or drops it; the truth is its model
    before it is merged."""
    torch.manual_seed(0)
    wrapped = trained(make(), tmp_path, **config).eval()
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", to)
    kind = type(wrapped.get_base_model())
    loaded, said = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert loaded.config.get_text_config().tie_word_embeddings is False
    given = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        theirs, found = wrapped(**given).logits, loaded(**given).logits
    tolerance = 0.05 if to == "hf-bf16" else 1e-4
    assert torch.allclose(theirs, found.float(), atol=tolerance, rtol=tolerance)
    head = loaded.get_output_embeddings().weight
    assert not torch.equal(head, loaded.get_input_embeddings().weight)


def test_a_base_without_a_config_takes_that_which_is_given(tmp_path: Path) -> None:
    """A DCP directory has none; without it nobody can tell, which is said."""
    wrapped = trained(tied_llama(), tmp_path, target_modules=["q_proj"], **EMBEDDING).eval()
    (tmp_path / "base").rename(tmp_path / "hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "base", to="fsdp2", world_size=2)
    (tmp_path / "base" / "config.json").unlink(missing_ok=True)
    args = (tmp_path / "base", tmp_path / "adapter")
    assert "which only a config.json can tell" in str(plan_merge(*args, "full"))
    merge(*args, tmp_path / "out", "hf", config_from=str(tmp_path / "hf"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    given = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        assert torch.allclose(wrapped(**given).logits, loaded(**given).logits, atol=1e-4)
    report = verify(tmp_path / "out", tmp_path / "base", adapter=tmp_path / "adapter")
    assert report.ok, report


def test_an_embedding_of_an_unknown_name_is_not_left_tied(tmp_path: Path) -> None:
    """Which matrix is of words says the size of the vocabulary; what its head is called nobody."""
    trained(tied_llama(), tmp_path, target_modules=["q_proj"], **EMBEDDING)
    for folder, name in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        file = tmp_path / folder / name
        tensors = {k.replace("embed_tokens", "words"): v for k, v in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("embed_tokens", "words"))
    with refused(SourceError, "CKM322", "model.words.weight, which the base ties to its head"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_a_classifier_has_no_head_of_words(tmp_path: Path) -> None:
    config = {**llama().config.to_dict(), "tie_word_embeddings": True, "pad_token_id": 0}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**config))
    trained(model, tmp_path, target_modules=["q_proj"], task_type="SEQ_CLS", **EMBEDDING)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "hf")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_head_that_changes_with_its_embedding_is_said(tmp_path: Path) -> None:
    """peft's merge changes both; what it trained kept the head, as a base does that has one."""
    wrapped = trained(tied_llama(), tmp_path, target_modules=["q_proj", "embed_tokens"]).eval()
    args = (tmp_path / "adapter", tmp_path / "out")
    said = " ".join(merge(tmp_path / "base", *args).notes)
    assert "the base ties its head to it, which changes with it as in peft's" in said
    own = tied_llama()
    own.load_state_dict(load_state(tmp_path / "base"))
    own.config.tie_word_embeddings = False
    own.lm_head.weight = torch.nn.Parameter(own.lm_head.weight.detach().clone())
    own.save_pretrained(tmp_path / "own")
    report = merge(tmp_path / "own", tmp_path / "adapter", tmp_path / "right")
    assert "its head" not in " ".join(report.notes)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "right")
    with torch.no_grad():
        given = {"input_ids": torch.arange(8)[None]}
        assert torch.allclose(wrapped(**given).logits, loaded(**given).logits, atol=1e-4)


def load_state(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def test_what_a_head_is_no_longer_tied_to_is_said(tmp_path: Path) -> None:
    trained(tied_llama(), tmp_path, target_modules=["lm_head"])
    said = str(plan_merge(tmp_path / "base", tmp_path / "adapter", "full"))
    assert "lm_head.weight is a tensor of its own, no longer tied to model.embed_tokens" in said
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out.pt", "full")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("saved", "code", "said"),
    [
        ("shared", "CKM322", r"shared.weight replaces .* ties to its head"),
        ("lm_head", "CKM321", r"the base has no lm_head.weight"),
    ],
)
def test_a_head_that_cannot_be_untied_is_refused(
    saved: str, code: str, said: str, tmp_path: Path
) -> None:
    """T5 computes otherwise where its head is a tensor of its own."""
    trained(tied_t5(), tmp_path, target_modules=["q"], modules_to_save=[saved])
    with refused(SourceError, code, said):
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


def test_what_a_wrapped_model_saved_is_not_for_a_plain_one(tmp_path: Path) -> None:
    wrapped = get_peft_model(llama(), LoraConfig(r=4, target_modules=LINEARS))
    ckptmap.save(tmp_path / "run", wrapped).wait()
    with refused(LoadError, "CKM501", "unexpected") as caught:
        ckptmap.load(tmp_path / "run", llama())
    assert "ckptmap merge" in caught.value.hint
