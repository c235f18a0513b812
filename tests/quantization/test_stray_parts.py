"""Parts of quantized weights that are not whole are refused by a plan: they are no weights of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import PlanError, SourceError
from tests.support.int8_models import QUERY
from tests.support.quantized_models import WRITERS, Tensors, edited

STEM = QUERY.removesuffix("weight")
FILE = "model.safetensors"


def refused(path: Path, key: str, *said: str) -> None:
    """`inspect` shows the key, and every plan is refused, unless --drop names what is refused."""
    with ckptmap.open(path) as ckpt:
        assert key not in ckpt
        strays = {item.key: item for item in ckpt.refused}
        assert strays[key].droppable
        for text in said:
            assert text in strays[key].reason, strays[key].reason
    for to in ("hf", "full-fp32"):
        with pytest.raises(PlanError, match=r"quantized weight|name of a part") as caught:
            ckptmap.convert(path, path.parent / "out", to=to)
        assert caught.value.code == "CKM202" and "--drop" in (caught.value.hint or "")
    plan = ckptmap.plan(path, "full", drop=list(strays))
    assert strays.keys() <= plan.dropped.keys()


LOST = [
    ("ct-packed", "weight_packed", "weight_scale"),
    ("ct-packed", "weight_scale", "weight_packed"),
    ("ct-int8", "weight", "weight_scale"),
    ("ct-int8", "weight_scale", "weight"),
    ("ct-fp8", "weight", "weight_scale"),
    ("ct-fp8", "weight_scale", "weight"),
    ("ct-nvfp4", "weight_packed", "weight_global_scale"),
    ("ct-nvfp4", "weight_global_scale", "weight_packed"),
    ("fp8", "weight", "weight_scale_inv"),
    ("fp8", "weight", "activation_scale"),
    ("fp8", "weight_scale_inv", "weight"),
    ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", "weight.absmax"),
    ("bnb-int8", "weight", "SCB"),
    ("bnb-int8", "SCB", "weight"),
]


@pytest.mark.parametrize("how", ["dropped", "renamed"])
@pytest.mark.parametrize(("form", "lost", "left"), LOST)
def test_a_part_is_lost(
    form: str, lost: str, left: str, how: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        gone = tensors.pop(STEM + lost)
        if how == "renamed":
            tensors[f"{STEM}{lost}.x"] = gone

    source = written(form)
    path = edited(source, tmp_path / "in", change)
    method = json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"]
    missing = lost.split(".")[-1].partition("__")[0]
    refused(path, STEM + left, f"config.json states quant_method '{method}'", missing)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("ct-packed", "weight_packed"), ("ct-packed", "weight_scale"), ("ct-packed", "weight_shape"),
        ("ct-packed", "weight_zero_point"), ("ct-int8", "weight"), ("ct-fp8", "weight_scale"),
        ("fp8", "activation_scale"), ("fp8", "weight_scale_inv"), ("fp8", "weight"),
        ("bnb-nf4", "weight"), ("bnb-nf4", "weight.absmax"), ("bnb-nf4", "weight.quant_map"),
        ("bnb-int8", "weight"), ("bnb-int8", "SCB"), ("bnb-int8", "weight_format"),
        ("torchao", "_weight_qdata"), ("torchao", "_weight_scale"), ("torchao", "_weight_zero_point"),
        ("nf4", "weight.nf4"), ("nf4", "weight.quantized_data"), ("nf4", "weight.scaler_mean"),
    ],
)  # fmt: skip
def test_a_part_is_there_once_more_under_a_wrapper(
    form: str, part: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    key = f"module.{STEM}{part}"
    path = edited(
        written(form), tmp_path / "in",
        lambda tensors: tensors.update({key: tensors[STEM + part].clone()}),
    )  # fmt: skip
    refused(path, key, "quantized weight")


def test_a_config_is_not_needed_where_the_parts_say_it(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    for form, lost, left in (
        ("ct-packed", "weight_packed", "weight_shape"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", "weight.quant_map"),
    ):
        path = edited(written(form), tmp_path / form, lambda t, lost=lost: t.pop(STEM + lost))
        (path / "config.json").unlink()
        with pytest.raises(PlanError, match="no other form has these parts"):
            ckptmap.convert(path, tmp_path / "out", to="full")
        with ckptmap.open(path) as ckpt:
            assert STEM + left in {item.key for item in ckpt.refused}


def test_parts_of_another_form_beside_a_weight(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """An order of columns is not of unpacked codes: they would be decoded without it."""
    key = f"{STEM}weight_g_idx"
    order = torch.arange(64, dtype=torch.int32)
    path = edited(written("ct-int8"), tmp_path / "in", lambda t: t.update({key: order}))
    refused(path, key, "which the form of its codes does not have")


@pytest.mark.parametrize("form", ["bnb-nf4", "nf4"])
def test_a_tensor_below_a_quantized_weight(
    form: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    key = f"{STEM}weight.absmax_2"
    path = edited(written(form), tmp_path / "in", lambda t: t.update({key: torch.ones(3)}))
    refused(path, key, f"stands below {QUERY}, a quantized weight whose form has no such part")


def test_a_dense_model_with_parameters_of_such_names(tmp_path: Path) -> None:
    """No config and no codes: they are its own, and a note says so where they stand alone."""
    tensors = {
        "fc.weight": torch.randn(8, 8), "fc.weight_scale": torch.randn(8), "fc.scales": torch.randn(8),
        "fc.input_scale": torch.ones(1), "norm.scale": torch.ones(8), "a.weight_scale": torch.ones(3),
        "fc.weight_format": torch.zeros((), dtype=torch.uint8), "k_scale": torch.ones(1),
    }  # fmt: skip
    save_file(tensors, tmp_path / FILE)
    report = ckptmap.convert(tmp_path / FILE, tmp_path / "out.pt", to="full")
    assert torch.load(tmp_path / "out.pt").keys() == tensors.keys()
    noted = [note for note in report.notes if "has the name of a part" in note]
    assert len(noted) == 1 and noted[0].startswith("a.weight_scale: ")
    assert "it is converted as a weight" in noted[0]


BY_CHANCE = {
    "b.logit_scales": torch.ones(7), "b.weight": torch.ones(4, 4), "logit_scales": torch.ones(()),
    "b.scales": torch.ones(4), "b.g_idx": torch.ones(4), "b.SCB": torch.ones(2, 3, 4), "b.absmax": torch.ones(()),
    "b.input_scale": torch.ones(4), "b.activation_scale": torch.ones(2, 2), "b.weight_shape": torch.ones(2),
}  # fmt: skip


@pytest.mark.parametrize(
    "method", ["mxfp4", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "torchao"]
)
def test_a_parameter_of_a_dense_layer_is_no_part_by_its_name(method: str, tmp_path: Path) -> None:
    """Of this dtype and shape, no part has the name, whatever the config states of other layers."""
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    coded = {
        "a.up_proj_blocks": torch.zeros(2, 32, 4, 16, dtype=torch.uint8),
        "a.up_proj_scales": torch.zeros(2, 32, 4, dtype=torch.uint8),
    }
    save_file({**coded, **BY_CHANCE}, tmp_path / FILE)
    ckptmap.convert(tmp_path / FILE, tmp_path / "out.pt", to="full", drop=["a.up_proj"])
    assert torch.load(tmp_path / "out.pt").keys() == BY_CHANCE.keys()


def test_the_scales_of_lost_mxfp4_codes_are_refused(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scales = torch.zeros(2, 32, 4, dtype=torch.uint8)
    save_file({"a.up_proj_scales": scales, "a.bias": torch.ones(4)}, tmp_path / FILE)
    refused(tmp_path / FILE, "a.up_proj_scales", "and no codes, up_proj_blocks")


def test_a_tensor_with_the_beginning_of_a_torchao_part(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """torchao takes it for a part, and then puts the weight together no more."""
    name = "_weight_qdata_2"
    path = edited(
        written("torchao"), tmp_path / "in",
        lambda tensors: tensors.update({STEM + name: tensors[STEM + "_weight_qdata"].clone()}),
    )  # fmt: skip
    refused(path, STEM + name, f"has the name of a part of {QUERY}", "lists _weight_")


@pytest.mark.parametrize("form", WRITERS)
def test_whole_checkpoints_have_no_stray_parts(form: str, written: Callable[[str], Path]) -> None:
    with ckptmap.open(written(form)) as ckpt:
        assert not ckpt.refused
        assert not [note for note in ckpt.notes if "has the name of a part" in note]


def test_a_record_of_an_unknown_scheme(tmp_path: Path) -> None:
    """Its parts were taken for weights."""
    record = {"fc.weight": {"scheme": "nf5", "version": 1, "shape": [8, 8]}}
    tensors = {"fc.weight.codes": torch.zeros(32, dtype=torch.uint8), "fc.bias": torch.zeros(8)}
    save_file(tensors, tmp_path / FILE, {"ckptmap": json.dumps(record)})
    with pytest.raises(SourceError, match=r"fc\.weight: .* scheme 'nf5', which nothing here reads"):
        ckptmap.open(tmp_path / FILE)
