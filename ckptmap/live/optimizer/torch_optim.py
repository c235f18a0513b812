"""torch.optim's own optimizers: Adam and AdamW, SGD, Adafactor.

`blank` makes the state with which the optimizer itself would begin. Loading fills it in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmap.live.optimizer.family import STEP, OptimizerFamily, OptimizerParam, is_a, step_dtype


class TorchAdam(OptimizerFamily):
    """torch.optim.Adam and AdamW: foreach, fused, capturable."""

    moments = ("exp_avg", "exp_avg_sq")

    def claims(self, optimizer: object) -> bool:
        return is_a(optimizer, "torch.optim", "Adam", "AdamW")

    def present(self, part: OptimizerParam) -> dict[str, object]:
        import torch

        names = {STEP, *self.needs(part)}
        state = self.entries(part.state)
        fits = state.keys() == names and all(
            isinstance(value, torch.Tensor)
            and value.dtype == part.param.dtype
            and not value.is_meta
            for name, value in state.items()
            if name != STEP
        )
        return state if fits else {}

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        import torch

        group = part.group
        on_device = group.get("capturable") or group.get("fused")
        device = part.param.device if on_device else torch.device("cpu")
        state: dict[str, object] = {STEP: torch.zeros((), dtype=step_dtype(group), device=device)}
        for name in self.needs(part):
            state[name] = self.plain(part, part.param.dtype)
        return state


class TorchSgd(OptimizerFamily):
    """torch.optim.SGD: one moment, where it has momentum."""

    counts_steps = False

    def needs(self, part: OptimizerParam) -> tuple[str, ...]:
        return ("momentum_buffer",) if part.group.get("momentum") else ()

    def claims(self, optimizer: object) -> bool:
        return is_a(optimizer, "torch.optim", "SGD")

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        if not part.group.get("momentum"):
            return {}
        return {"momentum_buffer": self.plain(part, part.param.dtype)}


class TorchAdafactor(OptimizerFamily):
    """torch.optim.Adafactor: for a matrix, a row and a column in place of the second moment."""

    def needs(self, part: OptimizerParam) -> tuple[str, ...]:
        return ("variance",) if part.param.dim() < 2 else ("row_var", "col_var")

    def like_param(self, part: OptimizerParam, name: str) -> bool:
        return name == "variance"

    def claims(self, optimizer: object) -> bool:
        return is_a(optimizer, "torch.optim", "Adafactor")

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        import torch

        param = part.param
        state: dict[str, object] = {STEP: torch.zeros((), dtype=step_dtype(part.group))}
        if param.dim() < 2:
            return {**state, "variance": self.plain(part, param.dtype)}
        row, column = list(param.shape), list(param.shape)
        row[-1], column[-2] = 1, 1
        with torch.no_grad():
            return {**state, "row_var": param.new_zeros(row), "col_var": param.new_zeros(column)}
