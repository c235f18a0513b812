"""Base models and adapters load into a model that peft has wrapped already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.config import KasaConfig, VeloraConfig

import ckptmap
from ckptmap.errors import LoadError
from tests.corpus.ranks import run_ranks
from tests.ranks.resume_peft import CONFIG, SOURCES, by_peft, differing, values, wrapped, write
from tests.support.bnb_cases import quantized, truth
from tests.support.merge_cases import llama

WITH_NAMES_OF_THEIR_OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "dora": (LoraConfig, {"target_modules": ["q_proj"], "use_dora": True}),
    "tokens": (LoraConfig, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "velora": (LoraConfig, {"target_modules": ["q_proj"], "velora_config": VeloraConfig()}),
    "vera": (VeraConfig, {"target_modules": ["q_proj"], "r": 4}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peft")
    write(path)
    return path


def half(report: Any) -> set[str]:
    """Of what kind are the tensors that were left?"""
    return {"adapter" if ".lora_" in name else "base" for name in report.left}


@pytest.mark.parametrize("source", SOURCES)
def test_base_and_adapter(source: str, folder: Path) -> None:
    """As if the base had been loaded before wrapping, and the adapter by peft."""
    model = wrapped()
    before = {name: value.clone() for name, value in values(model).items()}
    report = ckptmap.load(folder / source, model)
    assert half(report) == {"adapter"} and not report.missing and not report.unexpected
    assert "left as they are: 12:" in str(report)
    assert any("12 weights left as they are" in reason for reason in report.inexact)
    assert all(torch.equal(values(model)[name], before[name]) for name in report.left)
    report = ckptmap.load(folder / "adapter", model)
    assert half(report) == {"base"} and len(report.loaded) == 13
    whole = by_peft(folder, source)
    assert not differing(model, whole)
    words = torch.arange(24).view(1, 24)
    assert torch.equal(model(words).logits, whole(words).logits)
    layer: Any = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert (type(layer).__name__ == "NF4Tensor") == (source == "nf4")


def test_cut_by_fsdp2(folder: Path) -> None:
    run_ranks("tests.ranks.resume_peft", 2, [str(folder)], timeout=240)


@pytest.mark.parametrize("source", ["base", "nf4", "bnb"])
@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_base(source: str, double: bool, folder: Path, tmp_path: Path) -> None:
    """transformers' 4-bit model under peft, every code of it lost: quantized by bitsandbytes from
    the dense base, else with the codes of the checkpoint."""
    before = quantized(folder / "base", "nf4", double)
    if source == "bnb":
        before.save_pretrained(tmp_path / "bnb")
    model = get_peft_model(quantized(folder / "base", "nf4", double), LoraConfig(**CONFIG))
    name = "model.layers.0.mlp.up_proj"
    layer: Any = model.get_base_model().get_submodule(f"{name}.base_layer")
    want = truth(before.get_submodule(name))
    with torch.no_grad():
        layer.weight.zero_()
    assert not torch.equal(truth(layer), want)
    report = ckptmap.load({"bnb": tmp_path / "bnb"}.get(source, folder / source), model)
    assert half(report) == {"adapter"}
    copied = {entry.fqn for entry in report.encoded if entry.encoding == "bnb-nf4"}
    told = set(report.quantized) if source == "base" else copied
    assert f"base_model.model.{name}.base_layer.weight" in told
    found = truth(layer)
    if source == "nf4":  # torchao's codes and scales, up to the rounding of one product
        with ckptmap.open(folder / "nf4") as ckpt:
            want = ckpt[f"{name}.weight"].read()
        assert (found - want).abs().max() <= 2.0**-7 * want.abs().max()
    else:
        assert torch.equal(found, want)
    x = torch.randn(2, want.shape[1], dtype=torch.bfloat16)
    assert torch.allclose(layer(x), x @ found.T, atol=1e-2)


def _order_is_changed() -> bool:
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


def qlora(folder: Path, base: str) -> tuple[Any, Any]:
    if base == "torchao":
        model = by_peft(folder, "nf4")
    else:
        model = get_peft_model(quantized(folder / "base", "nf4", True), LoraConfig(**CONFIG))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


@pytest.mark.parametrize("base", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_on_a_quantized_base(
    base: str, evaluated: bool, folder: Path, tmp_path: Path
) -> None:
    """Adapter, optimizer and codes of the base, saved and gone on with bit for bit. An evaluation
    on some CPUs puts bitsandbytes' codes in another order and rounds its scales: not exact then."""
    words = torch.arange(24).view(1, 24)

    def steps(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = qlora(folder, base)
    steps(model, optimizer)
    if evaluated:
        with torch.no_grad():
            model.eval()(words)
        model.train()
    ckptmap.save(tmp_path / "out", model, optimizer, step=2).wait()
    again, theirs = qlora(folder, base)
    for parameter in again.parameters():
        parameter.data.zero_() if parameter.requires_grad else None
    if evaluated and base == "bitsandbytes" and _order_is_changed():
        with pytest.raises(
            LoadError, match="a forward on the CPU rounded the scales of quantized weights"
        ):
            ckptmap.load(tmp_path / "out", again, theirs, exact=True)
        assert len(ckptmap.load(tmp_path / "out", again, theirs).encoded) == 14
        return
    report = ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    assert report.step == 2 and not report.missing and not report.left and len(report.encoded) == 14
    assert steps(model, optimizer) == steps(again, theirs)
    for one, two in zip(
        theirs.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(one, two)


def test_in_memory(folder: Path) -> None:
    """`translate(like=)` and hooks take a base's state dict, too."""
    base, model = llama(torch.bfloat16), wrapped()
    made = ckptmap.translate(base.state_dict(), like=model)
    assert made.report is not None and half(made.report) == {"adapter"}
    with ckptmap.hooks.install(model):
        model.load_state_dict(base.state_dict())
    for name, value in made.items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(made["base_model.model.model.norm.weight"], base.model.norm.weight)


def test_another_adapters_name(folder: Path) -> None:
    """A file has no name: it goes into the adapter that is active, the other one stays."""
    model = wrapped()
    model.add_adapter("second", LoraConfig(**CONFIG))
    model.set_adapter("second")
    report = ckptmap.load(folder / "adapter", model)
    assert all(".second." in name for name in report.loaded)
    want = get_peft_model_state_dict(by_peft(folder, "base"))
    found = get_peft_model_state_dict(model, adapter_name="second")
    assert found.keys() == want.keys() and all(torch.equal(found[k], want[k]) for k in want)


# ------------------------------------------------------------------------------- refused


def cut_short(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(sorted(tensors.items())[1:]), file)


def other_alpha(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 3}))


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (cut_short, "CKM501", "1 missing: base_model.model.lm_head"),
        (other_alpha, "CKM515", r"its adapter is not the model's: lora_alpha: was 3, is 16"),
    ],
)
def test_an_adapter_that_does_not_fit(
    change: Callable[[Path], None], code: str, text: str, folder: Path, tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "adapter"
    shutil.copytree(folder / "adapter", broken)
    change(broken)
    model = wrapped()
    before = values(model)["base_model.model.lm_head.modules_to_save.default.weight"].clone()
    with pytest.raises(LoadError, match=text) as refused:
        ckptmap.load(broken, model)
    assert refused.value.code == code
    assert torch.equal(
        values(model)["base_model.model.lm_head.modules_to_save.default.weight"], before
    )


def test_an_adapter_that_was_made_from_its_base(folder: Path) -> None:
    """DoRA's magnitudes are the base's norms at wrapping: the base alone would not belong to them."""
    with pytest.raises(LoadError, match=r"lora_A.*use_dora=True") as refused:
        ckptmap.load(folder / "base", wrapped(use_dora=True))
    assert refused.value.code == "CKM514"
    report = ckptmap.load(folder / "base", wrapped(use_dora=True), strict=False)
    assert half(report) == {"adapter"}


@pytest.mark.parametrize("name", WITH_NAMES_OF_THEIR_OWN)
def test_tensors_that_a_file_names_otherwise(name: str, tmp_path: Path) -> None:
    """DoRA's magnitudes, rows of an embedding, matrices that all layers share, buffers of the
    backward: an adapter's directory as peft loads it, then a base."""
    kind, config = WITH_NAMES_OF_THEIR_OWN[name]

    def made(seed: int) -> Any:
        model = get_peft_model(llama(), kind(**config))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape) if parameter.requires_grad else 0
        return model

    made(1).save_pretrained(str(tmp_path / "adapter"))
    model, want = made(2), PeftModel.from_pretrained(llama(), str(tmp_path / "adapter"))
    report = ckptmap.load(tmp_path / "adapter", model)
    assert half(report) <= {"base"} and not report.missing and not differing(model, want)
    torch.save({k: v * 2 for k, v in llama().state_dict().items()}, tmp_path / "base.pt")
    before = {n: value.clone() for n, value in values(model).items()}
    report = ckptmap.load(tmp_path / "base.pt", model, strict=name != "dora")
    after = values(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained <= {*report.left}
    for n, value in after.items():
        frozen = "lora_" not in n and "vera_" not in n and "trainable_tokens" not in n
        assert torch.equal(value, before[n] * 2 if frozen else before[n]), n


def test_an_adapter_that_transformers_added(tmp_path: Path) -> None:
    """Its modules have the model's own names; its file has peft's."""

    def made(seed: int) -> Any:
        model: Any = llama()
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape) if parameter.requires_grad else 0
        return model

    want, model = made(1), made(2)
    want.save_pretrained(tmp_path / "adapter")
    report = ckptmap.load(tmp_path / "adapter", model)
    assert len(report.loaded) == 4 and not differing(model, want)


def test_kasa_takes_something_out_of_its_base(folder: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], kasa_config=KasaConfig()))
    with pytest.raises(LoadError, match=r"expected its adapter too \(kasa_config\)") as refused:
        ckptmap.load(folder / "base", model)
    assert refused.value.code == "CKM514"


def test_neither_base_nor_adapter(folder: Path, tmp_path: Path) -> None:
    torch.save({"head.weight": torch.ones(3)}, tmp_path / "other.pt")
    with pytest.raises(LoadError, match=r"34 missing: .*; 1 unexpected: head\.weight"):
        ckptmap.load(tmp_path / "other.pt", wrapped())
