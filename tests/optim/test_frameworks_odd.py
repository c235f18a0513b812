"""What accelerate and Trainer save on two ranks goes on, after ckptmap, as the uninterrupted run, or is refused.

Weights after the next two steps are compared bit for bit, losses of Trainer exactly. Missing are
bitsandbytes and both Adafactors under FSDP2, whose own step fails on DTensors, and functions in groups (GrokAdamW) under FSDP2,
which accelerate's `save_state` cannot save.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptmap
from ckptmap.errors import PlanError
from tests.corpus.ranks import run_ranks

OUTPUTS = {"accelerate-full": "accelerate-full", "trainer": "trainer", "full.pt": "full"}
"""Name of an output in tests/ranks/accelerate_odd.py -> its setup."""
CODES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
BNB = [
    "bnb8", "bnb32", "bnb8-paged", "bnb32-paged", "lamb8", "lamb32", "lars8", "lars32", "lion8",
    "ademamix8",
]  # fmt: skip
ADAFACTORS = ["adafactor", "transformers-adafactor"]
NOT_CUT = [*ADAFACTORS, "grok"]
"""Those that no FSDP2 of accelerate 1.15 and torch 2.13 can step or load."""
SAVED = {
    "ddp": ["adamw", "_AdamW", "lion", "grok", *ADAFACTORS, *BNB, *CODES],
    "fsdp2": ["adamw", "_AdamW", "lion", *CODES],
}
MODULE = "tests.ranks.accelerate_odd"
GROUP = "optimizer.param_groups.0.grokking_signal_fns"


def refusal(name: str, output: str) -> str | None:
    """What the error says where no loader could take the state."""
    if name in CODES:
        return "torchao's load_state_dict takes its own pickled objects alone"
    if name in BNB and output == "accelerate-full":
        return "by which bitsandbytes cannot load it"
    return None


@pytest.mark.parametrize("kind", SAVED)
def test_accelerate(kind: str, tmp_path: Path) -> None:
    names = SAVED[kind]
    run_ranks(MODULE, 2, ["save", kind, str(tmp_path), *names], timeout=300)
    made = 0
    for name in names:
        for output, to in OUTPUTS.items():
            keys = "index" if to == "full" else None
            drop = [GROUP] if name == "grok" else []
            if drop:
                (no_object,) = ckptmap.plan(
                    tmp_path / name / "saved", to, optimizer_keys=keys
                ).unresolved
                assert f"--drop {GROUP}, and after load_state_dict" in no_object.hint
            no = refusal(name, output)
            if no is not None:
                with pytest.raises(PlanError, match=no) as caught:
                    ckptmap.plan(tmp_path / name / "saved", to, optimizer_keys=keys)
                assert caught.value.code == "CKM203" and "\n" not in str(caught.value)
            elif not (name in NOT_CUT and output == "accelerate-full"):
                source = tmp_path / name / "saved"
                plan = ckptmap.plan(source, to, optimizer_keys=keys, drop=drop)
                plan.execute(tmp_path / name / output)
                made += 1
    assert made == {"ddp": 35, "fsdp2": 9}[kind]
    run_ranks(MODULE, 2, ["resume", kind, str(tmp_path), *names], timeout=300)


@pytest.mark.parametrize(
    "optim",
    ["adamw_bnb_8bit", "lion_8bit", "adafactor", "adamw_torch_8bit"],
)
def test_trainer(optim: str, tmp_path: Path) -> None:
    """Under DDP, by way of an FSDP2 directory of three ranks; torchao's codes have no such way."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_ranks("tests.ranks.directories", 2, ["run", str(whole), "", optim])
    step = str(whole / "checkpoint-2")
    if optim == "adamw_torch_8bit":
        with pytest.raises(PlanError, match=r"torchao's load_state_dict.*resume\(trainer, path\)"):
            ckptmap.plan(step, "trainer")
        return
    ckptmap.convert(step, tmp_path / "dcp", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "trainer", to="trainer", config_from=step)
    resumed = ["resume", str(again), str(tmp_path / "trainer"), optim]
    run_ranks("tests.ranks.directories", 2, resumed)
    found, expected = (json.loads((p / "losses.json").read_text()) for p in (again, whole))
    assert [entry["step"] for entry in expected] == [1, 2, 3, 4]
    assert found == expected
