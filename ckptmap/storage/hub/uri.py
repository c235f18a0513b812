"""Parse `hf://org/name[@revision][/subfolder]`: a place on the Hub, written in place of a path.

The form is that of huggingface_hub's own URIs: `refs/pr/N` is one revision; a slash in any other
revision is written %2F.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ckptmap.errors import SourceError
from ckptmap.storage.safe_names import problem_in_repository

MIRROR_PREFIX = "ckptmap-hub-"
"""How the name of the temporary directory of a mirror begins."""

SCHEME = "hf://"
_WEB = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)(?:/([^?#]*))?)?/?(?:[?#].*)?"
)
"""A page of the Hub: https://huggingface.co/org/name/tree/main/folder."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_PULL = re.compile(r"(refs/(?:pr/\d+|convert/[\w.-]+))(?:/(.*))?")
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")


@dataclass(frozen=True)
class HubName:
    """A place on the Hub.

    repo       org/name
    revision   a branch, tag or commit; "": the default branch
    path       a folder or file in the repository; "": its root
    """

    repo: str
    revision: str = ""
    path: str = ""

    def __str__(self) -> str:
        revision = self.revision
        if revision and not _PULL.fullmatch(revision):
            revision = quote(revision, safe="")
        at = f"@{revision}" if revision else ""
        return f"{SCHEME}{self.repo}{at}" + (f"/{self.path}" if self.path else "")


def is_hub(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is written as a place on the Hub. Makes no request.

    `hf:/org/name` counts too: pathlib.Path removes a slash.
    """
    return os.fspath(path).startswith("hf:/")


def of_web_page(address: str) -> HubName | None:
    """Return the place on the Hub that the address of a web page shows; None: it is none of the Hub."""
    page = _WEB.fullmatch(address)
    if page is None:
        return None
    revision = unquote(page[2] or "")
    return HubName(page[1], "" if revision == "main" else revision, (page[3] or "").strip("/"))


def parse(text: str) -> HubName:
    """Return the place that a text names. Raises SourceError CKM701 if the text is malformed."""
    rest = text.removeprefix("hf:").strip("/").removeprefix("models/")
    owner, _, rest = rest.partition("/")
    if owner in _OTHER_KINDS:
        raise _malformed(text, f"names one of the Hub's {owner}", "a model repository")
    name, at, rest = _cut_name(rest)
    repo = f"{owner}/{name}"
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo:
        raise _malformed(text, f"the repository is {repo!r}", "org/name")
    revision, path = _cut_revision(rest) if at else ("", rest)
    if at and not revision:
        raise _malformed(text, "the revision after @ is empty", "a branch, a tag or a commit")
    if at and not revision.strip("."):  # in a URL these are folders: the Hub would answer for main
        raise _malformed(text, f"the revision is {revision!r}", "a branch, a tag or a commit")
    if path and problem_in_repository(path):
        raise _malformed(text, f"the path is {path!r}", "names of folders and files")
    return HubName(repo, revision, path)


def _cut_name(rest: str) -> tuple[str, str, str]:
    """Return (name, "@" or "", rest) of `name@rest` or `name/rest`, whichever mark comes first."""
    match = re.match(r"([^@/]*)([@/]?)(.*)", rest, re.DOTALL)
    assert match is not None
    return match[1], "@" if match[2] == "@" else "", match[3]


def _cut_revision(rest: str) -> tuple[str, str]:
    pull = _PULL.fullmatch(rest)
    if pull is not None:
        return pull[1], pull[2] or ""
    revision, _, path = rest.partition("/")
    return unquote(revision), path


def _malformed(text: str, problem: str, expected: str) -> SourceError:
    return SourceError(
        "CKM701",
        f"{text}: {problem}, expected {expected}",
        "write hf://org/name, hf://org/name@revision or hf://org/name@revision/folder",
    )
