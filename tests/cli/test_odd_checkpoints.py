"""Checkpoints as people have them at night, by their real writers: what is said helps, and the command that is
printed works when it is pasted."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptmap_cli.main import main
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptmap
from tests.corpus.models import tiny_llama
from tests.docs.page import output_of_ckptmap


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").symlink_to(base)
    monkeypatch.chdir(tmp_path)


class Trainer(nn.Module):
    """A module of somebody's that holds the model as `net`."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Linear(4, 2)


def lightning() -> dict[str, Any]:
    """What Lightning's Trainer saves of a module that holds the model as `model`."""
    state = {f"model.{key}": value for key, value in tiny_llama().state_dict().items()}
    return {"epoch": 1, "pytorch-lightning_version": "2.5.0", "state_dict": state, "loops": {},
            "callbacks": {}, "hyper_parameters": {"lr": 1e-3}}  # fmt: skip


PREFIXED = {
    "lightning": lightning,
    "average": lambda: {"ema": AveragedModel(tiny_llama()).state_dict(), "step": 5},
    "self.net": lambda: Trainer(tiny_llama()).state_dict(),
}


@pytest.mark.parametrize("kind", PREFIXED)
def test_the_command_for_a_config_takes_the_prefix_off(kind: str) -> None:
    """Without it, the second command would be refused in its turn."""
    torch.save(PREFIXED[kind](), "m.pt")
    code, printed = output_of_ckptmap("ckptmap convert m.pt out --to hf")
    command = printed.partition("add its config.json with: ")[2].strip()
    assert code == 0 and "--strip-prefix" in command
    code, printed = output_of_ckptmap(command.replace("MODEL", "base"))
    assert code == 0, printed
    assert loads("out")


def loads(path: str) -> bool:
    """Whether transformers finds every weight, with the values of `base`."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    expected = tiny_llama().state_dict()
    return all(torch.equal(expected[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("head", ["llm", ""])
@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
def test_a_model_that_peft_has_wrapped(head: str, config: bool) -> None:
    """Every name but those of the adapted layers fits: transformers would draw those at random."""
    wrapped = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.peft_config["default"].save_pretrained(".")
    module: nn.Module = nn.ModuleDict({head: wrapped}) if head else wrapped
    torch.save(module.state_dict(), "w.pt")
    line = "ckptmap convert w.pt out --to hf" + (" --config-from base" if config else "")
    code, printed = output_of_ckptmap(line)
    assert code == 2 and "error[CKM619]" in printed and "q_proj.base_layer.weight" in printed
    for command in printed.partition("into its base: ")[2].strip().split(", then "):
        code, printed = output_of_ckptmap(command.replace("BASE", "base").replace("DST", "out"))
        assert code == 0, printed
    assert loads("out")  # the adapter adds nothing yet


def test_a_file_older_than_torch_1_6_is_saved_again() -> None:
    torch.save(tiny_llama().state_dict(), "old model.pt", _use_new_zipfile_serialization=False)
    code, printed = output_of_ckptmap("ckptmap inspect 'old model.pt'")
    assert code == 2 and "error[CKM117]" in printed
    python, *args = shlex.split(printed.partition("current torch: ")[2])
    assert python == "python"
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    with ckptmap.open("old model.new.pt") as ckpt:
        assert len(ckpt) == len(tiny_llama().state_dict())


def test_what_is_packed_is_unpacked(base: Path) -> None:
    torch.save({"w": torch.ones(2)}, "m.pt")
    Path("m 1.pt.gz").write_bytes(gzip.compress(Path("m.pt").read_bytes()))
    shutil.make_archive("packed", "zip", base)
    shutil.make_archive("packed tar", "gztar", base.parent, base.name)
    packed = (("m 1.pt.gz", "gunzip"), ("packed.zip", "unzip"), ("packed tar.tar.gz", "tar"))
    for name, program in packed:
        code, printed = output_of_ckptmap(f"ckptmap inspect '{name}'")
        hint = shlex.split(printed.partition(": ")[2].rpartition(": ")[2])
        assert code == 2 and hint[0] == program and name in hint
        if shutil.which(program):
            subprocess.run(hint, check=True, capture_output=True)
            unpacked = {"gunzip": "m 1.pt", "unzip": "packed.unpacked", "tar": base.name}[program]
            assert main(["inspect", unpacked]) == 0


@pytest.mark.parametrize("command", ["inspect", "report", "convert --to full", "diff"])
def test_one_of_two_models(command: str) -> None:
    """A GAN: the hint names the dicts, and every command takes one of them."""
    parts = {"G": nn.Linear(4, 4), "D": nn.Linear(4, 1)}
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    optimizers = {
        f"opt{n}": torch.optim.Adam(p.parameters()).state_dict() for n, p in parts.items()
    }
    torch.save({**state, **optimizers, "it": 1}, "gan.pt")
    torch.save(state["G"], "g.pt")
    more = {"report": "-o r.html", "convert --to full": "out.pt", "diff": "g.pt"}.get(command, "")
    code, printed = output_of_ckptmap(f"ckptmap {command} gan.pt {more}")
    assert code == 2 and "several dicts could be the weights: G, D" in printed
    assert "such as --source-root 'G', or --source-root '' for all" in printed
    code, printed = output_of_ckptmap(f"ckptmap {command} gan.pt {more} --source-root G")
    assert code == 0, printed


def test_names_of_another_library_are_said_in_a_directory_for_transformers() -> None:
    """torchtitan's names load nowhere in transformers: a note says which they are, and the command renames them."""
    shapes = {
        "attention.wq": (4, 4),
        "attention.wk": (4, 4),
        "attention.wv": (4, 4),
        "attention.wo": (4, 4),
    }
    shapes |= {f"feed_forward.w{n}": (8, 4) if n != 2 else (4, 8) for n in (1, 2, 3)}
    shapes |= {"attention_norm": (4,), "ffn_norm": (4,)}
    state = {f"layers.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    state |= {
        "tok_embeddings.weight": torch.ones(6, 4),
        "output.weight": torch.ones(6, 4),
        "norm.weight": torch.ones(4),
    }
    dcp.save(state, checkpoint_id="titan")
    code, printed = output_of_ckptmap("ckptmap convert titan out --to hf")
    assert code == 0 and "which transformers does not load: add --names hf" in printed
    config = {
        "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 6,
    }  # fmt: skip
    Path("MODEL").mkdir()
    Path("MODEL/config.json").write_text(json.dumps(config))
    command = printed.partition("add its config.json with: ")[2].strip()
    code, printed = output_of_ckptmap(command)
    assert code == 0 and "names: llama/meta -> hf" in printed, command
    assert "which transformers does not load" not in printed
