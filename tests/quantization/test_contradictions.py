"""Statements about one quantized tensor that cannot both hold are refused, with both values.

bitsandbytes: keys, the JSON of `quant_state`, tables, sizes. torchao: metadata, records, pickles.
`test_ct_contradictions` has those of compressed-tensors, `test_fp8_static` those of float8 in tiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.protocols import Refusal
from ckptmap.quantization.torchao.int8 import Int8, Int8Scheme
from ckptmap.tensors import Opaque, TensorInfo
from ckptmap.testing.parts import stored
from tests.support.bnb_cases import bnb_file, calm, linear4bit, weight
from tests.support.int8_models import QUERY, bnb_int8, dense, torchao_hf
from tests.support.quantized_models import edited

Tensors = dict[str, torch.Tensor]


def refused(file: Path, *values: str) -> None:
    """Opening it must name the tensor, the file, both values and what to do."""
    with pytest.raises(SourceError) as caught:
        ckptmap.open(file)
    error = caught.value
    assert error.code == "CKM115" and "copy both again" in error.hint
    for text in ("weight", str(file), *values):
        assert text in error.message, (text, error.message)


# ------------------------------------------------------------------------------- bitsandbytes, 4 bits


def fourbit(file: Path, kind: str, double: bool, change: Callable[[Tensors], object]) -> Path:
    """A layer with a bias that bitsandbytes quantized and saved, but for one change."""
    layer = linear4bit(weight((64, 128), torch.bfloat16), kind, double)
    layer.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    tensors = {f"fc.{key}": value for key, value in layer.state_dict().items()}
    save_file(tensors, file)
    ckptmap.open(file).close()
    change(tensors)
    save_file(tensors, file)
    return file


def state_key(kind: str) -> str:
    return f"fc.weight.quant_state.bitsandbytes__{kind}"


def stating(kind: str, **change: Any) -> Callable[[Tensors], None]:
    """Change fields of the JSON."""

    def changed(tensors: Tensors) -> None:
        document = json.loads(bytes(tensors[state_key(kind)].tolist())) | change
        data = json.dumps(document).encode()
        tensors[state_key(kind)] = torch.tensor(list(data), dtype=torch.uint8)

    return changed


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize(("kind", "other"), [("nf4", "fp4"), ("fp4", "nf4")])
def test_the_key_and_the_json_name_one_kind(
    kind: str, other: str, double: bool, tmp_path: Path
) -> None:
    """Decoded by the key's table, it gave other values than bitsandbytes, which reads the JSON."""
    file = fourbit(tmp_path / "m.safetensors", kind, double, stating(kind, quant_type=other))
    refused(file, f"bitsandbytes__{kind} states {kind}", f"quant_type '{other}'")


def test_a_key_that_was_renamed(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        tensors[state_key("fp4")] = tensors.pop(state_key("nf4"))

    file = fourbit(tmp_path / "m.safetensors", "nf4", False, rename)
    refused(file, "__fp4 states fp4", "quant_type 'nf4'")


@pytest.mark.parametrize(("kind", "other"), [("nf4", "fp4"), ("fp4", "nf4")])
def test_the_table_of_the_other_kind(kind: str, other: str, tmp_path: Path) -> None:
    table = linear4bit(weight((64, 64), torch.bfloat16), other, False).state_dict()
    change = {"fc.weight.quant_map": table["weight.quant_map"]}
    file = fourbit(tmp_path / "m.safetensors", kind, False, lambda tensors: tensors.update(change))
    refused(file, f"{kind} decodes code 0 to", "quant_map has")


@pytest.mark.parametrize(
    ("change", "said", "shown"),
    [
        ({"shape": [128, 64]}, "shape [128, 64]", "bfloat16[64]"),
        ({"shape": [64, 64]}, "uint8[2048, 1]", "uint8[4096, 1]"),
        ({"blocksize": 128}, "float32[64]", "float32[128]"),
    ],
)
def test_a_json_of_other_sizes(
    change: dict[str, Any], said: str, shown: str, tmp_path: Path
) -> None:
    file = fourbit(tmp_path / "m.safetensors", "nf4", False, stating("nf4", **change))
    refused(file, said, shown)


@pytest.mark.parametrize("block", [32, 64])
def test_nested_blocks_of_another_size(block: int, tmp_path: Path) -> None:
    change = stating("nf4", nested_blocksize=block)
    file = fourbit(tmp_path / "m.safetensors", "nf4", True, change)
    refused(file, f"float32[{128 // block}]", "float32[1]")


@pytest.mark.parametrize("offset", [float("nan"), float("inf"), True, "1"])
def test_an_offset_that_is_no_number(offset: object, tmp_path: Path) -> None:
    file = fourbit(tmp_path / "m.safetensors", "nf4", True, stating("nf4", nested_offset=offset))
    with pytest.raises(
        SourceError, match=r"fc\.weight: nested offset .*expected numbers"
    ) as caught:
        ckptmap.open(file)
    assert ("not finite" in caught.value.hint) == isinstance(offset, float)


def test_bitsandbytes_makes_such_an_offset_of_one_nan(tmp_path: Path) -> None:
    values = calm((16, 64), torch.bfloat16)
    values[3, 5] = torch.nan
    file = bnb_file(tmp_path, values, double=True)
    with pytest.raises(SourceError, match=r"fc\.weight: nested offset nan") as caught:
        ckptmap.open(file)
    assert "quantized from values that were not finite" in caught.value.hint


# ------------------------------------------------------------------------------- LLM.int8


def test_scales_of_other_rows_than_the_codes(tmp_path: Path) -> None:
    bnb_int8(tmp_path, torch.float16)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {QUERY.replace("weight", "SCB"): torch.ones(32)}, file, {"format": "pt"})
    refused(file, "float32[64]", "float32[32]")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": False}, "states no part 'weight_format'"),
        ({"scale_dtype": "float16"}, "states float16 scales"),
        ({"block": [1, 32]}, "blocks [1, 32]"),
        ({"shape": [64, 32]}, "int8[64, 32]"),
    ],
)
def test_our_record_of_int8(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    bnb_int8(tmp_path / "in", torch.float16)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    file = tmp_path / "out" / "model.safetensors"
    restate(file, QUERY, lambda record: record.update(change))
    refused(file, said)


def restate(file: Path, fqn: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of one tensor, ours or torchao's, in the header of a file."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    if fqn in metadata:
        entry = json.loads(metadata[fqn])
        change(entry)
        metadata[fqn] = json.dumps(entry)
    else:
        key = next(key for key, text in metadata.items() if fqn in text and "scheme" in text)
        records = json.loads(metadata[key])
        change(records[fqn])
        metadata[key] = json.dumps(records)
    save_file(load_file(file), file, metadata)


# ------------------------------------------------------------------------------- torchao


@pytest.mark.parametrize(
    ("change", "said", "shown"),
    [
        ({"_tensor_data_names": ["qdata", "scale"]}, "states no part 'zero_point'", "zero_point"),
        ({"block_size": [1, 32]}, "block_size [1, 32]", "[64, 1]"),
        ({"block_size": [64, 64]}, "block_size [64, 64]", "[64, 1]"),
        ({"block_size": [1, 128]}, "block_size [1, 128]", "int8[64, 64]"),
        ({"_type": "Float8Tensor"}, "float8_e4m3fn[64, 64]", "int8[64, 64]"),
    ],
)
def test_torchaos_metadata(change: dict[str, Any], said: str, shown: str, tmp_path: Path) -> None:
    """Without its zero points an asymmetric tensor was decoded in silence."""
    torchao_hf(tmp_path, Int8WeightOnlyConfig(version=2))
    file = tmp_path / "model.safetensors"

    def changed(entry: dict[str, Any]) -> None:
        for key, value in change.items():
            (entry["_data"] if key == "block_size" else entry)[key] = value

    restate(file, QUERY, changed)
    refused(file, said, shown)


def test_scales_of_float8_in_other_dims_than_the_codes(tmp_path: Path) -> None:
    """torchao spreads [64] along the columns of codes [64, 64], not along the rows."""
    torchao_hf(tmp_path / "in", Float8WeightOnlyConfig())
    key = QUERY.removesuffix("weight") + "_weight_scale"
    path = edited(tmp_path / "in", tmp_path / "flat", lambda t: t.update({key: t[key].view(-1)}))
    with pytest.raises(
        SourceError, match=r"expected shape \[64, 1\], found float32\[64\]"
    ) as caught:
        ckptmap.open(path)
    assert "block_size [1, 64] of [64, 64]" in caught.value.message


def test_torchaos_scales_are_floating(tmp_path: Path) -> None:
    """Cut to integers by someone, they were multiplied with the codes."""
    torchao_hf(tmp_path, Int8WeightOnlyConfig(version=2))
    file = tmp_path / "model.safetensors"
    tensors, key = load_file(file), QUERY.replace("weight", "_weight_scale")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors | {key: tensors[key].to(torch.int32)}, file, metadata)
    with pytest.raises(SourceError, match=r"scales of dtype int32, expected floating values"):
        ckptmap.open(file)


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        ({"block_size": [1, 32]}, "block_size [1, 64]", "[1, 32]"),
        ({"dtype": {"_type": "torch.dtype", "_data": "float16"}}, '"bfloat16"', '"float16"'),
        ({"reduce_range": True}, "reduce_range false", "true"),
        ({"_type": "Float8Tensor"}, "_type Int8Tensor", "Float8Tensor"),
        ({"_tensor_data_names": ["qdata"]}, "['qdata', 'scale']", "['qdata']"),
    ],
)
def test_our_record_and_torchaos_entry(
    change: dict[str, Any], ours: str, theirs: str, tmp_path: Path
) -> None:
    """Ours was believed, and torchao reads its own: the two gave other values."""
    ckptmap.convert(dense(tmp_path / "dense"), tmp_path / "out", to="hf-int8")
    ckptmap.open(tmp_path / "out").close()
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    entry = json.loads(metadata[QUERY])
    for key, value in change.items():
        (entry if key.startswith("_") else entry["_data"])[key] = value
    save_file(load_file(file), file, metadata | {QUERY: json.dumps(entry)})
    with pytest.raises(SourceError, match=rf"^{QUERY}: its encoding record states ") as caught:
        ckptmap.open(tmp_path / "out")
    assert caught.value.code == "CKM115" and "convert the original" in (caught.value.hint or "")
    for text in (ours, "torchao's metadata states", theirs, str(file)):
        assert text in caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zero_dtype": ""}, "record states no part 'zero_point', but a._weight_zero_point int8"),
        ({"block": [1, 4]}, r"expected float32\[8, 4\], found float32\[8, 1\] in nowhere"),
        ({"scale_dtype": "float16"}, r"expected float16\[8, 1\], found float32\[8, 1\] in nowhere"),
        ({"shape": [8, 32]}, r"expected int8\[8, 32\], found int8\[8, 16\] in nowhere"),
    ],
)
def test_our_record_of_torchaos_tensors(change: dict[str, Any], said: str) -> None:
    info = TensorInfo((8, 16), "bfloat16")
    encoding = Int8((1, 16), zero_dtype="int8", kind="IntxUnpackedToInt8Tensor")
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal)
    tensors = {encoding.part_key("a.weight", name): stored(part) for name, part in parts.items()}
    record = json.loads(json.dumps(encoding.record(info)))
    assert len(Int8Scheme().group(tensors, {"a.weight": record})) == 1
    with pytest.raises(SourceError, match=rf"a\.weight: .*{said}"):
        Int8Scheme().group(tensors, {"a.weight": record | change})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8, 16), (16, 8)], ids=str)
def test_a_pickled_wrapper_and_the_tensor_inside(shape: tuple[int, ...], dtype: str) -> None:
    """LinearActivationQuantizedTensor states shape and dtype, and the tensor inside states them again."""
    info = TensorInfo((8, 16), "bfloat16")
    state = {
        "qdata": stored(TensorInfo((8, 16), "int8")), "scale": stored(TensorInfo((8, 1), "float32")),
        "zero_point": stored(TensorInfo((8, 1), "int8")), "block_size": [1, 16],
    }  # fmt: skip
    inner = Opaque("torchao.quantization", "Int8Tensor", (), state, info)
    outer = TensorInfo(shape, dtype)
    wrapper = Opaque(
        "torchao.quantization.linear_activation_quantized_tensor", "LinearActivationQuantizedTensor",
        (), {"original_weight_tensor": inner, "input_quant_func": None}, outer,
    )  # fmt: skip
    if outer == info:
        assert Int8Scheme().adopt("a.weight", wrapper) is not None
        return
    said = rf"a\.weight: its LinearActivationQuantizedTensor is {dtype}.* is bfloat16\[8, 16\]"
    with pytest.raises(SourceError, match=said):
        Int8Scheme().adopt("a.weight", wrapper)
