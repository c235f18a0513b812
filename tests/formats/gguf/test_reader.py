"""GGUF files as the `gguf` package writes them: names, shapes, bytes, metadata, splits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.formats.gguf.block_types import BY_NAME
from ckptmap.operations.inspect import InspectReport
from tests.support.bnb_cases import refused
from tests.support.gguf_files import ENCODED, blocks, dequantized, write
from tests.support.paths import GOLDEN


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of each type that is decoded, and some of plain values."""
    tensors = {f"{kind}.weight": (kind, blocks(kind, (2, 3, 512))) for kind in ENCODED}
    tensors |= {
        "norm": ("F32", np.arange(7, dtype=np.float32)),
        "half": ("F16", np.arange(6, dtype=np.float16).reshape(2, 3)),
        "brain": ("BF16", np.arange(12, dtype=np.uint8).reshape(2, 6)),
        "double": ("F64", np.arange(5, dtype=np.float64)),
        **{f"i{n}": (f"I{n}", np.arange(3, dtype=f"int{n}")) for n in (8, 16, 32, 64)},
    }
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write(
        path, tensors, general__name="Tiny", llama__block_count=2, llama__embedding_length=256,
        tokenizer__ggml__tokens=["a", "b\x1b[31m"], llama__list=[1, 2, 3], general__alignment=64,
    )  # fmt: skip


def test_names_shapes_and_values_are_those_of_its_own_reader(mixed: Path) -> None:
    ckpt = ckptmap.open(mixed)
    theirs = {each.name: each for each in GGUFReader(str(mixed)).tensors}
    assert list(ckpt) == list(theirs)
    for name, each in theirs.items():
        found = ckpt[name].read()
        assert list(found.shape) == each.shape.tolist()[::-1], name
        kind = GGMLQuantizationType(each.tensor_type).name
        if kind in ENCODED:
            expected = dequantized(kind, np.asarray(each.data))
            assert ckpt[name].encoding == f"gguf-{kind.lower()}"
        elif kind == "BF16":
            expected = torch.from_numpy(np.asarray(each.data).copy()).view(torch.bfloat16)
        else:
            expected = torch.from_numpy(np.asarray(each.data).copy())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_inspect_tells(mixed: Path) -> None:
    report = InspectReport(ckptmap.open(mixed))
    told = report.to_json()
    assert told["about"] == "GGUF version 3, architecture llama, 'Tiny', 2 layers, 256 wide"
    metadata = told["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["tokenizer.ggml.tokens"] == "<2 texts>"
    assert metadata["llama.list"] == "(1, 2, 3)"
    assert "general.alignment = 64" in str(report)


def test_bytes_move_with_their_record_and_come_back(mixed: Path, tmp_path: Path) -> None:
    for to in ("full", "hf", "fsdp2"):
        report = ckptmap.convert(mixed, tmp_path / to, to=to)
        assert report.fidelity == {"bytes": len(ENCODED) + 8}
        again, source = ckptmap.open(tmp_path / to), ckptmap.open(mixed)
        for fqn in source:
            assert again[fqn].encoding == source[fqn].encoding
            found, expected = again[fqn].read(), source[fqn].read()
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_type_that_is_not_decoded_is_named_and_refused(tmp_path: Path) -> None:
    size = BY_NAME["Q8_K"].nbytes
    made = {"a": ("Q8_K", np.zeros((2, size), np.uint8)), "b": ("F32", np.zeros(4, np.float32))}
    path = write(tmp_path / "m.gguf", made)
    ckpt = ckptmap.open(path)
    assert list(ckpt) == ["b"]
    assert [(item.key, "ggml.Q8_K" in item.reason) for item in ckpt.refused] == [("a", True)]
    assert [item.key for item in ckptmap.plan(path, "full").unresolved] == ["a"]


def test_blocks_beside_a_scale_of_the_tensor_are_not_the_weight(tmp_path: Path) -> None:
    """llama.cpp's converter writes ModelOpt's NVFP4 so: `scale` multiplies what the blocks decode to. A hint that dropped
    it led to weights of another size."""
    blocks = np.zeros((2, BY_NAME["NVFP4"].nbytes), np.uint8)
    made = {f"{name}.weight": ("NVFP4", blocks) for name in ("a", "b")}
    made["a.scale"] = ("F32", np.full(1, 0.5, np.float32))
    made["c.weight"], made["c.scale"] = (("F32", np.ones(4, np.float32)) for _ in "ab")
    path = write(tmp_path / "m.gguf", made)
    with ckptmap.open(path) as ckpt:
        assert {*ckpt} == {"a.scale", "b.weight", "c.weight", "c.scale"}
        assert ckpt["b.weight"].encoding == "gguf-nvfp4"
        (item,) = ckpt.refused
        assert item.key == "a.weight" and "NVFP4 beside a scale of the tensor" in item.reason
    for drop in ((), ("a.scale",)):
        plan = ckptmap.plan(path, "full-fp32", drop=drop)
        assert [item.key for item in plan.unresolved] == ["a.weight"]


def test_version_2_is_read_alike(mixed: Path, tmp_path: Path) -> None:
    data = bytearray(mixed.read_bytes())
    data[4] = 2
    (tmp_path / "two.gguf").write_bytes(data)
    two = ckptmap.open(tmp_path / "two.gguf")
    assert two.index.about.startswith("GGUF version 2")
    assert {fqn: two[fqn].shape for fqn in two} == {
        fqn: lazy.shape for fqn, lazy in ckptmap.open(mixed).items()
    }


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A split model, as tools/gguf-split of llama.cpp names and numbers its files."""
    for number in range(2):
        values = np.full(4, number, np.float32)
        write(
            tmp_path / f"m-{number + 1:05d}-of-00002.gguf", {f"w{number}": ("F32", values)},
            split__no=number, split__count=2,
        )  # fmt: skip
    return tmp_path


def test_all_files_of_a_split_model(split: Path) -> None:
    for path in (split, split / "m-00001-of-00002.gguf", split / "m-00002-of-00002.gguf"):
        ckpt = ckptmap.open(path)
        assert [ckpt[fqn].read().tolist() for fqn in ("w0", "w1")] == [[0.0] * 4, [1.0] * 4]
        assert len(ckpt.index.files) == 2


def test_split_files_that_do_not_fit(split: Path) -> None:
    one, two = split / "m-00001-of-00002.gguf", split / "m-00002-of-00002.gguf"
    shutil.copy(one, two)
    with refused(SourceError, "CKM108", match="states that it is file 1 of 2, expected 2 of 2"):
        ckptmap.open(split)
    two.unlink()
    with refused(SourceError, "CKM108", match=r"of 2 files .* 'm-00002-of-00002.gguf' is missing"):
        ckptmap.open(one)
    one.rename(split / "whole.gguf")
    with refused(SourceError, "CKM108", match="states that it is file 1 of 2, expected 1 of 1"):
        ckptmap.open(split / "whole.gguf")


def test_a_file_of_another_time() -> None:
    """Written by gguf 0.19, and kept: tests/golden/foreign/make_foreign.py."""
    ckpt = ckptmap.open(GOLDEN / "foreign/q8_0.gguf")
    assert {fqn: (w.shape, w.encoding) for fqn, w in ckpt.items()} == {
        "blk.0.ffn_up.weight": ((16, 128), "gguf-q8_0")
    }
    json.dumps(InspectReport(ckpt).to_json())
