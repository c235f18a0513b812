"""8-bit codes move from one encoding to another, and over any number of ranks, bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptmap
from ckptmap import registry
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.bnb.int8 import BnbInt8
from ckptmap.quantization.compressed_tensors.packed import Packed
from ckptmap.quantization.compressed_tensors.scheme import PlainFp8
from ckptmap.quantization.deepseek_fp8 import Fp8
from ckptmap.quantization.torchao.float8 import Float8
from ckptmap.quantization.torchao.int8 import Int8
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box
from tests.corpus.ranks import run_ranks
from tests.ranks.int8_moves import KINDS, values
from tests.support.examples import examples
from tests.support.int8_models import decoded, dense, encoded, info_of, loaded, weights

INT8 = ("int8", "bnb-int8", "ct-int8")
FLOAT8 = ("float8", "ct-fp8", "fp8")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEY = "layers.0.q_proj.weight"
WORLDS = (1, 2, 3, 4, 8)


def codes_of(lazy: LazyTensor) -> torch.Tensor:
    coded: Any = lazy.encoding_
    grid = coded.grid(lazy.info)
    out = torch.empty(grid.codes.shape, dtype=getattr(torch, grid.codes.dtype))
    lazy.read_codes(Box.whole(grid.codes.shape), out)
    return out.view(torch.int8)


def source(tmp_path: Path, encoding: str, dtype: torch.dtype) -> Path:
    w = weights((256, 128), dtype, "heavy" if dtype is not torch.float16 else "normal")
    w[7] = 0
    torch.save({KEY: w, "norm.weight": torch.ones(128, dtype=dtype)}, tmp_path / "dense.pt")
    ckptmap.convert(tmp_path / "dense.pt", tmp_path / "in.pt", to=f"full-{encoding}")
    return tmp_path / "in.pt"


# ------------------------------------------------------------------------------- codes kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(INT8, 2)])
def test_int8_codes_are_carried(before: str, after: str, dtype: str, tmp_path: Path) -> None:
    """`exact` where scales mean the same; bitsandbytes' absmax is 127 scales, one rounding away:
    nothing in 16 bits, at most an ulp in float32."""
    path = source(tmp_path, before, DTYPES[dtype])
    plan = ckptmap.plan(path, f"full-{after}")
    exact = "bnb-int8" not in (before, after)
    step = next(step for step in plan.steps if step.fqn == KEY)
    assert step.fidelity == ("exact" if exact else "codes")
    ckptmap.convert(path, tmp_path / "out.pt", to=f"full-{after}")
    assert ckptmap.verify(tmp_path / "out.pt", against=path).ok
    with ckptmap.open(path) as a, ckptmap.open(tmp_path / "out.pt") as b:
        assert b[KEY].encoding == after
        assert torch.equal(codes_of(a[KEY]), codes_of(b[KEY]))
        old, new = a[KEY].read(), b[KEY].read()
    if exact or dtype != "fp32":
        different = (old != new).sum()
        assert different <= (0 if exact else 4), "a tie of the 16-bit rounding is rare"
    assert ((old - new).abs() <= old.abs() * 2**-7).all()
    if dtype == "fp32":
        assert ((old - new).abs() <= old.abs() * 2**-22).all()
    assert not new[7].any()


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(FLOAT8, 2)])
def test_float8_codes_are_carried(before: str, after: str, tmp_path: Path) -> None:
    path = source(tmp_path, before, torch.bfloat16)
    ckptmap.convert(path, tmp_path / "out.pt", to=f"full-{after}")
    plan = ckptmap.plan(path, f"full-{after}")
    fidelity = next(step.fidelity for step in plan.steps if step.fqn == KEY)
    with ckptmap.open(path) as a, ckptmap.open(tmp_path / "out.pt") as b:
        if after == "fp8":  # its tiles are no rows
            assert fidelity == "requantize"
            assert (a[KEY].read() - b[KEY].read()).norm() < 0.05 * a[KEY].read().norm()
        else:
            assert fidelity == "exact"
            assert torch.equal(codes_of(a[KEY]), codes_of(b[KEY]))
            assert torch.equal(a[KEY].read(), b[KEY].read())


def test_there_and_back_is_the_same_file(tmp_path: Path) -> None:
    """torchao -> compressed-tensors -> torchao: no drift, however often."""
    path = source(tmp_path, "int8", torch.float32)
    here = path
    for turn in range(3):
        for name in ("ct-int8", "int8"):
            there = tmp_path / f"{turn}-{name}"
            ckptmap.convert(here, there, to=f"hf-{name}")
            here = there
    ckptmap.convert(path, tmp_path / "first", to="hf")
    first, last = (load_file(p / "model.safetensors") for p in (tmp_path / "first", here))
    assert first.keys() == last.keys()
    assert all(torch.equal(last[key], value) for key, value in first.items())


@pytest.mark.parametrize("after", ["ct-int8", "int8"])
@pytest.mark.parametrize("granularity", ["group", "tensor"])
def test_groups_and_tensors_keep_their_blocks(granularity: str, after: str, tmp_path: Path) -> None:
    from torchao.quantization import Int8Tensor, PerGroup, PerTensor

    how = PerGroup(32) if granularity == "group" else PerTensor()
    tensor: Any = Int8Tensor.from_hp(weights((64, 96), torch.bfloat16), how)
    torch.save({KEY: tensor}, tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "ct", to="hf-ct-int8")
    ckptmap.convert(tmp_path / "ct", tmp_path / "out.pt", to=f"full-{after}")
    with ckptmap.open(tmp_path / "out.pt") as ckpt:
        assert torch.equal(ckpt[KEY].read(), tensor.dequantize())
        assert torch.equal(codes_of(ckpt[KEY]), tensor.qdata)
    plan = ckptmap.plan(tmp_path / "in.pt", "full-bnb-int8")
    fidelity = "requantize" if granularity == "group" else "codes"
    assert plan.steps[0].fidelity == fidelity, "bitsandbytes has rows only"


def test_an_asymmetric_tensor_is_refused_when_its_zero_points_are_read(tmp_path: Path) -> None:
    from torchao.quantization import Int8Tensor, PerRow
    from torchao.quantization.quant_primitives import MappingType

    tensor: Any = Int8Tensor.from_hp(torch.rand(16, 32), PerRow(), MappingType.ASYMMETRIC)
    torch.save({KEY: tensor}, tmp_path / "in.pt")
    with pytest.raises(ckptmap.CkptmapError, match="its zero points are not all 0") as caught:
        ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="full-bnb-int8")
    assert caught.value.code == "CKM315" and KEY in caught.value.message
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="full-fp32")
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert torch.equal(ckpt[KEY].read(), tensor.dequantize())


# ------------------------------------------------------------------------------- any ranks

MADE: dict[str, Any] = {
    "int8": lambda rows, width: Int8((1, width)),
    "int8-group": lambda rows, width: Int8((1, 8)) if width % 8 == 0 else Int8((1, width)),
    "bnb-int8": lambda rows, width: BnbInt8(),
    "ct-int8": lambda rows, width: Packed((1, width)),
    "ct-fp8": lambda rows, width: PlainFp8((1, width)),
    "float8": lambda rows, width: Float8((1, width)),
    "fp8": lambda rows, width: Fp8((16, 8)),
}


@examples(25)
@given(
    st.integers(1, 70), st.integers(1, 70), st.sampled_from(sorted(MADE)), st.sampled_from(WORLDS)
)
def test_every_shard_of_every_shape_is_exact(rows: int, width: int, name: str, world: int) -> None:
    """What a rank decodes from its boxes of the parts is its rows of the whole, bit for bit."""
    encoding: ScaledEncoding = MADE[name](rows, width)
    w = weights((rows, width), torch.bfloat16)
    info, parts = info_of(w), encoded(encoding, w)
    whole = decoded(encoding, info, parts)
    for _, box in registry.layout("shard0").cut(info, world):
        first, count = box.offsets[0], box.sizes[0]
        assert torch.equal(decoded(encoding, info, parts, box), whole[first : first + count])
    column = Box((0, width // 2), (rows, width - width // 2))
    assert torch.equal(decoded(encoding, info, parts, column), whole[:, width // 2 :])


@pytest.mark.parametrize("encoding", [*INT8, *FLOAT8])
def test_over_any_number_of_ranks_and_back(encoding: str, tmp_path: Path) -> None:
    path = source(tmp_path, encoding, torch.bfloat16)
    with ckptmap.open(path) as ckpt:
        wanted = ckpt[KEY].read()
    here = path
    for world in WORLDS:
        there = tmp_path / f"fsdp2-{world}"
        ckptmap.convert(here, there, to="fsdp2", world_size=world)
        with ckptmap.open(there) as ckpt:
            assert ckpt[KEY].encoding == encoding
            assert torch.equal(ckpt[KEY].read(), wanted), world
            assert torch.equal(ckpt[KEY][100:140, 3:9], wanted[100:140, 3:9])
        here = there
    ckptmap.convert(here, tmp_path / "back.pt", to="full")
    with ckptmap.open(path) as a, ckptmap.open(tmp_path / "back.pt") as b:
        assert torch.equal(a[KEY].read(), b[KEY].read())
        for name in a[KEY].parts:
            box = Box.whole(a[KEY].parts[name].info.shape)
            old, new = a[KEY].read_part(name, box), b[KEY].read_part(name, box)
            assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("encoding", [*INT8, "fp8"])
def test_quantized_on_the_way_to_ranks_is_what_one_rank_gets(encoding: str, tmp_path: Path) -> None:
    w = weights((250, 128), torch.bfloat16)
    torch.save({KEY: w}, tmp_path / "dense.pt")
    found = []
    for world in (1, 3):
        there = tmp_path / f"{world}"
        more = {"encode": (KEY,)}
        ckptmap.convert(
            tmp_path / "dense.pt", there, to=f"fsdp2-{encoding}", world_size=world, **more
        )
        with ckptmap.open(there) as ckpt:
            parts = ckpt[KEY].parts
            found.append(
                [ckpt[KEY].read_part(n, Box.whole(p.info.shape)) for n, p in parts.items()]
            )
            assert not isinstance(ckpt[KEY].encoding_.parts(ckpt[KEY].info), Refusal)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), three.reshape(-1).view(torch.uint8))


# ------------------------------------------------------------------------------- torch's own ranks


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 ranks: what they save, and what they load of ours with torch alone."""
    folder = tmp_path_factory.mktemp("int8-ranks")
    w = weights((250, 64), torch.bfloat16)
    torch.save({"fc.weight": w}, folder / "dense.pt")
    parts = encoded(Int8((1, 64)), w)
    truth = {"fc._weight_qdata": parts["qdata"], "fc._weight_scale": parts["scale"]}
    torch.save(truth, folder / "truth.pt")
    for world in (1, 3, 4):
        out = folder / f"ours-{world}"
        ckptmap.convert(folder / "dense.pt", out, to="fsdp2-int8", world_size=world)
    run_ranks("tests.ranks.int8_moves", 2, [str(folder)], timeout=240)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_training_weights_of_fsdp2_ranks(kind: str, work: Path) -> None:
    """Int8QuantizedTrainingLinearWeight a rank; int8 mixed precision, BitNet and float8 are dense."""
    wanted = values(kind)
    folders = [work / f"ranks-{kind}", *([work / f"dcp-{kind}"] if kind != "int8qt" else [])]
    for folder in folders:
        with ckptmap.open(folder) as ckpt:
            assert not ckpt.refused
            assert ckpt["0.weight"].encoding == ("int8" if kind == "int8qt" else "dense")
            for key, value in wanted.items():
                assert torch.equal(ckpt[key].read(), value), (folder.name, key)
                assert torch.equal(ckpt[key][5:11], value[5:11])


def test_their_codes_move_on(work: Path, tmp_path: Path) -> None:
    wanted = values("int8qt")
    ckptmap.convert(work / "ranks-int8qt", tmp_path / "out", to="hf")
    ckptmap.convert(tmp_path / "out", tmp_path / "three", to="fsdp2", world_size=3)
    with ckptmap.open(tmp_path / "three") as ckpt:
        assert torch.equal(ckpt["1.weight"].read(), wanted["1.weight"])
        assert ckpt["1.weight"].encoding == "int8"


def test_torch_alone_loads_our_codes_and_scales(work: Path) -> None:
    """The ranks of `work` have asserted it; here, that there was something to load."""
    assert len(list(work.glob("ours-*"))) == 3


def test_codes_that_lost_their_scales_are_named_and_restored(work: Path, tmp_path: Path) -> None:
    """FSDP2 saves LLM.int8 without SCB: `--base` has it, if the codes are the same bits."""
    naked, base = work / "bnb-naked", work / "bnb-base.pt"
    with ckptmap.open(naked) as ckpt:
        assert ckpt["0.weight"].dtype == "int8"
        assert any("int8, without its scales: FSDP2 does not save them" in n for n in ckpt.notes)
    plan = ckptmap.plan(naked, "full-bf16")
    assert {item.key for item in plan.unresolved} == {"0.weight", "1.weight"}
    assert all("--base PATH" in item.hint for item in plan.unresolved)
    ckptmap.convert(naked, tmp_path / "out.pt", to="full-fp32", base=str(base))
    with ckptmap.open(base) as wanted, ckptmap.open(tmp_path / "out.pt") as found:
        for key in ("0.weight", "1.weight"):
            assert torch.equal(found[key].read(), wanted[key].read().float())
    other = torch.load(base)
    other["1.weight"][3, 4] ^= 1
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(ckptmap.CkptmapError, match=r"1\.weight \(and its --base\)"):
        ckptmap.convert(naked, tmp_path / "no.pt", to="full-fp32", base=str(tmp_path / "other.pt"))


def test_fsdp1_holds_none_of_them(work: Path) -> None:
    """The facts that `ckptmap.planning.live_encodings` refuses by; when this fails, look at its table again."""
    said = json.loads((work / "fsdp1.json").read_text())
    assert said["int8"] == "Cannot flatten integer dtype tensors"
    assert "Must flatten tensors with uniform dtype" in said["float8"]
    assert "aten.view" in said["Int8Tensor"] and "reshaping" in said["Float8Tensor"]


def test_weights_of_two_libraries_in_one_config_are_refused(tmp_path: Path) -> None:
    """transformers would leave those of the other at random. What the hint says can be done."""
    ckptmap.convert(dense(tmp_path / "dense"), tmp_path / "int8", to="hf-int8")
    kept = ("*.q_proj.*",)
    with pytest.raises(ckptmap.CkptmapError, match="cannot declare both") as caught:
        ckptmap.plan(tmp_path / "int8", "hf-bnb-nf4", no_encode=kept)
    assert caught.value.code == "CKM203" and "q_proj.weight: stays int8" in caught.value.message
    with pytest.raises(ckptmap.CkptmapError, match="and 2 more stay int8, expected bnb-nf4 as 4"):
        ckptmap.plan(tmp_path / "int8", "hf-bnb-nf4", no_encode=("*.mlp.*",))
    said = caught.value.hint
    assert all(to in said for to in ("--to hf-bf16", "--to hf-bnb-nf4", "--to full"))
    assert ckptmap.plan(tmp_path / "int8", "full-bnb-nf4", no_encode=kept).steps
    ckptmap.convert(tmp_path / "int8", tmp_path / "bf16", to="hf-bf16")
    ckptmap.convert(tmp_path / "bf16", tmp_path / "nf4", to="hf-bnb-nf4")
    layer = loaded(tmp_path / "nf4").model.layers[0]
    assert type(layer.self_attn.q_proj).__name__ == type(layer.mlp.up_proj).__name__ == "Linear4bit"


def test_beside_nf4_no_library_is_promised_the_rest(tmp_path: Path) -> None:
    """torchao's NF4 is read by nothing but ckptmap: of a quantized embedding beside it, the
    source's config.json would say that transformers loads it."""
    source, embedding = dense(tmp_path / "dense"), "model.embed_tokens.weight"
    ckptmap.convert(source, tmp_path / "int8", to="hf-int8", encode=(embedding, "*.mlp.*"))
    ckptmap.convert(tmp_path / "int8", tmp_path / "nf4", to="hf-nf4")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("int8", "nf4")]
    assert ["quantization_config" in config for config in configs] == [True, False]
    with ckptmap.open(tmp_path / "nf4") as ckpt, ckptmap.open(tmp_path / "int8") as before:
        assert set(ckpt.encodings) == {"dense", "int8", "nf4"}
        assert torch.equal(ckpt[embedding].read(), before[embedding].read())


def test_codes_of_bitsandbytes_that_are_recoded_are_not_called_exact() -> None:
    """The absmax of a row passes as absmax / 127 in fp32, and comes back as another number now and then."""
    info = info_of(torch.empty(1000, 8))
    grid = BnbInt8().grid(info)
    assert grid is not None
    recoder = BnbInt8().recoder(info, grid, "cpu")
    assert recoder is not None and recoder.fidelity == "codes"
    absmax = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    scales = BnbInt8().scales(info, {"SCB": absmax})
    assert 0 < int((BnbInt8().unscaled(scales).view(-1) != absmax).sum()) < 50
