"""FSDP1's flat parameters: which elements of which tensor lie where in this rank's flat shard.

    FlatParameter shard [S]  =  ... | elements 5..17 of `a.weight` | elements 0..9 of `b.weight` | ...

With `use_orig_params=True` each parameter is a view of its own part of the shard; an optimizer then
keeps state of that part, else of the whole shard, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

from ckptmap.core.class_names import is_a
from ckptmap.errors import LoadError
from ckptmap.live.model import module_walk
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.sharding.flat_range_boxes import rectangles
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParamHandle


@dataclass(frozen=True, eq=False)
class FlatParamTensor(LiveTensor):
    """One tensor of a flat parameter: `count` elements of it lie in this rank's flat shard.

    handle    torch's FlatParamHandle
    shape     of the whole tensor
    first     number of the first element, row-major, that this rank holds
    at        offset of that element in the flat shard
    param     the module's own parameter, with `use_orig_params=True`; else None
    replicas  the ranks that hold the same elements, under HYBRID_SHARD; else None
    number    of the tensor among those of the flat parameter
    """

    handle: FlatParamHandle = field(kw_only=True)
    shape: tuple[int, ...] = ()
    first: int = 0
    count: int = 0
    at: int = 0
    param: torch.nn.Parameter | None = None
    replicas: ProcessGroup | None = None
    number: int = 0

    @property
    def is_flat(self) -> bool:
        return True

    @property
    def shard(self) -> torch.Tensor:
        """This rank's flat shard, also while the unit is gathered."""
        flat = self.handle.flat_param
        # Until the first forward the shard is all there is.
        found: torch.Tensor = getattr(flat, "_local_shard", flat)
        return found.detach()

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor on meta with shape and dtype: no rank holds the whole tensor."""
        import torch

        flat = self.handle.flat_param
        own = flat if self.param is None else self.param
        meta = torch.empty(self.shape, dtype=flat.dtype, device="meta")
        return meta.requires_grad_(own.requires_grad)

    @property
    def local(self) -> torch.Tensor:
        return self.shard.view(-1).narrow(0, self.at, self.count)

    def boxes(self) -> list[tuple[Box, int]]:
        """Return the boxes that this rank holds, each with the offset at which it begins among the
        `count` elements."""
        stop = self.first + self.count
        return [(box, at - self.first) for box, at in rectangles(self.shape, self.first, stop)]

    def windows(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        flat = local.view(-1)
        return [(box, flat.narrow(0, at, box.numel).view(box.sizes)) for box, at in self.boxes()]

    @property
    def is_cut(self) -> bool:
        return bool(self.handle.uses_sharded_strategy)

    @property
    def is_primary(self) -> bool:
        """Return whether this rank saves the elements, of all that hold them under HYBRID_SHARD."""
        import torch

        return self.replicas is None or torch.distributed.get_rank(self.replicas) == 0

    def put(self, local: torch.Tensor) -> None:
        raise AssertionError("a flat parameter is filled in place")


def is_fsdp1(module: torch.nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    """Return whether FSDP1 wraps the module, without an import of torch.distributed."""
    return is_a(module, "FullyShardedDataParallel")


def handles(model: torch.nn.Module) -> list[tuple[FullyShardedDataParallel, FlatParamHandle]]:
    """Return (FSDP1 module, its FlatParamHandle) of every unit that has parameters."""
    return [
        (module, handle)
        for module in module_walk.modules(model)
        if is_fsdp1(module) and (handle := getattr(module, "_handle", None)) is not None
    ]


def reshard(model: torch.nn.Module) -> None:
    """Bring the shards back, and free the parameters that a forward gathered.

    torch keeps the gathered parameters of the root unit, and with SHARD_GRAD_OP of every unit, for
    a backward that may follow. The next forward would compute with them instead of the values that
    are loaded.
    """
    from torch.distributed.utils import _free_storage

    found = handles(model)
    _refuse_summoned(found)
    for _, handle in found:
        flat = handle.flat_param
        if handle.uses_sharded_strategy and hasattr(flat, "_local_shard"):  # a forward has begun
            handle.reshard(True)
            handle.post_reshard()  # type: ignore[no-untyped-call]
            handle._prefetched = False
            eager = getattr(flat, "_full_prec_full_param_padded", None)
            if eager is not None:  # of a forward in full precision, in eval mode
                _free_storage(eager)


def _refuse_summoned(found: Sequence[tuple[object, FlatParamHandle]]) -> None:
    """Raise LoadError CKM505 inside of summon_full_params, which at its end writes the gathered
    parameters over the shards that were loaded."""
    for _, handle in found:
        state = getattr(handle, "_training_state", None)
        if handle.uses_sharded_strategy and getattr(state, "name", "") == "SUMMON_FULL_PARAMS":
            raise LoadError(
                "CKM505",
                "model: its FSDP units are inside of summon_full_params, expected sharded units",
                "call it outside of summon_full_params: each rank needs only its own shards",
            )


@dataclass(frozen=True)
class FlatParamSlice:
    """The elements of one tensor in the flat shard, before the tensor is named; fields as in
    `FlatParamTensor`."""

    handle: FlatParamHandle
    places: tuple[tuple[torch.nn.Module, str], ...]
    shape: tuple[int, ...]
    first: int
    count: int
    at: int
    param: torch.nn.Parameter | None
    replicas: ProcessGroup | None
    number: int


def flat_param_slices(model: torch.nn.Module) -> list[FlatParamSlice]:
    """Return every tensor of every flat parameter, with all (module, attribute) that share it."""
    found = []
    for module, handle in handles(model):
        replicas = getattr(module, "_inter_node_pg", None)
        flat = handle.flat_param
        named = flat._params if handle._use_orig_params else None
        shared = flat._shared_param_infos
        for number, info in enumerate(flat._param_infos):
            held = flat._shard_param_infos[number]
            ties = [
                (tie.module, tie.param_name)
                for tie in shared
                if tie.prim_module is info.module and tie.prim_param_name == info.param_name
            ]
            places = ((info.module, info.param_name), *ties)
            shape = tuple(flat._shapes[number])
            # All three are None where this rank holds no element of the tensor.
            first, count = held.intra_param_start_idx or 0, held.numel_in_shard or 0
            at = held.offset_in_shard or 0
            param = None if named is None else named[number]
            found.append(
                FlatParamSlice(handle, places, shape, first, count, at, param, replicas, number)
            )
    return found
