"""The families of live optimizers, one class each.

`blank` makes the state that the optimizer itself would begin with, in its own classes and by its
own rule of what is worth quantizing, so that loading fills what it will go on with.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptmap.errors import LoadError
from ckptmap.live.model.target import like
from ckptmap.live.optimizer.base import KINDS, STEP, Family, Part, is_a, local_of
from ckptmap.live.optimizer.bnb import BNB
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch


class TorchAdam(Family):
    """torch.optim.Adam and AdamW: foreach, fused, capturable."""

    moments = ("exp_avg", "exp_avg_sq")

    def claims(self, optimizer: Any) -> bool:
        return is_a(optimizer, "torch.optim", "Adam", "AdamW")

    def present(self, part: Part) -> dict[str, Any]:
        names = {STEP, *self.needs(part)}
        found = self.entries(part.state)
        fits = found.keys() == names and all(
            value.dtype == part.param.dtype and not value.is_meta
            for name, value in found.items()
            if name != STEP
        )
        return found if fits else {}

    def blank(self, part: Part, source: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        group = part.group
        on_device = group.get("capturable") or group.get("fused")
        device = part.param.device if on_device else torch.device("cpu")
        found: dict[str, Any] = {STEP: torch.zeros((), dtype=_step_dtype(group), device=device)}
        third = ("max_exp_avg_sq",) * bool(group.get("amsgrad"))
        for name in (*self.moments, *third):
            found[name] = self.plain(part, part.param.dtype)
        return found


class TorchSgd(Family):
    """torch.optim.SGD: one buffer, where it has momentum."""

    def needs(self, part: Part) -> tuple[str, ...]:
        return ("momentum_buffer",) * bool(part.group.get("momentum"))

    def claims(self, optimizer: Any) -> bool:
        return is_a(optimizer, "torch.optim", "SGD")

    def blank(self, part: Part, source: Mapping[str, Any]) -> dict[str, Any]:
        if not part.group.get("momentum"):
            return {}
        return {"momentum_buffer": self.plain(part, part.param.dtype)}


class TorchAdafactor(Family):
    """torch.optim.Adafactor: a factored second moment, a column and a row a matrix."""

    def needs(self, part: Part) -> tuple[str, ...]:
        return ("variance",) if part.param.dim() < 2 else ("row_var", "col_var")

    def like_param(self, part: Part, name: str) -> bool:
        return name == "variance"

    def claims(self, optimizer: Any) -> bool:
        return is_a(optimizer, "torch.optim", "Adafactor")

    def blank(self, part: Part, source: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        param = part.param
        found: dict[str, Any] = {STEP: torch.zeros((), dtype=_step_dtype(part.group))}
        if param.dim() < 2:
            return {**found, "variance": self.plain(part, param.dtype)}
        row, column = list(param.shape), list(param.shape)
        row[-1], column[-2] = 1, 1
        with torch.no_grad():
            return {**found, "row_var": param.new_zeros(row), "col_var": param.new_zeros(column)}


class Torchao(Family):
    """torchao's Adam and AdamW: 8 bit, 4 bit, fp8, or plain with stochastic rounding."""

    name = "torchao"
    mixed = True
    moments = ("exp_avg", "exp_avg_sq")

    def claims(self, optimizer: Any) -> bool:
        return is_a(optimizer, "torchao", "_AdamBase")

    def flags(self, optimizer: Any) -> dict[str, Any]:
        block = optimizer.block_size
        return {
            "block_size": "none" if block == float("inf") else int(block),
            "bf16_stochastic_round": bool(optimizer.bf16_stochastic_round),
            "is_adamw": bool(optimizer.is_adamw),
        }

    def rounds(self, optimizer: Any) -> bool:
        return bool(optimizer.bf16_stochastic_round)

    def blank(self, part: Part, source: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            found: dict[str, Any] = {STEP: torch.zeros((), dtype=_stored_step(part, source))}
            found["exp_avg"] = part.optimizer._new_buffer(part.param, True)
            found["exp_avg_sq"] = part.optimizer._new_buffer(part.param, False)
            if part.group.get("amsgrad"):
                found["max_exp_avg_sq"] = part.optimizer._new_buffer(part.param, False)
        return found

    def coded(self, part: Part, scheme: str, signed: bool) -> Any:
        local, block = local_of(part.param), part.optimizer.block_size
        if block == float("inf") or not local.numel() or local.numel() % block:
            return None
        made = part.optimizer._subclass_zeros(local, signed, block)
        if KINDS.get(type(made).__name__) != scheme:
            return None
        return like(part.param, made).to(part.param.device)


class Other(Family):
    """Any other optimizer of torch's kind: what it keeps is seen from one step of a copy."""

    name = "other"

    def needs(self, part: Part) -> tuple[str, ...]:
        import torch

        kept = self._kept(part).items()
        return tuple(k for k, value in kept if k != STEP and isinstance(value, torch.Tensor))

    def like_param(self, part: Part, name: str) -> bool:
        return bool(self._kept(part)[name].shape == _probed(part))

    def dtype_of(self, part: Part, name: str) -> torch.dtype:
        found: torch.dtype = self._kept(part)[name].dtype
        return found

    def blank(self, part: Part, source: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for name, seen in self._kept(part).items():
            lazy = source.get(name)
            if not isinstance(seen, torch.Tensor):
                found[name] = seen if lazy is None else lazy
            elif name != STEP and seen.shape == _probed(part):
                found[name] = self.plain(part, seen.dtype)
            elif isinstance(lazy, LazyTensor):
                found[name] = torch.zeros(lazy.shape, dtype=seen.dtype, device=seen.device)
            else:
                found[name] = torch.zeros_like(seen)
        return found

    def _kept(self, part: Part) -> Mapping[str, Any]:
        """State of a small parameter of the same dtype and group after one step without gradient:
        what has its shape then has the parameter's here, cut as it is.

        Raises LoadError CKM508 where the optimizer cannot step so."""
        import torch

        probe = torch.nn.Parameter(torch.zeros(_probed(part), dtype=part.param.dtype))
        probe.grad = torch.zeros_like(probe)
        twin = copy.copy(part.optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**part.group, "params": [probe]}]
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(twin, hooks, OrderedDict())
        before = torch.get_rng_state()
        try:
            type(twin).step(twin)
        except Exception as error:
            raise LoadError(
                "CKM508",
                f"optimizer: {type(twin).__name__} is not known, and cannot be tried: {error}",
                "load the model alone, and the optimizer by its own load_state_dict",
            ) from error
        finally:
            torch.set_rng_state(before)
        return dict(twin.state[probe])


FAMILIES: tuple[Family, ...] = (
    Torchao(), *BNB, TorchAdam(), TorchSgd(), TorchAdafactor(), Other(),
)  # fmt: skip


def _probed(part: Part) -> tuple[int, ...]:
    """A small shape of as many dims, which tell some optimizers what to keep; no two sizes alike."""
    return tuple(range(3, 3 + part.param.dim()))


def _stored_step(part: Part, source: Mapping[str, Any]) -> torch.dtype:
    """torchao counts in torch's default dtype, of then and not of now: bfloat16 ends at 256."""
    lazy = source.get(STEP)
    if isinstance(lazy, LazyTensor) and lazy.torch_dtype.is_floating_point:
        return lazy.torch_dtype
    return _step_dtype(part.group)


def _step_dtype(group: Mapping[str, Any]) -> torch.dtype:
    """As torch.optim's own `_get_scalar_dtype`."""
    import torch

    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.float64 if wide else torch.float32
