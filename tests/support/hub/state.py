"""What the Hub of the tests holds: repositories as commits of trees, refs, pull requests, objects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

MAIN = "main"


@dataclass(frozen=True)
class Blob:
    """A file of a tree. LFS files are kept by the SHA-256 of their content."""

    content: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\n"
            f"size {len(self.content)}\n"
        ).encode()

    @cached_property
    def git_sha1(self) -> str:
        data = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1


Tree = dict[str, Blob]


@dataclass
class Discussion:
    num: int
    title: str
    description: str
    author: str
    base: str
    """The commit of main that a pull request began at."""
    is_pull_request: bool = True
    status: str = "draft"
    merge_commit: str = ""


class Conflict(Exception):
    """Both sides changed a file, or the parent commit is not the head any more."""


@dataclass
class Repo:
    """A repository as the Hub keeps it: every ref points to a commit, every commit to a tree."""

    id: str
    owner: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    discussions: list[Discussion] = field(default_factory=list)
    lfs_stored: dict[str, bytes] = field(default_factory=dict)
    history: list[tuple[str, str]] = field(default_factory=list)
    """(ref, commit) of every move of a ref, in order."""

    def __post_init__(self) -> None:
        if not self.refs:
            attributes = Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", lfs=False)
            self.commit(MAIN, {".gitattributes": attributes})

    def commit(self, ref: str, tree: Tree, parent: str | None = None) -> str:
        if parent is not None and self.refs.get(ref) != parent:
            raise Conflict(f"{ref} is at {self.refs.get(ref)}, not at {parent}")
        text = f"{self.id} {ref} {len(self.commits)}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(tree)
        self.refs[ref] = sha
        self.history.append((ref, sha))
        return sha

    def resolve(self, revision: str) -> str | None:
        if revision in self.commits:
            return revision
        return self.refs.get(revision)

    def tree(self, revision: str = MAIN) -> Tree:
        sha = self.resolve(revision)
        assert sha is not None
        return self.commits[sha]

    def open_pull(self, title: str, description: str, author: str) -> Discussion:
        pull = Discussion(
            len(self.discussions) + 1, title, description, author, self.refs[MAIN]
        )  # fmt: skip
        self.discussions.append(pull)
        self.refs[f"refs/pr/{pull.num}"] = self.refs[MAIN]
        return pull

    def merge(self, pull: Discussion) -> str:
        """The pull request's changes on what main is now. Raises Conflict."""
        base, main = self.commits[pull.base], self.tree()
        mine = self.tree(f"refs/pr/{pull.num}")
        if pull.status != "open":
            raise Conflict(f"pull request {pull.num} is {pull.status}, expected open")
        for path in {*base, *mine}:
            changed = base.get(path) != mine.get(path)
            if changed and main.get(path) not in (base.get(path), mine.get(path)):
                raise Conflict(f"{path}: changed on both sides")
        merged = {
            path: blob
            for path in {*main, *mine}
            if (blob := (mine if base.get(path) != mine.get(path) else main).get(path)) is not None
        }
        pull.merge_commit = self.commit(MAIN, merged)
        pull.status = "merged"
        return pull.merge_commit


def holds(tree: Tree, folder: Path, below: str = "") -> bool:
    """Every file of the folder, byte for byte."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return all(
        (blob := tree.get(below + file.relative_to(folder).as_posix())) is not None
        and blob.content == file.read_bytes()
        for file in files
    )


def shown_on(repo: Repo, ref: str = MAIN) -> list[Tree]:
    """Every tree that the ref has ever shown, in order."""
    return [repo.commits[commit] for moved, commit in repo.history if moved == ref]
