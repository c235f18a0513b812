"""A repair of torchao's low-bit optimizers under FSDP2 with bf16 parameters, where step() fails.

Since 0.17 an OptimState has the dtype of its parameter. The handlers of `view`, `detach`, `slice` and
of the collectives make their results without it, in float32. DTensor then says bfloat16 where its
local tensor says float32. The repair wraps those handlers, so that a result has the dtype of the
input. A handler that keeps the dtype works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.storage.process_guards import quiet_torchao

if TYPE_CHECKING:
    import torch

CLASSES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
MARK = "_ckptmap_keeps_dtype"
Handler = Callable[..., object]


def needed() -> bool:
    """Return whether the installed handlers lose the dtype, tried on a tensor of 256 elements."""
    try:
        return any(_label_lost(cls) for cls in _classes())
    except (ImportError, AttributeError, TypeError):
        return False


def problem() -> str:
    """Return why the repair would not work where it is needed; empty: it would."""
    try:
        classes = _classes()
    except ImportError as error:
        return str(error)
    if any(map(_label_lost, classes)) and not all(map(_table, classes)):
        return "torchao has no table of handlers where it was; the fix cannot be applied"
    return ""


def asks() -> str:
    """Return what the user has to do, for `ckptmap doctor`; empty: nothing."""
    if not needed():
        return ""
    return (
        "low-bit optimizers with bf16 parameters under fully_shard will fail in step() here;"
        " ckptmap.load(..., fix=True) mends it"
    )


def applied() -> bool:
    return all(getattr(cls, MARK, False) for cls in _classes())


def apply() -> bool:
    """Wrap the handlers, once a process; return whether a repair was needed.

    Raises LoadError CKM505 where torchao keeps its handlers elsewhere.
    """
    if not needed():
        return False
    import torch

    for cls in _classes():
        table = _table(cls)
        if not table:
            raise LoadError(
                "CKM505", problem(), "use torchao 0.16, or an optimizer that is not quantized"
            )
        for op in _ops():
            if op in table:
                table[op] = _keeping(cls, table[op])
        # DTensor calls `view` with the dtype that the tensor already has.
        if torch.ops.aten.view.dtype not in table:
            table[torch.ops.aten.view.dtype] = _relabelled(cls)
        setattr(cls, MARK, True)
    return True


def _classes() -> list[object]:
    with quiet_torchao():
        from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    modules = (subclass_8bit, subclass_4bit, subclass_fp8)
    return [getattr(module, name) for module, name in zip(modules, CLASSES, strict=True)]


def _table(cls: object) -> dict[object, Handler]:
    found: dict[object, Handler] = getattr(cls, "_ATEN_OP_TABLE", {}).get(cls, {})
    return found


def _ops() -> list[Any]:
    import torch

    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    found = [aten.view.default, aten.detach.default, aten.slice.Tensor]
    for old in (torch.ops.c10d_functional, functional):
        found += [old.all_gather_into_tensor.default, old.wait_tensor.default]
    wrap = getattr(functional, "_wrap_tensor_autograd", None)
    return found if wrap is None else [*found, wrap.default]


def _label_lost(cls: Any) -> bool:
    import torch

    tensor = cls.zeros((256,), device="cpu", dtype=torch.bfloat16, **_block(cls))
    return bool({tensor.dtype, tensor.view(256).dtype} != {torch.bfloat16})


def _block(cls: Any) -> Mapping[str, int]:
    return {"block_size": 128 if cls.__name__ == "OptimState4bit" else 256}


def _keeping(cls: object, handler: Handler) -> Handler:
    def kept(func: object, types: Any, args: Any, kwargs: object) -> object:
        out = handler(func, types, args, kwargs)
        return _labelled(cls, out, args[0].dtype)

    return kept


def _relabelled(cls: object) -> Handler:
    def view(func: object, types: Any, args: Any, kwargs: object) -> object:
        return _labelled(cls, args[0], args[1])

    return view


def _labelled(cls: Any, tensor: object, dtype: torch.dtype) -> Any:
    """The same parts under this label; the label is the last of torchao's own context."""
    if not isinstance(tensor, cls) or tensor.dtype == dtype:
        return tensor
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return cls.__tensor_unflatten__(parts, [*context[:-1], dtype])
