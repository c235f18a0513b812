"""The tensors of a live model by plain FQN, where each sits, and which part of it this rank holds."""

from __future__ import annotations

import copyreg
import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model import fsdp2_params as fsdp2_params
from ckptmap.live.model.tensor_reader import window
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""What the Python object of a tensor has of its hooks; set anew, autograd takes them up again."""


@dataclass(frozen=True)
class PeftNames:
    """What a tensor of a model that peft has wrapped is called elsewhere (see `peft_live`).

    base     names in a checkpoint of the base
    file     names in an adapter's file
    adapter  whose tensor it is; empty: the base's
    begun    how its first values came from the base; empty: they did not
    """

    base: tuple[str, ...]
    file: tuple[str, ...]
    adapter: str
    begun: str


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """One tensor of the model: a parameter or buffer, under all the names that share it.

    names    plain FQNs, the first one leads
    places   (module, attribute), one each
    adapted  its names outside of the model, where peft has wrapped it
    """

    names: tuple[str, ...]
    places: tuple[tuple[torch.nn.Module, str], ...]
    is_buffer: bool
    fsdp_param: Any = None
    adapted: PeftNames | None = field(default=None, kw_only=True)

    @property
    def known(self) -> tuple[str, ...]:
        """All names that a checkpoint may have it by, the model's own first."""
        return tuple(name for some in self.tiers for name in some)

    @property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """The same, those apart that mean different kinds of source."""
        if self.adapted is None:
            return (self.names,)
        return (self.names, self.adapted.file, self.adapted.base)

    def named_in(self, source: Container[str]) -> list[str]:
        """Names that a source has it by: of one kind, the model's own first."""
        found = ([name for name in some if name in source] for some in self.tiers)
        return next(filter(None, found), [])

    @property
    def is_flat(self) -> bool:
        """Is it a part of a flat parameter of FSDP1?"""
        return False

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> torch.Tensor:
        """As it is in the model now."""
        module, name = self.places[0]
        found: torch.Tensor = getattr(module, name)
        return found

    @property
    def local(self) -> torch.Tensor:
        """This rank's part; all of a tensor that is no DTensor."""
        import torch

        tensor: Any = self.tensor
        with torch.no_grad():
            local: Any = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        kept = TRAINED_DENSE.get(type(local).__name__)
        found: torch.Tensor = getattr(local, kept) if kept else local
        return found

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def windows(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """(box of the whole tensor, view of what this rank holds of it), `local` being this rank's
        part of the tensor, or of one like it: a gradient, a moment."""
        return [(box, window(local, place)) for box, place in held(self)]

    @property
    def is_cut(self) -> bool:
        """Does a mesh say what each rank holds? If not, every rank that has it has all of it."""
        return is_dtensor(self.tensor)

    @property
    def is_primary(self) -> bool:
        """Of the ranks that hold the same part, is this the one that saves it? Told by the mesh;
        of a tensor without one every rank says so."""
        tensor: Any = self.tensor
        if not is_dtensor(tensor):
            return True
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and not any(
            place
            for place, p in zip(coordinate, tensor.placements, strict=True)
            if p.is_replicate()
        )

    def refuse_lost_hooks(self) -> None:
        """Raise LoadError CKM505 where autograd has a node for a parameter that will be replaced:
        hooks on the node (an optimizer's that steps in the backward) could not come along."""
        if self.local.is_meta and self.tensor.requires_grad and _accumulates(self.tensor):
            raise LoadError(
                "CKM505",
                f"model: {self.fqn} is on meta, and something keeps its gradient accumulator: hooks"
                " on that would be lost",
                "drop what a forward on meta has made; register such hooks after loading",
            )

    def put(self, local: torch.Tensor) -> None:
        """Replace the tensor everywhere it sits, a parameter by what it becomes; `local` is this rank's part of the new one."""
        import torch
        from torch import nn

        old = self.tensor
        new: torch.Tensor = like(old, local)
        if self.is_buffer:
            for module, name in self.places:
                setattr(module, name, new)
        elif type(old) is nn.Parameter and type(new) is torch.Tensor and not old.is_meta:
            old.data = new
        else:
            _become(old, nn.Parameter(new, requires_grad=old.requires_grad))
        if self.fsdp_param is not None:
            with torch.no_grad():
                fsdp2_params.adopt_replaced(self.fsdp_param)


def _become(old: torch.Tensor, new: torch.Tensor) -> None:
    """Make `old` all that `new` is, so that optimizers, hooks and weak references keep what the
    model has.

    As torch.utils.swap_tensors, which refuses what is weakly referred to, and leaves hooks behind.
    """
    import torch

    mine = dict(old.__dict__) if type(old) is torch.nn.Parameter or is_dtensor(old) else {}
    old.__class__ = type(new)
    old.__dict__ = new.__dict__ | mine  # what users have hung on it stays
    for slot in copyreg._slotnames(type(new)):  # type: ignore[attr-defined]
        if hasattr(new, slot):
            setattr(old, slot, getattr(new, slot))
    torch._C._swap_tensor_impl(old, new)
    for name in HOOKS:
        hooks = getattr(old, name)
        if hooks is not None:  # an empty one, too: torch would register the next hook in it alone
            setattr(old, name, hooks)


def _accumulates(tensor: torch.Tensor) -> bool:
    """Has autograd a node that accumulates its gradient, and does anything keep the node?"""
    from torch.autograd.graph import get_gradient_edge

    before = tensor._use_count()  # type: ignore[attr-defined]
    if before == 1:
        return False
    node = get_gradient_edge(tensor).node  # makes one where there is none, which refers to it
    made = tensor._use_count() > before  # type: ignore[attr-defined]
    del node
    return not made


def is_dtensor(tensor: torch.Tensor) -> bool:
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def expanded(local: torch.Tensor) -> bool:
    """Return whether several elements are one in memory, as `expand` makes them. Each has a value
    of its own in the checkpoint."""
    steps = zip(local.shape, local.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in steps)


def like(old: Any, local: torch.Tensor) -> torch.Tensor:
    """The local part as what `old` is: a DTensor of the same mesh and placements, or itself."""
    import torch

    if not is_dtensor(old):
        return local
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )


# ------------------------------------------------------------------------------- this rank's part


def held(target: LiveTensor) -> list[tuple[Box, Box]]:
    """What this rank holds: (box of the whole tensor, where it lies in the local one).

    Any mesh of Shard, strided Shard (FSDP2 over TP) and Replicate. Raises LoadError CKM505.
    """
    tensor: Any = target.tensor
    if not is_dtensor(tensor):
        whole = Box.whole(tensor.shape)
        return [(whole, whole)] if whole.numel else []
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank is not part of the mesh
    boxes = cut(tensor.shape, mesh.shape, coordinate, tensor.placements, target.fqn)
    count = sum(box.numel for box, _ in boxes)
    assert count == target.local.numel(), f"{target.fqn}: {tensor.placements} cut to {boxes}"
    return boxes


def cut(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    fqn: str = "",
) -> list[tuple[Box, Box]]:
    """What the rank at `coordinate` holds, placements applied left to right as torch does."""
    runs = [[range(n)] for n in shape]
    for size, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_partial():
            raise LoadError(
                "CKM505", f"model: {fqn} is placed as {placement}", "redistribute it before loading"
            )
        dim = getattr(placement, "dim", None)
        if dim is not None:
            runs[dim] = _chunk(runs[dim], size, rank, getattr(placement, "split_factor", 1))
    return list(_boxes(runs))


def _chunk(runs: list[range], parts: int, index: int, split: int) -> list[range]:
    """torch.chunk of the indices in `runs`; with `split`, of each of that many pieces of them."""
    total = sum(map(len, runs))
    taken: list[range] = []
    for piece in range(split):
        start, stop = chunk_bounds(total, split, piece)
        low, high = chunk_bounds(stop - start, parts, index)
        taken += _take(runs, start + low, start + high)
    return taken


def chunk_bounds(n: int, parts: int, index: int) -> tuple[int, int]:
    step = -(-n // parts)
    start = min(index * step, n)
    return start, min(start + step, n)


def _take(runs: list[range], start: int, stop: int) -> Iterator[range]:
    """Elements start..stop of the runs laid end to end."""
    for run in runs:
        part = run[max(start, 0) : max(stop, 0)]
        if part:
            yield part
        start, stop = start - len(run), stop - len(run)


def _boxes(runs: list[list[range]]) -> Iterator[tuple[Box, Box]]:
    """Every combination of runs, one of each dim."""
    per_dim = []
    for dim in runs:
        starts = itertools.accumulate(map(len, dim), initial=0)
        per_dim.append([(r.start, at, len(r)) for r, at in zip(dim, starts, strict=False)])
    for combination in itertools.product(*per_dim):
        sizes = tuple(n for _, _, n in combination)
        if all(sizes):
            yield (
                Box(tuple(start for start, _, _ in combination), sizes),
                Box(tuple(at for _, at, _ in combination), sizes),
            )


# ------------------------------------------------------------------------------- where data goes


def device_for(target: LiveTensor, fallback: torch.device) -> torch.device:
    """Where its data is, or, on meta, where it belongs: FSDP2's device, or `fallback`."""
    import torch

    tensor: Any = target.tensor
    if not target.local.is_meta:
        return target.local.device
    if fsdp2_params.offloads(target.fsdp_param):
        return torch.device("cpu")
    if is_dtensor(tensor):
        return mesh_device(tensor.device_mesh)
    return fallback


def mesh_device(mesh: Any) -> torch.device:
    import torch

    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def fallback_device(targets: Sequence[LiveTensor]) -> torch.device:
    """For what is on meta outside of any mesh: where the rest of the model is, else the CPU."""
    import torch

    for target in targets:
        if not target.local.is_meta:
            return target.local.device
    for target in targets:
        tensor: Any = target.tensor
        if is_dtensor(tensor):
            return mesh_device(tensor.device_mesh)
    return torch.device("cpu")
