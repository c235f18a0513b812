"""Read from another checkpoint of a model (`--like`) which of its modules FSDP1 wraps.

The target `fsdp1-local`, and raw optimizer state beside weights that do not tell, need them. A
LOCAL_STATE_DICT names them by their flat parameters, `layers.0._flat_param`; rank files of the other
types by the modules that a raw state dict lists. No shapes are needed, and no value is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmap import registry
from ckptmap.checkpoint.framework_members import index_of
from ckptmap.core.state_paths import by_rank
from ckptmap.formats.detect import find, look
from ckptmap.mapping.wrappers import ANYWHERE
from ckptmap.protocols import Index
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.flat_param import KEY, is_flat
from ckptmap.sharding.sharded_tensor_spec import is_sharded, read_sharded
from ckptmap.tensors import Leaf, Region, StoredTensor
from ckptmap.tensors import Path as Key


@dataclass(frozen=True)
class Units:
    """Modules by plain FQN, "" the root; `named`: with `use_orig_params=True`."""

    modules: tuple[str, ...]
    named: bool


def units_of(path: str, mounts: Mounts) -> Units | None:
    """Return the wrapped modules of the checkpoint at `path`; None: it shows none. Raises SourceError."""
    file = Path(path)
    if not file.is_dir():
        return None
    place, _ = find(look(file, mounts), registry.knows)
    index = index_of(place)
    flat = {key: leaf for key, leaf in index.leaves.items() if is_flat(key, leaf)}
    if flat:
        modules = [str(key[-1]).removesuffix(KEY).rstrip(".") for key in flat]
        return Units(tuple(map(_plain, modules)), _has_views(index, flat))
    modules_listed = next(iter(index.units.values()), ())
    return Units(tuple(map(_plain, modules_listed)), False) if modules_listed else None


class LikeUnits(Mapping[Key, Sequence[str]]):
    """The wrapped modules by path of the weights: a checkpoint's own, else those of the checkpoint at
    `like`, which is opened when first asked for."""

    def __init__(self, own: Mapping[Key, Sequence[str]], like: str, mounts: Mounts) -> None:
        self._own, self._like, self._mounts = own, like, mounts

    def __getitem__(self, key: Key) -> Sequence[str]:
        if key in self._own:
            return self._own[key]
        units = units_of(self._like, self._mounts)
        if units is None:
            raise KeyError(key)
        return units.modules

    def __iter__(self) -> Iterator[Key]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _plain(module: str) -> str:
    return ".".join(segment for segment in module.split(".") if segment not in ANYWHERE)


def _has_views(index: Index, flat: dict[Key, Leaf]) -> bool:
    """Return whether other tensors are views of the flat parameters, as `use_orig_params=True` saves."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for key, leaf in flat.items():
        for value in by_rank(leaf):
            if not is_sharded(value):
                continue
            for _, tensor in read_sharded(value, str(key[-1])).shards:
                for region in _regions(tensor):
                    span = (region.offset, region.offset + region.nbytes)
                    spans.setdefault(region.file, []).append(span)
    return any(
        start <= region.offset < end
        for key, leaf in index.leaves.items()
        if key not in flat
        for value in by_rank(leaf)
        if isinstance(value, StoredTensor) and value.info.numel
        for region in _regions(value)
        for start, end in spans.get(region.file, ())
    )


def _regions(tensor: StoredTensor) -> Iterator[Region]:
    return (chunk.region for chunk in tensor.chunks)
