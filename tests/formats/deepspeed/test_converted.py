"""What DeepSpeed wrote is converted as any checkpoint is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from tests.golden import truth
from tests.golden.deepspeed.make_deepspeed import RUNS, Run
from tests.support.same_tensors import assert_same

GRID = [run for run in RUNS if run.name in ("z1w3", "z2w2", "z3w3", "z1-universal", "z3-universal")]


@pytest.mark.parametrize("run", GRID, ids=lambda run: run.name)
def test_to_hugging_face_in_bfloat16(samples: Path, tmp_path: Path, run: Run) -> None:
    source = shutil.copytree(samples / run.name, tmp_path / "run")
    (source / "config.json").write_text(json.dumps({"model_type": "own"}))
    ckptmap.convert(source, tmp_path / "out", to="hf-bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "own"
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in truth.weights(source).items():
        if name in found:  # of tied weights one is written
            kept = value if not value.is_floating_point() else value.bfloat16()
            assert_same(found[name], kept, name)
    left = {*truth.weights(source)} - {*found}
    assert left <= ({"head.weight"} if run.tied else set())


@pytest.mark.parametrize("run", GRID, ids=lambda run: run.name)
def test_to_fsdp2_with_the_optimizer(samples: Path, tmp_path: Path, run: Run) -> None:
    ckptmap.convert(samples / run.name, tmp_path / "out", to="fsdp2", world_size=8)
    with ckptmap.open(tmp_path / "out") as ckpt:
        for name, states in truth.moments(samples / run.name).items():
            for state, value in states.items():
                assert_same(ckpt.optimizer[name][state].read(), value, f"{name} {state}")
        assert len(ckpt.optimizer_groups) == run.groups
    assert ckptmap.diff(samples / run.name, tmp_path / "out", values=True).same


def test_inspect_and_plan_need_no_torch(samples: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ckptmap_cli.main import main\n"
        f"assert main(['inspect', {str(samples / 'z3w3')!r}]) == 0\n"
        f"assert main(['plan', {str(samples / 'z3w3')!r}, '--to', 'fsdp2', '--world-size', '8']) == 0\n"
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_no_tensor_is_read_to_plan(samples: Path, tmp_path: Path) -> None:
    """The bytes of the vectors may be anything: headers alone are read."""
    source = shutil.copytree(samples / "z2w2", tmp_path / "run")
    with ckptmap.open(source) as ckpt:
        stored = ckpt.group("embed.weight").parts[""]
        for chunk in stored.chunks:
            file = Path(chunk.region.file)
            data = bytearray(file.read_bytes())
            start = chunk.region.offset
            data[start : start + chunk.region.nbytes] = b"\xff" * chunk.region.nbytes
            file.write_bytes(data)
    ckptmap.plan(source, to="full")


def test_weights_of_fp32_are_compared_with_their_copies(samples: Path, tmp_path: Path) -> None:
    """Under fp32 the model's file holds the same values: it tells a file of another step."""
    with ckptmap.open(samples / "z2w1") as ckpt:
        weight = ckpt.group("embed.weight").parts[""]
        (replica,) = weight.replicas
        assert Path(replica.region.file).name == "mp_rank_00_model_states.pt"
        assert torch.equal(
            ckpt["embed.weight"].read(), truth.weights(samples / "z2w1")["embed.weight"]
        )
