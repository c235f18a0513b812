"""Names of devices get the index of the thread or of the rank that they are resolved for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ckptmap.core.devices import indexed
from ckptmap.execution.ranks import ALONE, GlooRanks
from ckptmap.operations import workspace
from ckptmap.quantization.blockwise import fourbit
from ckptmap.quantization.nf4 import kernels
from tests.support.stand_in_device import DeviceModule, install

UNCHANGED = ["cpu", "cpu:0", "cuda:1", "xpu:0", "meta", "gpu", "no such device"]


@pytest.mark.parametrize("name", UNCHANGED)
def test_names_that_stay(name: str) -> None:
    assert indexed(name) == name == indexed(name, 3)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_kind_is_the_current_device_or_that_of_the_local_rank(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, DeviceModule(count=4, current=3))
    assert indexed(kind) == f"{kind}:3" == ALONE.device(kind)
    assert [indexed(kind, rank) for rank in (0, 1, 5)] == [f"{kind}:{n}" for n in (0, 1, 1)]
    ranks: Any = GlooRanks.__new__(GlooRanks)
    ranks._local_rank = 6
    assert ranks.device(kind) == f"{kind}:2" and ranks.device(f"{kind}:0") == f"{kind}:0"


def test_a_device_that_is_not_there_stays_for_the_check_that_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, DeviceModule(count=0))
    assert indexed("cuda") == "cuda" == indexed("cuda", 2)


class OfThread(DeviceModule):
    """Like CUDA: a thread begins with device 0."""

    def current_device(self) -> int:
        return 2 if threading.current_thread() is threading.main_thread() else 0


def test_threads_get_the_device_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run's threads are given was resolved before they began."""
    install(monkeypatch, OfThread(count=4))
    tried = []
    monkeypatch.setattr(
        workspace.requirements, "require_device", lambda name, label: tried.append(name)
    )
    plan: Any = type("Plan", (), {"encodes": True, "nbytes_out": 0})()
    how = workspace._on_this_rank(workspace.RunOptions(device="cuda"), plan, ALONE)
    given = []
    thread = threading.Thread(target=lambda: given.append(indexed(how.device)))
    thread.start()
    thread.join()
    assert given == ["cuda:2"] == tried


def test_a_plan_that_computes_nothing_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", pytest.fail)
    plan: Any = type("Plan", (), {"encodes": (), "nbytes_out": 0})()
    assert (
        workspace._on_this_rank(workspace.RunOptions(device="cuda"), plan, ALONE).device == "cuda"
    )


def test_lookup_tables_are_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` may mean another device the next time: its tables are kept by the index."""
    install(monkeypatch, DeviceModule(count=2, current=1))
    monkeypatch.setattr(
        fourbit, "_bucketizers", {("nf4", "cuda:1"): "of 1", ("nf4", "cuda:0"): "of 0"}
    )
    monkeypatch.setattr(kernels, "_lookups", {(torch.bfloat16, "cuda:1"): "of 1"})
    tables: list[Any] = [
        fourbit._bucketizer("nf4", "cuda"), fourbit._bucketizer("nf4", "cuda:0"),
        kernels.lookup(torch.bfloat16, "cuda"),
    ]  # fmt: skip
    assert tables == ["of 1", "of 0", "of 1"]
