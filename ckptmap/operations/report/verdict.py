"""The verdict: what a checkpoint is, who wrote it, what is wrong with it, and the command to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted, human
from ckptmap.core.printable import advised, one_line, quote
from ckptmap.errors import AnswerNo, CkptmapError
from ckptmap.operations.check_structure import check_structure
from ckptmap.operations.report.differences import Differences
from ckptmap.operations.report.shard_map import ShardMap
from ckptmap.operations.verify import read_manifest
from ckptmap.planning.options import Options
from ckptmap.planning.plan import Plan
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.typed_options import as_given

UNEVEN = 1.5
"""From this imbalance on the verdict tells of it."""
LISTED = 12
"""Findings of one kind that the verdict lists."""
WRONG, NOTE, FINE = "wrong", "note", "fine"


@dataclass(frozen=True)
class Finding:
    """Something that a reader should know. `level` is "wrong" or "note"."""

    level: str
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Verdict:
    """The head of the page.

    level      "wrong": something must be done before a conversion; "note", or "fine"
    what       one sentence: the kind of checkpoint and its size
    who        one sentence: what wrote it, as far as the files tell
    findings   what is wrong, then notes
    command    the command to run next, and why
    """

    level: str
    title: str
    what: str
    who: str
    findings: Sequence[Finding]
    command: str
    purpose: str

    @property
    def headline(self) -> str:
        wrong = sum(finding.level == WRONG for finding in self.findings)
        notes = len(self.findings) - wrong
        if wrong:
            return f"{counted(wrong, 'finding')} must be answered first"
        return f"Readable, with {counted(notes, 'note')}" if notes else "Readable, nothing to note"


@dataclass(frozen=True)
class Manifest:
    """The manifest of an output of ckptmap: None where there is none, or it cannot be read."""

    document: ManifestDocument | None
    problems: Sequence[str] = ()


def read(ckpt: Checkpoint) -> Manifest:
    """Return the manifest of a checkpoint, compared with its headers."""
    try:
        document = read_manifest(ckpt)
    except AnswerNo:
        return Manifest(None)
    except CkptmapError as error:
        return Manifest(None, [str(error)])
    return Manifest(document, check_structure(ckpt, document))


def verdict(
    ckpt: Checkpoint,
    notes: Sequence[str],
    size: tuple[int, int],
    manifest: Manifest,
    shards: ShardMap,
    plans: Sequence[Plan],
    compared: Differences | None,
    refused: Sequence[Finding],
) -> Verdict:
    """Return the verdict. `size` counts the tensors and their bytes; `refused` are the findings of
    conversions that cannot be planned."""
    wrong = [*_wrong(ckpt, manifest, plans), *refused]
    said = list(_different(compared))
    said += [Finding(NOTE, one_line(note)) for note in dict.fromkeys([*notes, *_plan_notes(plans)])]
    said += _observed(ckpt, shards)
    level = WRONG if wrong else NOTE if said else FINE
    command, purpose = _next(ckpt, manifest, plans, compared)
    findings = [
        replace(found, text=as_given(found.text), hint=as_given(found.hint))
        for found in (*_first(wrong), *_first(said))
    ]
    return Verdict(
        level, one_line(ckpt.shown), _what(ckpt, *size), _who(ckpt, manifest), findings,
        one_line(command), purpose,
    )  # fmt: skip


def _what(ckpt: Checkpoint, tensors: int, nbytes: int) -> str:
    setup = next((s for s in registry.setups() if ckpt.setup.split("-")[0] == s.name), None)
    named = next((s for s in registry.setups() if ckpt.setup == s.name), setup)
    kind = named.summary if named is not None and named.writer == ckpt.index.container else ""
    files = counted(len(ckpt.index.files), "file")
    size = f"{counted(tensors, 'tensor')} with {human(nbytes)} in {files}"
    return f"{ckpt.setup}: {kind or ckpt.index.container}. It holds {size}."


def _who(ckpt: Checkpoint, manifest: Manifest) -> str:
    ranks = f" on {counted(ckpt.world_size, 'rank')}" if ckpt.world_size > 1 else ""
    document = manifest.document
    if document is not None:
        source, world_size = document["source"], world_size_in(document)
        origin = f" ({source['origin']})" if source.get("origin") else ""
        return one_line(
            f"Written by ckptmap {document['ckptmap']} as {document['setup']} for"
            f" {counted(world_size, 'rank')}, from {source['setup']}{origin}."
        )
    wrapped = {
        "_orig_mod.": "torch.compile", "module.": "DDP", "_fsdp_wrapped_module.": "FSDP1",
        "_checkpoint_wrapped_module.": "activation checkpointing",
    }  # fmt: skip
    seen = [wrapped.get(name, name) for name in ckpt.wrappers]
    live = f"; its names show {', '.join(seen)}" if seen else ""
    return one_line(
        f"Written as {ckpt.index.container}{ranks}{live}. It has no manifest of ckptmap."
    )


def world_size_in(document: ManifestDocument) -> int:
    """Return the number of ranks that a manifest states; 0 where it states none. Nobody has checked it before."""
    world_size = document.get("world_size")
    return world_size if isinstance(world_size, int) else 0


def _wrong(ckpt: Checkpoint, manifest: Manifest, plans: Sequence[Plan]) -> Iterator[Finding]:
    for problem in manifest.problems:
        yield Finding(WRONG, one_line(problem), "convert the source again")
    if not plans:
        for item in ckpt.refused:
            hint = f"leave it behind with {advised(drop=item.key)}" if item.droppable else ""
            yield Finding(WRONG, one_line(f"{item.key}: {item.reason}"), one_line(hint))
    for plan in plans:
        for missing in plan.unresolved:
            text = f"--to {plan.aim.text}: {missing.key}: {missing.reason}"
            yield Finding(WRONG, one_line(text), one_line(missing.hint))


def _different(compared: Differences | None) -> Iterator[Finding]:
    if compared is not None and not compared.report.equal:
        yield Finding(NOTE, f"Against {one_line(compared.report.b)}: {compared.text}")


def _plan_notes(plans: Sequence[Plan]) -> Iterator[str]:
    for plan in plans:
        yield from (f"--to {plan.aim.text}: {note}" for note in plan.notes)


def _observed(ckpt: Checkpoint, shards: ShardMap) -> Iterator[Finding]:
    if shards.imbalance >= UNEVEN and len(shards.rows) > 1:
        yield Finding(
            NOTE, f"The fullest file holds {shards.imbalance:.2f} times the mean of all files."
        )
    if ckpt.optimizer_by_index:
        yield Finding(
            NOTE,
            "The optimizer state is keyed by index: the file does not say which parameter is which.",
            "name them with --param-order FILE, or by a config.json: --like PATH",
        )


UNTYPED = ("to", "param_order", "exact_scales", "max_shard_nbytes", "wrap")
"""Options that are typed in another form than they are stored in."""


def _flags(options: Options) -> Iterator[str]:
    """Yield the options of a conversion that differ from their defaults, as they are typed."""
    for field in fields(Options):
        value = getattr(options, field.name)
        if field.name in UNTYPED or value == field.default:
            continue
        name = f" --{field.name.replace('_', '-')}"
        if value is True:
            yield name
        else:
            yield from (f"{name} {quote(str(item))}" for item in _items(value))
    if options.wrap is not None:
        yield f" --wrap {quote(','.join(options.wrap))}"
    if options.exact_scales:
        yield " --exact-scales"


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else (value,)


def _first(findings: Sequence[Finding]) -> list[Finding]:
    more = len(findings) - LISTED
    if more <= 0:
        return list(findings)
    return [*findings[:LISTED], Finding(findings[0].level, f"and {more:,} more")]


def _next(
    ckpt: Checkpoint, manifest: Manifest, plans: Sequence[Plan], compared: Differences | None
) -> tuple[str, str]:
    """Return the command to run next, and what it is for."""
    here = quote(ckpt.shown)
    for plan in plans:
        if plan.unresolved:
            drops = " ".join(dict.fromkeys(item.option for item in plan.unresolved if item.option))
            line = f"ckptmap plan {here} --to {plan.aim.text} {drops}".rstrip()
            return line, "shows every key that the plan cannot account for"
    if plans:
        flags = "".join(_flags(plans[0].options))
        line = f"ckptmap convert {here} out --to {plans[0].aim.text}{flags}"
        return line, "converts it as shown below"
    if compared is not None and compared.report.mended_by:
        return compared.report.mended_by, "compares them under names that match"
    if compared is not None and not compared.report.equal:
        line = f"ckptmap diff {quote(compared.report.a)} {quote(compared.report.b)} --values"
        return line, "lists every difference"
    if manifest.document is not None:
        return f"ckptmap verify {here}", "compares every byte with the manifest"
    if ckpt.refused:
        return f"ckptmap inspect {here}", "lists what would be refused"
    to = "full" if ckpt.wrappers else "hf"
    return f"ckptmap plan {here} --to {to}", "shows what a conversion would do with every key"
