"""A file format of your own in one module: a directory of raw `.bin` files with an index.

    index.json   {"format": "toy-bin", "version": 1, "records": {...},
                  "tensors": {"fc.weight": {"file": "00000.bin", "dtype": "bfloat16",
                                            "shape": [4, 8]}, ...}}
    00000.bin    the bytes of fc.weight, little-endian, row-major

A package registers it through entry points:

    [project.entry-points."ckptmap.containers"]
    toy = "toy_container:ToyReader"
    [project.entry-points."ckptmap.writers"]
    toy = "toy_container:ToyWriter"
    [project.entry-points."ckptmap.setups"]
    toy = "toy_container:TOY"

`ckptmap.testing.registered(...)` registers it for a while, as below. `ckptmap convert --to toy`, `toy-nf4`,
`verify`, `diff` and resuming then work: the rest of ckptmap needs nothing else of a format.

    python examples/toy_container.py SOURCE DESTINATION
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.protocols import Index, OutFile, OutState, OutTensor, Place, Setup, Slot
from ckptmap.tensors import ITEMSIZE, Box, Chunk, Leaf, Region, StoredTensor, TensorInfo
from ckptmap.tensors import Path as LeafPath

INDEX = "index.json"
FORMAT, VERSION = "toy-bin", 1
DATA = re.compile(r"\d{5}\.bin")
"""Names of data files: nothing else is ever opened, so that no name leads out of the directory."""
MAX_INDEX_NBYTES = 100_000_000

TOY = Setup(
    "toy", layout="full", writer="toy", holds_extra=False, summary="a directory of raw .bin files"
)


class ToyReader:
    """Reads the index, and only the sizes of the data files."""

    name = "toy"

    def claims(self, place: Place) -> bool:
        """Return whether there is an index with only data files beside it: many formats have an index.json."""
        others = set(place.names) - {INDEX, "ckptmap.manifest.json"}
        return place.is_dir and INDEX in place.names and all(map(DATA.fullmatch, others))

    def index(self, place: Place) -> Index:
        """Return the index. Raises SourceError CKM108 where it is malformed, CKM104 where a file is too short."""
        root = Path(place.path).absolute()
        tree = _parsed(root / INDEX)
        leaves: dict[LeafPath, Leaf] = {}
        files = [str(root / INDEX)]
        for key, entry in tree["tensors"].items():
            tensor = _tensor(root, key, entry)
            leaves[(key,)] = tensor
            files.append(tensor.chunks[0].region.file)
        if len(set(files)) < len(files):
            raise _bad(root / INDEX, "a data file is listed for two tensors")
        return Index(self.name, leaves, tuple(files), records=tree["records"])


def _bad(file: Path, what: str) -> SourceError:
    return SourceError("CKM108", f"{file}: is no toy index: {what}", "copy the checkpoint again")


def _parsed(file: Path) -> dict[str, dict[str, Any]]:
    try:
        if file.stat().st_size > MAX_INDEX_NBYTES:
            raise ValueError(f"{file.stat().st_size} bytes long")
        tree = json.loads(file.read_bytes(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(file, str(error)) from error
    if not isinstance(tree, dict) or (tree.get("format"), tree.get("version")) != (FORMAT, VERSION):
        raise _bad(file, f"expected format {FORMAT} version {VERSION}")
    for part in ("tensors", "records"):
        found = tree.get(part)
        if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
            raise _bad(file, f"{part}: expected an object of objects")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse equal keys: JSON silently takes the last one, and a tensor would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _tensor(root: Path, key: str, entry: Mapping[str, Any]) -> StoredTensor:
    name, dtype, shape = entry.get("file"), entry.get("dtype"), entry.get("shape")
    if not isinstance(name, str) or not DATA.fullmatch(name):
        raise _bad(root / INDEX, f"{key!r}: file {name!r:.60}, expected a name like 00000.bin")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise _bad(root / INDEX, f"{key!r}: dtype {dtype!r:.60}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise _bad(root / INDEX, f"{key!r}: shape {shape!r:.60}")
    info, file = TensorInfo(tuple(shape), dtype), root / name
    if file.is_symlink() or not file.is_file():
        raise SourceError("CKM108", f"{file}: is no file", "copy the checkpoint again")
    if file.stat().st_size != info.nbytes:
        raise SourceError(
            "CKM104",
            f"{file}: {key}: expected {info.nbytes} bytes, found {file.stat().st_size}",
            "copy the file again",
        )
    region = Region.contiguous(str(file), 0, info.shape, info.itemsize)
    return StoredTensor(info, [Chunk(Box.whole(info.shape), region)])


class ToyWriter:
    """Writes one `.bin` per tensor, which is a single slot; the index, which completes it, comes last."""

    name = "toy"
    one_file = False
    shares_storage = False

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Plan the files. Raises PlanError CKM114 for two tensors with one key, CKM202 for a key JSON cannot hold."""
        entries: dict[str, dict[str, Any]] = {}
        outs = []
        for number, tensor in enumerate(state.tensors):
            key = _key(tensor)
            if key in entries:
                raise PlanError("CKM114", f"{key!r} would be written twice", "drop one of them")
            file, info = f"{number:05d}.bin", tensor.info
            entries[key] = {"file": file, "dtype": info.dtype, "shape": list(info.shape)}
            slot = Slot(tensor.path, Box.whole(info.shape), 0, info.nbytes)
            outs.append(OutFile(file, info.nbytes, [slot], _sealed(b"")))
        content = {"format": FORMAT, "version": VERSION, "tensors": entries}
        index = json.dumps({**content, "records": state.records}).encode()
        return [*outs, OutFile(INDEX, len(index), [], _sealed(index))]


def _key(tensor: OutTensor) -> str:
    key = ".".join(map(str, tensor.path))
    if any("\ud800" <= letter <= "\udfff" for letter in key):
        raise PlanError("CKM202", f"{key!r}: is no text", "leave it out with --exclude")
    return key


def _sealed(start: bytes) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    """Yield all bytes that are not tensor data: the whole index, nothing of a data file."""
    return lambda crcs, manifest: ((0, start),) if start else ()


if __name__ == "__main__":
    from ckptmap.testing import registered

    with registered(ToyReader(), ToyWriter(), TOY):
        print(ckptmap.convert(sys.argv[1], sys.argv[2], to="toy"))
