"""Weights of one form are checked once, and no other weight is: for every encoding that can be written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap import registry
from ckptmap.core.stored_parts import StoredParts
from ckptmap.core.weight_columns import Groups
from ckptmap.errors import SourceError
from ckptmap.protocols import Group
from ckptmap.quantization.blockwise.read_config import read_each_small
from ckptmap.quantization.weight_forms import Make, WeightForms
from ckptmap.storage.files import Files
from ckptmap.tensors import Box, Chunk, Region, StoredTensor, TensorInfo

LAYERS = 3
SHAPES = {"up_proj": (256, 128), "down_proj": (128, 256)}
# torchao's NF4Tensor is no set of tensors in safetensors, nor are ggml's blocks; gpt-oss' MXFP4 takes stacks of
# experts alone.
SUFFIXES = sorted(
    suffix
    for suffix in {scheme.suffix for scheme in registry.schemes()}
    - {"", "bf16", "fp16", "fp32", "nf4", "mxfp4"}
    if not suffix.startswith("gguf-")
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    names = {
        f"model.layers.{i}.mlp.{n}.weight": s for i in range(LAYERS) for n, s in SHAPES.items()
    }
    state = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names.items()}
    state["model.norm.weight"] = torch.ones(128, dtype=torch.bfloat16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module", params=SUFFIXES)
def encoded(
    request: pytest.FixtureRequest, dense: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Written by `convert`: its config and parts are those of the library that loads it."""
    out = tmp_path_factory.mktemp("encoded") / request.param
    ckptmap.convert(dense, out, to=f"hf-{request.param}", sync=False)
    yield out


def without_records(source: Path, to: Path, change: Mapping[str, torch.Tensor] = {}) -> Path:
    """Copy a checkpoint as another writer leaves it, some tensors changed."""
    to.mkdir()
    (to / "config.json").write_bytes((source / "config.json").read_bytes())
    with safe_open(source / "model.safetensors", "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if not k.startswith("ckptmap")}
    tensors = load_file(source / "model.safetensors") | dict(change)
    save_file(tensors, to / "model.safetensors", metadata=metadata)
    return to


def shown(path: Path) -> dict[str, tuple[object, ...]]:
    """What the weights were taken for, and where their parts lie."""
    with ckptmap.open(path) as ckpt:
        groups: Mapping[str, Group] = ckpt.groups
        return {
            fqn: (g.info, g.encoding, {part: (t.info, t.chunks) for part, t in g.parts.items()})
            for fqn, g in groups.items()
        }


def test_the_others_are_as_if_checked_alone(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [encoded, without_records(encoded, tmp_path / "foreign")]
    found = [shown(path) for path in paths]
    calls = []

    def alone(self: WeightForms, fqns: Iterable[str], make: Make, facts: object = None) -> Groups:
        fqns = list(fqns)
        calls.extend(fqns)
        return Groups.of([make(fqn, self._stored) for fqn in fqns])

    monkeypatch.setattr(WeightForms, "groups", alone)
    assert [shown(path) for path in paths] == found
    assert not calls or len(set(calls)) == LAYERS * len(SHAPES)
    made = [encoding for _, encoding, _ in found[1].values()]
    assert len({id(encoding) for encoding in made}) <= 1 + 2 * len(SHAPES)


def test_a_last_weight_that_is_unlike_the_others_is_refused(encoded: Path, tmp_path: Path) -> None:
    fqn = f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"
    names = [name for name in load_file(encoded / "model.safetensors") if name.startswith(fqn[:-6])]
    for name in names:
        tensor = load_file(encoded / "model.safetensors")[name]
        if tensor.numel() < 3:
            continue
        change = {name: torch.cat([tensor.flatten(), tensor.flatten()[:1]])}
        damaged = without_records(encoded, tmp_path / name.rpartition(".")[2], change)
        with pytest.raises(SourceError, match=r"layers\.2\.mlp\.up_proj|quant_state") as caught:
            ckptmap.open(damaged)
        assert caught.value.code == "CKM115"


@pytest.mark.parametrize("suffix", ["ct-int8", "ct-fp8"])
@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"ignore": ["model.layers.2.mlp.up_proj"]}, "in ignore"),
        (
            {"b": {"targets": ["re:.*2.mlp.up_proj"], "weights": {"num_bits": 4, "type": "int"}}},
            "num_bits 4",
        ),
    ],
    ids=["ignored", "group"],
)
def test_what_a_config_states_of_one_module_is_compared(
    dense: Path, suffix: str, change: dict[str, object], stated: str, tmp_path: Path
) -> None:
    ckptmap.convert(dense, tmp_path / "out", to=f"hf-{suffix}", sync=False)
    foreign = without_records(tmp_path / "out", tmp_path / "foreign")
    ckptmap.open(foreign).close()
    config = json.loads((foreign / "config.json").read_text())
    section = config["quantization_config"]
    if "b" in change:
        change = {"config_groups": section["config_groups"] | change}
    (foreign / "config.json").write_text(
        json.dumps(config | {"quantization_config": section | change})
    )
    with pytest.raises(SourceError, match=rf"layers\.2\.mlp\.up_proj.weight: .*{stated}") as caught:
        ckptmap.open(foreign)
    assert caught.value.code == "CKM115"


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(range(256)) * 64)
    places = {"c": 40, "a": 0, "b": 12_000, "d": 48}
    info, box = TensorInfo((8,), "uint8"), Box((0,), (8,))
    tensors = {
        name: StoredTensor(info, [Chunk(box, Region(str(file), at, (8,), (1,), 1))])
        for name, at in places.items()
    }
    halves = [Chunk(Box((i,), (4,)), Region(str(file), 9 * i, (4,), (1,), 1)) for i in (0, 4)]
    tensors["in two pieces"] = StoredTensor(info, halves)
    tensors["empty"] = StoredTensor(TensorInfo((0,), "uint8"), [])
    files, reads, plain = Files(), [], Files.read_runs
    monkeypatch.setattr(
        Files,
        "read_runs",
        lambda self, file, *runs: reads.extend(zip(*runs, strict=True)) or plain(self, file, *runs),
    )
    parts = StoredParts(tensors)
    found = dict(
        zip(tensors, read_each_small(parts, parts.table.numbers_of(tensors), files), strict=True)
    )
    files.close()
    wanted = {name: bytes((at + i) % 256 for i in range(8)) for name, at in places.items()}
    wanted |= {"in two pieces": bytes([0, 1, 2, 3, 36, 37, 38, 39]), "empty": b""}
    assert found == wanted
    assert reads == [(0, 56), (12_000, 8)]


def stored_as(**dtypes: str) -> StoredParts:
    def empty(dtype: str) -> StoredTensor:
        return StoredTensor(TensorInfo((2,), dtype), ())

    return StoredParts({key.replace("__", "."): empty(dtype) for key, dtype in dtypes.items()})


def test_keys_are_found_by_their_ends_in_stored_order() -> None:
    stored = stored_as(
        b__w_scale="float32", a__w="int8", scale="uint8", a__w_scale="uint8", a__scale="float32"
    )
    assert stored.ending("_scale") == ["b.w_scale", "a.w_scale"]
    assert stored.ending("scale") == ["b.w_scale", "scale", "a.w_scale", "a.scale"]
    assert stored.ending(".scale") == ["a.scale"]
    assert stored.ending("w", ".scale") == ["a.w", "a.scale"]
    assert stored.ending("a.w", "a.scale") == ["a.w", "a.scale"]
    assert stored.ending("scale", dtypes=("uint8",)) == ["scale", "a.w_scale"]
    assert stored.ending("_packed") == []


def test_parts_that_are_taken_are_not_found_again() -> None:
    stored = stored_as(a__w="int8", a__w_scale="float32", b__w="int8", b__w_scale="float32")

    def number(*keys: str) -> list[int]:
        return stored.table.numbers_of(keys)

    codes, same, scale, absent = stored.kinds(number("a.w", "b.w", "a.w_scale", "c.w"))
    assert codes == same != scale and absent is None
    stored.take(number("a.w", "a.w_scale"))
    assert stored.ending("_scale") == ["b.w_scale"]
    assert [*stored] == ["b.w", "b.w_scale"] and len(stored) == 2
    assert stored.kinds(number("a.w", "b.w")) == [None, same]
    assert stored.kinds_below(stored.table.modules(["a.w", "b.w", "c.w"]), "w") == [
        None,
        same,
        None,
    ]
    assert stored.info("a.w") is None is stored.get("a.w") and "a.w" not in stored
    assert [stored.table.infos[n].dtype for n in stored.left()] == ["int8", "float32"]
    for key in ("a.w", "c.w"):
        with pytest.raises(KeyError):
            stored.take(number(key))
    assert "a.w" in stored.table.keys
    assert StoredParts.of(stored) is stored


def test_weights_are_found_by_a_tensor_and_another_beside_it() -> None:
    stored = stored_as(
        b__w_scale="float32", a__w="int8", w_scale="float32", a__w_scale="uint8", b__w="int8",
        a__v_scale="float32", a__v="int8", a__weight="int8", a__scale="uint8", scale="uint8",
        weight="int8", c__w_scale="float32",
    )  # fmt: skip
    keys = stored.table.keys

    def shown(*ends: str, dtypes: tuple[str, ...] | None = None) -> list[tuple[str, str, str]]:
        found = stored.pairs(*ends, dtypes=dtypes)
        return [(keys[number], fqn, keys[other]) for number, fqn, other in zip(*found, strict=True)]

    assert shown("_scale", "", "") == [
        ("b.w_scale", "b.w", "b.w"), ("a.w_scale", "a.w", "a.w"), ("a.v_scale", "a.v", "a.v"),
    ]  # fmt: skip
    assert shown("_scale", "", "", dtypes=("uint8",)) == [("a.w_scale", "a.w", "a.w")]
    assert shown(".scale", ".weight", ".weight") == [("a.scale", "a.weight", "a.weight")]
    stored.take(stored.table.numbers_of(["b.w", "a.v_scale"]))
    assert shown("_scale", "", "") == [("a.w_scale", "a.w", "a.w")]


@pytest.mark.parametrize("order", ["by last segment", "by module", "shuffled"])
def test_every_key_has_its_number_in_any_order_of_keys(order: str) -> None:
    """Modules of equal runs of keys are numbered once; where last segments alternate, they are sorted first."""
    modules = [f"layers.{i}.{name}." for i in range(30) for name in ("up", "down")] + ["", "."]
    lasts = ["weight", "weight_scale", "bias"]
    keys = [module + last for module in modules for last in lasts] + ["layers.7.up.gate", "x."]
    if order == "by last segment":
        keys.sort(key=lambda key: key.rpartition(".")[2])
    elif order == "shuffled":
        random.Random(0).shuffle(keys)
    stored = stored_as(**dict.fromkeys(keys, "int8"))
    assert stored.table.numbers_of(keys) == [*range(len(keys))]
    assert (
        stored.table.numbers_of(["layers.30.up.weight", "up.weight", "layers.7.gate"]) == [-1] * 3
    )
    for last, of_last, numbers in stored.by_last(""):
        assert numbers == sorted(numbers)
        assert [stored.table.stems[m] + last for m in of_last] == [keys[n] for n in numbers]
    fqns = [module + "weight" for module in modules]
    again = list(fqns)
    assert stored.table.modules(fqns) == stored.table.modules(again) == stored.table.modules(fqns)
    scales = stored.table.beside(fqns, "_scale")
    assert [keys[n] for n in scales] == [fqn + "_scale" for fqn in fqns]
