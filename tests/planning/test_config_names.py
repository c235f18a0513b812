"""`--to hf`: names that are none of the model that config.json describes are found out before a byte is
written, because transformers would initialize the weights at random."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

import ckptmap
from ckptmap.errors import PlanError
from tests.support.mapping_configs import TINY

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "llama"
    TINY["llama"].build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def state(llama: Path) -> State:
    return AutoModelForCausalLM.from_pretrained(llama).state_dict()  # type: ignore[no-any-return]


def saved(tensors: State, folder: Path, rename: Callable[[str], str] = str) -> Path:
    torch.save({rename(key): tensor for key, tensor in tensors.items()}, folder / "x.pt")
    return folder / "x.pt"


def told(source: Path, llama: Path, **options: Any) -> str:
    return " ".join(ckptmap.plan(source, "hf", config_from=llama, **options).notes)


@pytest.mark.parametrize(
    ("rename", "hint"),
    [
        (lambda key: f"student.{key}", "--strip-prefix student"),
        (lambda key: f"net.inner.{key}", "--strip-prefix net.inner"),
        (lambda key: key.replace("model.", "trunk/"), "--rename"),
    ],
)
def test_names_of_another_model_are_refused(
    rename: Callable[[str], str], hint: str, state: State, llama: Path, tmp_path: Path
) -> None:
    source = saved(state, tmp_path, rename)
    with pytest.raises(PlanError, match="fits llama, which config") as raised:
        ckptmap.convert(source, tmp_path / "out", to="hf", config_from=llama)
    assert raised.value.code == "CKM619" and hint in raised.value.hint
    assert not (tmp_path / "out").exists()
    assert ckptmap.plan(source, "hf").unresolved == []  # nothing says what the model is


def test_names_of_a_known_scheme_are_refused_with_the_option(llama: Path, tmp_path: Path) -> None:
    ckptmap.convert(llama, tmp_path / "meta.pt", to="full", names="meta")
    with pytest.raises(PlanError, match="1 of 21 names fits llama") as raised:
        ckptmap.plan(tmp_path / "meta.pt", "hf", config_from=llama)
    assert "--names hf" in raised.value.hint
    ckptmap.convert(tmp_path / "meta.pt", tmp_path / "o", to="hf", config_from=llama, names="hf")
    assert ckptmap.diff(tmp_path / "o", llama, values=True).equal


def test_the_names_of_a_base_model_fit(state: State, llama: Path, tmp_path: Path) -> None:
    """transformers adds `model.` itself, so that `LlamaModel.save_pretrained` can be loaded whole."""
    base = {key: tensor for key, tensor in state.items() if key.startswith("model.")}
    source = saved(base, tmp_path, lambda key: key.removeprefix("model."))
    assert "config.json describes" not in told(source, llama)


def test_a_choice_of_the_user_is_a_note(state: State, llama: Path, tmp_path: Path) -> None:
    """Names that were asked for, code of its own, and a directory that has them already."""
    assert "fits llama" in told(llama, llama, names="meta")
    source = saved(state, tmp_path, lambda key: f"student.{key}")
    config = json.loads((llama / "config.json").read_text())
    own = {**config, "auto_map": {"AutoModel": "modeling.Mine"}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert "none of 21 names fits llama" in told(source, tmp_path / "own.json")
    ckptmap.convert(source, tmp_path / "dir", to="hf")
    (tmp_path / "dir/config.json").write_text(json.dumps(config))
    assert "none of 21 names fits llama" in told(tmp_path / "dir", tmp_path / "dir")


def test_an_output_that_lacks_weights_of_its_config_says_so(
    state: State, llama: Path, tmp_path: Path
) -> None:
    assert "config.json describes" not in told(llama, llama)
    assert "config.json describes" not in told(saved(state, tmp_path), llama)
    some = told(llama, llama, include="model.layers.0.*")
    assert "config.json describes more than is there" in some
    assert "model.embed_tokens.weight is missing" in some
    half = {key: tensor for key, tensor in state.items() if ".1." not in key}
    assert "model.layers.1.input_layernorm.weight is missing" in told(saved(half, tmp_path), llama)
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "unknown.json").write_text(json.dumps({**config, "model_type": "mine"}))
    unknown = told(llama, tmp_path / "unknown.json", exclude="model.layers.0.*")
    assert "describes the whole model, and 9 weights of it stay behind" in unknown


def test_what_is_no_weight_of_the_model_is_not_missed(llama: Path, tmp_path: Path) -> None:
    """`n_averaged` of an AveragedModel: transformers looks for no such weight."""
    state = load_file(llama / "model.safetensors")
    averaged = saved({**state, "n_averaged": torch.tensor(3)}, tmp_path)
    assert "config.json describes" not in told(averaged, llama, drop="n_averaged")


def test_weights_of_another_size_are_told(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**config, "vocab_size": 77}))
    note = told(llama, tmp_path / "c.json")
    assert (
        "config.json describes lm_head.weight as [77, 120] (vocab_size 77), found [102, 120]: from_pre"
        in note
    )


def test_matrices_that_another_program_transposes_are_refused(tmp_path: Path) -> None:
    """nanoGPT has the names of transformers' GPT-2. A square matrix would load, transposed, without a word."""
    transposed = (
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    )
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2")
    ours = {
        k: v.t().contiguous() if k.endswith(transposed) else v
        for k, v in model.state_dict().items()
    }
    torch.save({"model": ours, "iter_num": 7}, tmp_path / "ckpt.pt")
    with pytest.raises(PlanError, match="the shapes are those of gpt2/nanogpt") as raised:
        ckptmap.convert(tmp_path / "ckpt.pt", tmp_path / "out", "hf", config_from=tmp_path / "gpt2")
    assert raised.value.code == "CKM619" and raised.value.hint == "add --names hf"
    ckptmap.convert(
        tmp_path / "ckpt.pt", tmp_path / "out", "hf", config_from=tmp_path / "gpt2", names="hf"
    )
    assert ckptmap.diff(tmp_path / "out", tmp_path / "gpt2", values=True).equal
    torch.save(model.state_dict(), tmp_path / "own.pt")
    assert "config.json describes" not in told(tmp_path / "own.pt", tmp_path / "gpt2")
    for strict in (True, False):
        live = GPT2LMHeadModel(config)
        report = ckptmap.load(tmp_path / "ckpt.pt", live, strict=strict)
        assert report.names == "gpt2/nanogpt -> hf"
        pairs = zip(live.state_dict().items(), model.state_dict().items(), strict=True)
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_a_class_without_the_output_layer_lacks_nothing(
    state: State, llama: Path, tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    classes = ["LlamaForSequenceClassification"]
    (tmp_path / "c.json").write_text(json.dumps({**config, "architectures": classes}))
    tensors = {**state, "score.weight": torch.ones(2, 120)}
    del tensors["lm_head.weight"]
    assert "config.json describes" not in told(saved(tensors, tmp_path), tmp_path / "c.json")


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    """A GGUF file describes its model, too, and the hint makes the config.json of it."""
    save_file({"w": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "m.gguf", to="gguf")
    with pytest.raises(PlanError, match=r"expected a config\.json, found .* b'GGUF'") as caught:
        ckptmap.plan(tmp_path / "m.safetensors", "hf", config_from=tmp_path / "m.gguf")
    assert f"ckptmap convert {tmp_path / 'm.gguf'} DIR --to hf" in str(caught.value.hint)
    ckptmap.plan(tmp_path / "m.safetensors", "gguf", config_from=tmp_path / "m.gguf")


def test_names_that_the_model_does_not_have_are_told(
    state: State, llama: Path, tmp_path: Path
) -> None:
    """transformers leaves them unread; what it knows and leaves out itself is no news."""
    heads = {**state, "value_head.weight": torch.ones(1, 120), "lm_head.bias": torch.ones(3)}
    said = told(saved(heads, tmp_path), llama)
    assert (
        "2 names do not belong to llama, the model of config.json, first 'value_head.weight'"
        in said
    )
    assert "--exclude value_head.weight" in said
    alone = {**state, "epoch_ema": torch.ones(1)}
    assert "1 name does not belong to llama" in told(saved(alone, tmp_path), llama)
    buffers = {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(15)}
    assert "belong to llama" not in told(saved(buffers, tmp_path), llama)
    assert "belong to llama" not in told(saved(state, tmp_path), llama)
    some = {key: tensor for key, tensor in heads.items() if ".1." not in key}
    said = told(saved(some, tmp_path), llama)
    assert "more than is there" in said and "value_head.weight" in said


@pytest.mark.parametrize("to", ["full-fp32", "fsdp2"])
def test_a_directory_that_is_not_its_config_is_told(to: str, llama: Path, tmp_path: Path) -> None:
    """Such an output has no config.json, so that nobody compares the two again."""
    name, folder = "model.layers.1.input_layernorm.weight", tmp_path / "in"
    assert not ckptmap.plan(llama, to).notes
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop(name)
    for state, said in ((tensors, f"{name} is missing"), (tensors | {name: norm[:4]}, "found [4]")):
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (note,) = ckptmap.plan(folder, to).notes
        assert note.startswith("config.json beside the source describes") and said in note


UNMAPPED: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    ),
    "base model": lambda: BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=64,
                  word_embed_proj_dim=32, max_position_embeddings=32)
    ),
}  # fmt: skip
"""Models of families that no mapping file is for. All names of OPT begin with `model.`."""


@pytest.mark.parametrize("kind", UNMAPPED)
@pytest.mark.parametrize("prefix", ["model", "net.student", "module"])
def test_a_prefix_is_found_where_no_mapping_file_knows_the_family(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    """The class itself knows its names. All of them were initialized at random, and nothing was said."""
    model = UNMAPPED[kind]()
    model.save_pretrained(tmp_path / "model")
    more = {"n_averaged": torch.tensor(3)} if prefix == "module" else {}
    source = saved(
        more | model.state_dict(),
        tmp_path,
        lambda key: f"{prefix}.{key}" if key not in more else key,
    )
    options: dict[str, Any] = {"to": "hf", "config_from": tmp_path / "model"}
    with pytest.raises(PlanError, match=r"fits .*, which config\.json") as raised:
        ckptmap.convert(source, tmp_path / "out", **options)
    assert raised.value.code == "CKM619" and f"--strip-prefix {prefix}" in raised.value.hint
    assert not (tmp_path / "out").exists()
    drop = list(more)
    ckptmap.convert(source, tmp_path / "out", strip_prefix=prefix, drop=drop, **options)
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("kind", UNMAPPED)
def test_names_as_they_are_need_no_option(kind: str, tmp_path: Path) -> None:
    model = UNMAPPED[kind]()
    model.save_pretrained(tmp_path / "model")
    source = saved(model.state_dict(), tmp_path)
    plan = ckptmap.plan(source, "hf", config_from=tmp_path / "model")
    assert not [note for note in plan.notes if "names" in note]


def test_the_config_of_another_model_is_named_as_that(llama: Path, tmp_path: Path) -> None:
    """The hint was `--names hf`, which is refused in its turn."""
    source = saved(TINY["gpt2"].build().state_dict(), tmp_path)
    with pytest.raises(PlanError, match="fits llama") as raised:
        ckptmap.plan(source, "hf", config_from=llama)
    assert re.search(r"those of gpt2/\w+: give the config.json of that model", raised.value.hint)
