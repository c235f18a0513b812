"""The live line of a terminal, and the lines of everything else; never a byte of it on stdout."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ckptmap_cli import progress as progress_module
from ckptmap_cli.main import main
from ckptmap_cli.printer import Printer
from ckptmap_cli.progress import LiveLine, rich_line, shown
from rich.console import Console

from ckptmap.execution.phases import ProgressLines
from ckptmap.protocols.progress import COPYING, DOWNLOADING, READING

TERMINAL = -2


def drawn(width: int, phase: str, done: int, total: int, name: str) -> str:
    """The text of the line on a terminal of some width."""
    stream = io.StringIO()
    bars = rich_line(Console(file=stream, force_terminal=True, width=width, no_color=True))
    bars.add_task(phase, total=total or None, completed=done, key=name)
    bars.start()
    bars.stop()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    text = drawn(width, COPYING, 1 << 20, 1 << 30, "model.layers.0.self_attn.q_proj.weight[red]")
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines and all(len(line) <= width for line in lines)
    assert COPYING in lines[-1] and "0%" in lines[-1]
    assert ("q_proj.weight[red]" in lines[-1]) == (width >= 80)
    assert "of 1.0 GiB" in lines[-1]


def test_bytes_that_are_not_counted_show_the_seconds() -> None:
    assert re.search(r"reading headers\s.*0 s", drawn(100, READING, 0, 0, ""))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)


def wait_until_open(live: LiveLine) -> None:
    deadline = time.monotonic() + 30
    while live._bars is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_bars_of_the_hub_stand_alone(at_once: None) -> None:
    """huggingface_hub draws one bar a file: ours makes place."""
    live = LiveLine()
    try:
        live(READING, 0, 0, "")
        wait_until_open(live)
        bars = live._bars
        assert bars is not None and bars.live.is_started
        live(DOWNLOADING, 0, 10, "")
        assert not bars.live.is_started
        live(DOWNLOADING, 10, 10, "file")
        assert not bars.live.is_started
        live(COPYING, 0, 10, "")
        assert bars.live.is_started
        assert bars.tasks[0].description == COPYING
    finally:
        live.close()
    assert not bars.live.is_started and Printer.before_stderr is None


def test_a_short_command_imports_no_rich() -> None:
    code = (
        "import sys; from ckptmap_cli.progress import LiveLine; live = LiveLine();"
        " live('copying', 0, 1, ''); live.close(); assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("term", ["dumb", "", "xterm"])
def test_elsewhere_lines_are_printed(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: term != "xterm", raising=False)
    with shown() as progress:
        assert isinstance(progress, ProgressLines)
    with shown(quiet=True) as progress:
        assert progress is False
    with shown(rank=1) as progress:
        assert progress is False


def on_a_terminal(code: str, line: list[str], folder: Path, stdout: int) -> tuple[bytes, bytes]:
    """What a process draws on its terminal, and what it writes to `stdout`: PIPE, or TERMINAL."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line], stdout=inner if stdout == TERMINAL else stdout,
        stderr=inner, cwd=folder, env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
    )  # fmt: skip
    os.close(inner)
    drawn = b""
    while process.poll() is None or select.select([outer], [], [], 0.2)[0]:
        try:
            drawn += os.read(outer, 1 << 16) if select.select([outer], [], [], 0.1)[0] else b""
        except OSError:  # the terminal is closed
            break
    out, _ = process.communicate(timeout=60)
    os.close(outer)
    assert process.returncode == 0, drawn
    return drawn, out or b""


def test_on_a_terminal(tmp_path: Path) -> None:
    """stderr is a terminal, stdout a pipe: the line is drawn, erased, and no part of the result."""
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "m.pt")
    code = (
        "import ckptmap_cli.progress as p; p.DELAY_S = 0.0\n"
        "from ckptmap.execution import phases; import time\n"
        "begin = phases.Phases.begin\n"
        "phases.Phases.begin = lambda self, *a: (begin(self, *a), time.sleep(0.5))\n"
        "from ckptmap_cli.main import main; raise SystemExit(main())"
    )
    line = ["convert", "m.pt", "o.pt", "--to", "full", "--json"]
    drawn, out = on_a_terminal(code, line, tmp_path, subprocess.PIPE)
    assert out.startswith(b'{"schema": 1') and b"\x1b" not in out
    assert b"reading headers" in drawn and b"copying" in drawn
    assert drawn.endswith(b"\x1b[2K") or b"\x1b[?25h" in drawn  # erased, and the cursor is back


def test_verify_and_diff_are_quiet_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ckptmap.execution.phases.EVERY_S", 0.0)
    assert main(["convert", "m.pt", "o.pt", "--to", "full", "-q"]) == 0
    assert not capsys.readouterr().err
    for line in (["verify", "o.pt"], ["diff", "m.pt", "o.pt", "--values"]):
        assert main(line) == 0
        told = capsys.readouterr()
        assert "reading headers" in told.err and "reading headers" not in told.out
        assert main([*line, "--quiet"]) == 0
        assert not capsys.readouterr().err


SLOW_HEADERS = (
    "import ckptmap, time, sys; import ckptmap_cli.progress as p; p.READING_DELAY_S = 0.0\n"
    "def slow(call):\n"
    "    def run(*a, **k): time.sleep(0.5); import torch; return call(*a, **k)\n"
    "    return run\n"
    "ckptmap.open, ckptmap.plan = slow(ckptmap.open), slow(ckptmap.plan)\n"
    "from ckptmap_cli.main import main; raise SystemExit(main())"
)


@pytest.mark.parametrize("command", ["inspect m.pt", "plan m.pt --to full"])
def test_commands_that_read_headers_show_their_phase(command: str, tmp_path: Path) -> None:
    """`torch` is a file here that takes as long as an import: a stand-in."""
    torch.save({"w": torch.zeros(4)}, tmp_path / "m.pt")
    (tmp_path / "torch.py").write_text("import time; time.sleep(0.5)")
    drawn, _ = on_a_terminal(SLOW_HEADERS, command.split(), tmp_path, TERMINAL)
    assert b"reading headers" in drawn and b"importing torch" in drawn
    after = drawn[drawn.rindex(b"importing torch") :]
    assert b"\x1b[2K" in after and b"w  1x  [4]" in after[after.index(b"\x1b[2K") :]  # erased first


@pytest.mark.parametrize(
    ("line", "pipe"),
    [("inspect m.pt", True), ("inspect m.pt -q", False), ("plan m.pt --to full -q", False)],
)
def test_else_they_show_nothing_of_it(
    line: str, pipe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.zeros(4)}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not pipe, raising=False)
    monkeypatch.setattr(progress_module, "LiveLine", None)  # whoever calls it fails
    assert main(line.split()) == 0
