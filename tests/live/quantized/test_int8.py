"""int8 checkpoints in live models: torchao's tensors, frozen, plain, compiled, DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.live.load.load import load
from ckptmap.live.save.save import save
from tests.corpus.ranks import run_ranks
from tests.ranks.int8 import SOURCES, TRAINED, check, net, trained, training, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("int8-live")
    write(made)
    return made


@pytest.mark.parametrize("name", SOURCES)
def test_a_plain_model(name: str, folder: Path) -> None:
    model = net()
    report = load(folder / f"{name}.pt", model)
    assert {e.fqn: e.encoding for e in report.encoded} == dict.fromkeys(
        ("0.weight", "2.weight", "3.weight"), "int8"
    )
    assert type(model[0].weight).__name__ == "Int8Tensor" and not model[0].weight.requires_grad
    check(model, folder / f"{name}.pt")


def test_values_are_those_of_the_checkpoint(folder: Path) -> None:
    model = net()
    load(folder / "int8.pt", model)
    with ckptmap.open(folder / "int8.pt") as ckpt:
        assert torch.equal(model[0].weight.dequantize(), ckpt["0.weight"].read())


def test_a_meta_model_is_loaded(folder: Path) -> None:
    with torch.device("meta"):
        model = net()
    load(folder / "int8.pt", model)
    check(model, folder / "int8.pt")


def test_a_trainable_weight_is_decoded_without_an_error(folder: Path) -> None:
    """Not "only Tensors of floating point and complex dtype can require gradients"."""
    model = net()
    model[0].weight.requires_grad_(True)
    report = load(folder / "int8.pt", model)
    assert [(d.fqn, d.reason) for d in report.decoded] == [
        ("0.weight", "the live weight is trainable, and int8 codes cannot be")
    ]
    with ckptmap.open(folder / "int8.pt") as ckpt:
        assert torch.equal(model[0].weight.detach(), ckpt["0.weight"].read())
    with pytest.raises(ckptmap.CkptmapError, match="1 quantized weight must be decoded"):
        load(folder / "int8.pt", model, strict_encoding=True)


def test_an_embedding_is_decoded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 16)).requires_grad_(False)
    torch.save(model.state_dict(), tmp_path / "in.pt")
    ckptmap.convert(tmp_path / "in.pt", tmp_path / "q.pt", to="full-int8", encode=("*.weight",))
    report = load(tmp_path / "q.pt", model)
    assert [d.fqn for d in report.decoded] == ["0.weight"]
    assert "Embedding cannot compute" in report.decoded[0].reason


def test_zero_points_that_are_not_zero_are_decoded(tmp_path: Path) -> None:
    from torchao.quantization import Int8Tensor, PerRow
    from torchao.quantization.quant_primitives import MappingType

    w = torch.rand(16, 32)
    tensor = Int8Tensor.from_hp(w, PerRow(), MappingType.ASYMMETRIC)
    torch.save({"weight": tensor}, tmp_path / "in.pt")
    model = nn.Linear(32, 16, bias=False).requires_grad_(False)
    report = load(tmp_path / "in.pt", model)
    assert "zero points are not all 0" in report.decoded[0].reason
    assert torch.equal(model.weight, tensor.dequantize())


def test_a_live_int8_weight_takes_dense_values(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    live, reference = net(), net()
    load(folder / "int8.pt", live)
    report = load(folder / "dense.pt", live)
    assert set(report.quantized) == {"0.weight", "2.weight", "3.weight"}
    quantize_(reference, Int8WeightOnlyConfig(), lambda module, name: name == "0")
    found: Any = live[0].weight
    assert torch.equal(found.qdata, reference[0].weight.qdata)
    assert torch.equal(found.scale, reference[0].weight.scale)


@pytest.mark.parametrize("source", ["int8.pt", "dense.pt"])
def test_a_live_weight_keeps_how_it_quantizes_activations(source: str, folder: Path) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    def build(seed: int) -> Any:
        model = net()
        torch.manual_seed(seed)
        model[0].weight = nn.Parameter(torch.randn(64, 32).bfloat16()) if seed else model[0].weight
        config = Int8DynamicActivationInt8WeightConfig()
        quantize_(model, config, lambda module, name: name == "0")
        return model

    live, reference = build(1), build(0)
    load(folder / source, live)
    kept, wanted = live[0].weight, reference[0].weight
    assert kept.act_quant_kwargs == wanted.act_quant_kwargs is not None
    assert torch.equal(kept.qdata, wanted.qdata)
    x = torch.randn(5, 32).bfloat16()
    assert torch.equal(live[0](x), reference[0](x))


def test_a_live_int8_model_is_saved_with_its_codes(folder: Path, tmp_path: Path) -> None:
    model = net()
    load(folder / "int8.pt", model)
    save(tmp_path / "saved", model).wait()
    assert ckptmap.diff(folder / "int8.pt", tmp_path / "saved", values=True).equal
    with ckptmap.open(tmp_path / "saved") as ckpt:
        assert ckpt["0.weight"].encoding == "int8"


def test_training_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    """int8, int8 mixed precision and BitNet training of torchao's, in a plain model."""
    training(tmp_path, sharded=False)


def test_an_int8_training_weight_takes_dense_values_to_the_nearest_code(tmp_path: Path) -> None:
    """Not by `copy_`, which rounds stochastically: two loads give one model."""
    dense = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 48)).bfloat16()
    torch.save(dense.state_dict(), tmp_path / "dense.pt")
    models: list[Any] = [trained(TRAINED[0], seed) for seed in (1, 2)]
    for model in models:
        report = load(tmp_path / "dense.pt", model)
        assert report.quantized == ("0.weight", "1.weight")
    made = type(models[0][0].weight).from_float(dense[0].weight)
    for model in models:
        assert torch.equal(model[0].weight.int_data, made.int_data)
        assert torch.equal(model[0].weight.scale, made.scale)
    ckptmap.convert(tmp_path / "dense.pt", tmp_path / "q.pt", to="full-int8")
    report = load(tmp_path / "q.pt", models[0])
    assert {e.fqn for e in report.encoded} == {"0.weight", "1.weight"}, "scales of bf16 are kept"
    with ckptmap.open(tmp_path / "q.pt") as ckpt:
        assert torch.equal(models[0][0].weight.dequantize(), ckpt["0.weight"].read())


def test_a_training_weight_on_meta_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = trained(TRAINED[1], 1)
    torch.save(trained(TRAINED[1], 1).state_dict(), tmp_path / "in.pt")
    with pytest.raises(ckptmap.CkptmapError, match="TrainingLinearWeight on meta"):
        load(tmp_path / "in.pt", model)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fsdp2_and_ddp(world: int, folder: Path) -> None:
    """4 ranks are HSDP: 2 copies of 2 shards."""
    run_ranks("tests.ranks.int8", world, [str(folder)], timeout=240)


def test_doctor_knows_whether_shards_can_be_made() -> None:
    from ckptmap.live.quantized import library_fixes as fixes

    (state,) = [state for state in fixes.states() if state.name == "shard an Int8Tensor"]
    assert state.problem == "" and state.within_tested
