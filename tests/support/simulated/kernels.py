"""Every operation of torch on tensors of the device, and what ckptmap asks of CUDA alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ckptmap.live.model import reader_memory
from ckptmap.storage import pinned_memory, registered_memory
from tests.support.simulated import memory
from tests.support.simulated.memory import POISON, Access, is_here, launch, real
from tests.support.simulated.streams import HOST, LOCK, MODULE, NAME

SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "repeat_interleave", "bincount", "equal")
"""Operations whose result is sized by values, or is one: the host waits for the device."""
NEW = ("empty", "empty_strided", "empty_like", "new_empty")
_libraries: list[torch.library.Library] = []

Tree = Any
"""Tensors and other values, in lists and tuples."""


def install() -> None:
    """Give this process the device. It stays until the process ends."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    MODULE.begin()
    every: Any = torch.library.Library("_", "IMPL")
    every.fallback(_kernel, "PrivateUse1", with_keyset=False)
    _libraries.append(every)
    __import__("torch._dynamo")  # it compares the signatures of what is replaced here
    _pin_by_torch()
    _make_parameters()
    _tell_addresses()
    registered_memory.registered_memory = _registered
    pinned_memory.registered_memory = _registered
    pinned_memory.let_go = reader_memory.let_go = memory.no_copy_is_under_way


def _registered(nbytes: int, most_threads: int = 1) -> torch.Tensor:
    return memory.pin(torch.full((nbytes,), POISON, dtype=torch.uint8))


def _pin_by_torch() -> None:
    empty = torch.empty

    def pinned_or_not(*size: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        made = empty(*size, **keywords)
        return memory.pin(made) if pin_memory else made

    torch.empty = pinned_or_not


def _make_parameters() -> None:
    """torch makes a parameter of a tensor that no Python object has yet; a kernel in Python has made one."""
    make = torch.Tensor._make_subclass

    def make_subclass(
        cls: Any, data: torch.Tensor, require_grad: bool = False, **keywords: Any
    ) -> Any:
        if not is_here(data):
            return make(cls, data, require_grad, **keywords)
        made: Any = data.detach()
        made.__class__ = cls
        return made.requires_grad_(require_grad)

    torch.Tensor._make_subclass = staticmethod(make_subclass)


def _tell_addresses() -> None:
    address = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        return address(real(self) if is_here(self) else self)

    torch.Tensor.data_ptr = data_ptr


def leaves(value: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)


def mapped(call: Callable[[torch.Tensor], torch.Tensor], value: Tree) -> Tree:
    """Return the value with `call` of each of its tensors in its place."""
    if isinstance(value, torch.Tensor):
        return call(value)
    return (
        type(value)(mapped(call, one) for one in value)
        if isinstance(value, list | tuple)
        else value
    )


def _kernel(op: Any, *args: Any, **keywords: Any) -> Tree:
    """Compute an operation at once, as launched on the current stream."""
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if name in ("_copy_from", "_copy_from_and_resize"):
        _copy(args[0], args[1], args[2] if len(args) > 2 else keywords.get("non_blocking", False))
        return args[1]
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | keywords
    every = list(leaves(list(given.values())))
    for one in every:  # a number in a tensor may be the CPU's
        assert is_here(one) or not one.ndim, f"{name}: {tuple(one.shape)} is on {one.device}"
    reals = {id(one): real(one) if is_here(one) else one for one in every}
    on_cpu = _on_cpu(op, given, every, reals)
    if name in NEW or any(one.alias_info and not one.alias_info.is_write for one in schema.returns):
        made = on_cpu()
        if name in NEW:
            torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(POISON)
        return mapped(lambda one: _wrapped(one, every, reals, None), made)
    return _launched(op, name, given, on_cpu, every, reals)


def _launched(
    op: Any, name: str, given: dict[str, Any], on_cpu: Callable[[], Tree], every: list[torch.Tensor],
    reals: dict[int, torch.Tensor],
) -> Tree:  # fmt: skip
    written = [
        tensor
        for one in op._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
        for tensor in leaves(given.get(one.name))
        if is_here(tensor)
    ]
    ids = set(map(id, written))
    stream, count, at = launch([t for t in every if is_here(t) and id(t) not in ids], written, name)
    made = on_cpu()
    if name.removeprefix("_").startswith(SIZED_BY_VALUES) or _gives_numbers(made) or _masks(given):
        HOST.wait(stream.clock, name)
    access = Access(torch.empty(0), True, stream.name, count, at)
    for tensor in written:
        if reals[id(tensor)].shape != tensor.shape:  # an `out` that took the size of the result
            tensor.data = memory.as_view(tensor, reals[id(tensor)])
    return mapped(lambda one: _wrapped(one, every, reals, access), made)


def _on_cpu(
    op: Any, given: dict[str, Any], every: list[torch.Tensor], reals: dict[int, torch.Tensor]
) -> Callable[[], Tree]:
    """Return the call of the operation that the CPU computes."""
    by_place, by_name = [], {}
    for one in op._schema.arguments:
        if one.name in given:
            value = _argument(one, mapped(lambda t: reals[id(t)], given[one.name]), every)
            if one.kwarg_only:
                by_name[one.name] = value
            else:
                by_place.append(value)
    return lambda: op(*by_place, **by_name)


def _argument(declared: Any, value: Tree, every: list[torch.Tensor]) -> Tree:
    """Return an argument as the operation takes it on the CPU."""
    if declared.name == "pin_memory":
        return False
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, int | float) and str(declared.type) == "Tensor":
        has_floats = any(one.is_floating_point() for one in every)
        wide = torch.float64 if has_floats else torch.float32
        return torch.tensor(value, dtype=wide if isinstance(value, float) else None)
    return value


def _gives_numbers(made: Tree) -> bool:
    return made is not None and not list(leaves(made)) and not isinstance(made, list | tuple)


def _masks(given: dict[str, Any]) -> bool:
    """Return whether a tensor of bools is an index."""
    return any(one.dtype == torch.bool for one in leaves(given.get("indices", [])))


def _wrapped(
    made: torch.Tensor, every: list[torch.Tensor], reals: dict[int, torch.Tensor], by: Access | None
) -> torch.Tensor:
    """Return the tensor of the device for what the CPU has made: an argument, a view of one, or a new one, which `by`
    has written."""
    for one in every:
        if reals[id(one)] is made:
            return one
    storage = memory.storage_of(made)
    if storage is not None:
        base = next(t for t in every if is_here(t) and t.untyped_storage()._cdata == storage)
        return memory.as_view(base, made)
    new = memory.place_on_device(made, MODULE.current_stream())
    known = memory.accesses(new)
    if by is not None and known is not None:
        known.append(by._replace(view=made))
    return new


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy to, from or on the device. The host goes on where it is asked to and the host's memory is pinned."""
    here, there = (real(one) if is_here(one) else one for one in (source, target))
    stream, count, at = launch([source], [target], f"copy of {tuple(source.shape)}")
    if is_here(source) and is_here(target):
        there.copy_(here)
        return
    host = here if is_here(target) else there
    goes_on = non_blocking and memory.accesses(host) is not None
    with LOCK:
        values = None if is_here(target) else torch.empty_like(host).copy_(here)
        if values is None:
            there.copy_(here)
        elif not goes_on:
            there.copy_(values)
        if not goes_on:
            HOST.wait(stream.clock, f"copy of {tuple(source.shape)}")
            return
        assert host.is_contiguous(), f"a copy that goes on, of a strided {tuple(host.shape)}"
        memory.copy_begins(host, values, Access(host, values is not None, stream.name, count, at))
