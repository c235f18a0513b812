"""Every cell of the table of forms in docs/reference: each is asked of the registry, and tried here on a checkpoint.

A checkpoint of each form is made of its own encoding, as the registry gives it, so that a form that joins it is tried
without a line here. That its bytes are those of the form's library is tested where the form is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ckptmap
from benchmarks.gpu_session.encoders import decode, encode, placed
from benchmarks.gpu_session.read_forms import random_parts
from ckptmap import registry
from ckptmap.errors import CkptmapError, LoadError, PlanError
from ckptmap.planning.encoding_forms import EncodingForm, encoding_forms, example_of
from ckptmap.planning.live_encodings import scheme_of
from ckptmap.protocols import Refusal, part_key
from tests.support.bnb_cases import same
from tests.support.library import Library
from tests.support.merge_cases import adapted, save_adapter

LAYER = "model.layers.0.mlp.down_proj"
WEIGHT, OTHER = f"{LAYER}.weight", "model.norm.weight"
FORMS = {form.name: form for form in encoding_forms()}
SUFFIXES = [form.suffix for form in FORMS.values() if form.suffix]
bnb = Library("bitsandbytes")


class Model(nn.Module):
    """A model with the layer, and the norm beside it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.mlp = nn.Module()
        layer.mlp.down_proj = linear
        self.model.layers = nn.ModuleList([layer])
        self.model.norm = nn.RMSNorm(256, dtype=torch.bfloat16)
        self.config = {"model_type": "none"}  # which peft asks for

    @property
    def weight(self) -> Tensor:
        return self.get_submodule(LAYER).weight  # type: ignore[return-value]


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(256, 256, bias=False, dtype=dtype)


@dataclass(frozen=True)
class Written:
    """A checkpoint of one form, and the values that its encoding decodes."""

    path: Path
    values: Tensor
    stored: dict[str, Tensor]


@cache
def trained() -> Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("forms")
    save_adapter(adapted(Model(linear()), r=4, target_modules=["down_proj"]), made / "adapter")
    return made


@cache
def written(name: str, folder: Path) -> Written:
    """Write what the form's own encoding makes of values; of one that is only read, random codes."""
    if name == "hqq":
        return by_hqq(folder)
    scheme = next(scheme for scheme in registry.schemes() if scheme.name == name)
    example = example_of(scheme)
    assert example is not None
    encoding, info = example
    shapes = encoding.parts(info)
    assert not isinstance(shapes, Refusal)
    values = trained().to(getattr(torch, info.dtype))
    is_encoded = FORMS[name].is_encoded
    parts = dict(encode(encoding, info, values) if is_encoded else random_parts(encoding, info))
    if name == "gguf":  # the scales of a block are among its bytes: let them be finite
        parts[""] &= 0x37
    stored = {
        part_key(encoding, WEIGHT, part): parts[part].reshape(shapes[part].shape) for part in shapes
    }
    record = encoding.record(info)
    metadata = {"ckptmap": json.dumps({WEIGHT: record})} if record else None
    stored[OTHER] = torch.ones(256, dtype=torch.bfloat16)
    save_file(stored, folder / f"{name}.safetensors", metadata)
    decoded = decode(encoding, info, placed(encoding, info, parts, "cpu"), "cpu")
    return Written(folder / f"{name}.safetensors", decoded, stored)


def by_hqq(folder: Path) -> Written:
    """Let hqq write it: it has more parts than its encoding names, which tell how it is stored."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    layer = linear()
    layer.weight.data = trained().bfloat16()
    made = HQQLinear(
        layer, BaseQuantizeConfig(nbits=4, group_size=64, axis=1), compute_dtype=torch.bfloat16,
        device="cpu",
    )  # fmt: skip
    stored = {f"{LAYER}.{key}": value for key, value in made.state_dict().items()}
    stored[OTHER] = torch.ones(256, dtype=torch.bfloat16)
    save_file(stored, folder / "hqq.safetensors")
    return Written(folder / "hqq.safetensors", made.dequantize(), stored)


def encoded_as(ckpt: Any, name: str) -> bool:
    """Return whether the weight has this form, or an encoding of another name of the same scheme."""
    found = scheme_of(ckpt[WEIGHT].encoding)
    return found is not None and found.name == name


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_read(form: EncodingForm, folder: Path, tmp_path: Path) -> None:
    assert form.is_decoded
    made = written(form.name, folder)
    with ckptmap.open(made.path) as ckpt:
        assert set(ckpt) == {WEIGHT, OTHER} and encoded_as(ckpt, form.name)
        same(ckpt[WEIGHT].read(), made.values)
        same(ckpt[WEIGHT][3:9, 17:201], made.values[3:9, 17:201])
    ckptmap.convert(made.path, tmp_path / "out.pt", to="full-bf16")
    same(torch.load(tmp_path / "out.pt")[WEIGHT], made.values.bfloat16())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_written(form: EncodingForm, folder: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense.pt"
    torch.save({WEIGHT: trained().bfloat16(), OTHER: torch.ones(256).bfloat16()}, dense)
    if form.suffix:
        ckptmap.convert(dense, tmp_path / "to.pt", to=f"full-{form.suffix}", encode=(WEIGHT,))
        with ckptmap.open(tmp_path / "to.pt") as ckpt:
            assert encoded_as(ckpt, form.name)
    else:
        with pytest.raises(PlanError, match="is not a setup"):
            ckptmap.plan(dense, f"full-{form.name}")
    release = tmp_path / "release.pt"
    ckptmap.convert(written(form.name, folder).path, release, to="full")
    if not form.is_encoded:
        assert not form.suffix
        with pytest.raises(CkptmapError, match="cannot be made"):
            ckptmap.convert(dense, tmp_path / "as", as_=release)
        return
    changed = {WEIGHT: trained().flip(0).bfloat16(), OTHER: torch.ones(256).bfloat16()}
    torch.save(changed, dense)
    ckptmap.convert(dense, tmp_path / "as", as_=release)
    with ckptmap.open(tmp_path / "as") as ckpt:
        assert encoded_as(ckpt, form.name)
        wanted, got = changed[WEIGHT].float(), ckpt[WEIGHT].read().float()
        assert float((got - wanted).norm() / wanted.norm()) < 0.15


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_merged(form: EncodingForm, folder: Path, tmp_path: Path) -> None:
    """Into bfloat16 as into the decoded values; where values are encoded, into itself, and dense elsewhere."""
    made, adapter = written(form.name, folder), folder / "adapter"
    torch.save({WEIGHT: made.values, OTHER: made.stored[OTHER]}, tmp_path / "values.pt")
    for name, base in (("over", made.path), ("dense", tmp_path / "values.pt")):
        ckptmap.merge(base, adapter, tmp_path / f"{name}.pt", to="full-bf16")
    got, wanted = (torch.load(tmp_path / f"{name}.pt")[WEIGHT] for name in ("over", "dense"))
    same(got, wanted)
    assert not torch.equal(got, made.values.bfloat16())
    if not form.is_encoded:
        ckptmap.merge(made.path, adapter, tmp_path / "itself.pt", to="full")
    else:
        ckptmap.merge(made.path, adapter, tmp_path / "itself.pt", to="full", force=True)
    with ckptmap.open(tmp_path / "itself.pt") as ckpt:
        assert ckpt[WEIGHT].encoding == "dense" or encoded_as(ckpt, form.name)
        assert (ckpt[WEIGHT].encoding != "dense") == form.is_encoded
        found = ckpt[WEIGHT].read().float()
    assert float((found - wanted.float()).norm() / wanted.float().norm()) < 0.15


def live_layer(name: str) -> nn.Module:
    """The layer of the form's own library, not loaded yet."""
    if not name.startswith("bnb-") or name == "bnb-int8":
        return linear()  # frozen, it becomes one of torchao's tensors
    kind = "fp4" if "fp4" in name else "nf4"
    made: nn.Module = bnb.nn.Linear4bit(
        256, 256, bias=False, quant_type=kind, compress_statistics=name.endswith("-dq"),
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return made.to("cpu")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_loaded(form: EncodingForm, folder: Path) -> None:
    """Into any model as values; frozen layers of its own library take codes, where the table says so."""
    made = written(form.name, folder)
    model = Model(linear(made.values.dtype))
    if (
        form.name == "nf4"
    ):  # so that nobody trains it decoded who meant to train an adapter beside it
        with pytest.raises(LoadError, match="NF4 weights are trainable"):
            ckptmap.load(made.path, model)
    else:
        assert not ckptmap.load(made.path, model).encoded
        same(model.weight.detach(), made.values)
    frozen = Model(live_layer(form.name) if form.is_live else linear()).requires_grad_(False)
    report = ckptmap.load(made.path, frozen)
    assert {one.fqn for one in report.encoded} == ({WEIGHT} if form.is_live else set())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_codes_kept(form: EncodingForm, folder: Path, tmp_path: Path) -> None:
    """In each form of the row, and in no other that is written."""
    made = written(form.name, folder)
    kept = set()
    for suffix in SUFFIXES:
        if suffix == form.suffix:
            continue
        plan = ckptmap.plan(made.path, f"full-{suffix}", encode=(WEIGHT,))
        (fidelity,) = {step.fidelity for step in plan.steps if step.fqn == WEIGHT}
        if fidelity in ("codes", "exact"):
            kept.add(suffix)
    assert kept == set(form.kept_in)


def test_rows_are_of_all_forms_that_are_told_apart() -> None:
    """A form whose cells nobody tried would pass unseen."""
    assert len(FORMS) == len(encoding_forms()) > 30
