"""verify(): is an output whole, are its bytes those that were written, are its values the source's?"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap import manifest as manifests
from ckptmap.base import restore
from ckptmap.calm import one_torch_thread
from ckptmap.checkpoint import Checkpoint, open
from ckptmap.compare import difference, holds, same_bytes, same_parts
from ckptmap.errors import AnswerNo, CkptmapError, SourceError
from ckptmap.files import Files, whole
from ckptmap.gather import row_major_boxes
from ckptmap.lazy import LazyTensor
from ckptmap.leaves import join
from ckptmap.overlay import overlaid
from ckptmap.protocols import Write
from ckptmap.recoding import grid_of, kept_at, recoded
from ckptmap.tensors import Box, Extent, Region, StoredTensor
from ckptmap.translation import named_alike

if TYPE_CHECKING:
    import torch

READ_NBYTES = 4 << 20
NO_DIGESTS = "no digests, since it was written with --digest none"
SHOWN = 20
"""Problems that the text lists."""
FEED_NUMEL = 1 << 19


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and what was found wrong: `problems` is empty where all is well."""

    path: str
    tensors: int
    nbytes: int
    checks: tuple[str, ...]
    problems: tuple[str, ...]
    errors: Mapping[str, float] = field(default_factory=dict)
    """Lossy tensors, by FQN: rms of the difference from the source over rms of the source."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1, "ok": self.ok, "path": self.path, "tensors": self.tensors,
            "nbytes": self.nbytes, "checks": list(self.checks), "problems": list(self.problems),
            "errors": dict(self.errors),
        }  # fmt: skip

    def __str__(self) -> str:
        head = (
            f"{self.path}: {self.tensors} tensors, {self.nbytes:,} bytes; {', '.join(self.checks)}"
        )
        lines = [f"{'ok' if self.ok else 'NOT ok'}: {head}"]
        if self.errors:
            worst = max(self.errors, key=lambda fqn: self.errors[fqn])
            lines.append(
                f"  lossy: {len(self.errors)} tensors, worst {worst}: {self.errors[worst]:.3e} relative rms"
            )
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN} more (all of them with --json)")
        return "\n".join(lines)


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | Checkpoint | None = None,
    *,
    threads: int | None = None,
    adapter: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Coverage, sizes and digests by the manifest; with `against`, values by their fidelity.

    Moved and cast values must be bit-equal (to `torch.Tensor.to`), quantized ones to an encoding
    of the source's values made once more; its error is reported. `adapter` is what was merged with
    `against`, whose config lies beside it; `base` is what has the scales of its payloads. Raises AnswerNo CKM403 where there is no manifest.
    """
    try:
        ckpt = open(path)
    except SourceError as error:
        if error.code == "CKM101":
            raise
        return VerifyReport(str(path), 0, 0, ("structure",), (str(error),))
    with ckpt:
        document = read_manifest(ckpt)
        problems = check_structure(ckpt, document)
        digests = all(chunk[5] for _, chunk in _chunks(document))
        if not problems:
            problems = list(_digest_problems(ckpt, document, threads, digests))
        checks = ["structure", "digests" if digests else NO_DIGESTS]
        errors: dict[str, float] = {}
        if against is not None:
            source = against if isinstance(against, Checkpoint) else open(against)
            if base is not None:
                restore(source, base)
            if adapter is not None:
                left = document.get("merged", {}).get("leave", ())
                source = overlaid(source, adapter, document["setup"], leave=left)
            with one_torch_thread(source.merged is not None):  # as it was merged, to the bit
                values, errors = _against(ckpt, source, document)
            problems += values
            checks.append(f"values against {source.shown}")
        nbytes = sum(chunk[2] for _, chunk in _chunks(document))
        return VerifyReport(
            ckpt.shown, len(document["tensors"]), nbytes, tuple(checks), tuple(problems), errors
        )


def read_manifest(ckpt: Checkpoint) -> dict[str, Any]:
    data = ckpt.index.manifest
    file = Path(ckpt.path) / manifests.NAME
    if data is None and file.is_file():
        data = whole(file).read_bytes()
    if data is None:
        raise AnswerNo(
            "CKM403",
            f"{ckpt.path}: has no manifest, ckptmap did not write it",
            "compare two checkpoints with `ckptmap diff A B --values`",
        )
    return manifests.parse(data, ckpt.path)


# --------------------------------------------------------------------------------- structure


def check_structure(ckpt: Checkpoint, document: Mapping[str, Any]) -> list[str]:
    """Every tensor of the manifest is found where it says, by our own readers, and no other."""
    base = Path(ckpt.path).absolute() if Path(ckpt.path).is_dir() else None
    problems = [
        f"{name}: {size} bytes, expected {entry['nbytes']}"
        for name, entry in document["files"].items()
        if base is not None and (size := _nbytes(base / name)) != entry["nbytes"]
    ]
    stored = {
        join(path): leaf
        for path, leaf in ckpt.index.leaves.items()
        if isinstance(leaf, StoredTensor)
    }
    planned = document["tensors"]
    for key, entry in planned.items():
        tensor = stored.get(key)
        if tensor is None or not _lies_at(tensor, entry["chunks"], base):
            problems += _place_problems(key, entry, tensor, base)
    unlisted = [(k, tensor) for k, tensor in stored.items() if k not in planned]
    if unlisted:
        shares = {tensor.share for key, tensor in stored.items() if key in planned} - {None}
        unlisted = [(k, t) for k, t in unlisted if t.share not in shares and t.info.numel]
    if unlisted:
        listed = {(_name(c[0], base), c[1], c[2]) for _, c in _chunks(document)}
        problems += [
            f"{key}: is not in the manifest"
            for key, tensor in unlisted
            if not all(_is_listed(chunk.region, listed, base) for chunk in tensor.chunks)
        ]
    return problems


def _lies_at(tensor: StoredTensor, chunks: Sequence[Sequence[Any]], base: Path | None) -> bool:
    """Is it the one chunk that the manifest says? A quick look at what nearly every tensor is:
    False leaves it to `_place_problems` to find out, and to say, what is wrong."""
    try:
        place = tensor.place
    except CkptmapError:
        return False
    if type(place) is not Extent or len(chunks) != 1 or tensor.replicas:
        return False
    name, offset, nbytes, offsets, sizes, _ = chunks[0]
    return (
        place.offset == offset
        and tensor.info.nbytes == nbytes
        and tensor.info.shape == tuple(sizes)
        and not any(offsets)
        and (base is None or place.file == f"{base}/{name}")
    )


def _is_listed(region: Region, listed: Container[tuple[str, int, int]], base: Path | None) -> bool:
    """Are they the bytes of another one: of the one step count that a flat parameter has, say?"""
    return (_name(region.file, base), region.offset, region.nbytes) in listed


def _nbytes(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _place_problems(
    key: str, entry: Mapping[str, Any], tensor: StoredTensor | None, base: Path | None
) -> Iterator[str]:
    if tensor is None:
        yield f"{key}: is missing"
        return
    try:
        found = {
            (_name(chunk.region.file, base), chunk.region.offset, chunk.box.offsets, chunk.box.sizes):
            chunk.region
            for chunk in (*tensor.chunks, *tensor.replicas)
        }  # fmt: skip
    except CkptmapError as error:
        yield str(error)
        return
    for name, offset, nbytes, offsets, sizes, _ in entry["chunks"]:
        region = found.get((_name(name, base), offset, tuple(offsets), tuple(sizes)))
        if nbytes == 0:
            continue
        if region is None or region.nbytes != nbytes or not region.is_contiguous:
            yield f"{key}: no chunk {offsets}+{sizes} at byte {offset} of {name}"
        elif base is not None and region.file != f"{base}/{name}" != str(Path(region.file)):
            yield f"{key}: lies in {region.file}, expected {name}"
    if len(found) != len(entry["chunks"]) and tensor.info.numel:
        yield f"{key}: {len(found)} chunks, expected {len(entry['chunks'])}"


def _name(file: str, base: Path | None) -> str:
    """A file of a directory by its name; a checkpoint of one file may have any."""
    return "" if base is None else os.path.basename(file)


# --------------------------------------------------------------------------------- digests


def _chunks(document: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for key, entry in document["tensors"].items():
        for chunk in entry["chunks"]:
            yield key, chunk


def _digest_problems(
    ckpt: Checkpoint, document: Mapping[str, Any], threads: int | None, digests: bool
) -> Iterator[str]:
    base = Path(ckpt.path)

    def check(item: tuple[str, list[Any]]) -> str | None:
        key, (name, offset, nbytes, _, _, expected) = item
        file = str(base / name) if base.is_dir() else ckpt.path
        found = _digest(ckpt.files, file, offset, nbytes)
        if found == expected:
            return None
        return f"{key}: xxh3 {found} at byte {offset} of {name}, expected {expected}"

    chunks = _chunks(document) if digests else ()
    ordered = sorted(chunks, key=lambda item: (item[1][0], item[1][1]))
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1)) as pool:
        yield from (problem for problem in pool.map(check, ordered, chunksize=64) if problem)
    for name, entry in document["carried"].items():
        file = base / name
        if _nbytes(file) != entry["nbytes"] or _digest(ckpt.files, str(file), 0, entry["nbytes"]) != entry["xxh3"]:  # fmt: skip
            yield f"{name}: is not the file that was carried over"
    for name, entry in document["files"].items():
        if "sha256" in entry and sha256_of(base / name) != entry["sha256"]:
            yield f"{name}: sha256 differs from the manifest"


def _digest(files: Files, file: str, offset: int, nbytes: int) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    for at in range(0, nbytes, READ_NBYTES):
        digest.update(files.read(file, offset + at, min(READ_NBYTES, nbytes - at)))
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    import hashlib

    with whole(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --------------------------------------------------------------------------------- values


def _against(
    ckpt: Checkpoint, source: Checkpoint, document: Mapping[str, Any]
) -> tuple[list[str], dict[str, float]]:
    problems: list[str] = []
    errors: dict[str, float] = {}
    if document.get("merged") is not None and source.merged is None:
        return ["an adapter was merged into it: give that, too, with --adapter"], {}
    if source.optimizer_by_index:
        _order_as(ckpt, source)
    if document.get("names") is not None:
        source = named_alike(source, document["names"], document["logical"])
    for name, entry in document["logical"].items():
        role, _, fqn = name.rpartition(":") if ":" in name else ("model", "", name)
        mine, theirs = ckpt.find(role, fqn), source.find(role, fqn)
        if mine is not None and theirs is not None and mine.info.shape != theirs.info.shape:
            problems += _stored_otherwise(name, theirs, mine)
            continue
        if mine is None or theirs is None:
            problems.append(f"{name}: is not in {ckpt.path if mine is None else source.path}")
            continue
        try:
            wrong = CHECKS[entry["fidelity"]](theirs, mine, errors)
        except CkptmapError as error:
            wrong = str(error)
        if wrong:
            problems.append(f"{name}: {wrong}")
    known = {*document["logical"], *document["dropped"], *document["tied"]}
    problems += [f"{fqn}: is in {source.path} only" for fqn in source if fqn not in known]
    return problems, errors


def _stored_otherwise(name: str, source: LazyTensor, mine: LazyTensor) -> Iterator[str]:
    """The source may hold a payload alone, whose scales came from a `--base`: its bytes are there."""
    here, there = mine.parts.get(""), source.parts.get("")
    if here is None or there is None or here.info != there.info:
        yield f"{name}: {mine.info}, the source has {source.info}"
    elif same_bytes(there, here, source.files, mine.files) is not None:
        yield f"{name}: its payload differs from the source's"


def _order_as(ckpt: Checkpoint, source: Checkpoint) -> None:
    """Name what an index means in the source as the output does; its groups are the source's. Not
    where parameters were left behind: then the state cannot be compared, and that is reported."""
    order = [group["params"] for group in ckpt.optimizer_groups]
    try:
        source.order_optimizer(order)
    except CkptmapError:
        source.optimizer_reader.given = None
        source.optimizer_reader.ask()


def _moved(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    if source.encoding_ == mine.encoding_ or source.encoding == mine.encoding == "dense":
        part = same_parts(source, mine)
        return None if part is None else f"{part} differ from the source"
    return _cast(source, mine, errors)


def _cast(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    found = difference(source, mine)
    if found is None:
        return None
    return f"{found.count} values are not the source's cast, the first at {list(found.index)}"


def _quantized(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Encode the source once more: every part must come out bit for bit. Its error is not judged."""
    encoder = mine.encoding_.encoder(source.info, "cpu")
    feeds = (encoder.feed(*values) for values in _steps(source, encoder.step))
    for write in chain.from_iterable(chain(feeds, _after(encoder.finish))):
        if not holds(mine, write):
            return f"{write.part} differ from an encoding of the source"
    _measure(source, mine, errors)
    return None


def _after(finish: Callable[[], Iterable[Write]]) -> Iterator[Iterable[Write]]:
    """Called only once all that stands before it in a chain is used up."""
    yield finish()


def _recoded(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> str | None:
    """Keep the source's codes once more: every part must come out bit for bit as it is stored."""
    grid = grid_of(source)
    if grid is None or kept_at(source, mine.encoding_, grid) is None:
        return f"{source.encoding} codes cannot be kept in {mine.encoding}"
    for write in recoded(source, mine.encoding_, grid, FEED_NUMEL):
        if not holds(mine, write):
            return f"{write.part} differ from the source's codes and scales"
    _measure(source, mine, errors)
    return None


def _measure(source: LazyTensor, mine: LazyTensor, errors: dict[str, float]) -> None:
    errors[source.fqn] = found.relative if (found := difference(source, mine)) else 0.0


CHECKS: Mapping[str, Callable[[LazyTensor, LazyTensor, dict[str, float]], str | None]] = {
    "bytes": _moved, "exact": _moved, "codes": _recoded, "cast": _cast,
    "quantize": _quantized, "requantize": _quantized,
}  # fmt: skip


def _steps(lazy: LazyTensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(flat offset, values) in row-major order, each a multiple of `step` elements but the last."""
    import torch

    offset, rest = 0, torch.empty(0, dtype=lazy.torch_dtype)
    for box in row_major_boxes(Box.whole(lazy.shape), FEED_NUMEL):
        rest = torch.cat([rest, lazy.read(box.offsets, box.sizes).view(-1)])
        whole = len(rest) - len(rest) % step
        yield offset, rest[:whole]
        offset, rest = offset + whole, rest[whole:]
    if len(rest):
        yield offset, rest
