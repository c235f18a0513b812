"""torchao's Int8Tensor, and the subclass of it that `fully_shard` can cut by rows.

    shard: qdata i8 [out / world, in], scale f32 [out / world, in / g]
        -> all-gather of both ->  Int8Tensor [out, in]

torchao's own class cannot be cut by FSDP2 (0.18: aten.split is missing).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap.live.quantized import int8_linear
from ckptmap.storage.process_guards import quiet_torchao

if TYPE_CHECKING:
    import torch


@cache
def torchao_class() -> Any:
    """Return torchao's Int8Tensor; None: it is not installed, or too old."""
    try:
        with quiet_torchao():
            from torchao.quantization import Int8Tensor
    except ImportError:
        return None
    return Int8Tensor


@cache
def sharded_class() -> Any:
    """Return a subclass of Int8Tensor with the methods that FSDP2 calls on a shard."""
    import torch

    base, aten = torchao_class(), torch.ops.aten
    same = {
        aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default,
    }  # fmt: skip

    class ShardedInt8(base):  # type: ignore[misc, valid-type]
        """A shard whose views (`view(-1)`, `as_strided`) are the shard itself: FSDP2 keeps them only
        to compare and to free memory."""

        def __reduce_ex__(self, protocol: object) -> Any:
            """Pickle as torchao's own class, so that no file needs this one."""
            return _as(base, self).__reduce_ex__(protocol)

        def fsdp_pre_all_gather(
            self, mesh: object, outer_size: Any = None, outer_stride: object = None, module: Any = None,
            mp_policy: object = None,
        ) -> tuple[tuple[torch.Tensor, ...], object]:  # fmt: skip
            whole = self.scale.shape[0] == 1 and self.qdata.shape[0] == self.block_size[0]
            block = [outer_size[0] if whole else self.block_size[0], self.block_size[1]]
            inner = (self.qdata,) if whole else (self.qdata, self.scale)
            return inner, (block, self.scale if whole else None, self)

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: object, *, out: Any = None
        ) -> object:
            block, scale, shard = metadata
            if out is not None:
                return None
            scale = outputs[1] if scale is None else scale
            return _computing_as(shard, type(self)(outputs[0], scale, block, shard.dtype)), outputs

        @classmethod
        def __torch_function__(
            cls, func: object, types: Any, args: Any = (), kwargs: object = None
        ) -> object:
            if func is torch.nn.functional.linear and int8_linear.applies(args, kwargs):
                return int8_linear.linear(*args)
            return super().__torch_function__(func, types, args, kwargs or {})

        @classmethod
        def __torch_dispatch__(
            cls, func: object, types: Any, args: Any = (), kwargs: object = None
        ) -> object:
            first = args[0] if args else None
            if func in same and isinstance(first, cls):
                return _as(cls, first)
            if func is aten.slice.Tensor and isinstance(first, cls) and _is_all(first, args[1:]):
                return _as(cls, first)
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    return ShardedInt8


def _as(cls: Any, shard: Any) -> Any:
    """Return the same shard as an object of `cls`."""
    return _computing_as(shard, cls(shard.qdata, shard.scale, shard.block_size, shard.dtype))


def _computing_as(shard: Any, made: Any) -> Any:
    """Return `made` with the settings of `shard` for quantizing activations."""
    made.act_quant_kwargs, made.reduce_range = shard.act_quant_kwargs, shard.reduce_range
    return made


def _is_all(tensor: torch.Tensor, args: Any) -> bool:
    """Return whether `slice(dim, start, end)` is the whole tensor."""
    dim, start, end = (*args, *(0, 0, tensor.shape[0])[len(args) :])[:3]
    return not start and (end is None or end >= tensor.shape[dim])


def problem() -> str:
    """Return why int8 shards cannot be made here, for `ckptmap doctor`; empty: they can."""
    import torch

    if torchao_class() is None:
        return "torchao has no Int8Tensor"
    try:
        shard = sharded_class()(torch.zeros(2, 4).char(), torch.ones(2, 1), [1, 4], torch.bfloat16)
        same = shard.view(-1).narrow(0, 0, 2).detach()
    except (AttributeError, NotImplementedError, TypeError) as error:
        return f"torchao's Int8Tensor: {error}"
    return "" if same.shape == (2, 4) else "a view of a shard is not the shard"
