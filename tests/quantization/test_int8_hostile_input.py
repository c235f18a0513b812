"""Hostile records, metadata and pickles of 8-bit codes raise one SourceError, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmap import registry
from ckptmap.errors import CkptmapError
from ckptmap.protocols import Refusal, part_key
from ckptmap.quantization.bnb.int8 import BnbInt8
from ckptmap.quantization.compressed_tensors.packed import Packed
from ckptmap.quantization.compressed_tensors.scheme import PlainFp8, PlainInt8
from ckptmap.quantization.deepseek_fp8 import Fp8
from ckptmap.quantization.torchao.float8 import Float8
from ckptmap.quantization.torchao.int8 import Int8
from ckptmap.quantization.torchao.subclass_reader import as_json
from ckptmap.tensors import Box, Chunk, Opaque, Region, StoredTensor, TensorInfo
from ckptmap.testing.parts import stored
from tests.support.examples import examples

INFO = TensorInfo((8, 16), "bfloat16")
MADE = (
    Int8((1, 16), kind="Int8Tensor"), Float8((1, 16), kind="Float8Tensor"), BnbInt8(), Fp8((8, 8)),
    PlainInt8((1, 16)), PlainFp8((1, 16), "bfloat16", "int8"), Packed((1, 4), bits=4),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats(allow_nan=False)
    | st.sampled_from(["", "int8", "float32", "int8x", "qdata", "Int8Tensor"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["_data", "dtype", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def group(found: Mapping[str, StoredTensor], records: Mapping[str, Any]) -> int:
    """How many groups all schemes find; only a CkptmapError may come."""
    left, count = dict(found), 0
    for scheme in registry.schemes():
        for _, keys in scheme.group(left, records):
            count += 1
            for key in keys:
                left.pop(key, None)
    return count


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> StoredTensor:
    """The part `weight_shape`, whose bytes are read and compared with the record."""
    file = tmp_path_factory.mktemp("shape") / "shape"
    file.write_bytes(b"".join(size.to_bytes(8, "little") for size in INFO.shape))
    region = Region.contiguous(str(file), 0, (2,), 8)
    return StoredTensor(TensorInfo((2,), "int64"), [Chunk(Box((0,), (2,)), region)])


def parts_of(encoding: Any, shape: StoredTensor) -> dict[str, StoredTensor]:
    parts = encoding.parts(INFO)
    assert not isinstance(parts, Refusal)
    return {
        part_key(encoding, "a.weight", name): shape if name == "shape" else stored(part)
        for name, part in parts.items()
    }


@pytest.mark.parametrize("encoding", MADE, ids=lambda e: f"{e.scheme}")
def test_a_record_that_was_not_touched_is_read(encoding: Any, shape: StoredTensor) -> None:
    record = json.loads(json.dumps(encoding.record(INFO)))
    assert group(parts_of(encoding, shape), {"a.weight": record}) == 1


@examples(60)
@given(encoding=st.sampled_from(MADE), data=st.data())
def test_records_that_lie(shape: StoredTensor, encoding: Any, data: st.DataObject) -> None:
    record = json.loads(json.dumps(encoding.record(INFO)))
    key = data.draw(st.sampled_from(sorted(set(record) - {"scheme"})))
    record[key] = data.draw(JSON)
    found = parts_of(encoding, shape)
    if data.draw(st.booleans()):
        found.pop(data.draw(st.sampled_from(sorted(found))))
    try:
        group(found, {"a.weight": record})
    except CkptmapError as error:
        assert error.code.startswith("CKM") and "a.weight" in error.message
        assert error.hint


@examples(60)
@given(JSON, JSON, st.sampled_from(["Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"]))
def test_torchao_metadata_that_lies(data: Any, names: Any, kind: str) -> None:
    record = {"scheme": "torchao", "kind": kind, "data": data, "names": names}
    found = parts_of(Int8((1, 16)), stored(INFO))
    try:
        group(found, {"a.weight": record})
    except CkptmapError as error:
        assert error.code == "CKM115" and "a.weight" in error.message


@examples(60)
@given(
    st.sampled_from(["qdata", "scale", "zero_point", "block_size", "act_quant_kwargs"]),
    JSON | st.just(stored(TensorInfo((), "int8"))) | st.just(stored(TensorInfo((0, 3), "float32"))),
    st.sampled_from(["Int8Tensor", "Float8Tensor", "Int8QuantizedTrainingLinearWeight"]),
    st.sampled_from([INFO, TensorInfo((), "float32"), TensorInfo((0, 4), "bfloat16"), None]),
)
def test_pickles_that_lie(key: str, value: Any, kind: str, info: TensorInfo | None) -> None:
    state: dict[str, Any] = {
        "qdata": stored(TensorInfo(INFO.shape, "int8")), "int_data": stored(INFO), "block_size": [1, 16],
        "scale": stored(TensorInfo((8, 1), "float32")), key: value,
    }  # fmt: skip
    leaf = Opaque("torchao.quantization", kind, (), state, info)
    for scheme in registry.schemes():
        try:
            scheme.adopt("a.weight", leaf)
        except CkptmapError as error:
            assert error.code == "CKM115" and "a.weight" in error.message


def test_a_pickle_that_holds_itself() -> None:
    wrapper = Opaque("torchao.quantization.x", "LinearActivationQuantizedTensor", (), {}, INFO)
    wrapper.state["original_weight_tensor"] = wrapper
    kwargs = Opaque("torchao", "QuantizeTensorToInt8Kwargs", (), {})
    kwargs.state["granularity"] = kwargs
    assert all(scheme.adopt("w", wrapper) is None for scheme in registry.schemes())
    assert as_json(kwargs)["_type"] == "QuantizeTensorToInt8Kwargs"
