"""Options and commands take hf:// URIs wherever they take a path, and fetch only headers by range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import save_file

import ckptmap
from tests.corpus.models import tiny_llama
from tests.support.hub.client import llama
from tests.support.hub.server import Hub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


def said(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    """The JSON document of a command line."""
    assert main([*args, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def fetched(hub: Hub) -> set[str]:
    """Names of the files of which more was sent than a range."""
    whole = [seen for seen in hub.asked("GET .*(/resolve/|/cdn/)") if not seen.range]
    return {seen.path.rsplit("/", 1)[-1] for seen in whole if seen.sent_nbytes}


def trained(path: Path) -> Path:
    """A training run's file: optimizer state by index, which only the model's order explains."""
    live = tiny_llama(False, torch.bfloat16)
    optimizer = torch.optim.AdamW(live.parameters())
    live(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    state = dict(sorted(live.state_dict().items()))  # not the model's own order
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize("option", ["--like", "--config-from"])
def test_a_config_on_the_hub_names_optimizer_state(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    hub.add("org/m", model)
    run = str(trained(tmp_path / "run.pt"))
    assert said(capsys, "plan", run, "--to", "full", code=1)["unresolved"]
    plan = said(capsys, "plan", run, "--to", "full", option, "hf://org/m")
    assert not plan["unresolved"] and plan["totals"]["tensors"] == 4 * 21
    assert "optimizer order: the transformers class of config.json" in plan["notes"]
    assert fetched(hub) <= {"config.json"}


def test_names_like_a_checkpoint_on_the_hub(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = torch.compile(tiny_llama(False, torch.bfloat16)).state_dict()
    (tmp_path / "there").mkdir()
    save_file(wrapped, tmp_path / "there/compiled.safetensors")
    hub.add("org/compiled", tmp_path / "there")
    args = ["convert", str(model), str(tmp_path / "out.pt"), "--to", "full"]
    said(capsys, *args, "--names-like", "hf://org/compiled/compiled.safetensors")
    assert set(torch.load(tmp_path / "out.pt")) == set(wrapped)
    assert not fetched(hub)


def test_scales_from_a_base_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    """What FSDP2 saves of a bitsandbytes model: packed codes alone."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 128)})
    state = torch.nn.ModuleDict({"up": layer.to("cpu")}).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    hub.add("org/base", tmp_path)
    torch.save({"up.weight": state["up.weight"]}, tmp_path / "naked.pt")
    naked, out = tmp_path / "naked.pt", tmp_path / "out.pt"
    report = ckptmap.convert(naked, out, to="full-fp32", base="hf://org/base")
    assert any("scales of 1 tensor are from hf://org/base" in note for note in report.notes)
    truth = ckptmap.open(tmp_path / "model.safetensors")["up.weight"].read().float()
    assert torch.equal(torch.load(out)["up.weight"], truth)
    assert ckptmap.verify(out, naked, base="hf://org/base").ok


def test_doctor_asks_what_a_model_on_the_hub_needs(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckptmap.convert(model, tmp_path / "nf4", to="hf-nf4")
    hub.add("org/nf4", tmp_path / "nf4")
    rows = said(capsys, "doctor", "--from", "hf://org/nf4", "--to", "fsdp2")["holding"]
    assert [(row["setup"], row["encoding"]) for row in rows] == [("fsdp2", "nf4")]
    assert not fetched(hub) - {"config.json", "ckptmap.manifest.json"}


def test_verify_and_diff_against_the_hub(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either way round, and what differs is the answer no."""
    hub.add("org/m", model)
    hub.add("org/other", llama(tmp_path / "other", dtype="float32"))
    ckptmap.convert(model, tmp_path / "out", to="hf-bf16")
    assert said(capsys, "verify", str(tmp_path / "out"), "--against", "hf://org/m")["ok"]
    said(capsys, "verify", str(tmp_path / "out"), "--against", "hf://org/other", code=1)
    assert said(capsys, "diff", "hf://org/m", str(model), "--values")["equal"]
    assert not said(capsys, "diff", str(model), "hf://org/other", code=1)["equal"]
    assert fetched(hub) <= {"model.safetensors.index.json"}


def test_mappings_from_the_hub(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A draft between two checkpoints, and a mapping tried on the model of a config.json."""
    hub.add("org/m", model)
    said(capsys, "mappings", "test", "llama/meta", "--config", "hf://org/m/config.json")
    args = ["mappings", "new", "--from", "hf://org/m", "--to", str(trained(tmp_path / "run.pt"))]
    assert main(args) == 0 and "layers" in capsys.readouterr().out
    assert fetched(hub) <= {"config.json", "model.safetensors.index.json"}
