"""Read the partition of one rank: flat vectors of fp32 weights, and the optimizer's state of each.

    stages 1, 2   single_partition_of_fp32_groups  base_optimizer_state  group_paddings
    stage 3       fp32_flat_groups                 optimizer_state_dict

A vector is that of a parameter group, or under stage 3 of a sub-group of one. The optimizer steps the
vectors as its parameters, so its state is keyed by their numbers. With `elastic_checkpoint` the state is a
list without groups. BF16_Optimizer writes the form of stages 1 and 2, without a stage. Source: deepspeed
0.19.8, runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`), runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.pickled import Pickled, attributes, stage_of
from ckptmap.formats.deepspeed.step_files import cut_otherwise
from ckptmap.tensors import Leaf, StoredTensor

KEY = "optimizer_state_dict"
VECTORS_12, VECTORS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_SETTINGS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
STEP = "step"


@dataclass(frozen=True)
class RankPartition:
    """What the optimizer's file of one rank holds.

    stage       1 or 2 (of one form), or 3
    counts      the numbers of ranks that the vectors are cut over, as far as the file tells
    vectors     the flat weights
    states      the state of each vector, by its name
    groups      the hyper-parameters of each parameter group; empty: the file has none
    of_group    for each group the numbers of its vectors
    """

    pickled: Pickled
    stage: int
    counts: Sequence[int]
    vectors: Sequence[StoredTensor]
    states: Sequence[Mapping[str, Leaf]]
    groups: Sequence[Mapping[str, Leaf]]
    of_group: Sequence[Sequence[int]]

    @property
    def inner(self) -> Pickled:
        return self.pickled.inside(KEY)

    def settings(self) -> dict[str, Leaf]:
        return settings_of(self.inner)


def settings_of(inner: Pickled) -> dict[str, Leaf]:
    """Return the loss scale and other values of the run that the optimizer keeps."""
    return {name: attributes(inner.tree[name]) for name in _SETTINGS if name in inner.tree}


def partition_of(pickled: Pickled) -> RankPartition:
    """Return the partition. Raise SourceError CKM106 for values that DeepSpeed does not write, CKM111 for
    a form that is not read."""
    inner = pickled.inside(KEY)
    _refuse_experts(inner)
    if VECTORS_12 in inner.tree:
        stage, vectors, key = 2, inner.tensors(VECTORS_12), "base_optimizer_state"
    elif VECTORS_3 in inner.tree:
        stage, vectors, key = 3, inner.tensors(VECTORS_3), KEY
    else:
        number = stage_of(inner.tree.get("zero_stage"))
        raise SourceError(
            "CKM111",
            f"{pickled.file}: is a partition of DeepSpeed (stage {number or 'not stated'}) without its"
            f" fp32 weights, expected {VECTORS_12} or {VECTORS_3}",
            "save the checkpoint again, with the optimizer",
        )
    states, groups, of_group = _state(inner, key, len(vectors))
    counts = inner.tree.get("partition_count")
    listed = counts if isinstance(counts, list | tuple) else () if counts is None else (counts,)
    worlds = [inner.count(count, "partition_count") for count in listed]
    return RankPartition(pickled, stage, worlds, vectors, states, groups, of_group)


def _refuse_experts(inner: Pickled) -> None:
    if inner.tree.get("ds_zero_partition_groups"):
        file = FilePath(inner.file)
        problem = (
            f"{file.name} holds experts that are cut over ranks of their own (expert parallel)"
        )
        raise cut_otherwise(file.parent, problem)


def _state(
    inner: Pickled, key: str, number: int
) -> tuple[list[Mapping[str, Leaf]], list[Mapping[str, Leaf]], list[Sequence[int]]]:
    """Return the state of each vector, the groups, and the vectors of each group."""
    if isinstance(inner.tree.get(key), list):
        states = inner.mappings(key)
        step = inner.tree.get("base_optimizer_state_step")
        if step is not None:
            states = [{STEP: step, **state} for state in states]
        return _padded(states, number), [], [[at] for at in range(number)]
    base = inner.inside(key)
    by_index, groups = base.mapping("state"), base.mappings("param_groups")
    of_group: list[Sequence[int]] = []
    states = []
    settings: list[Mapping[str, Leaf]] = []
    for group in groups:
        indices = group.get("params")
        if not isinstance(indices, list):
            inner.malformed(key, "param_groups with params")
        settings.append({name: value for name, value in group.items() if name != "params"})
        of_group.append(range(len(states), len(states) + len(indices)))
        for index in indices:
            state = by_index.get(index, {})
            if not isinstance(state, dict):
                inner.malformed(key, "a dict of state")
            states.append(_with_step(state, group))
    if groups and len(states) != number:
        inner.malformed(key, f"state of {number} vectors")
    return _padded(states, number), settings, of_group or [[at] for at in range(number)]


def _with_step(state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state with the step count, which fused optimizers keep in the group."""
    if state and STEP not in state and STEP in group:
        return {STEP: group[STEP], **state}
    return state


def _padded(states: list[Mapping[str, Any]], number: int) -> list[Mapping[str, Any]]:
    return [*states, *({} for _ in range(number - len(states)))][:number]
