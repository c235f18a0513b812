"""push(): publish a checkpoint on the Hub.

The checkpoint is converted first if `to` names a setup. Its files are uploaded to a ref that nobody
loads from, and checked there. Then all of them appear at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open
from ckptmap.core import argument_checks
from ckptmap.core.formatting import counted, human
from ckptmap.core.log import log
from ckptmap.core.printable import as_lines, one_line
from ckptmap.core.short_repr import ShortRepr
from ckptmap.core.signatures import spelled_out
from ckptmap.core.sizes import Size
from ckptmap.errors import DestinationError, RunError
from ckptmap.execution.phases import Phases
from ckptmap.operations.convert import run
from ckptmap.operations.hub import model_card as cards
from ckptmap.operations.hub.content import (
    Content,
    UploadItem,
    content_item,
    items_of,
    manifest_of,
    names_of,
    replaced_paths,
)
from ckptmap.operations.hub.staging import (
    MAIN,
    Stage,
    Target,
    advance_branch,
    find_or_create,
    merge_pull,
    open_branch,
    open_pull,
    page,
    ready,
    sweep,
)
from ckptmap.planning.options import (
    ALIASES,
    OPTION_NAMES,
    OptionKeywords,
    Options,
    RunOptions,
    run_options_from,
)
from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan
from ckptmap.protocols.progress import HASHING, READING, UPLOADING, Progress
from ckptmap.storage.hub.errors import has_token
from ckptmap.storage.hub.resolve import refuse_elsewhere
from ckptmap.storage.hub.uri import SCHEME, HubName, is_hub, parse

OWN = (
    "private", "revision", "pr", "base_model", "work", "device", "max_memory", "low_disk", "progress",
)  # fmt: skip
"""Arguments of `push` beside the options of a conversion."""


@dataclass(frozen=True, repr=False)
class PushReport(ShortRepr):
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
        size = f"{counted(self.files, 'file')}, {human(self.nbytes)}, {human(self.sent_nbytes)} sent now"
        if self.merged:
            first = f"published {where}: {size}; sizes and SHA-256 checked, commit {self.commit}"
        else:
            first = f"waiting for review: {self.url}: {size}; sizes and SHA-256 checked"
        lines = [f"{first}, in {self.seconds:.1f} s"]
        lines += [f"deleted: {path}" for path in self.deleted]
        return as_lines([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class _LocalCheckpoint:
    """A local checkpoint to publish; `fresh` where this push has just converted it."""

    path: Path
    origin: str
    fresh: bool
    notes: Sequence[str] = ()


@spelled_out(Options)
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
    max_memory: Size | None = None,
    low_disk: bool = False,
    progress: bool | Progress = False,
    **options: Unpack[OptionKeywords],
) -> PushReport:
    """Publish a checkpoint as `org/name` or `hf://org/name[@revision][/folder]` on the Hub.

    to        setup to convert to first; None: publish the files as they are
    options   the fields of `Options`, for the conversion
    revision  a branch, created where there is none; default: main
    pr        leave the pull request open instead of merging it
    work      directory to convert in; default: one in huggingface_hub's cache
    progress  as in `RunOptions`

    `revision` shows all files or none, after every size and SHA-256 was checked on the Hub. The same
    call continues one that was interrupted. The same commit deletes old weights that a loader could
    take in place of the new ones, and adds a model card where there is none. Raises SourceError,
    PlanError or DestinationError before anything is written, RunError after that.
    """
    started = time.monotonic()
    argument_checks.known_keywords(options, (*OPTION_NAMES, *ALIASES, *OWN), "push()")
    argument_checks.path("src", src)
    argument_checks.string("repo", repo)
    phases = Phases.of(progress)
    log.info("push %s to %s", one_line(str(src)), one_line(repo))
    name = _require_possible(src, repo, revision, pr)
    phases.begin(READING)
    source, new_plan = str(src) if is_hub(src) else src, None
    if to is not None:
        new_plan = plan(source, to, **options)
        new_plan.require_resolved()
    elif is_hub(src) or options:
        raise _missing_to(src)
    else:
        with open(src) as ckpt:  # raises before a repository is created
            names_of(Path(ckpt.path))
    repository = find_or_create(name, private)
    local = _LocalCheckpoint(Path(src), "", fresh=False)
    if new_plan is not None:
        how = {"device": device, "max_memory": max_memory, "low_disk": low_disk, "digest": "sha256"}
        run_options = run_options_from({**how, "progress": phases}, "push()")
        local = _convert(new_plan, repository.id, work, run_options)
    target = HubName(repository.id, name.revision, name.path)
    report = _publish(local, target, to, pr, base_model, started, phases)
    if work is None and local.fresh:
        shutil.rmtree(local.path.parent, ignore_errors=True)
    return report


def _require_possible(src: str | os.PathLike[str], repo: str, revision: str, pr: bool) -> HubName:
    """Return the place to push to. Raises SourceError CKM101 where `src` or `repo` is a stream or an address,
    DestinationError CKM707 without a token."""
    name = _parse_name(repo, revision, pr)
    if not is_hub(src):
        refuse_elsewhere(os.fspath(src))
    if not has_token():
        raise DestinationError(
            "CKM707", f"{name}: there is no token to push with", "log in first: hf auth login"
        )
    return name


def _parse_name(repo: str, revision: str, pr: bool) -> HubName:
    if not is_hub(repo):
        refuse_elsewhere(repo)
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


def _missing_to(src: str | os.PathLike[str]) -> DestinationError:
    return DestinationError(
        "CKM715",
        f"{src}: is published as it is, expected a local checkpoint and no options of a conversion",
        "give --to SETUP, or fetch it first with ckptmap pull",
    )


def _convert(
    new_plan: Plan, repo: str, work: str | os.PathLike[str] | None, run_options: RunOptions
) -> _LocalCheckpoint:
    """Convert into a directory that the next run of the same plan finds again."""
    from huggingface_hub import cached_assets_path

    folder = (
        Path(work)
        if work is not None
        else cached_assets_path("ckptmap", "push", new_plan.digest[:16])
    )
    dst = folder / (f"{repo.split('/')[1]}.pt" if new_plan.one_file else "out")
    report = run(new_plan, dst, run_options)
    return _LocalCheckpoint(dst, new_plan.ckpt.origin, fresh=True, notes=report.notes)


def _publish(
    local: _LocalCheckpoint,
    name: HubName,
    to: str | None,
    pr: bool,
    base: str | None,
    started: float,
    phases: Phases,
) -> PushReport:
    phases.begin(HASHING)
    with open(local.path) as ckpt:
        items, notes = items_of(ckpt, name.path, local.fresh)
        target = Target.look(name.repo, name.revision)
        items, card_notes = _with_card(items, target, ckpt, local, name, to, base)
    content = Content(items, replaced_paths(target.tree, items, name.path))
    notes = [*local.notes, *notes, *card_notes, *_leftover_note(target, content)]
    if target.exists and content.is_in(target.tree):
        sweep(target)
        notes.append("was published already")
        return _report(target.repo, target, content, 0, started, notes)
    summary = f"Upload {to or ckpt.setup}"
    stage = _stage(target, content, summary, pr)
    phases.begin(UPLOADING, content.nbytes)
    sent = stage.write(phases.advance)
    stage.check()
    notes += stage.notes
    if pr:
        ready(stage)
        return _report(page(stage), target, content, sent, started, notes, stage, merged=False)
    if target.exists:
        _refuse_rivals(Target.look(name.repo, name.revision), content, name)
    if stage.pull is not None:
        merge_pull(stage)
    else:
        advance_branch(stage)
    published = Target.look(name.repo, name.revision)
    if not content.is_in(published.tree):
        raise RunError(
            "CKM713",
            f"{name}: does not hold the files of this push; somebody may have written at the same time",
            "look at its history on the Hub, then run the same command again",
        )
    _refuse_rivals(published, content, name)
    return _report(target.repo, published, content, sent, started, notes, stage)


def _refuse_rivals(target: Target, content: Content, name: HubName) -> None:
    """Raise RunError CKM714 where somebody has published other weights meanwhile.

    After a merge both would be there, and a loader might take either.
    """
    rivals = [
        path
        for path in replaced_paths(target.tree, content.items, name.path)
        if path not in content.deleted
    ]
    if rivals:
        raise RunError(
            "CKM714",
            f"{name}: holds {rivals[0]}, which somebody wrote during this push ({len(rivals)} such), and"
            " a loader could take it for these weights",
            "run the same command again: these weights then take its place",
        )


def _stage(target: Target, content: Content, summary: str, pr: bool) -> Stage:
    """Return a pull request; a work branch where the target is not main, or where the repository
    takes no pull requests."""
    if target.revision != MAIN:
        return open_branch(target, content, summary)
    try:
        return open_pull(target, content, summary)
    except RunError as error:
        if pr or error.code != "CKM707":
            raise
        stage = open_branch(target, content, summary)
        stage.notes.append(f"through a branch, not a pull request: {error.message}")
        return stage


def _with_card(
    items: list[UploadItem],
    target: Target,
    ckpt: Checkpoint,
    local: _LocalCheckpoint,
    name: HubName,
    to: str | None,
    base: str | None,
) -> tuple[list[UploadItem], list[str]]:
    """Add a model card where neither the repository nor the source has one; return notes, too."""
    by_path = {item.path: item for item in items}
    path = f"{name.path}/{cards.NAME}" if name.path else cards.NAME
    if path in target.tree:
        if path not in by_path:
            return items, []
        others = [item for item in items if item.path != path]
        is_equal = by_path[path].equals(target.tree[path])
        return others, [] if is_equal else [f"{path}: the repository's own is kept"]
    if path in by_path:
        return items, []
    manifest = manifest_of(ckpt)
    origin = local.origin or ("" if manifest is None else manifest["source"].get("origin", ""))
    base_model = base or cards.base_of(origin, local.path)
    text = cards.card(name.repo, base_model, to or ckpt.setup, manifest, _library(local.path))
    return [*items, content_item(name.path, cards.NAME, text)], [f"{path}: a stub was written"]


def _library(folder: Path) -> str | None:
    """Return the library whose from_pretrained loads the folder, by the names of its weights."""
    if not (folder / "config.json").is_file():
        return None
    if any(folder.glob("diffusion_pytorch_model*.safetensors")):
        return "diffusers"
    return "transformers" if any(folder.glob("model*.safetensors")) else None


def _leftover_note(target: Target, content: Content) -> list[str]:
    """Return a note on weights of the repository that this push does not replace."""
    own_paths = {item.path for item in content.items} | set(content.deleted)
    kinds = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
    leftovers = [path for path in target.tree if path.endswith(kinds) and path not in own_paths]
    return (
        [f"left in the repository, perhaps other weights: {', '.join(leftovers[:4])}"]
        if leftovers
        else []
    )


def _report(
    url: str,
    target: Target,
    content: Content,
    sent: int,
    started: float,
    notes: Sequence[str],
    stage: Stage | None = None,
    merged: bool = True,
) -> PushReport:
    deleted: Mapping[str, object] = {} if stage is None else stage.target.tree
    return PushReport(
        target.repo, target.revision, target.head, url, len(content.items), content.nbytes, sent,
        time.monotonic() - started, merged, stage.pull if stage else None,
        [path for path in content.deleted if path in deleted], notes,
    )  # fmt: skip
