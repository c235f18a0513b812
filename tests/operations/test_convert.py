"""Every reader with every writer: the output holds the true values when its own library loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import RunError
from ckptmap.tensors import Box
from tests.corpus import CASES, Corpus
from tests.support.same_tensors import assert_same, expected_keys

ALL = sorted(CASES)
DENSE = [name for name in ALL if CASES[name].encoding == "dense"]
PREFIX = {"ddp": "module.", "compiled": "_orig_mod."}
EACH, IN_TURN = ("hf", "full", "fsdp2"), ("ddp", "compiled", "fsdp1")
"""Setups into which every source is converted, and those of which it takes the next one. The others have a writer
and a layout of the first: `ddp` and `compiled` are `full` with a prefix, which is put before plain names when the
source's own are off; `fsdp1` is `fsdp2` by another name, as long as no optimizer goes along."""
NOT_IN_SAFETENSORS = (torch.complex128, torch.complex32)
CAST = [name for name in DENSE if CASES[name].world_size == 2][:6]
CAST += ["fsdp1_dcp_bf16_w2", "hf_bf16", "torch_plain"]
"""Sources whose values are cast."""
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def with_setups(names: list[str]) -> list[tuple[str, str]]:
    """Each source with its setups."""
    return [
        (name, setup)
        for number, name in enumerate(names)
        for setup in (*EACH, IN_TURN[number % len(IN_TURN)])
    ]


def with_casts(names: list[str]) -> list[tuple[str, str, str]]:
    """Each source with every dtype and every setup; and each dtype, in other sources, with every setup. A value is
    cast when it has been read, element by element, and a writer is given the result: the three know nothing of each
    other."""
    return [
        (name, EACH[(number + other) % len(EACH)], cast)
        for number, name in enumerate(names)
        for other, cast in enumerate(CASTS)
    ]


def convert(case: Any, dst: Path, to: str, **options: Any) -> ckptmap.Report:
    drop = (*case.spec.opaque, *options.pop("drop", ()))
    return ckptmap.convert(case.path, dst, to=to, optimizer="drop", drop=drop, **options)


def load_hf(dst: Path) -> dict[str, torch.Tensor]:
    index = dst / "model.safetensors.index.json"
    if not index.exists():
        return dict(load_file(dst / "model.safetensors"))
    names = set(json.loads(index.read_text())["weight_map"].values())
    return {key: value for name in names for key, value in load_file(dst / name).items()}


def load_torch(dst: Path, root: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The weights: below `root` in a file that keeps its source's dicts, else below `model` or at the top."""
    loaded = torch.load(dst, weights_only=True, mmap=True)
    if root and root[0] in loaded:
        for key in root:
            loaded = loaded[key]
        return dict(loaded)
    return dict(loaded.get("model", loaded))


def load_dcp(dst: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(str(dst)).read_metadata()
    keys = [key for key in metadata.state_dict_metadata if not key.startswith("extra.")]
    rooted = not any(key in like for key in keys)
    names = {key.removeprefix("model.") if rooted else key: key for key in keys}
    state: dict[str, Any] = {
        key: torch.zeros_like(like[fqn]) for fqn, key in names.items() if fqn in like
    }
    nested = {"model": {k.removeprefix("model."): v for k, v in state.items()}} if rooted else state
    dcp.load(nested, checkpoint_id=str(dst), no_dist=True)
    return dict(nested["model"]) if rooted else dict(nested)


def load(
    setup: str, dst: Path, like: dict[str, torch.Tensor], root: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """By the format's own library, wrapper prefix taken off; `root` is where the source has its weights."""
    if setup == "hf":
        return load_hf(dst)
    if setup.startswith("fsdp"):
        return load_dcp(dst, like)
    prefix = PREFIX.get(setup, "")
    loaded = load_torch(dst, root)
    assert all(key.startswith(prefix) for key in loaded)
    return {key.removeprefix(prefix): value for key, value in loaded.items()}


@pytest.mark.parametrize(("name", "setup"), with_setups(DENSE))
def test_moves_are_bit_equal(name: str, setup: str, corpus: Corpus, tmp_path: Path) -> None:
    case = corpus[name]
    dst = tmp_path / "out"
    options = {"world_size": 3} if setup.startswith("fsdp") else {}
    if setup == "hf" and any(value.dtype in NOT_IN_SAFETENSORS for value in case.truth.values()):
        with pytest.raises(ckptmap.CkptmapError, match="safetensors has no dtype for complex"):
            convert(case, dst, setup, **options)
        assert not dst.exists()
        return
    report = convert(case, dst, setup, **options)
    assert set(report.fidelity) <= {"bytes", "exact"}
    found = load(setup, dst, case.truth, case.spec.root)
    must, may = expected_keys(case)
    assert must <= set(found) <= may
    for fqn, value in found.items():
        assert_same(value, case.truth[fqn], fqn)
    verified = ckptmap.verify(dst, against=case.path)
    assert verified.ok, str(verified)


@pytest.mark.parametrize(("name", "setup", "cast"), with_casts(CAST))
def test_casts_equal_torch(
    name: str, setup: str, cast: str, corpus: Corpus, tmp_path: Path
) -> None:
    case = corpus[name]
    dst = tmp_path / "out"
    convert(case, dst, f"{setup}-{cast}")
    expected = {
        fqn: value.to(CASTS[cast]) if value.is_floating_point() else value
        for fqn, value in case.truth.items()
    }
    for fqn, value in load(setup, dst, expected).items():
        assert_same(value, expected[fqn], fqn)
    verified = ckptmap.verify(dst, against=case.path)
    assert verified.ok, str(verified)


@pytest.mark.parametrize(
    ("name", "setup"), with_setups([n for n in ALL if CASES[n].encoding == "nf4"])
)
def test_nf4_payloads_move_as_bytes(name: str, setup: str, corpus: Corpus, tmp_path: Path) -> None:
    """Whoever pickled it: the five parts are the writer's, in plain tensors."""
    case = corpus[name]
    dst = tmp_path / "out"
    options = {"world_size": 2} if setup.startswith("fsdp") else {}
    report = convert(case, dst, setup, **options)
    assert set(report.fidelity) == {"bytes"}
    with ckptmap.open(dst) as ckpt:
        for fqn, parts in case.nf4.items():
            lazy = ckpt[fqn]
            assert lazy.encoding == "nf4"
            for part in (
                "quantized_data",
                "quantized_scalers",
                "quantization_factor",
                "scaler_mean",
                "nf4",
            ):
                stored = lazy.parts[part]
                whole = Box.whole(stored.info.shape)
                assert_same(lazy.read_part(part, whole), parts[part], f"{fqn}.{part}")
            assert_same(lazy.read(), case.truth[fqn], fqn)
    assert ckptmap.verify(dst, against=case.path).ok


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].encoding == "nf4"])
def test_nf4_decodes_exactly(name: str, corpus: Corpus, tmp_path: Path) -> None:
    case = corpus[name]
    dtype = next(iter(case.nf4.values()))["nf4"].dtype
    suffix = next(s for s, d in CASTS.items() if d == dtype)
    report = convert(case, tmp_path / "out", f"full-{suffix}")
    assert report.fidelity["exact"] == len(case.nf4)
    found = load_torch(tmp_path / "out")
    for fqn in case.nf4:
        assert_same(found[fqn], case.truth[fqn], fqn)


EXTRA: dict[str, Any] = {
    "id2label": {0: "cat", 1: "dog"},
    "by_epoch": {"best": {3: {0: 0.5}}},
    "mixed": {0: "a", "b": [1, {"c": 2}]},
    "history": [{"loss": 1.5}, {"loss": 0.5, "tags": {1, 2}}],
    "pairs": {(0, 1): "edge"},
    "digits": {"0": "a", "1": "b"},
}


def test_a_byte_that_is_no_bool_is_not_passed_on(tmp_path: Path) -> None:
    mask = torch.tensor([[True, False, True]])
    save_file({"mask": mask}, tmp_path / "good.safetensors")
    content = bytearray((tmp_path / "good.safetensors").read_bytes())
    content[-2] = 2
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(
        RunError, match=r"bad.*: mask: BOOL element \[0, 1\] is the byte 2"
    ) as caught:
        ckptmap.convert(tmp_path / "bad.safetensors", tmp_path / "out", to="hf")
    assert caught.value.code == "CKM318" and not (tmp_path / "out").exists()
    ckptmap.convert(tmp_path / "good.safetensors", tmp_path / "out", to="hf")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["mask"], mask)


@pytest.mark.parametrize("setup", ["full", "fsdp2", "fsdp2-ranks"])
def test_dicts_and_lists_beside_the_weights_stay_what_they_are(setup: str, tmp_path: Path) -> None:
    """A dict that counts from 0 is no list, whichever container lies between."""
    torch.save({"model": {"w": torch.ones(4, 2)}, **EXTRA}, tmp_path / "src.pt")
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=setup)
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt.extra == EXTRA
    ckptmap.convert(tmp_path / "out", tmp_path / "back.pt", to="full", keep_layout=False)
    assert torch.load(tmp_path / "back.pt", weights_only=True)["extra"] == EXTRA


def test_lists_that_hold_tensors_and_others_come_out_of_dcp(tmp_path: Path) -> None:
    """torch cuts a list that holds a tensor into one item an element."""
    mixed = [1, {"name": "x", "t": torch.ones(2)}, torch.arange(3)]
    state = {
        "model": {"w": torch.ones(4, 2)},
        "app": {"mixed": mixed, "shapes": {0: torch.ones(2)}},
    }
    torch.save(state, tmp_path / "src.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "ours", to="fsdp2")
    for name, source in (("torchs", "dcp"), ("ours.pt", "ours")):
        ckptmap.convert(tmp_path / source, tmp_path / name, to="full")
        app = torch.load(tmp_path / name, weights_only=True)["extra"]["app"]
        assert app["mixed"][:1] == [1] and app["mixed"][1]["name"] == "x"
        assert torch.equal(app["mixed"][1]["t"], torch.ones(2))
        assert torch.equal(app["mixed"][2], torch.arange(3))
        assert list(app["shapes"]) == ["0"], "as torch's planner writes an integer key"


@pytest.mark.parametrize("setup", ["full", "fsdp2", "fsdp2-ranks"])
def test_the_hint_for_a_value_that_cannot_be_written_works(setup: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 2)}, "window": {"rows": [range(3)]}, "step": 7}
    torch.save(state, tmp_path / "src.pt")
    with pytest.raises(ckptmap.CkptmapError, match=r"window.*cannot be written.*--drop window"):
        ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=setup)
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=setup, drop=("window",))
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert ckpt.extra == {"step": 7}


@pytest.mark.parametrize("setup", ["full", "fsdp2", "fsdp2-ranks"])
def test_all_values_that_cannot_be_written_are_named_at_once(setup: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 2)}, "window": [range(3), range(4)], "step": 7}
    torch.save({**state, "far": slice(3), "rows": {"a": range(5)}}, tmp_path / "src.pt")
    with pytest.raises(
        ckptmap.CkptmapError, match=r"window\.0: range.*; neither can .*window\.1, .*far, .*rows\.a"
    ) as e:
        ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=setup)
    assert e.value.hint == "leave them behind with --drop window --drop far --drop rows"
    drop = ("window", "far", "rows")
    ckptmap.convert(tmp_path / "src.pt", tmp_path / "out", to=setup, drop=drop)


def test_a_dict_that_was_not_flattened_is_read(tmp_path: Path) -> None:
    """`flatten_state_dict=False`: torch stores a nested dict, tensors and all, as one item."""
    model = {"w": torch.randn(3, 4), "b": torch.arange(3)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": model, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    with ckptmap.open(tmp_path / "dcp") as ckpt:
        assert all(torch.equal(ckpt[name].read(), tensor) for name, tensor in model.items())
        assert list(ckpt) == ["w", "b"] and ckpt.extra == {"step": 3}


@pytest.mark.parametrize("name", ["fsdp2_ranks_w2", "tp_ranks_w2"])
def test_a_dict_that_was_not_flattened_lacks_the_parts_of_other_ranks(
    name: str, corpus: Corpus, tmp_path: Path
) -> None:
    """torch saves such a dict once: what one rank held of each DTensor. No file holds the rest."""
    (file,) = corpus[name].path.glob("*rank_0.pt")
    held = torch.load(file, weights_only=False)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": held}, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    with pytest.raises(ckptmap.CkptmapError, match=r"model\..*has the part of one rank only") as e:
        ckptmap.open(tmp_path / "dcp")
    assert e.value.code == "CKM112" and "save it again" in e.value.hint


@pytest.mark.parametrize("setup", ["hf", "full", "ddp", "compiled", "fsdp2"])
@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].encoding in ("int8", "float8")])
def test_8_bit_codes_move_as_bytes(name: str, setup: str, corpus: Corpus, tmp_path: Path) -> None:
    """Whoever pickled or flattened them; decoded again they are what torchao decodes."""
    case, dst = corpus[name], tmp_path / "out"
    report = convert(case, dst, setup, **({"world_size": 3} if setup == "fsdp2" else {}))
    assert set(report.fidelity) == {"bytes"}
    assert ckptmap.verify(dst, against=case.path).ok
    with ckptmap.open(dst) as ckpt:
        assert {fqn for fqn in ckpt if ckpt[fqn].encoding != "dense"} == case.coded
        for fqn, value in case.truth.items():
            assert_same(ckpt[fqn].read(), value, fqn)
