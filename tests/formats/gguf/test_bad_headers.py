"""Headers of GGUF files that are truncated, malformed or hostile: one line, a code, no memory taken."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

import ckptmap
from ckptmap.errors import SourceError
from tests.support.bnb_cases import refused
from tests.support.gguf_files import key, made, tensor, text

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
F32, Q4_K = 0, 12
HUGE = 1 << 63
WEIGHT = tensor("w", [256], F32, 0)
MALFORMED = {
    "version 1": (made(version=1), "expected a GGUF version of 2 and 3, found 1"),
    "version 4": (made(version=4), "expected a GGUF version of 2 and 3, found 4"),
    "big endian": (made(version=3 << 24), "expected little endian, found a GGUF file in big endian"),
    "array of arrays": (
        made([key("a", 9, U32(9) + U64(1) + U32(4) + U64(1) + U32(7))]),
        "key 'a': expected an array of numbers or texts, found an array of arrays",
    ),
    "value of type 13": (made([key("a", 13, U32(1))]), "expected a type of value from 0 to 12, found 13"),
    "array of type 77": (
        made([key("a", 9, U32(77) + U64(1))]),
        "expected a type of value from 0 to 12, found 77",
    ),
    "no UTF-8": (made([key("a", 8, text(b"\xff\xfe"))]), "expected text in UTF-8"),
    "key of 70000 bytes": (made([key("a" * 70000, 4, U32(1))]), "a text of at most 65535 bytes, found 70000"),
    "key twice": (made([key("a", 4, U32(1)), key("a", 4, U32(2))]), "key 'a': expected it once, found it twice"),
    "control in a key": (made([key("a\x1b[31m", 13, b"")]), r"key 'a\\x1b\[31m': expected a type"),
    "alignment of 24": (
        made([key("general.alignment", 4, U32(24))]),
        "expected a power of two, found 24",
    ),
    "alignment of 0": (made([key("general.alignment", 4, U32(0))]), "expected a power of two, found 0"),
    "alignment of text": (
        made([key("general.alignment", 8, text("32"))]),
        "expected a power of two, found '32'",
    ),
    "tensor twice": (made(tensors=[WEIGHT, WEIGHT]), "tensor 'w': expected it once, found it twice"),
    "five dims": (made(tensors=[tensor("w", [1] * 5, F32, 0)]), "expected at most 4 dims, found 5"),
    "unknown type": (made(tensors=[tensor("w", [256], 77, 0)]), "expected a type of ggml, found type 77"),
    "removed type": (
        made(tensors=[tensor("w", [256], 31, 0)]),
        "found type 31, Q4_0_4_4, which ggml has removed",
    ),
    "half a block": (
        made(tensors=[tensor("w", [100], Q4_K, 0)]),
        r"expected rows of whole blocks of 256 values \(Q4_K\), found shape \[100\]",
    ),
    "unaligned": (
        made(tensors=[tensor("w", [256], F32, 8)]),
        "expected a multiple of 32 as its offset, found 8",
    ),
    "overlap": (
        made(tensors=[WEIGHT, tensor("v", [256], F32, 32)]),
        "tensor 'v': expected an offset of 1024 or more, found 32, inside of 'w'",
    ),
}  # fmt: skip
TRUNCATED = {
    "keys without end": made(counts=(0, HUGE)),
    "tensors without end": made(counts=(HUGE, 0)),
    "key without end": made([U64(HUGE)]),
    "text without end": made([key("a", 8, U64(HUGE))]),
    "array without end": made([key("a", 9, U32(4) + U64(HUGE))]),
    "array of texts without end": made([key("a", 9, U32(8) + U64(HUGE))]),
    "one text of an array without end": made([key("a", 9, U32(8) + U64(1) + U64(HUGE))]),
    "tensor without end": made(tensors=[tensor("w", [HUGE, 4], F32, 0)]),
    "tensor beyond the end": made(tensors=[tensor("w", [256], F32, 4096)]),
    "half a superblock": made(tensors=[tensor("w", [256], Q4_K, 0)], data=100),
    "only its magic": b"GGUF",
    "cut in its counts": made()[:20],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str, tmp_path: Path) -> None:
    data, match = MALFORMED[case]
    (tmp_path / "m.gguf").write_bytes(data)
    with refused(SourceError, "CKM119", match=match) as caught:
        ckptmap.open(tmp_path / "m.gguf")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("case", TRUNCATED)
def test_truncated_or_without_end(case: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(TRUNCATED[case])
    tracemalloc.start()
    with refused(SourceError, "CKM104", match="truncated, expected "):
        ckptmap.open(tmp_path / "m.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_whole_file_cut_at_any_byte(tmp_path: Path) -> None:
    whole = made(
        [key("a", 8, text("b")), key("c", 9, U32(8) + U64(1) + text("d"))], [WEIGHT], data=1024
    )
    (tmp_path / "m.gguf").write_bytes(whole)
    assert ckptmap.open(tmp_path / "m.gguf")["w"].read().numel() == 256
    for length in range(4, len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with refused(SourceError, "CKM104", match="truncated"):
            ckptmap.open(tmp_path / "m.gguf")
