"""Every microscaled form goes into a live model, and takes a LoRA adapter, as its decoded values do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import SourceError
from ckptmap.quantization.compressed_tensors.microscaled import CtNvfp4
from ckptmap.quantization.microscaling.nvfp4 import Nvfp4
from ckptmap.quantization.torchao.microscaled_encodings import AoNvfp4
from ckptmap.tensors import Box, TensorInfo
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


OVERALLS = [1.0, 0.0, 3e38, 1e-45, 2.0**-120, float("inf"), float("nan")]


@pytest.mark.parametrize("encoding", [CtNvfp4(), AoNvfp4()], ids=["divides", "multiplies"])
@pytest.mark.parametrize("overall", OVERALLS)
def test_extremes_tell_whether_every_scale_is_finite(encoding: Nvfp4, overall: float) -> None:
    """On a device no scale is looked at: what the host accepts must be what it accepts scale by scale."""
    maker = torch.Generator().manual_seed(3)
    grid = Box.whole((4, 8))
    bounds = ((0, 1), (0, 3), (1, 3), (1, 127), (0, 127), (120, 128), (126, 128))
    seen = set()
    for low, high in bounds:
        scale = torch.randint(low, high, (4, 8), generator=maker, dtype=torch.uint8)
        scale |= torch.randint(0, 2, (4, 8), generator=maker, dtype=torch.uint8) << 7
        whole = torch.tensor(overall)
        parts = {"scale": scale.view(torch.float8_e4m3fn), encoding.global_part: whole}
        wide = parts["scale"].float()
        factors = wide / whole if encoding.divides else wide * whole
        info = TensorInfo((4, 128), "bfloat16")
        seen.add(finite := bool(factors.isfinite().all()))
        if finite:
            assert torch.equal(encoding.decoded_scales(info, parts, grid), factors)
            there = encoding.sent_scales(info, parts, grid, torch.device("meta"))
            assert there.is_meta and there.shape == (4, 8)
            continue
        for device in ("cpu", "meta"):
            with pytest.raises(SourceError, match="expected finite scales"):
                encoding.sent_scales(info, parts, grid, torch.device(device))
    assert seen == {True, False} or overall in (0.0, float("inf")) or overall != overall
