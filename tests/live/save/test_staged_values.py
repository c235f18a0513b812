"""Copies that a save makes while training waits: right whatever training does with the tensors afterwards, and made
by few calls."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model import module_walk
from ckptmap.live.save import staged_values, this_rank
from ckptmap.live.save.staged_values import ALONE_NBYTES, Snapshot, snapshot
from ckptmap.storage.registered_memory import RELAXED
from ckptmap.tensors import Box
from tests.support.stand_in_device import DeviceModule, install, on_device

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: torch.randn(5, 7),
    "large": lambda: torch.randn(ALONE_NBYTES // 4 + 3),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 4),
    "bool": lambda: torch.rand(9) > 0.5,
    "bfloat16": lambda: torch.randn(3, 3).bfloat16(),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.randn(4, 6).t(),
    "strided": lambda: torch.randn(20)[::3],
    "offset": lambda: torch.randn(20)[5:12],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.complex(torch.randn(4), torch.randn(4)).conj(),
    "negative": lambda: torch.complex(torch.randn(4), torch.randn(4)).conj().imag,
    "parameter": lambda: nn.Parameter(torch.randn(4)),
    "shared": lambda: torch.randn(6).share_memory_(),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_copies_of_any_layout_stay_as_they_were(threads: int) -> None:
    live = {name: make() for name, make in KINDS.items()}
    with torch.inference_mode():
        live["inference"] = torch.randn(4)
    wanted = {name: one.detach().clone().resolve_conj().resolve_neg() for name, one in live.items()}
    keys = {name: (("model", name), Box.whole(tuple(one.shape))) for name, one in live.items()}
    taken = snapshot({keys[name]: one for name, one in live.items()}, copied=True)
    with torch.no_grad(), torch.inference_mode():
        for name, one in live.items():
            if name != "expanded":
                one.zero_()
        live["expanded"][:1].zero_()
    for name, key in keys.items():
        found = taken.values[key]
        assert found.is_contiguous() and found.dtype == wanted[name].dtype, name
        assert not found.requires_grad and found.shape == wanted[name].shape, name
        same = found.reshape(-1).view(torch.uint8).equal(wanted[name].reshape(-1).view(torch.uint8))
        assert same, name
    assert list(taken.values) == list(keys.values()) and len(taken.values) == len(keys)


def test_copies_do_not_change_with_the_shape_of_a_live_tensor() -> None:
    """The tensor of a copy is made when it is asked for, after training may have given the live one another form."""
    live = torch.arange(6.0)
    key = (("model", "a"), Box.whole((6,)))
    taken = snapshot({key: live}, copied=True)
    live.resize_(2, 2)
    live.data = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(taken.values[key], torch.arange(6.0))


def test_the_end_of_copies_is_waited_for_beside_the_capture_of_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that writes waits while training may capture a graph: to ask for an event in the wrong mode ends the
    capture."""
    mode, seen = [0], list[int]()

    def exchange(given: Any) -> int:
        mode[0], given._obj.value = given._obj.value, mode[0]
        return 0

    library = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: library)
    end = SimpleNamespace(synchronize=lambda: seen.append(mode[0]))
    Snapshot({}, [end, end]).wait()
    assert seen == [RELAXED] * 2 and mode == [0]


def test_a_few_values_are_waited_for_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = DeviceModule()
    install(monkeypatch, module)
    monkeypatch.setattr(
        staged_values, "host_memory", lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    arrived = staged_values.begun_copy(on_device(torch.arange(3), "cuda:1"))
    assert module.log == [("record", "stream of cuda:1")]
    assert arrived().tolist() == [0, 1, 2]
    assert module.log[1:] == [("wait", "stream of cuda:1")]


class WithBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("odd", buffer)


NOT_BYTES = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch._mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "torch.qint8": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", NOT_BYTES)
def test_tensors_that_are_no_plain_bytes_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        LoadError, match=f"model: odd is a tensor of {text}, expected dense values"
    ) as caught:
        ckptmap.save(tmp_path / "out", WithBuffer(NOT_BYTES[text]()))
    assert caught.value.code == "CKM505" and "persistent=False" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("background", [True, False])
def test_memory_that_was_freed_is_not_read(background: bool, tmp_path: Path) -> None:
    """Before, the process ended with a segmentation fault."""
    model = WithBuffer(torch.ones(1000))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.sum().backward()
    optimizer.step()
    ckptmap.save(tmp_path / "first", model, optimizer).wait()
    model.odd.untyped_storage().resize_(0)
    with pytest.raises(LoadError, match="model: odd has no memory: its storage was freed"):
        ckptmap.save(tmp_path / "out", model, optimizer, background=background)
    model.odd.untyped_storage().resize_(4000)
    optimizer.state[model.weight]["momentum_buffer"].untyped_storage().resize_(0)
    with pytest.raises(LoadError, match="momentum_buffer of weight has no memory") as caught:
        ckptmap.save(tmp_path / "out", model, optimizer, background=background)
    assert caught.value.code == "CKM508"
    assert [one.name for one in tmp_path.iterdir()] == ["first"]


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A digest reads all weights while training waits, and there is nobody to compare it with."""
    taken: list[object] = []
    monkeypatch.setattr(this_rank, "compared_digests", taken.append)
    model = nn.BatchNorm1d(3)
    for turn in range(2):
        model.running_mean.fill_(turn)
        assert ckptmap.save(tmp_path / str(turn), model).wait() == ()
        again = nn.BatchNorm1d(3)
        ckptmap.load(tmp_path / str(turn), again)
        assert again.running_mean.tolist() == [turn] * 3
    assert not taken


# ------------------------------------------------------------------------------- the count of calls


def test_modules_are_listed_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(1, 1)
    names = [name for name, _ in model.named_modules()]
    walks = []
    walk = nn.Module.named_modules

    def spy(self: nn.Module, *given: Any) -> Iterator[tuple[str, nn.Module]]:
        if not given:
            walks.append(self)
        return walk(self, *given)

    monkeypatch.setattr(nn.Module, "named_modules", spy)
    with module_walk.listed_once():
        assert [name for name, _ in module_walk.named_modules(model)] == names
        assert module_walk.modules(model) == [model, model[0]]
        assert [*module_walk.modules(other)] == [other]
    assert walks == [model, other]
    model.append(nn.Linear(2, 2))
    assert [*module_walk.modules(model)] == [model, model[0], model[1]]


def calls_while_it_blocks(folder: Path, layers: int) -> int:
    """Return the calls of Python functions that the second save in the background makes before it returns."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ckptmap.save(folder / "first", model, optimizer).wait()
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()
    sys.setprofile(count)
    try:
        handle = ckptmap.save(folder / "second", model, optimizer)
    finally:
        sys.setprofile(None)
    handle.wait()
    return calls


def test_a_save_of_many_small_tensors_makes_few_calls_for_each(tmp_path: Path) -> None:
    """Training waits for them: a parameter of Adam has four tensors."""
    few, many = (calls_while_it_blocks(tmp_path / str(n), n) for n in (10, 40))
    assert (many - few) / 30 < 400
