"""Build a Checkpoint from the leaves of a state dict: plain names, stored parts, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_not

from ckptmap import registry
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import unread_note
from ckptmap.checkpoint.group_parts import (
    RefusedLeaf,
    encoding_notes,
    group_parts,
    records_below,
    string_records,
    without_stray_parts,
)
from ckptmap.checkpoint.leaf_reader import LeafReader
from ckptmap.checkpoint.logical_tensors import LogicalTensors
from ckptmap.checkpoint.split_roles import Roles, is_tensor
from ckptmap.core.state_paths import join
from ckptmap.mapping.wrappers import describe_wrappers, strip_wrappers
from ckptmap.optim.gather_moments import gather_moments
from ckptmap.optim.index_order import Weight
from ckptmap.optim.optimizer_reader import Model, OptimizerReader
from ckptmap.optim.state import key_forms
from ckptmap.protocols import Group, Index
from ckptmap.protocols.file_systems import through
from ckptmap.quantization.unsupported_schemes import missing_scales_note
from ckptmap.storage.files import Files
from ckptmap.tensors import StoredTensor, TensorInfo


def assemble(
    path: str,
    index: Index,
    roles: Roles,
    files: Files,
    weights: Mapping[str, TensorInfo] | None = None,
) -> Checkpoint:
    """Return the checkpoint whose leaves have these roles.

    `weights` are those that optimizer state belongs to where the checkpoint itself holds none: the
    parameters of a live model. Raises SourceError CKM114 for a key or a plain name that occurs
    twice, and what a scheme raises for malformed parts.
    """
    refused: list[RefusedLeaf] = []
    strings = string_records(roles.others, roles.model_root)
    groups = group_parts(
        roles.model, index.records, roles.model_root, path, refused, strings, files.mounts
    )
    records = records_below(index.records, roles.model_root)
    if roles.optimizer_root and roles.optimizer_root != roles.model_root:
        inside = join(roles.optimizer_root) + "."
        records = {fqn: record for fqn, record in records.items() if not fqn.startswith(inside)}
    groups, stray_notes = without_stray_parts(groups, records, refused, files.mounts)
    plain = strip_wrappers(list(groups), path)
    stripped = any(map(is_not, plain, plain.values()))
    if stripped:
        groups = groups.renamed(plain)
    moments = roles.optimizer
    if moments:  # only then: importing all schemes takes longer than inspecting a small file
        schemes = [through(scheme, files.mounts) for scheme in registry.schemes()]
        moments = gather_moments(moments, index.records, roles.optimizer_root, schemes)
    read = LeafReader(path, files, refused, roles.model_root, roles.optimizer_root or ())
    model = _model(index, roles, groups, plain, weights)
    reader = OptimizerReader(
        moments, key_forms(), read.optimizer, model, path, files.mounts, index.sidecar_dir
    )  # fmt: skip
    notes = [*index.notes, *unread_note(index.unread_files)]
    notes += encoding_notes(groups.forms())
    notes += [*missing_scales_note(groups.infos()), *stray_notes]
    if reader.form is None and reader.why:
        notes.append(f"optimizer state cannot be read: {reader.why}")
    other = {
        at: lazy
        for at, leaf in roles.others.items()
        if is_tensor(leaf) and (lazy := read.tensor(at, leaf)) is not None
    }
    return Checkpoint(
        path=path,
        index=index,
        files=files,
        roles=roles,
        groups=groups,
        names={fqn: key for key, fqn in plain.items()} if stripped else plain,
        wrappers=describe_wrappers(plain),
        optimizer_reader=reader,
        other=other,
        plain=dict(read.plain(roles.others)),
        notes=notes,
        refused=refused,
    )


def _model(
    index: Index,
    roles: Roles,
    groups: LogicalTensors,
    plain: Mapping[str, str],
    weights: Mapping[str, TensorInfo] | None,
) -> Model:
    """Return the weights that the optimizer state belongs to."""
    keeps_order = partial(_all_in_order, groups, index.keeps_order)
    if weights:
        listed = [Weight(fqn, info) for fqn, info in weights.items()]
        return Model(listed, {fqn: fqn for fqn in weights}, keeps_order)
    listed = []
    if roles.optimizer:  # only the optimizer state needs them
        listed = [Weight(fqn, group.info, share_of(group)) for fqn, group in groups.items()]
    return Model(listed, plain, keeps_order)


def _all_in_order(
    groups: LogicalTensors, keeps_order: Callable[[StoredTensor], bool] | None
) -> bool:
    """Return whether all weights are listed in the order of the dict that was saved."""
    parts = (part for group in groups.values() for part in group.parts.values())
    return keeps_order is not None and all(map(keeps_order, parts))


def share_of(group: Group) -> object:
    """Return a key that two tensors share if they are the same view of one storage, else None."""
    stored = group.parts.get("")
    return stored.share if stored is not None else None
