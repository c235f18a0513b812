"""Tied heads go there and back under other names; scales of a base checkpoint and moments in 8 bits go
with them. Models, optimizers and quantized weights are the libraries' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import ckptmap
from ckptmap.errors import PlanError
from ckptmap.mapping.translate_state_dict import translate_names
from tests.support.resume_optimizers import ALL

State = dict[str, torch.Tensor]
LLAMA: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 80, "num_hidden_layers": 1,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 80, "n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(**changed: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changed}))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**GPT2))


def read(path: Path) -> State:
    with ckptmap.open(path) as ckpt:
        return {fqn: ckpt[fqn].read() for fqn in ckpt}


def trained(model: PreTrainedModel, folder: Path, optimizer: Any) -> Path:
    """A training checkpoint as torch users save it, config.json beside it."""
    folder.mkdir()
    for step in range(2):
        tokens = torch.randint(0, 80, (2, 6), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.save_pretrained(folder)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "train.pt")
    return folder / "train.pt"


# --------------------------------------------------------------------------- tied heads


def test_nanogpt_names_in_a_directory_keep_the_head(tmp_path: Path) -> None:
    """config.json ties names of the hub's, and says nothing of nanoGPT's, which are the same."""
    gpt2().save_pretrained(tmp_path / "hf")
    there, back = tmp_path / "there", tmp_path / "back"
    ckptmap.convert(tmp_path / "hf", there, to="hf", names="nanogpt")
    state = load_file(there / "model.safetensors")
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    ckptmap.convert(there, back, to="hf", names="hf", config_from=str(tmp_path / "hf"))
    assert "lm_head.weight" not in load_file(back / "model.safetensors")
    for path, against in ((there, "hf"), (back, "there"), (back, "hf")):
        assert ckptmap.verify(path, tmp_path / against).ok
    GPT2LMHeadModel.from_pretrained(back)


def test_nanogpt_names_without_the_head(tmp_path: Path) -> None:
    """As writers leave it that store one storage once; shapes do not tell it from the hub's then."""
    gpt2().save_pretrained(tmp_path / "hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "there", to="hf", names="nanogpt")
    state = load_file(tmp_path / "there" / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "bare.safetensors")
    config = str(tmp_path / "hf")
    ckptmap.convert(tmp_path / "bare.safetensors", tmp_path / "back", to="hf", names="hf",
                    names_from="nanogpt", config_from=config)  # fmt: skip
    assert ckptmap.verify(tmp_path / "back", tmp_path / "hf").ok
    (tmp_path / "untied.json").write_text(
        (tmp_path / "hf" / "config.json")
        .read_text()
        .replace('embeddings": true', 'embeddings": false')
    )
    with pytest.raises(PlanError, match=r"lm_head\.weight is missing"):
        ckptmap.plan(tmp_path / "bare.safetensors", "full", names="hf", names_from="nanogpt",
                     config_from=str(tmp_path / "untied.json"))  # fmt: skip


@pytest.mark.parametrize(
    ("build", "names"),
    [(llama, "torchtune"), (llama, "megatron"), (llama, "meta"), (gpt2, "megatron"), (gpt2, "nanogpt")],
)  # fmt: skip
def test_a_tied_model_with_optimizer_there_and_back(build: Any, names: str, tmp_path: Path) -> None:
    """The original has the head, the way back leaves it out where its scheme does: its bytes are the
    embedding's, or verification says so."""
    model = build() if build is gpt2 else build(tie_word_embeddings=True)
    source = trained(model, tmp_path / "in", torch.optim.AdamW(model.parameters()))
    there, back = tmp_path / "there", tmp_path / "back"
    config = str(source.parent)
    ckptmap.convert(source, there, to="fsdp2", names=names, world_size=2)
    ckptmap.convert(there, back, to="full", names="hf", config_from=config)
    for path, against in ((there, source), (back, there), (back, source)):
        report = ckptmap.verify(path, against)
        assert report.ok, report.problems
    with ckptmap.open(back) as ckpt, ckptmap.open(source) as original:
        assert {len(found.optimizer) for found in (ckpt, original)} == {len(original) - 1}
        apart = "lm_head.weight" in ckpt
    saved = torch.load(source, weights_only=True)
    saved["model"]["lm_head.weight"] = saved["model"]["lm_head.weight"] + 1
    torch.save(saved, tmp_path / "other.pt")
    report = ckptmap.verify(back, tmp_path / "other.pt")
    assert len(report.problems) == 1 and report.problems[0].startswith("lm_head.weight: ")
    assert apart == ("differ" in report.problems[0])


# --------------------------------------------------------------------------- scales from a base


@pytest.fixture(scope="module", params=["nf4", "int8"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bitsandbytes' weights in a transformers model: saved whole, and as FSDP2 holds them, which
    are the parameters alone, without their scales."""
    folder = tmp_path_factory.mktemp(request.param)
    llama(hidden_size=128, num_attention_heads=8).bfloat16().save_pretrained(folder / "dense")
    asked = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[request.param]
    model = LlamaForCausalLM.from_pretrained(
        folder / "dense", quantization_config=asked, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "base")
    torch.save({name: p.data for name, p in model.named_parameters()}, folder / "naked.pt")
    return folder


@pytest.mark.parametrize(("to", "names"), [("full", "meta"), ("full-bf16", "gpt-fast")])
def test_scales_are_restored_before_names_are_translated(
    to: str, names: str, quantized: Path, tmp_path: Path
) -> None:
    """A payload has not the shape by which its name is known, until its scales say what it is."""
    out, base = tmp_path / "out", quantized / "base"
    config = str(quantized / "dense")
    report = ckptmap.convert(
        quantized / "naked.pt", out, to=to, names=names, base=str(base), config_from=config
    )
    assert any(note.startswith("scales of 7 tensors are from") for note in report.notes)
    found = read(out)
    expected = translate_names(read(base), names, config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key].to(found[key])) for key in found)
    assert ckptmap.verify(out, quantized / "naked.pt", base=base).ok
    assert ckptmap.verify(out, base).ok


def test_a_payload_under_other_names_asks_for_its_base(quantized: Path) -> None:
    config = str(quantized / "dense")
    if quantized.name.startswith("int8"):
        plan = ckptmap.plan(quantized / "naked.pt", "full-bf16", names="meta", config_from=config)
        assert {item.key for item in plan.unresolved} >= {"layers.0.attention.wq.weight"}
        assert all("--base PATH" in item.hint for item in plan.unresolved)
        return
    with pytest.raises(PlanError, match=r"expected \[32, 128\].*found \[2048, 1\]") as caught:
        ckptmap.plan(quantized / "naked.pt", "full-bf16", names="meta", config_from=config)
    assert caught.value.code == "CKM606" and "with --base PATH" in caught.value.hint


# --------------------------------------------------------------------------- moments in 8 bits


@pytest.fixture
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["ao8", "bnb8"])
def test_moments_in_8_bits_go_as_their_weights_go(kind: str, tmp_path: Path) -> None:
    """Decoded values, row for row where the weight's went, and back to the very same ones."""
    model = llama(hidden_size=256, intermediate_size=256, num_attention_heads=16)
    source = trained(model, tmp_path / "in", ALL[kind](model.parameters()))
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    config = str(source.parent)
    ckptmap.convert(source, there, to="full", names="meta")
    ckptmap.convert(there, back, to="full", names="hf", config_from=config)
    with ckptmap.open(source) as one, ckptmap.open(there) as two, ckptmap.open(back) as three:
        for moment in ("exp_avg", "exp_avg_sq"):
            before, after, again = (moments(ckpt, moment) for ckpt in (one, two, three))
            expected = translate_names(before, "meta", config)
            assert same(after, expected) and same(again, before)
        query = "model.layers.0.self_attn.q_proj.weight", "layers.0.attention.wq.weight"
        kinds = [
            ckpt.optimizer[key]["exp_avg"].encoding
            for ckpt, key in zip((one, two), query, strict=True)
        ]
        assert kinds[0] == kinds[1] != "dense"  # a row is a block: its codes move as they are
    for path, against in ((there, source), (back, there), (back, source)):
        report = ckptmap.verify(path, against)
        assert report.ok, report.problems


def moments(ckpt: ckptmap.Checkpoint, name: str) -> State:
    return {key: ckpt.optimizer[key][name].read() for key in ckpt.optimizer}


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )
