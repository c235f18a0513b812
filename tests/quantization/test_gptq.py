"""GPTQ and AWQ as auto-round writes them (tests/golden/gptq, made by make_gptq.py there)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.core.quantized_codes import Coded
from tests.support.bnb_cases import same
from tests.support.int8_models import decoded, encoded, loaded
from tests.support.merge_cases import adapted, save_adapter
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "gptq"
TRUTH: dict[str, dict[str, list[str]]] = json.loads((GOLDEN / "truth.json").read_text())
FILE, CONFIG = "model.safetensors", "config.json"
DOWN = "model.layers.0.mlp.down_proj.weight"
STEM = DOWN.removesuffix("weight")
KEPT = [name for name in TRUTH if name not in ("gptq-2", "gptq-3", "gptq-4-order")]
Tensors = dict[str, torch.Tensor]


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def edited(
    name: str,
    to: Path,
    config: Callable[[dict[str, Any]], object] = lambda config: None,
    state: Callable[[Tensors], object] = lambda state: None,
) -> Path:
    """A copy of a golden checkpoint, with changes to its config.json and its tensors."""
    to.mkdir(parents=True)
    tensors = load_file(GOLDEN / name / FILE)
    state(tensors)
    save_file(tensors, to / FILE, {"format": "pt"})
    document = json.loads((GOLDEN / name / CONFIG).read_text())
    config(document)
    (to / CONFIG).write_text(json.dumps(document))
    return to


def stating(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["quantization_config"].update(changes)


# ------------------------------------------------------------------------------- decoded


@pytest.mark.parametrize("name", TRUTH)
def test_decoded_as_the_library_does(name: str) -> None:
    with ckptmap.open(GOLDEN / name) as ckpt:
        assert not any(key.endswith(("qweight", "qzeros", "scales", "g_idx")) for key in ckpt)
        for fqn, (own, _) in TRUTH[name].items():
            lazy = ckpt[fqn]
            assert lazy.encoding == name.split("-")[0]
            whole = lazy.read()
            assert digest(whole) == own, fqn
            same(lazy[5:41, 3:50], whole[5:41, 3:50])
            same(lazy[8:16, 32:64], whole[8:16, 32:64])
        assert ckpt["lm_head.weight"].encoding == "dense"


@pytest.mark.parametrize("name", TRUTH)
def test_in_the_dtype_of_the_model(name: str, tmp_path: Path) -> None:
    """The product is rounded to the dtype of the scales first, as the library computes it."""
    path = edited(name, tmp_path / "in", lambda config: config.update(dtype="bfloat16"))
    with ckptmap.open(path) as ckpt:
        for fqn, (_, cast) in TRUTH[name].items():
            assert ckpt[fqn].dtype == "bfloat16"
            assert digest(ckpt[fqn].read()) == cast, fqn


def test_more_kinds_of_config(tmp_path: Path) -> None:
    """What auto-round calls its own format, and bits that differ by module, which the shapes tell."""
    own = stating(quant_method="auto-round", packing_format="auto_round:auto_gptq")
    dynamic = stating(bits=3, dynamic={"+:.*": {"bits": 4}})
    for number, change in enumerate((own, dynamic)):
        with ckptmap.open(edited("gptq-4", tmp_path / str(number), change)) as ckpt:
            assert digest(ckpt[DOWN].read()) == TRUTH["gptq-4"][DOWN][0]


def test_autorounds_second_version(tmp_path: Path) -> None:
    """`auto_round:gptqmodel` stores zero points as they are, as auto-round 0.16 decodes them. Once it moved as bytes."""
    own = stating(quant_method="auto-round", packing_format="auto_round:gptqmodel")
    second = stating(checkpoint_format="gptq_v2")
    paths = [edited("gptq-3", tmp_path / str(n), change) for n, change in enumerate((own, second))]
    with ckptmap.open(paths[0]) as ckpt, ckptmap.open(paths[1]) as wanted:
        assert ckpt[DOWN].encoding == "gptq"
        same(ckpt[DOWN].read(), wanted[DOWN].read())
        assert digest(ckpt[DOWN].read()) != TRUTH["gptq-3"][DOWN][0]


def test_scales_in_bfloat16(tmp_path: Path) -> None:
    def narrow(state: Tensors) -> None:
        for key in [key for key in state if key.endswith(".scales")]:
            state[key] = state[key].to(torch.bfloat16)

    with ckptmap.open(edited("gptq-8", tmp_path / "in", state=narrow)) as ckpt:
        stored = load_file(tmp_path / "in" / FILE)
        codes = stored[f"{STEM}qweight"].t().contiguous().view(torch.uint8).to(torch.int16) - 128
        scales = stored[f"{STEM}scales"].t().repeat_interleave(32, 1)
        same(ckpt[DOWN].read(), (codes * scales).to(torch.float16))


# ------------------------------------------------------------------------------- codes kept


def library_values(path: Path) -> Tensors:
    """What compressed-tensors decompresses, module by module."""
    config = json.loads((path / CONFIG).read_text())["quantization_config"]
    (group,) = QuantizationConfig(**config).config_groups.values()
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    stored, made = load_file(path / FILE), {}
    for module in [key.removesuffix(".weight_packed") for key in stored if "packed" in key]:
        parts = {
            key.removeprefix(f"{module}."): value
            for key, value in stored.items()
            if key.startswith(f"{module}.")
        }
        made[f"{module}.weight"] = compressor.decompress(parts, group)["weight"]
    return made


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", KEPT)
def test_codes_kept_in_compressed_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    path = edited(name, tmp_path / "in", lambda config: config.update(dtype=dtype))
    to = "hf-ct-int8" if name == "gptq-8" else "hf-ct-int4"
    assert ckptmap.plan(path, to).fidelities()["exact"] == len(TRUTH[name])
    ckptmap.convert(path, tmp_path / "out", to=to)
    values = library_values(tmp_path / "out")
    stated = json.loads((tmp_path / "out" / CONFIG).read_text())["quantization_config"]
    weights = stated["config_groups"]["group_0"]["weights"]
    assert weights["symmetric"] is ("asym" not in name)
    assert weights["group_size"] == 32
    at = ["float16", "bfloat16"].index(dtype)
    with ckptmap.open(tmp_path / "out") as ckpt:
        for fqn, digests in TRUTH[name].items():
            assert digest(values[fqn].to(getattr(torch, dtype))) == digests[at], fqn
            assert digest(ckpt[fqn].read()) == digests[at], fqn
    assert ckptmap.verify(tmp_path / "out", against=path).ok


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("gptq-4", "hf-ct-int4"), ("gptq-8", "hf-ct-int8")])
def test_transformers_computes_the_same_with_kept_codes(name: str, to: str, tmp_path: Path) -> None:
    """Symmetric ones: transformers 5.23 refuses packed zero points, whoever wrote them."""
    ckptmap.convert(GOLDEN / name, tmp_path / "kept", to=to)
    ckptmap.convert(GOLDEN / name, tmp_path / "dense", to="hf-fp16")
    kept, dense = (loaded(tmp_path / each, torch.float16) for each in ("kept", "dense"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(kept(tokens).logits, dense(tokens).logits)


def test_what_cannot_be_kept_is_quantized_anew() -> None:
    for name in ("gptq-2", "gptq-3", "gptq-4-order"):
        assert ckptmap.plan(GOLDEN / name, "hf-ct-int4").fidelities()["requantize"] == 7


def test_zero_points_beyond_four_bits(tmp_path: Path) -> None:
    """The first version adds 1 to a stored 15; compressed-tensors has no such zero point."""

    def most(state: Tensors) -> None:
        state[f"{STEM}qzeros"].fill_(-1)

    path = edited("gptq-4-asym", tmp_path / "in", state=most)
    with ckptmap.open(path) as ckpt:
        stored = load_file(path / FILE)
        words = stored[f"{STEM}qweight"].t()[:, :, None] >> torch.arange(0, 32, 4)
        scales = stored[f"{STEM}scales"].t().repeat_interleave(32, 1)
        same(ckpt[DOWN].read(), ((words & 15).flatten(1) - 16).to(torch.float16) * scales)
    with pytest.raises(
        ckptmap.CkptmapError, match="zero points reach 16, and 4 bits hold"
    ) as caught:
        ckptmap.convert(path, tmp_path / "out", to="hf-ct-int4")
    assert caught.value.code == "CKM309"
    assert not (tmp_path / "out").exists()


def test_zero_points_that_the_config_calls_symmetric(tmp_path: Path) -> None:
    path = edited("gptq-4-asym", tmp_path / "in", stating(sym=True))
    with pytest.raises(
        ckptmap.CkptmapError, match="symmetric codes, so zero points of 8, found"
    ) as caught:
        ckptmap.convert(path, tmp_path / "out", to="hf-ct-int4")
    assert caught.value.code == "CKM115"


INTO = [
    ("gptq-4", "awq-4"), ("gptq-4", "awq-4-asym"), ("awq-4", "gptq-4"), ("awq-4", "gptq-4-v2"),
    ("awq-4-asym", "gptq-4-v2"), ("gptq-4-asym", "awq-4-asym"), ("gptq-8", "gptq-8"),
]  # fmt: skip


@pytest.mark.parametrize("by_way", ["ct", ""])
@pytest.mark.parametrize(("name", "like"), INTO)
def test_codes_kept_in_another_release(name: str, like: str, by_way: str, tmp_path: Path) -> None:
    """`--as`: from compressed-tensors or the other of the two, into a release with other values."""
    source, bits = GOLDEN / name, name.split("-")[1]

    def others(state: Tensors) -> None:
        state.update({key: value * 2 for key, value in state.items() if key.endswith(".scales")})

    if by_way:
        ckptmap.convert(GOLDEN / name, tmp_path / "ct", to=f"hf-ct-int{bits}")
        source = tmp_path / "ct"
    sym = stating(sym=False) if like == "gptq-4-v2" else lambda config: None
    release = edited(like, tmp_path / "like", sym, others)
    report = ckptmap.convert(source, tmp_path / "out", as_=release)
    assert report.likeness is not None
    assert {report.likeness.changed[fqn] for fqn in TRUTH[name]} <= {"codes", "exact", "bytes"}
    values, (wanted, made) = TRUTH[name], (load_file(p / FILE) for p in (release, tmp_path / "out"))
    assert {key: (t.dtype, t.shape) for key, t in made.items()} == {
        key: (t.dtype, t.shape) for key, t in wanted.items()
    }
    with ckptmap.open(tmp_path / "out") as ckpt, ckptmap.open(GOLDEN / name) as before:
        for fqn in values:
            assert ckpt[fqn].encoding == like.split("-")[0]
            same(ckpt[fqn].read(), before[fqn].read().to(ckpt[fqn].read().dtype))
    assert ckptmap.verify(tmp_path / "out", against=source).ok
    if name == "gptq-4-asym":  # and the very bytes that auto-round packed
        ckptmap.convert(
            tmp_path / "out", tmp_path / "back", as_=edited(name, tmp_path / "b", state=others)
        )
        given, got = load_file(GOLDEN / name / FILE), load_file(tmp_path / "back" / FILE)
        assert all(
            torch.equal(given[f"{STEM}{part}"], got[f"{STEM}{part}"])
            for part in ("qweight", "qzeros", "scales")
        )


def test_zero_points_that_another_release_cannot_hold(tmp_path: Path) -> None:
    """GPTQ's first version has no zero point of 0, and symmetric codes have only the middle."""

    def least(state: Tensors) -> None:
        state[f"{STEM}qzeros"].zero_()

    path = edited("awq-4-asym", tmp_path / "in", state=least)
    with pytest.raises(
        ckptmap.CkptmapError, match="its zero points are 0 to 0, expected 1 to 16"
    ) as caught:
        ckptmap.convert(path, tmp_path / "out", as_=GOLDEN / "gptq-4-asym")
    assert caught.value.code == "CKM309" and not (tmp_path / "out").exists()
    report = ckptmap.convert(path, tmp_path / "out", as_=GOLDEN / "gptq-4")
    assert report.likeness is not None and report.likeness.changed[DOWN] == "requantize"


# ------------------------------------------------------------------------------- given back


@pytest.mark.parametrize("name", TRUTH)
def test_given_back_as_it_was(name: str, tmp_path: Path) -> None:
    work, release = tmp_path / "work.pt", GOLDEN / name
    ckptmap.convert(release, work, to="full-bf16")
    whole = ckptmap.convert(work, tmp_path / "same", as_=release)
    assert whole.likeness is not None and not whole.likeness.changed
    given, got = load_file(release / FILE), load_file(tmp_path / "same" / FILE)
    assert given.keys() == got.keys() and all(torch.equal(given[key], got[key]) for key in given)
    state = torch.load(work)
    state[DOWN] = state[DOWN].flip(0) * 2
    torch.save(state, tmp_path / "trained.pt")
    if name == "gptq-4-order":
        with pytest.raises(ckptmap.CkptmapError, match="an order of groups that calibration"):
            ckptmap.convert(tmp_path / "trained.pt", tmp_path / "back", as_=release)
        return
    report = ckptmap.convert(tmp_path / "trained.pt", tmp_path / "back", as_=release)
    assert report.likeness is not None and report.likeness.changed == {DOWN: "quantize"}
    got = load_file(tmp_path / "back" / FILE)
    assert given.keys() == got.keys()
    for key, tensor in given.items():
        assert (tensor.dtype, tensor.shape) == (got[key].dtype, got[key].shape)
        assert key.startswith(STEM) or torch.equal(tensor, got[key]), key
    with ckptmap.open(tmp_path / "back") as ckpt:
        wanted, values = state[DOWN].float(), ckpt[DOWN].read().float()
        bits = ckpt[DOWN].encoding_.bits  # type: ignore[attr-defined]
        assert float((values - wanted).norm() / wanted.norm()) < 1.3 / 2**bits
    assert ckptmap.verify(tmp_path / "back", against=tmp_path / "trained.pt").ok


@pytest.mark.parametrize("name", [name for name in TRUTH if name != "gptq-4-order"])
def test_codes_of_the_rounding_rule(name: str) -> None:
    """Values of a grid whose groups have both outermost codes come back bit for bit; around a fixed middle
    each is at most half a step away."""
    with ckptmap.open(GOLDEN / name) as ckpt:
        encoding = ckpt[DOWN].encoding_
    bits, symmetric = encoding.bits, encoding.symmetric  # type: ignore[attr-defined]
    info = ckptmap.tensors.TensorInfo((64, 96), "float32")
    draw = torch.Generator().manual_seed(2)
    half = 1 << (bits - 1)
    codes = torch.randint(0, 2 * half, (64, 3, 32), generator=draw)
    codes[..., 0], codes[..., 1] = (0, 1) if symmetric else (0, 2 * half - 1)
    zero = half if symmetric else torch.randint(1, 2 * half, (64, 3, 1), generator=draw)
    scale = 2.0 ** torch.randint(-9, -3, (64, 3, 1), generator=draw)
    if symmetric:  # its range is that of the largest value on both sides: 2 * half * scale
        scale = scale * (2 * half - 1)
    values = ((codes - zero) * scale).flatten(1)
    out = decoded(encoding, info, encoded(encoding, values))
    if symmetric:
        steps = (scale / (half - 0.5) * half).expand(codes.shape).flatten(1)
        assert bool(((out - values).abs() <= steps / 2).all())
    else:
        same(out, values)


# ------------------------------------------------------------------------------- merged and loaded


@pytest.mark.parametrize("name", ["gptq-4-order", "awq-4-asym"])
def test_a_lora_adapter_is_merged(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(GOLDEN / name)
    del config.quantization_config
    model = adapted(LlamaForCausalLM(config), target_modules=["down_proj"])
    save_adapter(model, tmp_path / "adapter")
    ckptmap.merge(GOLDEN / name, tmp_path / "adapter", tmp_path / "out", to="hf-bf16")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    down, up = (next(t for key, t in tensors.items() if f"lora_{ab}" in key) for ab in "AB")
    with ckptmap.open(GOLDEN / name) as base, ckptmap.open(tmp_path / "out") as merged:
        wanted = base[DOWN].read().float() + 2 * (up @ down).float()
        got = merged[DOWN].read().float()
        assert float((got - wanted).norm() / wanted.norm()) < 0.01
        assert float((got - base[DOWN].read().float()).norm() / wanted.norm()) > 0.05


@pytest.mark.parametrize("name", ["gptq-3", "awq-4"])
def test_loaded_into_a_model(name: str) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(GOLDEN / name)
    del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    ckptmap.load(GOLDEN / name, model)
    assert digest(model.state_dict()[DOWN]) == TRUTH[name][DOWN][1]


# ------------------------------------------------------------------------------- refused


REFUSED = {
    "bits": ("gptq-4", stating(bits=8), "states bits 8, but qzeros int32.* have 4 bits"),
    "odd bits": ("gptq-4", stating(bits=16), "expected gptq of 2 to 8 bits, found 'bits 16'"),
    "no bits": ("gptq-4", stating(bits=None), "expected a number as bits, found 'None'"),
    "bits of awq": ("awq-4", stating(bits=8), "expected awq of 4 bits, found 'bits 8'"),
    "text": ("gptq-4", stating(group_size="x\x1b[31m" * 99), "expected a number as group_size"),
    "group": ("gptq-4", stating(group_size=64), "states group_size 64, but scales"),
    "no group": ("gptq-4", stating(group_size=0), "expected a group_size of 1 or more"),
    "huge": ("gptq-4", stating(group_size=10**40), "but scales"),
    "layout": ("gptq-4", stating(quant_method="awq", version="gemm"), "states quant_method 'awq'"),
    "modules": (
        "gptq-4",
        stating(modules_in_block_to_quantize=[["self_attn.q_proj"]]),
        "states modules_in_block_to_quantize",
    ),
    "kept": (
        "awq-4",
        stating(modules_to_not_convert=[STEM.removesuffix(".")]),
        "in modules_to_not_convert, but its weight is stored as codes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_of_config_and_tensors(case: str, tmp_path: Path) -> None:
    name, change, said = REFUSED[case]
    with pytest.raises(ckptmap.CkptmapError, match=said) as caught:
        ckptmap.open(edited(name, tmp_path / "in", change))
    assert caught.value.code == "CKM115"
    assert "\n" not in caught.value.message and len(caught.value.message) < 500
    assert "\x1b" not in str(caught.value)


DAMAGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "qweight": lambda t: t[:-1],
    "qzeros": lambda t: t[:, :-1],
    "scales": lambda t: t[:-1],
    "g_idx": lambda t: t[:-1],
}


@pytest.mark.parametrize("part", DAMAGED)
def test_parts_of_another_shape(part: str, tmp_path: Path) -> None:
    def cut(state: Tensors) -> None:
        state[STEM + part] = DAMAGED[part](state[STEM + part]).contiguous()

    with pytest.raises(ckptmap.CkptmapError, match=r"down_proj\.weight: ") as caught:
        ckptmap.open(edited("gptq-4", tmp_path / "in", state=cut))
    assert caught.value.code == "CKM115"


def test_without_zero_points(tmp_path: Path) -> None:
    path = edited("gptq-4", tmp_path / "in", state=lambda state: state.pop(f"{STEM}qzeros"))
    with pytest.raises(ckptmap.CkptmapError, match=r"down_proj.* without qzeros: ") as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM115"


def test_a_conv1d_stays_as_its_bytes(tmp_path: Path) -> None:
    """GPT-2 holds these weights the other way; another model's layer of this name is a linear one."""

    def renamed(state: Tensors) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            state[f"h.0.mlp.c_proj.{part}"] = state.pop(STEM + part)

    for kind, count in (("gpt2", 6), ("starcoder2", 7)):
        path = edited("gptq-4", tmp_path / kind, lambda c, k=kind: c.update(model_type=k), renamed)
        with ckptmap.open(path) as ckpt:
            assert sum(lazy.encoding == "gptq" for lazy in ckpt.values()) == count


def test_groups_that_are_none(tmp_path: Path) -> None:
    def beyond(state: Tensors) -> None:
        state[f"{STEM}g_idx"][40] = 3

    ordered = edited("gptq-4-order", tmp_path / "ordered", state=beyond)
    stated = edited("gptq-4", tmp_path / "stated", state=beyond)
    for path, said in (
        (ordered, "expected groups 0 to 2, found group 3 at input 40"),
        (stated, "states desc_act false and group_size 32, so groups in order, found group 3"),
    ):
        with ckptmap.open(path) as ckpt, pytest.raises(ckptmap.CkptmapError, match=said) as caught:
            ckpt[DOWN].read()
        assert caught.value.code == "CKM115"
        assert DOWN in caught.value.message
    without = edited(
        "gptq-4", tmp_path / "no", stating(desc_act=True), lambda s: s.pop(f"{STEM}g_idx")
    )
    with pytest.raises(ckptmap.CkptmapError, match="desc_act true, but no g_idx is stored"):
        ckptmap.open(without)


@pytest.mark.parametrize(
    "change",
    [
        stating(version="gemv"), stating(version="marlin"), stating(quant_method="gptq", checkpoint_format="marlin"),
        stating(version=None, checkpoint_format="gemv", format="gemv"), stating(version=None, format="marlin"),
    ],
)  # fmt: skip
def test_other_layouts_move_as_bytes(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    path = edited("awq-4", tmp_path / "in", change)
    ckptmap.convert(path, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / FILE).read_bytes() == (path / FILE).read_bytes()
    plan = ckptmap.plan(path, "hf-bf16")
    assert any("GPTQ or AWQ" in item.reason for item in plan.unresolved)


def test_without_a_config_it_moves_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(GOLDEN / "gptq-4" / FILE, tmp_path / "in" / FILE)
    assert ckptmap.plan(tmp_path / "in", "hf-bf16", config_from=None).unresolved


def test_read_again_from_other_containers(tmp_path: Path) -> None:
    """The record says what a config.json would; written beside a new one, it states the same."""
    for name in ("gptq-4-v2", "gptq-4-order", "awq-4-asym"):
        ckptmap.convert(GOLDEN / name, tmp_path / f"{name}.pt", to="full")
        with ckptmap.open(tmp_path / f"{name}.pt") as ckpt:
            assert digest(ckpt[DOWN].read()) == TRUTH[name][DOWN][0]
            assert isinstance(ckpt[DOWN].encoding_, Coded)


@pytest.mark.parametrize("name", ["gptq-4", "awq-4"])
def test_scales_that_are_no_floats_are_refused(name: str, tmp_path: Path) -> None:
    def whole(state: Tensors) -> None:
        state[f"{STEM}scales"] = state[f"{STEM}scales"].to(torch.int32)

    with pytest.raises(ckptmap.CkptmapError, match="float32, found int32") as caught:
        ckptmap.open(edited(name, tmp_path / "in", state=whole))
    assert caught.value.code == "CKM115"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_that_torch_lacks_is_refused(key: str, tmp_path: Path) -> None:
    """Values are decoded to the dtype of the model; transformers stops at such a config, too."""
    path = edited(
        "gptq-4", tmp_path / "in", lambda config: config.update({"dtype": None, key: "bfloat"})
    )
    with pytest.raises(
        ckptmap.CkptmapError, match="dtype 'bfloat', expected one of torch's"
    ) as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM115"
    for known in ("auto", "float64", None):
        path = edited("gptq-4", tmp_path / str(known), lambda config: config.update({key: known}))  # noqa: B023
        ckptmap.open(path).close()


@pytest.mark.parametrize("rows", [1, 33])
def test_rows_of_awq_codes_are_missing(rows: int, tmp_path: Path) -> None:
    """AutoAWQ packs outputs into words, so a matrix of fewer inputs looks whole; its groups are not."""

    def cut(state: Tensors) -> None:
        state[f"{STEM}qweight"] = state[f"{STEM}qweight"][:-rows].contiguous()
        state[f"{STEM}scales"] = state[f"{STEM}scales"][: -(rows // 32) or None].contiguous()
        state[f"{STEM}qzeros"] = state[f"{STEM}qzeros"][: -(rows // 32) or None].contiguous()

    with pytest.raises(
        ckptmap.CkptmapError, match=r"inputs, not whole groups: rows of codes"
    ) as caught:
        ckptmap.open(edited("awq-4", tmp_path / "in", state=cut))
    assert caught.value.code == "CKM115"
