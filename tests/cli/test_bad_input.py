"""Bad input of every kind gives one line that names it and the next step, exit code 2, and no output.

Each case starts from a real checkpoint and damages it, through the command line as a user would.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptmap_cli.main import main
from safetensors.torch import save_file

Make = Callable[[Path], Path]
CASES: dict[str, tuple[str, Make]] = {}
"""Name -> (what the error must say, what makes the bad checkpoint in a fresh folder)."""

WEIGHTS = {"a.weight": torch.arange(64.0).reshape(8, 8), "b.bias": torch.ones(8)}


def bad(says: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES[make.__name__] = (says, make)
        return make

    return register


def saved(folder: Path, value: Any = None, name: str = "model.pt") -> Path:
    torch.save(WEIGHTS if value is None else value, folder / name)
    return folder / name


def tensors(folder: Path, name: str = "model.safetensors") -> Path:
    save_file(WEIGHTS, folder / name)
    return folder / name


def header(folder: Path, document: Any, payload: bytes = b"\0" * 8) -> Path:
    """A safetensors file with any header."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + payload)
    return folder / "x.safetensors"


def distributed(folder: Path, value: Any = None) -> Path:
    dcp.save(WEIGHTS if value is None else value, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def sharded(folder: Path) -> Path:
    """Two shards and an index, as save_pretrained lays them out."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, key in zip(names, WEIGHTS, strict=True):
        save_file({key: WEIGHTS[key]}, folder / name)
    index = {"metadata": {"total_size": 288}, "weight_map": dict(zip(WEIGHTS, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def reindexed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    sharded(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index = change(index) or index
    file.write_text(json.dumps(index))
    return folder


def rezipped(
    folder: Path, change: Callable[[str, bytes], tuple[str, bytes] | None], **how: Any
) -> Path:
    """The records of a torch.save file, changed and zipped anew."""
    source = saved(folder, name="source.pt")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(folder / "x.pt", "w", **how) as new:
        for name in old.namelist():
            changed = change(name, old.read(name))
            if changed is not None:
                new.writestr(*changed)
    return folder / "x.pt"


class Evil:
    """Unpickled by pickle, it would make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


# ------------------------------------------------------------------------------ containers


@bad("no such file or directory")
def missing(folder: Path) -> Path:
    return folder / "nothing.pt"


@bad(r"is empty \(0 bytes\)")
def empty_file(folder: Path) -> Path:
    (folder / "x.pt").touch()
    return folder / "x.pt"


@bad("truncated, expected a checkpoint, found")
def seven_bytes(folder: Path) -> Path:
    (folder / "x.pt").write_bytes(b"\1\2\3\4\5\6\7")
    return folder / "x.pt"


@bad(r"is a Git LFS pointer \(\d+ bytes\)")
def lfs_pointer(folder: Path) -> Path:
    (folder / "x.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    return folder / "x.safetensors"


@bad("is text, not weights")
def html_page(folder: Path) -> Path:
    (folder / "x.safetensors").write_text("<!DOCTYPE html><html>404</html>")
    return folder / "x.safetensors"


@bad("is text, not weights")
def json_error(folder: Path) -> Path:
    (folder / "x.bin").write_text('{"error": "Repository not found"}')
    return folder / "x.bin"


@bad("truncated|central directory|cut short|ends")
def truncated_zip(folder: Path) -> Path:
    file = saved(folder)
    file.write_bytes(file.read_bytes()[:-200])
    return file


@bad("truncated|ends|bytes")
def truncated_safetensors(folder: Path) -> Path:
    file = tensors(folder)
    file.write_bytes(file.read_bytes()[:-5])
    return file


@bad("before torch 1.6|legacy")
def legacy_save(folder: Path) -> Path:
    torch.save(WEIGHTS, folder / "x.pt", _use_new_zipfile_serialization=False)
    return folder / "x.pt"


@bad("expected a torch.save zip or safetensors, found a file that begins")
def random_bytes(folder: Path) -> Path:
    (folder / "x.bin").write_bytes(bytes(range(200, 256)) * 20)
    return folder / "x.bin"


@bad("compressed")
def deflated_member(folder: Path) -> Path:
    return rezipped(folder, lambda n, d: (n, d), compression=zipfile.ZIP_DEFLATED)


@bad(r"\.\.")
def member_with_dots(folder: Path) -> Path:
    return rezipped(folder, lambda n, d: (n.replace("source/data/0", "source/../data/0"), d))


@bad("twice|duplicate")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def duplicate_member(folder: Path) -> Path:
    source = saved(folder, name="source.pt")
    with zipfile.ZipFile(source, "a") as file:
        file.writestr("source/data/0", b"\0" * 256)
    return source


@bad("zip without data.pkl, not a torch.save file; it holds hello.txt")
def plain_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("hello.txt", "hello")
    return folder / "x.zip"


@bad("holds no object: an error ended torch.save before it had written one")
def save_that_failed(folder: Path) -> Path:
    with pytest.raises(
        (AttributeError, pickle.PicklingError), match="pickle"
    ):  # Python 3.14: the second
        saved(folder, {**WEIGHTS, "key": lambda step: step})
    return folder / "model.pt"


@bad("storage|data/0")
def missing_storage(folder: Path) -> Path:
    return rezipped(folder, lambda n, d: None if n.endswith("data/0") else (n, d))


@bad("storage|bytes")
def short_storage(folder: Path) -> Path:
    return rezipped(folder, lambda n, d: (n, d[:-4]) if n.endswith("data/0") else (n, d))


@bad("little|byte order|big")
def big_endian(folder: Path) -> Path:
    return rezipped(folder, lambda n, d: (n, b"big") if n.endswith("byteorder") else (n, d))


# ------------------------------------------------------------------------------ safetensors


@bad("header")
def header_longer_than_file(folder: Path) -> Path:
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", 5000) + b'{"a":' + b" " * 20)
    return folder / "x.safetensors"


@bad("dtype|F99")
def unknown_dtype(folder: Path) -> Path:
    return header(folder, {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}})


@bad("8|bytes")
def shape_and_bytes_differ(folder: Path) -> Path:
    return header(folder, {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})


@bad("overlap|hole|begin|offset")
def overlapping_tensors(folder: Path) -> Path:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return header(folder, {"a": entry, "b": entry})


@bad("twice|duplicate")
def duplicate_key(folder: Path) -> Path:
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    return header(folder, b'{"a":%b,"a":%b}' % (entry % (0, 4), entry % (4, 8)))


@bad("offset|reversed|range")
def reversed_offsets(folder: Path) -> Path:
    return header(folder, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})


@bad("UTF-8|JSON|header")
def not_unicode(folder: Path) -> Path:
    return header(folder, b'{"\xff": 1}')


# ------------------------------------------------------------------------------ index


@bad("of 2 shards, '")
def listed_shard_absent(folder: Path) -> Path:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


@bad("leads out of the directory")
def shard_path_escapes(folder: Path) -> Path:
    return reindexed(folder, lambda i: i["weight_map"].update({"b.bias": "../../etc/passwd"}))


@bad("weight_map")
def weight_map_is_a_list(folder: Path) -> Path:
    return reindexed(folder, lambda i: {**i, "weight_map": [1, 2]})


@bad("is not an index")
def index_is_no_json(folder: Path) -> Path:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    return folder


@bad(r"a\.weight")
def tensor_in_another_shard(folder: Path) -> Path:
    name = "model-00002-of-00002.safetensors"
    return reindexed(folder, lambda i: i["weight_map"].update({"a.weight": name}))


@bad("pointer")
def shard_is_a_pointer(folder: Path) -> Path:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 288\n"
    )
    return folder


# ------------------------------------------------------------------------------ pickles


@bad("os.system|posix.system")
def evil_pickle(folder: Path) -> Path:
    return saved(folder, {"model": WEIGHTS, "hook": Evil(folder / "pwned")})


@bad("os.system|posix.system")
def evil_metadata(folder: Path) -> Path:
    path = distributed(folder)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(folder / "pwned")))
    return path


class Strange(torch.Tensor):
    """A tensor class that nobody knows."""


@bad("unknown class .*Strange")
def unknown_tensor_class(folder: Path) -> Path:
    return saved(folder, {**WEIGHTS, "c": torch.ones(2).as_subclass(Strange)})


@bad("unknown class argparse.Namespace")
def namespace_among_weights(folder: Path) -> Path:
    import argparse

    return saved(folder, {"model": {**WEIGHTS, "args": argparse.Namespace(lr=1e-3)}})


@bad("one pickled object of class torch.nn.modules.linear.Linear, which ckptmap never builds")
def whole_module(folder: Path) -> Path:
    return saved(folder, torch.nn.Linear(2, 2))


@bad("one bare tensor, expected a dict")
def bare_tensor(folder: Path) -> Path:
    return saved(folder, torch.ones(3))


@bad("it has objects of torch._utils._rebuild_sparse_tensor")
def sparse_only(folder: Path) -> Path:
    return saved(folder, {"w": torch.eye(3).to_sparse()})


@bad("0.weight: was on the meta device when it was saved, so its values are not here")
def offloaded_model(folder: Path) -> Path:
    """accelerate keeps the values elsewhere; `state_dict()` of the model does not ask it."""
    from accelerate import cpu_offload

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return saved(folder, cpu_offload(model, execution_device=torch.device("cpu")).state_dict())


@bad("holds 2 tensors on the meta device, which have no values")
def model_on_meta(folder: Path) -> Path:
    return saved(folder, torch.nn.Linear(2, 2, device="meta").state_dict())


@bad("expand|stride")
def absurd_expansion(folder: Path) -> Path:
    return saved(folder, {"w": torch.zeros(1).expand(100_000, 100_000)})


@bad("holds no model weights")
def no_tensor_at_all(folder: Path) -> Path:
    return saved(folder, {"step": 1})


# ------------------------------------------------------------------------------ DCP


@bad(r"unfinished DCP save \(only \.metadata\.tmp\)")
def save_that_died(folder: Path) -> Path:
    path = distributed(folder)
    (path / ".metadata").rename(path / ".metadata.tmp")
    return path


@bad("without their .metadata")
def data_without_metadata(folder: Path) -> Path:
    path = distributed(folder)
    (path / ".metadata").unlink()
    return path


@bad("metadata")
def metadata_is_garbage(folder: Path) -> Path:
    path = distributed(folder)
    (path / ".metadata").write_bytes(b"\x80\x04garbage")
    return path


@bad(r"__0_0\.distcp")
def data_file_missing(folder: Path) -> Path:
    path = distributed(folder)
    (path / "__0_0.distcp").unlink()
    return path


@bad(r"__0_0\.distcp")
def data_file_truncated(folder: Path) -> Path:
    path = distributed(folder)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-300])
    return path


@bad("leads out of the directory")
def data_file_outside(folder: Path) -> Path:
    path = distributed(folder)
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    assert metadata.storage_data is not None
    for info in metadata.storage_data.values():
        info.relative_path = "../outside/" + info.relative_path
    shutil.copytree(path, folder / "outside")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def rechunked(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Metadata whose chunks of `a.weight` start at these rows and have these many."""
    path = distributed(folder)
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    entry: Any = metadata.state_dict_metadata["a.weight"]
    entry.chunks[0].sizes = torch.Size([sizes[0][1], 8])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@bad(r"a\.weight")
def chunks_leave_a_hole(folder: Path) -> Path:
    return rechunked(folder, [(0, 5)])


@bad(r"a\.weight")
def chunks_larger_than_stored(folder: Path) -> Path:
    return rechunked(folder, [(0, 9)])


@bad("is numpy's .npz, not a torch.save file")
def numpy_archive(folder: Path) -> Path:
    import numpy as np

    np.savez(folder / "x.npz", a=np.ones(3))
    return folder / "x.npz"


@bad("is a TorchScript archive")
def torchscript(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and there are many
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "x.pt")
    return folder / "x.pt"


@bad("is an HDF5 file")
def hdf5(folder: Path) -> Path:
    (folder / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    return folder / "x.h5"


@bad("is packed with gzip")
def gzipped(folder: Path) -> Path:
    with gzip.open(folder / "x.pt.gz", "wb") as file:
        file.write(saved(folder).read_bytes())
    return folder / "x.pt.gz"


@bad("an empty dict")
def nothing_saved(folder: Path) -> Path:
    return saved(folder, {})


@bad(r"a dict with the key \('a', 1\)")
def keys_that_are_no_names(folder: Path) -> Path:
    return saved(folder, {("a", 1): torch.ones(2), "b": torch.ones(2)})


@bad("key '' is empty, or consists of wrapper segments alone")
def empty_key(folder: Path) -> Path:
    return saved(folder, {**WEIGHTS, "": torch.ones(2)})


# ------------------------------------------------------------------------------ directories


@bad("is an empty directory")
def empty_directory(folder: Path) -> Path:
    (folder / "d").mkdir()
    return folder / "d"


@bad("is a tar archive, which ckptmap does not read")
def tar_archive(folder: Path) -> Path:
    with tarfile.open(folder / "x.pt", "w") as archive:
        archive.add(saved(folder), "model.pt")
    return folder / "x.pt"


@bad(r"zip without data\.pkl, not a torch\.save file; it holds config\.json, model\.saf")
def packed_directory(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (folder / "config.json", tensors(folder)):
            archive.write(file, file.name)
    return folder / "x.zip"


@bad("is a bare pickle, which ckptmap does not read")
def bare_pickle(folder: Path) -> Path:
    (folder / "x.pkl").write_bytes(pickle.dumps({"a.weight": [1.0]}))
    return folder / "x.pkl"


@bad("by its name a file of another framework")
def flax_file(folder: Path) -> Path:
    (folder / "flax_model.msgpack").write_bytes(b"\x81\xa6params\x81\xa1a\xc4\x04" + bytes(32))
    return folder / "flax_model.msgpack"


@bad("a model's config and tokenizer without its weights; it holds config.json")
def tokenizer_alone(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@bad("holds the state of an optimizer and no model weights")
def optimizer_alone(folder: Path) -> Path:
    """As the Trainer leaves it beside the weights: index -> moments, which look like weights."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return saved(folder, optimizer.state_dict(), "optimizer.pt")


@bad("is a directory without a checkpoint; it holds optimizer_0, random_states_0.pkl")
def accelerate_without_weights(folder: Path) -> Path:
    distributed(folder).rename(folder / "optimizer_0")
    saved(folder, {"step": 3}, "random_states_0.pkl")
    return folder


@bad(r"\.metadata: is empty \(0 bytes\): the save did not finish")
def empty_metadata(folder: Path) -> Path:
    place = distributed(folder)
    (place / ".metadata").write_bytes(b"")
    return place


@bad(r"index\.json: is empty \(0 bytes\), expected an index")
def empty_index(folder: Path) -> Path:
    (sharded(folder) / "model.safetensors.index.json").write_bytes(b"")
    return folder


@bad("a peft adapter without its base")
def peft_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    save_file(WEIGHTS, folder / "adapter_model.safetensors")
    return folder


@bad("the directory of a DeepSpeed checkpoint without the folder of its step")
def deepspeed_without_step(folder: Path) -> Path:
    (folder / "zero_to_fp32.py").touch()
    (folder / "latest").write_text("global_step1")
    return folder


@bad("latest names global_step2, which is not there; found global_step1")
def deepspeed_latest_is_missing(folder: Path) -> Path:
    (folder / "latest").write_text("global_step2")
    (folder / "global_step1").mkdir()
    saved(
        folder / "global_step1",
        {"optimizer_state_dict": {}},
        name="zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    return folder


@bad("has no mp_rank_00_model_states.pt, which names the weights and their shapes")
def deepspeed_without_model(folder: Path) -> Path:
    saved(
        folder, {"optimizer_state_dict": {}}, name="bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    return folder


@bad("is a partition of DeepSpeed .stage not stated. without its fp32 weights")
def deepspeed_step(folder: Path) -> Path:
    """The names of rank files, and an "optimizer" that is nothing."""
    saved(folder, {"module": WEIGHTS, "optimizer": None}, name="mp_rank_00_model_states.pt")
    saved(
        folder, {"optimizer_state_dict": {}}, name="bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    return folder


@bad("zero: has w, which the model file does not list")
def deepspeed_universal(folder: Path) -> Path:
    """A folder of a parameter that is of another model."""
    saved(folder, {"module": WEIGHTS}, name="mp_rank_00_model_states.pt")
    (folder / "zero" / "w").mkdir(parents=True)
    saved(folder / "zero" / "w", {"param": torch.ones(2)}, name="fp32.pt")
    return folder


@bad("begins with zeros, expected a checkpoint: 4096 bytes were reserved and not written")
def zeros(folder: Path) -> Path:
    """What a power cut leaves of a file whose blocks were never written."""
    (folder / "model.pt").write_bytes(bytes(4096))
    return folder / "model.pt"


@bad("is the part of one rank of a DeepSpeed checkpoint")
def deepspeed_zero3_file(folder: Path) -> Path:
    """Its weights are placeholders: converted, they would be a model of nothing."""
    empty = {name: torch.empty(0) for name in WEIGHTS}
    return saved(folder, {"module": empty}, name="zero_pp_rank_0_mp_rank_00_model_states.pt")


@bad("is one file of a DCP directory")
def one_distcp_file(folder: Path) -> Path:
    return distributed(folder) / "__0_0.distcp"


@bad("is one file of a DCP directory")
def metadata_file(folder: Path) -> Path:
    return distributed(folder) / ".metadata"


@bad("is a JSON file")
def index_file(folder: Path) -> Path:
    return sharded(folder) / "model.safetensors.index.json"


@bad("a directory without a checkpoint; it holds notes.txt")
def other_directory(folder: Path) -> Path:
    (folder / "notes.txt").write_text("hello")
    return folder


@bad("is not a checkpoint, but holds some: run1, run2")
def parent_of_several(folder: Path) -> Path:
    for name in ("run1", "run2"):
        (folder / name).mkdir()
        distributed(folder / name).rename(folder / f"{name}.tmp")
        (folder / name).rmdir()
        (folder / f"{name}.tmp").rename(folder / name)
    return folder


@bad(r"rank 1 .*missing|missing.*rank")
def rank_missing(folder: Path) -> Path:
    for rank in (0, 2):
        saved(folder, name=f"model_world_size_3_rank_{rank}.pt")
    return folder


@bad(r"a\.w.*differ|replica|disagree")
def ranks_disagree(folder: Path) -> Path:
    saved(folder, name="model_world_size_2_rank_0.pt")
    saved(folder, {**WEIGHTS, "a.weight": torch.zeros(3, 3)}, name="model_world_size_2_rank_1.pt")
    return folder


@pytest.mark.parametrize("name", sorted(CASES))
def test_refused_with_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says, make = CASES[name]
    source_folder, out_folder = tmp_path / "in", tmp_path / "out"
    source_folder.mkdir()
    out_folder.mkdir()
    source = make(source_folder)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for to in ("hf", "fsdp2"):
        code = main(["convert", str(source), str(out_folder / "dst"), "--to", to])
        found = capsys.readouterr()
        assert code == 2, found.err
        assert found.out == ""
        lines = found.err.strip().splitlines()
        assert re.match(r"error\[CKM\d{3}\]: ", lines[0])
        assert re.search(says, lines[0]), lines[0]
        assert len(lines) == 2 and lines[1].startswith("  hint: "), found.err
        assert "Traceback" not in found.err
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert not (source_folder / "pwned").exists()


def test_replicas_that_disagree_are_found_before_publishing(tmp_path: Path, capsys: Any) -> None:
    """Values, not headers: only the run can see it."""
    (tmp_path / "in").mkdir()
    saved(tmp_path / "in", name="model_world_size_2_rank_0.pt")
    changed = {**WEIGHTS, "a.weight": WEIGHTS["a.weight"] + 1}
    saved(tmp_path / "in", changed, name="model_world_size_2_rank_1.pt")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "dst"), "--to", "hf"]) == 2
    assert "error[CKM310]: a.weight" in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()


def test_damaged_record_is_found_by_its_crc(tmp_path: Path, capsys: Any) -> None:
    """torch.load would give the wrong numbers without a word."""
    file = saved(tmp_path)
    data = bytearray(file.read_bytes())
    at = data.find(WEIGHTS["a.weight"].numpy().tobytes())
    data[at + 17] ^= 4
    file.write_bytes(data)
    assert main(["convert", str(file), str(tmp_path / "dst.pt"), "--to", "full"]) in (2, 3)
    assert "CRC" in capsys.readouterr().err
    assert not (tmp_path / "dst.pt").exists()


@pytest.mark.parametrize(
    ("kind", "says"),
    [("same", "source"), ("inside", "inside"), ("around", "inside|contains|holds")],
)
def test_destination_over_source_is_refused(
    kind: str, says: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a").mkdir()
    source = distributed(tmp_path / "a")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    dst = {"same": source, "inside": source / "out", "around": tmp_path / "a"}[kind]
    assert main(["convert", str(source), str(dst), "--to", "hf", "--overwrite"]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before


def test_destination_that_exists_or_is_special(tmp_path: Path, capsys: Any) -> None:
    source = saved(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    os.mkfifo(tmp_path / "fifo")
    for name in ("there", "link", "fifo"):
        for more in ([], ["--overwrite"]):
            assert main(["convert", str(source), str(tmp_path / name), "--to", "hf", *more]) == 2
            assert "error[CKM30" in capsys.readouterr().err
    assert (tmp_path / "there" / "x").exists()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("device", ["cuda:99", "meta", "nonsense"])
def test_a_device_that_is_not_here(device: str, tmp_path: Path, capsys: Any) -> None:
    """Refused before anything is written; where bytes only move there is nothing to compute."""
    source = saved(tmp_path)
    command = ["convert", str(source), str(tmp_path / "dst.pt"), "--device", device, "--to"]
    assert main([*command, "full-bf16"]) == 2
    assert f"error[CKM210]: --device {device}: cannot be used here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
    assert main([*command, "full"]) == 0


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, capsys: Any) -> None:
    """What an unset variable of a shell leaves."""
    source = saved(tmp_path)
    for args in (["inspect", ""], ["convert", "", "dst"], ["convert", str(source), ""]):
        more = ["--to", "hf"] if args[0] == "convert" else []
        assert main([*args, *more]) == 2
        assert re.search("path of a checkpoint is empty|an empty path", capsys.readouterr().err)


def test_one_shard_alone_says_that_it_is_one_of_several(tmp_path: Path, capsys: Any) -> None:
    shard = sharded(tmp_path) / "model-00001-of-00002.safetensors"
    assert main(["plan", str(shard), "--to", "full"]) == 0
    assert f"note: this is one of 2 files of a model; to open all of them, give {tmp_path}" in (
        capsys.readouterr().out
    )


def test_weights_without_elements_are_remarked(tmp_path: Path, capsys: Any) -> None:
    """Saved under ZeRO-3 without gathering, and renamed since."""
    file = saved(tmp_path, {name: torch.empty(0) for name in ("a", "b")} | {"c": torch.ones(2)})
    assert main(["plan", str(file), "--to", "full"]) == 0
    assert "note: 2 of 3 weights have no elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("inspect m.pt", "CKM101"),
        ("plan m.pt --to hf", "CKM101"),
        ("diff m.pt m.pt", "CKM101"),
        ("verify m.pt", "CKM101"),
        ("convert SRC DST --to full --like m.pt", "CKM101"),
        ("merge a b DST --to hf", "CKM101"),
        ("report SRC -o page.html", "CKM304"),
        ("plan SRC --to hf -o plan.json", "CKM304"),
    ],
)
def test_a_working_directory_that_is_gone(
    command: str, code: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A job may clean up below a shell; no path there can be read or written."""
    torch.save({"w": torch.ones(2)}, tmp_path / "src.pt")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    places = {"SRC": str(tmp_path / "src.pt"), "DST": str(tmp_path / "dst")}
    assert main([places.get(word, word) for word in command.split()]) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"error[{code}]: ") and out.err.count("\n") == 2, out.err
    assert not out.out and not (tmp_path / "dst").exists()
