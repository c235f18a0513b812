"""The hint of a refusal of values that are not finite leads to an output, when it is pasted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import CkptmapError
from tests.corpus.models import tiny_llama
from tests.operations.test_as_not_finite import FILE, KEY, released
from tests.quantization.test_gptq import edited


def spoiled(form: str, folder: Path) -> Path:
    """A release with one scale of NaN."""
    if form.startswith("hf-ct-nvfp4"):
        return released(form, folder)
    if form.startswith(("gptq", "awq")):
        return edited(form, folder / "release", state=spoil)
    tiny_llama().save_pretrained(folder / "dense")
    ckptmap.convert(folder / "dense", folder / "form", to=form)
    (folder / "form" / "ckptmap.manifest.json").unlink()
    tensors = load_file(folder / "form" / FILE)
    spoil(tensors)
    save_file(tensors, folder / "form" / FILE, {"format": "pt"})
    return folder / "form"


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    stem = KEY.removesuffix("weight")
    (name,) = {f"{KEY}_scale", f"{stem}scales", f"{KEY}.absmax"} & tensors.keys()
    tensors[name].view(-1)[3] = float("nan")


def pasted(hint: str) -> list[list[str]]:
    """The options of each step that a hint tells: `--to X` and what follows it."""
    text = re.sub(r" \(-fp16, -fp32\)", "", hint)
    steps = re.findall(r"--to [\w-]+(?: --no-encode '?[\w.]+'?)?", text)
    return [shlex.split(step) for step in steps] or [["--no-encode", KEY]]


@pytest.mark.parametrize("to", ["hf-ct-int4", "hf-bnb-nf4", "fsdp2-nf4"])
@pytest.mark.parametrize("form", ["gptq-4", "awq-4-asym", "hf-bnb-nf4", "hf-ct-nvfp4"])
def test_what_the_hint_says_writes_an_output(form: str, to: str, tmp_path: Path) -> None:
    if form == to:
        return
    release = spoiled(form, tmp_path)
    with pytest.raises(CkptmapError, match=KEY) as caught:
        ckptmap.convert(release, tmp_path / "out", to=to)
    assert caught.value.code in ("CKM309", "CKM115") and "--no-encode" in caught.value.hint
    here = release
    for number, words in enumerate(pasted(caught.value.hint)):
        told = dict(zip(words[::2], words[1::2], strict=True))
        there = tmp_path / f"out{number}"
        keep = told.get("--no-encode", ())
        ckptmap.convert(here, there, to=told.get("--to", to), no_encode=keep)
        here = there
    with ckptmap.open(here) as ckpt:
        assert {ckpt[fqn].encoding for fqn in ckpt if ckpt[fqn].quantized} - {ckpt[KEY].encoding}
