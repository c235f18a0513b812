"""Hints that name an option or a command work when they are pasted: on the command that printed them, or before it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import SourceError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two dicts, another of one, and the output of a conversion with a damaged manifest."""
    monkeypatch.chdir(tmp_path)
    torch.save({"gen": {"w": torch.ones(2)}, "disc": {"w": torch.zeros(2)}}, "two models.pt")
    torch.save({"w": torch.ones(2)}, "one.pt")


def refused(capsys: pytest.CaptureFixture[str], *command: str, code: str) -> str:
    """Return the hint of a command that is refused with this code."""
    capsys.readouterr()
    assert main([*command]) != 0
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert f"error[{code}]" in error
    return hint.partition("hint: ")[2]


BESIDE = {
    "diff": ("diff", "one.pt", "two models.pt"),
    "--as": ("plan", "one.pt", "--as", "two models.pt"),
    "--names-like": ("plan", "one.pt", "--to", "full", "--names-like", "two models.pt"),
    "--base": ("plan", "one.pt", "--to", "full", "--base", "two models.pt"),
    "report": ("report", "one.pt", "--against", "two models.pt"),
    "mappings": ("mappings", "new", "--from", "one.pt", "--to", "two models.pt"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_checkpoint_beside_the_source_that_needs_an_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--source-root` is of the source: of the other checkpoint, a model is made first."""
    hint = refused(capsys, *BESIDE[name], code="CKM205")
    pasted = shlex.split(hint.partition(": ckptmap ")[2])
    assert pasted == ["convert", "two models.pt", "NEW", "--to", "full", "--source-root", "gen"]
    assert main(pasted) == 0
    assert main(["diff", "one.pt", "NEW", "--values"]) in (0, 1)


def test_in_python_it_is_a_command_line_too() -> None:
    with pytest.raises(SourceError) as told:
        ckptmap.diff("one.pt", "two models.pt")
    assert told.value.hint.endswith("convert 'two models.pt' NEW --to full --source-root gen")


def test_the_source_itself_takes_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    hint = refused(capsys, "diff", "two models.pt", "one.pt", code="CKM205")
    root = re.search(r"--source-root (\S+),", hint)
    assert root is not None
    assert main(["diff", "two models.pt", "one.pt", "--source-root", root[1]]) in (0, 1)


def test_a_source_with_a_damaged_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "one.pt", "out", "--to", "hf"]) == 0
    Path("out/ckptmap.manifest.json").write_text("{")
    again = ("convert", "out", "again", "--to", "full")
    before = sorted(path.name for path in Path().iterdir())
    hint = refused(capsys, *again, code="CKM403")
    assert sorted(path.name for path in Path().iterdir()) == before, "a refused run leaves no work"
    option = re.search(r"add (--check-source none) ", hint)
    assert option is not None
    assert main([*again, *option[1].split()]) == 0


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_tensor_parallel_plan_of_a_config(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers' `base_model_tp_plan` names modules without the prefix that weights on disk have."""
    torch.save({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, "m.pt")
    plan = Path(f"plan.{form}")
    command = ("plan", "m.pt", "--to", "fsdp2", "--mesh", "tp=2", "--tp-plan", str(plan))
    write = {"toml": lambda pattern: f'"{pattern}" = "colwise"',
             "json": lambda pattern: json.dumps({pattern: "colwise"})}[form]  # fmt: skip
    plan.write_text("1")
    line = refused(capsys, *command, code="CKM201").partition(" like ")[2]
    plan.write_text(line)
    assert main(command) == 0, "the example itself is a plan"
    plan.write_text(write("layers.*.mlp.up_proj"))
    meant = re.match(r"did you mean '(.*?)'", refused(capsys, *command, code="CKM206"))
    assert meant is not None
    plan.write_text(write(meant[1]))
    assert main(command) == 0


def test_a_mapping_file_of_another_form(capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.toml").write_text("x = 1")
    hint = refused(capsys, "mappings", "check", "m.toml", code="CKM601")
    capsys.readouterr()
    assert main(shlex.split(hint.partition(": ckptmap ")[2])) == 0
    Path("m.toml").write_text(capsys.readouterr().out)
    assert main(["mappings", "check", "m.toml"]) == 0
