"""`ckptmap merge` of adapters on parameters (stacked experts, routers) against peft's own merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.checkpoint.logical_tensors import DENSE
from ckptmap.checkpoint.lora.merged_tensor import A, B, Stacked
from ckptmap.errors import SourceError
from ckptmap.operations.merge import merge
from ckptmap.protocols import Group
from ckptmap.storage.lazy_tensor import LazyTensor
from tests.support.bnb_cases import refused, same
from tests.support.merge_cases import adapted, merged_by_peft, save_adapter

SIZES = dict(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
)  # fmt: skip
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BIASES = ["experts.gate_up_proj_bias", "experts.down_proj_bias"]
ROUTED: dict[str, Any] = {"target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True}
PATTERNS: dict[str, Any] = {
    "target_parameters": EXPERTS, "alpha_pattern": {"down_proj": 5},
    "rank_pattern": {"gate_up_proj": 3, "layers.0.mlp.experts.down_proj": 2},
}  # fmt: skip


def made(family: str, intermediate: int = 96) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(intermediate_size=intermediate, **SIZES)
    stem = family.removesuffix("Text")
    return getattr(transformers, f"{stem}ForCausalLM")(config).eval()


def saved(folder: Path, model: Any, **config: Any) -> Any:
    torch.save(model.state_dict(), folder / "base.pt")
    wrapped = adapted(model, **{"r": 4, "target_modules": ["q_proj"]} | config)
    save_adapter(wrapped, folder / "adapter")
    return wrapped


@pytest.mark.parametrize(
    ("family", "intermediate", "config", "changed"),
    [
        ("Mixtral", 96, {"target_parameters": EXPERTS}, 6),
        ("Mixtral", 96, {"target_parameters": EXPERTS[1:], "target_modules": []}, 2),
        ("Mixtral", 96, ROUTED, 8),
        ("Mixtral", 96, PATTERNS, 6),
        ("GptOss", 64, {"target_parameters": EXPERTS + BIASES}, 10),  # down_proj is square
        ("Llama4Text", 80, {"target_parameters": EXPERTS}, 6),
    ],
)
def test_is_bit_equal_to_peft(
    family: str, intermediate: int, config: dict[str, Any], changed: int, tmp_path: Path
) -> None:
    """Stacks of [out, in] and of [in, out]; peft writes no parameter's name."""
    wrapped = saved(tmp_path, made(family, intermediate), **config)
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("gate_up_proj" in key for key in keys)
    merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
    before, truth = torch.load(tmp_path / "base.pt"), merged_by_peft(wrapped)
    found = torch.load(tmp_path / "out.pt")
    for name, value in found.items():
        same(value, truth[name])
    assert sum(not torch.equal(found[name], before[name]) for name in before) == changed


def test_of_a_whole_model_and_with_modules_inside(tmp_path: Path) -> None:
    """The state dict of the wrapped model has all names, with those of its wrappers."""
    wrapped = saved(tmp_path, made("Mixtral"), target_parameters=EXPERTS)
    torch.save(wrapped.state_dict(), tmp_path / "whole.pt")
    assert any(".base_layer.base_layer." in key for key in wrapped.state_dict())
    merge(
        tmp_path / "base.pt", tmp_path / "whole.pt", tmp_path / "out.pt",
        adapter_config=tmp_path / "adapter",
    )  # fmt: skip
    truth = merged_by_peft(wrapped)
    assert all(torch.equal(v, truth[n]) for n, v in torch.load(tmp_path / "out.pt").items())


def test_a_base_of_single_experts_is_named_as_in_memory_first(tmp_path: Path) -> None:
    model = made("Mixtral")
    model.save_pretrained(tmp_path / "disk")
    wrapped = saved(tmp_path, model, target_parameters=EXPERTS)
    with refused(SourceError, "CKM321", r"has no model.layers.0.mlp.experts.\w+_proj") as caught:
        merge(tmp_path / "disk", tmp_path / "adapter", tmp_path / "no")
    typed = f"ckptmap convert {tmp_path / 'disk'} MEMORY --to hf --names hf-memory;"
    assert typed in caught.value.hint
    ckptmap.convert(tmp_path / "disk", tmp_path / "memory", to="hf", names="hf-memory")
    merge(tmp_path / "memory", tmp_path / "adapter", tmp_path / "merged")
    ckptmap.convert(tmp_path / "merged", tmp_path / "out", to="hf", names="hf")
    given = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        wanted = wrapped(**given).logits
        for name in ("merged", "out"):
            found = type(model).from_pretrained(tmp_path / name)(**given).logits
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_over_codes_and_with_a_cast(tmp_path: Path) -> None:
    """A stack in any encoding; where the result is cast, it is rounded once."""
    wrapped = saved(tmp_path, made("Mixtral").bfloat16(), target_parameters=EXPERTS)
    merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "wide.pt", "full-fp32")
    ckptmap.convert(
        tmp_path / "base.pt", tmp_path / "coded.pt", to="full-bnb-nf4", encode=["*.experts.*"]
    )
    merge(tmp_path / "coded.pt", tmp_path / "adapter", tmp_path / "out.pt", "full-fp32")
    found, wide = torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "wide.pt")
    name = "model.layers.1.mlp.experts.down_proj"
    delta = wrapped.base_model.model.model.layers[1].mlp.experts.float().get_delta_weight("default")
    for path, merged in (("base.pt", wide), ("coded.pt", found)):
        with ckptmap.open(tmp_path / path) as ckpt:
            assert (ckpt[name].encoding != "dense") == (path == "coded.pt")
            same(merged[name], ckpt[name].read().float() + delta)


@pytest.mark.parametrize("flip", [False, True])
def test_any_box_of_a_stack_has_the_bits_of_the_whole(flip: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts, rank, out, into = 3, 5, 45, 4999
    w = torch.randn(experts, *((into, out) if flip else (out, into)))
    a, b = torch.randn(experts * rank, into), torch.randn(out, rank * experts)
    save_file({"w": w, "a": a, "b": b}, tmp_path / "stack.safetensors")
    encoding = Stacked(DENSE, "float32", rank, 0.25, flip, experts=experts)
    halves = b.view(out, rank, experts), a.view(experts, rank, into)
    delta = torch.einsum("ore,eri->eoi", *halves) * 0.25
    with ckptmap.open(tmp_path / "stack.safetensors") as ckpt:
        parts = {"": ckpt["w"].parts[""], A: ckpt["a"].parts[""], B: ckpt["b"].parts[""]}
        lazy = LazyTensor("w", Group("w", ckpt["w"].info, encoding, parts), ckpt.files)
        whole = lazy.read()
        wanted = w + (delta.transpose(1, 2) if flip else delta)
        torch.testing.assert_close(whole, wanted, rtol=1e-6, atol=1e-6)
        for box in (
            ((1, 7, 3), (2, 20, 30)),
            ((2, 0, 0), (1, *w.shape[1:])),
            ((0, 5, 9), (3, 1, 1)),
        ):
            cut = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
            same(lazy.read(*box), whole[cut].contiguous())


def test_what_shapes_do_not_tell_is_refused(tmp_path: Path) -> None:
    class Twins(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(4, 8, 16))
            self.gate = torch.nn.Parameter(torch.randn(4, 8, 16))

    twins = torch.nn.Sequential(Twins(), torch.nn.Linear(8, 8))
    config = {"target_modules": ["1"], "target_parameters": ["0.up", "0.gate"]}
    (tmp_path / "twins").mkdir()
    saved(tmp_path / "twins", twins, **config)
    with refused(
        SourceError, "CKM322", r"fits 0\.\w+ and 0\.\w+, so its shape does not tell which"
    ):
        merge(tmp_path / "twins/base.pt", tmp_path / "twins/adapter", tmp_path / "no.pt")
    merge(tmp_path / "twins/base.pt", tmp_path / "twins/adapter", tmp_path / "one.pt", leave=["0"])
    saved(tmp_path, made("GptOss", 64), target_parameters=EXPERTS[1:])
    with refused(
        SourceError,
        "CKM322",
        r"square, so their shape does not tell whether they are stored \[in, out\]",
    ):
        merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "no.pt")


def with_release(folder: Path, release: str | None) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": release}))


@pytest.mark.parametrize("family", ["Mixtral", "Llama4Text"])
def test_square_stacks_are_taken_as_the_release_of_peft_takes_them(
    family: str, tmp_path: Path
) -> None:
    """The installed peft takes [e, out, in]. 0.18 took [e, in, out] of any model, 0.19.0 where the module is not transposed:
    their formulas are written down here, and were compared with these releases by hand."""
    model = made(family, 64)
    model.config.save_pretrained(tmp_path)
    wrapped = saved(tmp_path, model, target_parameters=EXPERTS[1:])
    name, rank, experts = "model.layers.0.mlp.experts.down_proj", 4, 4
    if family == "Llama4Text":
        name = name.replace("mlp", "feed_forward")
    base = torch.load(tmp_path / "base.pt")[name]
    halves = load_file(tmp_path / "adapter/adapter_model.safetensors")
    stem = f"base_model.model.{name.removesuffix('.down_proj')}"
    a = halves[f"{stem}.lora_A.weight"].reshape(experts, rank, -1)
    b = halves[f"{stem}.lora_B.weight"].reshape(-1, rank, experts)
    merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
    assert ckptmap.verify(
        tmp_path / "out.pt", against=tmp_path / "base.pt", adapter=tmp_path / "adapter"
    ).ok
    truth, found = merged_by_peft(wrapped), torch.load(tmp_path / "out.pt")
    assert all(torch.equal(value, truth[key]) for key, value in found.items())
    for release in ("0.18.1", "0.19.0"):
        with_release(tmp_path / "adapter", release)
        (tmp_path / "out.pt").unlink()
        report = merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.pt")
        assert any(f"[e, in, out], as peft {release} does" in note for note in report.notes)
        turned = base + torch.einsum("ore,eri->eio", b, a) * (16 / rank)
        torch.testing.assert_close(torch.load(tmp_path / "out.pt")[name], turned)
        assert not torch.equal(turned, truth[name])


@pytest.mark.parametrize("release", [None, "0.19.1.dev0", "0.21.2"])
def test_square_stacks_are_refused_where_the_release_does_not_tell(
    release: str | None, tmp_path: Path
) -> None:
    """No release, one between two, and a base without a config.json that names its family."""
    saved(tmp_path, made("Mixtral", 64), target_parameters=EXPERTS[1:])
    with_release(tmp_path / "adapter", release)
    with refused(
        SourceError, "CKM322", r"nor do peft_version in the adapter's config and model_type"
    ):
        merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "no.pt")


def test_a_wrapper_that_the_config_does_not_name(tmp_path: Path) -> None:
    saved(tmp_path, made("Mixtral"), target_parameters=EXPERTS)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": None}))
    with refused(SourceError, "CKM322", r"experts\.base_layer is inside a wrapper of peft"):
        merge(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "no.pt")
