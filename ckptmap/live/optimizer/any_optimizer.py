"""An optimizer that no other family knows: one step of a small copy shows its state."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptmap.errors import LoadError
from ckptmap.live.optimizer.family import STEP, OptimizerFamily, OptimizerParam
from ckptmap.storage.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch


class AnyOptimizer(OptimizerFamily):
    """A subclass of torch.optim.Optimizer, whose state is learnt from one step of a copy."""

    name = "other"

    def entries(self, state: Mapping[str, object]) -> dict[str, object]:
        return dict(state)  # None too: it is a value that the optimizer may ask for

    def needs(self, part: OptimizerParam) -> tuple[str, ...]:
        import torch

        probed_state = self._probe_state(part).items()
        return tuple(
            k for k, value in probed_state if k != STEP and isinstance(value, torch.Tensor)
        )

    def like_param(self, part: OptimizerParam, name: str) -> bool:
        return self._tensor(part, name).shape == _probe_shape(part)

    def dtype_of(self, part: OptimizerParam, name: str) -> torch.dtype:
        return self._tensor(part, name).dtype

    def blank(self, part: OptimizerParam, source: Mapping[str, object]) -> dict[str, object]:
        import torch

        state: dict[str, object] = {}
        for name, probed_value in self._probe_state(part).items():
            lazy = source.get(name)
            if not isinstance(probed_value, torch.Tensor):
                state[name] = probed_value if lazy is None else lazy
            elif name != STEP and probed_value.shape == _probe_shape(part):
                state[name] = self.plain(part, probed_value.dtype)
            elif isinstance(lazy, LazyTensor):
                state[name] = torch.zeros(
                    lazy.shape, dtype=probed_value.dtype, device=probed_value.device
                )
            else:
                state[name] = torch.zeros_like(probed_value)
        return state

    def _tensor(self, part: OptimizerParam, name: str) -> torch.Tensor:
        """Return an entry that `needs` names."""
        import torch

        entry = self._probe_state(part)[name]
        assert isinstance(entry, torch.Tensor)
        return entry

    def _probe_state(self, part: OptimizerParam) -> Mapping[str, object]:
        """Return the state of a small parameter of the same dtype and group after one step with a zero
        gradient. An entry of its shape has the parameter's own shape here.

        Raises LoadError CKM508 where such a step fails."""
        import torch

        probe = torch.nn.Parameter(torch.zeros(_probe_shape(part), dtype=part.param.dtype))
        probe.grad = torch.zeros_like(probe)
        rng_state = torch.get_rng_state()
        try:
            twin = copy.copy(part.optimizer)
            twin.state = defaultdict(dict)
            twin.param_groups = [{**part.group, "params": [probe]}]
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                setattr(twin, hooks, OrderedDict())
            type(twin).step(twin)
        except Exception as error:
            kind = type(part.optimizer).__name__
            raise LoadError(
                "CKM508",
                f"optimizer: {kind} is unknown, and a trial step failed: {error}",
                "load the model alone, and the optimizer with its own load_state_dict",
            ) from error
        finally:
            torch.set_rng_state(rng_state)
        return dict(twin.state[probe])


def _probe_shape(part: OptimizerParam) -> tuple[int, ...]:
    """Return a small shape with as many dims as the parameter, which decide what some optimizers keep.
    All sizes differ."""
    return tuple(range(3, 3 + part.param.dim()))
