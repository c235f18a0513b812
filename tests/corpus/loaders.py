"""The formats read by torch's, safetensors' and torchao's own loaders, in this one process.

The independent side of every comparison: nothing here knows ckptmap.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor

from tests.corpus.case import Spec

Tree = dict[str, Any]


def load_torch(path: Path) -> Tree:
    """A torch.save file; of foreign classes only argparse.Namespace is let in."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        tree: Tree = torch.load(path, weights_only=True, mmap=True)
    return tree


def load_safetensors(path: Path) -> Tree:
    """A file, or all files of a folder that the index, where there is one, names."""
    from safetensors.torch import load_file

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    tree: Tree = {}
    for file in files:
        part = load_file(file)
        assert not set(part) & set(tree), f"{file} repeats keys"
        tree.update(part)
    return tree


def load_dcp(path: Path) -> Tree:
    """A DCP directory of dense tensors, through torch's own planner, nested as it was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: Tree = {}
    _load_state_dict(
        tree,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return tree


def dcp_blobs(path: Path) -> dict[str, list[Tensor]]:
    """Each tensor's stored items in the order of their offsets: NF4 chunks, which dcp.load refuses."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    _import_nf4()
    stored = FileSystemReader(path).read_metadata().storage_data
    blobs: dict[str, list[Tensor]] = {}
    for index in sorted(stored, key=lambda index: (index.fqn, tuple(index.offset or ()))):
        info = stored[index]
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            item = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        blobs.setdefault(index.fqn, []).append(item)
    return blobs


def rank_trees(path: Path) -> list[Tree]:
    """The trees of `*_rank_R.pt` by rank; DTensors stay DTensors, whose mesh is not usable."""
    _import_nf4()
    files = sorted(path.glob("*_rank_*.pt"), key=lambda f: int(re.findall(r"\d+", f.name)[-1]))
    return [torch.load(file, weights_only=True) for file in files]


def load_ranks(path: Path) -> Tree:
    """Rank files put together: shards concatenated, what is replicated checked to be equal.

    A key counts that any rank holds: each rank loads its own file, and a pipeline stage has keys of
    its own.
    """
    tree: Tree = _merge(rank_trees(path))
    return tree


def _merge(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merge([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, Sequence) and not isinstance(first, str):
        return [_merge(items) for items in zip(*values, strict=True)]
    if isinstance(first, torch.distributed.tensor.DTensor):
        dim, locals_ = shards(values)
        return locals_[0] if dim is None else torch.cat(locals_, dim)
    for value in values[1:]:
        assert same_bits(first, value) if isinstance(first, Tensor) else first == value
    return first


def shards(values: Sequence[Any]) -> tuple[int | None, list[Tensor]]:
    """The dim that is cut (None: none) and the distinct locals in order, of DTensors by rank."""
    spec = values[0]._spec
    cut = [i for i, placement in enumerate(spec.placements) if placement.is_shard()]
    assert len(cut) <= 1, f"cut along {len(cut)} mesh dims"
    assert not cut or len(values) == spec.mesh.size(), "a part is missing"
    by_coordinate: dict[int, Tensor] = {}
    for rank, value in enumerate(values):
        coordinate = (value._spec.mesh.mesh == rank).nonzero()[0]
        place = int(coordinate[cut[0]]) if cut else 0
        local = value._local_tensor
        if place in by_coordinate:
            assert same_bits(by_coordinate[place], local), "replicas differ"
        by_coordinate[place] = local
    dim = spec.placements[cut[0]].dim if cut else None
    return dim, [by_coordinate[place] for place in sorted(by_coordinate)]


def load(spec: Spec, path: Path) -> Tree:
    """The whole tree of a dense case."""
    readers = {
        "torch": load_torch,
        "safetensors": load_safetensors,
        "hf": load_safetensors,
        "dcp": load_dcp,
        "ranks": load_ranks,
    }
    return readers[spec.container](path)


def model_part(spec: Spec, tree: Tree) -> Tree:
    """The model's entries of a tree, keys as stored."""
    for key in spec.root:
        tree = tree[key]
    return tree


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bytes: NaN payloads and signs of zero count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(raw_bytes(a), raw_bytes(b))


def raw_bytes(value: Tensor) -> Tensor:
    """The elements in row-major order as uint8 [nbytes], whatever the strides."""
    packed = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    return packed.reshape(-1).view(torch.uint8)


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> Iterator[str]:
    """One line for each name that is missing, unexpected or not the same bits."""
    for name in sorted(set(got) | set(want)):
        if name not in got:
            yield f"{name}: missing"
        elif name not in want:
            yield f"{name}: unexpected"
        elif not same_bits(got[name], want[name]):
            a, b = got[name], want[name]
            yield f"{name}: {a.dtype}{list(a.shape)} is not {b.dtype}{list(b.shape)}, or its bits"


def _import_nf4() -> None:
    """torchao registers NF4Tensor as a safe global when it is imported."""
    import torchao.quantization  # noqa: F401
