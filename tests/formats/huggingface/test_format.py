"""Hugging Face directories: transformers' own are read, transformers reads ours, broken ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.huggingface.format import HfDirectory, HfWriter
from ckptmap.formats.huggingface.shard_index import split_shards
from ckptmap.formats.safetensors.header_writer import emit
from ckptmap.protocols import OutState, OutTensor
from ckptmap.sharding.full import Full
from ckptmap.tensors import Box, TensorInfo
from tests.support.container_io import materialise, out_tensors, read_leaf, same

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def saved(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    path = tmp_path_factory.mktemp("hf") / "saved"
    llama.save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.fixture
def copy(saved: FilePath, tmp_path: FilePath) -> FilePath:
    return FilePath(shutil.copytree(saved, tmp_path / "copy"))


def paths_of(model: Any) -> dict[Any, Any]:
    return {(key,): tensor for key, tensor in model.state_dict().items()}


def test_reads_save_pretrained(llama: Any, saved: FilePath) -> None:
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 2
    place = look(saved)
    assert HfDirectory().claims(place)
    index = HfDirectory().index(place)
    tensors = paths_of(llama)
    assert set(index.leaves) == set(tensors)
    assert all(same(read_leaf(leaf), tensors[path]) for path, leaf in index.leaves.items())
    assert index.notes == ()
    names = {FilePath(file).name for file in index.files}
    shards = {path.name for path in saved.glob("*.safetensors")}
    assert names == shards | {"model.safetensors.index.json"}
    assert all(FilePath(file).is_absolute() for file in index.files)


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_transformers_reads_ours(llama: Any, limit: int, tmp_path: FilePath) -> None:
    from transformers import LlamaForCausalLM

    tensors = paths_of(llama)
    state = OutState(out_tensors(tensors, Full()), max_shard_nbytes=limit)
    materialise(HfWriter().files(state, "out"), tmp_path, tensors)
    llama.config.save_pretrained(tmp_path)
    loaded, report = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values())
    assert all(same(t, tensors[(k,)]) for k, t in loaded.state_dict().items())
    names = {path.name for path in tmp_path.iterdir()}
    assert ("model.safetensors" in names) == (limit == 10**9)
    assert ("model.safetensors.index.json" in names) == (limit != 10**9)


def test_shards_and_index_are_those_of_save_pretrained(
    llama: Any, saved: FilePath, tmp_path: FilePath
) -> None:
    """Byte for byte, as all tensors are of one dtype and the order is the same."""
    from safetensors import safe_open

    tensors = paths_of(llama)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    state = OutState(out_tensors(tensors, Full()), max_shard_nbytes=20_000)
    materialise(HfWriter().files(state, "out"), tmp_path, tensors)
    ours = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert ours["weight_map"] == index["weight_map"]
    assert ours["metadata"]["total_size"] == index["metadata"]["total_size"]
    for shard in saved.glob("*.safetensors"):
        with safe_open(shard, "pt") as theirs, safe_open(tmp_path / shard.name, "pt") as file:
            assert file.metadata() == theirs.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(theirs.keys())


@pytest.mark.parametrize(
    "sizes, limit",
    [
        ([6, 6, 2, 6, 2, 2], 10),
        ([11, 1, 12, 1, 13], 10),
        ([0, 10, 0, 10, 0], 10),
        ([5], 10),
        ([], 10),
        ([20, 20], 10),
        (list(range(40)), 57),
    ],
)
def test_split_is_huggingface_hubs(sizes: list[int], limit: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    theirs = split_state_dict_into_shards_factory(
        {f"t{i:02}": n for i, n in enumerate(sizes)},
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    found = [[int(k[1:]) for k in keys] for keys in theirs.filename_to_tensors.values()]
    assert split_shards(sizes, limit) == found


def test_safetensors_reads_mixed_dtypes_aligned(tmp_path: FilePath) -> None:
    from safetensors.torch import load_file

    tensors: dict[Any, Any] = {
        ("a.b", "x"): torch.tensor([1, -2, 3], dtype=torch.int8),
        ("scale",): torch.tensor(3.5),
        ("c",): torch.randn(3, 5, dtype=torch.float64),
        ("mask",): torch.tensor([True, False, True]),
        ("empty",): torch.empty(0, 4, dtype=torch.bfloat16),
        ("h",): torch.randn(7).half(),
    }
    outs = HfWriter().files(OutState(out_tensors(tensors, Full())), "out")
    assert all(slot.offset % tensors[slot.path].element_size() == 0 for slot in outs[0].slots)
    materialise(outs, tmp_path, tensors)
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == {"a.b.x", "scale", "c", "mask", "empty", "h"}
    assert all(same(loaded[".".join(path)], tensor) for path, tensor in tensors.items())
    index = HfDirectory().index(look(tmp_path))
    assert all(same(read_leaf(index.leaves[(k,)]), t) for k, t in loaded.items())


def quantized() -> dict[Any, Any]:
    return {
        ("a.w.quantized_data",): torch.arange(32, dtype=torch.uint8),
        ("a.w.quantized_scalers",): torch.ones(4, dtype=torch.int8),
        ("b.weight",): torch.randn(4),
    }


def test_records_go_with_their_shards(tmp_path: FilePath) -> None:
    """Named so that transformers does not take them for its own and fill in random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tensors = quantized()
    record = {"scheme": "nf4", "version": 1, "shape": [8, 8]}
    state = OutState(out_tensors(tensors, Full()), records={"a.w": record}, max_shard_nbytes=40)
    outs = HfWriter().files(state, "out")
    assert [out.name for out in outs] == [
        "ckptmap-00001-of-00002.safetensors",
        "ckptmap-00002-of-00002.safetensors",
        "ckptmap.safetensors.index.json",
    ]
    materialise(outs, tmp_path, tensors)
    index = HfDirectory().index(look(tmp_path))
    assert index.records == {"a.w": record}
    assert set(index.leaves) == set(tensors)
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_records_that_differ_are_refused(tmp_path: FilePath) -> None:
    tensors = quantized()
    for shape in (8, 9):
        state = OutState(out_tensors(tensors, Full()), records={"a.w": {"n": shape}}, max_shard_nbytes=33)  # fmt: skip
        materialise(HfWriter().files(state, "out")[shape - 8 :: 2], tmp_path, tensors)
    with pytest.raises(SourceError, match=r"record of 'a\.w' differs from another shard's"):
        HfDirectory().index(look(tmp_path))


def test_writer_is_deterministic_and_skips_aliases(tmp_path: FilePath) -> None:
    info = TensorInfo((2,), "float32")
    whole = ((0, Box.whole((2,))),)
    tensors = [OutTensor(("w",), info, whole), OutTensor(("v",), info, whole, alias_of=("w",))]
    first, again = (HfWriter().files(OutState(tensors), "out")[0] for _ in range(2))
    assert list(first.seal((), None)) == list(again.seal((), None))
    assert [slot.path for slot in first.slots] == [("w",)]


def test_two_tensors_of_one_key() -> None:
    info = TensorInfo((), "float32")
    tensors = [OutTensor(path, info, ((0, Box((), ())),)) for path in (("a", "b"), ("a.b",))]
    with pytest.raises(PlanError, match=r"two tensors would be written as 'a\.b'"):
        HfWriter().files(OutState(tensors), "out")


# ------------------------------------------------------------------------------ bad input


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[FilePath], None]:
    def apply(directory: FilePath) -> None:
        file = directory / "model.safetensors.index.json"
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))

    return apply


def shards_of(directory: FilePath) -> list[FilePath]:
    return sorted(directory.glob("model-*.safetensors"))


def first_key(tree: dict[str, Any]) -> str:
    """A key whose shard holds others too."""
    shards = list(tree["weight_map"].values())
    return next(key for key, shard in tree["weight_map"].items() if shards.count(shard) > 1)


def swap_tensor(directory: FilePath) -> None:
    """A tensor of shard 2 also in a file of its own that takes the place of shard 1."""
    from safetensors.torch import load_file, save_file

    first, second = shards_of(directory)[:2]
    key, tensor = next(iter(load_file(second).items()))
    save_file(load_file(first) | {key: tensor}, first)


def drop_tensor(directory: FilePath) -> None:
    from safetensors.torch import load_file, save_file

    first = shards_of(directory)[0]
    tensors = load_file(first)
    tensors.popitem()
    save_file(tensors, first)


def link_out(directory: FilePath) -> None:
    shard = shards_of(directory)[0]
    shard.rename(directory.parent / "outside.safetensors")
    shard.symlink_to(directory.parent / "outside.safetensors")


def lfs_pointer(directory: FilePath) -> None:
    shards_of(directory)[1].write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 497772\n"
    )


def no_index(directory: FilePath) -> None:
    (directory / "model.safetensors.index.json").unlink()
    shards_of(directory)[-1].rename(directory / (shards_of(directory)[-1].name + ".incomplete"))


def set_map(value: Any) -> Callable[[FilePath], None]:
    return edit_index(lambda tree: tree.update(weight_map=value))


def set_shard(name: str) -> Callable[[FilePath], None]:
    return edit_index(lambda tree: tree["weight_map"].update({first_key(tree): name}))


BAD: dict[str, tuple[Callable[[FilePath], None], str, str]] = {
    "map is a list": (set_map([]), "CKM108", "weight_map, expected an object .* found list"),
    "map is empty": (set_map({}), "CKM108", "weight_map, expected an object of names"),
    "no map": (edit_index(lambda t: t.pop("weight_map")), "CKM108", "found nothing"),
    "map of numbers": (set_map({"w": 7}), "CKM108", r"weight_map\['w'\], expected a file name"),
    "index is a list": (
        lambda d: (d / "model.safetensors.index.json").write_text("[1]") and None,
        "CKM108",
        "weight_map, expected an object",
    ),
    "index is no json": (
        lambda d: (d / "model.safetensors.index.json").write_text("<html>") and None,
        "CKM108",
        "is not an index",
    ),
    "index nested": (
        lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000) and None,
        "CKM108",
        "nested too deeply",
    ),
    "index names twice": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"a":1,"a":2}') and None,
        "CKM108",
        "expected each key once, got 'a' twice",
    ),
    "absolute": (set_shard("/etc/passwd"), "CKM116", "'/etc/passwd' leads out"),
    "dots": (set_shard("../x.safetensors"), "CKM116", "relative path without '..'"),
    "windows dots": (set_shard("..\\x.safetensors"), "CKM116", "leads out of the directory"),
    "drive": (set_shard("C:x.safetensors"), "CKM116", "leads out of the directory"),
    "UNC": (set_shard("\\\\host\\x"), "CKM116", "leads out of the directory"),
    "NUL": (set_shard("a\0b"), "CKM116", "leads out of the directory"),
    "surrogate": (set_shard("\ud800"), "CKM116", "expected a name that a file can have"),
    "newline": (set_shard("a\nb"), "CKM108", r"of \d+ shards, 'a\\nb'.* is missing"),
    "no name": (set_shard(""), "CKM116", "leads out of the directory"),
    "symlink": (link_out, "CKM116", "it is a symlink to .*outside.safetensors"),
    "absent shard": (
        lambda d: shards_of(d)[1].unlink(),
        "CKM108",
        r"of \d+ shards, 'model-00002-of-.*safetensors'.* is missing",
    ),
    "incomplete set": (no_index, "CKM108", r"of \d+ shards, '.*safetensors'.* is missing; finish"),
    "listed elsewhere": (
        edit_index(lambda t: t["weight_map"].update(
            {first_key(t): sorted(set(t["weight_map"].values()) - {t["weight_map"][first_key(t)]})[0]}
        )),
        "CKM108",
        "is listed in .* but stored in",
    ),
    "not stored": (drop_tensor, "CKM108", r"is listed in .* but not stored there \(1 such\)"),
    "in two shards": (swap_tensor, "CKM108", "is (listed|stored) in .* (stored in|and in)"),
    "LFS pointer": (lfs_pointer, "CKM102", "Git-LFS pointer of 71 bytes.*git lfs pull"),
    "error page": (
        lambda d: shards_of(d)[1].write_bytes(b"<!DOCTYPE html><html>404") and None,
        "CKM103",
        "an HTML or XML page of 24 bytes",
    ),
    "json answer": (
        lambda d: shards_of(d)[1].write_bytes(b'{"error":"gated"}') and None,
        "CKM103",
        "JSON text of 17 bytes",
    ),
    "truncated": (
        lambda d: shards_of(d)[1].write_bytes(shards_of(d)[1].read_bytes()[:-1]) and None,
        "CKM104",
        "truncated, expected .* bytes, found",
    ),
    "two indexes": (
        lambda d: [
            shutil.copy(d / "model.safetensors.index.json", d / f"{n}.safetensors.index.json")
            for n in "ab"
        ]
        and (d / "model.safetensors.index.json").unlink(),
        "CKM108",
        r"expected one index, found 2: a\.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_directory(name: str, copy: FilePath) -> None:
    harm, code, match = BAD[name]
    harm(copy)
    place = look(copy)
    assert HfDirectory().claims(place)
    with pytest.raises(SourceError, match=match) as caught:
        HfDirectory().index(place)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_files_that_are_not_read_are_noted(copy: FilePath) -> None:
    shutil.copy(shards_of(copy)[0], copy / "model-00009-of-00009.safetensors")
    (copy / "model-00001-of-00002.safetensors.incomplete").touch()
    edit_index(lambda tree: tree["metadata"].update(total_size=5))(copy)
    key = ""

    def forget(tree: dict[str, Any]) -> None:
        nonlocal key
        key = first_key(tree)
        del tree["weight_map"][key]

    edit_index(forget)(copy)
    index = HfDirectory().index(look(copy))
    assert (key,) in index.leaves
    notes = "\n".join(index.notes)
    assert f"does not list 1 stored tensor: {key}" in notes
    assert "gives total_size 5, the shards hold" in notes
    assert "not read, because no index lists it: model-00009-of-00009.safetensors" in notes
    assert (
        "not read, because its download is unfinished: model-00001-of-00002.safetensors.incomplete"
        in notes
    )


def test_weights_in_other_forms_are_named(copy: FilePath) -> None:
    """Of an earlier save they may be other weights."""
    before = HfDirectory().index(look(copy))
    assert not before.unread_files
    for name in ("pytorch_model.bin", "tf_model.h5", "training_args.bin"):
        (copy / name).write_bytes(b"PK")
    index = HfDirectory().index(look(copy))
    assert (
        index.unread_files == ("pytorch_model.bin", "tf_model.h5") and index.files == before.files
    )
    with ckptmap.open(copy) as ckpt:
        assert "left behind: pytorch_model.bin, tf_model.h5" in ckpt.notes
    assert "left behind: pytorch_model.bin, tf_model.h5" in ckptmap.plan(copy, "hf").notes


@pytest.mark.parametrize("to", ["hf", "full"])
def test_what_a_training_loop_saved_beside_the_weights_is_named(to: str, copy: FilePath) -> None:
    """`save_pretrained`, and `torch.save` of the optimizer: it was passed over without a word."""
    torch.save({"state": {}, "param_groups": []}, copy / "optimizer.pt")
    (copy / "scheduler_1.bin").write_bytes(b"PK")
    assert "left behind: optimizer.pt, scheduler_1.bin" in ckptmap.plan(copy, to).notes


def test_cache_snapshot_links_to_blobs(saved: FilePath, tmp_path: FilePath) -> None:
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / "0123abc"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(saved.iterdir()):
        shutil.copy(file, repo / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    assert len(HfDirectory().index(look(snapshot)).leaves) == len(
        HfDirectory().index(look(saved)).leaves
    )


def test_complete_set_without_index(copy: FilePath) -> None:
    before = set(HfDirectory().index(look(copy)).leaves)
    (copy / "model.safetensors.index.json").unlink()
    assert set(HfDirectory().index(look(copy)).leaves) == before


@pytest.mark.parametrize(
    "names, claimed",
    [
        (["model.safetensors"], True),
        (["diffusion_pytorch_model.safetensors", "config.json"], True),
        (["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], True),
        (["diffusion_pytorch_model.bf16.safetensors", "d.fp16.safetensors"], False),
        (["model.safetensors", "adapter_model.safetensors", "adapter_config.json"], True),
        (["adapter_model.safetensors", "adapter_config.json"], False),
        (["shard-00001-model-00001-of-00002.safetensors"], False),
        (["a.safetensors", "b.safetensors"], False),
        (["config.json"], False),
    ],
)
def test_claims(names: list[str], claimed: bool, tmp_path: FilePath) -> None:
    for name in names:
        (tmp_path / name).write_bytes(emit([], [], {}))
    assert HfDirectory().claims(look(tmp_path)) == claimed


def test_a_variant_beside_the_weights_of_diffusers_is_named(tmp_path: FilePath) -> None:
    """`save_pretrained(variant="fp16")` into the directory of the others, which diffusers loads unless told."""
    plain, half = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
    for name, dtype in ((plain, "float32"), (half, "float16")):
        tensor = torch.ones(2, dtype=getattr(torch, dtype))
        safetensors_torch.save_file({"w": tensor}, tmp_path / name)
    with ckptmap.open(tmp_path) as ckpt:
        assert ckpt["w"].dtype == "float32"
        assert ckpt.notes == [f"not read, because no index lists it: {half}"]


def test_torchs_sharded_safetensors_are_not_taken(tmp_path: FilePath) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert any(path.name.startswith("shard-") for path in tmp_path.iterdir())
    assert not HfDirectory().claims(look(tmp_path))
