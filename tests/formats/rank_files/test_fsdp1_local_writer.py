"""`fsdp1-local`: flat parameters that live FSDP1 models load, and that read back bit for bit."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ckptmap
from ckptmap.checkpoint.stored_order import is_traversal
from ckptmap.errors import CkptmapError
from ckptmap.storage.crc32 import crc32_combine
from tests.corpus.models import Recipe, tiny, tiny_llama
from tests.corpus.ranks import run_ranks
from tests.support.same_tensors import assert_same

UNITS = {
    "layers": ("layers.*",),
    "nested": ("layers.*", "layers.*.self_attn", "layers.*.mlp"),
    "root": (),
}
JOBS: list[dict[str, Any]] = [
    {"wrap": "layers", "orig": True, "tied": False, "dtype": "float32"},
    {"wrap": "layers", "orig": False, "tied": False, "dtype": "float32"},
    {"wrap": "nested", "orig": True, "tied": True, "dtype": "float32"},
    {"wrap": "nested", "orig": False, "tied": True, "dtype": "float32"},
    {"wrap": "root", "orig": False, "tied": False, "dtype": "bfloat16"},
    {"wrap": "root", "orig": True, "tied": False, "dtype": "bfloat16"},
]


def source(path: Path, tied: bool = False, dtype: str = "float32") -> Path:
    torch.save(dict(tiny(Recipe(tied=tied, dtype=getattr(torch, dtype))).state_dict()), path)
    return path


def job(name: str, path: Path, truth: Path, **about: Any) -> dict[str, Any]:
    plain = {"tied": False, "dtype": "float32", "llama": False}
    return {**plain, **about, "name": name, "path": str(path), "truth": str(truth)}


def load_live(jobs: list[dict[str, Any]], world: int, tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    args = ["--jobs", str(tmp_path / "jobs.json")]
    done = run_ranks("tests.ranks.fsdp1_local", world, args, 120.0)
    assert done[0].stdout.count("loaded") == len(jobs)


def assert_reads_back(path: Path, truth: Path, world: int) -> None:
    """Whole, without help: shapes and order come from the manifest; checksums are right."""
    state = torch.load(truth)
    with ckptmap.open(path) as back:
        assert set(back) == set(state) and back.world_size == world
        for fqn, value in state.items():
            assert_same(back[fqn].read(), value, fqn)
    for file in path.glob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None, "a checksum is wrong"


@pytest.mark.parametrize("world", [2, 4])
def test_live_models_load_it(world: int, tmp_path: Path) -> None:
    """Wrapped and flattened in every way, tied and odd shapes; then read back by us alone."""
    jobs = []
    for number, about in enumerate(JOBS):
        truth = source(tmp_path / f"{number}.pt", about["tied"], about["dtype"])
        path = tmp_path / str(number)
        ckptmap.convert(
            truth, path, to="fsdp1-local", world_size=world,
            fsdp_units=UNITS[about["wrap"]], use_orig_params=about["orig"],
        )  # fmt: skip
        jobs.append(job(str(number), path, truth, **about))
        assert ckptmap.verify(path, against=truth).ok
        assert_reads_back(path, truth, world)
    load_live(jobs, world, tmp_path)


def test_a_config_gives_the_order_of_an_hf_directory(tmp_path: Path) -> None:
    """Safetensors list names by the alphabet; the model class has the order of its modules."""
    pytest.importorskip("transformers")
    model = tiny_llama()
    model.save_pretrained(tmp_path / "hf")
    truth = tmp_path / "truth.pt"
    torch.save(dict(model.state_dict()), truth)
    jobs = []
    for orig in (True, False):
        path = tmp_path / f"out{orig}"
        plan = ckptmap.plan(
            tmp_path / "hf", to="fsdp1-local", world_size=2, fsdp_units=("model.layers.*",),
            use_orig_params=orig,
        )  # fmt: skip
        assert any("config.json" in note for note in plan.notes)
        plan.execute(path)
        assert_reads_back(path, truth, 2)
        jobs.append(job(path.name, path, truth, wrap="llama", orig=orig, llama=True))
    load_live(jobs, 2, tmp_path)


@pytest.mark.parametrize("orig", [True, False])
def test_a_cast_and_back_to_one_file(orig: bool, tmp_path: Path) -> None:
    """Encoded into slices whose begin and end lie inside rows; and on from there."""
    truth = source(tmp_path / "model.pt")
    ckptmap.convert(
        truth, tmp_path / "out", to="fsdp1-local-bf16", world_size=3, fsdp_units=("layers.*",),
        use_orig_params=orig,
    )  # fmt: skip
    assert ckptmap.verify(tmp_path / "out", against=truth).ok
    ckptmap.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    with ckptmap.open(tmp_path / "back.pt") as back:
        for fqn, value in torch.load(truth).items():
            expected = value.bfloat16() if value.is_floating_point() else value
            if fqn != "rope.inv_freq":
                assert_same(back[fqn].read(), expected, fqn)


def test_the_output_is_the_same_every_time(tmp_path: Path) -> None:
    truth = source(tmp_path / "model.pt")
    for name in ("one", "two"):
        ckptmap.convert(truth, tmp_path / name, to="fsdp1-local", world_size=2)
    for rank in range(2):
        file = f"model_world_size_2_rank_{rank}.pt"
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


# --------------------------------------------------------------------- refused


def refused(match: str, code: str, src: Path, tmp_path: Path, **options: Any) -> None:
    options = {"to": "fsdp1-local", "world_size": 2, **options}
    with pytest.raises(CkptmapError, match=match) as caught:
        ckptmap.convert(src, tmp_path / "refused", **options)
    assert caught.value.code == code and "\n" not in str(caught.value)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("key", [None, "model"])
def test_a_state_dict_whose_modules_have_sorted_names_tells_its_order(
    key: str | None, tmp_path: Path
) -> None:
    """Its list of modules shows that the names were not sorted afterwards; a sorted copy has none."""
    model = nn.Sequential(
        nn.Embedding(8, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False)
    )
    state = model.state_dict()
    assert list(state) == sorted(state)
    save_file(state, tmp_path / "model.safetensors")
    torch.save(dict(state), tmp_path / "copy.pt")
    torch.save(state if key is None else {key: state}, tmp_path / "saved.pt")
    for like in (None, str(tmp_path / "copy.pt")):
        refused(
            "does not tell the order", "CKM504", tmp_path / "model.safetensors", tmp_path, like=like
        )
    like = str(tmp_path / "saved.pt")
    ckptmap.convert(
        tmp_path / "model.safetensors", tmp_path / "ranks", "fsdp1-local", world_size=2, like=like
    )
    ckptmap.convert(tmp_path / "ranks", tmp_path / "back.pt", "full", like=like)
    for name, tensor in torch.load(tmp_path / "back.pt").items():
        assert_same(tensor, state[name], name)


def test_what_fsdp1_cannot_hold_is_refused(tmp_path: Path) -> None:
    truth = source(tmp_path / "model.pt")
    refused("expected 2 ranks or more, found 1", "CKM204", truth, tmp_path, world_size=1)
    units = ("layers.*.nowhere",)
    refused("matches no module", "CKM206", truth, tmp_path, fsdp_units=units)
    refused("would be left behind", "CKM504", truth, tmp_path, exclude=("norm.weight",))
    refused("names of its units", "CKM204", truth, tmp_path, wrap=("ddp",))
    refused("has no flat parameters", "CKM204", truth, tmp_path, to="fsdp1", fsdp_units=("a",))
    mixed = {key: v.half() if "norm" in key else v for key, v in torch.load(truth).items()}
    torch.save(mixed, tmp_path / "mixed.pt")
    refused("flattens tensors of one dtype", "CKM504", tmp_path / "mixed.pt", tmp_path)
    tied = source(tmp_path / "tied.pt", tied=True)
    refused("another FSDP unit", "CKM504", tied, tmp_path, fsdp_units=("lm_head",))


def test_an_unknown_order_is_refused(tmp_path: Path) -> None:
    """Sorted names, or FSDP1's own order of units, are no order of modules; --like has one."""
    truth = source(tmp_path / "model.pt")
    ckptmap.convert(truth, tmp_path / "hf", to="hf")
    refused("does not tell the order", "CKM504", tmp_path / "hf", tmp_path)
    ckptmap.convert(truth, tmp_path / "dcp", to="fsdp2", world_size=2)
    refused("does not tell the order", "CKM504", tmp_path / "dcp", tmp_path)
    ckptmap.convert(tmp_path / "dcp", tmp_path / "full.pt", to="full")
    refused("does not tell the order", "CKM504", tmp_path / "full.pt", tmp_path)
    moved = torch.load(truth)
    moved["layers.0.mlp.up_proj.weight"] = moved.pop("layers.0.mlp.up_proj.weight")
    torch.save(moved, tmp_path / "moved.pt")
    refused("does not tell the order", "CKM504", tmp_path / "moved.pt", tmp_path)
    other = source(tmp_path / "other.pt", dtype="bfloat16")
    path = tmp_path / "out"
    ckptmap.convert(tmp_path / "hf", path, to="fsdp1-local", world_size=2, like=str(other))
    assert_reads_back(path, truth, 2)
    short = torch.load(other)
    del short["norm.weight"]
    torch.save(short, tmp_path / "short.pt")
    like = str(tmp_path / "short.pt")
    refused("has no such tensor", "CKM504", tmp_path / "hf", tmp_path, like=like)
    short["norm.weight"] = torch.zeros(49)
    torch.save(short, tmp_path / "short.pt")
    refused("has another shape", "CKM504", tmp_path / "hf", tmp_path, like=like)


def test_buffers_may_be_left_behind(tmp_path: Path) -> None:
    truth = source(tmp_path / "model.pt")
    ckptmap.convert(
        truth, tmp_path / "out", to="fsdp1-local", world_size=2, exclude=("rope.inv_freq",)
    )
    with ckptmap.open(tmp_path / "out") as back:
        assert set(back) == set(torch.load(truth)) - {"rope.inv_freq"}


def test_without_its_manifest_it_needs_like(tmp_path: Path) -> None:
    truth = source(tmp_path / "model.pt")
    out = tmp_path / "out"
    ckptmap.convert(truth, out, to="fsdp1-local", world_size=2)
    (out / "ckptmap.manifest.json").write_text("{}")
    refused("does not list what was written.*--like", "CKM403", out, tmp_path, to="full")
    (out / "ckptmap.manifest.json").unlink()
    refused("carry no shapes.*--like", "CKM112", out, tmp_path, to="full")
    with ckptmap.open(out, like=truth) as back:
        assert_same(back["norm.weight"].read(), torch.load(truth)["norm.weight"], "norm")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b.w", "b.c.w", "b.c.v", "b.d.w", "e.w"], True),
        (["b.w", "a"], False),
        (["b.w", "c.w", "b.v"], False),
        (["b.c.w", "b.d.w", "b.c.v"], False),
        (["b.c.w", "b.w"], False),
    ],
)
def test_what_can_be_an_order_of_modules(names: list[str], expected: bool) -> None:
    assert is_traversal(names) is expected


# --------------------------------------------------------------------- checksums


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_checksums_of_parts_join(parts: list[bytes]) -> None:
    joined = 0
    for part in parts:
        joined = crc32_combine(joined, zlib.crc32(part), len(part))
    assert joined == zlib.crc32(b"".join(parts))


def test_checksums_of_long_parts_join() -> None:
    first, second = bytes(range(256)) * 40, bytes(3_000_001)
    joined = crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
