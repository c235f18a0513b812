"""Optimizers and schedulers of any library, described by the attributes that ckptmap uses.

Libraries that may be absent define them, and not all are subclasses of torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ckptmap.live.model.stateful import Stateful

if TYPE_CHECKING:
    import torch

ParamGroup: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer: hyper-parameters by name, and `params`, a list of parameters.
In a checkpoint `params` has FQNs."""


class LiveOptimizer(Protocol):
    """What torch.optim.Optimizer and its subclasses in all libraries have."""

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]: ...

    @property
    def param_groups(self) -> list[ParamGroup]: ...


class OffloadedOptimizer(Protocol):
    """torchao's CPUOffloadOptimizer: one optimizer for each parameter, on a copy in host memory."""

    optim_dict: Mapping[torch.Tensor, LiveOptimizer]
    d_opt: LiveOptimizer | None
    """The optimizer of the parameters that are not offloaded."""
    param_d2h_map: Mapping[torch.Tensor, torch.Tensor]
    """Parameter of the model -> its copy in host memory."""


class PartitionedOptimizer(LiveOptimizer, Protocol):
    """torch's ZeroRedundancyOptimizer."""

    optim: LiveOptimizer
    """The optimizer of the parameters that this rank steps."""


Scheduler: TypeAlias = Stateful
"""A learning-rate scheduler of any library."""
