"""open(): present any checkpoint as a mapping of plain FQN -> LazyTensor, from headers alone.

    path -> container -> index -> layouts join ranks -> roles -> schemes group parts -> plain names

No format is named here: the registry finds the container, the layouts and the schemes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath

from ckptmap import registry
from ckptmap.checkpoint import base_record, several_models
from ckptmap.checkpoint.assemble import assemble, share_of
from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.framework_members import index_of, merge_members
from ckptmap.checkpoint.rename import renamed
from ckptmap.checkpoint.split_roles import split_roles
from ckptmap.checkpoint.stored_order import in_order
from ckptmap.core.gc_pause import paused_gc
from ckptmap.core.printable import quote
from ckptmap.core.signatures import nearest_keyword
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_columns import PlainTensors
from ckptmap.errors import SourceError
from ckptmap.formats.detect import find, look
from ckptmap.mapping.renaming import Patterns, Renaming
from ckptmap.mapping.wrappers import strip_wrappers
from ckptmap.optim.index_order import Order
from ckptmap.protocols import Directory, Index, Place
from ckptmap.protocols.file_systems import Mounts, OwnManifest, through
from ckptmap.sharding.reference_model import (
    CONFIG,
    MANIFEST,
    Like,
    like_config,
    like_manifest,
    unflatteners,
)
from ckptmap.storage.files import Files
from ckptmap.storage.hub.resolve import errors_by_given_path, locate
from ckptmap.storage.peft_adapter import ADAPTER_CONFIG
from ckptmap.storage.source_changes import fingerprints
from ckptmap.tensors import Leaf, Opaque, PerRank, StoredTensor

_HOW_TO_READ = re.compile(r"--(?:source-root|like) (?:\$?'(?:[^'\\]|\\.)*'|[^\s',;:]+)")
"""An option in a hint that says how a checkpoint is read."""


@nearest_keyword
def open(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    like: str | os.PathLike[str] | None = None,
    param_order: Order | None = None,
    source_root: str | None = None,
    strip_prefix: str | None = None,
    rename: Patterns = (),
    add_prefix: str | None = None,
) -> Checkpoint:
    """Open whatever checkpoint is at `path`; headers only, no process group, nothing unpickled.

    `hf://org/name[@revision][/folder]` is a path too: headers are read by range from the Hub.

    `root` names the dict that holds the weights (`"model"`, `"app/model"`), where several could, or
    one of the models that `ckptmap.save` was given by name;
    `source_root` is the same, by the name that `convert` has for it.
    `like` is another checkpoint of the same model, or its config.json: flat shards of FSDP1 carry
    no shapes, some do not say which modules are wrapped, and a config.json tells which parameter
    an optimizer's index means. So does
    `param_order`, which goes first: the FQNs of the parameters as they were passed to the
    optimizer, one list a group. `strip_prefix`, `rename` and `add_prefix` change the names of the
    weights and of their optimizer state, in this order: `"student"`; patterns such as
    `"encoder.{x}=layers.{x}"`, in which a capture takes one segment or more; `"net"`. Raises
    SourceError where the path is no checkpoint, is malformed, or is ambiguous, CKM207 where
    `param_order` does not fit, PlanError CKM618 and CKM114 where the names cannot be changed so.
    """
    renaming = Renaming.of(strip_prefix, rename, add_prefix)
    files = Files()
    try:
        root = source_root if root is None else root
        ckpt = open_in(files, path, root=root, like=like, param_order=param_order)
        return renamed(ckpt, renaming)
    except BaseException:
        files.close()
        raise


def open_another(path: str | os.PathLike[str], mounts: Mounts | None = None) -> Checkpoint:
    """Open a checkpoint beside the source of a command, whose options do not say how to read this one.

    An error whose hint names such an option has a command instead that takes it.
    """
    try:
        return open(path) if mounts is None else open_in(Files(mounts=mounts), path)
    except SourceError as error:
        error.change_hint(partial(_in_its_own_conversion, os.fspath(path)))
        raise


def _in_its_own_conversion(path: str, hint: str) -> str:
    option = _HOW_TO_READ.search(hint)
    if option is None:
        return hint
    return f"make one model of it first, and name that: ckptmap convert {quote(path)} NEW --to full {option[0]}"


def open_in(
    files: Files,
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    like: str | os.PathLike[str] | None = None,
    param_order: Order | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open` does, whose bytes are read by `files`.

    A place on the Hub is mounted in `files.mounts`. `Files(mounts=other.files.mounts)` opens a
    checkpoint whose tensors are read together with those of `other`.
    """
    mounts = files.mounts
    located = locate(path, mounts)
    like = None if like is None else located_like(like, mounts)
    with errors_by_given_path(mounts), paused_gc():
        place, notes = find(look(located.path, mounts), registry.knows)
        read_like_or_none = partial(read_like, like, mounts) if like is not None else _own(place)
        index = index_of(place)
        notes = (*located.notes, *notes, *index.notes)
        units = index.units
        if like is not None:
            from ckptmap.checkpoint.fsdp1_wrapping import LikeUnits

            units = LikeUnits(units, str(like), mounts)
        ckpt = _opened(
            files, place, replace(index, notes=notes, units=units), root, read_like_or_none
        )
    return replace(ckpt, origin=located.origin).with_optimizer_order(param_order, like)


def located_like(like: str | os.PathLike[str], mounts: Mounts) -> FilePath:
    """Return the path of another checkpoint or config.json. Raise SourceError CKM101 where nothing is there,
    also if it would not be needed: a misspelt path must not be passed over."""
    path = locate(like, mounts).path
    look(path, mounts)
    return path


def open_as(path: str | os.PathLike[str], directory: Directory) -> Checkpoint:
    """Open a directory as this framework's, where it holds several checkpoints."""
    files = Files()
    return open_place(files, look(locate(path, files.mounts).path, files.mounts), directory)


def open_run_of_adapter(files: Files, place: Place) -> Checkpoint | None:
    """Return the checkpoint of a run of which an adapter of peft was saved, with the optimizer and the step beside it:
    for who has the base, as a live model has. None: the place is something else."""
    if ADAPTER_CONFIG not in place.names or registry.knows(place):
        return None
    inside = replace(place, names=tuple(name for name in place.names if name != ADAPTER_CONFIG))
    directory = registry.directory_for(inside)
    return None if directory is None else open_place(files, inside, directory)


def open_place(files: Files, place: Place, directory: Directory) -> Checkpoint:
    """Likewise, of a directory that was looked at, whose bytes are read by `files`."""
    with paused_gc():
        return _opened(files, place, merge_members(directory, place), None, _own(place))


def _own(place: Place) -> Callable[[], Like] | None:
    """Return a reader of the shapes in our own manifest; None: the place has no manifest."""
    if MANIFEST not in place.names:
        return None
    return partial(like_manifest, FilePath(place.path) / MANIFEST, place.mounts)


def _opened(
    files: Files, place: Place, index: Index, root: str | None, like: Callable[[], Like] | None
) -> Checkpoint:
    leaves = index.leaves
    if not isinstance(leaves, PlainTensors):  # those are whole, and nothing else
        for unflattener in unflatteners():
            unflattener = through(unflattener, place.mounts)
            leaves = unflattener.unflatten(leaves, like, strip_wrappers, place.path, index.units)
        leaves = {
            path: leaf if isinstance(leaf, StoredTensor) else _joined(join(path), leaf)
            for path, leaf in leaves.items()
        }
        index = replace(index, leaves=leaves)
    names = () if isinstance(leaves, PlainTensors) else several_models.recorded(leaves)
    several = root if root in names else None
    roles = split_roles(leaves, root if several is None else None, place.path)
    ckpt = assemble(place.path, index, roles, files)
    if several is not None:
        ckpt = several_models.one_of(ckpt, several, names)
    elif len(names) > 1:
        ckpt.notes.append(several_models.note(names))
    if of_base := base_record.note(ckpt):
        ckpt.notes.append(of_base)
    ckpt.files.seen = fingerprints(index.files, files.mounts)
    absolute = str(FilePath(place.path).absolute())  # as the files of chunks are named
    if index.manifest is not None:
        own = OwnManifest(absolute, index.manifest, index.manifest_spans)
        files.mounts.manifests.append(own)
    elif MANIFEST in place.names:
        files.mounts.manifests.append(OwnManifest(str(FilePath(absolute) / MANIFEST)))
    ckpt.files.sums.is_on = True
    has_manifest = index.manifest is not None or MANIFEST in place.names
    return replace(ckpt, fingerprints=ckpt.files.seen, root=root or "", has_manifest=has_manifest)


def read_like(path: str | os.PathLike[str], mounts: Mounts) -> Like:
    """Return names and shapes of the model that a checkpoint, or a config.json, describes.

    A checkpoint that lists its tensors in no order of the model's (safetensors, DCP of replicas)
    gets the order from the config.json beside it, where there is one that transformers knows.
    """
    file = locate(path, mounts).path
    if file.name == CONFIG:
        return like_config(file, mounts)
    config = (file if file.is_dir() else file.parent) / CONFIG
    try:
        ckpt = open_in(Files(mounts=mounts), path)
    except SourceError as error:
        if error.code == "CKM111" and config.is_file():  # a model without its weights
            return like_config(config, mounts)
        raise
    infos = {fqn: ckpt.group(fqn).info for fqn in ckpt}
    ordered = frozenset(in_order(ckpt.path, ckpt.index, ckpt.groups))
    if not ordered and config.is_file():
        try:
            return like_config(config, mounts)
        except SourceError:  # no transformers, or not its model: the shapes are still known
            pass
    first: dict[object, str] = {}
    ties = {}
    for fqn in ckpt:
        share = share_of(ckpt.group(fqn))
        if share is not None and first.setdefault(share, fqn) != fqn:
            ties[fqn] = first[share]
    from ckptmap.checkpoint.compare_tensors import same_parts

    shapes = {fqn: info.shape for fqn, info in infos.items()}
    return Like(str(path), shapes, ordered, ties, lambda a, b: same_parts(ckpt[a], ckpt[b]) is None)


def _joined(key: str, leaf: Leaf) -> Leaf:
    """Return the parts that ranks hold as one tensor, joined by the first layout that knows them."""
    values: Sequence[Leaf]
    if isinstance(leaf, PerRank):
        values = leaf.values
    elif isinstance(leaf, Opaque):
        values = (leaf,)
    else:
        return leaf
    for layout in registry.layouts():
        joined = layout.join(values, key)
        if joined is not None:
            return joined
    return leaf
