"""Checkpoints that Lightning, Composer, litgpt, diffusers, sentence-transformers, timm and open_clip wrote.

Their own code made what lies in `golden/lightning`, `golden/composer`, `golden/litgpt` and `golden/hub`; the
scripts stand beside it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ckptmap
from ckptmap.errors import PlanError
from tests.corpus.models import scaler_block, seeded
from tests.golden import truth
from tests.support.paths import GOLDEN
from tests.support.same_tensors import assert_same

HUB = GOLDEN / "hub"
COMPOSER = ("state.callbacks", "state.timestamp", "rng")
"""Where Composer has time spans and numpy's random state: objects, which are never called."""

UNREAD = "an object of unknown class|a numpy array"


@dataclass(frozen=True)
class Run:
    """What training saved, below `golden`, and which keys of it hold objects."""

    folder: str
    path: str
    container: str
    drop: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        return GOLDEN / self.folder / self.path


RUNS = [
    Run("lightning/trainer", "trainer.ckpt", "torch-zip", ("hyper_parameters",)),
    Run("lightning/ema", "ema.ckpt", "torch-zip", ("hyper_parameters.optimizer",)),
    Run("lightning/model_parallel", "model_parallel", "lightning"),
    Run("lightning/fabric_fsdp", "fabric_fsdp", "lightning"),
    Run("composer/single", "run.pt", "torch-zip", COMPOSER),
    Run("composer/sharded", "run/ba1", "dcp", ("rng",)),
    Run("hub/timm_saver", "last.pth.tar", "torch-zip", ("args",)),
]
MODELS = ["diffusers/transformer", "diffusers_sharded/vae", "sentence_transformers/model",
          "timm_hub/model", "open_clip/model"]  # fmt: skip


def test_litgpt_numbers_storages_with_integers(tmp_path: Path) -> None:
    """`litgpt convert_from_litgpt` writes model.pth so; torch.load takes it."""
    source = GOLDEN / "litgpt" / "model.pth"
    expected = torch.load(source, weights_only=True)
    with ckptmap.open(source) as ckpt:
        assert_weights(ckpt, expected)
    ckptmap.convert(source, tmp_path / "out.pt", to="full")
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, value in expected.items():
        assert_same(written[name], value, name)


def assert_weights(ckpt: ckptmap.Checkpoint, expected: dict[str, Tensor]) -> None:
    assert set(ckpt) == set(expected)
    for name, value in expected.items():
        assert_same(ckpt[name].read(), value, name)


def assert_moments(ckpt: ckptmap.Checkpoint, run: Run) -> None:
    expected = truth.moments(GOLDEN / run.folder)
    assert expected and set(ckpt.optimizer) == set(expected)
    for name, states in expected.items():
        assert set(ckpt.optimizer[name]) == set(states)
        for state, value in states.items():
            assert_same(ckpt.optimizer[name][state].read(), value, f"{name} {state}")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.folder)
def test_weights_and_moments_are_those_of_the_run(run: Run) -> None:
    with ckptmap.open(run.source) as ckpt:
        assert ckpt.index.container == run.container
        assert_weights(ckpt, truth.weights(GOLDEN / run.folder))
        assert_moments(ckpt, run)


@pytest.mark.parametrize("to", ["full", "fsdp2"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.folder)
def test_training_goes_along(run: Run, to: str, tmp_path: Path) -> None:
    """All that holds objects is named, and left behind by its key or by that of a dict above it."""
    out = tmp_path / "out"
    if run.drop:
        with pytest.raises(PlanError, match=UNREAD) as refused:
            ckptmap.convert(run.source, out, to=to)
        assert "--drop" in refused.value.hint
    ckptmap.convert(run.source, out, to=to, world_size=1, drop=run.drop)
    with ckptmap.open(run.source) as before, ckptmap.open(out) as ckpt:
        assert_weights(ckpt, truth.weights(GOLDEN / run.folder))
        assert_moments(ckpt, run)
        dropped = tuple(f"{key}." for key in run.drop)
        kept = [p for p in before.other if not f"{'.'.join(map(str, p))}.".startswith(dropped)]
        assert len(ckpt.other) == len(kept)
    assert ckptmap.verify(out, against=run.source).ok


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.folder)
def test_weights_alone(run: Run, tmp_path: Path) -> None:
    """An entry that is not written needs no option: it is named, and nothing of it is built."""
    report = ckptmap.convert(run.source, tmp_path / "hf", to="hf")
    unread = [note for note in report.notes if note.startswith("left out, and not read: ")]
    assert bool(unread) == bool(run.drop)
    assert all(re.search(UNREAD, note) for note in unread)
    assert {key.partition(".")[0] for key in run.drop} <= {
        key.partition(".")[0] for key in report.dropped
    }
    with ckptmap.open(tmp_path / "hf") as ckpt:
        assert_weights(ckpt, truth.weights(GOLDEN / run.folder))
    assert ckptmap.verify(tmp_path / "hf", against=run.source).ok
    named = ckptmap.convert(run.source, tmp_path / "named", to="hf", drop=run.drop)
    assert not any("not read" in note for note in named.notes)


def test_a_module_among_hyper_parameters_is_left_behind_by_its_key() -> None:
    """Lightning only warns of it. Its tensors are no reason to refuse what was asked for."""
    run = RUNS[0]
    with ckptmap.open(run.source) as ckpt:
        found = {item.key: item.droppable for item in ckpt.refused}
        assert found == dict.fromkeys(
            (f"hyper_parameters.{key}" for key in ("net", "optimizer", "loss")), True
        )
        plan = ckptmap.plan(ckpt, "full", drop=["hyper_parameters.net"])
        assert plan.dropped["hyper_parameters.net"] == "--drop hyper_parameters.net"
        assert all("--drop hyper_parameters" in item.hint for item in plan.unresolved)


def test_the_average_is_the_model_and_what_was_trained_goes_along() -> None:
    with ckptmap.open(RUNS[1].source) as ckpt:
        saved = torch.load(RUNS[1].source, weights_only=False)
        assert any(not ckpt[k].read().equal(v) for k, v in saved["current_model_state"].items())
        for key, value in saved["current_model_state"].items():
            assert_same(ckpt.other["current_model_state", key].read(), value, key)


def test_two_optimizers_are_refused_and_the_weights_go_along(tmp_path: Path) -> None:
    source = GOLDEN / "lightning/gan/gan.ckpt"
    with pytest.raises(PlanError, match="the state of 2 optimizers"):
        ckptmap.convert(source, tmp_path / "out.pt", to="full")
    ckptmap.convert(source, tmp_path / "out.pt", to="full", optimizer="drop")
    with ckptmap.open(tmp_path / "out.pt") as ckpt:
        assert_weights(ckpt, truth.weights(GOLDEN / "lightning/gan"))
        assert ckpt.extra["global_step"] == 4


def test_meta_pt_of_lightning_is_extra() -> None:
    with ckptmap.open(RUNS[2].source) as ckpt:
        meta = torch.load(RUNS[2].source / "meta.pt", weights_only=False)
        for key in ("epoch", "global_step", "loops", "lr_schedulers"):
            assert ckpt.extra[key] == meta[key]
        assert ckpt.notes == ["left behind: hyper_parameters of meta.pt"]
    with ckptmap.open(RUNS[3].source) as ckpt:
        assert ckpt.extra == {"iteration": 2, "seed": 7}


@pytest.mark.parametrize("run", RUNS[4:6], ids=lambda run: run.folder)
def test_composers_state_and_random_states_are_kept(run: Run) -> None:
    """All but the random states lies in `state`, the optimizer under its class's name."""
    with ckptmap.open(run.source) as ckpt:
        assert ckpt.extra["state"]["run_name"] == "golden" and "rng" in ckpt.extra
        ranks = range(ckpt.world_size)
        assert list(ckpt.other) == [("rng", rank, "torch") for rank in ranks]
        for value in ckpt.other.values():
            torch.Generator().set_state(value.read())


# ------------------------------------------------------------------------------- models


def stored(name: str) -> dict[str, Tensor]:
    """By safetensors itself, each value as it was put into the model."""
    found: dict[str, Tensor] = {}
    for file in sorted((HUB / name).glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_are_what_they_were_filled_with(name: str) -> None:
    with ckptmap.open(HUB / name) as ckpt:
        expected = stored(name)
        assert_weights(ckpt, expected)
        prefix = "0.model." if "sentence" in name else ""
        for key, value in expected.items():
            assert_same(seeded(prefix + key, value, 0), value, key)


@pytest.mark.parametrize("name", MODELS)
def test_models_come_back_under_the_names_that_their_library_looks_for(
    name: str, tmp_path: Path
) -> None:
    """Through one `torch.save` file and back; nothing is left behind that is no second copy."""
    source, out = HUB / name, tmp_path / "out"
    limit = 8_000 if "sharded" in name else 10**9
    ckptmap.convert(source, tmp_path / "one.pt", to="full")
    ckptmap.convert(source, out, to="hf", max_shard_nbytes=limit)
    assert ckptmap.diff(tmp_path / "one.pt", out, values=True).equal
    files = {f.relative_to(source) for f in source.rglob("*") if f.is_file() and f.suffix != ".bin"}
    assert files == {f.relative_to(out) for f in out.rglob("*") if f.is_file()} - {
        Path("ckptmap.manifest.json")
    }
    for file in files:
        if file.suffix == ".json" and "index" not in file.name:
            assert json.loads((out / file).read_text()) == json.loads((source / file).read_text())


@pytest.mark.parametrize("name", [n for n in MODELS if "vae" not in n])
def test_models_are_quantized(name: str, tmp_path: Path) -> None:
    from torchao.quantization import to_nf4

    ckptmap.convert(HUB / name, tmp_path / "out", to="fsdp2-nf4")
    expected = stored(name)
    with ckptmap.open(tmp_path / "out") as ckpt:
        coded = [key for key in ckpt if ckpt[key].encoding == "nf4"]
        assert coded
        for key, value in expected.items():
            if key in coded:
                nf4 = to_nf4(value, 64, scaler_block(value.numel(), 1))
                value = nf4.get_original_weight()
            assert_same(ckpt[key].read(), value, key)


def test_coded_tensors_beside_the_weights_are_left_behind_by_their_key(tmp_path: Path) -> None:
    """As a QLoRA run keeps an average of itself."""
    from torchao.quantization import to_nf4

    average = {"w": to_nf4(torch.randn(64, 64), 64, 1)}
    torch.save({"model": {"w": torch.ones(64, 64)}, "ema": average}, tmp_path / "run.pt")
    with pytest.raises(PlanError, match=r"ema\.w: .*NF4Tensor") as refused:
        ckptmap.convert(tmp_path / "run.pt", tmp_path / "out.pt", to="full")
    assert refused.value.hint == "leave it behind with --drop ema.w"
    ckptmap.convert(tmp_path / "run.pt", tmp_path / "out.pt", to="full", drop=["ema"])


def test_open_clip_is_told_of_its_other_weights(tmp_path: Path) -> None:
    """Its `push_to_hf_hub` writes both forms."""
    shutil.copytree(HUB / "open_clip/model", tmp_path / "in")
    torch.save({}, tmp_path / "in/open_clip_pytorch_model.bin")
    plan = ckptmap.plan(tmp_path / "in", "hf")
    assert plan.notes == ("left behind: open_clip_pytorch_model.bin",)
    assert ckptmap.plan(HUB / "timm_hub/model", "hf").notes == ("left behind: pytorch_model.bin",)
