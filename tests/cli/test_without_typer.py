"""Command lines that need no typer: they print what typer's way prints, and import less."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main
from ckptmap_cli.without_typer import run_without_typer
from safetensors.torch import save_file

from tests.support.paths import ROOT

LINES = {
    "inspect": ["inspect", "SRC"],
    "inspect --json": ["inspect", "--json", "SRC"],
    "plan": ["plan", "SRC", "--to", "full-bf16"],
    "plan, --to first": ["plan", "--to", "hf-nf4", "SRC", "--json"],
    "plan with a wrong setup": ["plan", "SRC", "--to", "hf-b16"],
    "plan of nothing": ["plan", "/no/such/place", "--to", "hf"],
    "plan that leaves a key open": ["plan", "OPEN", "--to", "full"],
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    source, undecided = tmp_path / "model.safetensors", tmp_path / "open.pt"
    save_file({"fc.weight": torch.ones(64, 64), "norm.weight": torch.ones(64)}, source)
    torch.save({"model": {"fc.weight": torch.ones(4, 8)}, "made by": Path("x")}, undecided)
    return {"SRC": str(source), "OPEN": str(undecided)}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_prints_what_typer_prints(
    line: list[str],
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = [places.get(arg, arg) for arg in line]
    without = (main(args), capsys.readouterr())
    monkeypatch.setattr("ckptmap_cli.main.run_without_typer", lambda args: None)
    assert (main(args), capsys.readouterr()) == without
    assert without[1] != ("", "")


@pytest.mark.parametrize(
    "line", ["inspect a b", "inspect", "inspect --shards a", "inspect -- a", "plan a", "plan a --to", "plan --to a",
             "plan a --to --json", "plan a --to x --to y", "plan a --to=x", "plan a --to x -o f", "convert a --to x",
             "--to x", "", "plan a --to -x"],
)  # fmt: skip
def test_leaves_other_lines_to_typer(line: str) -> None:
    assert run_without_typer(line.split()) is None


@pytest.mark.parametrize("line", [LINES["inspect"], LINES["plan"]], ids=["inspect", "plan"])
def test_imports_neither_typer_nor_pydantic(line: list[str], places: dict[str, str]) -> None:
    program = (
        "import sys; from ckptmap_cli.main import main; code = main(sys.argv[1:]);"
        "print(*sorted({'typer', 'pydantic', 'click'} & {*sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    args = [places.get(arg, arg) for arg in line]
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "\n")


def test_ctrl_c_is_told(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptmap.open", interrupted)
    assert main(["inspect", places["SRC"]]) == 130
    assert capsys.readouterr().err == "error[CKM307]: interrupted\n"


def test_what_a_library_logs_is_escaped(places: dict[str, str]) -> None:
    before = logging.getLogRecordFactory()
    try:
        logging.setLogRecordFactory(logging.LogRecord)
        assert main(["inspect", places["SRC"]]) == 0
        record = logging.makeLogRecord({"msg": "a key %s", "args": ("\x1b[2J",)})
    finally:
        logging.setLogRecordFactory(before)
    assert record.getMessage() == r"a key \x1b[2J"
