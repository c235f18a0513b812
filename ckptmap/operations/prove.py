"""Prove an output before it is published: open it with our own readers, and compare it with the plan.

A sample of each quantized tensor is decoded: the report states its error, and values that became NaN
or infinite are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import sampled_error
from ckptmap.checkpoint.open import open
from ckptmap.core.formatting import counted
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.printable import advised
from ckptmap.errors import CkptmapError, DestinationError, RunError
from ckptmap.execution import manifest as manifests
from ckptmap.execution.written_slots import Executed
from ckptmap.operations.check_digests import NO_DIGESTS, sha256_of
from ckptmap.operations.check_structure import check_structure
from ckptmap.operations.overwrite import manifest_at
from ckptmap.operations.verify import verify
from ckptmap.planning.options import RunOptions
from ckptmap.planning.plan import Plan
from ckptmap.planning.report import SAMPLE_NUMEL
from ckptmap.storage.bytes_around import digest_around
from ckptmap.storage.crc32 import crc32
from ckptmap.storage.direct_io import OutputFile
from ckptmap.storage.files import Files
from ckptmap.storage.manifest_schema import ManifestDocument
from ckptmap.storage.own_files import write_new
from ckptmap.storage.resource_limits import or_resource_error
from ckptmap.storage.sync import sync_tree

LOSSY = ("codes", "quantize", "requantize")
"""Fidelities of tensors whose error is measured."""


def is_complete(plan: Plan, dst: Path, how: RunOptions) -> bool:
    """Return whether the destination holds the whole output of this plan, and sync it then.

    An output without digests never counts: the run that wrote it may not have waited for the disk.
    Nor does one with fewer digests than `how` asks for.
    """
    manifest = manifest_at(dst)
    if manifest is None or manifest.get("plan") != plan.digest:
        return False
    verified = verify(dst)
    if not verified.intact or NO_DIGESTS in verified.checks:
        return False
    if how.digest == "sha256" and not all("sha256" in file for file in manifest["files"].values()):
        return False
    if how.sync:
        sync_tree(dst)
    return True


def prove_output(plan: Plan, done: Executed, out_dir: Path, digest: str) -> dict[str, float]:
    """Write what completes the output, then check it; return errors of quantized tensors by FQN.

    An error is the rms of the differences over the rms of the values, on at most SAMPLE_NUMEL
    values. Raises RunError CKM306, CKM309 and CKM401.
    """
    with paused_gc():
        if plan.one_file:  # it holds its manifest already
            written, manifest = out_dir / plan.files[0].out.name, manifests.build(plan, done)
        else:
            written, manifest = out_dir, _finish_directory(plan, done, out_dir, digest)
        try:
            with open(written) as ckpt:
                problems = check_structure(ckpt, manifest)
                errors, losses = ({}, []) if problems else _measure(plan, ckpt)
                find_spans = ckpt.index.manifest_spans if plan.one_file else None
                spans = () if find_spans is None else find_spans()
        except CkptmapError as error:
            problems = [str(error)]
    if problems:
        raise RunError(
            "CKM401",
            f"the output is not as planned: {problems[0]} ({counted(len(problems), 'problem')})",
            "nothing was published; run the same command again; if it comes back, it is a defect of ckptmap, please report it",
        )
    if losses:
        more = f" (and {counted(len(losses) - 1, 'more tensor')})" if len(losses) > 1 else ""
        raise RunError(
            "CKM309",
            f"{losses[0]}{more}",
            f"nothing was published; leave it as it is with {advised(no_encode=losses[0].partition(': ')[0])},"
            " or choose another encoding",
        )
    if spans:
        _state_around(plan, written, spans)
    return errors


def _state_around(plan: Plan, written: Path, spans: Sequence[tuple[int, int]]) -> None:
    """Write the digest of the bytes around the tensors into the manifest inside a one-file output.

    `spans` are those of `Index.manifest_spans`. Raises RunError CKM306.
    """
    slots, nbytes = plan.files[0].slots, written.stat().st_size
    offsets = [*slots.offsets, *(offset for offset, _ in spans)]
    sizes = [*slots.sizes, *(size for _, size in spans)]
    with closing(Files(max_open=1)) as files:
        digest = digest_around(files, str(written), nbytes, offsets, sizes)
        data = memoryview(manifests.with_around(files.read(str(written), *spans[0]), digest))
    end = sum(spans[0]) - manifests.END_NBYTES
    with closing(OutputFile(written, nbytes, direct=False)) as output:
        output.write_at(end, data[-manifests.END_NBYTES :])
        for offset, width in spans[1:]:
            output.write_at(offset, memoryview(crc32(data).to_bytes(width, "little")))


def _finish_directory(plan: Plan, done: Executed, out_dir: Path, digest: str) -> ManifestDocument:
    """Write the carried files and the manifest; return the manifest. Raises RunError CKM306."""
    names = [file.out.name for file in plan.files]
    try:
        for name, carried in plan.carried.items():
            (out_dir / name).parent.mkdir(exist_ok=True)
            write_new(out_dir / name, carried.pieces())
        sha256 = {name: sha256_of(out_dir / name) for name in names} if digest == "sha256" else {}
        manifest = manifests.build(plan, done, sha256, _around(plan, out_dir))
        write_new(out_dir / manifests.NAME, [manifests.emit(manifest)])
    except DestinationError:
        raise
    except OSError as error:
        failed = RunError(
            "CKM306",
            f"{error.filename or out_dir}: write failed: {error.strerror}",
            "free some space, then run the same command again to continue",
        )
        raise or_resource_error(error, failed) from error
    return manifest


def _around(plan: Plan, out_dir: Path) -> dict[str, str]:
    """Return the digest of the bytes around the tensors of each file, read from what was written."""
    digests = {}
    with closing(Files(max_open=1)) as files:
        for file in plan.files:
            path, nbytes = str(out_dir / file.out.name), file.out.nbytes
            offsets, sizes = file.slots.offsets, file.slots.sizes
            digests[file.out.name] = digest_around(files, path, nbytes, offsets, sizes)
    return digests


def _measure(plan: Plan, ckpt: Checkpoint) -> tuple[dict[str, float], list[str]]:
    """Return the error of each quantized tensor, and a sentence for each that lost finite values.

    A sample costs a few milliseconds a tensor; `verify --against` measures every value.
    """
    errors, losses = {}, []
    for step in plan.encodes:
        if step.fidelity not in LOSSY:
            continue
        fqn = step.tensor.fqn
        written = ckpt[fqn]
        errors[fqn], lost = sampled_error(step.tensor, written, SAMPLE_NUMEL)
        if lost:
            losses.append(
                f"{fqn}: {written.encoding} would decode {counted(lost, 'finite value')} of a"
                " sample to NaN or infinity"
            )
    return errors, losses
