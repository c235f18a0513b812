"""What people look for around the code: decisions, hooks before a commit, and lists of public names."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PUBLIC = [
    "ckptmap",
    *[f"ckptmap.{name}" for name in ("error_codes", "errors", "ranks", "registry", "setups")],
    *[f"ckptmap.{name}" for name in ("integrations", "protocols", "tensors", "testing", "version")],
    *[f"ckptmap.integrations.{name}" for name in ("accelerate", "dcp", "ddp", "lightning")],
    "ckptmap.integrations.transformers",
    "ckptmap.live.state_dict.hooks",
]
"""What users and extensions import: `ckptmap.hooks` is the last of them."""


def pins() -> dict[str, str]:
    """Package -> version, as constraints.txt pins it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line[:1] not in ("#", ""))


def test_five_decisions_are_recorded() -> None:
    assert len(DECISIONS) >= 5
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [int(file.name[:4]) for file in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    assert all(f"({file.name})" in index for file in DECISIONS)


@pytest.mark.parametrize("file", DECISIONS, ids=lambda file: file.stem)
def test_a_decision_has_a_context_and_consequences(file: Path) -> None:
    head, *sections = re.split(r"^## ", file.read_text(), flags=re.MULTILINE)
    assert re.fullmatch(rf"# {file.name[:4]}: \S.+\n\n", head)
    titles = [section.partition("\n")[0] for section in sections]
    assert titles == ["Context", "Decision", "Consequences"]
    assert all(len(section.partition("\n")[2].strip()) > 100 for section in sections)


def test_hooks_run_what_lint_runs() -> None:
    """The same tools of the same environment, whose versions constraints.txt pins."""
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = repo["hooks"]
    assert repo["repo"] == "local" and {hook["language"] for hook in hooks} == {"system"}
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    lint = re.findall(r"^\t\$\(BIN\)/(\w+(?: [a-z]+)?)", recipe, flags=re.MULTILINE)
    entries = [hook["entry"].removeprefix(".venv/bin/").partition(" --")[0] for hook in hooks]
    assert entries == lint == ["ruff check", "ruff format", "mypy"]
    for tool in {entry.split()[0] for entry in entries}:
        assert version(tool) == pins()[tool]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_listed_and_exist(name: str) -> None:
    module = importlib.import_module(name)
    listed = module.__all__
    assert listed and list(listed) == sorted({*listed}, key=_by_kind)
    assert [entry for entry in listed if not hasattr(module, entry)] == []


def _by_kind(name: str) -> tuple[int, str]:
    """Constants, classes, functions: the order that ruff keeps lists in."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name
