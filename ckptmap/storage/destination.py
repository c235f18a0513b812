"""Checks of a destination path, made before a byte is written and again under its lock."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ckptmap.core.formatting import human
from ckptmap.core.printable import quote
from ckptmap.errors import DestinationError
from ckptmap.storage.resource_limits import or_resource_error


def named_place(dst: str | os.PathLike[str]) -> Path:
    """Return the destination as a path.

    Raises DestinationError CKM304 for an empty path, which pathlib takes for the working directory,
    for an address or `-`, and for a path that the filesystem cannot hold.
    """
    if not os.fspath(dst):
        raise DestinationError("CKM304", "the destination is an empty path", "name a new path")
    scheme, separator, _ = os.fspath(dst).partition("://")
    is_address = separator and scheme not in ("", "hf") and not os.path.lexists(f"{scheme}:")
    if is_address or os.fspath(dst) == "-":
        raise DestinationError(
            "CKM304",
            f"{os.fspath(dst)}: is not a path on this machine, and a stream is none",
            "write to a local path, then copy it there; ckptmap push sends it to the Hub",
        )
    try:
        os.lstat(os.path.abspath(dst))  # noqa: PTH100 (it raises where the working directory is gone)
    except NotADirectoryError:
        pass
    except FileNotFoundError as error:
        if error.filename is None:
            raise DestinationError(
                "CKM304",
                f"{os.fspath(dst)}: lies in the working directory, and that is gone",
                "change to a directory that exists, or name a whole path",
            ) from error
    except OSError as error:
        raise cannot_write(Path(dst), error) from error
    return Path(dst)


SAFETENSORS = ".safetensors"
GGUF = ".gguf"
FILE_SUFFIXES = (SAFETENSORS, GGUF, ".pt", ".pth", ".bin")
"""Ends of names of one-file checkpoints; Lightning gives .ckpt to directories, too."""


def check_kind(dst: str | os.PathLike[str], one_file: bool, container: str) -> None:
    """Raise DestinationError CKM304 where a path names another kind of output: a directory for one file,
    a file for a directory, a safetensors file for another. The next program would not read it.

    container  the name of the writer
    """
    text = os.fspath(dst)
    if one_file and text.endswith(SAFETENSORS) and "safetensors" not in container:
        stem = text.removesuffix(SAFETENSORS)
        raise DestinationError(
            "CKM304",
            f"{text}: names a safetensors file, but this setup writes {container}, as torch.save does",
            f"name it {quote(f'{stem}.pt')}; or write safetensors into a directory: {quote(stem)} --to hf",
        )
    if one_file and text.endswith(GGUF) != (container == "gguf"):
        stem, end = text.removesuffix(GGUF), GGUF if container == "gguf" else ".pt"
        if text.endswith((GGUF, *FILE_SUFFIXES)):
            raise DestinationError(
                "CKM304",
                f"{text}: names another kind of file, and this setup writes {container}",
                f"name it {quote(str(Path(stem).with_suffix('') if end == GGUF else stem) + end)}",
            )
    if os.path.lexists(text):
        return  # `check_destination` says what is there
    if one_file and text.endswith(os.sep):
        raise DestinationError(
            "CKM304",
            f"{text}: names a directory, but this setup writes one file",
            f"name a file: {quote(text.rstrip(os.sep) + '.pt')}",
        )
    if not one_file and text.endswith(FILE_SUFFIXES):
        raise DestinationError(
            "CKM304",
            f"{text}: names a file, but this setup writes a directory",
            f"name a directory: {quote(str(Path(text).with_suffix('')))}",
        )


def check_destination(dst: Path, one_file: bool, overwrite: bool) -> None:
    """Raise DestinationError where `dst` must not be written.

    CKM301: it exists. An empty directory may be used, and with `overwrite` a file may replace a file
    and a directory a directory. CKM304: it is a link, a device or a directory that is in use.
    """
    if not dst.name:
        raise DestinationError(
            "CKM304", f"{dst}: is not a path that an output can have", "name a new path"
        )
    try:
        mode = os.lstat(dst).st_mode
        empty = stat.S_ISDIR(mode) and not os.listdir(dst)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise cannot_write(dst, error) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        what = "symbolic link" if stat.S_ISLNK(mode) else "special file"
        raise DestinationError(
            "CKM304", f"{dst}: is a {what}, never replaced", "name the real path, or a new one"
        )
    wanted, kind = ("directory", "file")[one_file], ("directory", "file")[stat.S_ISREG(mode)]
    if wanted != kind:
        raise DestinationError(
            "CKM301",
            f"{dst}: is a {kind}, expected a {wanted} or nothing",
            f"name a new path, or move the {kind} away: --overwrite replaces a {wanted} by a {wanted} only",
        )
    if empty:
        return
    if not overwrite:
        raise DestinationError(
            "CKM301", f"{dst}: exists", "name a new path, or replace it with --overwrite"
        )
    if kind == "directory":
        _check_replaceable(dst)


def _check_replaceable(dst: Path) -> None:
    """Raise DestinationError CKM304 for a directory that must not be replaced by a checkpoint.

    It is a home directory, a working directory or a mount point.
    """
    lived_in = {"the home directory": Path.home(), "the working directory": Path.cwd()}
    for what, place in lived_in.items():
        if dst.resolve() in (place.resolve(), *place.resolve().parents):
            raise DestinationError("CKM304", f"{dst}: holds {what}", "name a new path")
    if os.path.ismount(dst):
        raise DestinationError("CKM304", f"{dst}: is a mount point", "name a path inside it")
    if not os.access(dst, os.W_OK | os.X_OK):  # the system moves no such directory
        raise cannot_write(dst, PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dst)))


def check_overlap(sources: Sequence[str | Path], dst: Path) -> None:
    """Raise DestinationError CKM302 where a source is the destination, inside it or around it,
    by resolved path or by inode (hard links, bind mounts)."""
    real = Path(os.path.realpath(dst))
    identities = _identities(real)
    mine, above = {identities[0]} - {None}, {*identities} - {None}
    around = cache(_around)  # nearly all sources share one directory
    for source in sources:
        folder, name = os.path.split(source)
        if name in ("", ".", "..") or os.path.islink(source):
            folder, name = os.path.split(os.path.realpath(source))
        places, seen = around(folder)
        place = places[0] / name
        identity = _identity(place)
        if place == real or identity in mine:
            relation = "is the source"
        elif place in real.parents or identity in above:
            relation = "is inside the source"
        elif real in places or seen & mine:
            relation = "contains the source"
        else:
            continue
        raise DestinationError(
            "CKM302", f"{dst}: {relation} {source}", "write to a path apart from the source"
        )


def _around(folder: str) -> tuple[Sequence[Path], set[tuple[int, int] | None]]:
    """Return a directory and all above it, resolved, with their devices and inodes."""
    real = Path(os.path.realpath(folder))
    return (real, *real.parents), {*_identities(real)}


def _identities(path: Path) -> list[tuple[int, int] | None]:
    """Return device and inode of a path and of all above it; None for one that does not exist."""
    return [_identity(place) for place in (path, *path.parents)]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_space(directory: Path, nbytes: int, present: int = 0) -> None:
    """Raise DestinationError CKM303 where `nbytes`, less those `present`, do not fit."""
    free = shutil.disk_usage(directory).free
    if nbytes - present > free:
        raise DestinationError(
            "CKM303",
            f"{directory}: needs {human(nbytes - present)}, {human(free)} free",
            "free some space or choose another destination",
        )


def _why(error: OSError, at: Path) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):  # what mkdir says of these
        if at.is_symlink() and not at.exists():
            return f"{at} is a symbolic link to {at.readlink()}, which is not there"
        return f"{next((up for up in (at, *at.parents) if up.is_file()), at)} is no directory"
    return f"{error.strerror} ({at})"


def cannot_write(dst: Path, error: OSError) -> DestinationError:
    at = Path(error.filename or dst)
    at = at.parent if at.name.startswith(f".{dst.name}.") else at  # what we would put beside it
    failed = DestinationError(
        "CKM304",
        f"{dst}: cannot be written: {_why(error, at)}",
        "choose a destination that can be written",
    )
    if error.errno == errno.ENAMETOOLONG:
        failed.hint = (
            "choose a shorter name: while it is made it has a longer one (180 bytes always fit)"
        )
    return or_resource_error(error, failed)
