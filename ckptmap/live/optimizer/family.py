"""The interface to a family of live optimizers: the state that they keep, its names and its classes.

torchao AdamW8bit   state[p] = {step, exp_avg: OptimState8bit, exp_avg_sq: OptimState8bit}
bitsandbytes        state[p] = {step, state1, absmax1, qmap1, state2, ...}
both                entries(p) = {step, exp_avg, exp_avg_sq}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ckptmap.live.model.live_tensor import is_dtensor, shard_of

if TYPE_CHECKING:
    import torch

    from ckptmap.live.optimizer.optimizer_types import ParamGroup
    from ckptmap.optim.block_segments import BlockSegments

T = TypeVar("T")

STEP = "step"
KINDS = {"OptimState8bit": "adam8bit", "OptimState4bit": "adam4bit", "OptimStateFp8": "adamfp8"}
"""torchao's classes -> the schemes of `ckptmap.optim`."""


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized moment of a live optimizer: codes and scales of this rank, not copied."""

    scheme: str
    block_size: int
    signed: bool
    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor | None
    shape: tuple[int, ...]
    encoder: Callable[[Codes, torch.Tensor], None] | None = None
    """Quantizes float32 values into these codes by the library's own rule; None: by torchao's."""
    start: int | None = None
    """Position in the whole tensor of the first code, where they are those of all blocks that this rank's shard
    touches (see `rounding.blocks_around`); None: they are those of the shard."""
    segments: BlockSegments | None = None
    """Where the shard lies in the blocks of the whole tensor, which it cuts: `scale` is of all these blocks, and
    codes of 4 bits fill their last byte. None: codes are whole blocks."""

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by the names under which they are stored."""
        parts = {"codes": self.codes, "scale": self.scale}
        return parts if self.qmap is None else {**parts, "qmap": self.qmap}

    @property
    def span(self) -> tuple[int, int] | None:
        """Positions in the whole tensor of the first element and past the last one, where `start` is known."""
        return None if self.start is None else (self.start, self.start + math.prod(self.shape))

    def begun_in(self, shard: tuple[int, int]) -> Codes:
        """Return the blocks that begin in the shard, of those around it: each block is one rank's so."""
        assert self.start is not None
        first, last = (-(-at // self.block_size) - self.start // self.block_size for at in shard)
        packed = math.prod(self.shape) // max(1, self.codes.numel())
        low, high = first * self.block_size, last * self.block_size
        return replace(
            self,
            codes=self.codes.view(-1)[low // packed : high // packed],
            scale=self.scale[first:last],
            shape=(high - low,),
            start=self.start + low,
        )


Moment: TypeAlias = "torch.Tensor | Codes"
"""A moment of a live optimizer: a tensor of any class, quantized or not, or Codes."""


def local_of(value: T) -> T | torch.Tensor:
    """Return this rank's shard of a state tensor; any other value itself."""
    return shard_of(value) if is_dtensor(value) else value


def codes_of(value: object) -> Codes | None:
    """Return the codes of a quantized moment; None: it is not quantized."""
    if isinstance(value, Codes):
        return value
    local: Any = local_of(value)
    if getattr(type(local), "is_around", False):
        if isinstance(local.blocks, Codes):
            return local.blocks
        blocks = codes_of(local.blocks)
        return blocks and replace(blocks, start=local.start)
    scheme = KINDS.get(type(local).__name__)
    if scheme is None:
        return None
    return Codes(
        scheme, local.block_size, getattr(local, "signed", True), local.codes, local.scale,
        getattr(local, "qmap", None), tuple(local.shape),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class OptimizerParam:
    """One parameter of an optimizer. `model` is the model's own tensor, which differs from `param` where
    the optimizer steps a copy of it."""

    optimizer: Any
    """A LiveOptimizer; its family knows what else it has."""
    family: OptimizerFamily
    group: ParamGroup
    param: torch.Tensor
    model: torch.Tensor
    is_elsewhere: bool = False
    """Does another rank step it, and keep its state?"""

    @property
    def state(self) -> Mapping[str, object]:
        state: Mapping[str, object] = self.optimizer.state.get(self.param, {})
        return state

    def may_be_of_shard(self, name: str, value: torch.Tensor) -> bool:
        """Return whether an entry may be of this rank's shard of the parameter alone: one number, as a norm is that
        a step computes of what it sees. A matrix that every rank has whole would be saved as often as there are ranks."""
        if name == STEP or value.numel() != 1 or is_dtensor(value):
            return False
        return self.family.name == "other" or name not in self.family.needs(self)


class OptimizerFamily:
    """A family of optimizers. The defaults are those of most: state by its own names, in the dtype of
    the parameter."""

    name = "torch"
    mixed = False
    """Can the optimizer step with moments of another dtype than the parameter's?"""
    moments: tuple[str, ...] = ()
    """Canonical names of the moments that the optimizer needs."""
    counts_steps = True
    """Does it keep the count of steps of each parameter?"""
    scratch: tuple[str, ...] = ()
    """Entries that each step computes anew, so that they need not be loaded."""

    def claims(self, optimizer: object) -> bool:
        return True

    def flags(self, optimizer: Any) -> dict[str, object]:
        """Return the constructor arguments that the state dict does not hold."""
        return {}

    def rounds(self, optimizer: Any) -> bool:
        """Return whether the optimizer rounds stochastically, with bits of the random generators."""
        return False

    def entries(self, state: Mapping[str, object]) -> dict[str, object]:
        """Return canonical name -> tensor of any class, Codes or plain value."""
        return {name: value for name, value in state.items() if value is not None}

    def named(self, source: Mapping[str, object]) -> Mapping[str, object]:
        """Return the checkpoint's state of one parameter, with names that only this family knows."""
        return source

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        """Return fresh state by canonical name. `source` is the checkpoint's: LazyTensors and plain
        values."""
        raise NotImplementedError

    def present(self, part: OptimizerParam) -> dict[str, object]:
        """Return the live state, where it can be filled in place; empty: it cannot."""
        return {}

    def install(self, part: OptimizerParam, values: Mapping[str, object]) -> None:
        part.optimizer.state[part.param] = dict(values)

    def needs(self, part: OptimizerParam) -> tuple[str, ...]:
        """Return the canonical names of the moments that the optimizer needs for this parameter."""
        if self.moments and part.group.get("amsgrad"):
            return (*self.moments, "max_exp_avg_sq")
        return self.moments

    def dtype_of(self, part: OptimizerParam, name: str) -> torch.dtype:
        """Return the dtype of a moment that is not quantized, where the optimizer leaves no choice."""
        return part.param.dtype

    def like_param(self, part: OptimizerParam, name: str) -> bool:
        """Return whether the moment has the parameter's shape."""
        return True

    def coded(self, part: OptimizerParam, scheme: str, signed: bool) -> Moment | None:
        """Return a quantized moment where the optimizer itself would not quantize; None: impossible."""
        return None

    def plain(self, part: OptimizerParam, dtype: torch.dtype) -> torch.Tensor:
        """Return a moment of zeros in `dtype`, not quantized."""
        import torch

        with torch.no_grad():
            return torch.zeros_like(part.param, dtype=dtype, requires_grad=False)


def is_a(optimizer: object, library: str, *names: str) -> bool:
    """Return whether the optimizer's class, or one it inherits from, has such a name in the library."""
    return any(
        cls.__name__ in names and f"{cls.__module__}.".startswith(f"{library}.")
        for cls in type(optimizer).__mro__
    )


def step_dtype(group: Mapping[str, object]) -> torch.dtype:
    """Return the dtype in which torch.optim counts steps, as its own `_get_scalar_dtype` does."""
    import torch

    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if wide else torch.float32
