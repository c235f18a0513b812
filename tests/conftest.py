"""What all tests share: the corpus of real checkpoints, and the devices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ckptmap", deadline=None)  # a busy machine is no defect
settings.load_profile("ckptmap")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell's &, as its children are
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ("test_resume_exact.py", "test_lowbit_reshard.py", "test_translate.py")
"""Files that take minutes, and come late in the order of names: one worker would do the last of them
while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@dataclass(frozen=True)
class Device:
    """A device to run on. `fake`: CUDA tensors without values or a GPU, inside `mode()`.

    Under the fake device only shapes, dtypes and devices can be checked: that code puts every
    tensor where it belongs, not what it computes.
    """

    name: str
    fake: bool = False

    def mode(self) -> AbstractContextManager[Any]:
        """What the code under test must run in: FakeTensorMode, or nothing."""
        if not self.fake:
            return nullcontext()
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode(allow_non_fake_inputs=True)

    def __str__(self) -> str:
        return self.name


@pytest.fixture(params=["cpu", "cuda", "fake-cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device that there is: the CPU, a GPU where one is, and a GPU that only pretends."""
    if request.param == "fake-cuda":
        return Device("cuda", fake=True)
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return Device(request.param)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`corpus[name] -> tests.corpus.Case`; a world size is built when first asked for."""
    from tests.corpus import Corpus

    yield Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Hub on loopback (`tests.support.hub.server.Hub`) that this process's huggingface_hub speaks to."""
    from tests.support.hub.client import connected

    with connected(tmp_path / "home", monkeypatch) as running:
        yield running
