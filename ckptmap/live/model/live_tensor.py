"""One tensor of a live model: its FQNs, the modules that hold it, and the boxes of this rank.

Shard(0) of [8, 4] over 2 ranks, rank 1  ->  box (4, 0) + (4, 4) of the tensor, all of the local one
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

from ckptmap.core.class_names import is_a
from ckptmap.errors import LoadError
from ckptmap.live.model import fsdp2_params
from ckptmap.live.model.cut_boxes import boxes_of_cuts
from ckptmap.live.model.tensor_reader import window
from ckptmap.quantization.torchao.subclass_reader import TRAINED_DENSE
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor, Placement

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor's Python object that hold its hooks. Autograd registers the hooks again
when they are assigned."""


@dataclass(frozen=True)
class PeftNames:
    """The names in checkpoints of a tensor of a model that peft has wrapped (see `peft`).

    base     names in a checkpoint of the base model
    file     names in an adapter's file
    adapter  name of the adapter that the tensor belongs to; empty: the base model
    initialised_from_base
             the setting by which peft computed the first values from the base; empty: it did not
    """

    base: tuple[str, ...]
    file: tuple[str, ...]
    adapter: str
    initialised_from_base: str


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """One parameter or buffer of the model, under all the FQNs that share it.

    names       plain FQNs; reports use the first
    places      (module, attribute) of every module that holds the tensor
    fsdp_param  torch's FSDPParam, where `fully_shard` manages the tensor
    adapted     its names in checkpoints, where peft has wrapped the model
    forward_dtype
                the dtype to which FSDP1 casts the buffer before its first forward; empty: no other
    """

    names: tuple[str, ...]
    places: tuple[tuple[torch.nn.Module, str], ...]
    is_buffer: bool
    fsdp_param: FSDPParam | None = None
    adapted: PeftNames | None = field(default=None, kw_only=True)
    forward_dtype: str = field(default="", kw_only=True)

    @property
    def known(self) -> tuple[str, ...]:
        """All names that a checkpoint may use for the tensor, the model's own first."""
        return tuple(name for some in self.tiers for name in some)

    @property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """The names in a checkpoint of the model, of an adapter and of the base model."""
        if self.adapted is None:
            return (self.names,)
        return (self.names, self.adapted.file, self.adapted.base)

    def named_in(self, source: Container[str]) -> list[str]:
        """Return the names that `source` has for the tensor, all of one tier."""
        found = ([name for name in some if name in source] for some in self.tiers)
        return next(filter(None, found), [])

    @property
    def is_flat(self) -> bool:
        """Is the tensor part of a flat parameter of FSDP1?"""
        return False

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the model holds now."""
        module, name = self.places[0]
        found: torch.Tensor = getattr(module, name)
        return found

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard of a DTensor; any other tensor itself."""
        tensor = self.tensor
        local = shard_of(tensor) if is_dtensor(tensor) else tensor.detach()
        kept = TRAINED_DENSE.get(type(local).__name__)
        found: torch.Tensor = getattr(local, kept) if kept else local
        return found

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def windows(self, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """Return (box of the whole tensor, view of `local` that has its values) for every box that
        this rank holds. `local` is the rank's shard of the tensor, of its gradient or of a moment."""
        return [(box, window(local, place)) for box, place in self.own_boxes]

    @property
    def own_boxes(self) -> Sequence[tuple[Box, Box]]:
        """What `local_boxes` returns."""
        return local_boxes(self)

    @property
    def is_cut(self) -> bool:
        """Does a mesh cut the tensor? If not, every rank that has the tensor has all of it."""
        return is_dtensor(self.tensor)

    @property
    def is_primary(self) -> bool:
        """Is this rank, of those that hold the same shard, the first by the mesh? Without a mesh
        every rank is."""
        tensor = self.tensor
        if not is_dtensor(tensor):
            return True
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and not any(
            place
            for place, p in zip(coordinate, tensor.placements, strict=True)
            if p.is_replicate()
        )

    def refuse_lost_hooks(self) -> None:
        """Raise LoadError CKM505 where a parameter on meta has a gradient accumulator that something
        refers to. The parameter will be replaced, and hooks on that node would be lost, those of an
        optimizer that steps in the backward for one."""
        if self.local.is_meta and self.tensor.requires_grad and _accumulates(self.tensor):
            raise LoadError(
                "CKM505",
                f"model: {self.fqn} is on meta, and something refers to its gradient accumulator,"
                " whose hooks would be lost",
                "delete the outputs of a forward on meta; register such hooks after loading",
            )

    def put(self, local: torch.Tensor) -> None:
        """Replace the tensor in every module that holds it; `local` is this rank's shard of the new
        one. A parameter stays the same Python object."""
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
            _replace_in_place(old, nn.Parameter(new, requires_grad=old.requires_grad))
        if self.fsdp_param is not None:
            with torch.no_grad():
                fsdp2_params.adopt_replaced(self.fsdp_param)


class SettledTensor(LiveTensor):
    """A tensor that nothing replaces for as long as this object is in use: what it is, is looked up once.

    A save asks a hundred times for each tensor, while training waits.
    """

    @classmethod
    def of(cls, target: LiveTensor) -> LiveTensor:
        """Return the tensor, settled; one of a flat parameter as it is."""
        if type(target) is not LiveTensor:
            return target
        settled = cls.__new__(cls)
        settled.__dict__.update(vars(target))
        return settled

    @cached_property
    def tensor(self) -> torch.Tensor:
        return super().tensor

    @cached_property
    def local(self) -> torch.Tensor:
        return super().local

    @cached_property
    def dtype(self) -> str:
        return super().dtype

    @cached_property
    def is_cut(self) -> bool:
        return super().is_cut

    @cached_property
    def is_primary(self) -> bool:
        return super().is_primary

    @cached_property
    def own_boxes(self) -> Sequence[tuple[Box, Box]]:
        return super().own_boxes


def _replace_in_place(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give the Python object `old` the class, attributes and data of `new`, so that optimizers, hooks
    and weak references go on referring to the model's parameter.

    torch.utils.swap_tensors does the same, but refuses tensors with weak references and leaves
    hooks behind.
    """
    import torch

    mine = dict(old.__dict__) if type(old) is torch.nn.Parameter or is_dtensor(old) else {}
    old.__class__ = type(new)
    old.__dict__ = new.__dict__ | mine  # attributes that users set stay
    for slot in copyreg._slotnames(type(new)):  # type: ignore[attr-defined]
        if hasattr(new, slot):
            setattr(old, slot, getattr(new, slot))
    torch._C._swap_tensor_impl(old, new)
    for name in HOOKS:
        hooks = getattr(old, name)
        if hooks is not None:  # an empty dict too: else torch would not see the next hook in it
            setattr(old, name, hooks)


def _accumulates(tensor: torch.Tensor) -> bool:
    """Return whether something keeps a reference to the tensor's gradient accumulator."""
    from torch.autograd.graph import get_gradient_edge

    before = tensor._use_count()  # type: ignore[attr-defined]
    if before == 1:
        return False
    # This makes a node where there is none, and the node refers to the tensor.
    node = get_gradient_edge(tensor).node
    made = tensor._use_count() > before  # type: ignore[attr-defined]
    del node
    return not made


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether the value is a DTensor, without an import of torch.distributed."""
    return is_a(tensor, "DTensor")


def shard_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, without a gradient: as `to_local` does, which makes a view anew for
    each call where the DTensor is a parameter."""
    import torch

    local = tensor._local_tensor
    if type(local) is torch.Tensor:
        return local.detach() if local.requires_grad else local
    with torch.no_grad():
        return tensor.to_local()


def like(old: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a DTensor of the mesh and placements of `old`; as it is where `old` is none."""
    import torch

    if not is_dtensor(old):
        return local
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        if local.device.type != old.device_mesh.device_type and not local.is_meta:
            # Offloaded to the CPU: `from_local` would move the shard to the mesh's device.
            return _with_shard(old, local)
        return DTensor.from_local(
            local,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )


def _with_shard(old: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor placed as `old`, whose shard is `local` on whatever device it is: as FSDP2 makes them
    (torch's _fully_shard/_fsdp_common.py, `_from_local_no_grad`)."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(old.shape, old.stride(), local.dtype)
    spec = DTensorSpec(old.device_mesh, tuple(old.placements), tensor_meta=meta)
    make: Callable[..., DTensor] = DTensor
    return make(local, spec, requires_grad=False)


# ------------------------------------------------------------------------------- this rank's part


def local_boxes(target: LiveTensor) -> list[tuple[Box, Box]]:
    """Return (box of the whole tensor, the same box in the local tensor) for all that this rank holds.

    Placements may be Shard, strided Shard (FSDP2 over TP) and Replicate on any mesh. Raises
    LoadError CKM505 for Partial.
    """
    tensor = target.tensor
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
    placements: Sequence[Placement],
    fqn: str = "",
) -> list[tuple[Box, Box]]:
    """Return (box, box in the local tensor) for what the rank at `coordinate` of the mesh holds.
    Placements apply from left to right, as in torch."""
    for placement in placements:
        if placement.is_partial():
            raise LoadError(
                "CKM505", f"model: {fqn} is placed as {placement}", "redistribute it before loading"
            )
    # A strided shard may be equal to another one, so that placements are no key.
    cuts = [(getattr(p, "dim", None), getattr(p, "split_factor", 1)) for p in placements]
    return list(boxes_of_cuts(tuple(shape), tuple(mesh_shape), tuple(coordinate), tuple(cuts)))


# ------------------------------------------------------------------------------- where data goes


def device_for(target: LiveTensor, fallback: torch.device) -> torch.device:
    """Return the device of the tensor's data; for one on meta, FSDP2's device or `fallback`."""
    import torch

    tensor = target.tensor
    if not target.local.is_meta:
        return target.local.device
    if fsdp2_params.offloads(target.fsdp_param):
        return torch.device("cpu")
    if is_dtensor(tensor):
        return mesh_device(tensor.device_mesh)
    return fallback


def devices_of(targets: Sequence[LiveTensor]) -> list[torch.device]:
    """Return the devices on which these tensors have their data, or will have it; not the CPU."""
    fallback = fallback_device(targets)
    found = dict.fromkeys(device_for(target, fallback) for target in targets)
    return [device for device in found if device.type not in ("cpu", "meta")]


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank keeps its shards of the mesh's tensors."""
    import torch

    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def fallback_device(targets: Sequence[LiveTensor]) -> torch.device:
    """Return the device for tensors on meta that no mesh places: that of the rest of the model, or
    the CPU."""
    import torch

    for target in targets:
        if not target.local.is_meta:
            return target.local.device
    for target in targets:
        tensor = target.tensor
        if is_dtensor(tensor):
            return mesh_device(tensor.device_mesh)
    return torch.device("cpu")
