"""DCP in safetensors form, as torch's HuggingFaceStorageWriter leaves it on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.safetensors_ranks import Part, rows_of
from ckptmap.formats.safetensors.header import METADATA
from ckptmap.tensors import Box, Chunk, Region, TensorInfo
from tests.corpus.writers_directories import SAMPLES, sample
from tests.support.same_tensors import assert_same

NAMES = [name for name in SAMPLES if name.startswith("dcp_hf")]
SHARDED = [name for name in NAMES if "consolidated" not in name]


@pytest.fixture
def shards(framework_directories: Path, tmp_path: Path) -> Path:
    """A copy of the simplest one, to be damaged."""
    return Path(shutil.copytree(framework_directories / "dcp_hf_w2", tmp_path / "shards"))


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, framework_directories: Path) -> None:
    case = sample(framework_directories, name)
    with ckptmap.open(case.path) as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)
            if expected.ndim == 2:
                assert_same(ckpt[fqn].read((1, 2), (2, 5)), expected[1:3, 2:7], fqn)
        assert ckpt.index.container == ("dcp-hf" if name in SHARDED else "hf")
        assert ckpt.world_size == (2 if name in SHARDED else 1)


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("to", ["hf", "fsdp2", "full"])
def test_converts(name: str, to: str, framework_directories: Path, tmp_path: Path) -> None:
    case = sample(framework_directories, name)
    ckptmap.convert(case.path, tmp_path / "out", to=to)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert set(ckpt) == set(case.truth)
        for fqn, expected in case.truth.items():
            assert_same(ckpt[fqn].read(), expected, fqn)


def test_the_consolidated_directory_is_not_mixed_with_its_parts(
    framework_directories: Path,
) -> None:
    whole = sample(framework_directories, "dcp_hf_consolidated_w2")
    assert (whole.path / "sharded").is_dir()
    with ckptmap.open(whole.path / "sharded") as parts:
        assert set(parts) == set(whole.truth)
        assert parts.world_size == 2


def test_uneven_parts_prove_that_all_ranks_are_here(shards: Path) -> None:
    """1001 rows in parts of 501 and 500 can be of 2 ranks only: nothing is left to be told."""
    with ckptmap.open(shards) as ckpt:
        assert ckpt.notes == []


def test_even_parts_prove_nothing(framework_directories: Path) -> None:
    """Halves of all could be two thirds of what was: torch writes no count, so a note stays."""
    with ckptmap.open(sample(framework_directories, "dcp_hf_even_w2").path) as ckpt:
        (note,) = ckpt.notes
        assert note.startswith(
            "the shards do not record how many ranks wrote them; the files of 2 ranks"
        )


def test_a_last_rank_that_is_missing_shows_in_the_norms(
    framework_directories: Path, tmp_path: Path
) -> None:
    """Half as long as the matrices, which are cut by rows, have columns."""
    for name in ("dcp_hf_even_w2", "dcp_hf_w2"):
        path = Path(shutil.copytree(sample(framework_directories, name).path, tmp_path / name))
        first(path, 2).unlink()
        refused(
            path,
            r"norm.weight has \d+ elements, but most matrices have \d+ columns: .*rank 2",
            "CKM110",
        )


def test_a_last_rank_that_is_missing_shows_beside_the_consolidated(
    framework_directories: Path, tmp_path: Path
) -> None:
    whole = sample(framework_directories, "dcp_hf_consolidated_w2").path
    path = Path(shutil.copytree(whole, tmp_path / "whole")) / "sharded"
    with ckptmap.open(path) as ckpt:
        assert ckpt.notes == []
    (last,) = path.glob("shard-00002-*")
    last.unlink()
    refused(
        path,
        r"embed.weight: expected float32.1001, 48. .*consolidated .*/model.*, found float32.501, 48.",
        "CKM110",
    )


def test_a_last_rank_that_is_missing_shows_in_our_manifest(
    framework_directories: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source = sample(framework_directories, "dcp_hf_even_w2").path
    ckptmap.convert(source, out, to="dcp-hf", world_size=4, include=("*proj.weight",))
    with ckptmap.open(out) as ckpt:
        assert ckpt.notes == []
    first(out, 4).unlink()
    refused(out, r"ckptmap.manifest.json lists shard-00004-model-.*, which is missing", "CKM110")
    (out / "ckptmap.manifest.json").unlink()
    with ckptmap.open(out) as ckpt:  # no norm is there, and no more is known
        assert "a last rank could be missing" in ckpt.notes[0] and ckpt.world_size == 3


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((501, 500), 2, (2, 2)),  # 1001 rows
        ((251, 251, 251), 3, (3, None)),  # of 1001 or 753: not known
        ((2, 2, 1), 4, (3, 4)),  # the 4th has none, a 5th would make parts of 1
        ((1, 1, 1), 4, (3, None)),
        ((4, 4), 2, (2, None)),
    ],
)
def test_what_parts_say_of_the_ranks(sizes: tuple[int, ...], ranks: int, expected: Any) -> None:
    """Against torch.chunk: just the numbers of ranks that cut so."""
    at, parts = 0, []
    for rank, size in enumerate(sizes):
        region = Region.contiguous("f", 0, (size,), 4)
        parts.append(Part(rank, Chunk(Box((at,), (size,)), region)))
        at += size
    rows = rows_of(TensorInfo((at,), "float32"), parts, ranks)
    assert rows is not None and rows.ranks() == expected
    fewest, most = expected
    for n in range(1, 12):
        chunks = tuple(len(chunk) for chunk in torch.arange(at).chunk(n))
        if rows.ends:
            assert (chunks == sizes) == (fewest <= n and (most is None or n <= most))


# ------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_torch_loads_what_is_written(
    world_size: int, framework_directories: Path, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    case = sample(framework_directories, "dcp_hf_w2")
    out = tmp_path / "out"
    ckptmap.convert(case.path, out, to="dcp-hf", world_size=world_size)
    assert len(list(out.glob("shard-*"))) == world_size
    state = {name: torch.zeros_like(value) for name, value in case.truth.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(out)), no_dist=True)
    for name, expected in case.truth.items():
        assert_same(state[name], expected, name)
    with ckptmap.open(out) as ckpt:
        assert ckpt.setup == "dcp-hf"
        for name, expected in case.truth.items():
            assert_same(ckpt[name].read(), expected, name)
    ckptmap.verify(out)


def test_the_bytes_are_those_of_torch(framework_directories: Path, tmp_path: Path) -> None:
    """Of what FSDP2 cut, the same parts at the same offsets; buffers it keeps whole."""
    case = sample(framework_directories, "dcp_hf_w2")
    ckptmap.convert(case.path, tmp_path / "out", to="dcp-hf", world_size=2)
    ours: dict[str, list[Any]] = {}
    theirs: dict[str, list[Any]] = {}
    for path, found in ((tmp_path / "out", ours), (case.path, theirs)):
        for rank in (1, 2):
            file = first(path, rank)
            for key, offsets in sharding_of(file).items():
                found.setdefault(key, []).append((offsets, load_file(file)[key]))
    assert set(ours) == set(theirs)
    cut = {key: parts for key, parts in theirs.items() if len(parts) == 2}
    assert len(cut) == 41
    for key, parts in cut.items():
        ordered = sorted(parts, key=lambda part: str(part[0]))
        for (at, value), (want_at, want) in zip(ours[key], ordered, strict=True):
            assert at == want_at
            assert_same(value, want, key)


def test_a_quantized_tensor_is_found_again_without_its_manifest(
    framework_directories: Path, tmp_path: Path
) -> None:
    case = sample(framework_directories, "dcp_hf_w2")
    ckptmap.convert(case.path, tmp_path / "out", to="dcp-hf-nf4", encode=("*q_proj.weight",))
    (tmp_path / "out" / "ckptmap.manifest.json").unlink()
    with ckptmap.open(tmp_path / "out") as ckpt:
        lazy = ckpt["layers.0.self_attn.q_proj.weight"]
        assert (lazy.encoding, lazy.shape) == ("nf4", (48, 48))


# ------------------------------------------------------------------------------- broken sets


def sharding_of(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    found: dict[str, Any] = json.loads(header[METADATA]["DCP_SHARDING_INFO"])
    return found


def rewrite(file: Path, change: Any) -> None:
    """The file again, by safetensors' own writer, after `change(tensors, sharding)`."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    sharding = json.loads(header[METADATA]["DCP_SHARDING_INFO"])
    tensors = load_file(file)
    change(tensors, sharding)
    metadata = {**header[METADATA], "DCP_SHARDING_INFO": json.dumps(sharding)}
    save_file(tensors, file, metadata)


def first(shards: Path, rank: int = 1) -> Path:
    return shards / f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def refused(path: Path, says: str, code: str) -> None:
    with pytest.raises(SourceError, match=says) as caught:
        ckptmap.plan(path, "hf")
    assert caught.value.code == code


def test_a_first_rank_that_is_missing(shards: Path) -> None:
    first(shards).unlink()
    refused(shards, "the shards of rank 1 are missing", "CKM110")


def test_a_file_of_the_mapping_that_is_missing(framework_directories: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(framework_directories / "dcp_hf_files_w2", tmp_path / "files"))
    for file in path.glob("*-model-00003-of-*"):
        file.unlink()
    refused(path, "the shards of file 3 are missing", "CKM110")


def test_shards_of_several_saves(shards: Path, framework_directories: Path) -> None:
    name = "shard-00001-model-00001-of-00003.safetensors"
    shutil.copy(framework_directories / "dcp_hf_files_w2" / name, shards / name)
    refused(shards, "several saves, one of 1 and one of 3 files", "CKM110")


def test_parts_that_overlap(shards: Path) -> None:
    def change(tensors: Any, sharding: Any) -> None:
        sharding["embed.weight"]["saved_offsets"][0] -= 1

    rewrite(first(shards, 2), change)
    refused(shards, r"'embed\.weight': chunks .* overlap", "CKM112")


def test_parts_that_leave_a_hole(shards: Path) -> None:
    def change(tensors: Any, sharding: Any) -> None:
        sharding["embed.weight"]["saved_offsets"][0] += 1

    rewrite(first(shards, 2), change)
    refused(shards, r"'embed\.weight': chunks cover 48048 of 48096", "CKM112")


def test_parts_of_different_dtypes(shards: Path) -> None:
    def change(tensors: Any, sharding: Any) -> None:
        tensors["embed.weight"] = tensors["embed.weight"].to(torch.bfloat16)

    rewrite(first(shards, 2), change)
    refused(shards, r"'embed\.weight' is bfloat16", "CKM113")


@pytest.mark.parametrize("offsets", [None, [0], [-1, 0], ["0", 0], [0.5, 0], 7, [True, 0]])
def test_offsets_that_are_none(shards: Path, offsets: Any) -> None:
    def change(tensors: Any, sharding: Any) -> None:
        sharding["embed.weight"] = {"saved_offsets": offsets}

    rewrite(first(shards), change)
    refused(shards, r"'embed\.weight': saved_offsets, expected 2 integers", "CKM107")


def test_a_shard_without_sharding_info(shards: Path) -> None:
    save_file(load_file(first(shards)), first(shards), {"format": "pt"})
    refused(shards, "expected a JSON object", "CKM107")


def test_a_truncated_shard(shards: Path) -> None:
    file = first(shards, 2)
    file.write_bytes(file.read_bytes()[:-1])
    refused(shards, r"shard-00002.*truncated", "CKM104")
