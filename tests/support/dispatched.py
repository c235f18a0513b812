"""What code asks of a device, seen on the meta device, which takes the branches of devices and needs none.

`Kernels` counts the kernels that a GPU would launch, `Traffic` the bytes they move; `NeverWaits` raises where the host would wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCHES_NOTHING = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "narrow", "new_empty", "permute", "select", "slice", "split", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "_unsafe_view", "view", "_reshape_alias",
}  # fmt: skip
"""Ops that make views or take memory."""


def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


class Kernels(TorchDispatchMode):
    """Counts ops that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) not in LAUNCHES_NOTHING:
            self.counts[_name(func)] += 1
        return func(*args, **kwargs or {})


class Traffic(TorchDispatchMode):
    """Counts the bytes of memory that kernels read and write; what is broadcast is read once."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = _name(func)
        if name not in LAUNCHES_NOTHING:
            read = args[1:] if name == "copy_" else args  # the values before are not read
            options = [value for key, value in kwargs.items() if key != "out"]
            self.nbytes += sum(map(_touched, tree_leaves((read, options, made))))
        return made


def _touched(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * math.prod(size if stride else 1 for size, stride in sizes)


class OneDevice(TorchDispatchMode):
    """Raises where an op is given tensors of several devices, which CUDA refuses and meta takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        devices = {one.device.type for one in given if one.ndim}
        assert len(devices) < 2 or _name(func) == "copy_", f"{_name(func)} on {devices}"
        return func(*args, **kwargs or {})


class Waited(AssertionError):
    """The host waited for the device."""


class NeverWaits(TorchDispatchMode):
    """Raises Waited where a tensor of a device is asked for a value or copied to the CPU, and where a
    tensor of the CPU is copied to the device: that blocks the host, unless the memory is pinned. So does
    `torch.tensor` of a list, which meta does not dispatch."""

    def __enter__(self) -> NeverWaits:
        self._tensor = torch.tensor
        torch.tensor = self._on_cpu
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.tensor = self._tensor

    def _on_cpu(self, data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type != "cpu":
            raise Waited(f"a list is copied to {device}")
        return self._tensor(data, **options)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = _name(func), kwargs or {}
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is not None:
            device = given.device.type
            if name in ("_local_scalar_dense", "equal", "nonzero") and device != "cpu":
                raise Waited(f"{name} of a tensor on {device}")
            to = kwargs.get("device") if name in ("_to_copy", "to") else None
            if to is not None and (torch.device(to).type == "cpu") != (device == "cpu"):
                raise Waited(f"a tensor is copied from {device} to {to}")
            if name == "copy_" and (args[1].device.type == "cpu") != (device == "cpu"):
                raise Waited(f"a tensor is copied from {args[1].device} to {device}")
        return func(*args, **kwargs)
