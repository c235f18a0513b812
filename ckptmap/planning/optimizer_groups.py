"""Bring optimizer state into the groups and the order that the loader of a setup expects.

Some loaders, such as that of transformers' Trainer, know a parameter only by its place in the groups.
A flat parameter of FSDP1 has one step count in place of one for each parameter in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted
from ckptmap.optim.change_groups import regrouped
from ckptmap.optim.flat_param_state import flatten_by_unit
from ckptmap.optim.state import PARAMS, Optimizer
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.protocols import Setup
from ckptmap.protocols.file_systems import through
from ckptmap.sharding.transformers_param_order import find_config

if TYPE_CHECKING:
    from ckptmap.planning.options import Options


def arrange_for_loader(
    optimizer: Optimizer, ckpt: Checkpoint, setup: Setup, cutter: OutputSharding, options: Options
) -> tuple[Optimizer, list[str]]:
    """Return the state, keyed by FQN, and notes on what was changed.

    Raises PlanError CKM207 and CKM504 where the loader could not take the state in any form.
    """
    notes: list[str] = []
    if cutter.by_order:
        before = len(optimizer.leaves)
        optimizer = flatten_by_unit(optimizer, lambda fqn: cutter.unit(fqn, ckpt[fqn].info), ckpt)
        if before > len(optimizer.leaves):
            notes.append(
                f"a flat parameter has one step count: {before - len(optimizer.leaves)} more of its"
                " parameters are compared with it"
            )
    if setup.grouping is not None and optimizer.groups:
        optimizer, more = _grouped_for_loader(optimizer, ckpt, setup, options)
        notes += more
    return optimizer, notes


def _grouped_for_loader(
    optimizer: Optimizer, ckpt: Checkpoint, setup: Setup, options: Options
) -> tuple[Optimizer, list[str]]:
    """Return the state in the groups of the loader, and notes."""
    assert setup.grouping is not None, "only called for a setup with groups"
    listed = [fqn for group in optimizer.groups for fqn in group[PARAMS]]
    infos = {fqn: ckpt[fqn].info for fqn in listed if fqn in ckpt}
    config = find_config(ckpt.sidecar_dir, options.config_from or options.like)
    order = (
        None if config is None else through(setup.grouping, ckpt.files.mounts).groups(config, infos)
    )
    if order is None:
        why = "no config.json is there" if config is None else f"{config} does not tell it"
        return optimizer, [
            f"optimizer: the parameters stay in the source's groups and order, which {setup.name}"
            f" may not have: {why}"
        ]
    if order == [list(group[PARAMS]) for group in optimizer.groups]:
        return optimizer, []
    return regrouped(optimizer, order), [
        f"optimizer: parameters put into the {counted(len(order), 'group')} and the order of {setup.name}"
    ]
