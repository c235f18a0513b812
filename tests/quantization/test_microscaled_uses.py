"""Every microscaled form goes into a live model, and takes a LoRA adapter, as its decoded values do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from tests.quantization.test_modelopt import write as modelopt
from tests.support.bnb_cases import same
from tests.support.int8_models import QUERY, dense, llama
from tests.support.merge_cases import adapted, save_adapter

WRITTEN = (
    "ct-nvfp4", "ct-mxfp4", "ct-mxfp8", "torchao-nvfp4", "torchao-mxfp4", "torchao-mxfp8",
    "fp8-ue8m0",
)  # fmt: skip
FORMS = (*WRITTEN, "modelopt-nvfp4", "modelopt-fp8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, `dense`, and an adapter of it, `adapter`; of 64 features for ModelOpt's."""
    folder = tmp_path_factory.mktemp("base")
    for hidden in (64, 128):
        dense(folder / f"dense-{hidden}", hidden=hidden)
        wrapped = adapted(llama(hidden=hidden), r=4, target_modules=["q_proj", "down_proj"])
        save_adapter(wrapped, folder / f"adapter-{hidden}")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_loaded_and_merged_as_its_values(form: str, base: Path, tmp_path: Path) -> None:
    hidden = 64 if form.startswith("modelopt") else 128
    if hidden == 64:
        modelopt(tmp_path / "in", form.removeprefix("modelopt-").upper())
    else:
        ckptmap.convert(base / f"dense-{hidden}", tmp_path / "in", to=f"hf-{form}")
    ckptmap.convert(tmp_path / "in", tmp_path / "bf16", to="hf-bf16")
    values = load_file(tmp_path / "bf16" / "model.safetensors")
    model = llama(hidden=hidden)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptmap.load(tmp_path / "in", model)
    for key, value in values.items():
        same(model.state_dict()[key], value)
    for name in ("in", "bf16"):
        out, adapter = tmp_path / f"merged-{name}", base / f"adapter-{hidden}"
        ckptmap.merge(tmp_path / name, adapter, out, to="hf-bf16")
    merged = [load_file(tmp_path / f"merged-{n}" / "model.safetensors") for n in ("in", "bf16")]
    assert not torch.equal(merged[0][QUERY], values[QUERY])
    for key, value in merged[0].items():
        same(value, merged[1][key])


@pytest.mark.parametrize("form", WRITTEN)
def test_merged_into_itself(form: str, base: Path, tmp_path: Path) -> None:
    """With `force`, the merged weights are quantized again, and the others keep their bytes."""
    ckptmap.convert(base / "dense-128", tmp_path / "in", to=f"hf-{form}")
    ckptmap.merge(tmp_path / "in", base / "adapter-128", tmp_path / "out", force=True)
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("in", "out"))
    assert before.keys() == after.keys()
    changed = {
        key.rpartition(".")[0].rpartition(".")[2]
        for key, value in before.items()
        if not torch.equal(value.view(-1).view(torch.uint8), after[key].view(-1).view(torch.uint8))
    }
    assert changed == {"q_proj", "down_proj"}
