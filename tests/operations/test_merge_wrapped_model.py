"""Merging what a model saved that peft has wrapped: base and adapter in one file, at any place in a module."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import ckptmap
from ckptmap.errors import PlanError, SourceError
from tests.docs.page import output_of_ckptmap
from tests.support.merge_cases import LINEARS, llama

State = dict[str, Tensor]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A wrapped model that was trained, its config in `adapter`, and the base as it was before in `base`."""
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("base")
    wrapped = get_peft_model(llama(), LoraConfig(r=2, target_modules=LINEARS))
    wrapped.save_pretrained("adapter")
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or name.endswith("norm.weight"):
            nn.init.normal_(parameter)
    return wrapped


def merged_by_peft(wrapped: nn.Module) -> State:
    return dict(wrapped.merge_and_unload().state_dict())  # type: ignore[operator]


def same(path: str, truth: State) -> None:
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth)
        for name in ckpt:
            assert torch.equal(ckpt[name].read(), truth[name]), name


@pytest.mark.parametrize("head", ["", "model", "net.policy"])
def test_it_is_merged_wherever_a_module_holds_it(trained: nn.Module, head: str) -> None:
    before = f"{head}." if head else ""
    state = {before + key: value for key, value in trained.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1}, "w.ckpt")
    code, printed = output_of_ckptmap("ckptmap inspect w.ckpt")
    assert code == 0 and "peft has wrapped" in printed and "merge BASE w.ckpt DST" in printed
    code, printed = output_of_ckptmap("ckptmap merge base w.ckpt out --adapter-config adapter")
    assert code == 0, printed
    assert "w.ckpt holds the whole model that peft has wrapped, not an adapter alone" in printed
    assert "21 weights are taken from there, not from base" in printed
    same("out", merged_by_peft(trained))


def test_modules_that_were_saved_whole_are_named(trained: nn.Module) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(llama(), config).save_pretrained("adapter")
    code, printed = output_of_ckptmap("ckptmap merge base adapter out")
    assert code == 0, printed
    assert "1 weight is taken whole from adapter, not from base: lm_head.weight" in printed
    assert "wrapped" not in printed


def test_it_is_no_base(trained: nn.Module) -> None:
    """The nearest name was a wrong answer. The hint works once it has a base."""
    torch.save(trained.state_dict(), "w.pt")
    code, printed = output_of_ckptmap("ckptmap merge w.pt adapter out")
    assert code == 2 and "error[CKM321]: w.pt: " in printed and "nearest" not in printed
    command = printed.partition("the model that was trained: ")[2].strip()
    assert "BASE" in shlex.split(command)
    code, printed = output_of_ckptmap(command.replace("BASE", "base").replace("DST", "out"))
    assert code == 0, printed
    same("out", merged_by_peft(trained))


def test_names_of_two_holders_are_not_guessed(trained: nn.Module) -> None:
    state = {f"{head}.{key}": value for head in "ab" for key, value in trained.state_dict().items()}
    torch.save(state, "two.pt")
    with pytest.raises((SourceError, PlanError)):
        ckptmap.merge("base", "two.pt", "out", adapter_config="adapter")
