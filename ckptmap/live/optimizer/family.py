"""What a family of live optimizers must say: which state it keeps, under which names, in which form.

torchao AdamW8bit   state[p] = {step, exp_avg: OptimState8bit, exp_avg_sq: OptimState8bit}
bitsandbytes        state[p] = {step, state1, absmax1, qmap1, state2, ...}
both                entries(p) = {step, exp_avg, exp_avg_sq}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.live.model.live_tensor import is_dtensor

if TYPE_CHECKING:
    import torch

STEP = "step"
KINDS = {"OptimState8bit": "adam8bit", "OptimState4bit": "adam4bit", "OptimStateFp8": "adamfp8"}
"""torchao's classes -> our schemes."""


@dataclass(frozen=True, eq=False)
class Codes:
    """A moment of a live optimizer in codes: tensors of this rank, not copied."""

    scheme: str
    block_size: int
    signed: bool
    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor | None
    shape: tuple[int, ...]
    encoder: Callable[[Codes, torch.Tensor], None] | None = None
    """Quantizes float32 values into these codes by the library's own rule; None: by torchao's."""

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """By the names under which they are stored."""
        found = {"codes": self.codes, "scale": self.scale}
        return found if self.qmap is None else {**found, "qmap": self.qmap}


def local_of(value: Any) -> Any:
    """This rank's part of a state tensor."""
    import torch

    with torch.no_grad():
        return value.to_local() if is_dtensor(value) else value


def codes_of(value: Any) -> Codes | None:
    """The codes of a torchao state, or of what a family already made Codes of; None: plain."""
    if isinstance(value, Codes):
        return value
    local = local_of(value)
    scheme = KINDS.get(type(local).__name__)
    if scheme is None:
        return None
    return Codes(
        scheme, local.block_size, getattr(local, "signed", True), local.codes, local.scale,
        getattr(local, "qmap", None), tuple(local.shape),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class OptimizerParam:
    """One parameter as an optimizer has it. `model` is the model's own tensor, which differs from
    `param` where the optimizer works on a copy of it."""

    optimizer: Any
    family: OptimizerFamily
    group: dict[str, Any]
    param: Any
    model: Any

    @property
    def state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(self.param, {})
        return found


class OptimizerFamily:
    """What is the same for most: state by its own names, all of the parameter's dtype."""

    name = "torch"
    mixed = False
    """Can it step with moments of another dtype than the parameter's?"""
    moments: tuple[str, ...] = ()
    """Canonical names that it cannot do without."""
    scratch: tuple[str, ...] = ()
    """Entries that each step makes anew: it is nothing to begin without them."""

    def claims(self, optimizer: Any) -> bool:
        return True

    def flags(self, optimizer: Any) -> dict[str, Any]:
        """Constructor arguments that its state dict does not hold."""
        return {}

    def rounds(self, optimizer: Any) -> bool:
        """Does it round stochastically?"""
        return False

    def entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Canonical name -> tensor (of any kind), Codes or plain value."""
        return {name: value for name, value in state.items() if value is not None}

    def named(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """The checkpoint's state of one parameter, where this family knows a name that it lacks."""
        return source

    def blank(self, part: OptimizerParam, source: Mapping[str, Any]) -> dict[str, Any]:
        """Fresh state by canonical name; `source` is what the checkpoint has: LazyTensors and
        plain values."""
        raise NotImplementedError

    def present(self, part: OptimizerParam) -> dict[str, Any]:
        """The state that is there, where it can be filled as it is; empty: where not."""
        return {}

    def install(self, part: OptimizerParam, values: Mapping[str, Any]) -> None:
        part.optimizer.state[part.param] = dict(values)

    def needs(self, part: OptimizerParam) -> tuple[str, ...]:
        """Canonical names of the moments that it cannot do without."""
        third = ("max_exp_avg_sq",) * bool(part.group.get("amsgrad"))
        return (*self.moments, *third) if self.moments else ()

    def dtype_of(self, part: OptimizerParam, name: str) -> torch.dtype:
        """Of a moment that is not quantized, where the optimizer leaves no choice (`mixed`)."""
        found: torch.dtype = part.param.dtype
        return found

    def like_param(self, part: OptimizerParam, name: str) -> bool:
        """Has this moment the parameter's shape?"""
        return True

    def coded(self, part: OptimizerParam, scheme: str, signed: bool) -> Any:
        """A moment in codes where the optimizer itself would have none; None: it cannot be."""
        return None

    def plain(self, part: OptimizerParam, dtype: torch.dtype) -> torch.Tensor:
        """A moment that is not quantized, in this dtype."""
        import torch

        with torch.no_grad():
            return torch.zeros_like(part.param, dtype=dtype, requires_grad=False)


def is_a(optimizer: Any, library: str, *names: str) -> bool:
    return any(
        cls.__name__ in names and f"{cls.__module__}.".startswith(f"{library}.")
        for cls in type(optimizer).__mro__
    )


def step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which torch.optim counts steps, as its own `_get_scalar_dtype` does."""
    import torch

    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if wide else torch.float32
