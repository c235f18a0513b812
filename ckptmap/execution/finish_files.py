"""Finish the output files of a run: write headers, indexes and the manifest, set final lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptmap.execution.written_slots import Executed
from ckptmap.planning.file_plan import FilePlan
from ckptmap.protocols import OutFile
from ckptmap.storage.direct_io import Outputs


def seal(
    plan: Sequence[FilePlan],
    outputs: Outputs,
    done: Executed,
    manifest: Callable[[Executed], bytes] | None,
    joined: Sequence[tuple[int, int, int]],
) -> None:
    """Write everything that is not tensor data, data files first, and set each file's final length.

    `manifest` makes the manifest's bytes. `joined` are the (file, first, stop) of slots that were
    written as one span, with the bytes between them."""
    data = None
    if manifest is not None and any(item.out.holds_manifest for item in plan):
        data = manifest(done)
    for index, item in enumerate(plan):
        crcs = done.crcs[index] if item.out.needs_crc else ()
        end = item.out.nbytes
        with outputs.file(index) as output:
            for offset, piece in item.out.seal(crcs, data if item.out.holds_manifest else None):
                output.write_at(offset, memoryview(piece), direct=False)
                end = max(end, offset + len(piece))
            for offset, piece in _bytes_between(
                item.out, crcs, [u[1:] for u in joined if u[0] == index]
            ):
                output.write_at(offset, memoryview(piece), direct=False)
            output.truncate(end)


def _bytes_between(
    out: OutFile, crcs: Sequence[int], joined: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of what lies between slots that were not written as one span.

    Those are large slots, slots that an earlier run or another rank wrote, and the last slot of a
    span with the first of the next."""
    if out.between is None:
        return
    missing = bytearray(b"\1") * max(0, len(out.slots) - 1)
    for first, stop in joined:
        missing[first : stop - 1] = bytes(stop - 1 - first)
    at = missing.find(1)
    while at >= 0:
        slot = out.slots[at]
        yield slot.offset + slot.nbytes, out.between(at, crcs[at])
        at = missing.find(1, at + 1)
