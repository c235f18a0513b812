"""One safetensors file: golden headers, hostile files, and files that torch tensors were saved to."""

from __future__ import annotations

import json
import struct
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.safetensors.format import SafetensorsFile
from ckptmap.formats.safetensors.header import NAMES, parse, parse_header
from ckptmap.formats.safetensors.header_writer import emit
from ckptmap.storage.files import Files
from ckptmap.tensors import ITEMSIZE, StoredTensor, TensorInfo
from tests.support.examples import examples

GOLDEN = (
    b"\x90\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt"},'
    b'"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"\xc3\xa9":{"dtype":"F4","shape":[4],"data_offsets":[24,26]}} '
)


def raw_file(path: FilePath, header: object, data: bytes = b"", pad: bool = True) -> str:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 if pad else 0)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return str(path)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(stored: StoredTensor) -> bytes:
    files = Files()
    regions = [chunk.region for chunk in stored.chunks]
    return b"".join(files.read(r.file, r.offset, r.nbytes) for r in regions)


def test_emit_golden() -> None:
    tensors = [("w", TensorInfo((2, 3), "float32")), ("é", TensorInfo((2,), "float4_e2m1fn_x2"))]
    assert emit(*zip(*tensors, strict=True), {"format": "pt"}) == GOLDEN
    header = parse_header(GOLDEN[8:], len(GOLDEN) + 26, "golden")
    assert header.metadata == {"format": "pt"}
    assert header.begins[0] == len(GOLDEN) == 152
    assert header.tensors == {"w": (tensors[0][1], 152, 176), "é": (tensors[1][1], 176, 178)}


def test_every_dtype_of_safetensors_python(tmp_path: FilePath) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    original = {
        name: torch.randint(0, 2, (4, 16), dtype=torch.uint8).view(getattr(torch, name))
        for name in NAMES
    }
    file = tmp_path / "any.name"
    save_file(original, file, metadata={"a": "b"})
    index = SafetensorsFile().index(look(file))
    assert set(index.leaves) == {(name,) for name in NAMES}
    assert set(NAMES) == set(ITEMSIZE) - {"complex32", "complex128"}
    for (name,), stored in index.leaves.items():
        assert stored.info == TensorInfo(tuple(original[name].shape), name)
        assert read(stored) == bytes(original[name].view(torch.uint8).flatten().tolist())
    # And back: what we emit, safetensors reads; it knows no torch dtype for F4 and F8_E8M0.
    back = {n: t for n, t in original.items() if n not in ("float4_e2m1fn_x2", "float8_e8m0fnu")}
    infos = [TensorInfo(tuple(t.shape), n) for n, t in back.items()]
    header = emit([*back], infos, {"format": "pt"})
    data = b"".join(bytes(t.view(torch.uint8).flatten().tolist()) for t in back.values())
    (tmp_path / "ours").write_bytes(header + data)
    for name, tensor in load_file(tmp_path / "ours").items():
        assert tensor.dtype == back[name].dtype
        assert torch.equal(tensor.view(torch.uint8), back[name].view(torch.uint8))


def test_header_bytes_equal_safetensors_own(tmp_path: FilePath) -> None:
    import torch
    from safetensors.torch import save

    saved = save({"b": torch.ones(3, 5), "a": torch.ones(2)}, metadata={"format": "pt"})
    ours = emit(
        ["a", "b"], [TensorInfo((2,), "float32"), TensorInfo((3, 5), "float32")], {"format": "pt"}
    )
    assert saved.startswith(ours)


def test_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"^w: safetensors has no dtype for complex128; .*--to full"
    ):
        emit(["w"], [TensorInfo((1,), "complex128")], {})


W = entry("F32", [2], 0, 8)
BAD_HEADERS: dict[str, tuple[object, bytes, str, str]] = {
    "list": ([1], b"", "CKM107", r"starts with '\{', found b'\['"),
    "leading space": (b' {"w":1}', b"", "CKM107", r"starts with '\{'"),
    "not json": (b'{"w":', b"", "CKM107", "header is not JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "CKM107", "header is not JSON: byte 2: expected UTF-8"),
    "depth bomb": (b'{"w":' + b"[" * 200_000, b"", "CKM107", "nested too deeply"),
    "object bomb": (b'{"w":' * 200_000, b"", "CKM107", "nested too deeply"),
    "long integer": (b'{"w":' + b"9" * 5000 + b"}", b"", "CKM107", "not JSON"),
    "huge integer": (
        b'{"w":{"dtype":"U8","shape":[],"data_offsets":[0,' + b"9" * 100 + b"]}}",
        b"",
        "CKM107",
        "data_offsets, expected integers",
    ),
    "duplicate": (
        b'{"w":%(w)s,"v":%(v)s,"w":%(w)s}'
        % {b"w": json.dumps(W).encode(), b"v": json.dumps(entry("U8", [0], 8, 8)).encode()},
        b"\0" * 8,
        "CKM107",
        "the name 'w' is there twice",
    ),
    "duplicate escaped": (
        b'{"w":%b,"\\u0077":%b}' % ((json.dumps(W).encode(),) * 2),
        b"\0" * 8,
        "CKM107",
        "the name 'w' is there twice",
    ),
    "duplicate metadata": (b'{"__metadata__":{},"__metadata__":{}}', b"", "CKM107", "twice"),
    "duplicate in metadata": (b'{"__metadata__":{"a":"","a":""}}', b"", "CKM107", "'a' is there"),
    "duplicate field": (
        b'{"w":{"dtype":"U8","dtype":"I8","data_offsets":[0,0]}}',
        b"",
        "CKM107",
        "expected the fields",
    ),
    "metadata list": ({"__metadata__": []}, b"", "CKM107", "expected an object"),
    "metadata value": ({"__metadata__": {"a": 1}}, b"", "CKM107", "expected a string, found 1"),
    "entry is a number": ({"w": 7}, b"", "CKM107", "'w': expected the fields dtype"),
    "entry is a list": ({"w": [1, 2, 3]}, b"", "CKM107", "expected the fields dtype"),
    "arrays as entry": (
        {"w": [["dtype", "F32"], ["shape", [2]], ["data_offsets", [0, 8]]]},
        b"\0" * 8,
        "CKM107",
        "expected the fields",
    ),
    "missing field": ({"w": {"dtype": "F32", "shape": []}}, b"", "CKM107", "expected the fields"),
    "extra field": ({"w": {**W, "strides": [1]}}, b"\0" * 8, "CKM107", "found .*strides"),
    "one offset": ({"w": {**W, "data_offsets": [0]}}, b"", "CKM107", "two data_offsets"),
    "overlap": (
        {"w": W, "v": entry("F32", [2], 4, 12)},
        b"\0" * 12,
        "CKM107",
        "'v' overlaps the one before: expected it at byte .* found",
    ),
    "same range": ({"w": W, "v": W}, b"\0" * 8, "CKM107", "'v' overlaps"),
    "hole": ({"w": W, "v": entry("F32", [2], 12, 20)}, b"\0" * 20, "CKM107", "leaves a hole"),
    "start gap": ({"w": entry("F32", [2], 4, 12)}, b"\0" * 12, "CKM107", "leaves a hole"),
    "trailing": ({"w": W}, b"\0" * 9, "CKM107", "bytes after the last tensor"),
    "truncated": ({"w": W}, b"\0" * 7, "CKM104", "truncated, expected .* bytes, found"),
    "reversed": ({"w": entry("F32", [2], 8, 0)}, b"\0" * 8, "CKM107", "begin <= end"),
    "negative": ({"w": entry("F32", [2], -8, 0)}, b"", "CKM107", "0 <= begin"),
    "float offset": ({"w": entry("F32", [2], 0, 8.0)}, b"\0" * 8, "CKM107", "integers"),  # type: ignore[arg-type]
    "bool offset": ({"w": entry("U8", [1], False, True)}, b"\0", "CKM107", "integers"),
    "offset 2**63": ({"w": entry("U8", [2**63], 0, 2**63)}, b"\0", "CKM107", r"end < 2\*\*63"),
    "product": ({"w": entry("F32", [3], 0, 8)}, b"\0" * 8, "CKM107", "takes 12 bytes, found 8"),
    "overflow": ({"w": entry("U8", [2**32, 2**32], 0, 0)}, b"", "CKM107", "overflows 63 bits"),
    "overflow times 0": ({"w": entry("U8", [0, 2**62, 4], 0, 0)}, b"", "CKM107", "overflows"),
    "negative dim": ({"w": entry("U8", [-1, -8], 0, 8)}, b"\0" * 8, "CKM107", "negative size"),
    "float dim": ({"w": entry("F32", [2.0], 0, 8)}, b"\0" * 8, "CKM107", "list of integers"),  # type: ignore[list-item]
    "shape text": ({"w": {**W, "shape": "2"}}, b"\0" * 8, "CKM107", "shape, expected a list"),
    "dtype": ({"w": entry("F3_E1M1", [8], 0, 3)}, b"\0" * 3, "CKM107", "'F3_E1M1' is unknown"),
    "F6": ({"w": entry("F6_E2M3", [4], 0, 3)}, b"\0" * 3, "CKM107", "F6_E2M3, 6 bits an element"),
    "dtype list": ({"w": {**W, "dtype": ["F32"]}}, b"\0" * 8, "CKM107", "dtype .* is unknown"),
    "F4 odd": ({"w": entry("F4", [3], 0, 2)}, b"\0" * 2, "CKM107", "F4 needs an even last dim"),
    "F4 scalar": ({"w": entry("F4", [], 0, 1)}, b"\0", "CKM107", "F4 needs an even last dim"),
    "no name": ({"": W}, b"\0" * 8, "CKM107", "expected 1 to 4096 characters"),
    "long name": ({"w" * 5000: W}, b"\0" * 8, "CKM107", "4096 characters, found 5000"),
    "NUL name": ({"a\0b": W}, b"\0" * 8, "CKM107", "control character"),
    "escape name": ({"a\x1b[2J": W}, b"\0" * 8, "CKM107", "control character"),
    "surrogate name": (b'{"\\ud800":%b}' % json.dumps(W).encode(), b"", "CKM107", "control"),
    "many values": (b'{"w":[' + b"0," * 16_000_001 + b"0]}", b"", "CKM107", "at most 16000000"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header(name: str, tmp_path: FilePath) -> None:
    header, data, code, match = BAD_HEADERS[name]
    file = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(SourceError, match=match) as caught:
        parse(Files(), file)
    assert caught.value.code == code
    assert str(caught.value).startswith(file + ": ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, code, match",
    [
        (b"", "CKM104", "expected at least 8 bytes, found 0"),
        (b"\1\0\0", "CKM104", "expected at least 8 bytes, found 3"),
        (b"\0" * 8 + b'{"a"', "CKM107", "header length, expected 2 to 100000000, found 0"),
        (b"\xff" * 8 + b'{"a"', "CKM107", "found 18446744073709551615"),
        (b"\x20\0\0\0\0\0\0\0" + b'{"a"', "CKM104", "in its header, expected 40 bytes .* found 12"),
    ],
)
def test_bad_length(content: bytes, code: str, match: str, tmp_path: FilePath) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    assert SafetensorsFile().claims(look(file)) == (b"{" in content)
    with pytest.raises(SourceError, match=match) as caught:
        parse(Files(), str(file))
    assert caught.value.code == code


def test_absent_file() -> None:
    with pytest.raises(SourceError, match=r"^/nowhere/x: cannot be read: No such file"):
        parse(Files(), "/nowhere/x")


def test_fields_in_any_order_and_bool_bytes_are_data(tmp_path: FilePath) -> None:
    header = {"w": {"data_offsets": [0, 3], "dtype": "BOOL", "shape": [3]}}
    file = raw_file(tmp_path / "x", header, b"\1\2\xff", pad=False)
    assert read(SafetensorsFile().index(look(FilePath(file))).leaves[("w",)]) == b"\1\2\xff"


@pytest.mark.parametrize("text", ["{", '{"a": []}', "[]"])
def test_bad_records(text: str, tmp_path: FilePath) -> None:
    file = raw_file(tmp_path / "x", {"__metadata__": {"ckptmap": text}})
    with pytest.raises(SourceError, match=r"encoding records in its __metadata__\['ckptmap'\]"):
        SafetensorsFile().index(look(FilePath(file)))


def test_claims_by_structure_alone(tmp_path: FilePath) -> None:
    def claims(content: bytes) -> bool:
        (tmp_path / "model.safetensors").write_bytes(content)
        return SafetensorsFile().claims(look(tmp_path / "model.safetensors"))

    assert claims(emit([], [], {}))
    assert not claims(b"PK\x03\x04" + b"\0" * 100)
    assert not claims(b'{"error":"Repository not found"}')
    assert not claims(b"version https://git-lfs.github.com/spec/v1\noid sha256:")
    assert not SafetensorsFile().claims(look(tmp_path))


SMALL = emit(
    ["w", "v.é"], [TensorInfo((2, 3), "float32"), TensorInfo((), "bool")], {"format": "pt"}
)


@examples(300)
@given(st.integers(0, len(SMALL) * 8 - 1), st.integers(0, len(SMALL) * 8 - 1))
def test_flipped_bits_are_refused_or_parse(first: int, second: int) -> None:
    """Never another exception than ours, in either the length or the JSON."""
    content = bytearray(SMALL)
    for bit in {first, second}:
        content[bit // 8] ^= 1 << bit % 8
    _parse_or_refuse(bytes(content[8:]))


def test_every_bit_flip_and_truncation() -> None:
    for bit in range(64, len(SMALL) * 8):
        content = bytearray(SMALL)
        content[bit // 8] ^= 1 << bit % 8
        _parse_or_refuse(bytes(content[8:]))
    for length in range(len(SMALL) - 8):
        with pytest.raises(SourceError, match="bad safetensors header"):
            parse_header(SMALL[8 : 8 + length].rstrip(), len(SMALL) + 25, "x")


def _parse_or_refuse(raw: bytes) -> None:
    try:
        header = parse_header(raw, len(SMALL) + 25, "x")
    except SourceError as error:
        assert error.code in ("CKM104", "CKM107")
    else:  # a changed name, dtype of equal width or metadata: the same bytes are accounted for
        assert sorted(end - begin for _, begin, end in header.tensors.values()) == [1, 24]


names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
infos = st.builds(
    TensorInfo,
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.sampled_from(sorted(NAMES)),
)


@examples(100)
@given(st.dictionaries(names, infos, max_size=8), st.dictionaries(names, st.text(max_size=5)))
def test_round_trip(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> None:
    tensors.pop("__metadata__", None)
    metadata = {k: v.encode("utf-8", "ignore").decode() for k, v in metadata.items()}
    raw = emit([*tensors], [*tensors.values()], metadata)
    assert len(raw) % 8 == 0
    header = parse_header(raw[8:], len(raw) + sum(i.nbytes for i in tensors.values()), "x")
    assert {name: found[0] for name, found in header.tensors.items()} == tensors
    assert header.metadata == metadata
    import safetensors

    if all(info.numel for info in tensors.values()):
        assert {
            n
            for n, _ in safetensors.deserialize(
                raw + bytes(sum(i.nbytes for i in tensors.values()))
            )
        } == set(tensors)
