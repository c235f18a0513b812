"""The ref to which a push uploads files before they are visible, and the step that publishes them.

    to main            a pull request, found again by its title, merged once it is checked
    to another branch  a work branch; then one commit, or the branch itself where it is new

Both are refs that nobody loads from. ckptmap always asks the Hub what a ref holds and stores
nothing itself: a killed push leaves no state that the next one could misread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptmap.errors import DestinationError, RunError
from ckptmap.operations.hub.content import Content, UploadItem
from ckptmap.storage.hub.errors import hub_errors
from ckptmap.storage.hub.repo import Repo, Tree
from ckptmap.storage.hub.uri import HubName

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, Discussion, HfApi

MAIN = "main"
BATCH_NBYTES = 10_000_000_000
"""Bytes of files of one commit into the pull request. A killed push may upload so much again."""
BATCH_FILES = 100
"""Files of one commit: what the Hub advises (huggingface_hub, upload guide)."""
_WORK_BRANCH = re.compile(r"ckptmap-[0-9a-f]{12}")


def api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="ckptmap")


@dataclass(frozen=True)
class Target:
    """A branch to publish on, as it is now: `head` is its commit, `tree` its files."""

    repo: str
    revision: str
    head: str
    tree: Tree
    exists: bool = True

    @classmethod
    def look(cls, repo: str, revision: str) -> Target:
        """Return the branch as it is; one that does not exist yet begins as main is."""
        branch = _at(repo, revision)
        if branch is not None:
            return cls(repo, revision, branch.commit, branch.tree(kind=RunError))
        main = _at(repo, MAIN)
        assert main is not None, f"{repo}: a repository has a main branch"
        return cls(repo, revision, main.commit, main.tree(kind=RunError), exists=False)


@dataclass
class Stage:
    """A ref besides the target that the content is uploaded to."""

    target: Target
    content: Content
    ref: str
    title: str
    pull: int | None = None
    notes: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------ writing

    def tree(self) -> tuple[str, Tree]:
        branch = _at(self.target.repo, self.ref)
        assert branch is not None, f"{self.ref}: was there a moment ago"
        return branch.commit, branch.tree(kind=RunError)

    def write(self, advance: Callable[[int, str], None]) -> int:
        """Upload what is not there yet, in batches; return its bytes.

        `advance` is told the bytes and the path of each file, those that are there already, too.
        """
        head, tree = self.tree()
        pending, nbytes = self.content.left(tree), 0
        deletions = [path for path in self.content.deleted if path in tree]
        advance(self.content.nbytes - sum(item.nbytes for item in pending), "")
        while pending or deletions:
            batch = [pending.pop(0)] if pending else []
            while pending and len(batch) < BATCH_FILES:
                if sum(item.nbytes for item in (*batch, pending[0])) > BATCH_NBYTES:
                    break
                batch.append(pending.pop(0))
            adds = [_addition(item) for item in batch]
            head = self._commit(adds, [] if pending else deletions, head)
            nbytes += sum(item.nbytes for item in batch)
            for item in batch:
                advance(item.nbytes, item.path)
            deletions = deletions if pending else []
        return nbytes

    def _commit(self, adds: list[CommitOperationAdd], deletions: list[str], head: str) -> str:
        with hub_errors(self.target.repo, RunError, "uploading"):
            api().preupload_lfs_files(self.target.repo, adds, revision=self.ref)
            commit = api().create_commit(
                self.target.repo, [*adds, *_deletions(deletions)], commit_message=self.title,
                revision=self.ref, parent_commit=head,
            )  # fmt: skip
        return commit.oid

    def check(self) -> None:
        """Raise RunError CKM713 where the ref does not hold exactly what it should."""
        _, tree = self.tree()
        wrong = [item.path for item in self.content.left(tree)]
        wrong += [path for path in self.content.deleted if path in tree]
        if wrong:
            stored = tree.get(wrong[0])
            digest = "nothing" if stored is None else stored.digest[:12]
            raise RunError(
                "CKM713",
                f"hf://{self.target.repo}@{self.ref}: {wrong[0]} is not what was sent"
                f" ({len(wrong)} such), found {digest}",
                f"{self.target.revision} is as it was; run the same command again",
            )
        foreign = self.foreign(tree)
        if foreign:
            raise RunError(
                "CKM713",
                f"hf://{self.target.repo}@{self.ref}: {foreign[0]} differs from"
                f" {self.target.revision}, which this push does not change ({len(foreign)} such)",
                f"{self.target.revision} is as it was; see who wrote there, then run again",
            )

    def foreign(self, tree: Tree) -> list[str]:
        """Return paths outside the content in which the ref differs from its target."""
        own_paths = {item.path for item in self.content.items} | set(self.content.deleted)
        paths = {*tree, *self.target.tree} - own_paths
        return sorted(path for path in paths if tree.get(path) != self.target.tree.get(path))


# --------------------------------------------------------------------------- pull requests


def open_pull(target: Target, content: Content, summary: str) -> Stage:
    """Return the pull request of an earlier run of this push, or a new one as a draft."""
    title = f"{summary} (ckptmap {content.change})"
    with hub_errors(target.repo, RunError, "looking for its pull request"):
        pulls = [d for d in api().get_repo_discussions(target.repo) if _is_ours(d, content)]
    notes = []
    for pull in sorted(pulls, key=lambda d: d.num):
        if f"(ckptmap {content.change})" not in pull.title:
            notes.append(f"pull request {pull.num} began from another main: close it")
            continue
        stage = Stage(target, content, f"refs/pr/{pull.num}", title, pull.num)
        foreign = stage.foreign(stage.tree()[1])
        if not foreign:
            stage.notes.append(f"continued pull request {pull.num}")
            return stage
        notes.append(f"pull request {pull.num} is not continued: {foreign[0]} differs from main")
    with hub_errors(target.repo, RunError, "opening a pull request"):
        pull_request = api().create_pull_request(
            target.repo, title, description=_description(content)
        )
    return Stage(target, content, f"refs/pr/{pull_request.num}", title, pull_request.num, notes)


def _is_ours(discussion: Discussion, content: Content) -> bool:
    named = f"(ckptmap {content.id}" in discussion.title
    return discussion.is_pull_request and named and discussion.status in ("open", "draft")


def _description(content: Content) -> str:
    rows = [f"| `{item.path}` | {item.nbytes} | `{item.sha256}` |" for item in content.items]
    return "\n".join(
        [
            "Written by ckptmap. It is merged once every file here has the size and SHA-256 below;"
            " a push that was interrupted is continued here.",
            "", "| file | bytes | sha256 |", "|---|---|---|", *rows[:200],
            *([f"| and {len(rows) - 200} more | | |"] if len(rows) > 200 else []),
        ]
    )  # fmt: skip


def merge_pull(stage: Stage) -> None:
    """Merge the pull request. Raises RunError CKM714 where main changed and it cannot be merged."""
    from huggingface_hub.errors import HfHubHTTPError

    assert stage.pull is not None
    ready(stage)
    repo = stage.target.repo
    with hub_errors(repo, RunError, "merging"):
        try:
            api().merge_pull_request(repo, stage.pull)
        except HfHubHTTPError as error:
            if error.response.status_code not in (400, 409, 412):
                raise
            raise RunError(
                "CKM714",
                f"hf://{repo}: pull request {stage.pull} cannot be merged: "
                f"{error.server_message or 'the Hub refuses'}",
                f"main is as it was; look at {page(stage)}",
            ) from error


def ready(stage: Stage) -> None:
    """Mark the pull request as ready: a draft cannot be merged."""
    assert stage.pull is not None
    with hub_errors(stage.target.repo, RunError, "opening its pull request for merging"):
        details = api().get_discussion_details(stage.target.repo, stage.pull)
        if details.status == "draft":
            api().change_discussion_status(stage.target.repo, stage.pull, "open")


def page(stage: Stage) -> str:
    from huggingface_hub.constants import ENDPOINT

    return f"{ENDPOINT}/{stage.target.repo}/discussions/{stage.pull}"


# -------------------------------------------------------------------------------- branches


def open_branch(target: Target, content: Content, summary: str) -> Stage:
    """Return a work branch that begins at the target; an older one is replaced."""
    ref = f"ckptmap-{content.id}"
    stage = Stage(target, content, ref, f"{summary} (ckptmap {content.id})")
    branch = _at(target.repo, ref)
    with hub_errors(target.repo, RunError, "making a branch"):
        if branch is not None and stage.foreign(branch.tree(kind=RunError)):
            api().delete_branch(target.repo, branch=ref)
            branch = None
        if branch is None:
            api().create_branch(target.repo, branch=ref, revision=target.head)
        else:
            stage.notes.append(f"continued branch {ref}")
    return stage


def advance_branch(stage: Stage) -> None:
    """Move the target to the content of the work branch in one step; delete the work branch."""
    target, content = stage.target, stage.content
    with hub_errors(target.repo, RunError, f"moving {target.revision}"):
        if not target.exists:
            head, _ = stage.tree()
            api().create_branch(target.repo, branch=target.revision, revision=head)
        else:
            pending = content.left(target.tree)
            deletions = [path for path in content.deleted if path in target.tree]
            adds = [_addition(item) for item in pending]
            api().create_commit(
                target.repo, [*adds, *_deletions(deletions)], commit_message=stage.title,
                revision=target.revision, parent_commit=target.head,
            )  # fmt: skip
        api().delete_branch(target.repo, branch=stage.ref)


def sweep(target: Target) -> None:
    """Remove work branches that hold what the target holds. A run leaves one that is stopped right
    after it published."""
    with hub_errors(target.repo, RunError, "removing work branches"):
        for ref in api().list_repo_refs(target.repo).branches:
            if _WORK_BRANCH.fullmatch(ref.name) is None:
                continue
            if Repo(target.repo, ref.target_commit).tree(kind=RunError) == target.tree:
                api().delete_branch(target.repo, branch=ref.name)


# ------------------------------------------------------------------------------- both


def _at(repo: str, revision: str) -> Repo | None:
    """Return the repository at a revision; None where there is no such revision."""
    from huggingface_hub.errors import RevisionNotFoundError

    with hub_errors(repo, RunError):
        try:
            info = api().model_info(repo, revision=revision)
        except RevisionNotFoundError:
            return None
    return Repo(info.id, info.sha or "")


def _addition(item: UploadItem) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    with item.reading():
        operation = CommitOperationAdd(item.path, item.file or item.content)
    # It is known already, which saves reading the file once more.
    operation.upload_info.sha256 = bytes.fromhex(item.sha256)
    return operation


def _deletions(paths: list[str]) -> list[CommitOperationDelete]:
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(path, is_folder=False) for path in paths]


def find_or_create(name: HubName, private: bool) -> Repo:
    """Return the repository to push into; create it where there is none.

    Raises DestinationError CKM707 without a token, CKM711 where it was renamed, CKM712 where it is
    public and should be private.
    """
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with hub_errors(name.repo, DestinationError, "making it"):
        try:
            info = api().model_info(name.repo)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            api().create_repo(name.repo, private=private or None)
            info = api().model_info(name.repo)
    if info.id.lower() != name.repo.lower():
        raise DestinationError(
            "CKM711",
            f"hf://{name.repo}: was renamed, it is {info.id} now",
            f"push there: ckptmap push SRC {info.id}",
        )
    if private and not info.private:
        raise DestinationError(
            "CKM712",
            f"hf://{info.id}: is public, and --private was asked for",
            f"make it private first: {ENDPOINT}/{info.id}/settings",
        )
    return Repo(info.id, info.sha or "")
