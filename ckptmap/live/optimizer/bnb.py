"""bitsandbytes' optimizers, one or two states, 8 bit or 32, paged or not.

    adam, lamb        state1, state2        = exp_avg, exp_avg_sq
    ademamix          state1 [2, ...]       = exp_avg, exp_avg_slow; state2 = exp_avg_sq
    lion              state1                = exp_avg
    momentum, lars    state1                = momentum_buffer      of torch.optim.SGD
    rmsprop           state1                = square_avg           of torch.optim.RMSprop
    adagrad           state1                = sum                  of torch.optim.Adagrad

Source: bitsandbytes 0.50, optim/optimizer.py, optim/ademamix.py, backends/cpu/ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckptmap.live.optimizer.family import (
    STEP,
    Codes,
    Moment,
    OptimizerFamily,
    OptimizerParam,
    is_a,
)
from ckptmap.live.optimizer.optimizer_types import LiveOptimizer, ParamGroup
from ckptmap.optim.lowbit import LowBit
from ckptmap.optim.lowbit_bnb import UNNAMED

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 256


class BnbOptimizer(LiveOptimizer, Protocol):
    """bitsandbytes' Optimizer8bit, of which its Optimizer1State and Optimizer2State are subclasses."""

    initialized: bool
    is_paged: bool
    args: object

    def check_overrides(self) -> None: ...

    def init_state(self, group: ParamGroup, p: torch.Tensor, gindex: int, pindex: int) -> None: ...


class Bnb(OptimizerFamily):
    """bitsandbytes' optimizers of some algorithms. `first` are the moments in `state1`, one a row where
    there are several, and `second` is the moment in `state2`."""

    name = "bitsandbytes"
    mixed = True
    scratch = ("unorm_vec",)

    def __init__(self, algorithms: tuple[str, ...], first: tuple[str, ...], second: str) -> None:
        self._algorithms = algorithms
        self._names = {"1": first, "2": (second,) if second else ()}
        self.moments = (*self._names["1"], *self._names["2"])

    def claims(self, optimizer: object) -> bool:
        is_bnb = is_a(optimizer, "bitsandbytes", "Optimizer1State", "Optimizer2State")
        return is_bnb and getattr(optimizer, "optimizer_name", "") in self._algorithms

    def flags(self, optimizer: BnbOptimizer) -> dict[str, object]:
        names = ("optim_bits", "min_8bit_size", "max_unorm", "skip_zeros")
        args = {name: getattr(optimizer.args, name, None) for name in names}
        return {**args, "is_paged": bool(optimizer.is_paged)}

    def entries(self, state: Mapping[str, object]) -> dict[str, object]:
        entries: dict[str, object] = {}
        for name, value in state.items():
            if name in ("state1", "state2"):
                entries |= self._moments(name[-1], state)
            elif not name.startswith(("absmax", "qmap")):
                entries[name] = value
        return entries

    def _moments(self, number: str, state: Mapping[str, Any]) -> dict[str, Moment]:
        """Return views of the moments by canonical name."""
        names, table = self._names[number], state.get(f"qmap{number}")
        value: torch.Tensor = state[f"state{number}"]
        absmax: torch.Tensor | None = state.get(f"absmax{number}")
        if len(names) == 1:
            return {names[0]: self._moment(number, value, absmax, table)}
        scales = [None] * len(names) if absmax is None else list(absmax)
        rows = zip(names, value, scales, strict=True)
        return {name: self._moment(number, row, scale, table) for name, row, scale in rows}

    def _moment(
        self,
        number: str,
        value: torch.Tensor,
        absmax: torch.Tensor | None,
        table: torch.Tensor | None,
    ) -> Moment:
        if absmax is None:
            return value
        signed = number == "1"
        shape = tuple(value.shape)
        return Codes("bnb8bit", BLOCK_SIZE, signed, value, absmax, table, shape, _encode)

    def named(self, source: Mapping[str, object]) -> Mapping[str, object]:
        """Return the source with a moment without a name as this optimizer's, where it has only one."""
        if UNNAMED not in source or len(self.moments) != 1 or self.moments[0] in source:
            return source
        return {self.moments[0] if k == UNNAMED else k: value for k, value in source.items()}

    def plain(self, part: OptimizerParam, dtype: torch.dtype) -> torch.Tensor:
        """Return a moment in float32: with any other dtype bitsandbytes' step does nothing, silently."""
        import torch

        return super().plain(part, torch.float32)

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        optimizer: BnbOptimizer = part.optimizer
        group = part.group
        number = next(i for i, other in enumerate(optimizer.param_groups) if other is group)
        place = next(i for i, other in enumerate(group["params"]) if other is part.param)
        if not optimizer.initialized:
            optimizer.check_overrides()
        optimizer.state[part.param] = {}
        optimizer.init_state(group, part.param, number, place)
        return self.entries(optimizer.state[part.param])

    def install(self, part: OptimizerParam, values: Mapping[str, Any]) -> None:
        import torch

        """Set the step and the moments that became plain; codes were filled in place. One plain
        moment makes all plain: the dtype of `state1` decides for both."""
        state: dict[str, Any] = part.optimizer.state[part.param]
        # The first step of bitsandbytes' SGD overwrites the moment; torch's SGD counts no steps.
        state[STEP] = max(int(values.get(STEP, 0)), int("momentum_buffer" in values))
        if all(isinstance(values[name], Codes) for name in self.moments):
            return
        for number, names in self._names.items():
            moments = [_plain(values[name]) for name in names]
            if moments and not self._fills_in_place(moments, state[f"state{number}"]):
                state[f"state{number}"] = moments[0] if len(moments) == 1 else torch.stack(moments)
            state.pop(f"absmax{number}", None)
            state.pop(f"qmap{number}", None)

    def _fills_in_place(self, moments: Sequence[torch.Tensor], live: torch.Tensor) -> bool:
        """Return whether the live rows themselves were filled."""
        rows = [live] if len(moments) == 1 else list(live)
        pairs = zip(moments, rows, strict=True)
        return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in pairs)


def _plain(value: Moment) -> torch.Tensor:
    if not isinstance(value, Codes):
        return value
    encoding = LowBit(value.scheme, value.block_size, value.signed)
    return encoding.values(value.parts).view(value.shape)


def _encode(codes: Codes, values: torch.Tensor) -> None:
    """Quantize float32 values into live codes, as bitsandbytes' own step does."""
    from bitsandbytes import functional

    quantized, state = functional.quantize_blockwise(
        values.contiguous(), code=codes.qmap, blocksize=codes.block_size
    )
    codes.codes.copy_(quantized.view(codes.codes.shape))
    codes.scale.copy_(state.absmax)


ADAM = Bnb(("adam", "lamb"), ("exp_avg",), "exp_avg_sq")
ADEMAMIX = Bnb(("ademamix",), ("exp_avg", "exp_avg_slow"), "exp_avg_sq")
LION = Bnb(("lion",), ("exp_avg",), "")
SGD = Bnb(("momentum", "lars"), ("momentum_buffer",), "")
RMSPROP = Bnb(("rmsprop",), ("square_avg",), "")
ADAGRAD = Bnb(("adagrad",), ("sum",), "")
