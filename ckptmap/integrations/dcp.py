"""Planners for torch.distributed.checkpoint, so that `dcp.save` and `dcp.load` take quantized tensors.

    dcp.save(state, checkpoint_id=path, planner=save_planner())
    dcp.load(state, checkpoint_id=path, planner=load_planner())

DCP stores an NF4Tensor or a low-bit moment as one pickle on each rank, which cannot be resharded.
These planners store plain tensors, `P.quantized_data`, ..., and a record `P.__ckptmap__`, as
`ckptmap.save` does. torch plans everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptmap.core import argument_checks
from ckptmap.core.printable import quote
from ckptmap.core.sizes import Size
from ckptmap.errors import LoadError
from ckptmap.live.model import live_form
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer.family import codes_of
from ckptmap.live.options import MAX_MEMORY
from ckptmap.live.state_dict.live_checkpoint import StateDictTensor, assign_state_dict
from ckptmap.live.state_dict.overwrite_tensor import fill
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, Path, TensorInfo

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        MetadataIndex,
        StorageMeta,
    )
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem

    from ckptmap.checkpoint.checkpoint import Checkpoint

__all__ = ["load_planner", "save_planner"]  # fmt: skip

Parts: TypeAlias = Mapping[tuple[str, Box], "torch.Tensor"]
"""FQN and box of each part of a quantized tensor -> its values."""

RECORD = ".__ckptmap__"
PURPOSE = "planner"


def save_planner(**options: object) -> SavePlanner:
    """Return a SavePlanner; `options` are those of torch's DefaultSavePlanner. Every rank makes one.

    While planning, the ranks exchange the boxes of their quantized tensors over gloo.
    """
    return _save_class()(**options)


def load_planner(max_memory: Size = MAX_MEMORY, **options: object) -> LoadPlanner:
    """Return a LoadPlanner; `options` are those of torch's DefaultLoadPlanner.

    ckptmap fills in place the tensors that are quantized in the live state dict or in the directory,
    each with this rank's boxes alone, whatever the world size of the save was. The planner raises
    LoadError CKM504 where scale blocks do not fit.
    """
    return _load_class()(argument_checks.nbytes("max_memory", max_memory), **options)


def _is_quantized(value: object) -> bool:
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    leaf = StateDictTensor(("",), (), False, None, value.detach())
    return live_form.is_quantized(leaf) or codes_of(value) is not None


@cache
def _save_class() -> Callable[..., SavePlanner]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class SavePlanner(DefaultSavePlanner):
        """torch's planner, which stores quantized tensors as plain ones."""

        def set_up_planner(
            self,
            state_dict: dict[str, object],
            storage_meta: StorageMeta | None = None,
            is_coordinator: bool = False,
        ) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            peers = RankGroup.join(PURPOSE)
            taken = {key: v for key, v in self.state_dict.items() if _is_quantized(v)}
            everybody = {key for keys in peers.all(list(taken)) for key in keys}
            # A moment may be quantized on one rank and plain on another: both are stored so.
            taken = {key: v for key, v in self.state_dict.items() if key in everybody}
            self.state_dict = {k: v for k, v in self.state_dict.items() if k not in everybody}
            whole = {key: self.mappings.get(key, (key,)) for key in taken}
            assigned = assign_state_dict({whole[key]: value for key, value in taken.items()}, peers)
            self.parts = {(_key(path), box): v for (path, box), v in assigned.mine.items()}
            self.infos = {_key(tensor.path): tensor.info for tensor in assigned.tensors}
            self.mappings = {k: v for k, v in self.mappings.items() if k not in everybody}
            self.mappings |= {_key(tensor.path): tensor.path for tensor in assigned.tensors}
            for key, path in whole.items():
                self.state_dict[key + RECORD] = dict(assigned.records[_key(path)])
                self.mappings[key + RECORD] = (*path[:-1], f"{path[-1]}{RECORD}")

        def create_local_plan(self) -> SavePlan:
            import dataclasses

            plan = super().create_local_plan()
            self.plan = dataclasses.replace(
                plan, items=[*plan.items, *_items(self.parts, self.infos)]
            )
            return self.plan

        def lookup_object(self, index: MetadataIndex) -> object:
            part = _part(self.parts, index)
            return super().lookup_object(index) if part is None else part.detach()

    return SavePlanner


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _part(parts: Parts, index: MetadataIndex) -> torch.Tensor | None:
    """Return the part at the offset of an index; None if there is none."""
    offset = tuple(index.offset) if index.offset is not None else ()
    return next(
        (part for (key, box), part in parts.items() if key == index.fqn and box.offsets == offset),
        None,
    )


def _items(parts: Parts, infos: Mapping[str, TensorInfo]) -> Iterator[WriteItem]:
    """Yield a WriteItem for the box of each part that this rank writes."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    for (key, box), values in parts.items():
        offsets = torch.Size(box.offsets)
        yield WriteItem(
            MetadataIndex(key, offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
                TensorProperties.create_from_tensor(values),
                torch.Size(infos[key].shape),
            ),
        )


# ------------------------------------------------------------------------------- loading


@cache
def _load_class() -> Callable[..., LoadPlanner]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class LoadPlanner(DefaultLoadPlanner):
        """torch's planner, for all tensors that are quantized neither live nor in the directory."""

        def __init__(self, max_memory: int, **options: Any) -> None:
            super().__init__(**options)
            self._max_memory = max_memory

        def set_up_planner(
            self,
            state_dict: dict[str, object],
            metadata: Metadata | None = None,
            is_coordinator: bool = False,
        ) -> None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            assert metadata is not None, "torch passes it"
            stored = set(metadata.state_dict_metadata)
            ours = {
                key: value
                for key, value in self.state_dict.items()
                if _is_quantized(value) or (key not in stored and key + RECORD in stored)
            }
            if ours:
                assert metadata.storage_meta is not None, "torch passes it"
                _filled(ours, str(metadata.storage_meta.checkpoint_id), self._max_memory)
            self.state_dict = {k: v for k, v in self.state_dict.items() if k not in ours}

    return LoadPlanner


def _filled(values: Mapping[str, torch.Tensor], path: str, max_memory: int) -> None:
    """Fill the tensors in place. Raises LoadError CKM501 where the checkpoint has no such tensor."""
    import torch

    from ckptmap.checkpoint.open import open as open_checkpoint

    with open_checkpoint(path) as checkpoint, torch.no_grad():
        reader, known = TensorReader(checkpoint.files, max_memory), by_key(checkpoint)
        for key, value in values.items():
            if key not in known:
                raise LoadError(
                    "CKM501",
                    f"{path}: has no tensor {key}",
                    f"list the keys with: ckptmap inspect {quote(path)}",
                )
            fill(reader, known[key], StateDictTensor((key,), (), False, None, value))


def by_key(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return weights and moments by the keys of the flattened state dict."""
    roles = checkpoint.roles
    root = "".join(f"{segment}." for segment in roles.model_root)
    tensors = {root + stored: checkpoint[fqn] for fqn, stored in checkpoint.names.items()}
    if roles.optimizer_root is not None:
        head = "".join(f"{segment}." for segment in (*roles.optimizer_root, "state"))
        for fqn, state in checkpoint.optimizer.items():
            tensors |= {f"{head}{fqn}.{name}": lazy for name, lazy in state.items()}
    return tensors
