"""Resolve a path that the user gave: hf://ORG/NAME becomes a local mirror, other paths stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptmap.core import argument_checks
from ckptmap.errors import CkptmapError, RunError, SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.hub.uri import MIRROR_PREFIX, HubName, is_hub, of_web_page, parse
from ckptmap.storage.resource_limits import named_if_unreadable


@dataclass(frozen=True)
class Located:
    """A local path, and where it comes from.

    origin   the place on the Hub with its commit; "" for a path that was local
    notes    notes for the user
    """

    path: Path
    origin: str = ""
    notes: tuple[str, ...] = ()


def locate(path: str | os.PathLike[str], mounts: Mounts) -> Located:
    """Return the local path of a path or of a place on the Hub, whose mirror is then in `mounts`.

    A local path makes no request. Raises SourceError CKM101 for an empty path, which pathlib would
    take for the working directory; CKM701 to 708 and CKM716 for a place on the Hub.
    """
    argument_checks.path("path", path)
    if not os.fspath(path):
        raise SourceError(
            "CKM101",
            "the path of a checkpoint is empty",
            "give a path; perhaps a variable of the shell is not set",
        )
    if not is_hub(path):
        refuse_elsewhere(os.fspath(path))
        _refuse_placeholder(os.fspath(path), mounts)
        return Located(Path(path))
    from ckptmap.storage.hub.mirror import mirrored

    name = parse(os.fspath(path))
    mirror, place = mirrored(name, mounts)
    repo = mirror.repo
    notes: tuple[str, ...] = ()
    if repo.renamed_from:
        notes = (f"hf://{repo.renamed_from} is now hf://{repo.id}: write that",)
    return Located(place, str(HubName(repo.id, repo.commit, name.path)), notes)


def refuse_elsewhere(path: str) -> None:
    """Raise SourceError CKM101 for a stream or an address, which are no paths."""
    if path == "-":
        raise SourceError(
            "CKM101",
            "-: a stream is not taken: a checkpoint is read at many places of its files",
            "save it to a file, and give the path of that",
        )
    scheme, separator, _ = path.partition("://")
    if not separator or not scheme.isalnum() or Path(path).exists():
        return
    page = of_web_page(path)
    step = "copy it to this machine, and give its path"
    if page is not None:
        step = f"write {page}"
    raise SourceError("CKM101", f"{path}: is an address, expected a path or hf://org/name", step)


def _refuse_placeholder(path: str, mounts: Mounts) -> None:
    """Raise SourceError CKM101 for a path in a mirror that is not mounted here.

    It would be read as a local file, in which every byte that was not fetched is zero. Raise it also for
    a path in a working directory that was removed.
    """
    try:
        absolute = Path(path).absolute()
    except FileNotFoundError as error:
        raise SourceError(
            "CKM101",
            f"{path}: lies in the working directory, and that is gone",
            "change to a directory that exists, or name a whole path",
        ) from error
    inside = any(part.startswith(MIRROR_PREFIX) for part in absolute.parts)
    if inside and mounts.file_system_of(f"{absolute}/") is None:
        raise SourceError(
            "CKM101",
            f"{path}: is the placeholder of a file on the Hub, not its content",
            "open hf://ORG/NAME, which `Checkpoint.origin` names, in place of `Checkpoint.path`",
        )


def local(path: str | None, mounts: Mounts) -> str | None:
    """Return the local path for the value of an option; None and local values are unchanged."""
    return str(locate(path, mounts).path) if path is not None and is_hub(path) else path


def silence() -> None:
    """Turn off the progress bars of huggingface_hub in this process."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()


@contextmanager
def origins_in_errors(mounts: Mounts) -> Iterator[None]:
    """Let errors name files as the user does (hf://...), not by their path in the mirror."""
    try:
        yield
    except CkptmapError as error:
        error.message = mounts.with_origins(error.message)
        error.change_hint(mounts.with_origins)
        raise


@contextmanager
def errors_by_given_path(mounts: Mounts) -> Iterator[None]:
    """Rewrite errors of a command that writes nothing.

    They name files as the user does (hf://...), not by their path in the mirror, and a failed fetch
    (RunError CKM7xx) becomes a SourceError.
    """
    try:
        with named_if_unreadable():
            yield
    except CkptmapError as error:
        named = mounts.with_origins(error.message)
        if named != error.message and error.code == "CKM102":
            error.hint = "the repository itself holds the pointer: tell its owner, or use another"
        error.message = named
        error.change_hint(mounts.with_origins)
        if type(error) is RunError and error.code.startswith("CKM7"):
            raise SourceError(error.code, error.message, error.hint) from error
        raise
