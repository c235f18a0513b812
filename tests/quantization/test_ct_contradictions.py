"""compressed-tensors: its config, `weight_shape`, our record and the stored tensors must all agree."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import SourceError
from tests.quantization.test_compressed_tensors import CASES
from tests.support.int8_models import QUERY, compressed, dense

STEM = QUERY.removesuffix("weight")
FILE = "model.safetensors"


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return found


def restate(folder: Path, **changes: Any) -> None:
    """Change fields of the config's `weights`, or of the group itself where it is `format`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        (group_of(config) if key == "format" else group_of(config)["weights"])[key] = value
    file.write_text(json.dumps(config))


def refused(folder: Path, *values: str) -> None:
    """Opening it must name the tensor, the file, both values and what to do."""
    with pytest.raises(SourceError) as caught:
        ckptmap.open(folder)
    error = caught.value
    assert error.code == "CKM115"
    for text in ("_proj.weight", str(folder / FILE), *values):
        assert text in error.message, (text, error.message)
    assert "copy both again" in error.hint


@pytest.mark.parametrize(
    ("case", "changes", "said", "shown"),
    [
        ("w4-group", {"num_bits": 8}, "num_bits 8", "have 4 bits"),
        ("w8a16-packed", {"num_bits": 4}, "num_bits 4", "have 8 bits"),
        ("w8a8", {"num_bits": 16}, "num_bits 16", "have 8 bits"),
        ("w8a8", {"num_bits": [8]}, "num_bits [8]", "have 8 bits"),
        ("fp8", {"num_bits": {}}, "num_bits {}", "have 8 bits"),
        ("w4-group", {"group_size": 16}, "group_size 16", "[64, 4]"),
        ("w4-group", {"strategy": "channel", "group_size": None}, "'channel'", "[64, 4]"),
        ("w4-group", {"strategy": "tensor", "group_size": None}, "'tensor'", "[64, 4]"),
        ("w8a8", {"strategy": "group", "group_size": 32}, "'group', group_size 32", "[64, 1]"),
        ("fp8-tensor", {"strategy": "channel"}, "'channel'", "[1]"),
        ("fp8-block", {"block_structure": [32, 16]}, "[32, 16]", "[2, 4]"),
        ("w4-group", {"type": "float"}, "'float'", "'int'"),
        ("fp8", {"type": "int"}, "'int'", "'float'"),
        ("w4-group", {"format": "int-quantized"}, "'int-quantized'", "are packed"),
        ("fp8", {"format": "pack-quantized"}, "'pack-quantized'", "are not packed"),
        ("w4-group", {"symmetric": False}, "symmetric false", "no weight_zero_point"),
        ("w8a8", {"symmetric": False}, "symmetric false", "no weight_zero_point"),
        ("w4-group-asymmetric", {"symmetric": True}, "symmetric true", "is stored"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    case: str, changes: dict[str, Any], said: str, shown: str, tmp_path: Path
) -> None:
    compressed(tmp_path, *CASES[case])
    ckptmap.open(tmp_path).close()
    restate(tmp_path, **changes)
    refused(tmp_path, "config.json states", said, shown)


def test_a_width_that_gives_other_bits_than_the_config(tmp_path: Path) -> None:
    """num_bits 8 and 16 words a row are 64 columns. With 255 in weight_shape it was read as int2."""
    compressed(tmp_path, *CASES["w8a16-packed"])
    tensors = load_file(tmp_path / FILE)
    tensors[STEM + "weight_shape"] = torch.tensor([64, 255])
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    refused(tmp_path, "num_bits 8", "[64, 16]", "[64, 255] have 2 bits")


@pytest.mark.parametrize("shape", [[63, 64], [64, 65], [64, 300]])
def test_a_shape_that_the_packed_codes_do_not_have(shape: list[int], tmp_path: Path) -> None:
    compressed(tmp_path, *CASES["w4-group"])
    tensors = load_file(tmp_path / FILE)
    tensors[STEM + "weight_shape"] = torch.tensor(shape)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(SourceError, match=r"q_proj\.weight.*(weight_packed|weight_scale)"):
        ckptmap.open(tmp_path)


def test_column_groups_that_the_config_excludes(tmp_path: Path) -> None:
    compressed(tmp_path, *CASES["w4-group"])
    tensors = load_file(tmp_path / FILE)
    tensors[STEM + "weight_g_idx"] = (torch.arange(64) // 32).int()
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    ckptmap.open(tmp_path).close()
    restate(tmp_path, actorder="weight")
    refused(tmp_path, "actorder 'weight'", "weight_g_idx")


def test_the_group_that_names_the_module_is_the_one_that_must_agree(tmp_path: Path) -> None:
    """Another group may differ; where no group names the module, one of them must agree."""
    compressed(tmp_path, *CASES["w4-group"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    groups = config["quantization_config"]["config_groups"]
    other = json.loads(json.dumps(groups["group_0"]))
    other["weights"]["num_bits"] = 8
    groups["group_1"] = other | {"targets": ["re:.*never$"]}
    file.write_text(json.dumps(config))
    ckptmap.open(tmp_path).close()
    groups["group_1"]["targets"] = ["re:.*q_proj$"]
    file.write_text(json.dumps(config))
    refused(tmp_path, "num_bits 8", "have 4 bits")


# ------------------------------------------------------------------------------- our record


def with_record(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the encoding record of the query weight in the header of a file of ours."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    key = next(key for key, text in metadata.items() if QUERY in text and "scheme" in text)
    records = json.loads(metadata[key])
    change(records[QUERY])
    save_file(load_file(file), file, metadata | {key: json.dumps(records)})


def ours(folder: Path, to: str) -> Path:
    ckptmap.convert(dense(folder / "dense"), folder / "out", to=to)
    ckptmap.open(folder / "out").close()
    return folder / "out"


def test_weight_shape_is_compared_with_our_record(tmp_path: Path) -> None:
    out = ours(tmp_path, "hf-ct-int8")
    tensors = load_file(out / FILE)
    with safe_open(out / FILE, "pt") as opened:
        metadata = opened.metadata()
    tensors[STEM + "weight_shape"] = torch.tensor([64, 63])
    save_file(tensors, out / FILE, metadata)
    refused(out, "record states shape [64, 64]", "weight_shape is [64, 63]")


def test_our_record_is_compared_with_the_config(tmp_path: Path) -> None:
    for to in ("hf-ct-int8", "hf-ct-fp8"):
        out = ours(tmp_path / to, to)
        restate(out, num_bits=4)
        refused(out, "num_bits 4", "have 8 bits")


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("w4-group", {"bits": 8}, "expected"),
        ("w4-group", {"block": [1, 16]}, "expected"),
        ("w4-group-asymmetric", {"zero_dtype": ""}, "states no part 'zero_point'"),
        ("w8a8-asymmetric", {"zero_dtype": ""}, "states no part 'zero_point'"),
        ("fp8", {"shape": [64, 32]}, "expected"),
        ("fp8", {"scale_dtype": "float16"}, "expected"),
    ],
)
def test_our_record_is_compared_with_every_part(
    case: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    compressed(tmp_path / "in", *CASES[case])
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    ckptmap.open(tmp_path / "out").close()
    with_record(tmp_path / "out" / FILE, lambda record: record.update(change))
    refused(tmp_path / "out", said)


def test_headers_are_what_the_helper_changes(tmp_path: Path) -> None:
    """The tests above change one statement and nothing else."""
    out = ours(tmp_path, "hf-ct-int8")
    before = (out / FILE).read_bytes()
    with_record(out / FILE, lambda record: None)
    after = (out / FILE).read_bytes()
    assert (
        before[8 + struct.unpack("<Q", before[:8])[0] :]
        == after[8 + struct.unpack("<Q", after[:8])[0] :]
    )
