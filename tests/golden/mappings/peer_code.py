"""Runs single files of a peer's package where the package as a whole cannot be imported.

Converters are plain functions of tensors; what surrounds them needs GPUs' libraries or old
versions of torch. Here the files that convert are the peer's own, and every other module of the
package is an inert one whose attributes are empty classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class _Inert(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Inert(name, (), {})
        setattr(cls, name, made)
        return made


class _InertModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Inert(name, (), {})
        setattr(self, name, made)
        return made


class _InertLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Finder(MetaPathFinder):
    def __init__(self, code: Path, package: str, real: Sequence[str]) -> None:
        self.code, self.package, self.real = code, package, set(real)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(self.package + "."):
            return None
        file = self.code / (fullname.replace(".", "/") + ".py")
        if fullname in self.real and file.is_file():
            return spec_from_file_location(fullname, file)
        return ModuleSpec(fullname, _InertLoader(), is_package=True)


def peer_module(code: Path, name: str, real: Sequence[str] = ()) -> ModuleType:
    """Module `name` of the package below the folder `code`, run with `real` and inert others."""
    package = name.partition(".")[0]
    for loaded in [key for key in sys.modules if key.partition(".")[0] == package]:
        del sys.modules[loaded]
    finder = _Finder(code, package, [name, *real])
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
