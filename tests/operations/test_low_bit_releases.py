"""A gpt-oss, a Kimi-K2 and a DeepSeek-V3 in the form of their release, trained under FSDP2 on 2 ranks, given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckptmap
from tests.corpus.ranks import run_ranks
from tests.support import gpt_oss, moe_releases

FILE = "model.safetensors"
RELEASES: Mapping[str, Callable[[Path], object]] = {
    "gpt-oss": gpt_oss.write,
    "kimi": moe_releases.kimi,
    "deepseek": moe_releases.deepseek,
}
NORM = "model.norm.weight"


def logits(path: Path) -> torch.Tensor:
    """What the model computes that transformers loads; every weight must be found."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(found.values()), found
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(torch.arange(2, 20)[None]).logits.float()
    return computed


def trained_weights(folder: Path) -> set[str]:
    """The weights, by their names in the release, whose bits training changed."""
    for name in ("work", "trained"):
        ckptmap.convert(
            folder / name, folder / f"{name}-hf", to="hf", config_from=folder / "config"
        )
    before, after = (load_file(folder / f"{name}-hf" / FILE) for name in ("work", "trained"))
    assert before.keys() == after.keys()
    return {key for key, value in before.items() if not torch.equal(value, after[key])}


def test_what_was_not_trained_is_the_bytes_of_the_release(tmp_path: Path) -> None:
    for form, make in RELEASES.items():
        (tmp_path / form).mkdir()
        make(tmp_path / form / "release")
        ckptmap.convert(
            tmp_path / form / "release", tmp_path / form / "work", to="fsdp2-bf16", world_size=2
        )
    run_ranks("tests.ranks.train_experts", 2, [str(tmp_path)], timeout=300)
    for form in RELEASES:
        check(form, tmp_path / form)


def check(form: str, folder: Path) -> None:
    """Check the way back: what is counted, every byte of what stayed, and what transformers loads."""
    ckptmap.convert(folder / "release", folder / "config", to="hf-bf16")
    changed = trained_weights(folder)
    experts = {key for key in changed if ".mlp.experts." in key}
    assert changed == {*experts, NORM} and experts, form
    report = ckptmap.convert(folder / "trained", folder / "back", as_=folder / "release")
    assert report.likeness is not None
    assert report.likeness.changed.keys() == changed
    assert {report.likeness.changed[key] for key in experts} == {"quantize"}
    whole = report.likeness.weights
    assert f"{whole - len(changed)} of {whole} weights byte-identical" in str(report)
    assert ckptmap.verify(folder / "back", against=folder / "trained").ok
    configs = [(folder / name / "config.json").read_bytes() for name in ("release", "back")]
    assert configs[0] == configs[1]
    given, got = (load_file(folder / name / FILE) for name in ("release", "back"))
    assert {k: (t.dtype, t.shape) for k, t in given.items()} == {
        k: (t.dtype, t.shape) for k, t in got.items()
    }
    stems = tuple(key.removesuffix(".weight") for key in changed)
    stayed = [key for key in given if not key.startswith(stems)]
    assert len(stayed) > len(given) // 2
    for key in stayed:
        assert torch.equal(
            given[key].reshape(-1).view(torch.uint8), got[key].reshape(-1).view(torch.uint8)
        ), key
    ckptmap.convert(folder / "back", folder / "decoded", to="hf-bf16")
    loaded, wanted = logits(folder / "back"), logits(folder / "trained-hf")
    assert torch.equal(loaded, logits(folder / "decoded")), form
    error = float((loaded - wanted).norm() / wanted.norm())
    moved = float((logits(folder / "work-hf") - wanted).norm() / wanted.norm())
    assert error < 0.1 and error < moved, (form, error, moved)
