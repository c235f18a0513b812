"""Rename optimizer state together with its weights, from one naming scheme to another.

A moment has the shape of its weight and is split, fused and permuted with it. A step count goes
to every tensor made of its weight; tensors that are put together must have the same one. State of
a parameter without a weight keeps its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ckptmap.errors import PlanError
from ckptmap.mapping.derived_tensor import DerivedTensor
from ckptmap.mapping.mapped_tensor import mapped_tensor
from ckptmap.mapping.resolve import MappedTensor, Resolution
from ckptmap.optim.state import NAMES, PARAMS, Optimizer, ParamGroup, Same, StateLeaf, StateValue
from ckptmap.protocols import Encoding, Group
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path, StoredTensor, TensorInfo

STAYS = ("add", "cast")
"""Value ops that do not change a gradient, and so not its moments."""

_PARTS = (
    "both become parts of one parameter, which has a single value: leave the optimizer behind with"
    " --optimizer drop"
)


def translate_state(
    optimizer: Optimizer,
    resolution: Resolution,
    infos: Mapping[str, TensorInfo],
    dense: Encoding,
) -> Optimizer:
    """Return the state of the weights in `infos` under the names of the tensors that they become.

    State of weights that become nothing is left out. Raises PlanError CKM611 where a moment cannot
    follow its weight.
    """
    return _StateTranslation(optimizer, resolution, infos, dense).optimizer()


class _StateTranslation:
    """Makes the state of each target tensor from the state of its sources."""

    def __init__(
        self,
        stored: Optimizer,
        resolution: Resolution,
        infos: Mapping[str, TensorInfo],
        dense: Encoding,
    ) -> None:
        self.stored, self.infos, self.dense = stored, infos, dense
        self.states: dict[str, dict[Path, StateValue]] = {}
        for leaf in stored.leaves:
            self.states.setdefault(leaf.key, {})[leaf.name] = leaf.value
        self.targets = {
            name: mapped
            for name, mapped in resolution.targets.items()
            if name not in resolution.tied
        }
        self.targets_of: dict[str, list[str]] = {}
        for name, mapped in self.targets.items():
            for source in mapped.sources:
                self.targets_of.setdefault(source, []).append(name)
        self.same: list[Same] = list(stored.same)

    def optimizer(self) -> Optimizer:
        leaves: list[StateLeaf] = []
        for name, mapped in self.targets.items():
            leaves += self._state_of(name, mapped)
        leaves += [leaf for leaf in self.stored.leaves if leaf.key not in self.infos]
        groups = [self._group(number, group) for number, group in enumerate(self.stored.groups)]
        return replace(self.stored, leaves=leaves, groups=groups, same=self.same)

    # ------------------------------------------------------------------ one tensor

    def _state_of(self, name: str, mapped: MappedTensor) -> Iterator[StateLeaf]:
        states = {source: self.states.get(source) for source in mapped.sources}
        stateful = {source: state for source, state in states.items() if state}
        if not stateful:
            if any(state is not None for state in states.values()):
                yield StateLeaf(name, (), {})
            return
        state_names = {frozenset(state or ()) for state in states.values()}
        if len(state_names) > 1:
            incomplete = next(
                source
                for source, state in states.items()
                if not state or frozenset(state) != max(state_names, key=len)
            )
            raise self._cannot_follow(
                mapped, f"{incomplete} lacks state that the other sources have"
            )
        for state_name in next(iter(stateful.values())):
            parts = {source: state[state_name] for source, state in stateful.items()}
            yield StateLeaf(name, state_name, self._value_of(name, mapped, state_name, parts))

    def _value_of(
        self, name: str, mapped: MappedTensor, state_name: Path, parts: Mapping[str, StateValue]
    ) -> StateValue:
        if not state_name:
            return {}
        label = f"{name}.{'.'.join(map(str, state_name))}"
        tensors = {s: v for s, v in parts.items() if isinstance(v, LazyTensor)}
        if not tensors:
            plain = next(iter(parts.values()))
            if any(value != plain for value in parts.values()):
                raise self._cannot_follow(mapped, f"{state_name} differs: {dict(parts)}")
            return plain
        if len(tensors) < len(parts):
            raise self._cannot_follow(
                mapped, f"{state_name} is a tensor in some of its sources only"
            )
        if all(lazy.shape == self.infos[source].shape for source, lazy in tensors.items()):
            if mapped.source is None or mapped.ops:
                return self._moment(label, mapped, tensors)
        elif mapped.source is None and any(lazy.info.numel > 1 for lazy in tensors.values()):
            raise self._cannot_follow(mapped, f"{state_name} has another shape than its weight")
        first_lazy, *others = (lazy for lazy in tensors.values())
        renamed = first_lazy.named(label)
        self.same += [Same(renamed, other, _PARTS) for other in others]
        return renamed

    def _moment(
        self, label: str, mapped: MappedTensor, tensors: Mapping[str, LazyTensor]
    ) -> LazyTensor:
        changed = next((op for op, _ in mapped.ops if op.split()[0] not in STAYS), None)
        if changed is not None:
            raise self._cannot_follow(
                mapped, f"how the value op {changed!r} changes moments is not known"
            )
        dtypes = {lazy.dtype for lazy in tensors.values()}
        if len(dtypes) > 1:
            raise self._cannot_follow(
                mapped, f"its moments have the dtypes {', '.join(sorted(dtypes))}"
            )
        info = TensorInfo(mapped.info.shape, dtypes.pop())
        moment = mapped_tensor(mapped._replace(name=label, info=info, ops=()), tensors, self.dense)
        if isinstance(moment, DerivedTensor):
            return moment
        files = next(iter(tensors.values())).files
        if isinstance(moment, StoredTensor):
            moment = Group(label, info, self.dense, {"": moment})
        return LazyTensor(label, moment, files)

    # ------------------------------------------------------------------ groups

    def _group(self, number: int, group: ParamGroup) -> ParamGroup:
        params = list(dict.fromkeys(self._renamed(group[PARAMS])))
        group_params = set(group[PARAMS])
        for name in params:
            mapped = self.targets.get(name)
            if mapped is None or (name in group_params and self._is_named_so(name, mapped)):
                continue
            outside = [s for s in mapped.sources if s not in group_params]
            if outside:
                raise self._cannot_follow(
                    mapped, f"{outside[0]} is not in parameter group {number}"
                )
        return {
            key: list(params) if key in (PARAMS, NAMES) else value for key, value in group.items()
        }

    def _is_named_so(self, name: str, mapped: MappedTensor) -> bool:
        """Return whether the state of a stored parameter has the new name already. It has no weight in the checkpoint where
        the model puts others into its state dict: torchtitan's `wqkv` is saved as `wq`, `wk` and `wv`."""
        return name not in self.infos and self.states.keys().isdisjoint(mapped.sources)

    def _renamed(self, params: Collection[str]) -> Iterator[str]:
        for key in params:
            if key in self.infos:
                yield from self.targets_of.get(key, ())
            else:
                yield key

    def _cannot_follow(self, mapped: MappedTensor, why: str) -> PlanError:
        return PlanError(
            "CKM611",
            f"optimizer state of {mapped.name} ({mapped.rule}): {why}",
            "leave the optimizer behind with --optimizer drop",
        )
