"""A device that runs out of memory: feeds are halved, and the output is the same."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import RunError
from ckptmap.execution import cuda_ring, smaller_feeds
from ckptmap.execution.smaller_feeds import (
    MOST_HALVINGS,
    FeedSize,
    TensorProgress,
    with_smaller_feeds,
)
from ckptmap.quantization.blockwise.chunks import DEVICE_NUMEL, chunk_numel, smaller
from ckptmap.quantization.blockwise.fourbit import FourBitQuantizer
from tests.support.stand_in_device import DeviceModule, install

FITS = {"full-nf4": 20_000, "full-bnb-nf4-dq": 20_000, "fsdp2-int8": 20_000, "full-fp32": 20_000,
        "hf-fp8": 70_000}  # fmt: skip
"""Target -> elements of the largest buffer that fits; a buffer holds two rows of tiles at least."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.\nand more")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    maker = torch.Generator().manual_seed(2)
    shapes = {"a.q_proj.weight": (128, 256), "b.up_proj.weight": (256, 128), "norm.weight": (67,)}
    state = {key: torch.randn(shape, generator=maker).bfloat16() for key, shape in shapes.items()}
    torch.save(state, tmp_path / "dense")
    return tmp_path / "dense"


def converted(source: Path, to: str, out: Path) -> tuple[dict[str, bytes], int]:
    """Return the files of the output, which is moved away, and the bytes of progress reported."""
    if out.with_name("before").is_dir():
        shutil.rmtree(out.with_name("before"))
    told: list[int] = []
    ckptmap.convert(source, out, to=to, world_size=1, threads=1,
                    progress=lambda phase, done, total, name: told.append(done))  # fmt: skip
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    found = {path.name: path.read_bytes() for path in files}
    shutil.move(out, out.with_name("before"))
    return found, max(told)


def limited(monkeypatch: pytest.MonkeyPatch, numel: int) -> list[int]:
    """Let buffers of more elements run out of memory; return the sizes that were asked for."""
    asked: list[int] = []
    make = cuda_ring.Feeds.__init__

    def made(self: Any, device: str, count: int, dtype: torch.dtype) -> None:
        asked.append(count)
        if count > numel:
            raise out_of_memory()
        make(self, device, count, dtype)

    monkeypatch.setattr(cuda_ring.Feeds, "__init__", made)
    return asked


@pytest.mark.parametrize("to", FITS)
def test_halved_feeds_make_the_same_bytes(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = converted(source, to, tmp_path / "out")
    fits = FITS[to]
    asked = limited(monkeypatch, fits)
    assert converted(source, to, tmp_path / "out") == expected
    assert max(asked) > fits >= min(asked)
    at = next(i for i, count in enumerate(asked) if count <= fits)
    assert all(count <= fits for count in asked[at:]), "later tensors begin with what fits"


@pytest.mark.parametrize("to", FITS)
def test_memory_that_runs_out_amid_a_tensor(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written of it is written again; progress counts it once."""
    expected = converted(source, to, tmp_path / "out")
    limited(monkeypatch, FITS[to])
    take, calls = cuda_ring.Feeds.values, []

    def values(self: Any, count: int) -> torch.Tensor:
        calls.append(count)
        if len(calls) in (2, 5):
            raise out_of_memory()
        return take(self, count)

    monkeypatch.setattr(cuda_ring.Feeds, "values", values)
    assert converted(source, to, tmp_path / "out") == expected
    assert len(calls) > 2


def test_the_buffers_of_an_encoder_shrink_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = converted(source, "full-bnb-nf4", tmp_path / "out")
    make, refused = FourBitQuantizer.__init__, []

    def made(self: FourBitQuantizer, *given: Any) -> None:
        make(self, *given)
        if self._chunk > 8192:
            refused.append(self._chunk)
            raise out_of_memory()

    monkeypatch.setattr(FourBitQuantizer, "__init__", made)
    assert converted(source, "full-bnb-nf4", tmp_path / "out") == expected and refused


def test_too_little_memory_is_an_error_that_names_the_options(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = limited(monkeypatch, 0)
    with pytest.raises(RunError, match=r"^a\.q_proj\.weight: cpu ran out of memory") as caught:
        ckptmap.convert(source, tmp_path / "out", to="full-nf4", threads=1)
    assert caught.value.code == "CKM313" and "Tried to allocate 8.00 MiB." in caught.value.message
    assert "max_memory" in caught.value.hint or "--max-memory" in caught.value.hint
    assert len(asked) == MOST_HALVINGS + 1 and not (tmp_path / "out").exists()


def test_the_device_gets_its_memory_back_before_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors of the failed attempt are freed, then torch's cache."""
    module: Any = DeviceModule()
    held: list[weakref.ref[torch.Tensor]] = []
    emptied: list[bool] = []
    module.empty_cache = lambda: emptied.append(held[0]() is None)
    install(monkeypatch, module)
    sizes: list[int] = []

    def attempt() -> str:
        sizes.append(chunk_numel("cuda:0", 1 << 19))
        if len(sizes) == 1:
            buffer = torch.empty(3)
            held.append(weakref.ref(buffer))
            raise out_of_memory()
        return "done"

    gc.disable()
    try:
        size = FeedSize()
        assert with_smaller_feeds(size, "cuda:0", attempt, fqn="w") == "done"
    finally:
        gc.enable()
    assert sizes == [DEVICE_NUMEL, DEVICE_NUMEL // 2] and emptied == [True]
    assert size.halvings == 1 and smaller(8) == 8, "outside, chunks are as before"


def test_bytes_are_reported_once() -> None:
    told: list[int] = []
    report: Callable[[int, str], None] = lambda nbytes, key: told.append(nbytes)  # noqa: E731
    progress = TensorProgress(report)
    for nbytes in (10, 20):
        progress.advance(nbytes, "w")
    progress.again()
    for nbytes in (15, 10, 0, 15):
        progress.advance(nbytes, "w")
    assert told == [10, 20, 0, 0, 0, 10]


def test_the_smallest_feed_is_four_thousand_elements() -> None:
    assert DEVICE_NUMEL >> smaller_feeds.MOST_HALVINGS == 4096
