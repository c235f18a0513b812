"""Check a directory adapter: it names the files of a framework's directory, reads little, and claims no others."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from ckptmap.errors import SourceError
from ckptmap.formats.detect import look
from ckptmap.protocols import Directory, Member, Members, Place
from ckptmap.testing.base import bytes_read, expect, opened, required
from ckptmap.testing.strangers import strangers

ROLES = ("model", "optimizer", "extra", "all")
CLAIM_NBYTES = 1 << 16
"""Most bytes that `claims` may read: it is called for every path that is opened."""


def check_directory(directory: Directory, path: str | os.PathLike[str]) -> None:
    """Raise AssertionError where the adapter breaks its protocol on a real directory of its framework.

        from ckptmap.testing import check_directory
        check_directory(MyFramework(), "runs/step-2000")

    The directory is only read.
    """
    with required(f"directory {directory.name}"):
        _check(directory, path)


def _check(directory: Directory, path: str | os.PathLike[str]) -> None:
    place = look(Path(path).absolute())
    _check_claims(directory, place)
    members = directory.members(place)
    _check_members(directory.name, place, members)
    again = directory.members(place)
    expect(again == members, f"{directory.name}: other members when asked again: {again}")
    _check_absent(directory, place)
    with opened(path, directory) as ckpt:
        name = ckpt.index.container
        expect(name == directory.name, f"{path}: opened as {name}, expected {directory.name}")
        expect(len(ckpt), f"{path}: opened, but holds no weights")


def _check_claims(directory: Directory, place: Place) -> None:
    with bytes_read() as count:
        claimed = directory.claims(place)
    expect(claimed, f"{directory.name}: does not claim {place.path}")
    expect(
        count[0] <= CLAIM_NBYTES,
        f"{directory.name}: claims() reads {count[0]} bytes, expected at most {CLAIM_NBYTES}",
    )
    with tempfile.TemporaryDirectory() as folder:
        for stranger in strangers(Path(folder)):
            wrong = directory.claims(look(stranger))
            expect(not wrong, f"{directory.name}: claims {stranger.name}, which is not its own")


def _check_members(name: str, place: Place, members: Members) -> None:
    base = Path(place.path)
    expect(members.world >= 1, f"{name}: a world of {members.world} ranks")
    expect(
        any(member.role in ("model", "all") for member in members.members),
        f"{name}: no member has weights",
    )
    for member in members.members:
        _check_member(name, base, member)
    for key, entry in members.documents.items():
        expect((base / entry).is_file(), f"{name}: document {key}: {entry} is not there")
    for entry in members.unread_files:
        expect((base / entry).exists(), f"{name}: left behind: {entry} is not there")
    read = {name for m in members.members for name in (Path(m.path).name, *m.names)}
    both = read & set(members.unread_files)
    expect(not both, f"{name}: {sorted(both)[:1]} is read and left behind")
    sidecars = members.sidecar_dir
    expect(
        sidecars is None or Path(str(sidecars)).is_dir(),
        f"{name}: sidecar_dir {sidecars} is no directory",
    )


def _check_member(name: str, base: Path, member: Member) -> None:
    path = Path(member.path)
    expect(member.role in ROLES, f"{name}: {path.name}: role {member.role!r}, expected {ROLES}")
    expect(path.is_absolute() and path.exists(), f"{name}: member {path} is not there")
    inside = path == base or base in path.parents
    expect(inside and ".." not in path.parts, f"{name}: member {path} lies outside {base}")
    absent = [entry for entry in member.names if not (path / entry).exists()]
    expect(not absent, f"{name}: member {path.name} names {absent[:1]}, which is not there")
    expect(path != base or member.names, f"{name}: a member is the directory itself, all of it")


def _check_absent(directory: Directory, place: Place) -> None:
    """Check the directory without each of its entries in turn: only SourceError may be raised."""
    for entry in place.names:
        names = tuple(name for name in place.names if name != entry)
        without = replace(place, names=names)
        try:
            members = directory.members(without) if directory.claims(without) else None
        except SourceError:
            continue
        except Exception as error:
            kind = type(error).__name__
            raise AssertionError(
                f"{directory.name}: without {entry} raises {kind}, expected SourceError: {error}"
            ) from error
        named = {name for member in members.members for name in member.names} if members else set()
        expect(entry not in named, f"{directory.name}: names {entry}, which is not there")
