"""transformers loads quantized models with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptmap
from ckptmap.errors import PlanError
from tests.support.bnb_cases import refused

SIZES = dict(
    vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
STACKED = ("bnb-nf4", "bnb-int8", "int8", "float8")
FAMILIES = ("Mixtral", "GraniteMoe")


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).bfloat16().eval()
    path = tmp_path_factory.mktemp("experts") / request.param
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("scheme", STACKED)
def test_experts_that_transformers_stacks_stay_dense(
    saved: tuple[Any, Path], tmp_path: Path, scheme: str
) -> None:
    model, path = saved
    ckptmap.convert(path, tmp_path / "out", to=f"hf-{scheme}")
    loaded, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    theirs = dict(model.named_parameters())
    dense = {
        name: p for name, p in loaded.named_parameters() if "experts" in name or "router" in name
    }
    assert len(dense) >= 4
    for name, found in dense.items():
        assert torch.equal(found, theirs[name]), name
    encodings = {name: tensor.encoding for name, tensor in ckptmap.open(tmp_path / "out").items()}
    assert encodings["model.layers.1.self_attn.q_proj.weight"] == scheme


@pytest.mark.parametrize("saved", ["Mixtral"], indirect=True)
def test_experts_asked_for_are_refused_where_a_config_would_promise_them(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    _, path = saved
    asked = dict(encode=("*.experts.*",))
    with refused(PlanError, "CKM203", match=r"experts.* not the weight of one linear module"):
        ckptmap.plan(path, "hf-int8", **asked)
    ckptmap.convert(path, tmp_path / "out.pt", to="full-int8", **asked)
    found = ckptmap.open(tmp_path / "out.pt")
    assert {t.encoding for name, t in found.items() if ".experts." in name} == {"int8"}
