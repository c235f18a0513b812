"""Read a Hugging Face repository at one commit: list it, read byte ranges, download verified files.

All requests go through huggingface_hub, with its tokens, endpoint, retries, cache and xet. A
revision is resolved to a commit once; all later requests name the commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmap.errors import RunError, SourceError
from ckptmap.storage.hub.entry import Entry
from ckptmap.storage.hub.errors import Kind, hub_errors
from ckptmap.storage.hub.resume_download import continued, over_http
from ckptmap.storage.hub.uri import HubName
from ckptmap.storage.safe_names import problem_in_repository

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

READ_NBYTES = 8 << 20
"""The most bytes of one request: huggingface_hub keeps the answer in memory."""
MAX_NBYTES = 1 << 50
"""A larger size of a file is refused as false: no store takes such a file."""
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RETRIED = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which huggingface_hub waits and requests the same range again."""


@dataclass(frozen=True)
class Repo:
    """A repository at a commit.

    id            the name that the Hub gives: org/name
    renamed_from  the name that the user gave, if the Hub has renamed the repository
    """

    id: str
    commit: str
    renamed_from: str = ""

    @classmethod
    def find(cls, name: HubName) -> Repo:
        """Return the repository of a name, with its revision resolved to a commit.

        Raises SourceError CKM702 to 708: see `errors`.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError

        with _with_cached(name), hub_errors(name.repo):
            try:
                info = HfApi().model_info(name.repo, revision=name.revision or None)
            except RevisionNotFoundError as error:
                raise _no_revision(name) from error
        if not info.sha:
            raise SourceError(
                "CKM704",
                f"{name}: has no commit yet",
                "push a checkpoint into it first: ckptmap push",
            )
        renamed = name.repo if info.id.lower() != name.repo.lower() else ""
        return cls(info.id, info.sha, renamed)

    def tree(self, path: str = "", kind: Kind = SourceError) -> dict[str, Entry]:
        """Return every file below `path`, by its path in the repository.

        Raises `kind` if the Hub does not answer, SourceError CKM716 for a path that would leave the
        repository's directory and for an entry without a valid size and hash.
        """
        from huggingface_hub import HfApi

        with hub_errors(self.id, kind, "listing its files"):
            items = list(
                HfApi().list_repo_tree(self.id, path or None, recursive=True, revision=self.commit)
            )
        return _entries(items, self.id)

    def at(self, path: str) -> Entry | None:
        """Return the file at `path`; None for a folder. Raises SourceError CKM705 for neither."""
        from huggingface_hub import HfApi

        with hub_errors(self.id):
            items = HfApi().get_paths_info(self.id, path, revision=self.commit)
        if not items:
            raise SourceError(
                "CKM705",
                f"hf://{self.id}: has no {path!r} at commit {self.commit[:12]}",
                f"see what there is: ckptmap inspect hf://{self.id}@{self.commit[:12]}",
            )
        return _entries(items, self.id).get(path)

    def read(self, entry: Entry, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` (at most READ_NBYTES) of a file from `offset` on.

        Raises SourceError CKM709 if the answer is another range.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        url = hf_hub_url(self.id, entry.path, revision=self.commit)
        asked = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
        with hub_errors(self.id, doing=f"reading {entry.path}"):
            answer = http_backoff(
                "GET", url, headers={**build_hf_headers(), **asked}, timeout=HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_status_codes=RETRIED,
            )  # fmt: skip
            hf_raise_for_status(answer)
        total = answer.headers.get("Content-Range", f"/{len(answer.content)}").rpartition("/")[2]
        whole = offset == 0 and nbytes == entry.nbytes
        right = answer.status_code == 206 or (whole and answer.status_code == 200)
        if not right or len(answer.content) != nbytes or total not in (str(entry.nbytes), "*"):
            raise SourceError(
                "CKM709",
                f"hf://{self.id}/{entry.path}: asked for bytes {offset}..{offset + nbytes} of"
                f" {entry.nbytes}, found {len(answer.content)} bytes of {total}",
                "a proxy may not pass ranges on; download it first: ckptmap pull"
                f" hf://{self.id} DIR",
            )
        return bytes(answer.content)

    def cached(self, entry: Entry) -> str | None:
        """Return the path of the file in huggingface_hub's cache, unverified; None if absent."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.id, entry.path, revision=self.commit)
        return path if isinstance(path, str) else None

    def download(self, entry: Entry, local_dir: Path | None = None) -> str:
        """Return the path of the whole file, verified by the size and hash that the Hub lists.

        The file is kept in huggingface_hub's cache, or in `local_dir`, where a download that a
        killed run began may be continued. A damaged copy is fetched once more. Raises RunError
        CKM709 if that is damaged, too, and CKM702 to 710 if the file cannot be fetched.
        """
        with hub_errors(self.id, RunError, f"fetching {entry.path}"):
            for force in (False, True):
                path = self._fetched(entry, local_dir, force)
                if entry.is_in(path):
                    return path
        raise RunError(
            "CKM709",
            f"hf://{self.id}/{entry.path}: {os.stat(path).st_size} bytes were downloaded that are"
            f" not those of {entry.digest[:12]}, expected {entry.nbytes} bytes of that hash",
            "run the same command again; if it stays so, the repository is damaged",
        )

    def _fetched(self, entry: Entry, local_dir: Path | None, force: bool) -> str:
        from huggingface_hub import hf_hub_download

        if local_dir is not None and over_http(entry):
            return continued(self.id, self.commit, entry, local_dir)
        return hf_hub_download(
            self.id, entry.path, revision=self.commit, local_dir=local_dir, force_download=force
        )


@contextmanager
def _with_cached(name: HubName) -> Iterator[None]:
    """Add to an error CKM706 (the Hub does not answer) the path of the copy in the cache, if any.

    The user can then give that path in place of the name.
    """
    from huggingface_hub import snapshot_download

    try:
        yield
    except SourceError as error:
        if error.code == "CKM706":
            with suppress(Exception):  # any error of huggingface_hub means: no copy in the cache
                held = snapshot_download(
                    name.repo, revision=name.revision or None, local_files_only=True
                )
                error.hint += f"; what the cache has of it: {held}"
        raise


def _no_revision(name: HubName) -> SourceError:
    """Return the error for a missing revision; it lists the branches and tags of the repository."""
    from huggingface_hub import HfApi

    with hub_errors(name.repo):
        refs = HfApi().list_repo_refs(name.repo)
    known = [ref.name for ref in (*refs.branches, *refs.tags)]
    return SourceError(
        "CKM704",
        f"hf://{name.repo}: has no revision {name.revision!r}, found {', '.join(known[:8])}",
        f"use one of them: hf://{name.repo}@{known[0] if known else 'main'}",
    )


def _entries(items: list[RepoFile | RepoFolder], repo: str) -> dict[str, Entry]:
    entries = {}
    for item in items:
        size = getattr(item, "size", None)
        if size is None:
            continue  # a folder
        lfs = getattr(item, "lfs", None)
        nbytes, sha256 = (lfs.size, lfs.sha256) if lfs else (size, None)
        # huggingface_hub before 1.x does not tell it: such a file is downloaded by HTTP.
        xet = getattr(item, "xet_hash", None) is not None
        entry = Entry(item.path, nbytes, sha256, getattr(item, "blob_id", ""), xet)
        _check(entry, repo)
        entries[item.path] = entry
    return entries


def _check(entry: Entry, repo: str) -> None:
    path = entry.path
    if not _DIGEST.fullmatch(entry.digest) or not 0 <= entry.nbytes <= MAX_NBYTES:
        raise SourceError(
            "CKM716",
            f"hf://{repo}: lists {path!r} with {entry.nbytes} bytes of hash {entry.digest!r:.80},"
            " expected a size and a SHA",
            "do not use this endpoint (HF_ENDPOINT)",
        )
    problem = problem_in_repository(path)
    if problem:
        raise SourceError(
            "CKM716",
            f"hf://{repo}: lists a file {path!r}, which {problem}; expected a path inside the"
            " repository",
            "do not use this repository, or this endpoint (HF_ENDPOINT)",
        )


Tree = Mapping[str, Entry]
