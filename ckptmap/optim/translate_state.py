"""Rename optimizer state together with its weights, from one naming scheme to another.

A moment has the shape of its weight and is split, fused and permuted with it. A step count goes
to every tensor made of its weight; tensors that are put together must have the same one.
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
        self.made = {
            name: made for name, made in resolution.made.items() if name not in resolution.tied
        }
        self.targets: dict[str, list[str]] = {}
        for name, made in self.made.items():
            for source in made.sources:
                self.targets.setdefault(source, []).append(name)
        self.same: list[Same] = list(stored.same)

    def optimizer(self) -> Optimizer:
        leaves: list[StateLeaf] = []
        for name, made in self.made.items():
            leaves += self._leaves(name, made)
        leaves += [leaf for leaf in self.stored.leaves if leaf.key not in self.infos]
        groups = [self._group(number, group) for number, group in enumerate(self.stored.groups)]
        return replace(self.stored, leaves=leaves, groups=groups, same=self.same)

    # ------------------------------------------------------------------ one tensor

    def _leaves(self, name: str, made: MappedTensor) -> Iterator[StateLeaf]:
        states = {source: self.states.get(source) for source in made.sources}
        having = {source: state for source, state in states.items() if state}
        if not having:
            if any(state is not None for state in states.values()):
                yield StateLeaf(name, (), {})
            return
        kinds = {frozenset(state or ()) for state in states.values()}
        if len(kinds) > 1:
            lacking = next(
                source
                for source, state in states.items()
                if not state or frozenset(state) != max(kinds, key=len)
            )
            raise self._stuck(made, f"{lacking} lacks state that the other sources have")
        for title in next(iter(having.values())):
            parts = {source: state[title] for source, state in having.items()}
            yield StateLeaf(name, title, self._value(name, made, title, parts))

    def _value(
        self, name: str, made: MappedTensor, title: Path, parts: Mapping[str, StateValue]
    ) -> StateValue:
        if not title:
            return {}
        label = f"{name}.{'.'.join(map(str, title))}"
        tensors = {s: v for s, v in parts.items() if isinstance(v, LazyTensor)}
        if not tensors:
            first = next(iter(parts.values()))
            if any(value != first for value in parts.values()):
                raise self._stuck(made, f"{title} differs: {dict(parts)}")
            return first
        if len(tensors) < len(parts):
            raise self._stuck(made, f"{title} is a tensor in some of its sources only")
        if all(lazy.shape == self.infos[source].shape for source, lazy in tensors.items()):
            if made.source is None or made.ops:
                return self._moment(label, made, tensors)
        elif made.source is None and any(lazy.info.numel > 1 for lazy in tensors.values()):
            raise self._stuck(made, f"{title} has another shape than its weight")
        first_lazy, *others = (lazy for lazy in tensors.values())
        kept = first_lazy.named(label)
        self.same += [Same(kept, other, _PARTS) for other in others]
        return kept

    def _moment(
        self, label: str, made: MappedTensor, tensors: Mapping[str, LazyTensor]
    ) -> LazyTensor:
        changed = next((op for op, _ in made.ops if op.split()[0] not in STAYS), None)
        if changed is not None:
            raise self._stuck(made, f"how the value op {changed!r} changes moments is not known")
        dtypes = {lazy.dtype for lazy in tensors.values()}
        if len(dtypes) > 1:
            raise self._stuck(made, f"its moments have the dtypes {', '.join(sorted(dtypes))}")
        info = TensorInfo(made.info.shape, dtypes.pop())
        moment = mapped_tensor(made._replace(name=label, info=info, ops=()), tensors, self.dense)
        if isinstance(moment, DerivedTensor):
            return moment
        files = next(iter(tensors.values())).files
        if isinstance(moment, StoredTensor):
            moment = Group(label, info, self.dense, {"": moment})
        return LazyTensor(label, moment, files)

    # ------------------------------------------------------------------ groups

    def _group(self, number: int, group: ParamGroup) -> ParamGroup:
        params = list(dict.fromkeys(self._renamed(group[PARAMS])))
        mine = set(group[PARAMS])
        for name in params:
            made = self.made.get(name)
            away = [s for s in made.sources if s not in mine] if made is not None else []
            if made is not None and away:
                raise self._stuck(made, f"{away[0]} is not in parameter group {number}")
        return {
            key: list(params) if key in (PARAMS, NAMES) else value for key, value in group.items()
        }

    def _renamed(self, params: Collection[str]) -> Iterator[str]:
        for key in params:
            if key in self.infos:
                yield from self.targets.get(key, ())
            else:
                yield key

    def _stuck(self, made: MappedTensor, why: str) -> PlanError:
        return PlanError(
            "CKM611",
            f"optimizer state of {made.name} ({made.rule}): {why}",
            "leave the optimizer behind with --optimizer drop",
        )
