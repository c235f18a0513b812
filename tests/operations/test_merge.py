"""`ckptmap merge` gives what peft's own merge gives, over base models in every encoding."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from peft.tuners.lora.config import VeloraConfig
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ckptmap
from ckptmap import registry
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.checkpoint.lora.adapter_config import read_config
from ckptmap.checkpoint.lora.merge_adapter import merge_adapter
from ckptmap.checkpoint.lora.merged_tensor import A, B, Merged, dora
from ckptmap.errors import ArgumentError, PlanError, RunError, SourceError
from ckptmap.execution import encode
from ckptmap.execution.copy import Context
from ckptmap.operations.merge import MergeReport, merge, plan_merge
from ckptmap.planning.file_plan import Encode
from ckptmap.protocols import Group
from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.dense import DenseAs
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, TensorInfo
from tests.corpus.ranks import run_ranks
from tests.support import bnb_cases
from tests.support.bnb_cases import logits, quantized, refused, same
from tests.support.examples import examples
from tests.support.hub.server import Hub
from tests.support.merge_cases import CONV1D, LINEARS, adapted, gpt2, llama, merged_by_peft, saved

MODELS = {"llama": llama, "gpt2": gpt2}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": LINEARS}),
    "rslora": ("llama", {"target_modules": LINEARS, "use_rslora": True}),
    "patterns": ("llama", {
        "target_modules": LINEARS, "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "mlp.up_proj": 5},
    }),
    "dora": ("llama", {"target_modules": LINEARS, "use_dora": True, "use_rslora": True}),
    "modules_to_save": ("llama", {"target_modules": LINEARS, "modules_to_save": ["lm_head", "norm"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "conv1d": ("gpt2", {"target_modules": CONV1D, "fan_in_fan_out": True}),
    "bias all": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "bias lora_only": ("gpt2", {"target_modules": CONV1D, "fan_in_fan_out": True,
                                "bias": "lora_only"}),
    "lora_bias": ("gpt2", {"target_modules": CONV1D, "fan_in_fan_out": True, "lora_bias": True}),
    "velora": ("llama", {"target_modules": LINEARS, "velora_config": VeloraConfig()}),
    "tied embedding": ("gpt2", {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}),
}  # fmt: skip


def values(path: Path) -> dict[str, Tensor]:
    with ckptmap.open(path) as ckpt:
        return {fqn: ckpt[fqn].read() for fqn in ckpt}


def check(out: Path, truth: dict[str, Tensor]) -> int:
    """Every tensor of a merge is bit for bit the truth's; how many there are."""
    found = values(out)
    for fqn, value in found.items():
        same(value, truth[fqn])
    return len(found)


def change(adapter: Path, **config: Any) -> None:
    """The same adapter with another config."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def rewrite(adapter: Path, edit: Any) -> None:
    """The same adapter with other tensors."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


# --------------------------------------------------------------------------- as peft merges


@pytest.mark.parametrize("name", EXACT)
def test_fp32_is_bit_equal_to_peft(tmp_path: Path, name: str) -> None:
    kind, config = EXACT[name]
    wrapped = saved(tmp_path, MODELS[kind](), **config)
    report = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    truth = merged_by_peft(wrapped)
    assert check(tmp_path / "out", truth) == report.tensors > 20
    assert report.fidelity["bytes"] + report.fidelity["cast"] == report.tensors
    before = values(tmp_path / "base")
    assert any(not torch.equal(before[fqn], truth[fqn]) for fqn in before)
    assert ckptmap.verify(
        tmp_path / "out", against=tmp_path / "base", adapter=tmp_path / "adapter"
    ).ok


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_dora_over_columns_is_within_a_few_ulp_of_peft(tmp_path: Path, kind: str) -> None:
    """peft sums the squares of a column in fp32, here they are summed in fp64."""
    targets = {"gpt2": [*CONV1D, "wte"], "llama": ["embed_tokens"]}[kind]
    fan = kind == "gpt2"
    wrapped = saved(
        tmp_path, MODELS[kind](), target_modules=targets, use_dora=True, fan_in_fan_out=fan
    )
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    truth = merged_by_peft(wrapped)
    for fqn, value in values(tmp_path / "out").items():
        torch.testing.assert_close(value, truth[fqn], rtol=6e-7, atol=0)


@pytest.mark.parametrize("name", ["lora", "dora", "modules_to_save", "conv1d"])
def test_bf16_is_rounded_once(tmp_path: Path, name: str) -> None:
    kind, config = EXACT[name]
    wrapped = saved(tmp_path, MODELS[kind](torch.bfloat16), **config)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert check(tmp_path / "out", merged_by_peft(wrapped)) > 20


def test_a_cast_is_of_the_fp32_sum(tmp_path: Path) -> None:
    saved(tmp_path, llama(torch.bfloat16), target_modules=LINEARS)
    wide = llama(torch.bfloat16).float()
    wrapped = PeftModel.from_pretrained(wide, str(tmp_path / "adapter"))
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "hf-fp32")
    assert check(tmp_path / "out", merged_by_peft(wrapped)) > 20


def test_a_bin_adapter_and_the_merged_model_loads(tmp_path: Path) -> None:
    wrapped = saved(tmp_path, llama(), target_modules=LINEARS)
    shutil.rmtree(tmp_path / "adapter")
    wrapped.save_pretrained(str(tmp_path / "adapter"), safe_serialization=False)
    assert (tmp_path / "adapter" / "adapter_model.bin").is_file()
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), logits(wrapped), rtol=1e-4, atol=1e-5)


def test_a_tie_of_one_storage_is_changed_on_both_sides(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    torch.save(model.state_dict(), tmp_path / "base.pt")
    wrapped = adapted(model, target_modules=["embed_tokens"])
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    report = merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
    truth = merged_by_peft(wrapped)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(values(tmp_path / "out.pt"))
    check(tmp_path / "out.pt", truth)
    said = " ".join(report.notes)
    assert "the base ties lm_head.weight to it, which changes with it as in peft's" in said


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize("wrapper", [torch.compile, torch.nn.DataParallel])
def test_wrapper_prefixes(tmp_path: Path, wrapper: Any) -> None:
    truth = merged_by_peft(saved(tmp_path, llama(), target_modules=LINEARS))
    adapted(wrapper(llama()), target_modules=LINEARS).save_pretrained(str(tmp_path / "wrapped"))
    keys = load_file(tmp_path / "wrapped" / "adapter_model.safetensors")
    assert all("._orig_mod." in key or ".module." in key for key in keys)
    merge(tmp_path / "base", tmp_path / "wrapped", tmp_path / "out")
    check(tmp_path / "out", truth)


def test_an_adapter_of_the_backbone_alone(tmp_path: Path) -> None:
    truth = merged_by_peft(saved(tmp_path, llama(), target_modules=LINEARS))
    adapted(llama().model, target_modules=LINEARS).save_pretrained(str(tmp_path / "inner"))
    merge(tmp_path / "base", tmp_path / "inner", tmp_path / "out")
    check(tmp_path / "out", truth)


def test_a_square_conv1d_is_known_by_its_kin(tmp_path: Path) -> None:
    """peft writes one fan_in_fan_out for all modules: here that of the last, lm_head."""
    model = gpt2()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    targets = [*CONV1D, "lm_head"]
    wrapped = saved(tmp_path, model, target_modules=targets, fan_in_fan_out=True)
    assert (
        read_config(tmp_path / "adapter" / "adapter_config.json", Mounts()).fan_in_fan_out is False
    )
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    check(tmp_path / "out", merged_by_peft(wrapped))


# --------------------------------------------------------------------------- FSDP2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge-ranks")
    run_ranks("tests.ranks.merge", 2, [str(folder)], timeout=120)
    return folder


@pytest.mark.parametrize("name", ["peft", "trainable", "all"])
def test_saved_from_fsdp2(ranks: Path, tmp_path: Path, name: str) -> None:
    """The trainable parameters alone, or the state of the whole model, both by DCP."""
    report = merge(
        ranks / "base", ranks / name, tmp_path / "out", "fsdp2", world_size=2,
        adapter_config=ranks / "peft",
    )  # fmt: skip
    assert report.tensors == check(tmp_path / "out", load_file(ranks / "truth.safetensors"))
    assert any("original_module" in note for note in report.notes) == (name == "all")


def test_fsdp2_over_nf4_takes_the_scales_of_the_base(ranks: Path, tmp_path: Path) -> None:
    """Its checkpoint repeats the codes without scales; they must be the base's, byte for byte."""
    base, config = ranks / "nf4.safetensors", ranks / "nf4-peft"
    merge(base, ranks / "nf4-all", tmp_path / "all", "hf-bf16", adapter_config=config)
    merge(base, config, tmp_path / "peft", "hf-bf16")
    assert check(tmp_path / "all", values(tmp_path / "peft")) == 4
    other = load_file(base)
    other["up.weight"].view(torch.uint8)[5] ^= 1
    save_file(other, tmp_path / "other.safetensors")
    with refused(RunError, "CKM310", "up.weight: the replica .* differs"):
        merge(
            tmp_path / "other.safetensors", ranks / "nf4-all", tmp_path / "no", "hf-bf16",
            adapter_config=config,
        )  # fmt: skip
    assert not (tmp_path / "no").exists()


def test_without_its_config_nothing_is_guessed(ranks: Path, tmp_path: Path) -> None:
    with refused(SourceError, "CKM320", "trainable: has no adapter_config.json") as caught:
        merge(ranks / "base", ranks / "trainable", tmp_path / "out")
    assert "--adapter-config" in caught.value.hint


# --------------------------------------------------------------------------- on the Hub


@pytest.mark.parametrize("low_disk", [False, True])
def test_both_on_the_hub(hub: Hub, tmp_path: Path, low_disk: bool) -> None:
    wrapped = saved(tmp_path, llama(), target_modules=LINEARS, use_dora=True)
    hub.add("org/base", tmp_path / "base")
    hub.add("org/adapter", tmp_path / "adapter")
    report = merge("hf://org/base", "hf://org/adapter", tmp_path / "out", low_disk=low_disk)
    check(tmp_path / "out", merged_by_peft(wrapped))
    assert "6 modules of hf://org/adapter" in " ".join(report.notes)
    assert hub.endpoint not in (tmp_path / "out" / "ckptmap.manifest.json").read_text()


def test_errors_name_the_hub(hub: Hub, tmp_path: Path) -> None:
    saved(tmp_path, llama(), target_modules=LINEARS)
    change(tmp_path / "adapter", peft_type="IA3")
    hub.add("org/base", tmp_path / "base")
    hub.add("org/adapter", tmp_path / "adapter")
    with refused(SourceError, "CKM320", r"^hf://org/adapter@?\w*/adapter_config\.json: peft_type"):
        merge("hf://org/base", "hf://org/adapter", tmp_path / "out")


# --------------------------------------------------------------------------- quantized bases


@pytest.fixture(scope="module")
def qlora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base quantized by bitsandbytes, an adapter on it, and the bf16 merge in fp32."""
    folder = tmp_path_factory.mktemp("qlora")
    bnb_cases.llama().save_pretrained(folder / "dense")
    wrapped = saved(folder, quantized(folder / "dense", "nf4", True), 0.003, target_modules=LINEARS)
    truth = {}
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            base = dequantize_module_weight(module.get_base_layer()).float()
            fqn = name.removeprefix("base_model.model.") + ".weight"
            truth[fqn] = base.to(torch.bfloat16).float() + module.get_delta_weight("default")
    save_file(truth, folder / "truth.safetensors")
    return folder


def test_nf4_is_merged_decoded(qlora: Path, tmp_path: Path) -> None:
    report = merge(qlora / "base", qlora / "adapter", tmp_path / "out", "hf-bf16")
    merge(qlora / "base", qlora / "adapter", tmp_path / "wide", "hf-fp32")
    truth, found, wide = (
        load_file(qlora / "truth.safetensors"), values(tmp_path / "out"), values(tmp_path / "wide"),
    )  # fmt: skip
    assert len(truth) == 6 and not report.survival
    for fqn, value in truth.items():
        same(wide[fqn], value)
        same(found[fqn], value.to(torch.bfloat16))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert ckptmap.open(tmp_path / "out").encodings == ("dense",)


def test_back_into_nf4_needs_force(qlora: Path, tmp_path: Path) -> None:
    with refused(PlanError, "CKM323", r"6 merged tensors .* err/\|delta\| [01]\.\d\d") as caught:
        merge(qlora / "base", qlora / "adapter", tmp_path / "out")
    assert "hf-bf16" in caught.value.hint and not (tmp_path / "out").exists()


def test_forced_back_into_nf4_says_what_survives(qlora: Path, tmp_path: Path) -> None:
    report = merge(qlora / "base", qlora / "adapter", tmp_path / "out", force=True)
    truth, before = load_file(qlora / "truth.safetensors"), values(qlora / "base")
    assert set(report.survival) == set(truth) and report.fidelity["requantize"] == 6
    after = values(tmp_path / "out")
    for fqn, survival in report.survival.items():
        base = before[fqn].double()
        wanted = truth[fqn].to(torch.bfloat16).double() - base
        got = after[fqn].double() - base
        error = float((got - wanted).norm() / wanted.norm())
        along = float((got * wanted).sum() / wanted.square().sum())
        assert (survival.error, survival.projection) == pytest.approx((error, along), rel=1e-6)
        assert survival.error > 0.3 and f"delta: {fqn}: err/|delta| {error:.2f}" in str(report)
    assert report.to_json()["survival"].keys() == truth.keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


SCHEMES = sorted(
    {made.suffix for made in registry.schemes()} - {"", "bf16", "fp16", "fp32", "mxfp4"}
)
"""Every encoding of linear layers; `test_gpt_oss_mxfp4` has the one of stacked experts."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_encoding_is_a_base(tmp_path: Path, scheme: str) -> None:
    wrapped = saved(tmp_path, llama(torch.bfloat16, 128), target_modules=["q_proj"])
    ckptmap.convert(tmp_path / "base", tmp_path / "coded", f"full-{scheme}")
    coded = values(tmp_path / "coded")
    merge(tmp_path / "coded", tmp_path / "adapter", tmp_path / "out", "hf-fp32")
    found = values(tmp_path / "out")
    for i, layer in enumerate(wrapped.base_model.model.model.layers):
        fqn = f"model.layers.{i}.self_attn.q_proj.weight"
        delta = layer.self_attn.q_proj.get_delta_weight("default")
        same(found[fqn], coded[fqn].float() + delta)
    back = merge(tmp_path / "coded", tmp_path / "adapter", tmp_path / "back", force=True)
    assert len(back.survival) == 2 and back.fidelity["requantize"] == 2
    assert ckptmap.open(tmp_path / "back").encodings == ckptmap.open(tmp_path / "coded").encodings
    against, adapter = tmp_path / "coded", tmp_path / "adapter"
    assert ckptmap.verify(tmp_path / "back", against=against, adapter=adapter).ok


def test_a_dense_base_may_be_quantized_and_it_is_told(folder: Path, tmp_path: Path) -> None:
    report = merge(folder / "base", folder / "adapter", tmp_path / "out", "hf-nf4")
    assert isinstance(report, MergeReport) and len(report.survival) == 6
    assert report.fidelity["quantize"] == 14 and "requantize" not in report.fidelity


# --------------------------------------------------------------------------- streamed


@examples(25)
@given(data=st.data(), flip=st.booleans(), scaled=st.booleans())
def test_any_box_has_the_bits_of_the_whole(
    data: st.DataObject, flip: bool, scaled: bool, box_source: tuple[Path, Path]
) -> None:
    with ckptmap.open(box_source[flip]) as ckpt:
        lazy = boxed(ckpt, flip, scaled)
        whole, offsets, sizes = lazy.read(), [], []
        for size in lazy.shape:
            offsets.append(data.draw(st.integers(0, size)))
            sizes.append(data.draw(st.integers(0, size - offsets[-1])))
        part = lazy.read(offsets, sizes)
        (y, x), (h, w) = offsets, sizes
        same(part, whole[y : y + h, x : x + w].contiguous())


@pytest.fixture(scope="module")
def box_source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wider than a tile of the product, in both orders."""
    folder = tmp_path_factory.mktemp("boxes")
    torch.manual_seed(0)
    w, a, b, m = torch.randn(45, 4999), torch.randn(5, 4999), torch.randn(45, 5), torch.rand(45)
    for flip, name in enumerate(("plain", "flipped")):
        base = w.t().contiguous() if flip else w
        save_file({"w": base, "a": a, "b": b, "m": m}, folder / f"{name}.safetensors")
    return folder / "plain.safetensors", folder / "flipped.safetensors"


def boxed(ckpt: ckptmap.Checkpoint, flip: bool, scaled: bool) -> LazyTensor:
    encoding = Merged(DENSE, "float32", 5, 0.25, flip)
    parts = {"": ckpt["w"].parts[""], A: ckpt["a"].parts[""], B: ckpt["b"].parts[""]}
    group = Group("w", ckpt["w"].info, encoding, parts)
    if scaled:
        group = dora(group, ckpt["m"].parts[""], ckpt.files)
    return LazyTensor("w", group, ckpt.files)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_cpu_merges_whatever_the_device_is(
    box_source: tuple[Path, Path], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's product of matrices has other bits, and `verify` compares a merge to the bit."""
    seen = []
    change = Merged.changed

    def changed(self: Merged, info: TensorInfo, parts: Any, box: Box) -> Tensor:
        seen.append({values.device.type for values in parts.values()})
        return change(self, info, parts, box)

    monkeypatch.setattr(Merged, "changed", changed)
    with ckptmap.open(box_source[0]) as ckpt:
        lazy = boxed(ckpt, False, scaled)
        lazy.read_into(Box((3, 7), (20, 4990)), torch.empty(20, 4990, device="meta"))
        assert seen[0] == {"cpu"}, "parts of the base and of the adapter"
        encode_step = Encode(lazy, DenseAs("bfloat16"), {}, "cast")
        context = Context((), lazy.files, None, 1 << 20, "cuda", print)  # type: ignore[arg-type]
        assert encode._device(context, encode_step) == "cpu"


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_bytes_do_not_depend_on_memory_or_threads(tmp_path: Path, name: str) -> None:
    saved(tmp_path, llama(hidden=256), **EXACT[name][1])
    found = []
    for i, (threads, memory) in enumerate([(1, 64 << 20), (3, 6 << 20), (1, 2 << 20)]):
        out = tmp_path / f"out{i}"
        merge(
            tmp_path / "base", tmp_path / "adapter", out, "full", threads=threads, max_memory=memory
        )
        found.append(out.read_bytes())
    assert found[0] == found[1] == found[2]


def test_the_source_may_not_change_under_it(folder: Path, tmp_path: Path) -> None:
    plan = plan_merge(folder / "base", folder / "adapter")
    change(folder / "adapter", lora_alpha=17.5)
    with refused(RunError, "CKM308", r"adapter_config\.json: changed"):
        plan.execute(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- refused


def drop(part: str) -> Any:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[next(key for key in tensors if part in key)]

    return edit


def rename(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if "layers.1.mlp.up_proj.lora_A" in key)
    for half in ("lora_A", "lora_B"):
        old = key.replace("lora_A", half)
        tensors[old.replace("layers.1", "layers.7")] = tensors.pop(old)


def add_stranger(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.router.weight"] = torch.zeros(4)


def never_gathered(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.zeros(0)


def other_shape(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.zeros(tensors[key].shape[0] + 1, 8)


def second(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if "lora_" in key]:
        for name in ("one", "two"):
            tensors[key.replace(".weight", f".{name}.weight")] = tensors[key].clone()
        del tensors[key]


def integers(tensors: dict[str, Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = tensors[key].to(torch.int32)


TENSORS = {
    "half": (drop("lora_B"), "CKM322", r"mlp\.down_proj has no lora_B, only lora_A"),
    "name": (rename, "CKM321", r"the base has no model\.layers\.7\.mlp\.up_proj\.weight"),
    "stranger": (add_stranger, "CKM321", r"the base has no model\.layers\.0\.router\.weight"),
    "empty": (never_gathered, "CKM322", r"lora_B\.weight is \[0\], expected \[64, 8\]"),
    "shape": (other_shape, "CKM322", r"lora_B\.weight is \[65, 8\], expected \[64, 8\]"),
    "adapters": (second, "CKM320", "holds the adapters one, two"),
    "integers": (integers, "CKM322", "expected plain float values"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    edit, code, match = TENSORS[name]
    rewrite(folder / "adapter", edit)
    with refused(SourceError, code, match):
        merge(folder / "base", folder / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "rank": ({"r": 16}, "CKM322", r"lora_A\.weight is \[8, 192\], expected \[16, 192\]"),
    "kind": ({"peft_type": "IA3"}, "CKM320", "peft_type 'IA3', expected 'LORA'"),
    "dora": ({"use_dora": True}, "CKM322", "has no lora_magnitude_vector"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "CKM320", "'pissa_niter_4' changed the base"),
    "variant": ({"use_qalora": True}, "CKM320", "use_qalora is set"),
    "later variant": (
        {"use_new_lora": True},
        "CKM320",
        "use_new_lora is set, which peft 0.21 does not",
    ),
    "later config": (
        {"new_config": {"a": 1}},
        "CKM320",
        "new_config is set, which peft 0.21 does not",
    ),
    "parameters": (
        {"target_parameters": "w"},
        "CKM320",
        "target_parameters is 'w', expected a list of names",
    ),
    "no number": ({"r": "8"}, "CKM320", "r is '8', expected int"),
    "nothing": ({"lora_alpha": 0}, "CKM320", "lora_alpha is 0, expected int or float"),
    "flag": ({"use_rslora": 1}, "CKM320", "use_rslora is 1, expected bool"),
    "list": ({"rank_pattern": ["q"]}, "CKM320", r"rank_pattern is \['q'\], expected an object"),
    "slow": ({"alpha_pattern": {"(a+)+x": 2}}, "CKM320", "is not a valid pattern"),
    "slower": ({"rank_pattern": {".*.*.*.*.*x": 2}}, "CKM320", "is not a valid pattern"),
    "broken": ({"rank_pattern": {"(": 2}}, "CKM320", "is not a valid pattern"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_cannot_be_merged_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    config, code, match = CONFIGS[name]
    change(folder / "adapter", **config)
    with refused(SourceError, code, match):
        merge(folder / "base", folder / "adapter", tmp_path / "out")


def test_settings_of_others_that_change_nothing_are_taken(folder: Path, tmp_path: Path) -> None:
    """As ms-swift adds them: values, unset ones, none that switches a variant on."""
    change(
        folder / "adapter", lora_dtype=None, lorap_emb_lr=1e-06, use_new_lora=False, new_config={}
    )
    assert merge(folder / "base", folder / "adapter", tmp_path / "out").fidelity["cast"] == 6


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff\xfe{", b'{"peft_type": 3}'])
def test_a_malformed_adapter_config_is_refused(folder: Path, tmp_path: Path, text: bytes) -> None:
    (folder / "adapter" / "adapter_config.json").write_bytes(text)
    with refused(SourceError, "CKM320", "adapter_config.json: "):
        merge(folder / "base", folder / "adapter", tmp_path / "out")


def test_a_directory_without_an_adapter(folder: Path, tmp_path: Path) -> None:
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    with refused(SourceError, "CKM320", "holds none of adapter_model.safetensors"):
        merge(folder / "base", folder / "adapter", tmp_path / "out")


def test_a_convolution_is_refused_by_name(tmp_path: Path) -> None:
    """As peft saves it for any module: the base is its plain state dict."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 8))
    torch.save(model.state_dict(), tmp_path / "base.pt")
    adapted(model, target_modules=["0", "1"]).save_pretrained(str(tmp_path / "adapter"))
    with refused(SourceError, "CKM322", r"0: the base's 0\.weight is float32\[8, 3, 3, 3\]") as c:
        merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
    assert "linear layers, Conv1D, embeddings" in c.value.hint
    merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt", leave=["0"])


def test_codes_without_scales_are_no_base(ranks: Path, tmp_path: Path) -> None:
    with refused(
        SourceError, "CKM322", r"down\.weight is bfloat16\[2048, 1\] \(bitsandbytes 4-bit, without"
    ):
        only = {key: value for key, value in load_file(ranks / "nf4.safetensors").items()
                if key.endswith((".weight", ".bias"))}  # fmt: skip
        save_file(only, tmp_path / "naked.safetensors")
        merge(tmp_path / "naked.safetensors", ranks / "nf4-peft", tmp_path / "out")


def test_a_merge_that_makes_nan_publishes_nothing(folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[next(key for key in tensors if "lora_A" in key)][0, 3] = float("nan")

    rewrite(folder / "adapter", spoil)
    with refused(RunError, "CKM324", r"mlp\.down_proj\.weight: .* found NaN or infinity in \d+"):
        merge(folder / "base", folder / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_overflow_of_fp16_is_not_published(tmp_path: Path) -> None:
    saved(tmp_path, llama(torch.float16), target_modules=LINEARS)
    change(tmp_path / "adapter", lora_alpha=1e9)
    with refused(RunError, "CKM324", "merged float16 values"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_options_that_would_undo_it_are_refused(folder: Path) -> None:
    with refused(ArgumentError, "CKM516", "names: is not an option of a merge"):
        plan_merge(folder / "base", folder / "adapter", names="meta")


def test_adapter_tensors_left_out_on_demand_are_reported(folder: Path, tmp_path: Path) -> None:
    rewrite(folder / "adapter", add_stranger)
    with refused(SourceError, "CKM321", "the base has no") as caught:
        merge(folder / "base", folder / "adapter", tmp_path / "out")
    assert "--leave model.layers.0.router.weight" in caught.value.hint
    leave = ("model.layers.0.router.weight", "model.layers.1.*")
    report = merge(folder / "base", folder / "adapter", tmp_path / "out", leave=leave)
    assert report.fidelity["cast"] == 3
    told = [note for note in report.notes if "left in the adapter, --leave" in note]
    assert len(told) == 4
    assert ckptmap.verify(tmp_path / "out", against=folder / "base", adapter=folder / "adapter").ok
    with refused(SourceError, "CKM321", r"--leave nothing\*: matches no module"):
        merge(folder / "base", folder / "adapter", tmp_path / "no", leave=["nothing*"])


# --------------------------------------------------------------------------- around it


def test_the_manifest_says_what_was_merged(folder: Path, tmp_path: Path) -> None:
    merge(folder / "base", folder / "adapter", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "ckptmap.manifest.json").read_text())
    assert document["merged"]["modules"] == 6 and document["merged"]["config"]["r"] == 8
    assert set(document["merged"]["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    entry = document["logical"]["model.layers.0.mlp.up_proj.weight"]
    assert entry["source"] == "lora(float32)" and entry["fidelity"] == "cast"


def test_verify_wants_the_adapter_too(folder: Path, tmp_path: Path) -> None:
    merge(folder / "base", folder / "adapter", tmp_path / "out")
    alone = ckptmap.verify(tmp_path / "out", against=folder / "base")
    assert alone.problems == (
        "an adapter was merged into it: give that adapter with --adapter PATH",
    )
    change(folder / "adapter", lora_alpha=32)
    other = ckptmap.verify(
        tmp_path / "out", against=merge_adapter(folder / "base", folder / "adapter", "hf")
    )
    assert len(other.problems) == 6 and "values are not the source's cast" in other.problems[0]


def test_optimizer_state_of_the_base_is_left_behind(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "base.pt")
    adapted(model, target_modules=LINEARS).save_pretrained(str(tmp_path / "adapter"))
    report = merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
    assert report.dropped == {"optimizer": "--optimizer drop"}


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter, out = (str(folder / "base"), str(folder / "adapter"), str(tmp_path / "out"))
    assert main(["merge", base, adapter, out, "--dry-run"]) == 0
    assert "lora(float32)" in capsys.readouterr().out and not Path(out).exists()
    assert main(["merge", base, adapter, out, "--to", "hf-bf16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"] == 21 and document["survival"] == {}
    assert main(["verify", out, "--against", base, "--adapter", adapter]) == 0
    assert main(["verify", out, "--against", base]) == 1
    assert main(["merge", base, adapter, out, "--to", "nonsense"]) == 2
    shutil.rmtree(out)
    assert main(["merge", base, adapter, out, "--to", "hf-nf4", "--max-memory", "8MiB"]) == 0
    assert "of the delta survives" in capsys.readouterr().out


def test_the_command_without_force(
    qlora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["merge", str(qlora / "base"), str(qlora / "adapter"), str(tmp_path / "out")]
    assert main(args) == 2
    assert "error[CKM323]" in capsys.readouterr().err
    assert main([*args, "--force", "-q"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")


def test_swapped_arguments_are_answered_with_the_line_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, llama(), target_modules=LINEARS)
    (tmp_path / "base").rename(tmp_path / "the base")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="a peft adapter without its base") as refused:
        ckptmap.merge("adapter", "the base", "out")
    assert refused.value.hint == (
        "the base comes first, then the adapter: ckptmap merge 'the base' adapter DST"
    )
    for typed in ("adapter", "adapter/adapter_model.safetensors"):
        assert main(["merge", typed, "the base", "out", "--to", "full-bf16", "--overwrite"]) == 2
        hint = capsys.readouterr().err.partition("then the adapter: ")[2].strip()
        assert hint == f"ckptmap merge 'the base' {typed} out --to full-bf16 --overwrite"
        assert main(shlex.split(hint)[1:]) == 0
    assert (tmp_path / "out").is_file()


def test_what_the_hint_on_an_entry_of_the_base_says_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, llama(), target_modules=["q_proj"])
    run = {"model": llama().state_dict(), "args": argparse.Namespace(lr=1)}
    torch.save(run, tmp_path / "base.pt")
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "base.pt", "adapter", "out.pt"]) == 2
    assert "hint: leave it behind with --drop args" in capsys.readouterr().err
    assert main(["merge", "base.pt", "adapter", "out.pt", "--drop", "args"]) == 0
