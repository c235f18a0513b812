"""push(): publish a checkpoint on the Hub.

It is converted first where `to` says so, uploaded to a ref that nobody loads from, and checked
there. Then all files appear at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.core.formatting import human
from ckptmap.core.printable import as_lines
from ckptmap.errors import DestinationError, RunError
from ckptmap.operations.convert import run
from ckptmap.operations.hub import model_card as cards
from ckptmap.operations.hub.content import (
    Content,
    UploadItem,
    items_of,
    manifest_of,
    names_of,
    replaced,
    written,
)
from ckptmap.operations.hub.staging import (
    MAIN,
    Stage,
    Target,
    advance_branch,
    found_or_made,
    merge_pull,
    open_branch,
    open_pull,
    page,
    ready,
    sweep,
)
from ckptmap.planning.options import OptionKeywords, Progress, RunOptions
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan
from ckptmap.storage.hub.errors import has_token
from ckptmap.storage.hub.uri import SCHEME, HubName, is_hub, parse


@dataclass(frozen=True)
class PushReport:
    """What a push did. `pull_request` is a number; None where a branch was written."""

    repo: str
    revision: str
    commit: str
    url: str
    files: int
    nbytes: int
    sent_nbytes: int
    """Bytes of files that were not there yet, from this run or an earlier one."""
    seconds: float
    merged: bool
    pull_request: int | None = None
    deleted: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "repo": self.repo, "revision": self.revision, "commit": self.commit,
            "url": self.url, "files": self.files, "nbytes": self.nbytes,
            "sent_nbytes": self.sent_nbytes, "seconds": round(self.seconds, 3),
            "merged": self.merged, "pull_request": self.pull_request,
            "deleted": list(self.deleted), "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        where = f"{SCHEME}{self.repo}@{self.revision}"
        size = f"{self.files} files, {human(self.nbytes)}, {human(self.sent_nbytes)} sent now"
        if self.merged:
            first = f"published {where}: {size}; sizes and SHA-256 checked, commit {self.commit}"
        else:
            first = f"waiting for review: {self.url}: {size}; sizes and SHA-256 checked"
        lines = [f"{first}, in {self.seconds:.1f} s"]
        lines += [f"deleted: {path}" for path in self.deleted]
        return as_lines([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class _Made:
    """A local checkpoint to publish; `fresh` where this push has just converted it."""

    path: Path
    origin: str
    fresh: bool
    notes: Sequence[str] = ()


def push(
    src: str | os.PathLike[str],
    repo: str,
    *,
    to: str | None = None,
    private: bool = False,
    revision: str = "",
    pr: bool = False,
    base_model: str | None = None,
    work: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    max_memory: int | None = None,
    low_disk: bool = False,
    progress: Callable[[int], Progress] | None = None,
    **options: Unpack[OptionKeywords],
) -> PushReport:
    """Publish a checkpoint as `org/name` or `hf://org/name[@revision][/folder]` on the Hub.

    to        setup to convert to first; None: publish the files as they are
    options   the fields of `Options`, for the conversion
    revision  a branch, created where there is none; default: main
    pr        leave the pull request open instead of merging it
    work      directory to convert in; default: one in huggingface_hub's cache
    progress  takes the bytes that the conversion will write, and returns the function to call as
              they are written; huggingface_hub shows the progress of the upload itself

    `revision` shows all files or none, after every size and SHA-256 was checked on the Hub. The same
    call continues one that was interrupted. The same commit deletes old weights that a loader could
    take in place of the new ones, and adds a model card where there is none. Raises SourceError,
    PlanError or DestinationError before anything is written, RunError after that.
    """
    started = time.monotonic()
    name = _name(repo, revision, pr)
    if not has_token():
        raise DestinationError(
            "CKM707", f"{name}: there is no token to push with", "log in first: hf auth login"
        )
    source, made_plan = str(src) if is_hub(src) else src, None
    if to is not None:
        made_plan = plan(source, to, **options)
        made_plan.require_resolved()
    elif is_hub(src) or options:
        raise _needs_to(src)
    else:
        with open(src) as ckpt:  # raises before a repository is created
            names_of(Path(ckpt.path))
    at = found_or_made(name, private)
    made = _Made(Path(src), "", fresh=False)
    if made_plan is not None:
        shown = progress(made_plan.nbytes_out) if progress is not None else False
        how = RunOptions(
            device=device, max_memory=max_memory, low_disk=low_disk, digest="sha256", progress=shown
        )
        made = _converted(made_plan, at.id, work, how)
    done = _publish(made, HubName(at.id, name.revision, name.path), to, pr, base_model, started)
    if work is None and made.fresh:
        shutil.rmtree(made.path.parent, ignore_errors=True)
    return done


def _name(repo: str, revision: str, pr: bool) -> HubName:
    name = parse(repo if is_hub(repo) else SCHEME + repo)
    if revision and name.revision not in ("", revision):
        raise DestinationError(
            "CKM715", f"{name}: names another revision than {revision!r}", "name the revision once"
        )
    branch = name.revision or revision or MAIN
    if branch.startswith("refs/"):
        raise DestinationError(
            "CKM715",
            f"{name}: expected a branch, found {branch!r}",
            "name a branch with --revision, or open a pull request with --pr",
        )
    if ".cache" in name.path.split("/"):
        raise DestinationError(
            "CKM715",
            f"{name}: lies in a folder .cache, into which huggingface_hub pushes nothing",
            "name another folder",
        )
    if pr and branch != MAIN:
        raise DestinationError(
            "CKM715",
            f"{name}: --pr opens a pull request against main, expected no other branch, found {branch!r}",
            "leave out --pr or --revision",
        )
    return HubName(name.repo, branch, name.path)


def _needs_to(src: str | os.PathLike[str]) -> DestinationError:
    return DestinationError(
        "CKM715",
        f"{src}: is published as it is, expected a local checkpoint and no options of a conversion",
        "give --to SETUP, or fetch it first with ckptmap pull",
    )


def _converted(
    made: Plan, repo: str, work: str | os.PathLike[str] | None, how: RunOptions
) -> _Made:
    """Convert into a directory that the next run of the same plan finds again."""
    from huggingface_hub import cached_assets_path

    place = (
        Path(work) if work is not None else cached_assets_path("ckptmap", "push", made.digest[:16])
    )
    dst = place / (f"{repo.split('/')[1]}.pt" if made.one_file else "out")
    report = run(made, dst, how)
    return _Made(dst, made.ckpt.origin, fresh=True, notes=report.notes)


def _publish(
    made: _Made, name: HubName, to: str | None, pr: bool, base: str | None, started: float
) -> PushReport:
    with open(made.path) as ckpt:
        items, notes = items_of(ckpt, name.path, made.fresh)
        target = Target.look(name.repo, name.revision)
        items, more = _with_card(items, target, ckpt, made, name, to, base)
    content = Content(items, replaced(target.tree, items, name.path))
    notes = [*made.notes, *notes, *more, *_leftover_note(target, content)]
    if target.exists and content.is_in(target.tree):
        sweep(target)
        notes.append("was published already")
        return _report(target.repo, target, content, 0, started, notes)
    what = f"Upload {to or ckpt.setup}"
    stage = _stage(target, content, what, pr)
    sent = stage.write()
    stage.check()
    notes += stage.notes
    if pr:
        ready(stage)
        return _report(page(stage), target, content, sent, started, notes, stage, merged=False)
    if target.exists:
        _refuse_rivals(Target.look(name.repo, name.revision), content, name)
    (merge_pull if stage.pull is not None else advance_branch)(stage)
    after = Target.look(name.repo, name.revision)
    if not content.is_in(after.tree):
        raise RunError(
            "CKM713",
            f"{name}: does not hold the files of this push; somebody may have written at the same time",
            "look at its history on the Hub, then run the same command again",
        )
    _refuse_rivals(after, content, name)
    return _report(target.repo, after, content, sent, started, notes, stage)


def _refuse_rivals(now: Target, content: Content, name: HubName) -> None:
    """Raise RunError CKM714 where somebody has published other weights meanwhile.

    After a merge both would be there, and a loader might take either.
    """
    rivals = [
        path for path in replaced(now.tree, content.items, name.path) if path not in content.deleted
    ]
    if rivals:
        raise RunError(
            "CKM714",
            f"{name}: holds {rivals[0]}, which somebody wrote during this push ({len(rivals)} such), and"
            " a loader could take it for these weights",
            "run the same command again: these weights then take its place",
        )


def _stage(target: Target, content: Content, what: str, pr: bool) -> Stage:
    """Return a pull request; a work branch where the target is not main, or where the repository
    takes no pull requests."""
    if target.revision != MAIN:
        return open_branch(target, content, what)
    try:
        return open_pull(target, content, what)
    except RunError as error:
        if pr or error.code != "CKM707":
            raise
        stage = open_branch(target, content, what)
        stage.notes.append(f"through a branch, not a pull request: {error.message}")
        return stage


def _with_card(
    items: list[UploadItem],
    target: Target,
    ckpt: Checkpoint,
    made: _Made,
    name: HubName,
    to: str | None,
    base: str | None,
) -> tuple[list[UploadItem], list[str]]:
    """Add a model card where neither the repository nor the source has one; return notes, too."""
    mine = {item.path: item for item in items}
    path = f"{name.path}/{cards.NAME}" if name.path else cards.NAME
    if path in target.tree:
        if path not in mine:
            return items, []
        kept = [item for item in items if item.path != path]
        same = mine[path].equals(target.tree[path])
        return kept, [] if same else [f"{path}: the repository's own is kept"]
    if path in mine:
        return items, []
    manifest = manifest_of(ckpt)
    origin = made.origin or (manifest or {}).get("source", {}).get("origin", "")
    base_model = base or cards.base_of(origin, made.path)
    text = cards.card(name.repo, base_model, to or ckpt.setup, manifest, _library(made.path))
    return [*items, written(name.path, cards.NAME, text)], [f"{path}: a stub was written"]


def _library(folder: Path) -> str | None:
    """Return the library whose from_pretrained loads the folder, by the names of its weights."""
    if not (folder / "config.json").is_file():
        return None
    if any(folder.glob("diffusion_pytorch_model*.safetensors")):
        return "diffusers"
    return "transformers" if any(folder.glob("model*.safetensors")) else None


def _leftover_note(target: Target, content: Content) -> list[str]:
    """Return a note on weights of the repository that this push does not replace."""
    mine = {item.path for item in content.items} | set(content.deleted)
    kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
    left = [path for path in target.tree if path.endswith(kinds) and path not in mine]
    return [f"left in the repository, perhaps other weights: {', '.join(left[:4])}"] if left else []


def _report(
    url: str,
    at: Target,
    content: Content,
    sent: int,
    started: float,
    notes: Sequence[str],
    stage: Stage | None = None,
    merged: bool = True,
) -> PushReport:
    deleted: Mapping[str, object] = {} if stage is None else stage.target.tree
    return PushReport(
        at.repo, at.revision, at.head, url, len(content.items), content.nbytes, sent,
        time.monotonic() - started, merged, stage.pull if stage else None,
        [path for path in content.deleted if path in deleted], notes,
    )  # fmt: skip
