"""Releases whose scales are not finite: their codes go there and back as bytes, and are not decoded silently.

A scale of NaN is what a cast of NaN to e4m3, or to an exponent of e8m0, gives.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import CkptmapError, SourceError
from tests.corpus.models import tiny_llama

FILE = "model.safetensors"
KEY = "model.layers.0.mlp.down_proj.weight"
NAN = {"hf-ct-nvfp4": 0x7F, "hf-ct-mxfp4": 0xFF, "hf-ct-mxfp8": 0xFF}


def released(form: str, folder: Path) -> Path:
    tiny_llama().save_pretrained(folder / "dense")
    ckptmap.convert(folder / "dense", folder / "release", to=form)
    (folder / "release" / "ckptmap.manifest.json").unlink()
    tensors = load_file(folder / "release" / FILE)
    tensors[f"{KEY}_scale"].view(torch.uint8).view(-1)[3] = NAN[form]
    save_file(tensors, folder / "release" / FILE, {"format": "pt"})
    return folder / "release"


def same_bytes(a: Path, b: Path) -> bool:
    given, got = load_file(a / FILE), load_file(b / FILE)
    return given.keys() == got.keys() and all(
        torch.equal(given[key].view(-1).view(torch.uint8), got[key].view(-1).view(torch.uint8))
        for key in given
    )


@pytest.mark.parametrize("form", NAN)
def test_codes_that_were_kept_are_given_back(form: str, tmp_path: Path) -> None:
    release = released(form, tmp_path)
    ckptmap.convert(release, tmp_path / "work.pt", to="full")
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert not report.likeness.changed
    assert same_bytes(release, tmp_path / "back")


@pytest.mark.parametrize("form", NAN)
def test_the_hint_of_the_refusal_keeps_them(form: str, tmp_path: Path) -> None:
    release = released(form, tmp_path)
    with pytest.raises(SourceError, match=f"^{KEY}: scale") as caught:
        ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16")
    assert "\n" not in caught.value.message
    assert f"--no-encode {KEY}" in caught.value.hint
    assert not (tmp_path / "work.pt").exists()
    ckptmap.convert(release, tmp_path / "work.pt", to="full-bf16", no_encode=[KEY])
    report = ckptmap.convert(tmp_path / "work.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None
    assert not report.likeness.changed
    assert same_bytes(release, tmp_path / "back")


def test_a_code_that_differs_is_seen(tmp_path: Path) -> None:
    """Of equal forms the bytes are compared first; a difference is then one of values."""
    tiny_llama().save_pretrained(tmp_path / "dense")
    ckptmap.convert(tmp_path / "dense", tmp_path / "release", to="hf-ct-nvfp4")
    ckptmap.convert(tmp_path / "release", tmp_path / "work", to="hf")
    tensors = load_file(tmp_path / "work" / FILE)
    tensors[f"{KEY.removesuffix('weight')}weight_packed"].view(-1)[-1] ^= 1
    save_file(tensors, tmp_path / "work" / FILE, {"format": "pt"})
    (tmp_path / "work" / "ckptmap.manifest.json").unlink()
    report = ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=tmp_path / "release")
    assert report.likeness is not None
    assert set(report.likeness.changed) == {KEY}


def test_no_hint_of_as_names_an_option_that_it_refuses(tmp_path: Path) -> None:
    release = released("hf-ct-nvfp4", tmp_path)
    ckptmap.convert(tmp_path / "dense", tmp_path / "other", to="hf-ct-int4")
    with pytest.raises(CkptmapError, match=f"^{KEY}: scale") as caught:
        ckptmap.convert(release, tmp_path / "back", as_=tmp_path / "other")
    assert "--no-encode" not in caught.value.hint
