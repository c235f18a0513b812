"""Golden tables: `key, dtype, shape, axes, hash`, tab-separated, in key order, `#` for comments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parent
COLUMNS = "key\tdtype\tshape\taxes\thash"


@dataclass(frozen=True)
class Row:
    """One tensor: `axes` is the pattern that its mapping file gives it, `-` where there is none."""

    dtype: str
    shape: tuple[int, ...]
    axes: str
    hash: str


def digest(tensor: Tensor) -> str:
    """xxh3-64 of the tensor's numbers as little-endian bytes in row-major order."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().tobytes())


def rows(state: Mapping[str, Tensor], axes: Mapping[str, str] | None = None) -> dict[str, Row]:
    """A row for each tensor of `state`."""
    return {
        key: Row(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            (axes or {}).get(key, "-"),
            digest(tensor),
        )
        for key, tensor in sorted(state.items())
    }


def write(path: Path, table: Mapping[str, Row], made_by: Iterable[str]) -> None:
    """One table; `made_by` says whose code made it, for whoever has to make it again."""
    lines = [*(f"# {line}" for line in made_by), COLUMNS]
    for key, row in sorted(table.items()):
        shape = ",".join(map(str, row.shape))
        lines.append(f"{key}\t{row.dtype}\t{shape}\t{row.axes}\t{row.hash}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> dict[str, Row]:
    """The rows of one table by key."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == COLUMNS, path
    table = {}
    for line in lines[1:]:
        key, dtype, shape, axes, hash_ = line.split("\t")
        extents = tuple(int(extent) for extent in shape.split(",") if extent)
        table[key] = Row(dtype, extents, axes, hash_)
    return table
