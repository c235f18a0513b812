"""The catalog of mapping files: list them, and find the one that a name such as `llama/meta` means.

Files are `<family>/<scheme>[@era].toml`, in the directories of CKPTMAP_MAPPINGS first, then in the package
`ckptmap_mappings`. Only the head of a file (its purpose and fingerprints) is read until its rules are
needed, so a checkpoint is recognized within milliseconds.
"""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ckptmap.core.formatting import some
from ckptmap.core.printable import quote
from ckptmap.errors import PlanError
from ckptmap.mapping.mapping_file import load_scheme, read_head
from ckptmap.mapping.rules import HUB, NamingScheme, SchemeHead
from ckptmap.storage.resource_limits import unreadable

VARIABLE = "CKPTMAP_MAPPINGS"
SUFFIX = ".toml"
REFUSED_SUFFIX = ".refused.toml"
"""A list of refusals beside a mapping file, for its tests: no mapping file itself."""
NEAREST = 2
"""Names that the hint for an unknown one proposes."""


@dataclass(frozen=True, kw_only=True)
class CatalogEntry(SchemeHead):
    """One mapping file: its head and its path."""

    path: str

    @property
    def aliases(self) -> list[str]:
        """Titles of the schemes whose `same_as` names this one: no key distinguishes them."""
        mine = self.title.partition("/")[2]
        alike = (e for e in available() if e.family == self.family and e.same_as == mine)
        return [entry.title for entry in alike]

    @property
    def title_with_aliases(self) -> str:
        """`"llama/meta (= torchtitan@2025-07)"`."""
        also = ", ".join(title.partition("/")[2] for title in self.aliases)
        return f"{self.title} (= {also})" if also else self.title

    def load(self) -> NamingScheme:
        """Return the whole file, parsed and proven. Raises PlanError CKM601, CKM602."""
        return _loaded(self.path, _mark(self.path))


def directories() -> list[Path]:
    """Return the directories that are searched for mapping files, first to last."""
    asked = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*asked, _shipped()]


@cache
def _shipped() -> Path:
    """Return the directory of the packaged files, which is `mappings/` in a clone of the repository."""
    from importlib.util import find_spec

    spec = find_spec("ckptmap_mappings")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "mappings"


def available() -> list[CatalogEntry]:
    """Return every mapping file, sorted by title; an earlier directory hides later files of that title.

    A file in a directory of CKPTMAP_MAPPINGS that is broken is skipped with a RuntimeWarning, which
    names it: other checkpoints do not need it.
    """
    by_title: dict[str, CatalogEntry] = {}
    *asked, shipped = directories()
    for file in (file for directory in asked for file in _files(directory)):
        entry = _entry_unless_broken(file, _mark(file))
        if entry is not None:
            by_title.setdefault(entry.title, entry)
    for entry in _packaged(shipped):
        by_title.setdefault(entry.title, entry)
    return [by_title[title] for title in sorted(by_title)]


def _files(directory: Path) -> list[str]:
    """Return the paths of the mapping files in a directory, sorted."""
    paths = map(str, sorted(directory.glob(f"*/*{SUFFIX}")))
    return [path for path in paths if not path.endswith(REFUSED_SUFFIX)]


@cache
def _packaged(directory: Path) -> tuple[CatalogEntry, ...]:
    """Return the entries of the package's directory, which does not change while a process runs."""
    return tuple(_entry(file, _mark(file)) for file in _files(directory))


def find(text: str, option: str = "--names") -> list[CatalogEntry]:
    """Return the mapping files that a name may mean, latest era first.

    A name is a path, `family/scheme` or `scheme`, the latter two with or without `@era`. Raises
    PlanError CKM603 where it matches none; `option` is where the user gave it, "" for an argument.
    """
    if text.endswith(SUFFIX):
        return [_entry(text, _mark(text))]
    family, _, rest = text.rpartition("/")
    name, _, era = rest.partition("@")
    matches = [
        entry
        for entry in available()
        if entry.name == name and family in ("", entry.family) and era in ("", entry.era)
    ]
    if not matches:
        raise unknown(text, option)
    return sorted(matches, key=lambda entry: entry.era, reverse=True)


def select(selector: str | None) -> list[CatalogEntry]:
    """Return the mapping files of a family, a model type or a scheme; None: all.

    Raises PlanError CKM603 where there is none.
    """
    entries = available()
    if selector is None:
        return entries
    matches = [entry for entry in entries if selector in (entry.family, *entry.models)]
    if matches:
        return matches
    try:
        titles = {entry.title for entry in find(selector)}
    except PlanError as error:
        if error.code != "CKM603":
            raise
        families = some(list(dict.fromkeys(entry.family for entry in entries)))
        words = [word for e in entries for word in (e.family, *e.models, e.name, e.title)]
        near = nearest(selector, words)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise PlanError(
            "CKM603",
            f"{selector!r} is not a known family, model type or scheme, expected one of {families},"
            " or a scheme such as llama/meta",
            f"{meant}list the schemes with: ckptmap mappings list",
        ) from error
    return [entry for entry in entries if entry.title in titles]


def unknown(text: str, option: str = "--names") -> PlanError:
    """Return PlanError CKM603 for a scheme that does not exist, with the nearest that does."""
    entries = available()
    names = sorted({entry.name for entry in entries} | {HUB})
    hint = f"schemes are {', '.join(names)}; list their families with: ckptmap mappings list"
    if Path(text).is_file():
        hint = f"the name of a mapping file ends with {SUFFIX}: rename {quote(text)}"
    elif near := nearest(text, [*names, *(entry.title for entry in entries)]):
        hint = f"did you mean {' or '.join(near)}? list the schemes with: ckptmap mappings list"
    return PlanError(
        "CKM603",
        f"{option} {text!r} is not a known scheme, nor a mapping file".lstrip(),
        hint,
    )


def nearest(text: str, names: Sequence[str]) -> list[str]:
    """Return the names that are spelled most like `text`, the nearest first, whatever their case."""
    by_case = {name.lower(): name for name in names}
    import difflib  # here: most runs need no suggestion

    return [by_case[low] for low in difflib.get_close_matches(text.lower(), by_case, NEAREST)]


def _mark(path: str) -> tuple[int, int]:
    """Return a cache key that changes with the file. Raises PlanError CKM603 where there is no file."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise PlanError(
            "CKM603",
            f"{path}: cannot be read: {error.strerror}",
            "list the schemes with: ckptmap mappings list",
        ) from error
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=1024)
def _loaded(path: str, mark: tuple[int, int]) -> NamingScheme:
    return load_scheme(path)


@lru_cache(maxsize=1024)
def _entry_unless_broken(path: str, mark: tuple[int, int]) -> CatalogEntry | None:
    """Return the head of a file whose rules are proven, too; None after a warning where they are not."""
    try:
        entry = _entry(path, mark)
        entry.load()
    except PlanError as error:
        told = f"{error.message}; this mapping file is skipped: see ckptmap mappings check {quote(path)}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None
    return entry


@lru_cache(maxsize=4096)
def _entry(path: str, mark: tuple[int, int]) -> CatalogEntry:
    return CatalogEntry(**vars(read_head(_head_of(path), path)), path=path)


def _head_of(path: str) -> Mapping[str, object]:
    """Return the part of a file that says what it is for, without parsing its rules."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return tomllib.loads("".join(_head_lines(text)))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(path, error) from error
        raise PlanError(
            "CKM601", f"{path}: is not valid TOML: {error}", "correct that line of the file"
        ) from error


def _head_lines(text: str) -> Iterator[str]:
    """Yield the lines before the first table, and those of [detect]."""
    in_head = True
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            in_head = line.split("#")[0].strip() == "[detect]"
        if in_head:
            yield line
