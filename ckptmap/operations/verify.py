"""verify(): check that an output is complete and undamaged, and that its values are the source's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmap.checkpoint.cast_tensor import cast_to
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import difference, holds, same_bytes, same_parts, worst
from ckptmap.checkpoint.compare_values import (
    extra_value_pair,
    matched_extra_tensors,
    optimizer_pairs,
)
from ckptmap.checkpoint.lora.merge_adapter import merge_adapter
from ckptmap.checkpoint.open import open
from ckptmap.checkpoint.rename import renamed_like_output
from ckptmap.checkpoint.translate_names import left_out_as_tied, translated_like_output
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.formatting import counted, human
from ckptmap.core.log import log
from ckptmap.core.printable import as_lines, one_line
from ckptmap.core.short_repr import ShortRepr
from ckptmap.core.signatures import nearest_keyword
from ckptmap.core.state_paths import differing, role_and_fqn
from ckptmap.errors import AnswerNo, CkptmapError, SourceError
from ckptmap.execution import manifest as manifests
from ckptmap.execution.phases import Phases
from ckptmap.operations.check_digests import check_digests
from ckptmap.operations.check_structure import check_structure
from ckptmap.operations.encode_again import FEED_NUMEL, encoded_writes
from ckptmap.operations.extra_files import extra_files
from ckptmap.optim.bnb_writer import as_bnb
from ckptmap.planning.kept_codes import code_grid, kept_fidelity, writes_keeping_codes
from ckptmap.planning.reference import with_tied_heads
from ckptmap.planning.restored_scales import restored
from ckptmap.protocols.progress import COMPARING, READING, Progress
from ckptmap.storage.file_records import DamagedRecord
from ckptmap.storage.hub.resolve import origins_in_errors
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.manifest_file import chunks_of, parse
from ckptmap.storage.manifest_schema import ListedConversion, ListedMerge, ManifestDocument
from ckptmap.storage.process_guards import one_torch_thread
from ckptmap.storage.resource_limits import SHORT, named_if_unreadable
from ckptmap.tensors import FLOATING

SHOWN = 20
"""Problems that the text lists."""


@dataclass(frozen=True, repr=False)
class VerifyReport(ShortRepr):
    """What was checked, and the problems; none where the output is as it should be."""

    path: str
    tensors: int
    nbytes: int
    checks: tuple[str, ...]
    problems: tuple[str, ...]
    errors: Mapping[str, float] = field(default_factory=dict)
    """Lossy tensors, by FQN: rms of the difference from the source over rms of the source."""
    extra: tuple[str, ...] = ()
    """Files and directories that do not belong to the output. Each is one of the problems, too."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def intact(self) -> bool:
        """Return whether all that was written is as it should be; other files may lie beside."""
        return len(self.problems) == len(self.extra)

    def to_json(self) -> dict[str, object]:
        return {
            "schema": 1, "ok": self.ok, "path": self.path, "tensors": self.tensors,
            "nbytes": self.nbytes, "checks": list(self.checks), "problems": list(self.problems),
            "errors": dict(self.errors),
        }  # fmt: skip

    def __str__(self) -> str:
        held = f"{counted(self.tensors, 'stored tensor')}, {human(self.nbytes)}"
        head = f"{self.path}: {held}; {', '.join(self.checks)}"
        lines = [f"{'ok' if self.ok else 'NOT ok'}: {head}"]
        if self.errors:
            fqn = worst(self.errors)
            lines.append(
                f"  lossy: {counted(len(self.errors), 'tensor')}, worst {fqn}:"
                f" {self.errors[fqn]:.3e} relative rms"
            )
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN} more (all of them with --json)")
        return as_lines(lines)


@nearest_keyword
@tensors_on_cpu()
def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    threads: int | None = None,
    adapter: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    progress: bool | Progress = False,
) -> VerifyReport:
    """Check coverage, sizes and digests against the manifest; with `against`, also the values.

    against  the source: moved values must equal its values bit for bit, cast ones those of
             `torch.Tensor.to`, quantized ones those of encoding its values once more
    adapter  the LoRA adapter that was merged into `against`; its config lies beside it
    base     the checkpoint with the scales of the payloads of `against`
    progress a function to call, `ckptmap.protocols.Progress`; True: print lines on stderr

    The report states the error of quantized values and does not judge it. Raises AnswerNo CKM403
    where there is no manifest.
    """
    phases = Phases.of(progress)
    log.info("verify %s", one_line(str(path)))
    phases.begin(READING)
    try:
        ckpt = open(path)
    except SourceError as error:
        if error.code in ("CKM101", SHORT):
            raise
        extra = _extra_beside_manifest(Path(path))  # one of them may be why it cannot be read
        problems = [str(error), *map(_does_not_belong, extra)]
        return VerifyReport(str(path), 0, 0, ("structure",), tuple(problems), extra=extra)
    with ckpt, origins_in_errors(ckpt.files.mounts), named_if_unreadable():
        document = read_manifest(ckpt)
        problems = check_structure(ckpt, document)
        checks = ["structure"]
        if not problems:
            taken, problems = check_digests(ckpt, document, threads, phases)
            checks += taken
        errors: dict[str, float] = {}
        if against is not None:
            opened = against if isinstance(against, Checkpoint) else open(against)
            with opened if opened is not against else nullcontext():
                shown, wrong, errors = _compared(ckpt, opened, document, adapter, base, phases)
            problems += wrong
            checks.append(f"values against {shown}")
        root = Path(ckpt.path)
        extra = tuple(extra_files(root, document)) if root.is_dir() else ()
        problems += map(_does_not_belong, extra)
        nbytes = sum(chunk.nbytes for _, chunk in chunks_of(document))
        return VerifyReport(
            ckpt.shown, len(document["tensors"]), nbytes, tuple(checks), tuple(problems), errors,
            extra,
        )  # fmt: skip


def _extra_beside_manifest(root: Path) -> tuple[str, ...]:
    """Return the extra files of a directory that cannot be opened, if it has a sound manifest."""
    try:
        return tuple(extra_files(root, parse((root / manifests.NAME).read_bytes(), str(root))))
    except (OSError, SourceError):
        return ()


def _does_not_belong(name: str) -> str:
    return f"{name}: does not belong to the output: move it elsewhere"


def _compared(
    ckpt: Checkpoint,
    source: Checkpoint,
    document: ManifestDocument,
    adapter: str | os.PathLike[str] | None,
    base: str | os.PathLike[str] | None,
    phases: Phases,
) -> tuple[str, list[str], dict[str, float]]:
    """Return the name of the source, the problems, and the errors of quantized tensors by FQN."""
    with origins_in_errors(source.files.mounts), named_if_unreadable():
        source = renamed_like_output(source, document.get("renamed"), _weights(document))
        if base is not None:
            source, _, _ = restored(source, base)
        if adapter is not None:
            merged = document.get("merged") or ListedMerge()
            source = merge_adapter(
                source, adapter, document["setup"], leave=merged.get("leave", ()),
                untied=merged.get("untied"), in_out=merged.get("in_out"),
            )  # fmt: skip
        source = with_tied_heads(_source_named_like(ckpt, source, document), ckpt)
        if any(map(IN_BNBS_NAMES.fullmatch, document["logical"])):
            ckpt, source = (_in_bnbs_names(one) for one in (ckpt, source))
        with one_torch_thread(source.merged is not None):  # as it was merged, to the bit
            values, errors = _compare_with_source(ckpt, source, document, phases)
            values += _damage(source)
        values = [*values, *_plain_problems(ckpt, source, document["dropped"])]
        return source.shown, values, errors


def _damage(source: Checkpoint) -> Iterator[str]:
    """Yield a problem where bytes of the source that were read in parts are damaged."""
    try:
        source.files.settle_sums()
    except DamagedRecord as error:
        tensors = ((fqn, stored) for fqn in source for stored in source[fqn].beneath)
        yield str(error.naming(tensors))


def read_manifest(ckpt: Checkpoint) -> ManifestDocument:
    """Return the manifest of an output. Raises AnswerNo CKM403 where there is none."""
    data = None if ckpt.index.manifest is None else ckpt.index.manifest()
    file = Path(ckpt.path) / manifests.NAME
    if data is None and file.is_file():
        data = ckpt.files.mounts.local_copy(file).read_bytes()
    if data is None:
        raise AnswerNo(
            "CKM403",
            f"{ckpt.path}: has no manifest, so ckptmap did not write it",
            "compare two checkpoints with `ckptmap diff A B --values`",
        )
    return parse(data, ckpt.path)


# --------------------------------------------------------------------------------- values


def _compare_with_source(
    ckpt: Checkpoint, source: Checkpoint, document: ManifestDocument, phases: Phases
) -> tuple[list[str], dict[str, float]]:
    """Return the problems of the values, and the error of every lossy tensor by FQN."""
    problems: list[str] = []
    errors: dict[str, float] = {}
    if document.get("merged") is not None and source.merged is None:
        return ["an adapter was merged into it: give that adapter with --adapter PATH"], {}
    beside = matched_extra_tensors(source, ckpt)
    weights = _weights(document)
    phases.begin(COMPARING, sum(chunk.nbytes for _, chunk in chunks_of(document)))
    phases.mention_torch()
    for name, entry in document["logical"].items():
        role, fqn = role_and_fqn(name)
        name_here = beside.get(fqn, fqn) if role == "other" else fqn
        mine, theirs = ckpt.find(role, name_here), source.find(role, fqn)
        phases.advance(0, name)
        if mine is None or theirs is None:
            problems.append(f"{name}: is not in {ckpt.path if mine is None else source.path}")
        elif mine.info.shape != theirs.info.shape:
            problems += _payload_problems(name, theirs, mine)
        else:
            try:
                wrong = CHECKS[entry["fidelity"]](_as_encoded(theirs, entry), mine, errors)
            except CkptmapError as error:
                if error.code == SHORT:  # this process is short of memory or files: no verdict
                    raise
                wrong = str(error)
            problems += [f"{name}: {wrong}"] if wrong else []
            phases.advance(mine.nbytes, name)
    known = {*weights, *document["dropped"], *document["tied"]}
    known |= left_out_as_tied(source, document.get("names"), known)
    problems += [f"{fqn}: is in {source.path} only" for fqn in source if fqn not in known]
    return problems, errors


def _as_encoded(source: LazyTensor, entry: ListedConversion) -> LazyTensor:
    """Return the values that were encoded: cast first where the encoding states another dtype."""
    dtype = entry["target"].partition("(")[2].removesuffix(")")
    if entry["fidelity"] not in ("quantize", "requantize") or dtype not in FLOATING:
        return source
    return cast_to(source, dtype)


def _plain_problems(ckpt: Checkpoint, source: Checkpoint, dropped: Container[str]) -> Iterator[str]:
    """Yield differences of plain values: beside the weights, and settings of the optimizer."""
    theirs, mine, depth = extra_value_pair(source, ckpt, dropped)
    yield from differing(mine, theirs, depth)
    for theirs, mine, depth in optimizer_pairs(source, ckpt) if ckpt.optimizer_groups else ():
        yield from differing(mine, theirs, depth)


def _source_named_like(
    ckpt: Checkpoint, source: Checkpoint, document: ManifestDocument
) -> Checkpoint:
    """Return the source with the names of the output, and its indices as the output's groups."""
    if source.optimizer_by_index:
        source = _source_ordered_like(ckpt, source)
    names = document.get("names")
    return source if names is None else translated_like_output(source, names, _weights(document))


def _in_bnbs_names(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its optimizer state in the tensors of bitsandbytes, as one was written
    for its loader. It stays as it is where its state has no such form, which is then reported."""
    try:
        return replace(ckpt, optimizer_reader=ckpt.optimizer_reader.named_as(as_bnb))
    except CkptmapError:
        return ckpt


def _weights(document: ManifestDocument) -> list[str]:
    """Return the FQNs of the weights of an output."""
    return [fqn for role, fqn in map(role_and_fqn, document["logical"]) if role == "model"]


def _payload_problems(name: str, source: LazyTensor, mine: LazyTensor) -> Iterator[str]:
    """Yield a problem unless the source holds this payload; its scales then came from --base."""
    here, there = mine.parts.get(""), source.parts.get("")
    if here is None or there is None or here.info != there.info:
        yield f"{name}: {mine.info}, the source has {source.info}"
    elif same_bytes(there, here, source.files, mine.files) is not None:
        yield f"{name}: its payload differs from the source's"


def _source_ordered_like(ckpt: Checkpoint, source: Checkpoint) -> Checkpoint:
    """Return the source with the parameters that an index means named as in the output, which has
    the source's groups. The source stays as it is where parameters were left behind: then the
    state cannot be compared, and that is reported."""
    order = [group["params"] for group in ckpt.optimizer_groups]
    try:
        return source.with_optimizer_order(order)
    except CkptmapError:
        return source


IN_BNBS_NAMES = re.compile(r"optimizer:.*\.state1")
"""Names of tensors of an output that was written for bitsandbytes' loader."""


def _moved(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    if source.encoding_ == mine.encoding_ or source.encoding == mine.encoding == "dense":
        part = same_parts(source, mine)
        return None if part is None else f"{part} differ from the source"
    return _cast(source, mine, errors)


def _exact(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Compare stored bytes, else values: those of the output, in the source's dtype, are the source's.

    An unchanged weight of a conversion with --as is stored as the reference has it.
    """
    if _moved(source, mine, errors) is None:
        return None
    differ = difference(mine, source)
    if differ is None:
        return None
    return f"{counted(differ.count, 'value', 'is', 'are')} not the source's, the first at {list(differ.index)}"


def _cast(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    differ = difference(source, mine)
    if differ is None:
        return None
    return f"{counted(differ.count, 'value', 'is', 'are')} not the source's cast, the first at {list(differ.index)}"


def _quantized(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Encode the source once more: every part must be equal bit for bit. No error is judged."""
    for write in encoded_writes(source, mine.encoding_):
        if not holds(mine, write):
            return f"{write.part} differ from an encoding of the source"
    return _measure(source, mine, errors)


def _recoded(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Keep the source's codes once more: every part must equal the stored one bit for bit."""
    grid = code_grid(source)
    if grid is None or kept_fidelity(source, mine.encoding_, grid) is None:
        return f"{source.encoding} codes cannot be kept in {mine.encoding}"
    for write in writes_keeping_codes(source, mine.encoding_, grid, FEED_NUMEL):
        if not holds(mine, write):
            return f"{write.part} differ from the source's codes and scales"
    return _measure(source, mine, errors)


def _measure(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Measure the error, which is not judged, but finite values must stay finite."""
    differ = difference(source, mine)
    errors[source.fqn] = differ.relative if differ else 0.0
    if differ is None or not differ.lost:
        return None
    return f"decodes {counted(differ.lost, 'finite value')} of the source to NaN or infinity"


CHECKS: Mapping[str, Callable[[LazyTensor, LazyTensor, dict[str, float]], str | None]] = {
    "bytes": _moved, "exact": _exact, "codes": _recoded, "cast": _cast,
    "quantize": _quantized, "requantize": _quantized,
}  # fmt: skip
