"""Who imports whom: one way down the layers, heavy libraries only inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "torchao", "numpy", "safetensors", "xxhash", "transformers", "huggingface_hub"}

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "codes",
        "crc",
        "errors",
        "loaded_names",
        "manifest_form",
        "tensors",
        "tied_heads",
        "version",
        "wording",
    ),
    ("shortage",),
    ("arguments", "disk", "leaves", "protocols", "selection"),
    ("at_rest", "geometry", "meta_model", "places", "ranks", "remote"),
    ("collapse", "foreign", "fourbit", "lazy", "like", "wire"),
    ("blocks", "compare", "containers", "layouts", "lora", "mapping", "traversal"),
    ("encodings", "extra_state", "optim"),
    ("groups", "registry", "roots"),
    ("directories", "grouping", "members", "setups"),
    ("flat_units", "leaf_values"),
    ("checkpoint",),
    ("adapters", "beside", "translation"),
    ("difference", "planning"),
    ("manifest", "running"),
    ("structure",),
    ("verification",),
    ("replacing",),
    ("conversion", "resume"),
    ("hub", "integrations", "merging", "testing"),
    ("pytest_plugin",),
)
"""Modules and rooms of ckptmap, lowest first; each imports from lower layers only."""
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
ADAPTERS = {"containers", "encodings", "layouts"}
UPWARDS = {("planning.plans", "conversion")}
"""`Plan.execute` is a shorthand for what stands above it; the import is inside the method."""
NAMED = {
    ("groups", "encodings.dense"),  # what a tensor is that no scheme has claimed
    ("resume.fixes", "encodings.nf4"),
    ("resume.fixes", "encodings.nf4_live"),
    ("resume.bnb_live", "encodings.nf4_codes"),
    ("resume.in_place", "encodings.nf4_live"),
    ("resume.bnb_live", "encodings.nf4_encoding"),
    ("resume.replicas", "encodings.nf4_live"),
    ("resume.nf4_live", "encodings.nf4"),
    ("resume.nf4_live", "encodings.nf4_encoding"),
    ("resume.nf4_live", "encodings.nf4_live"),
}
"""The only places outside an adapter that name one: all others ask the registry."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted((ROOT / "ckptmap").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT / "ckptmap").with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(file.read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Every import of ckptmap's own, as module names below it, save those for annotations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ckptmap":
            base = (node.module or "").removeprefix("ckptmap").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                file = ROOT / "ckptmap" / (whole.replace(".", "/") + ".py")
                yield whole if file.exists() else base
        yield from imports(node)


EDGES = [(name, other) for name, tree in modules() for other in imports(tree) if other]


def test_the_graph_is_there() -> None:
    assert len(EDGES) > 50


def test_every_module_has_a_layer() -> None:
    rooms = {name.split(".")[0] for name, _ in modules()} - {"__init__", "__main__"}
    assert rooms == set(LAYER)


def test_imports_go_down() -> None:
    wrong = [
        (name, other)
        for name, other in EDGES
        if (room := name.split(".")[0]) != (below := other.split(".")[0])
        and room in LAYER
        and LAYER[room] <= LAYER[below]
        and (name, other) not in UPWARDS
    ]
    assert not wrong


def test_adapters_know_only_themselves() -> None:
    """A format may be several files that begin alike; another format's it never imports."""
    wrong = [
        (name, other)
        for name, other in EDGES
        if name.split(".")[0] in ADAPTERS and other.split(".")[0] in ADAPTERS
        if name.split("_")[0] != other.split("_")[0]
    ]
    assert not wrong


def test_adapters_are_asked_for_by_the_registry() -> None:
    named = {
        (name, other)
        for name, other in EDGES
        if other.split(".")[0] in ADAPTERS and name.split(".")[0] not in ADAPTERS
    }
    assert named <= NAMED


@pytest.mark.parametrize("package", ["ckptmap", "cli"])
def test_heavy_libraries_are_imported_inside_functions(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        for name in _top_level(node)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def _top_level(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


# ------------------------------------------------------------------ what is never called

FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "torch.load", "torch.jit.load", "torch.hub.load", "marshal.load", "marshal.loads",
    "shelve.open", "yaml.load", "os.system", "os.popen", "numpy.load", "np.load", "runpy.run_path",
}  # fmt: skip
"""They run, or import, what a file names. Our own unpickler is a subclass that finds no class."""
IMPORTERS = {
    "__main__.py": "ckptmap's own command line",
    "__init__.py": "ckptmap's own modules, by a table",
    "registry.py": "ckptmap's own adapters, by a table",
    "integrations/__init__.py": "ckptmap's own modules",
    "encodings/nf4_live.py": "torchao's NF4Tensor, by a table",
    "resume/int8_trained.py": "the module of a live tensor's class",
    "app.py": "ckptmap's own commands",
}
"""File -> whose modules it imports by name: never those that a checkpoint names."""


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("package", ["ckptmap", "cli", "mappings"])
def test_nothing_that_a_file_names_is_run_or_imported(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        called = set(_calls(ast.parse(file.read_text())))
        assert not called & FORBIDDEN, (file, called & FORBIDDEN)
        importing = {name for name in called if name.split(".")[-1] == "import_module"}
        assert not importing or str(file.relative_to(ROOT / package)) in IMPORTERS, file


# ------------------------------------------------------------------ in a process of its own


def imported_by(*args: str) -> set[str]:
    """Heavy libraries, and those that a command line does not need, that a run has imported."""
    program = (
        "import sys\n"
        "from ckptmap_cli.main import main\n"
        f"code = main({list(args)!r})\n"
        "sys.stderr.write('\\n'.join(['', *sys.modules]))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    wanted = HEAVY | {"rich", "asyncio", "multiprocessing"}
    return wanted & set(done.stderr.splitlines())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imports") / "model.pt"
    weights = {f"layers.{i}.fc.weight": torch.randn(64, 64) for i in range(3)}
    torch.save({"model": weights, "step": 7}, path)
    return path


def test_inspect_imports_nothing_heavy(source: Path) -> None:
    assert imported_by("inspect", str(source)) == set()


def test_plan_imports_nothing_heavy(source: Path) -> None:
    assert imported_by("plan", str(source), "--to", "fsdp2-nf4") == set()


@pytest.mark.parametrize("to", ["hf", "compiled", "fsdp2"])
def test_moves_import_no_torch(source: Path, tmp_path: Path, to: str) -> None:
    found = imported_by("convert", str(source), str(tmp_path / "out"), "--to", to, "--quiet")
    assert found <= {"xxhash"}


def test_a_cast_does_import_torch(source: Path, tmp_path: Path) -> None:
    """The probe itself: it does see torch where torch is."""
    args = ("convert", str(source), str(tmp_path / "out"), "--to", "full-bf16", "--quiet")
    assert "torch" in imported_by(*args)
