"""Who imports whom: one way down the layers, heavy libraries only inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import ckptmap
from ckptmap.core.gc_pause import paused_gc
from tests.support.paths import ROOT

HEAVY = {
    "torch", "torchao", "numpy", "safetensors", "xxhash", "transformers", "huggingface_hub",
    "bitsandbytes", "compressed_tensors", "peft", "accelerate", "rich", "jinja2",
}  # fmt: skip

COLUMN: tuple[tuple[str, ...], ...] = (
    (
        "error_codes", "errors", "known_schemes", "protocols", "registry", "setups", "tensors", "typed_options", "version",
    ),
    ("core",),
    ("storage",),
    ("sharding",),
    ("formats",),
    ("mapping", "quantization"),
    ("optim",),
    ("checkpoint",),
    ("planning",),
    ("execution",),
    ("operations",),
    ("live",),
    ("integrations", "testing"),
    ("pytest_plugin", "ranks"),
)  # fmt: skip
"""The rooms of ckptmap, lowest first; each imports from lower rows only. In the lowest row are the
modules at the root that an extension speaks to."""
ROW = {name: number for number, names in enumerate(COLUMN) for name in names}
NAMELESS = {"checkpoint", "planning", "execution", "operations"}
"""Rooms that ask the registry for a format, a layout or an encoding, and name none."""
ADAPTERS = {"formats", "sharding", "quantization"}
SHARED = {
    "formats.detect", "formats.pickle", "formats.safetensors.file", "formats.safetensors.header",
    "formats.torch_save.foreign_archives", "formats.huggingface.loaded_names",
    "formats.huggingface.tied_embeddings", "formats.huggingface.tied_heads",
    "quantization.activation_statements", "quantization.blockwise", "quantization.linear_weights", "quantization.dense",
    "quantization.stray_parts", "quantization.unread_statements", "quantization.unsupported_schemes", "sharding",
}  # fmt: skip
"""What in the rooms of adapters is no adapter: any room above may import it."""


@cache
def parsed(package: str) -> dict[Path, ast.Module]:
    """The syntax tree of every file of a folder; read once for all tests, not at collection."""
    with paused_gc():  # it would take twice as long as parsing
        return {
            file: ast.parse(file.read_text()) for file in sorted((ROOT / package).rglob("*.py"))
        }


@pytest.fixture(scope="module", autouse=True)
def graph() -> None:
    """Parse 4 MB of modules before the first test: what all of them share is no test's own time."""
    edges()


@cache
def modules() -> dict[str, ast.Module]:
    """Module name below ckptmap -> syntax tree; ckptmap itself is ""."""
    trees = {}
    for file, tree in parsed("ckptmap").items():
        name = ".".join(file.relative_to(ROOT / "ckptmap").with_suffix("").parts)
        trees[name.removesuffix("__init__").removesuffix(".")] = tree
    return trees


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node, at any depth. Expressions, ten times as many, are not entered."""
    for child in _inside(node):
        yield child
        yield from statements(child)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, field, ())


def imports(tree: ast.AST) -> Iterator[str]:
    """Every import of ckptmap's own, as a module name below it: those for annotations, too."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ckptmap":
                    yield alias.name.removeprefix("ckptmap").removeprefix(".")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ckptmap":
            base = (node.module or "").removeprefix("ckptmap").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                yield whole if whole in modules() else base


@cache
def edges() -> frozenset[tuple[str, str]]:
    """(module, another that it imports), for all modules of ckptmap."""
    return frozenset(
        (name, other)
        for name, tree in modules().items()
        for other in imports(tree)
        if other != name
    )


def room(module: str) -> str:
    return module.split(".")[0]


def test_the_graph_is_there() -> None:
    assert len(edges()) > 1000


def test_every_room_has_its_row() -> None:
    assert {room(name) for name in modules()} - {"", "__main__"} == set(ROW)
    assert len(COLUMN) == 14


def test_few_modules_stand_beside_the_rooms() -> None:
    assert len(list((ROOT / "ckptmap").glob("*.py"))) <= 12


def test_every_import_is_seen() -> None:
    """No import is relative, and none is of the command line, which stands above all rooms."""
    for name, tree in modules().items():
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: write the whole name of the module"
            named = _names_of_packages(node)
            assert "ckptmap_cli" not in named, f"{name} imports the command line"


def _names_of_packages(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_imports_go_down() -> None:
    wrong = [
        (name, other)
        for name, other in edges()
        if room(name) in ROW
        and room(name) != room(other)
        and ROW[room(name)] <= ROW.get(room(other), len(COLUMN))
        and not ROW[room(name)] == ROW.get(room(other)) == 0
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    below: dict[str, set[str]] = {name: set() for name in modules()}
    for name, other in edges():
        if name:  # ckptmap itself names its public functions for type checkers
            below[name].add(other)
    while leaves := [name for name, others in below.items() if not others & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"in circles, or above one: {sorted(below)}"


def test_planning_and_execution_import_no_adapter() -> None:
    named = {
        (name, other)
        for name, other in edges()
        if room(name) in NAMELESS
        and room(other) in ADAPTERS
        and not any(f"{other}.".startswith(f"{shared}.") for shared in SHARED)
    }
    assert not named


LIBRARY_FORM = re.compile(r"(?<!u)int8|nf4|bnb|bitsandbytes|params4bit", re.IGNORECASE)
FORM_FILES = {
    "live.quantized": "one file a form of quantized weights",
    "live.optimizer.bnb": "the family of bitsandbytes' optimizers",
    "live.options": "the option `nf4` of `load`",
    "integrations.ddp": "the public name `compare_nf4`",
}


def _words(tree: ast.AST) -> Iterator[str]:
    """Every name and text of a syntax tree, docstrings left out."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docs = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in docs:
            yield from (value for _, value in ast.iter_fields(node) if isinstance(value, str))


def test_live_models_know_no_quantized_form_by_name() -> None:
    """Code that loads and saves live models asks a LiveForm, or a family of optimizers."""
    named = {
        (name, word)
        for name, tree in modules().items()
        if room(name) in ("live", "integrations")
        and not any(f"{name}.".startswith(f"{known}.") for known in FORM_FILES)
        for word in _words(tree)
        if LIBRARY_FORM.search(word)
    }
    assert not named


@pytest.mark.parametrize("package", ["ckptmap", "cli"])
def test_files_and_functions_are_short(package: str) -> None:
    """A file has at most 400 lines, a function at most 60, with its signature and docstring."""
    for file, tree in parsed(package).items():
        assert file.read_text().count("\n") <= 400, file
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{file}:{node.lineno} {node.name}: {length} lines"


def test_no_two_classes_have_one_name() -> None:
    """A public class is found by its name alone: no two modules have one of the same name."""
    at = defaultdict(list)
    for package in ("ckptmap", "cli"):
        for file, tree in parsed(package).items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    at[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in at.items() if len(files) > 1} == {}


@pytest.mark.parametrize("package", ["ckptmap", "cli"])
def test_heavy_libraries_are_imported_inside_functions(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in parsed(package).items()
        for node in _run_by_import(tree)
        for name in _names_of_packages(node) & HEAVY
    ]
    assert not wrong


def _run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but bodies of functions, and what is for types alone."""
    for child in _inside(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_by_import(child)


def test_the_architecture_page_names_what_exists() -> None:
    """Every `room/module` and `room/` in ckptmap/README.md is there, and every room is named."""
    page = (ROOT / "ckptmap" / "README.md").read_text()
    named = set(re.findall(r"(?<![\w/.-])((?:[a-z_0-9]+/)+[a-z_0-9]*)(?![\w.*])", page))
    places = (ROOT, ROOT / "ckptmap", *(ROOT / "ckptmap").iterdir())
    missing = [
        name
        for name in named
        if not any((at / name).exists() or (at / f"{name}.py").exists() for at in places)
    ]
    assert len(named) > 30 and set(missing) <= {"out/"}  # the destination of a run
    assert {name for name in ROW if f"{name}/" not in page and name not in page} == set()


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
    "live/quantized/nf4_torchao.py": "torchao's NF4Tensor, by a table",
    "live/quantized/int8_training.py": "the module of a live tensor's class",
    "typer_app.py": "ckptmap's own commands",
}
"""File -> whose modules it imports by name: never those that a checkpoint names."""


@cache
def called(package: str) -> dict[Path, set[str]]:
    """What each file of a folder calls, as it is written there."""
    return {
        file: {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for file, tree in parsed(package).items()
    }


@pytest.mark.parametrize("package", ["ckptmap", "cli", "mappings"])
def test_nothing_that_a_file_names_is_run_or_imported(package: str) -> None:
    for file, calls in called(package).items():
        assert not calls & FORBIDDEN, (file, calls & FORBIDDEN)
        importing = {name for name in calls if name.split(".")[-1] == "import_module"}
        assert not importing or str(file.relative_to(ROOT / package)) in IMPORTERS, file


@pytest.mark.parametrize("package", ["ckptmap", "cli", "mappings"])
def test_json_is_parsed_in_one_place(package: str) -> None:
    """`core/json_text` bounds what others wrote; the standard library takes anything."""
    parsers = {"json.load", "json.loads", "json.JSONDecoder", "json.decoder.JSONDecoder"}
    for file, tree in parsed(package).items():
        at_home = file == ROOT / "ckptmap" / "core" / "json_text.py"
        assert at_home or not parsers & called(package)[file], file
        taken = {
            alias.name
            for node in statements(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "json"
            for alias in node.names
        }
        assert not taken, f"{file}: import json, not its names"


# ------------------------------------------------------------------ in a process of its own


def imported_by(*commands: Sequence[str]) -> set[str]:
    """Heavy libraries, and those that a command line does not need, that these commands import."""
    program = (
        "import sys\n"
        "from ckptmap_cli.main import main\n"
        f"code = max(main(command) for command in {[*map(list, commands)]!r})\n"
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


def test_inspect_plan_and_help_import_nothing_heavy(source: Path) -> None:
    inspect, plan = ("inspect", str(source)), ("plan", str(source), "--to", "fsdp2-nf4")
    helps = (("--help",), ("plan", "--help"), ("convert", "--help"), ("explain", "CKM101"))
    assert imported_by(inspect, ("--version",), plan, *helps) == set()


@pytest.mark.parametrize(("to", "most"), [("", 160), ("hf", 145), ("fsdp2", 172)])
def test_inspect_imports_few_modules(to: str, most: int, source: Path, tmp_path: Path) -> None:
    """Formats that cannot claim the path, writers, and what reads values are not imported."""
    path = tmp_path / "out" if to else source
    if to:
        ckptmap.convert(source, path, to, world_size=1, sync=False, drop=["step"])
    program = (
        "import sys\n"
        "from ckptmap_cli.main import main\n"
        f"code = main(['inspect', {str(path)!r}])\n"
        "sys.stderr.write('\\n'.join(sys.modules))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    ours = [name for name in done.stderr.split() if name.startswith("ckptmap")]
    assert 100 < len(ours) <= most
    unused = ("meta.reader", "megatron.reader", "rank_files.writer", "frameworks.directory_writers")
    assert not {f"ckptmap.formats.{name}" for name in unused} & {*ours}


def test_report_imports_only_what_renders_it(source: Path, tmp_path: Path) -> None:
    args = ("report", str(source), "--to", "fsdp2-nf4", "-o", str(tmp_path / "report.html"))
    assert imported_by(args) == {"jinja2"}


def test_moves_import_no_torch(source: Path, tmp_path: Path) -> None:
    """One process moves to one setup after the other: none of them imports torch."""
    setups = ("hf", "compiled", "fsdp2")
    moves = [("convert", str(source), str(tmp_path / to), "--to", to, "--quiet") for to in setups]
    assert imported_by(*moves) <= {"xxhash"}


def test_a_cast_does_import_torch(source: Path, tmp_path: Path) -> None:
    """The probe itself: it does see torch where torch is."""
    args = ("convert", str(source), str(tmp_path / "out"), "--to", "full-bf16", "--quiet")
    assert "torch" in imported_by(args)
