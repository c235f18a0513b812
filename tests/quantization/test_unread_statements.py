"""Codes that config.json alone tells from a form that is read. Once they were decoded as that form, to other values.

The parts are as auto-round 0.16.1 (MXINT4) and llm-compressor 0.14 (QuIP, SpinQuant) write them, and so are the
statements, cut down to what they say of the weights; the codes are drawn here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from tests.quantization.test_unsupported_schemes import assert_same_files
from tests.support.int8_models import dense

MXFP4 = {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32}
MXINT4 = {**MXFP4, "data_type": "mx_int"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": GROUP},
}  # fmt: skip


def transformed(*places: str) -> dict[str, object]:
    apply = [{"location": place, "targets": ["re:.*down_proj$"]} for place in places]
    return {**COMPRESSED, "transform_config": {"config_groups": {"R4": {"apply": apply}}}}


UNREAD = {
    "mxint4": (MXINT4, "MXINT4"),
    "of-one-layer": ({**MXFP4, "extra_config": {"fc": {"data_type": "mx_int"}}}, "MXINT4"),
    "auto-round": ({**MXFP4, "rotation_config": {"hadamard_type": "hadamard"}}, "rotated"),
    "inputs": (transformed("input", "weight_input"), "rotated .transform_config 'R4'"),
    "outputs": (transformed("weight_output", "output"), "rotated"),
}
READ = {
    "mxfp4": MXFP4,
    "compressed": COMPRESSED,
    "merged": transformed("weight_output", "weight_input"),
    "keys": transformed("q_attn", "k_cache"),
}


def written(folder: Path, stated: object) -> Path:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (32, 32), generator=draw).to(torch.uint8)
    scale = torch.randint(118, 124, (32, 2), generator=draw).to(torch.uint8)
    state = {"fc.weight_packed": codes, "fc.weight_scale": scale, "norm.weight": torch.ones(64)}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": stated}))
    return folder


@pytest.mark.parametrize("name", UNREAD)
def test_neither_decoded_nor_parted_from_what_states_them(name: str, tmp_path: Path) -> None:
    stated, said = UNREAD[name]
    source = written(tmp_path / "in", stated)
    with ckptmap.open(source) as ckpt:
        assert "fc.weight" not in ckpt and ckpt["fc.weight_packed"].dtype == "uint8"
        assert any(said.partition(" ")[0] in note for note in ckpt.notes)
    for to, why in (
        ("hf-bf16", "cannot be decoded"), ("full-nf4", "only config.json tells"),
        ("fsdp2", "only config.json tells"),
    ):  # fmt: skip
        with pytest.raises(ckptmap.CkptmapError, match=f"part of a {said}.*{why}") as caught:
            ckptmap.convert(source, tmp_path / "never", to=to)
        assert caught.value.code == "CKM202"
    ckptmap.convert(source, tmp_path / "out", to="hf")
    assert_same_files(source, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["quantization_config"] == stated


@pytest.mark.parametrize("name", READ)
def test_statements_that_change_no_value(name: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in", READ[name])
    with ckptmap.open(source) as ckpt:
        assert ckpt["fc.weight"].encoding == "ct-mxfp4"
    ckptmap.convert(source, tmp_path / "dcp", to="fsdp2", world_size=2)
    with ckptmap.open(tmp_path / "dcp") as ckpt:
        assert ckpt["fc.weight"].encoding == "ct-mxfp4"


def test_dense_weights_beside_a_transform_move(tmp_path: Path) -> None:
    source = dense(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = transformed("input", "weight_input")
    (source / "config.json").write_text(json.dumps(config))
    ckptmap.convert(source, tmp_path / "out", to="hf")
    assert_same_files(source, tmp_path / "out")
