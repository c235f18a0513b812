"""`--to hf` of a transformers model in memory: the names and tensors that `save_pretrained` writes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import ckptmap
from tests.support.mapping_configs import TINY

JOINED = "experts.gate_up_proj"


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "gpt_neox"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's state dict in `memory.pt` and what `save_pretrained` writes in `disk`."""
    folder = tmp_path_factory.mktemp(request.param)
    model = TINY[request.param].build()
    model.save_pretrained(folder / "disk")
    torch.save(model.state_dict(), folder / "memory.pt")
    return folder


def read(folder: Path) -> Mapping[str, Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_state_dict_in_memory_becomes_what_save_pretrained_writes(
    saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = ckptmap.convert(saved / "memory.pt", out, to="hf", config_from=saved / "disk")
    assert same(read(out), read(saved / "disk"))
    assert any("as they are: --names hf-memory" in note for note in report.notes)
    assert ckptmap.verify(out, against=saved / "memory.pt").ok
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_names_of_a_model_in_memory_are_kept_where_that_is_asked_for(
    saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckptmap.convert(
        saved / "memory.pt", out, to="hf", config_from=saved / "disk", names="hf-memory"
    )
    assert same(read(out), torch.load(saved / "memory.pt"))


def test_other_setups_and_names_on_disk_stay_as_they_are(saved: Path) -> None:
    for source, to in ((saved / "memory.pt", "full"), (saved / "disk", "hf")):
        plan = ckptmap.plan(source, to, config_from=saved / "disk")
        assert list(plan.steps.fqns) == list(ckptmap.open(source))
        assert not [note for note in plan.notes if note.startswith("names")]


def notes(path: Path, **options: object) -> str:
    return " ".join(ckptmap.plan(path, "hf", **options).notes)  # type: ignore[arg-type]


def test_without_a_config_a_note_says_who_can_load_it(saved: Path) -> None:
    told = notes(saved / "memory.pt")
    assert "transformers 4, vLLM and SGLang do not find them" in told
    assert "--config-from PATH" in told


def test_what_the_rules_do_not_fit_stays_and_is_told(tmp_path: Path) -> None:
    """A key that no rule knows, an expert's tensor that is missing, a model without rules."""
    model = TINY["mixtral"].build()
    model.save_pretrained(tmp_path / "disk")
    state = model.state_dict()
    cases = {
        "more": ({**state, "v_head.weight": torch.ones(3)}, "no rule knows v_head.weight"),
        "less": ({k: v for k, v in state.items() if "1.mlp.experts.down" not in k}, "is missing"),
    }
    for name, (tensors, reason) in cases.items():
        torch.save(tensors, tmp_path / f"{name}.pt")
        plan = ckptmap.plan(tmp_path / f"{name}.pt", "hf", config_from=tmp_path / "disk")
        told = " ".join(plan.notes)
        assert reason in told and "transformers 4, vLLM and SGLang do not find them" in told
        assert set(plan.steps.fqns) == set(tensors)
    config = json.loads((tmp_path / "disk/config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**config, "model_type": "deepseek_v4"}))
    torch.save(state, tmp_path / "state.pt")
    told = notes(tmp_path / "state.pt", config_from=tmp_path / "other.json")
    assert f"{JOINED}: all experts of a layer in one tensor" in told and "--names FILE" in told


def test_without_a_config_the_last_line_is_the_command_that_adds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted, with the model's directory in place of MODEL, it makes a model that loads."""
    model = TINY["llama"].build()
    model.save_pretrained(tmp_path / "base")
    source, out = tmp_path / "a model.pt", tmp_path / "out"
    torch.save(model.state_dict(), source)
    assert main(["convert", str(source), str(out), "--to", "hf"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    told, _, command = last.partition(": ckptmap ")
    assert told == "add its config.json with"
    args = [str(tmp_path / "base") if arg == "MODEL" else arg for arg in shlex.split(command)]
    assert main(args) == 0
    assert "add its config.json" not in capsys.readouterr().out
    assert ckptmap.verify(out).ok
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("to", ["gguf", "gguf-q8_0"])
def test_a_model_without_its_head_gets_the_names_of_the_format(to: str, tmp_path: Path) -> None:
    """As embedding models are saved: `embed_tokens.weight` in place of `model.embed_tokens.weight`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    whole = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).bfloat16()
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "body")
    for name in ("whole", "body"):
        report = ckptmap.convert(tmp_path / name, tmp_path / f"{name}.gguf", to=to)
        assert any("without its head" in note for note in report.notes) is (name == "body")
        assert ckptmap.verify(tmp_path / f"{name}.gguf", against=tmp_path / name).ok
    a, b = (ckptmap.open(tmp_path / f"{name}.gguf") for name in ("whole", "body"))
    with a, b:
        assert set(a) == set(b) >= {"token_embd.weight", "blk.0.attn_q.weight"}
        assert all(torch.equal(a[key].read(), b[key].read()) for key in a)
