"""The tensors of a live model by plain FQN, where each sits, and which part of it this rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.resume import fixes
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

NF4_CLASS = "NF4Tensor"
PLAIN = frozenset({"Tensor", "Parameter", "Buffer", "DTensor", NF4_CLASS})
"""Classes of live tensors that can be filled or replaced; any other is refused by name."""


@dataclass(frozen=True, eq=False)
class Target:
    """One tensor of the model: a parameter or buffer, under all the names that share it.

    names   plain FQNs, the first one leads
    places  (module, attribute), one each
    """

    names: tuple[str, ...]
    places: tuple[tuple[torch.nn.Module, str], ...]
    is_buffer: bool
    fsdp_param: Any = None

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
            local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor.detach()
        return local

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def put(self, local: torch.Tensor) -> None:
        """Replace the tensor everywhere it sits; `local` is this rank's part of the new one."""
        import torch
        from torch import nn

        old = self.tensor
        new: torch.Tensor = like(old, local)
        if not self.is_buffer:
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            if type(old) is nn.Parameter:
                new.__dict__.update(old.__dict__)  # what users have hung on it
        for module, name in self.places:
            setattr(module, name, new)
        if self.fsdp_param is not None:
            with torch.no_grad():
                fixes.adopt_replaced(self.fsdp_param)


def is_dtensor(tensor: torch.Tensor) -> bool:
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def is_nf4(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == NF4_CLASS


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


# ------------------------------------------------------------------------------- finding them


def find_targets(model: torch.nn.Module) -> tuple[list[Target], list[str]]:
    """Every parameter and persistent buffer once, and the non-persistent buffers on meta, by name.

    Raises LoadError CKM505 for FSDP1's flat parameters and for tensor subclasses of other kinds.
    """
    _reshard(model)
    found: dict[str, tuple[torch.nn.Module, str, bool]] = {}
    homeless: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        _refuse_fsdp1(path, module)
        prefix = f"{path}." if path else ""
        for name, value in module._parameters.items():
            if value is not None:
                found[prefix + name] = (module, name, False)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if name not in module._non_persistent_buffers_set:
                found[prefix + name] = (module, name, True)
            elif buffer.is_meta:
                homeless.append(prefix + name)
    plain = strip_wrappers(list(found), "model")
    return _tied_together(found, plain, fixes.fsdp_params(model)), homeless


def _tied_together(
    found: dict[str, tuple[torch.nn.Module, str, bool]], plain: dict[str, str], sharded: Any
) -> list[Target]:
    """One target for all names that hold the same object."""
    ties: dict[int, list[str]] = {}
    for key, (module, name, _) in found.items():
        ties.setdefault(id(getattr(module, name)), []).append(key)
    targets = []
    for keys in ties.values():
        places = {(id(found[k][0]), found[k][1]): (found[k][0], found[k][1]) for k in keys}
        managed = next((sharded[place] for place in places if place in sharded), None)
        target = Target(
            tuple(plain[key] for key in keys),
            tuple(places.values()),
            found[keys[0]][2],
            managed,
        )
        _refuse_subclass(target)
        targets.append(target)
    return targets


def _reshard(model: torch.nn.Module) -> None:
    """After a forward the root unit of FSDP2 keeps whole parameters; bring its shards back."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _refuse_fsdp1(path: str, module: torch.nn.Module) -> None:
    if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
        raise LoadError(
            "CKM505",
            f"model: {path or 'the root'} is wrapped by FSDP1, which keeps flat parameters",
            "load before wrapping it, or use fully_shard",
        )


def _refuse_subclass(target: Target) -> None:
    for tensor in (target.tensor, target.local):
        kind = type(tensor).__name__
        if kind not in PLAIN:
            raise LoadError(
                "CKM505",
                f"model: {target.fqn} is a {kind}, expected a tensor, DTensor or NF4Tensor",
                "load before quantizing or wrapping this weight",
            )


# ------------------------------------------------------------------------------- this rank's part


def held(target: Target) -> list[tuple[Box, Box]]:
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
        start, stop = _chunk_bounds(total, split, piece)
        low, high = _chunk_bounds(stop - start, parts, index)
        taken += _take(runs, start + low, start + high)
    return taken


def _chunk_bounds(n: int, parts: int, index: int) -> tuple[int, int]:
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


def device_for(target: Target, fallback: torch.device) -> torch.device:
    """Where its data is, or, on meta, where it belongs: FSDP2's device, or `fallback`."""
    import torch

    tensor: Any = target.tensor
    if not target.local.is_meta:
        return target.local.device
    if fixes.offloads(target.fsdp_param):
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


def fallback_device(targets: Sequence[Target]) -> torch.device:
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
