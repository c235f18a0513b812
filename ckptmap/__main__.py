"""`python -m ckptmap`: the command line, installed or from a bare clone."""

from __future__ import annotations

import sys
from importlib import import_module, util
from pathlib import Path

PACKAGE = "ckptmap_cli"


def _from_clone() -> None:
    """In a clone the command line is the directory `cli` beside this package."""
    folder = Path(__file__).resolve().parent.parent / "cli"
    spec = util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        sys.exit("error: ckptmap_cli is not installed\n  hint: pip install ckptmap")
    module = util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def main() -> None:
    if util.find_spec(PACKAGE) is None:
        _from_clone()
    import_module(f"{PACKAGE}.entry_point").run()


if __name__ == "__main__":
    main()
