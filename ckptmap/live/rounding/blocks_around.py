"""A moment of a shard that begins or ends inside a block: this rank holds all blocks that its shard touches.

    whole    |  block 0  |  block 1  |  block 2  |
    shards   | rank 0   |     rank 1     | rank 2 |
    rank 1   |  block 0  |  block 1  |  block 2  |     span of 3 blocks, its shard begins at `lead`

Neighbours hold a block between them twice, with equal codes: both step it, with the gradients of
both (see `shared_gradients`). So one block has one scale, that of the whole tensor. A checkpoint has it once,
from the rank on which it begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from ckptmap.live.model.live_tensor import like
from ckptmap.live.optimizer.family import local_of
from ckptmap.live.rounding.shared_blocks import Span, covering

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.torchao_adam import TorchaoOptimizer


def zeros_around(
    optimizer: TorchaoOptimizer, param: torch.Tensor, signed: bool, shard: Span
) -> torch.Tensor:
    """Return zeros for a moment of a parameter, of which this rank holds `shard`: a DTensor like it."""
    import torch

    local, block = local_of(param), int(optimizer.block_size)
    span = covering(shard, block)
    flat = torch.empty(span[1] - span[0], dtype=local.dtype, device=local.device)
    blocks = optimizer._subclass_zeros(flat, signed, block)
    return like(param, tensor_class()(blocks, span[0], shard[0] - span[0], tuple(local.shape)))


def is_around(local: object) -> bool:
    """Return whether a local tensor is a moment in the blocks around a shard."""
    return getattr(type(local), "is_around", False) is True


def decode(moment: Any) -> torch.Tensor:
    """Return the values of the shard in float32, as a DTensor like the moment."""
    held: Any = local_of(moment)
    values = held.blocks.dequantize().narrow(0, held.lead, math.prod(held.shape))
    return like(moment, values.view(held.shape).clone())


@cache
def tensor_class() -> Any:
    """Return the class: torch is imported when the first moment is made."""
    import torch

    class BlocksAround(torch.Tensor):
        """Looks like the shard of a moment.

        blocks  torchao's quantized state of all blocks, flat
        start   position in the whole tensor of the first element of `blocks`
        lead    elements of `blocks` before the shard
        """

        is_around = True
        blocks: Any
        start: int
        lead: int

        @staticmethod
        def __new__(cls, blocks: Any, start: int, lead: int, shape: tuple[int, ...]) -> Any:
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls, shape, device=blocks.device, dtype=blocks.dtype
            )
            made.blocks, made.start, made.lead = blocks, start, lead
            return made

        def __repr__(self, **_: object) -> str:  # type: ignore[override]
            return f"BlocksAround({tuple(self.shape)}, lead={self.lead}, {self.blocks!r})"

        def __deepcopy__(self, memo: object) -> Any:
            return _clone(self)

        def __reduce_ex__(self, protocol: object) -> NoReturn:
            raise RuntimeError(SAVED_BY)

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            handler = _handlers().get(func)
            if handler is None:
                raise RuntimeError(f"{func}: {SAVED_BY}")
            return handler(*args, **(kwargs or {}))

    return BlocksAround


SAVED_BY = (
    "a quantized moment whose blocks are shared by two ranks can be saved and loaded by ckptmap.save and"
    " ckptmap.load only; or uninstall() the rounding before"
)


@cache
def _handlers() -> dict[Any, Callable[..., Any]]:
    import torch

    aten: Any = torch.ops.aten
    return {
        aten.detach.default: _again,
        aten.alias.default: _again,
        aten.view.default: _view,
        aten.clone.default: _clone,
        aten._to_copy.default: _to,
        aten.copy_.default: _copy,
    }


def _again(held: Any, blocks: Any = None) -> Any:
    return tensor_class()(
        held.blocks if blocks is None else blocks, held.start, held.lead, tuple(held.shape)
    )


def _view(held: Any, shape: Any) -> Any:
    if tuple(shape) != tuple(held.shape):
        raise RuntimeError(SAVED_BY)
    return _again(held)


def _clone(held: Any, **_: object) -> Any:
    return _again(held, _rebuilt(held.blocks, lambda part: part.clone()))


def _to(held: Any, **options: Any) -> Any:
    """The dtype is that of appearance, as torchao's."""
    dtype, device = options.get("dtype") or held.dtype, options.get("device") or held.device
    return _again(held, held.blocks.to(device=device, dtype=dtype))


def _rebuilt(blocks: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    names, context = blocks.__tensor_flatten__()
    parts = {name: change(getattr(blocks, name)) for name in names}
    return type(blocks).__tensor_unflatten__(parts, context)


def _copy(held: Any, source: Any, *_: object) -> Any:
    if not is_around(source) or (held.start, held.lead) != (source.start, source.lead):
        raise RuntimeError(SAVED_BY)
    held.blocks.copy_(source.blocks)
    return held
