"""Memory for the copies of the first save, made before it in a thread, while training goes on.

New memory costs more than the copies: 0.2 seconds of CPU for 400 MB, where the copies take 0.05. Pinned memory for
the copies from a device costs most: 13 GB took 4 seconds, and their copies 0.2. A save that finds memory of about
the right size blocks training for the copies alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

from ckptmap.live.model.live_tensor import is_dtensor
from ckptmap.live.model.rank_group import rank_and_world
from ckptmap.live.optimizer.unwrap import each_of, groups_of, unwrapped
from ckptmap.live.save.staged_values import is_copied_apart
from ckptmap.storage.pinned_memory import give_back_pinned, reserve_pageable, reserve_pinned

BESIDE_NBYTES = 1 << 20
"""Bytes for what is saved beside weights and moments: random streams, buffers, values of the caller's."""


_holders: WeakSet[SaveMemory] = WeakSet()
"""The managers that use the memory which is kept from one save to the next."""


class SaveMemory:
    """The memory of the saves of one manager, from before its first save until the manager is closed."""

    def hold(self) -> None:
        """Keep what a save leaves for the next one."""
        _holders.add(self)

    def reserve(self, optimizer: object, model: object = None) -> None:
        """Begin to make memory for the first save, as `reserve` does, and keep it."""
        self.hold()
        reserve(optimizer, model)

    def give_back(self) -> None:
        """Give pinned memory back to the system, unless another manager uses it; no save is under way."""
        if self in _holders:
            _holders.remove(self)
            if not _holders:
                give_back_pinned()


def reserve(optimizer: object, model: object = None) -> None:
    """Begin to make memory for a save of the optimizer's parameters and their state: pinned memory for those on a
    device, and for weights there that are not trained. What a save needs beyond it is made when it is needed."""
    if optimizer is None:
        return
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for is_pinned, nbytes in _sizes(optimizer):
        sizes[is_pinned].append(nbytes)
    sizes[True] += [nbytes for is_pinned, nbytes in _untrained(model, optimizer) if is_pinned]
    reserve_pinned(sizes[True])
    reserve_pageable([*sizes[False], BESIDE_NBYTES] if sizes[False] or sizes[True] else [])


def _sizes(optimizer: object) -> Iterator[tuple[bool, int]]:
    """Yield (whether it is copied to pinned memory, bytes) of each tensor that this rank is likely to write. Only
    the save itself knows: ranks share among them what all of them hold."""
    for one in each_of(unwrapped(optimizer)):
        state = getattr(one, "state", {})
        for group in groups_of(one):
            for param in group["params"]:
                entries = state.get(param, {})
                values = entries.values() if isinstance(entries, Mapping) else ()
                yield from (part for part in map(_own_part, (param, *values)) if part[1])


def _untrained(model: object, optimizer: object) -> Iterator[tuple[bool, int]]:
    """Yield likewise the parts of a model, or of each of several, that no optimizer has: frozen weights, buffers."""
    groups = (group for one in each_of(unwrapped(optimizer)) for group in groups_of(one))
    known = {id(param) for group in groups for param in group["params"]}
    for one in model.values() if isinstance(model, Mapping) else (model,):
        if not hasattr(one, "parameters") or not hasattr(one, "buffers"):
            continue
        for tensor in (*one.parameters(), *one.buffers()):
            if id(tensor) not in known:
                known.add(id(tensor))
                yield _own_part(tensor)


def _own_part(tensor: Any) -> tuple[bool, int]:
    """Return whether a tensor is copied to pinned memory, and the bytes that this rank writes of it; 0 for values
    and classes of another kind, and on devices that no copy leaves while the host goes on."""
    import torch

    share = 1
    if is_dtensor(tensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        for place, placement in zip(coordinate, tensor.placements, strict=False):
            if placement.is_replicate() and place:
                return False, 0  # the first of the replicas writes it
        with torch.no_grad():
            tensor = tensor.to_local()
    else:
        share = rank_and_world()[1]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False, 0
    is_pinned = is_copied_apart(tensor.device)
    if not is_pinned and tensor.device.type != "cpu":
        return False, 0
    return is_pinned, int(tensor.nbytes) // share
