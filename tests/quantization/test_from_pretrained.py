"""`from_pretrained` of every form that ckptmap writes for it: the logits are those of the values that ckptmap decodes.

The forms are those of the registry. One that transformers does not load, or computes otherwise with, is named here
with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import ckptmap
from ckptmap import registry
from ckptmap.errors import PlanError
from tests.support import gpt_oss
from tests.support.int8_models import dense, logits

SUFFIXES = [scheme.suffix for scheme in registry.schemes() if scheme.suffix]
UNLOADED = {
    "nf4": "transformers does not know torchao's NF4 on disk, so no file has a name that it looks for"
}
BY_VALUES = {
    "int8": "torchao multiplies the codes, and the products with the scales",
    "bnb-int8": "bitsandbytes quantizes the activations, too",
    "torchao-mxfp8": "torchao quantizes the activations, too, with kernels for a GPU",
    "torchao-mxfp4": "torchao quantizes the activations, too, with kernels for a GPU",
}
"""Forms that are computed with otherwise: the values to which the library itself decodes them are compared."""
NO_EXPERTS = {"ct-nvfp4": "transformers stacks the experts, and decodes them to other values"}
STACKED = {"mxfp4": "gpt-oss alone has such experts"}


def qwen_moe(path: Path) -> Path:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, head_dim=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, pad_token_id=0, norm_topk_prob=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


MODELS = {"llama": lambda path: dense(path, hidden=256), "qwen3-moe": qwen_moe}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: make(folder / name) for name, make in MODELS.items()} | {
        "gpt-oss": gpt_oss.write(folder / "gpt-oss")
    }


def load(path: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """Load a model; every weight must be found, and none may be left over."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, experts_implementation="eager", **more
    )
    assert not any(found.values()), found
    for module in model.modules():
        # On a processor with AVX512_BF16 bitsandbytes packs 4-bit weights anew and multiplies them by a kernel
        # of its own, which sums in another order than a matrix product of the decoded weights.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def library_values(model: Any) -> dict[str, torch.Tensor]:
    """The values to which torchao or bitsandbytes decodes the weights of a model that it quantized."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    values = {}
    for name, weight in model.named_parameters():
        if hasattr(weight, "SCB"):
            values[name] = int8_vectorwise_dequant(weight.data, weight.SCB).to(torch.bfloat16)
        elif hasattr(weight, "qdata"):
            values[name] = weight.dequantize()
    assert values
    return values


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_our_values(
    model: str, suffix: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    source = sources["gpt-oss" if suffix in STACKED else model]
    if suffix in NO_EXPERTS and model != "llama":
        with pytest.raises(PlanError, match=r"experts.* cannot stay dense"):
            ckptmap.plan(source, f"hf-{suffix}")
        return
    is_gguf, values = suffix.startswith("gguf-"), tmp_path / "values"
    out = tmp_path / ("m.gguf" if is_gguf else "out")
    ckptmap.convert(source, out, to=suffix if is_gguf else f"hf-{suffix}")
    ckptmap.convert(out, values, to="hf-fp32")
    if suffix in UNLOADED:
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            load(out)
        return
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(suffix, torch.bfloat16)
    if is_gguf:
        theirs = load(tmp_path, config=AutoConfig.from_pretrained(source), gguf_file=out.name)
    else:
        theirs = load(out, dtype)
    ours = load(values, dtype)
    if suffix in BY_VALUES:
        plain = dict(ours.named_parameters())
        for name, found in library_values(theirs).items():
            assert torch.equal(found, plain[name]), name
    else:
        assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize("suffix", ["bnb-nf4", "ct-int4", "ct-fp8", "int8", "fp8"])
def test_dense_weights_beside_the_config_of_a_release(
    suffix: str, sources: Mapping[str, Path], tmp_path: Path
) -> None:
    """Trained from the values of a release, and exported with its config.json: it must not call them quantized."""
    release, work = tmp_path / "release", tmp_path / "work.pt"
    ckptmap.convert(sources["llama"], release, to=f"hf-{suffix}")
    ckptmap.convert(release, work, to="full-bf16")
    assert "quantization_config" in json.loads((release / "config.json").read_text())
    for to in ("hf", "hf-bf16"):
        report = ckptmap.convert(work, tmp_path / to, to=to, config_from=release)
        assert "quantization_config" not in json.loads((tmp_path / to / "config.json").read_text())
        assert [note for note in report.notes if "is left out of config.json" in note]
    ckptmap.convert(release, tmp_path / "values", to="hf-bf16")
    assert torch.equal(logits(load(tmp_path / "hf")), logits(load(tmp_path / "values")))


@pytest.mark.parametrize("suffix", ["bnb-nf4", "bnb-int8", "ct-int4", "ct-fp8"])
def test_experts_of_llama4_have_modules_of_their_own(suffix: str, tmp_path: Path) -> None:
    """For these libraries transformers takes the stacked experts apart, and loads no others."""
    source, out, values = (tmp_path / name for name in ("in", "out", "values"))
    torch.manual_seed(3)
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, intermediate_size_mlp=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_local_experts=4, moe_layers=[1],
        pad_token_id=0,
    )  # fmt: skip
    Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    with pytest.raises(PlanError, match="apart") as refused:
        ckptmap.plan(source, f"hf-{suffix}")
    assert refused.value.code == "CKM203" and "--names hf-modules" in refused.value.hint
    ckptmap.convert(source, out, to=f"hf-{suffix}", names="hf-modules")
    ckptmap.convert(out, values, to="hf-bf16", names="hf")
    ckptmap.convert(values, tmp_path / "named.pt", to="full", names="hf-modules")
    back = ckptmap.convert(tmp_path / "named.pt", tmp_path / "back", as_=out)
    assert back.likeness is not None and back.likeness.identical == back.likeness.weights
    theirs, ours = load(out), load(values)
    experts = [module for module in theirs.modules() if type(module).__name__.startswith("Seq")]
    assert len(experts) == 1 and len(experts[0]) == 4
    found, wanted = logits(theirs), logits(ours)
    if suffix in BY_VALUES:  # the activations are quantized, too
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
    else:
        assert torch.equal(found, wanted)


def test_reasons_are_of_forms_that_exist() -> None:
    assert {*UNLOADED, *BY_VALUES, *NO_EXPERTS, *STACKED} <= set(SUFFIXES)
