"""A format in one file outside the package passes the kit, converts, verifies and is found by name."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap import registry
from ckptmap.errors import SourceError
from ckptmap.formats.detect import look
from ckptmap.protocols import Place
from ckptmap.testing import ContainerKit, check_container, registered
from tests.support.paths import EXAMPLES


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    """The example as a module that other processes find too."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("toy_container")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("check", ContainerKit.CHECKS)
def test_conforms(check: str, toy: Any, tmp_path: Path) -> None:
    getattr(ContainerKit(toy.ToyReader(), toy.ToyWriter(), toy.TOY, tmp_path), check)()


def test_conforms_in_one_call(toy: Any, tmp_path: Path) -> None:
    check_container(toy.ToyReader(), toy.ToyWriter(), toy.TOY, tmp_path)


def test_nf4_there_and_back(toy: Any, tmp_path: Path) -> None:
    """An encoding that knows nothing of the format, and a format that knows none."""
    weights = {"fc.weight": torch.randn(64, 128), "fc.bias": torch.randn(64)}
    torch.save(weights, tmp_path / "a.pt")
    with registered(toy.ToyReader(), toy.ToyWriter(), toy.TOY):
        ckptmap.convert(tmp_path / "a.pt", tmp_path / "toy", to="toy-nf4")
        (tmp_path / "toy" / "ckptmap.manifest.json").unlink()
        ckptmap.convert(tmp_path / "toy", tmp_path / "b.pt", to="full-fp32")
        ckptmap.convert(tmp_path / "a.pt", tmp_path / "c.pt", to="full-nf4")
        ckptmap.convert(tmp_path / "c.pt", tmp_path / "d.pt", to="full-fp32")
    one, two = (torch.load(tmp_path / name) for name in ("b.pt", "d.pt"))
    assert one.keys() == two.keys() == weights.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../00000.bin"}, "expected a name like"),
        ({"file": "/etc/passwd"}, "expected a name like"),
        ({"file": "00001.bin"}, "expected 16 bytes, found 8"),
        ({"shape": [-4]}, "shape"),
        ({"shape": [5]}, "expected 20 bytes, found 16"),
        ({"dtype": "object"}, "dtype"),
    ],
)
def test_hostile_index(change: dict[str, Any], message: str, toy: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "b": torch.ones(2)}, tmp_path / "a.pt")
    with registered(toy.ToyReader(), toy.ToyWriter(), toy.TOY):
        ckptmap.convert(tmp_path / "a.pt", tmp_path / "toy", to="toy")
        index = tmp_path / "toy" / "index.json"
        tree = json.loads(index.read_text())
        tree["tensors"]["a"] |= change
        index.write_text(json.dumps(tree))
        with pytest.raises(SourceError, match=message):
            ckptmap.open(tmp_path / "toy")


def test_key_that_occurs_twice_in_the_file(toy: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "a.pt")
    with registered(toy.ToyReader(), toy.ToyWriter(), toy.TOY):
        ckptmap.convert(tmp_path / "a.pt", tmp_path / "toy", to="toy")
        index = tmp_path / "toy" / "index.json"
        index.write_text(index.read_text().replace('"b":', '"a":'))
        with pytest.raises(SourceError, match="a key occurs twice"):
            ckptmap.open(tmp_path / "toy")


def test_the_example_runs(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    program = EXAMPLES / "toy_container.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "a.pt", tmp_path / "toy"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ": 1 tensor, " in done.stdout
    assert sorted(p.name for p in (tmp_path / "toy").iterdir()) == [
        "00000.bin", "ckptmap.manifest.json", "index.json",
    ]  # fmt: skip


def test_entry_points(tmp_path: Path) -> None:
    """Installed beside ckptmap, the format is there for the command line too."""
    info = tmp_path / "site" / "toy_container-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-container\nVersion: 1.0\n")
    lines = ("containers", "ToyReader"), ("writers", "ToyWriter"), ("setups", "TOY")
    (info / "entry_points.txt").write_text(
        "\n".join(f"[ckptmap.{group}]\ntoy = toy_container:{name}\n" for group, name in lines)
    )
    torch.save({"fc.weight": torch.ones(4, 8)}, tmp_path / "a.pt")
    path = os.pathsep.join([str(tmp_path / "site"), str(EXAMPLES)])
    for args in (["convert", tmp_path / "a.pt", tmp_path / "toy", "--to", "toy"],
                 ["verify", tmp_path / "toy"], ["inspect", tmp_path / "toy"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "ckptmap", *map(str, args)],
            capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "fc.weight" in done.stdout and "toy" in done.stdout


def test_installed_formats_are_asked_before_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `registered` puts it: a format that is a zip of its own could not be read else."""

    class OwnZip:
        name = "own-zip"

        def claims(self, place: Place) -> bool:
            return place.head.startswith(b"PK")

    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    monkeypatch.setattr(registry, "_third_party", lambda group: (OwnZip(),))
    found = registry.container_for(look(tmp_path / "a.pt"))
    assert found is not None and found.name == "own-zip"


def test_it_is_registered_for_a_while_only(toy: Any) -> None:
    with registered(toy.TOY):
        assert "toy" in registry.setups()[0].name
    assert not any(setup.name == "toy" for setup in registry.setups())
