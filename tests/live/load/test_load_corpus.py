"""Every checkpoint of the corpus loads into a live model with its names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ckptmap.live.load.load import load
from tests.corpus import CASES, Case, Corpus
from tests.support.live_model import same

# A module cannot have a child called `bfloat16`: that is a method of nn.Module.
LOADABLE = sorted(name for name in CASES if not name.endswith("_dtypes"))


def live(case: Case, device: str) -> nn.Module:
    """A tree of modules with a frozen parameter for each floating tensor, a buffer for the others;
    what is in codes in the file is dense in a `Linear`."""
    coded = case.coded
    root = nn.Module()
    for name, value in case.truth.items():
        *path, last = name.split(".")
        owner = root
        for depth, segment in enumerate(path):
            if segment not in owner._modules:
                leaf = name in coded and depth == len(path) - 1
                owner.add_module(segment, nn.Linear(1, 1, bias=False) if leaf else nn.Module())
            owner = owner.get_submodule(segment)
        empty = torch.zeros(value.shape, dtype=value.dtype, device=device)
        if value.is_floating_point():
            owner.register_parameter(last, nn.Parameter(empty, requires_grad=False))
        else:
            owner.register_buffer(last, empty)
    for group in case.spec.tied:
        tie(root, [name for name in group if name in case.truth])
    return root


def tie(root: nn.Module, names: list[str]) -> None:
    for name in names[1:]:
        owner = root.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], root.get_parameter(names[0]))


def values(model: nn.Module) -> Mapping[str, Any]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", LOADABLE)
def test_every_case_loads(name: str, device: str, corpus: Corpus) -> None:
    case = corpus[name]
    model = live(case, device)
    report = load(case.path, model)
    found = values(model)
    assert found.keys() == case.truth.keys()
    for fqn, tensor in found.items():
        want = case.truth[fqn]
        if fqn in case.nf4:
            parts = case.nf4[fqn]
            assert all(same(getattr(tensor, part), parts[part]) for part in parts if part in INNER)
            tensor = tensor.get_original_weight()
        elif hasattr(tensor, "qdata"):
            stored: Any = case.stored[fqn]
            assert same(tensor.qdata, stored.qdata), fqn
            tensor = tensor.dequantize()
        assert same(tensor.detach(), want), fqn
    held = case.spec.encoding != "float8"  # which no live model of ours holds
    assert {encoded.fqn for encoded in report.encoded} == (case.coded if held else set())
    assert {decoded.fqn for decoded in report.decoded} == (set() if held else case.coded)
    assert not (report.cast or report.left_on_meta)


INNER = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
