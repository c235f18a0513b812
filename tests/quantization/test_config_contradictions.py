"""What a config.json states of all weights and what is stored of one: refused with both values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptmap
from ckptmap.errors import SourceError
from tests.support.int8_models import QUERY
from tests.support.quantized_models import edited, reconfigured

MODULE = QUERY.removesuffix(".weight")
KEPT = [MODULE, "lm_head"]


@pytest.mark.parametrize(
    ("form", "change", "stated", "shown"),
    [
        ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type 'fp4'", "codes are nf4"),
        ("bnb-nf4", {"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit true", "4 bits"),
        ("bnb-int8", {"load_in_4bit": True, "load_in_8bit": False}, "load_in_4bit true", "8 bits"),
        ("bnb-nf4", {"llm_int8_skip_modules": KEPT}, "in llm_int8_skip_modules", "as codes, uint8"),
        ("bnb-int8", {"llm_int8_skip_modules": KEPT}, "in llm_int8_skip_modules", "as codes, int8"),
        ("fp8", {"modules_to_not_convert": KEPT}, "in modules_to_not_convert", "float8_e4m3fn"),
        ("ct-packed", {"ignore": KEPT}, "in ignore", "as codes, int32"),
        ("ct-fp8", {"ignore": KEPT}, "in ignore", "as codes, float8_e4m3fn"),
    ],
)
def test_a_config_that_the_codes_contradict(
    form: str, change: dict[str, Any], stated: str, shown: str,
    written: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    path = reconfigured(written(form), tmp_path / "in", change)
    with pytest.raises(SourceError) as caught:
        ckptmap.open(path)
    assert caught.value.code == "CKM115" and "copy both again" in (caught.value.hint or "")
    for text in ("_proj.weight", "config.json states ", stated, shown, str(path)):
        assert text in caught.value.message


@pytest.mark.parametrize("form", ["bnb-nf4", "bnb-int8", "fp8", "ct-packed"])
def test_names_that_are_no_module_of_codes(
    form: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Patterns, classes, parents and modules of other towers state nothing about one weight alone."""
    path = tmp_path / "in"
    shutil.copytree(written(form), path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key in ("llm_int8_skip_modules", "modules_to_not_convert", "ignore"):
        if key in config["quantization_config"]:
            config["quantization_config"][key] = ["lm_head", "re:.*vision.*", "q_proj_", "visual"]
    file.write_text(json.dumps(config))
    with ckptmap.open(path) as ckpt:
        assert ckpt[QUERY].quantized


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("fp8", {"activation_scheme": "dynamic"}, "no static scales of activations, and activation_scale is"),
        ("fp8", {"activation_scheme": "static"}, ""),
        ("ct-int8", {}, ""),
        ("ct-fp8", {}, ""),
        ("ct-packed", {}, ""),
    ],
)  # fmt: skip
def test_static_scales_of_activations_are_noted(
    form: str, change: dict[str, Any], said: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """No weight depends on them: what is stated otherwise is told, and nothing is refused."""
    path = reconfigured(written(form), tmp_path / "in", change)
    with ckptmap.open(path) as ckpt:
        notes = [note for note in ckpt.notes if "scales of activations" in note]
        assert len(notes) == bool(said) and all(said in note for note in notes)


def test_static_scales_that_are_gone(written: Callable[[str], Path], tmp_path: Path) -> None:
    for form, part in (("fp8", "activation_scale"), ("ct-int8", "input_scale")):
        path = edited(
            written(form), tmp_path / form, lambda t, part=part: t.pop(f"{MODULE}.{part}")
        )
        with ckptmap.open(path) as ckpt:
            (note,) = [note for note in ckpt.notes if "scales of activations" in note]
        assert (
            note == f"{QUERY}: config.json states static scales of activations, and none is stored"
        )
