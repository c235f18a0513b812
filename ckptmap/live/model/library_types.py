"""Objects of torch, torchao and bitsandbytes, each described by the attributes that ckptmap uses.

No class here is instantiated or subclassed. Optimizers that many libraries define, and classes of
libraries that may be absent, are recognised by these attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

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


class BnbOptimizer(LiveOptimizer, Protocol):
    """bitsandbytes' Optimizer8bit, of which its Optimizer1State and Optimizer2State are subclasses."""

    initialized: bool
    is_paged: bool
    args: object

    def check_overrides(self) -> None: ...

    def init_state(self, group: ParamGroup, p: torch.Tensor, gindex: int, pindex: int) -> None: ...


class TorchaoOptimizer(LiveOptimizer, Protocol):
    """torchao's _AdamBase."""

    block_size: float
    """Elements that share a scale; infinity: moments are not quantized."""
    bf16_stochastic_round: bool
    is_adamw: bool

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor: ...

    def _subclass_zeros(self, p: torch.Tensor, signed: bool, block_size: float) -> torch.Tensor: ...


class Scheduler(Protocol):
    """A learning-rate scheduler of any library."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class Int8Weight(Protocol):
    """torchao's Int8Tensor."""

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block_size: Sequence[int]


class TrainedInt8Weight(Protocol):
    """torchao's Int8QuantizedTrainingLinearWeight."""

    int_data: torch.Tensor
    scale: torch.Tensor


class BnbQuantState(Protocol):
    """bitsandbytes' QuantState: scales and settings of a Params4bit."""

    shape: Sequence[int]
    absmax: torch.Tensor
    blocksize: int
    quant_type: str
    dtype: torch.dtype
    nested: bool
