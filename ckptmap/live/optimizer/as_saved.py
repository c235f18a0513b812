"""State of an optimizer of the class that saved it: every entry comes back as it was, and no other.

    state[p] = {"mean": tensor, "slow": tensor, "history": {"losses": [..]}, "best": None}

What an optimizer keeps may differ from step to step: some entries begin late, others end. A trial step
shows none of that, so the checkpoint decides where the same class saved it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.optimizer import beside_params, run_settings
from ckptmap.live.optimizer.family import STEP, OptimizerFamily, OptimizerParam
from ckptmap.live.optimizer.local_state import ParamOwner
from ckptmap.live.optimizer.optimizer_types import LiveOptimizer
from ckptmap.live.optimizer.several_optimizers import SeveralOptimizers
from ckptmap.live.optimizer.stored_state import Source
from ckptmap.live.optimizer.unwrap import inner_optimizers
from ckptmap.storage.lazy_tensor import LazyTensor

VARIANTS = frozenset({"max_exp_avg_sq", "momentum_buffer"})
"""Entries that a setting of the optimizer decides on: without the setting they are of no use."""
COMPARED = ("class", "module", "inner")
"""Recorded settings of an optimizer that tell its class."""


class AsSaved(OptimizerFamily):
    """An optimizer of any class that gets the entries of the checkpoint, tensors in their stored dtypes.

    shape   of the parameter whose state it is; entries of that shape are cut as the parameter
    on_cpu  names of the entries that were on the CPU beside a parameter on another device
    beside  True: the entries join what the optimizer's own family has loaded
    """

    name = "other"

    def __init__(self, shape: Sequence[int], on_cpu: Sequence[str], beside: bool) -> None:
        self._shape = tuple(shape)
        self._on_cpu = on_cpu
        self._beside = beside

    def blank(self, part: OptimizerParam, source: Source) -> dict[str, object]:
        return {name: self._fresh(part, name, value) for name, value in source.items()}

    def _fresh(self, part: OptimizerParam, name: str, value: object) -> object:
        """Return a tensor to fill, or a copy of a plain value: an optimizer changes lists in place."""
        import torch

        if not isinstance(value, LazyTensor):
            return copy.deepcopy(value)
        if name != STEP and value.shape == self._shape:
            return self.plain(part, value.torch_dtype)
        device = torch.device("cpu") if name in self._on_cpu else part.param.device
        return torch.zeros(value.shape, dtype=value.torch_dtype, device=device)

    def install(self, part: OptimizerParam, values: Mapping[str, object]) -> None:
        before = part.state if self._beside else {}
        part.optimizer.state[part.param] = {**before, **values}


class SavedClasses:
    """Which live optimizers are of the class that saved the state."""

    def __init__(self, checkpoint: Checkpoint, optimizer: object) -> None:
        """`optimizer` is `unwrapped`."""
        self._keys = beside_params.recorded(checkpoint)
        self._settings: dict[int, Mapping[str, object]] = {}
        self._named: dict[str, LiveOptimizer] = {}
        saved = run_settings.recorded(checkpoint)
        version = saved.get("version")
        if not isinstance(version, int) or version < run_settings.ALL_ENTRIES:
            return
        recorded = saved.get("optimizer")
        known: object = {beside_params.ALONE: recorded}
        if isinstance(optimizer, SeveralOptimizers):
            known = recorded.get("several") if isinstance(recorded, Mapping) else None
        for name, one in beside_params.by_name(optimizer).items():
            was = known.get(name) if isinstance(known, Mapping) else None
            now = run_settings.class_of(one)
            if isinstance(was, Mapping) and all(was.get(key) == now.get(key) for key in COMPARED):
                self._settings |= {id(inner): was for inner in inner_optimizers(one)}
                self._named[name] = one

    def is_same(self, part: OptimizerParam) -> bool:
        """Return whether the optimizer of a parameter is of the class that saved its state."""
        return id(part.optimizer) in self._settings

    def restore_keys(self) -> None:
        """Give these optimizers the state that they had under keys that are no parameters."""
        beside_params.restore(self._keys, self._named)

    def of_param(
        self, owner: ParamOwner, sources: Sequence[Source]
    ) -> tuple[ParamOwner, list[Source], ParamOwner | None, list[Source]]:
        """Return the owner and the state that its family loads, and the owner and the state of the entries
        beside them, which its family does not know; None: there are none."""
        part = owner.part
        if not self.is_same(part):
            return owner, [*sources], None, []
        if part.family.name == "other":
            kept = self._as_saved(owner, sources, beside=False) if _is_dense(sources) else owner
            return kept, [*sources], None, []
        known = {*part.family.needs(part), *part.family.scratch, *VARIANTS}
        if part.family.counts_steps:
            known.add(STEP)
        extra: list[Source] = [
            {k: v for k, v in source.items() if k not in known} for source in sources
        ]
        if not any(extra) or not _is_dense(extra):
            return owner, [*sources], None, []
        own: list[Source] = [{k: v for k, v in source.items() if k in known} for source in sources]
        return owner, own, self._as_saved(owner, extra, beside=True), extra

    def _as_saved(self, owner: ParamOwner, sources: Sequence[Source], beside: bool) -> ParamOwner:
        part = owner.part
        on_cpu = self._settings[id(part.optimizer)].get(run_settings.STATE_ON_CPU)
        members = zip(owner.members, sources, strict=True)
        shape = next((t.tensor.shape for (t, _), source in members if source), ())
        family = AsSaved(shape, on_cpu if isinstance(on_cpu, list | tuple) else (), beside)
        return replace(owner, part=replace(part, family=family))


def _is_dense(sources: Sequence[Source]) -> bool:
    tensors = (v for source in sources for v in source.values() if isinstance(v, LazyTensor))
    return all(lazy.encoding == "dense" for lazy in tensors)
