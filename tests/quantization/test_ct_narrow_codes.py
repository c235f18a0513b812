"""compressed-tensors' codes of 4 bits in whole bytes: what it writes where activations are quantized, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import SourceError
from tests.quantization.test_compressed_tensors import CASES
from tests.support.bnb_cases import same
from tests.support.int8_models import QUERY, compressed, dense, loaded, logits

FILE = "model.safetensors"


@pytest.mark.slow
def test_changed_values_get_codes_of_its_bits(tmp_path: Path) -> None:
    """The codes of the release are 4 bits wide, and those that --as makes are the library's own."""
    compressed(tmp_path / "release", *CASES["w4a8"])
    ckptmap.convert(dense(tmp_path / "dense"), tmp_path / "work", to="fsdp2", world_size=2)
    report = ckptmap.convert(tmp_path / "work", tmp_path / "back", as_=tmp_path / "release")
    assert report.fidelity["quantize"] == 7
    theirs, ours = load_file(tmp_path / "release" / FILE), load_file(tmp_path / "back" / FILE)
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        same(ours[key], value)
    with ckptmap.open(tmp_path / "back") as ckpt:
        assert int(ours[QUERY].min()) >= -8 and int(ours[QUERY].max()) <= 7
        same(ckpt[QUERY].read(), (ours[QUERY].bfloat16().view(64, 2, 32)
             * ours[f"{QUERY}_scale"].view(64, 2, 1)).view(64, 64))  # fmt: skip


def test_they_move_with_their_bits_into_8_bit_codes(tmp_path: Path) -> None:
    compressed(tmp_path / "in", *CASES["w4a8"])
    ckptmap.convert(tmp_path / "in", tmp_path / "ranks", to="fsdp2", world_size=3)
    ckptmap.convert(tmp_path / "ranks", tmp_path / "hf", to="hf", config_from=str(tmp_path / "in"))
    for key, value in load_file(tmp_path / "in" / FILE).items():
        same(load_file(tmp_path / "hf" / FILE)[key], value)
    report = ckptmap.convert(tmp_path / "in", tmp_path / "packed", to="hf-ct-int8")
    assert report.fidelity.get("quantize", 0) == 0
    assert torch.equal(logits(loaded(tmp_path / "packed")), logits(loaded(tmp_path / "in")))


def test_8_bit_codes_are_not_kept_where_the_release_has_4(tmp_path: Path) -> None:
    compressed(tmp_path / "release", *CASES["w4a8"])
    group, form, activations = CASES["w4a8"]
    wide = group.model_copy(update={"num_bits": 8})
    compressed(tmp_path / "wide", wide, form, activations)
    ckptmap.convert(tmp_path / "wide", tmp_path / "back", as_=tmp_path / "release")
    assert int(load_file(tmp_path / "back" / FILE)[QUERY].abs().max()) <= 8


@pytest.mark.parametrize("bits", [0, 9, "4"])
def test_bits_that_no_byte_holds(bits: object, tmp_path: Path) -> None:
    compressed(tmp_path, *CASES["w4a8"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    file.write_text(json.dumps(config))
    with pytest.raises(SourceError, match=f"num_bits {bits}.*have 8 bits"):
        ckptmap.open(tmp_path)
