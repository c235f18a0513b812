"""compressed-tensors' NVFP4, MXFP4 and MXFP8: decoded as it does, and written with its own codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file

import ckptmap
from ckptmap.errors import SourceError
from tests.support.bnb_cases import same
from tests.support.int8_models import QUERY, compressed, dense, loaded, logits, plain

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
FORMS = {
    "ct-nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "ct-mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "ct-mxfp8": ("MXFP8A16", "mxfp8-quantized"),
}
ACTIVE = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}


def args(preset: str, of: str = "weights") -> QuantizationArgs:
    found: QuantizationArgs = getattr(preset_name_to_scheme(preset, ["Linear"]), of)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Tensors]]:
    """`corpus(name, dtype)`: what the library wrote, and what it decodes; each made once."""

    @cache
    def made(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Tensors]:
        preset, form = FORMS[name]
        path = tmp_path_factory.mktemp(name) / "in"
        return path, compressed(path, args(preset), form, dtype=dtype)

    return made


@pytest.mark.parametrize("name", FORMS)
def test_read_as_it_decompresses(name: str, corpus: Callable[..., tuple[Path, Tensors]]) -> None:
    path, truth = corpus(name)
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth) and ckpt[QUERY].encoding == name
        for key, wanted in truth.items():
            same(ckpt[key].read(), wanted)
        same(ckpt[QUERY][5:41, 3:50], truth[QUERY][5:41, 3:50])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_written_with_its_codes_and_loaded_by_it(
    name: str, dtype: torch.dtype, corpus: Callable[..., tuple[Path, Tensors]], tmp_path: Path
) -> None:
    path, _ = corpus(name, dtype)
    ckptmap.convert(dense(tmp_path / "dense", dtype), tmp_path / "out", to=f"hf-{name}")
    theirs, ours = load_file(path / FILE), load_file(tmp_path / "out" / FILE)
    assert theirs.keys() == ours.keys()
    for key, wanted in theirs.items():
        if dtype == torch.float16 and name != "ct-nvfp4" and key.endswith("_scale"):
            # 2^-127 is 0 in float16, and the library replaces the scale of zeros by 1.
            wanted = wanted.where(ours[key] > 0, 0)
        same(ours[key], wanted)
    assert ckptmap.verify(tmp_path / "out", against=tmp_path / "dense").ok
    if dtype == torch.bfloat16:
        model = loaded(tmp_path / "out")
        with ckptmap.open(tmp_path / "out") as ckpt:
            assert torch.equal(
                logits(model), logits(plain({key: ckpt[key].read() for key in ckpt}))
            )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("to", ["hf", "fsdp2", "fsdp2-bf16", "full-fp32"])
def test_moved_as_it_is_or_decoded(
    name: str, to: str, corpus: Callable[..., tuple[Path, Tensors]], tmp_path: Path
) -> None:
    path, truth = corpus(name)
    more = {"world_size": 3} if to.startswith("fsdp2") else {}
    ckptmap.convert(path, tmp_path / "out", to=to, **more)
    assert ckptmap.verify(tmp_path / "out", against=path).ok
    with ckptmap.open(tmp_path / "out") as ckpt:
        same(ckpt[QUERY].read(), truth[QUERY].to(ckpt[QUERY].torch_dtype))
    if to == "fsdp2-bf16":
        ckptmap.convert(tmp_path / "out", tmp_path / "back", to=f"hf-{name}", config_from=str(path))
        again = load_file(tmp_path / "back" / FILE)
        stem = QUERY.removesuffix(".weight")
        for key, value in load_file(path / FILE).items():
            if name == "ct-mxfp4" and key.startswith(stem):
                same(again[key], value)


@pytest.mark.parametrize("name", FORMS)
def test_with_quantized_activations(name: str, tmp_path: Path) -> None:
    """A scale of activations goes along with codes, and is named where it is dropped."""
    preset, form = ACTIVE[name[3:]], FORMS[name][1]
    truth = compressed(tmp_path / "in", args(preset), form, args(preset, "input_activations"))
    plan = ckptmap.plan(tmp_path / "in", "hf-bf16")
    assert ("input_global_scale" in str(plan)) == (name == "ct-nvfp4")
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert set(ckpt) == set(truth)
        same(ckpt[QUERY].read(), truth[QUERY])
    ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf")
    before, after = load_file(tmp_path / "in" / FILE), load_file(tmp_path / "out" / FILE)
    assert before.keys() == after.keys()


def _of(name: str) -> str:
    return QUERY.removesuffix("weight") + name


def _cut(tensors: Tensors) -> None:
    tensors[_of("weight_scale")] = tensors[_of("weight_scale")][:, :-1].contiguous()


def _nan(tensors: Tensors) -> None:
    tensors[_of("weight_scale")].view(torch.uint8)[3, 1] = 255


def _no_scale_of_all(tensors: Tensors) -> None:
    tensors[_of("weight_global_scale")].zero_()


def _two_of_all(tensors: Tensors) -> None:
    tensors[_of("weight_global_scale")] = torch.ones(2)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ct-nvfp4", _cut, r"part 'scale', expected float8_e4m3fn\[64, 4\]"),
        ("ct-mxfp4", _cut, r"part 'scale', expected uint8\[64, 2\]"),
        ("ct-mxfp8", _cut, r"part 'scale', expected uint8\[64, 2\]"),
        ("ct-nvfp4", _nan, "expected finite scales"),
        ("ct-mxfp4", _nan, "255, which is NaN, in 1 of"),
        ("ct-mxfp8", _nan, "255, which is NaN, in 1 of"),
        ("ct-nvfp4", _no_scale_of_all, "global_scale: expected finite scales"),
        ("ct-nvfp4", _two_of_all, r"'global_scale', expected float32\[1\], found float32\[2\]"),
    ],
)
def test_bad_parts_are_refused(
    name: str,
    change: Callable[[Tensors], None],
    said: str,
    corpus: Callable[..., tuple[Path, Tensors]],
    tmp_path: Path,
) -> None:
    path, _ = corpus(name)
    tensors = load_file(path / FILE)
    change(tensors)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / FILE, {"format": "pt"})
    (tmp_path / "in" / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(SourceError, match=said) as caught:
        ckptmap.convert(tmp_path / "in", tmp_path / "out", to="hf-bf16")
    assert caught.value.code == "CKM115" and "q_proj" in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FORMS)
def test_a_config_of_other_groups_is_refused(
    name: str, corpus: Callable[..., tuple[Path, Tensors]], tmp_path: Path
) -> None:
    path, _ = corpus(name)
    config = json.loads((path / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["weights"]["group_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / FILE).write_bytes((path / FILE).read_bytes())
    with pytest.raises(SourceError, match="group_size 64") as caught:
        ckptmap.open(tmp_path)
    assert caught.value.code == "CKM115"
