"""A model in several GGUF files, by `--max-shard-size`: the `gguf` package reads each, and they are one model again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

import ckptmap
from ckptmap.errors import DestinationError
from tests.formats.gguf.test_writer import fields, saved

LIMIT = 20_000


def tensors(file: Path) -> dict[str, tuple[str, bytes]]:
    """The type and bytes of each tensor of a file."""
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in GGUFReader(file).tensors}


def by_the_package(whole: Path, folder: Path) -> list[Path]:
    """Let the package split a model into files of the same size."""
    folder.mkdir()
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_size=LIMIT)
    for tensor in GGUFReader(whole).tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "to"), [("llama", "gguf-q8_0"), ("qwen3_moe", "gguf-bf16"), ("gemma3", "gguf")]
)
def test_each_file_is_read_by_the_package(name: str, to: str, tmp_path: Path) -> None:
    source, whole, split = saved(name, tmp_path), tmp_path / "whole.gguf", tmp_path / "split"
    ckptmap.convert(source, whole, to=to)
    report = ckptmap.convert(source, split, to=to, max_shard_size=LIMIT)
    files = sorted(split.glob("*.gguf"))
    count = len(files)
    assert count > 2, report
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)
    ]
    theirs = by_the_package(whole, tmp_path / "theirs")
    assert [list(tensors(file)) for file in files] == [list(tensors(file)) for file in theirs]
    together: dict[str, tuple[str, bytes]] = {}
    for number, file in enumerate(files):
        mine, wanted = GGUFReader(file).fields, GGUFReader(theirs[number]).fields
        for key in ("split.no", "split.count", "split.tensors.count"):
            assert mine[key].types == wanted[key].types
            assert mine[key].contents() == wanted[key].contents()
        assert mine["split.no"].types == [GGUFValueType.UINT16]
        if number:
            assert {k for k in mine if not k.startswith("GGUF.")} == {
                "split.no",
                "split.count",
                "split.tensors.count",
            }
        together |= tensors(file)
    assert together == tensors(whole)
    first, one = fields(files[0]), fields(whole)
    assert {key: first[key] for key in one} == one


def test_they_are_one_model_again(tmp_path: Path) -> None:
    source, split = saved("llama", tmp_path), tmp_path / "split"
    ckptmap.convert(source, split, to="gguf-q8_0", max_shard_size=LIMIT)
    assert ckptmap.verify(split).ok and ckptmap.verify(split, against=source).ok
    ckptmap.convert(source, tmp_path / "whole.gguf", to="gguf-q8_0")
    for given in (split, sorted(split.glob("*.gguf"))[1], tmp_path / "whole.gguf"):
        out = tmp_path / f"back-{given.stem}"
        ckptmap.convert(given, out, to="hf-bf16", config_from=source)
    first, second, third = (
        (tmp_path / f"back-{name}" / "model.safetensors").read_bytes()
        for name in ("split", sorted(split.glob("*.gguf"))[1].stem, "whole")
    )
    assert first == second == third
    report = ckptmap.convert(
        tmp_path / "back-split", tmp_path / "again", as_=split, max_shard_size=LIMIT
    )
    assert report.likeness is not None and not report.likeness.changed
    for file in split.glob("*.gguf"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_a_flipped_bit_in_any_file_is_found(tmp_path: Path) -> None:
    source, split = saved("llama", tmp_path), tmp_path / "split"
    ckptmap.convert(source, split, to="gguf-q8_0", max_shard_size=LIMIT)
    files = sorted(split.glob("*.gguf"))
    assert len(files) > 1
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        assert not ckptmap.verify(split).ok, file
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    assert ckptmap.verify(split).ok


def test_a_directory_is_named_for_several_files_and_a_file_for_one(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    with pytest.raises(DestinationError, match="names a file, but this setup writes a directory"):
        ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", max_shard_size=LIMIT)
    ckptmap.convert(source, tmp_path / "m.gguf", to="gguf", max_shard_size="1GB")
    with ckptmap.open(tmp_path / "m.gguf") as ckpt:
        assert ckpt.index.container == "gguf" and len(ckpt.index.files) == 1
    assert torch.is_tensor(ckptmap.open(tmp_path / "m.gguf")["output_norm.weight"].read())
