"""Checkpoints whose names differ from the live model's: transformers 5 stacks experts that its files
hold one by one, and Meta's names are not those of the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.integrations.transformers import resume
from tests.integrations.test_integrations import trainer
from tests.support.mapping_configs import TINY

STACKED = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox")


def emptied(model: Any) -> Any:
    """The same, every value lost."""
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


def equal(one: Any, two: Any) -> bool:
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("family", STACKED)
def test_a_model_saved_by_transformers_loads_under_its_names_in_memory(
    family: str, tmp_path: Path
) -> None:
    source, live = TINY[family].build(), emptied(TINY[family].build())
    source.save_pretrained(tmp_path / "saved")
    assert set(source.state_dict()) != set(load_file(tmp_path / "saved" / "model.safetensors"))
    report = ckptmap.load(tmp_path / "saved", live)
    assert equal(source, live) and report.names == f"{family}/hf -> {family}/hf-memory"
    assert not report.missing and not report.unexpected and report.names in str(report)
    with ckptmap.hooks.install(emptied(live)):
        live.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert equal(source, live)


def experts() -> Any:
    """Of sizes that its kernels can compute."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_a_trainer_goes_on_with_stacked_experts(tmp_path: Path) -> None:
    """State is by index: of the model's parameters, not of the file's."""
    whole = trainer(experts(), tmp_path / "a", 4, save_steps=2, weight_decay=0.1)
    whole.train()
    live = emptied(experts())
    made = trainer(live, tmp_path / "b", 4, save_strategy="no", weight_decay=0.1)
    done = resume(made, tmp_path / "a" / "checkpoint-2")
    assert done.report.names == "mixtral/hf -> mixtral/hf-memory"
    assert equal(made.model, whole.model)


def test_metas_names_with_moments(tmp_path: Path) -> None:
    source = TINY["llama"].build()
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
    words = torch.arange(8).view(1, 8)
    source(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    ckptmap.save(tmp_path / "saved", source, optimizer).wait()
    source.config.save_pretrained(tmp_path / "saved")
    ckptmap.convert(tmp_path / "saved", tmp_path / "meta.pt", to="full", names="meta")
    live = emptied(TINY["llama"].build())
    theirs = torch.optim.AdamW(live.parameters())
    report = ckptmap.load(tmp_path / "meta.pt", live, theirs)
    assert equal(source, live) and report.names == "llama/meta -> hf"
    for one, two in zip(source.parameters(), live.parameters(), strict=True):
        for name, value in optimizer.state[one].items():
            assert torch.equal(theirs.state[two][name], value), name


def test_a_key_that_no_rule_knows(tmp_path: Path) -> None:
    """It is as unexpected as it would be by the model's names."""
    source = TINY["mixtral"].build()
    source.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"strange.thing": torch.ones(3)}, file)
    with pytest.raises(LoadError, match=r"1 unexpected: strange\.thing") as refused:
        ckptmap.load(tmp_path, source)
    assert refused.value.code == "CKM501"
    report = ckptmap.load(tmp_path, emptied(source), strict=False)
    assert report.unexpected == ("strange.thing",) and equal(source, TINY["mixtral"].build())


def test_a_report_says_how_names_were_changed(tmp_path: Path) -> None:
    """And exact=True, which compares what is recorded by name, says that it cannot."""
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    net = torch.nn.ModuleDict({"net": inner})
    optimizer = torch.optim.AdamW(net.parameters())
    inner(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    ckptmap.save(tmp_path / "run", net, optimizer, step=1, extra={"odd": torch.ones(2)}).wait()
    live = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    own = torch.optim.AdamW(live.parameters())
    before = [param.clone() for param in live.parameters()]
    with pytest.raises(LoadError, match=r"names were changed \(strip_prefix='net'\)") as refused:
        ckptmap.load(tmp_path / "run", live, own, strip_prefix="net", exact=True)
    assert refused.value.code == "CKM507" and "the saved names" in refused.value.hint
    assert "how tensors are cut" not in refused.value.message
    assert all(map(torch.equal, before, live.parameters()))
    report = ckptmap.load(tmp_path / "run", live, own, strip_prefix="net")
    assert report.renamed == "strip_prefix='net'" and len(report.inexact) == 1
    for text in (str(report), repr(report), report._repr_html_()):
        assert "strip_prefix=" in text and "net" in text
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == 1 and document["renamed"] == report.renamed
    assert document["loaded"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert document["extra"] == ["odd"] and document["state"]["loaded"]
    with ckptmap.open(tmp_path / "run", rename=["net.{x}={x}"]) as ckpt:
        assert ckptmap.load(ckpt, live, own).renamed == "rename=['net.{x}={x}']"
