"""`inspect --shards`: the bytes at every place that it names are those of the box that it names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main

from tests.corpus import Corpus

CASES = {
    "fsdp2_dcp_w2": {0, 1},
    "fsdp2_dcp_shard1_w2": {0, 1},
    "hsdp_ranks_w4": {0, 1, 2, 3},
    "fsdp_tp_ranks_w4": {0, 1, 2, 3},
    "fsdp2_dcp_optimizer_w2": {0, 1},
    "hf_sharded_fp32": {None},
    "torch_plain": {None},
}
"""Cases whose boxes are contiguous in their files -> the ranks that the names of the files tell."""
REPLICATED = {"hsdp_ranks_w4", "fsdp_tp_ranks_w4"}
"""Cases in which several ranks hold the same elements."""


def shards(capsys: pytest.CaptureFixture[str], path: Path, *args: str) -> Any:
    assert main(["inspect", str(path), "--shards", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_where_it_says(
    corpus: Corpus, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = corpus[name]
    document = shards(capsys, case.path)
    root = case.path if case.path.is_dir() else case.path.parent
    numel: dict[str, int] = {}
    for piece in document["pieces"]:
        if piece["role"] != "model":
            continue
        whole = case.truth[piece["fqn"]]
        box = tuple(
            slice(at, at + size)
            for at, size in zip(piece["box"]["offsets"], piece["box"]["sizes"], strict=True)
        )
        with (root / piece["file"]).open("rb") as file:
            file.seek(piece["offset"])
            data = file.read(piece["nbytes"])
        assert (
            torch.equal(
                torch.frombuffer(bytearray(data), dtype=whole.dtype),
                whole[box].contiguous().flatten(),
            )
            if data
            else not whole[box].numel()
        )
        if not piece["replica"]:
            count = math.prod(piece["box"]["sizes"])
            numel[piece["fqn"]] = numel.get(piece["fqn"], 0) + count
    assert numel == {fqn: tensor.numel() for fqn, tensor in case.truth.items()}
    assert {piece["rank"] for piece in document["pieces"]} == CASES[name]
    assert any(piece["replica"] for piece in document["pieces"]) == (name in REPLICATED)
    assert sum(share["nbytes"] for share in document["files"]) == sum(
        piece["nbytes"] for piece in document["pieces"]
    )


def test_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files always, the pieces where names are asked for; an uneven pair is told."""
    (tmp_path / "out").mkdir()
    small, large = {"a": torch.zeros(10)}, {"b": torch.zeros(30)}
    from safetensors.torch import save_file

    save_file(small, tmp_path / "out" / "model-00001-of-00002.safetensors")
    save_file(large, tmp_path / "out" / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 160}, "weight_map": names}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["inspect", str(tmp_path / "out"), "--shards"]) == 0
    said = capsys.readouterr().out
    assert "  files      2 files, 160 B\n  imbalance  1.50 " in said
    assert "  model-00001-of-00002.safetensors     -        1       1       40 B" in said
    assert "[0] + [30]" not in said
    assert main(["inspect", str(tmp_path / "out"), "--shards", "--keys", "b"]) == 0
    said = capsys.readouterr().out
    assert "  b  [0] + [30]  model-00002-of-00002.safetensors at " in said
    assert "\n  a  " not in said


def test_a_relative_path_and_a_name_like_that_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    torch.save({"w": torch.zeros(3)}, tmp_path / "a" / "lora_rank64.pt")
    monkeypatch.chdir(tmp_path / "a" / "b")
    (piece,) = shards(capsys, Path("../lora_rank64.pt"))["pieces"]
    assert (piece["file"], piece["rank"]) == ("lora_rank64.pt", None)


def test_the_parts_of_a_quantized_tensor(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    document = shards(capsys, corpus["nf4_torch_bf16"].path)
    parts = {piece["part"] for piece in document["pieces"]}
    assert len(parts) > 2
