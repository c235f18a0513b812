"""A moment of a shard that cuts blocks of the whole tensor.

Cut by rows, a shard begins and ends inside a block: this rank holds all blocks that its shard touches.

    whole    |  block 0  |  block 1  |  block 2  |
    shards   | rank 0   |     rank 1     | rank 2 |
    rank 1   |  block 0  |  block 1  |  block 2  |     span of 3 blocks, its shard begins at `lead`

Neighbours hold a block between them twice, with equal codes: both step it, with the gradients of
both (see `shared_gradients`). So one block has one scale, that of the whole tensor. A checkpoint has it once,
from the rank on which it begins.

Cut by columns, a shard touches many blocks, and is a small part of each: this rank holds the codes of its shard alone,
and the scales of these blocks (see `cut_params`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from ckptmap.live.model.live_tensor import like
from ckptmap.live.optimizer.family import Codes, codes_of, local_of
from ckptmap.live.optimizer.local_state import decoded
from ckptmap.live.rounding.cut_params import CutBlocks
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
    held = tensor_class()(blocks, span[0], shard[0] - span[0], tuple(local.shape), local.dtype)
    return like(param, held)


def zeros_of_cut(
    optimizer: TorchaoOptimizer, param: torch.Tensor, signed: bool, cut: CutBlocks
) -> torch.Tensor:
    """Return zeros for a moment of a parameter whose shard is a small part of many blocks."""
    import torch

    local, block = local_of(param), int(optimizer.block_size)
    assert cut.segments is not None
    one = torch.empty(block, dtype=local.dtype, device=local.device)
    codes = codes_of(optimizer._subclass_zeros(one, signed, block))
    assert codes is not None, "an optimizer with blocks quantizes"
    numel = -(-local.numel() // (block // codes.codes.numel()))
    mine = replace(
        codes,
        codes=codes.codes.new_zeros(numel), scale=codes.scale.new_zeros(cut.segments.count),
        shape=tuple(local.shape), segments=cut.segments,
    )  # fmt: skip
    return like(param, tensor_class()(mine, 0, 0, tuple(local.shape), local.dtype))


def is_around(local: object) -> bool:
    """Return whether a local tensor is a moment in the blocks around a shard."""
    return getattr(type(local), "is_around", False) is True


def codes_of_cut(local: Any) -> Codes | None:
    """Return the codes of a moment whose shard is a small part of many blocks; None: it is another."""
    return local.blocks if is_around(local) and isinstance(local.blocks, Codes) else None


def decode(moment: Any) -> torch.Tensor:
    """Return the values of the shard in float32, as a DTensor like the moment."""
    held: Any = local_of(moment)
    if (codes := codes_of_cut(held)) is not None:
        return like(moment, decoded(codes).view(held.shape))
    values = held.blocks.dequantize().narrow(0, held.lead, math.prod(held.shape))
    return like(moment, values.view(held.shape).clone())


@cache
def tensor_class() -> Any:
    """Return the class: torch is imported when the first moment is made."""
    import torch

    class BlocksAround(torch.Tensor):
        """Looks like the shard of a moment.

        blocks  torchao's quantized state of all blocks, flat; or the codes of the shard
        start   position in the whole tensor of the first element of `blocks`
        lead    elements of `blocks` before the shard
        """

        is_around = True
        blocks: Any
        start: int
        lead: int

        @staticmethod
        def __new__(
            cls, blocks: Any, start: int, lead: int, shape: tuple[int, ...], dtype: torch.dtype
        ) -> Any:
            device = blocks.codes.device
            made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, device=device, dtype=dtype)
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


def _again(held: Any, blocks: Any = None, dtype: torch.dtype | None = None) -> Any:
    kept = held.blocks if blocks is None else blocks
    return tensor_class()(kept, held.start, held.lead, tuple(held.shape), dtype or held.dtype)


def _view(held: Any, shape: Any) -> Any:
    if tuple(shape) != tuple(held.shape):
        raise RuntimeError(SAVED_BY)
    return _again(held)


def _clone(held: Any, **_: object) -> Any:
    return _again(held, _rebuilt(held.blocks, lambda part: part.clone()))


def _to(held: Any, **options: Any) -> Any:
    """The dtype is that of appearance, as torchao's."""
    dtype, device = options.get("dtype") or held.dtype, options.get("device") or held.device
    if codes_of_cut(held) is None:
        return _again(held, held.blocks.to(device=device, dtype=dtype), dtype)
    return _again(held, _rebuilt(held.blocks, lambda part: part.to(device)), dtype)


def _rebuilt(blocks: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(blocks, Codes):
        parts: dict[str, Any] = {name: change(part) for name, part in blocks.parts.items()}
        segments = blocks.segments and blocks.segments.on(parts["codes"].device)
        return replace(blocks, **parts, segments=segments)
    names, context = blocks.__tensor_flatten__()
    parts = {name: change(getattr(blocks, name)) for name in names}
    return type(blocks).__tensor_unflatten__(parts, context)


def _copy(held: Any, source: Any, *_: object) -> Any:
    if not is_around(source) or _form(held) != _form(source):
        raise RuntimeError(SAVED_BY)
    for part in ("codes", "scale"):
        getattr(held.blocks, part).copy_(getattr(source.blocks, part))
    return held


def _form(held: Any) -> tuple[object, ...]:
    codes = codes_of(held)
    assert codes is not None
    first = codes.segments and codes.segments.first
    return held.start, held.lead, codes.scheme, codes.block_size, codes.signed, codes.shape, first
