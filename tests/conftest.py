"""What all tests share: the corpus of real checkpoints, and the devices."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")  # before anything imports it

from ckptmap.typed_options import typed_options  # noqa: E402
from tests.support import marks  # noqa: E402
from tests.support.processor_time import ProcessorTime  # noqa: E402

if TYPE_CHECKING:
    from tests.corpus.shared import Shared

# A case of the torture is forked from a process that has used torch; threads of OpenMP do not survive that.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor compiles in the process itself: else each that compiles, a rank too, starts others, which import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# No deadline: a busy machine is no defect. `make test-fast` asks for the profile `fast`.
settings.register_profile("ckptmap", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("ckptmap")

# Collecting imports libraries and makes 100,000s of objects, and no garbage; see `pytest_collection_finish`.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a shell's &, as its children are
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the processor time."""
    config.pluginmanager.register(ProcessorTime())


LONGEST = (
    "test_columns.py", "test_conformance.py", "test_examples.py", "test_lowbit_reshard.py", "test_output_digests.py",
    "test_resume_exact.py", "test_torture.py", "test_translate.py", "test_worlds.py",
)  # fmt: skip
"""Files that take more than 20 seconds, and come late in the order of names or take a minute: one worker would do
the last of them while the others wait."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks and what is slow; the longest files go first."""
    marks.mark(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Take what collecting has made out of every later garbage collection: it stays to the end.

    Tests make many objects and little garbage, as the command line does, whose threshold this is.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the process that only collects reports end without a look at 100,000s of objects of them."""
    if session.config.pluginmanager.hasplugin("dsession"):
        gc.freeze()


@pytest.fixture(autouse=True)
def typed_options_in_texts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read errors and notes as they are written, with options of the command line. What Python reads of
    them, tests/test_typed_options.py proves of every text, and tests with the mark `python_texts`."""
    if request.node.get_closest_marker("python_texts"):
        yield
        return
    with typed_options():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse ranks to a test without the mark."""
    marks.allow(item)


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
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Folders that are filled once a session, though several test processes run."""
    from tests.corpus.shared import Shared

    base = tmp_path_factory.getbasetemp()
    return Shared((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared")


@pytest.fixture(scope="session")
def corpus(shared: Shared) -> Any:
    """`corpus[name] -> tests.corpus.Case`; a world size is built when first asked for."""
    from tests.corpus import Corpus

    return Corpus(shared)


@pytest.fixture(scope="session")
def framework_directories(shared: Shared) -> Path:
    """The folder with every directory of `tests.corpus.writers_directories`; see `sample` there."""
    from tests.corpus.ranks import run_ranks

    def fill(folder: Path) -> None:
        for world_size in (1, 2):
            run_ranks("tests.corpus.writers_directories", world_size, ["--out", str(folder)], 400)

    return shared("framework-directories", fill)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`written(form)`: the directory of a model of a form of `tests.support.quantized_models.WRITERS`, which its own
    library has quantized. Tests only read it."""
    from tests.support.quantized_models import WRITERS

    @cache
    def write(form: str) -> Path:
        path = tmp_path_factory.mktemp(form) / "in"
        WRITERS[form](path)
        return path

    return write


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Hub on loopback (`tests.support.hub.server.Hub`) that this process's huggingface_hub speaks to."""
    from tests.support.hub.client import connected

    with connected(tmp_path / "home", monkeypatch) as running:
        yield running
