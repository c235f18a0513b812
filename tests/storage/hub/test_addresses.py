"""What is no path is told as such, with the form that works: a page of the Hub, a bucket, a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptmap
from ckptmap.errors import SourceError


@pytest.mark.parametrize(
    ("address", "step"),
    [
        ("https://huggingface.co/org/name", "write hf://org/name"),
        ("https://huggingface.co/org/name/", "write hf://org/name"),
        ("https://www.huggingface.co/org/name/tree/main", "write hf://org/name"),
        ("https://hf.co/org/name/tree/v1/sub/folder", "write hf://org/name@v1/sub/folder"),
        (
            "https://huggingface.co/org/name/blob/main/model.safetensors?download=true",
            "write hf://org/name/model.safetensors",
        ),
        ("https://example.org/model.pt", "copy it to this machine, and give its path"),
        ("s3://bucket/run", "copy it to this machine, and give its path"),
        ("-", "save it to a file, and give the path of that"),
    ],
)
def test_an_address_is_answered_with_what_works(address: str, step: str) -> None:
    with pytest.raises(SourceError) as caught:
        ckptmap.open(address)
    assert (caught.value.code, caught.value.hint) == ("CKM101", step)


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s3:").mkdir()
    Path("s3:/run").write_bytes(b"nothing")
    with pytest.raises(SourceError, match="run: "):
        ckptmap.open("s3://run")
