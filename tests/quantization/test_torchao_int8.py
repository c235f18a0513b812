"""torchao's int8: files of every torchao release are read, and torchao reads what we write."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptmap
from ckptmap.errors import PlanError, RunError
from ckptmap.protocols import Refusal
from ckptmap.quantization.blockwise import dequantize as decoding
from ckptmap.quantization.blockwise.scaled_encoder import ScaledEncoder
from ckptmap.quantization.blockwise.scaled_encoding import ScaledEncoding
from ckptmap.quantization.bnb.int8 import BnbInt8
from ckptmap.quantization.compressed_tensors.packed import Packed
from ckptmap.quantization.compressed_tensors.scheme import PlainFp8
from ckptmap.quantization.deepseek_fp8 import Fp8
from ckptmap.quantization.torchao.float8 import Float8
from ckptmap.quantization.torchao.int8 import Int8, Int8Scheme
from ckptmap.tensors import Box, TensorInfo
from tests.conftest import Device
from tests.support.int8_models import (
    QUERY,
    decoded,
    dense,
    encoded,
    info_of,
    loaded,
    logits,
    plain,
    torchao_hf,
    weights,
)
from tests.support.library import Library
from tests.support.paths import GOLDEN, ROOT

torchao = Library("torchao.quantization")
GOLDEN_FILES = GOLDEN / "torchao"
TRUTHS = {
    release.name.removeprefix("truth-").removesuffix(".safetensors"): release
    for release in sorted(GOLDEN_FILES.glob("truth-*.safetensors"))
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


# ------------------------------------------------------------------------------- every release


@pytest.mark.parametrize("release", TRUTHS)
def test_pickles_of_every_release_are_read_as_it_decodes_them(release: str) -> None:
    """torchao 0.7 to 0.18: AffineQuantizedTensor, LinearActivationQuantizedTensor, Int8Tensor,
    IntxUnpackedToInt8Tensor, Float8Tensor, NF4Tensor, training weights; without importing torchao.
    A row of zeros is NaN in torchao's own float8 (0 / 0), and so here."""
    for entry, truth in load_file(TRUTHS[release]).items():
        name, key = entry.split("/")
        assert name.startswith(f"{release}-")
        with ckptmap.open(GOLDEN_FILES / f"{name}.pt") as ckpt:
            tensor = ckpt[key]
            assert same(tensor.read(), truth), entry
            assert same(tensor[3:7, 2:11], truth[3:7, 2:11]), f"a box of {entry}"


def test_all_kinds_are_among_them() -> None:
    encodings = set()
    for file in GOLDEN_FILES.glob("0*.pt"):
        with ckptmap.open(file) as ckpt:
            assert not ckpt.refused, file
            encodings.update(ckpt.encodings)
    assert encodings == {"dense", "int8", "float8", "nf4"}
    assert len(list(GOLDEN_FILES.glob("0*.pt"))) > 40


def test_reading_imports_no_torchao() -> None:
    import subprocess
    import sys

    program = (
        "import sys, ckptmap\n"
        f"with ckptmap.open({str(GOLDEN_FILES / '0.7-int8dyn.pt')!r}) as c: c['1.weight'].read()\n"
        "assert 'torchao' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", ["0.7-int8dyn", "0.15-int8wo-group", "0.18-int6x-asymmetric"])
def test_an_old_pickle_becomes_a_hugging_face_directory_that_torchao_reads(
    name: str, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    ckptmap.convert(GOLDEN_FILES / f"{name}.pt", tmp_path / "out", to="hf")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        state, left = unflatten_tensor_state_dict(tensors, opened.metadata())
    truth = load_file(GOLDEN_FILES / f"truth-{name.split('-')[0]}.safetensors")
    wanted = {k.split("/")[1]: v for k, v in truth.items() if k.startswith(f"{name}/")}
    assert wanted and all(same(state[key].dequantize(), value) for key, value in wanted.items())
    assert not left


@pytest.mark.parametrize("to", ["full", "fsdp2", "hf", "fsdp2-ranks-fp32"])
def test_as_they_are_or_decoded(to: str, tmp_path: Path) -> None:
    more = {"world_size": 3} if to.startswith("fsdp2") else {}
    source = GOLDEN_FILES / "0.17-int8wo.pt"
    ckptmap.convert(source, tmp_path / "out", to=to, **more)
    assert ckptmap.verify(tmp_path / "out", against=source).ok
    with ckptmap.open(source) as before, ckptmap.open(tmp_path / "out") as after:
        wanted = before["1.weight"].read()
        assert torch.equal(after["1.weight"].read(), wanted.to(after["1.weight"].torch_dtype))


def test_malformed_ones_are_refused(tmp_path: Path) -> None:
    linear = nn.Linear(32, 16).bfloat16()
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    linear.weight.scale = linear.weight.scale[:7]  # type: ignore[union-attr]
    torch.save(linear.state_dict(), tmp_path / "bad.pt")
    with pytest.raises(ckptmap.CkptmapError, match=r"part 'scale', expected shape \[16, 1\]"):
        ckptmap.open(tmp_path / "bad.pt")
    del linear.weight.scale  # type: ignore[union-attr]
    torch.save({"weight": linear.weight}, tmp_path / "bad.pt")
    with pytest.raises(ckptmap.CkptmapError, match="part 'scale' is missing"):
        ckptmap.open(tmp_path / "bad.pt")


# ------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("shape", [(64, 64), (33, 100), (5, 4096), (128, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_bit_equal_to_torchao(dtype: torch.dtype, shape: Any, kind: str) -> None:
    w = weights(shape, dtype, kind)
    w[1] = 0
    reference: Any = torchao.Int8Tensor.from_hp(w, torchao.PerRow())
    encoding, info = Int8((1, shape[1])), info_of(w)
    for split in (0, 3):
        parts = encoded(encoding, w, split)
        assert torch.equal(parts["qdata"], reference.qdata)
        assert torch.equal(parts["scale"], reference.scale)
    whole = decoded(encoding, info, parts)
    assert torch.equal(whole, reference.dequantize())
    assert not whole[1].any(), "zero rows stay zero"


@pytest.mark.parametrize("block", [(1, 20), (33, 100), (3, 25), (1, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_block_is_decoded_as_torchao_does(dtype: torch.dtype, block: Any) -> None:
    from torchao.quantization.quant_primitives import dequantize_affine

    info = TensorInfo((33, 100), str(dtype).removeprefix("torch."))
    grid = [n // b for n, b in zip(info.shape, block, strict=True)]
    codes = torch.randint(-128, 128, info.shape, dtype=torch.int8)
    scale = (torch.rand(grid) * 0.01).to(dtype)
    zero = torch.randint(-9, 9, grid, dtype=torch.int8)
    encoding = Int8(block, info.dtype, "int8", kind="IntxUnpackedToInt8Tensor")
    parts = {"qdata": codes, "scale": scale, "zero_point": zero}
    wanted = dequantize_affine(codes, list(block), scale, zero, torch.int8, output_dtype=dtype)
    assert torch.equal(decoded(encoding, info, parts), wanted)
    box = Box((7, 13), (20, 51))
    assert torch.equal(decoded(encoding, info, parts, box), wanted[7:27, 13:64])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights((65, 96), torch.bfloat16)
    encoding = Int8((1, 96))
    whole = encoded(encoding, w)
    values = decoded(encoding, info_of(w), whole)
    monkeypatch.setattr(decoding, "CHUNK_NUMEL", 96 * 7)
    monkeypatch.setattr("ckptmap.quantization.blockwise.quantizer.CHUNK_NUMEL", 96 * 7)
    assert all(torch.equal(part, whole[name]) for name, part in encoded(encoding, w).items())
    assert torch.equal(decoded(encoding, info_of(w), whole), values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused_by_name(bad: float, tmp_path: Path) -> None:
    w = weights((64, 64), torch.bfloat16)
    w[9, 3] = bad
    with pytest.raises(RunError, match="NaN or infinity in 1 block, first in row 9"):
        encoded(Int8((1, 64)), w, 2)
    torch.save({"a.weight": w}, tmp_path / "in.pt")
    with pytest.raises(RunError, match=r"a\.weight: expected finite values"):
        ckptmap.convert(tmp_path / "in.pt", tmp_path / "out", to="full-int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", [0, 2])
@pytest.mark.parametrize(
    "encoding",
    [Int8((1, 64)), Int8((1, 32)), Float8((1, 64)), Packed((1, 64), "float16"),
     PlainFp8((1, 64), "float16")],
    ids=str,
)  # fmt: skip
def test_scales_that_overflow_float16_are_refused(encoding: ScaledEncoding, split: int) -> None:
    """torchao's own scales are rounded up there, and it makes infinities of finite values."""
    w = weights((64, 64), torch.float16)
    w[9, 40] = -65280 if encoding.codes_dtype == "int8" else -65504
    place = "row 9" if encoding.block == (1, 64) else "block 19"
    with pytest.raises(RunError, match=f"1 block scale overflows float16.* {place};") as caught:
        encoded(encoding, w, split)
    assert caught.value.code == "CKM309"


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("encoding", [Int8((1, 64)), Float8((1, 64))], ids=lambda e: e.name)
def test_no_other_is_refused(
    encoding: ScaledEncoding, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest values of float16, a row each: those that do come out as infinity."""
    top = torch.arange(0x7BFF - 511, 0x7C00).to(torch.int16).view(torch.float16)
    w = weights((512, 64), torch.float16)
    w[:, 3] = top * sign
    refused = []
    for row in range(len(w)):
        try:
            encoded(encoding, w[row : row + 1])
        except RunError:
            refused.append(row)
    monkeypatch.setattr(ScaledEncoder, "finish", lambda self: ())
    values = decoded(encoding, info_of(w), encoded(encoding, w))
    assert refused == values.isfinite().all(1).logical_not_().nonzero().flatten().tolist()
    assert bool(refused) == (sign < 0 or encoding.name == "float8")


def test_codes_that_another_product_makes_infinite_are_refused(tmp_path: Path) -> None:
    """bitsandbytes multiplies a code by 127 scales before it divides."""
    w = weights((64, 64), torch.bfloat16)
    w[9] *= 1e38
    torch.save({"a.weight": w}, tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "int8.pt", to="full-int8")
    with pytest.raises(RunError, match=r"a\.weight: its scales overflow float32") as caught:
        ckptmap.convert(tmp_path / "int8.pt", tmp_path / "out.pt", to="full-bnb-int8")
    assert caught.value.code == "CKM309"


ENCODINGS = (Int8((1, 96)), BnbInt8(), Float8((1, 96)), Fp8((32, 32)), Packed((1, 96)))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_codes_are_made_where_the_values_are(device: Device, encoding: ScaledEncoding) -> None:
    """A fake device holds no values: a wait for one would fail. Decoding is asked of the meta
    device in its place, since `copy_` to a fake GPU fails in a CPU build of torch."""
    info = TensorInfo((64, 96), "bfloat16")
    with device.mode():
        w = torch.randn(64, 96, dtype=torch.bfloat16, device=device.name)
        writes = [*encoding.encoder(info, device.name).feed(0, w.view(-1))]
        assert {write.values.device.type for write in writes} == {device.name}
    where = "meta" if device.fake else device.name
    expected = encoding.parts(info)
    assert not isinstance(expected, Refusal)
    if device.fake:
        parts = {
            name: torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=where)
            for name, part in expected.items()
        }
    else:
        parts = {k: v.to(where) for k, v in encoded(encoding, w.cpu()).items()}
        for write in writes:
            wanted = parts[write.part].view(-1)
            assert torch.equal(write.values.view(torch.uint8), wanted.view(torch.uint8))
    out = torch.empty(64, 96, dtype=torch.bfloat16, device=where)
    encoding.decode(info, parts, Box.whole(info.shape), out)
    assert device.fake or torch.equal(
        out.cpu(), decoded(encoding, info, encoded(encoding, w.cpu()))
    )


# ------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torchaos_safetensors_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    from torchao.quantization import PerGroup

    for config in (
        torchao.Int8WeightOnlyConfig(),
        torchao.Int8WeightOnlyConfig(granularity=PerGroup(32)),
    ):
        path = tmp_path / config.granularity.__class__.__name__
        truth = torchao_hf(path, config, dtype)
        with ckptmap.open(path) as ckpt:
            assert ckpt[QUERY].encoding == "int8" and set(ckpt) == set(truth)
            for key, wanted in truth.items():
                assert torch.equal(ckpt[key].read(), wanted), key


def test_safetensors_of_torchao_0_14_are_read(tmp_path: Path) -> None:
    """`1.weight:qdata`, `1.bias:_data`, and no list of parts."""
    source, truth = (
        GOLDEN_FILES / "0.14-int6x-v2.safetensors",
        load_file(GOLDEN_FILES / "truth-0.14.safetensors"),
    )
    ckptmap.convert(source, tmp_path / "hf", to="hf")
    with (
        ckptmap.open(source) as ckpt,
        ckptmap.open(GOLDEN_FILES / "0.14-int6x-v2.pt") as pickled,
        ckptmap.open(tmp_path / "hf") as again,
    ):
        assert set(ckpt) == set(pickled) == set(again)
        assert ckpt["1.weight"].encoding == again["1.weight"].encoding == "int8"
        for key in ckpt:
            wanted = truth.get(f"0.14-int6x-v2/{key}", pickled[key].read())
            assert torch.equal(ckpt[key].read(), wanted), key
            assert torch.equal(again[key].read(), wanted), key


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    torchao_hf(tmp_path / "whole", torchao.Int8WeightOnlyConfig())
    with safe_open(tmp_path / "whole" / "model.safetensors", "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    del tensors[QUERY.replace(".weight", "._weight_scale")]
    save_file(tensors, tmp_path / "part.safetensors", metadata)
    with pytest.raises(
        ckptmap.CkptmapError, match=r"q_proj\.weight: torchao's part 'scale' is missing"
    ):
        ckptmap.open(tmp_path / "part.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformers_loads_what_we_write(dtype: torch.dtype, tmp_path: Path) -> None:
    source = dense(tmp_path / "dense", dtype)
    ckptmap.convert(source, tmp_path / "out", to="hf-int8", max_shard_nbytes=40_000)
    model = loaded(tmp_path / "out")
    query = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(query, torchao.Int8Tensor)
    with ckptmap.open(tmp_path / "out") as ckpt:
        values = {key: ckpt[key].read() for key in ckpt}
        assert ckpt["lm_head.weight"].encoding == "dense"
    assert torch.equal(query.dequantize(), values[QUERY])
    reference = logits(plain(values))
    close = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]  # it multiplies by the scale later
    assert torch.allclose(logits(model), reference, atol=close)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_model_that_transformers_stores_under_other_names(shard: str, tmp_path: Path) -> None:
    """Its metadata has what a module is called once loaded, its keys the names on disk."""
    from transformers import TorchAoConfig, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        image_size=16, patch_size=8,
    )  # fmt: skip
    ViTForImageClassification(config).bfloat16().save_pretrained(tmp_path / "dense")
    model = ViTForImageClassification.from_pretrained(
        tmp_path / "dense", dtype=torch.bfloat16, device_map="cpu",
        quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()),
    )  # fmt: skip
    model.save_pretrained(tmp_path / "in", max_shard_size=shard)
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    found, said = ViTForImageClassification.from_pretrained(
        tmp_path / "out", device_map="cpu", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    pixels = torch.linspace(-1, 1, 768, dtype=torch.bfloat16).view(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(found(pixels).logits, model(pixels).logits)


OUTDATED: dict[str, Any] = {
    "short": "int8_weight_only",
    "v1": {
        "default": {"_data": {"group_size": None}, "_type": "Int8WeightOnlyConfig", "_version": 1}
    },
    "layout": {
        "default": {
            "_data": {"layout": {"_data": {}, "_type": "PlainLayout", "_version": 1}},
            "_type": "Int8DynamicActivationInt8WeightConfig",
            "_version": 1,
        }
    },
}
"""What transformers 4.57 wrote of torchao 0.14 beside its pickles."""


@pytest.mark.parametrize("kind", OUTDATED)
def test_a_config_that_torchao_no_longer_reads_is_written_anew(kind: str, tmp_path: Path) -> None:
    truth = torchao_hf(tmp_path / "in", torchao.Int8WeightOnlyConfig())
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["quant_type"] = OUTDATED[kind]
    file.write_text(json.dumps(config))
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    model = loaded(tmp_path / "out")
    state: dict[str, Any] = model.state_dict()
    assert type(state[QUERY]).__name__ == "Int8Tensor"
    assert torch.equal(state[QUERY].dequantize(), truth[QUERY])


def test_ours_equals_what_quantizing_in_transformers_gives(tmp_path: Path) -> None:
    truth = torchao_hf(tmp_path / "theirs", torchao.Int8WeightOnlyConfig())
    ckptmap.convert(tmp_path / "theirs-dense", tmp_path / "ours", to="hf-int8")
    with ckptmap.open(tmp_path / "ours") as ckpt:
        for key, wanted in truth.items():
            assert torch.equal(ckpt[key].read(), wanted), key


def test_dcp_of_whole_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24)).bfloat16()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    save_dcp(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with ckptmap.open(tmp_path / "dcp") as ckpt:
        assert ckpt["0.weight"].encoding == "int8"
        assert torch.equal(ckpt["1.weight"].read(), model[1].weight.dequantize())


def test_the_plan_says_what_is_lost(tmp_path: Path) -> None:
    torch.save({"fc.weight": weights((64, 64), torch.bfloat16)}, tmp_path / "in.pt")
    step = next(iter(ckptmap.plan(tmp_path / "in.pt", "full-int8").steps))
    assert (step.fidelity, step.target) == ("quantize", "int8(bfloat16)")
    torch.save({"fc.weight": torch.randn(4, 4, 4)}, tmp_path / "3d.pt")
    with pytest.raises(ckptmap.CkptmapError, match=r"cannot be int8: quantizes matrices by rows"):
        ckptmap.plan(tmp_path / "3d.pt", "full-int8", encode=("fc.weight",))


def test_a_scheme_is_a_target_of_linear_weights_only() -> None:
    scheme, info = Int8Scheme(), TensorInfo((64, 64), "bfloat16")
    assert scheme.target("layers.0.q_proj.weight", info) is not None
    for name in ("lm_head.weight", "model.embed_tokens.weight", "layers.0.mlp.gate.weight"):
        assert scheme.target(name, info) is None, name


def test_torchaos_module_is_where_we_think() -> None:
    """The golden pickles name these; a release that moves them needs a look."""
    assert importlib.import_module("torchao.quantization").Int8Tensor.__module__.startswith(
        "torchao."
    )


def test_gpt2_keeps_its_conv1d_dense_and_loads(tmp_path: Path) -> None:
    """Of these libraries none quantizes transformers' Conv1D; bitsandbytes does (`test_conv1d`)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "dense")
    for to in ("hf-int8", "hf-ct-int8", "hf-fp8"):
        plan = ckptmap.plan(tmp_path / "dense", to)
        assert {step.fidelity for step in plan.steps} == {"bytes"}, to


def test_a_class_that_is_not_decoded_moves_with_what_torchao_says_of_it(tmp_path: Path) -> None:
    """MX of 6 bits here; int4 and what comes likewise: as bytes, metadata included, or not at all."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    made: Any = MXTensor.to_mx(torch.randn(32, 64).bfloat16(), "fp6_e3m2", 32)
    tensors, metadata = flatten_tensor_state_dict({"fc.weight": made, "fc.bias": torch.ones(3)})
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {**metadata, "format": "pt"})
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        state, left = unflatten_tensor_state_dict(found, opened.metadata())
    assert not left and torch.equal(state["fc.weight"].dequantize(), made.dequantize())
    for names in ({"add_prefix": "net"}, {"wrap": "ddp"}):  # torchao would not find the parts
        with pytest.raises(
            PlanError, match=r"the metadata of fc\.weight, .* names its parts"
        ) as refused:
            ckptmap.plan(tmp_path / "in", "hf", **names)
        assert refused.value.code == "CKM618"
    plan = ckptmap.plan(tmp_path / "in", "hf-fp32")
    assert {item.key for item in plan.unresolved} == {"fc._weight_qdata", "fc._weight_scale"}


def test_the_kernels_that_are_timed_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timed = importlib.import_module("kernels_8bit")
    for dtype in ("bfloat16", "float32"):
        timed.check(timed.kernels._weight(256, dtype))
        assert all(getattr(timed, name) for c in timed.CONTESTS for name in (c.mine, *c.peers))
    sys.modules.pop("kernels_8bit"), sys.modules.pop("kernels_4bit")
