"""Buffers with persistent=False: training that moves them cannot go on bit for bit, and exact=True says so."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model import unsaved_buffers
from ckptmap.live.save import replica_digests
from ckptmap.live.save.replica_digests import weights
from tests.support.dispatched import NeverWaits
from tests.support.stand_in_device import OnDevice, on_device


class Scaled(nn.Module):
    """A layer with a table that the constructor makes, a running scale, and a cache that grows; none is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("absent", None, persistent=False)
        self.register_buffer("elsewhere", torch.zeros(2, device="meta"), persistent=False)

    def moved(self) -> Scaled:
        self.scale.mul_(0.5)
        return self


def test_a_moved_buffer_is_refused(tmp_path: Path) -> None:
    model = Scaled()
    model.cache = torch.zeros(7)
    ckptmap.save(tmp_path / "as made", model).wait()
    ckptmap.save(tmp_path / "moved", nn.Sequential(model.moved())).wait()
    again: Any = Scaled()
    again.elsewhere = torch.zeros(2)
    assert ckptmap.load(tmp_path / "as made", again, exact=True).inexact == ()
    other = nn.Sequential(again)
    before = again.layer.weight.clone()
    text = (
        r"1 buffer or generator is not in the state dict of the model, .*saved: 0\.scale \(register"
    )
    with pytest.raises(LoadError, match=text) as no:
        ckptmap.load(tmp_path / "moved", nn.Sequential(again), exact=True)
    assert no.value.code == "CKM507" and torch.equal(before, again.layer.weight)
    report = ckptmap.load(tmp_path / "moved", other)
    assert any("0.scale" in reason for reason in report.inexact)
    again.moved()
    assert ckptmap.load(tmp_path / "moved", nn.Sequential(again), exact=True).inexact == ()


class Noisy(nn.Linear):
    """A layer with a generator of its own, and torch's."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.noise = torch.Generator().manual_seed(3)
        self.default = torch.default_generator


def test_a_generator_that_was_drawn_from_is_refused(tmp_path: Path) -> None:
    model, again = Noisy(), Noisy()
    ckptmap.save(tmp_path / "a", model).wait()
    assert ckptmap.load(tmp_path / "a", again, exact=True).inexact == ()
    torch.rand(3, generator=model.noise)
    ckptmap.save(tmp_path / "b", model).wait()
    with pytest.raises(LoadError, match="not as when it was saved: noise"):
        ckptmap.load(tmp_path / "b", again, exact=True)
    again.noise.set_state(model.noise.get_state())
    ckptmap.load(tmp_path / "b", again, exact=True)


def test_a_stream_of_any_accelerator_is_none_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of CUDA were known alone; the stream of another device is restored, too."""

    class Xpu:
        default_generators = (torch.Generator(), torch.Generator())

    model = nn.Linear(4, 4)
    model.noise = Xpu.default_generators[1]  # type: ignore[assignment]
    assert list(unsaved_buffers.described(model)) == ["noise"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Xpu)
    assert unsaved_buffers.described(model) == {}


class Writing(nn.Linear):
    """A module that writes a number of its own into state dicts, in torch's way of old."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = 1.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)


def test_what_a_module_writes_into_a_state_dict_is_not_lost_in_silence(tmp_path: Path) -> None:
    model = nn.Sequential(Writing(), nn.Linear(4, 4))
    ckptmap.save(tmp_path / "a", model).wait()
    with pytest.raises(LoadError, match=r"0\.scale of the state dict, .*get_extra_state") as no:
        ckptmap.load(tmp_path / "a", model, exact=True)
    assert no.value.code == "CKM507"
    assert ckptmap.load(tmp_path / "a", model).inexact


ODD = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "torch._mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "torch.qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "torch.nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_buffer_that_is_no_plain_bytes(kind: str, tmp_path: Path) -> None:
    """Refused in one line, by its name; beside the state dict it does not matter."""
    model, dense = nn.Linear(3, 3), nn.Linear(3, 3)
    model.register_buffer("table", ODD[kind](), persistent=False)
    ckptmap.save(tmp_path / "a", model).wait()
    ckptmap.load(tmp_path / "a", model, exact=True)
    model.register_buffer("table", ODD[kind]())
    dense.register_buffer("table", torch.eye(3))
    ckptmap.save(tmp_path / "b", dense).wait()
    text = rf"model: table is a tensor of {kind}, expected dense values"
    for call in (
        lambda: ckptmap.save(tmp_path / "c", model),
        lambda: ckptmap.load(tmp_path / "b", model),
    ):
        with pytest.raises(LoadError, match=text) as no:
            call()
        assert no.value.code == "CKM505"


class Remembering(nn.Linear):
    """A module whose buffer gets its shape in a forward, as an observer's does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen = values.detach().amax(0)
        return super().forward(values)


def test_a_buffer_that_grows_says_what_gives_it_its_shape(tmp_path: Path) -> None:
    model, again = Remembering(), Remembering()
    model(torch.rand(2, 4))
    ckptmap.save(tmp_path / "a", model).wait()
    with pytest.raises(LoadError, match=r"seen: model float32\[0\].*run a batch, then load") as no:
        ckptmap.load(tmp_path / "a", again, exact=True)
    assert no.value.code == "CKM502"
    again(torch.zeros(1, 4))
    ckptmap.load(tmp_path / "a", again, exact=True)
    assert torch.equal(again.seen, model.seen) and again.seen.any()


def test_every_rank_has_its_own() -> None:
    first, other = {"a": ["(2,) torch.float32", "x"]}, {"a": ["(2,) torch.float32", "y"]}
    assert unsaved_buffers.of_all_ranks([None, {}]) == {}
    saved = unsaved_buffers.of_all_ranks([first, dict(first), other, None])["unsaved_buffers"]
    assert saved == [first, None, other, False] and unsaved_buffers.of_rank(saved, 3) == {}
    assert [*unsaved_buffers.changed(unsaved_buffers.of_rank(saved, 1), first)] == []
    (text,) = unsaved_buffers.changed(unsaved_buffers.of_rank(saved, 2), first)
    assert text.startswith("1 buffer or generator is not in the state dict of the model")
    for damaged in (None, "text", [], [7], [{"a": 3}], [{"a": ["x"]}]):
        assert unsaved_buffers.of_rank(damaged, 0) == {}


def test_digests_of_a_device_wait_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer was copied to the host by itself: a wait for all that the device had to do."""
    lists = []
    tolist = torch.Tensor.tolist

    def spy(values: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            lists.append(values.numel())
            return tolist(values)

    def no_copy(*_: object) -> Any:
        raise AssertionError("a buffer is copied to the host by itself")

    monkeypatch.setattr(replica_digests, "weights", on_cpu_weights)
    monkeypatch.setattr(torch.Tensor, "tolist", spy)
    monkeypatch.setattr(OnDevice, "cpu", no_copy)
    values = {f"layers.{n}.mask": torch.full((5, 3), float(n)) for n in range(7)}
    there = {name: on_device(one, "cuda:0") for name, one in values.items()}
    found = forms_and_digests({**there, "own": torch.ones(2)}, {})
    assert lists == [7]
    assert all(found[name][1].startswith("sum64 ") for name in there)
    assert not found["own"][1].startswith("sum64 ")
    again = forms_and_digests({**values, "own": torch.ones(2)}, found)
    assert [*unsaved_buffers.changed(found, again)] == [], "loaded on the CPU"
    values["layers.3.mask"][1, 1] += 1e-3
    (text,) = unsaved_buffers.changed(found, forms_and_digests(values, found))
    assert "saved: layers.3.mask (" in text


def forms_and_digests(values: Any, saved: Any) -> Any:
    return unsaved_buffers.begun_forms_and_digests(values, saved)()


def test_the_checksums_are_computed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all buffers, and none is waited for before somebody asks: on meta, which has no values."""
    asked: list[tuple[int, str]] = []

    def begun_copy(sums: torch.Tensor) -> Any:
        asked.append((sums.numel(), str(sums.device)))
        return lambda: torch.arange(sums.numel())

    monkeypatch.setattr(replica_digests, "begun_copy", begun_copy)
    tables = {str(n): torch.empty(n, 2, device="meta") for n in range(1, 9)}
    with NeverWaits():
        arrived = unsaved_buffers.begun_forms_and_digests(tables, {})
    assert asked == [(8, "meta")]
    found = arrived()
    assert [digest for _, digest in found.values()] == [f"sum64 {n}" for n in range(8)]


def test_the_thread_that_writes_waits_for_the_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has given the device work ahead: to wait for a digest in the call is to wait for all of it."""
    waited: list[str] = []
    begin = unsaved_buffers.begun_forms_and_digests

    def begun(values: Any, saved: Any) -> Any:
        arrived = begin(values, saved)
        return lambda: waited.append(threading.current_thread().name) or arrived()

    monkeypatch.setattr(unsaved_buffers, "begun_forms_and_digests", begun)
    model: Any = Scaled()
    for name in "ab":
        ckptmap.save(tmp_path / name, model).wait()
    assert waited == ["MainThread", "ckptmap-save"], "a new structure, and a known one"
    monkeypatch.undo()
    model.elsewhere = torch.zeros(2)
    for name in "ab":
        ckptmap.load(tmp_path / name, model, exact=True)
    model.moved()
    for name in "ab":
        with pytest.raises(LoadError, match="not as when it was saved: scale"):
            ckptmap.load(tmp_path / name, model, exact=True)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_device_that_fails_meanwhile_is_an_error_of_the_save(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Scaled()
    if is_known:
        ckptmap.save(tmp_path / "a", model).wait()
    else:
        (tmp_path / "a").mkdir()
        model.other = nn.Linear(3, 5)

    def begun(values: Any, saved: Any) -> Any:
        def fail() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        return fail

    monkeypatch.setattr(unsaved_buffers, "begun_forms_and_digests", begun)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        ckptmap.save(tmp_path / "b", model).wait()
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def on_cpu_weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    return weights(start, count, torch.device("cpu"))
