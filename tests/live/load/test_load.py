"""`ckptmap.load` into live models of one process; those of several ranks are in tests/ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.errors import CkptmapError, LoadError, RunError, SourceError
from ckptmap.live.load.load import load
from ckptmap.live.quantized import library_fixes as fixes
from ckptmap.live.save.save import save
from ckptmap.operations.convert import convert
from tests.corpus.ranks import run_ranks
from tests.support.live_model import (
    QUANTIZED,
    Net,
    meta_net,
    net,
    quantize,
    quantized,
    same,
    tokens,
    write,
)


def test_a_load_that_would_load_nothing_is_refused(tmp_path: Path) -> None:
    """Also without `strict`: a model that keeps its random weights is what nobody asked for."""
    torch.save(
        {f"student.{key}": value for key, value in net().state_dict().items()}, tmp_path / "s.pt"
    )
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        LoadError, match=r"s\.pt: none of the model's \d+ tensors is in it"
    ) as refused:
        load(tmp_path / "s.pt", model, strict=False)
    assert refused.value.code == "CKM501" and "it has student." in refused.value.message
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load")
    write(path)
    convert(path / "dense.pt", path / "fsdp2-nf4", to="fsdp2-nf4", world_size=2)
    convert(path / "dense.pt", path / "hf-nf4", to="hf-nf4")
    return path


def check(model: nn.Module, truth: nn.Module) -> None:
    wanted = truth.state_dict()
    for name, tensor in model.state_dict().items():
        assert same(tensor, wanted[name]), name
    assert same(model(tokens()), truth(tokens()))


def nf4_truth() -> Net:
    model = net(0)
    quantize(model)
    return model


# ------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fsdp2(folder: Path, world: int) -> None:
    for output in run_ranks("tests.ranks.fsdp2", world, [str(folder)]):
        assert "refusals" in output.stdout


# ------------------------------------------------------------------------------- dense


def as_safetensors(folder: Path) -> Path:
    path = folder / "model.safetensors"
    state = dict(net(0).state_dict())
    del state["head.weight"]  # as transformers leaves out the second of two tied names
    save_file(state, path)
    return path


def as_dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    path = folder / "dcp"
    dcp.save(net(0).state_dict(), checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    return path


def as_wrapped(folder: Path) -> Path:
    path = folder / "wrapped.pt"
    state = {f"module._orig_mod.{k}": v for k, v in net(0).state_dict().items()}
    torch.save({"model": state, "step": 3}, path)
    return path


@pytest.mark.parametrize(
    "source", [lambda folder: folder / "dense.pt", as_safetensors, as_dcp, as_wrapped]
)
@pytest.mark.parametrize("build", [net, meta_net])
def test_dense(folder: Path, source: Callable[[Path], Path], build: Callable[[], Net]) -> None:
    model = build()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    report = load(source(folder), model)
    check(model, net(0))
    assert model.head.weight is model.embed.weight
    assert report.tied == (("head.weight", "embed.weight"),)
    assert len(report.loaded) == len(model.state_dict()) - 1
    assert not (report.cast or report.missing or report.unexpected or report.left_on_meta)
    if build is net:  # in place: an optimizer that was built before keeps its parameters
        assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
        assert report.peak_host_nbytes == 0
    assert not model.up.weight.requires_grad and model.norm.weight.requires_grad


def test_open_checkpoint_is_taken_and_left_open(folder: Path) -> None:
    with open_checkpoint(folder / "dense.pt") as checkpoint:
        load(checkpoint, net())
        model = net()
        load(checkpoint, model)
    check(model, net(0))


def test_compiled_and_wrapped_modules(folder: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner: Any = net()
    compiled: Any = torch.compile(inner.up, backend="eager")
    inner.up = checkpoint_wrapper(compiled)
    model: Any = torch.compile(inner, backend="eager")
    report = load(folder / "dense.pt", model)
    assert "up.weight" in report.loaded
    assert same(
        inner.up.get_parameter("_checkpoint_wrapped_module._orig_mod.weight"), net(0).up.weight
    )


def test_cast_is_torch_to_and_reported(folder: Path) -> None:
    model = net()
    report = load(folder / "fp32.pt", model, max_memory=1000)
    truth = net(0, torch.float32)
    for name, parameter in model.named_parameters():
        assert same(parameter, truth.get_parameter(name).to(torch.bfloat16)), name
    assert {str(cast) for cast in report.cast} >= {"norm.weight: float32 -> bfloat16"}
    assert len(report.cast) == len(list(model.parameters()))
    assert 0 < report.peak_host_nbytes <= 1000


def test_noncontiguous_and_float64_parameters(folder: Path, tmp_path: Path) -> None:
    values = torch.randn(6, 4, dtype=torch.float64)
    torch.save({"weight": values}, tmp_path / "one.pt")
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 6).t())
    load(tmp_path / "one.pt", model, max_memory=64)
    assert torch.equal(model.weight, values.float()) and model.weight.stride() == (1, 6)


@pytest.mark.parametrize("source", ["dense.pt", "nf4.pt"])
@pytest.mark.parametrize("build", [net, meta_net])
def test_an_optimizer_built_before_has_what_was_loaded(
    folder: Path, tmp_path: Path, source: str, build: Callable[[], Net]
) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(folder / source, model)
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert held == [id(param) for param in model.parameters()]
    model(tokens()).sum().backward()
    optimizer.step()
    assert not same(model.norm.weight, net(0).norm.weight), "the step changed the model"
    save(tmp_path / "saved", model, optimizer).wait()
    again = build()
    fresh = torch.optim.AdamW(again.parameters())
    report = load(tmp_path / "saved", again, fresh, exact=True)
    assert report.inexact == () and report.left_on_meta == ()
    check(again, model)
    assert fresh.state[again.norm.weight].keys() == optimizer.state[model.norm.weight].keys()


# ------------------------------------------------------------------------------- NF4


@pytest.mark.parametrize("build", [net, meta_net, lambda: with_nf4(net())])
@pytest.mark.parametrize("source", ["nf4.pt", "fsdp2-nf4", "hf-nf4"])
def test_nf4_becomes_torchao(folder: Path, source: str, build: Callable[[], Net]) -> None:
    model = build()
    report = load(folder / source, model)
    check(model, nf4_truth())
    assert {encoded.fqn for encoded in report.encoded} == QUANTIZED.keys()
    assert not (report.decoded or report.quantized)
    model(tokens()).sum().backward()
    assert model.norm.weight.grad is not None
    again = net()
    again.load_state_dict(model.state_dict(), assign=True)
    check(again, nf4_truth())


def with_nf4(model: Net) -> Net:
    quantize(model)
    return model


def test_nf4_regardless_of_the_live_dtype(folder: Path) -> None:
    """The logical dtype is part of an NF4 weight: it stays, and the forward casts."""
    model = net(dtype=torch.float32)
    load(folder / "nf4.pt", model)
    assert same(model.up.weight, nf4_truth().up.weight)
    assert model(tokens()).dtype == torch.float32


def test_nf4_is_decoded_where_no_linear_layer_is(tmp_path: Path) -> None:
    weight = torch.randn(128, 64)
    torch.save({"weight": to_nf4(weight, 64, 128)}, tmp_path / "one.pt")
    model = nn.Embedding(128, 64, dtype=torch.float16).requires_grad_(False)
    report = load(tmp_path / "one.pt", model, max_memory=4096)
    assert same(model.weight, to_nf4(weight, 64, 128).get_original_weight().half())
    (decoded,) = report.decoded
    assert "Embedding" in decoded.reason and decoded.dense_nbytes == 128 * 64 * 2
    assert [str(cast) for cast in report.cast] == ["weight: float32 -> float16"]
    assert 0 < report.peak_host_nbytes <= 4096
    shown = "decoded: 1: weight: Embedding cannot compute with an NF4Tensor; 11.8 KiB more"
    assert shown in str(report)
    with pytest.raises(LoadError, match=r"1 quantized weight must be decoded.*Embedding") as error:
        load(tmp_path / "one.pt", model, strict_encoding=True)
    assert error.value.code == "CKM504"


def test_dense_into_nf4_is_torchaos_quantization(folder: Path) -> None:
    model = with_nf4(net())
    report = load(folder / "fp32.pt", model, max_memory=1 << 14)
    truth = net(0, torch.float32).to(torch.bfloat16)
    for name in QUANTIZED:
        assert same(model.get_parameter(name), quantized(truth.get_parameter(name))), name
    assert set(report.quantized) == QUANTIZED.keys()


def test_trainable_nf4_is_refused_by_name(folder: Path) -> None:
    model = net()
    model.back.weight.requires_grad_(True)
    with pytest.raises(LoadError, match=r"trainable in the model.*: back\.weight; freeze") as error:
        load(folder / "nf4.pt", model)
    assert error.value.code == "CKM503"
    check(model, net())
    dense = with_nf4(net())
    dense.up.weight.requires_grad_(True)
    with pytest.raises(LoadError, match=r"trainable in the model.*: up\.weight"):
        load(folder / "dense.pt", dense)


# ------------------------------------------------------------------------------- memory


class Allocations(TorchDispatchMode):
    """Bytes of storages that tensor operations made: how many live now, and lived at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def test_the_dense_model_is_never_materialised(tmp_path: Path) -> None:
    """Four NF4 weights of 2 MiB dense each onto meta: less than one of them is ever there."""
    state = {f"{i}.weight": to_nf4(torch.randn(1024, 1024, dtype=torch.bfloat16)) for i in range(4)}
    torch.save(state, tmp_path / "big.pt")
    with torch.device("meta"):
        layers = [nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    model = nn.Sequential(*layers).requires_grad_(False)
    with Allocations() as allocations:
        report = load(tmp_path / "big.pt", model)
    held = sum(encoded.nbytes for encoded in report.encoded)
    assert held <= allocations.now <= allocations.peak <= held + 4096
    assert report.peak_host_nbytes == held // 4
    assert held < 2.2 * 2**20
    assert all(same(model.get_parameter(name), state[name]) for name in state)


# ------------------------------------------------------------------------------- held elsewhere


def test_optimizers_hooks_and_weak_references_keep_a_meta_parameter(folder: Path) -> None:
    """An optimizer, hooks and weak references."""
    model = meta_net()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    refs = [weakref.ref(param) for param in model.parameters()]
    seen: list[str] = []
    param: Any
    for param in trained:
        param.register_hook(lambda grad: seen.append("grad"))
        param.register_post_accumulate_grad_hook(lambda param: seen.append("stepped"))
    removed = param.register_hook(lambda grad: seen.append("removed"))
    load(folder / "dense.pt", model)
    assert [ref() for ref in refs] == list(model.parameters())
    removed.remove()
    before = [param.detach().clone() for param in trained]
    model(tokens()).float().sum().backward()
    optimizer.step()
    assert sorted(seen) == ["grad"] * len(trained) + ["stepped"] * len(trained)
    assert not any(same(p.detach(), old) for p, old in zip(trained, before, strict=True))


def test_a_weak_reference_to_a_weight_that_becomes_nf4(folder: Path) -> None:
    model = net()
    ref = weakref.ref(model.up.weight)
    load(folder / "nf4.pt", model)
    assert ref() is model.up.weight
    check(model, nf4_truth())


def test_an_expanded_parameter_keeps_its_hooks(tmp_path: Path) -> None:
    model: Any = nn.Linear(4, 4, bias=False)
    values = model.weight.detach().clone()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.weight.data = torch.zeros(1, 4).expand(4, 4)
    weight, seen = model.weight, list[Tensor]()
    weight.register_hook(seen.append)
    load(tmp_path / "model.pt", model)
    assert model.weight is weight and same(weight.detach(), values)
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1


def test_a_gradient_accumulator_that_is_kept(folder: Path) -> None:
    """As torch's optimizers in the backward keep it, with their hooks."""
    model = meta_net()
    node = torch.autograd.graph.get_gradient_edge(model.norm.weight).node
    refuse(folder / "dense.pt", model, "CKM505", r"norm\.weight is on meta.*accumulator")
    del node
    load(folder / "dense.pt", model)
    check(model, net(0))


def test_parameters_that_others_hold(tmp_path: Path) -> None:
    torch.save(nn.Linear(6, 4).state_dict(), tmp_path / "model.pt")
    run_ranks("tests.ranks.load_replaced", 2, [str(tmp_path)])


@pytest.mark.parametrize("build", [net, meta_net])
def test_in_inference_mode_and_beside_a_default_device(
    build: Callable[[], Net], tmp_path: Path
) -> None:
    """What is loaded can be trained, and lies where it did."""

    def optimized(model: Net) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def train(model: Net, optimizer: torch.optim.Optimizer) -> None:
        model(tokens()).float().square().sum().backward()
        optimizer.step()

    truth = net(0)
    first = optimized(truth)
    train(truth, first)
    with torch.device("meta"):
        save(tmp_path / "run", truth, first).wait()
    for surrounding in (torch.inference_mode(), torch.device("meta")):
        model = build()
        optimizer = optimized(model)
        with surrounding:
            load(tmp_path / "run", model, optimizer)
        check(model, truth)
        train(model, optimizer)


def test_a_model_made_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        model = net()
        load(folder / "dense.pt", model)
        check(model, net(0))


# ------------------------------------------------------------------------------- refusals


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refuse(path: Path, model: nn.Module, code: str, match: str) -> None:
    before = states(model)
    with pytest.raises(LoadError, match=match) as error:
        load(path, model)
    assert error.value.code == code
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or same(tensor, before[name]), name


def test_missing_and_unexpected(folder: Path, tmp_path: Path) -> None:
    state = dict(net(0).state_dict())
    state["extra"] = state.pop("norm.weight")
    torch.save(state, tmp_path / "other.pt")
    refuse(tmp_path / "other.pt", net(), "CKM501", r"1 missing: norm\.weight; 1 unexpected: extra")
    model, truth = net(), net(0)
    report = load(tmp_path / "other.pt", model, strict=False)
    assert (report.missing, report.unexpected) == (("norm.weight",), ("extra",))
    truth.norm.weight = net().norm.weight
    check(model, truth)


def test_shapes_and_kinds_of_dtype(folder: Path, tmp_path: Path) -> None:
    state = dict(net(0).state_dict())
    state["norm.weight"] = torch.ones(65, dtype=torch.bfloat16)
    state["steps"] = torch.tensor(1.5)
    torch.save(state, tmp_path / "other.pt")
    text = r"steps: model int64\[\], .*, norm\.weight: model bfloat16\[64\], .* bfloat16\[65\]"
    refuse(tmp_path / "other.pt", net(), "CKM502", text)
    model = net()
    report = load(tmp_path / "other.pt", model, strict=False)
    assert [found.fqn for found in report.mismatched] == ["steps", "norm.weight"]
    bare = load(tmp_path / "other.pt", meta_net(), strict=False)
    assert bare.left_on_meta == ("steps", "norm.weight")
    assert same(model.norm.weight, net().norm.weight) and same(model.up.weight, net(0).up.weight)


def test_tied_in_the_model_but_different_in_the_checkpoint(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in net(0).state_dict().items()}
    torch.save(state, tmp_path / "copies.pt")
    model = net()
    load(tmp_path / "copies.pt", model, max_memory=1024)
    check(model, net(0))
    state["head.weight"][100, 63] += 1
    torch.save(state, tmp_path / "differ.pt")
    refuse(tmp_path / "differ.pt", net(), "CKM208", r"embed\.weight and head\.weight differ")


def test_parameters_on_one_memory_are_tied(tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.detach())
        return model

    values = torch.randn(3, 3)
    torch.save({"0.weight": values, "1.weight": values.clone()}, tmp_path / "same.pt")
    model = build()
    load(tmp_path / "same.pt", model)
    assert same(model[0].weight, values)
    torch.save({"0.weight": values, "1.weight": values + 1}, tmp_path / "differ.pt")
    refuse(tmp_path / "differ.pt", build(), "CKM208", r"0\.weight and 1\.weight differ")


def transposed(model: Any) -> None:
    model.b.weight.data = model.a.weight.data.t()


def sliced(model: Any) -> None:
    model.b.weight.data = model.a.weight.data[1:2]


def sliced_bytes(model: Any) -> None:
    model.b.weight.data = model.a.weight.data.view(torch.bfloat16)


@pytest.mark.parametrize("tie", [transposed, sliced, sliced_bytes])
def test_parameters_that_share_some_memory(tie: Callable[[Any], None], tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})
        tie(model)
        return model

    state = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    torch.save(state, tmp_path / "same.pt")
    model = build()
    load(tmp_path / "same.pt", model)
    assert all(same(tensor, state[name]) for name, tensor in model.state_dict().items())
    state["b.weight"][0, 0] += 1
    torch.save(state, tmp_path / "differ.pt")
    refuse(tmp_path / "differ.pt", build(), "CKM208", "differ where they share memory")


def test_parameters_apart_in_one_memory(tmp_path: Path) -> None:
    """Columns of a matrix, and pieces of a buffer, are no ties."""
    memory = torch.zeros(6, 4)
    places = memory[:4, :2], memory[:4, 2:], memory[4:]
    model: Any = nn.ParameterList([nn.Parameter(place) for place in places])
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "apart.pt")
    load(tmp_path / "apart.pt", model)
    assert all(same(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model[0].data_ptr() == memory.data_ptr()


def test_either_name_of_a_tie_suffices(tmp_path: Path) -> None:
    state = dict(net(0).state_dict())
    del state["embed.weight"]
    torch.save(state, tmp_path / "head.pt")
    model = net()
    load(tmp_path / "head.pt", model)
    check(model, net(0))


def test_buffers_that_stay_on_meta(folder: Path) -> None:
    model = meta_net()
    model.window = torch.ones(2, device="meta")
    refuse(folder / "dense.pt", model, "CKM501", r"non-persistent buffers are on meta.*: window")
    report = load(folder / "dense.pt", model, strict=False)
    assert report.left_on_meta == ("window",)
    assert not model.scale.is_meta and same(model.steps, net(0).steps)


def test_models_that_cannot_be_loaded_into(folder: Path) -> None:
    class Marked(Tensor):
        pass

    model = net()
    model.up.weight = nn.Parameter(torch.randn(256, 64).as_subclass(Marked), requires_grad=False)
    refuse(folder / "dense.pt", model, "CKM505", r"up\.weight is a Marked")
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(LoadError, match=r"0\.weight of LazyLinear has no shape yet; run a forward"):
        load(folder / "dense.pt", lazy)
    fresh = net()
    with pytest.raises(LoadError, match="no optimizer state can be loaded from it"):
        load(folder / "dense.pt", fresh, torch.optim.SGD(fresh.parameters()))
    with pytest.raises(SourceError, match=r"none\.pt"):
        load(folder / "none.pt", net())


def test_a_load_that_fails_midway_says_how_far_it_came(tmp_path: Path) -> None:
    state = net(0).state_dict()
    state["down.weight"] = state["down.weight"].clone()
    state["down.weight"][3, 3] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    model = with_nf4(net())
    text = r"^down\.weight: expected finite.* half loaded, 5 of 10 tensors: .*norm\.weight.*; down"
    with pytest.raises(CkptmapError, match=text) as error:
        load(tmp_path / "nan.pt", model)
    assert error.value.code == "CKM309"
    assert same(model.norm.weight, net(0).norm.weight), "said to be loaded"
    assert same(model.back.weight, with_nf4(net()).back.weight), "comes after it"


def test_a_file_written_anew_since_it_was_opened(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(net(0).state_dict(), path)
    with open_checkpoint(path) as checkpoint:
        torch.save({**net(1).state_dict(), "more": torch.ones(9)}, tmp_path / "new.pt")
        (tmp_path / "new.pt").rename(path)
        with pytest.raises(RunError, match=r"model\.pt: was written anew since its headers"):
            checkpoint["norm.weight"].read()
        model = net()
        with pytest.raises(RunError, match=r"model\.pt: changed while it was read.*as it was"):
            load(checkpoint, model)
        check(model, net())
        with pytest.raises(RunError, match=r"model\.pt: was written anew since"):
            convert(checkpoint, tmp_path / "out", to="hf")
        assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- doctor


def test_fixes_work_with_what_is_installed() -> None:
    for state in fixes.states():
        assert state.problem == "", state
        assert state.within_tested, state
