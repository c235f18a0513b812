"""Progress: every verb tells its phases in order, counts the bytes of each, and logs what it does."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import ArgumentError
from ckptmap.execution import phases as phases_module
from ckptmap.execution.phases import Phases, ProgressLines, line
from ckptmap.protocols.progress import (
    COMPARING,
    CONVERTING,
    COPYING,
    HASHING,
    PHASES,
    PROVING,
    READING,
    SYNCING,
)
from tests.support.merge_cases import llama, saved


class Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int, str]] = []

    def __call__(self, phase: str, done: int, total: int, name: str, /) -> None:
        self.events.append((phase, done, total, name))

    @property
    def phases(self) -> list[str]:
        return [phase for phase, _ in itertools.groupby(event[0] for event in self.events)]

    def last(self, phase: str) -> tuple[str, int, int, str]:
        return [event for event in self.events if event[0] == phase][-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("phases") / "model.pt"
    torch.save({f"layers.{i}.w": torch.full((64, 64), float(i)) for i in range(4)}, path)
    return path


NBYTES = 4 * 64 * 64 * 4
CONVERT = [READING, COPYING, HASHING, PROVING, SYNCING]


def test_a_conversion(source: Path, tmp_path: Path) -> None:
    told = Told()
    ckptmap.convert(source, tmp_path / "o.pt", "full", progress=told)
    assert told.phases == CONVERT
    assert told.last(COPYING)[1:3] == (NBYTES, NBYTES)
    assert all(phase in PHASES for phase in told.phases)
    told = Told()
    ckptmap.plan(source, "full-bf16").execute(tmp_path / "bf16.pt", progress=told)
    assert told.phases == [CONVERTING, *CONVERT[2:]]


def test_verify(source: Path, tmp_path: Path) -> None:
    ckptmap.convert(source, tmp_path / "o", "hf", digest="sha256")
    told = Told()
    assert ckptmap.verify(tmp_path / "o", against=source, progress=told).ok
    assert told.phases == [READING, HASHING, COMPARING]
    weights = (tmp_path / "o" / "model.safetensors").stat().st_size
    assert told.last(HASHING)[1:3] == (NBYTES + weights, NBYTES + weights)
    assert told.last(COMPARING)[1:3] == (NBYTES, NBYTES)


def test_diff(source: Path) -> None:
    told = Told()
    ckptmap.diff(source, source, values=True, progress=told)
    assert told.phases == [READING, COMPARING]
    assert told.last(COMPARING) == (COMPARING, NBYTES, NBYTES, "layers.3.w")
    told = Told()
    ckptmap.diff(source, source, progress=told)
    assert told.phases == [READING]


def test_merge(tmp_path: Path) -> None:
    saved(tmp_path, llama(), target_modules=["q_proj"])
    told = Told()
    ckptmap.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", progress=told)
    assert told.phases[0] == READING and told.phases[1:] == [CONVERTING, *CONVERT[2:]]


def test_torch_is_told_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    phases = Phases(told)
    phases.begin(COPYING, 10)
    phases.mention_torch()  # it is there already
    monkeypatch.delitem(sys.modules, "torch")
    phases.mention_torch()
    phases.advance(3, "a")
    assert told.events == [
        (COPYING, 0, 10, ""), ("importing torch", 0, 0, ""), (COPYING, 3, 10, "a"),
    ]  # fmt: skip


def test_a_function_of_bytes_and_key_is_deprecated(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    old: Any = lambda nbytes, key: seen.append((nbytes, key))  # noqa: E731
    with pytest.warns(DeprecationWarning, match=r"expected one of \(phase, done, total, name\)"):
        ckptmap.convert(source, tmp_path / "o.pt", "full", progress=old)
    assert sum(nbytes for nbytes, _ in seen) == NBYTES
    assert {key for _, key in seen} <= {f"layers.{i}.w" for i in range(4)}


WRONG: list[Callable[..., object]] = [lambda nbytes: None, lambda a, b, c: None]


@pytest.mark.parametrize("progress", WRONG)
def test_another_function_is_refused(progress: Any, source: Path, tmp_path: Path) -> None:
    for call in (
        lambda: ckptmap.convert(source, tmp_path / "o.pt", "full", progress=progress),
        lambda: ckptmap.diff(source, source, progress=progress),
        lambda: ckptmap.verify(source, progress=progress),
        lambda: ckptmap.pull("hf://a/b", tmp_path, progress=progress),
        lambda: ckptmap.push(source, "a/b", progress=progress),
    ):
        with pytest.raises(ArgumentError, match=r"progress=.*expected a function of") as refused:
            call()
        assert refused.value.code == "CKM516"


def test_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = ProgressLines()
    for second in range(1, 26):
        now = 100.0 + second
        lines(COPYING, second << 20, 25 << 20, f"a\x1b[2J{second}")
    lines(READING, 0, 0, "")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "copying  40%  10.0 MiB of 25.0 MiB  1.1 MiB/s  14 s left  a\\x1b[2J10\n"
        "copying  80%  20.0 MiB of 25.0 MiB  1.1 MiB/s  5 s left  a\\x1b[2J20\n"
    )


def test_a_line_without_a_total() -> None:
    assert line(READING, 0, 0, "", 3.0) == "reading headers"


def test_true_prints_on_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(
        phases_module, "ProgressLines", lambda: lambda *told: printed.append(told[0])
    )
    for rank in range(3):
        Phases.on_rank(rank, True).begin(READING)
    assert printed == [READING]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages of the logger `ckptmap`, as a program gets them that sets logging up."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("ckptmap"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_the_log(source: Path, tmp_path: Path, logged: list[str]) -> None:
    out = tmp_path / "o.pt"
    ckptmap.convert(source, out, "full")
    ckptmap.convert(source, out, "full")
    assert any(text.startswith(f"write {out}: full of {source}, plan ") for text in logged)
    assert [text for text in logged if text in PHASES][: len(CONVERT)] == CONVERT
    assert f"published {out}" in logged
    assert f"{out}: was complete already" in logged


def test_a_continued_run_is_logged(source: Path, tmp_path: Path, logged: list[str]) -> None:
    def stop(phase: str, done: int, total: int, name: str, /) -> None:
        if phase == PROVING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptmap.convert(source, tmp_path / "o", "hf", progress=stop)
    ckptmap.convert(source, tmp_path / "o", "hf")
    assert "continues an earlier run: 1 units are in its journal" in logged


def test_nothing_is_printed_unless_logging_is_set_up() -> None:
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("ckptmap").handlers)
