"""Every command and snippet of the documentation is run, and prints what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmap import registry
from tests.docs.given import GIVEN, Writers, hub_model
from tests.docs.page import Runner, blocks
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PROSE = ("decisions", "explanations", "reference", "_build")
"""Folders of pages without commands to run: the reference is compared with the code instead."""
RANKS = {
    "tutorial.md",
    "recipes/accelerate-to-hf.md",
    "recipes/another-world-size.md",
    "recipes/rank-files-to-hf.md",
    "recipes/several-ranks.md",
}
"""Pages that start ranks, or begin with what several ranks wrote."""
LINK = re.compile(r"\]\(([^)#\s]+)")


def _run(
    page: str, folder: Path, writers: Callable[[], Writers], patch: pytest.MonkeyPatch
) -> None:
    for name, make in GIVEN[page].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name, writers)
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    runner = Runner()
    for block in blocks((DOCS / page).read_text()):
        runner.run(block)
    sys.modules.pop("train", None)


def _no_ranks() -> Writers:
    raise AssertionError("this page begins with files of several ranks: list it in RANKS")


@pytest.mark.parametrize("page", sorted({*GIVEN} - RANKS - {"recipes/hub.md"}))
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(page, tmp_path, _no_ranks, monkeypatch)


@pytest.mark.ranks
@pytest.mark.parametrize("page", sorted(RANKS))
def test_page_of_several_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def writers() -> Writers:
        return Writers(
            request.getfixturevalue("corpus"), request.getfixturevalue("framework_directories")
        )

    _run(page, tmp_path, writers, monkeypatch)


def test_page_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    """Against the Hub of the tests, on loopback."""
    hub_model(tmp_path / "base", _no_ranks)
    hub.add("org/base", tmp_path / "base")
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    _run("recipes/hub.md", tmp_path, _no_ranks, monkeypatch)


def test_every_page_with_commands_is_run() -> None:
    pages = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")}
    run = {
        page
        for page in pages
        if not page.startswith(PROSE) and "```console" in (DOCS / page).read_text()
    }
    assert run == {*GIVEN}


def test_the_generated_pages_are_as_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tables_name_every_setup_and_encoding() -> None:
    """By the registry: what is not in a table would not be found by a reader."""
    setups = (DOCS / "reference" / "setups.md").read_text()
    listed = re.findall(r"^\| `([a-z][a-z0-9-]*)` \|", setups, re.MULTILINE)
    assert sorted(listed) == sorted(setup.name for setup in registry.setups())
    encodings = (DOCS / "reference" / "encodings.md").read_text()
    rows = "\n".join(re.findall(r"^\| (`-[^|]+)\|", encodings, re.MULTILINE))
    suffixes = {scheme.suffix for scheme in registry.schemes() if scheme.suffix}
    assert set(re.findall(r"`-([a-z0-9_-]+)`", rows)) == suffixes - {"bf16", "fp32", "fp16"}


def test_the_page_for_models_names_everything() -> None:
    """Commands, public names, setups and pages: `llms.txt` is all that a program may read."""
    from ckptmap_cli.typer_app import COMMANDS

    import ckptmap

    text = (DOCS / "llms.txt").read_text()
    names = {*dir(ckptmap)} - {
        "Checkpoint",
        "CkptmapError",
        "LazyTensor",
        "Plan",
        "Report",
        "__version__",
    }
    expected = {*COMMANDS, *names, *(setup.name for setup in registry.setups())}
    assert expected <= {*re.findall(r"[\w-]+", text)}
    folders = ("recipes", "explanations", "reference")
    pages = {
        file.relative_to(DOCS).as_posix() for name in folders for file in (DOCS / name).glob("*.md")
    }
    listed = {*LINK.findall(text)}
    assert {page for page in pages if not page.endswith("index.md")} <= listed


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/llms.txt",
        *(
            file.relative_to(ROOT).as_posix()
            for file in sorted(DOCS.rglob("*.md"))
            if "_build" not in file.parts
        ),
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in LINK.findall(file.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (file.parent / target).exists(), f"{page}: {target}"
