"""The pytest plugin that collects mapping files as tests.

    [pytest]
    ckptmap_mappings = mappings/*.toml

Each check of `MappingKit` is one test: `mine.toml::round_trip[bfloat16]`. Without the setting the plugin
does nothing and imports nothing of ckptmap.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ckptmap.testing.mappings import MappingKit

SETTING = "ckptmap_mappings"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(SETTING, "globs of mapping files that are collected as tests", "args", [])


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    globs = parent.config.getini(SETTING)
    if file_path.suffix != ".toml" or file_path.name.endswith(".refused.toml") or not globs:
        return None
    inside = file_path.is_relative_to(parent.config.rootpath)
    place = file_path.relative_to(parent.config.rootpath) if inside else file_path
    if any(place.match(glob) for glob in globs):
        return MappingFile.from_parent(parent, path=file_path)
    return None


class MappingFile(pytest.File):
    """One mapping file, collected as a test per check."""

    def collect(self) -> Iterator[pytest.Item]:
        from ckptmap.testing.mappings import MappingKit

        kit = MappingKit(self.path)
        for check, arguments in kit.checks():
            name = check + (f"[{','.join(arguments)}]" if arguments else "")
            yield MappingItem.from_parent(
                self, name=name, kit=kit, check=check, arguments=arguments
            )


class MappingItem(pytest.Item):
    """One check of a mapping file."""

    def __init__(
        self, *, kit: MappingKit, check: str, arguments: tuple[str, ...], **rest: object
    ) -> None:
        super().__init__(**rest)  # type: ignore[arg-type]
        self.kit, self.check, self.arguments = kit, check, arguments

    def runtest(self) -> None:
        self.kit.check(self.check, *self.arguments)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        """Return the failure as one line, as the command line prints it."""
        return f"{self.path.name}: {self.name}: {excinfo.value}"

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
