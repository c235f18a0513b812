"""The wheel, the editable install and a bare clone: each runs `ckptmap`, without torch too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.support.paths import ROOT

SOURCES = ("ckptmap", "cli", "mappings", "pyproject.toml", "README.md", "LICENSE")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def ran(*command: object, cwd: Path, **environment: str) -> str:
    """stdout of a command that must succeed, with no Python settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the repository and not installed; building here leaves the repository alone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the setuptools that is here, so that no network is asked."""
    out = tmp_path_factory.mktemp("wheel")
    ran(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", out, clone, cwd=out,
    )  # fmt: skip
    (found,) = out.glob("ckptmap-*.whl")
    return found


def closure(name: str) -> Iterator[metadata.Distribution]:
    """A distribution of this environment and all that it needs."""
    seen: dict[str, metadata.Distribution] = {}
    todo = [name]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen[name] = metadata.distribution(name)
        for line in seen[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    yield from seen.values()


def with_typer(folder: Path) -> Path:
    """A Python that has typer and what it needs, copied from here, and nothing else."""
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in closure("typer"):
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_typer(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Another such Python, with the wheel and none of the dependencies that it asks for."""
    folder = with_typer(tmp_path_factory.mktemp("installed"))
    ran(
        sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet",
        "--no-deps", "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model.pt"
    torch.save({"model": {"fc.weight": torch.ones(4, 8)}, "step": 3}, path)
    return path


def test_the_bare_python_has_no_torch(bare: Path) -> None:
    program = "import importlib.util as u; print([n for n in ('torch', 'xxhash', 'ckptmap') if u.find_spec(n)])"
    assert ran(bare / "bin/python", "-c", program, cwd=bare) == "[]\n"


def test_the_wheel_has_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_runs_without_torch(installed: Path, checkpoint: Path) -> None:
    ckptmap = installed / "bin/ckptmap"
    assert "Convert PyTorch checkpoints" in ran(ckptmap, "--help", cwd=installed)
    document = json.loads(ran(ckptmap, "inspect", checkpoint, "--json", cwd=installed))
    assert document["tensors"][0]["shape"] == [4, 8] and document["extra"] == {"step": 3}
    assert "fc.weight" in ran(ckptmap, "plan", checkpoint, "--to", "fsdp2-bf16", cwd=installed)
    assert "CKM202" in ran(ckptmap, "explain", cwd=installed)


def test_doctor_says_that_torch_is_missing(installed: Path) -> None:
    done = subprocess.run(
        [installed / "bin/ckptmap", "doctor"], cwd=installed, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "torch is not installed" in done.stdout


def test_a_bare_clone_runs_as_a_module(bare: Path, clone: Path, checkpoint: Path) -> None:
    python = bare / "bin/python"
    text = ran(python, "-m", "ckptmap", "inspect", checkpoint, cwd=clone, PYTHONPATH=str(clone))
    assert "fc.weight" in text


def test_an_installed_ckptmap_runs_from_anywhere(tmp_path: Path, checkpoint: Path) -> None:
    assert "fc.weight" in ran(sys.executable, "-m", "ckptmap", "inspect", checkpoint, cwd=tmp_path)


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    places = {"ckptmap": "ckptmap", "cli": "ckptmap_cli", "mappings": "ckptmap_mappings"}
    for folder, package in places.items():
        for pattern in ("*.py", "*.toml"):
            for file in (ROOT / folder).rglob(pattern):
                assert f"{package}/{file.relative_to(ROOT / folder).as_posix()}" in held
    assert "ckptmap/py.typed" in held


def test_classifiers_name_the_pythons_that_are_tested() -> None:
    """These tests run on one of them, and the lowest is the one that is required and checked against."""
    about = PROJECT["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [
        int(text.removeprefix(prefix))
        for text in about["classifiers"]
        if re.fullmatch(prefix.replace(".", r"\.") + r"\d+", text)
    ]
    assert sys.version_info[:2] in {(3, minor) for minor in named}
    assert about["requires-python"] == f">=3.{min(named)}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{min(named)}"


def test_the_readme_states_the_required_versions() -> None:
    about = PROJECT["project"]
    (torch_,) = (r for r in map(Requirement, about["dependencies"]) if r.name == "torch")
    assert "numpy" in {Requirement(text).name for text in about["dependencies"]}
    python, least = (
        text.removeprefix(">=") for text in (about["requires-python"], str(torch_.specifier))
    )
    page = (ROOT / "README.md").read_text()
    assert f"Python {python} or newer, torch {least} or newer (tests: " in page
    tested = page.partition("or newer (tests: ")[2].partition(")")[0]
    assert torch.__version__.startswith(f"{tested}.")


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_people_look_for(name: str) -> None:
    assert len((ROOT / name).read_text()) > 1000


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        name.lower().replace("_", "-"): version
        for name, _, version in (line.partition("==") for line in lines if line[:1] != "#")
    }
    assert "+" not in pins["torch"], "a local version names one build"
    asked = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["dev"],
    ]
    for requirement in map(Requirement, asked):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name], prereleases=True), requirement
