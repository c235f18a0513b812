"""Read checkpoints that Megatron-LM saved with `--ckpt-format torch_dist`: a DCP directory and
`common.pt`.

The tensors of all layers are stacked into one, whose first dimension counts layers:

    decoder.layers.mlp.linear_fc1.weight [layers, rows, cols]
        -> decoder.layers.0.mlp.linear_fc1.weight [rows, cols], decoder.layers.1...

A key with a layer number stays as it is. Values that are the same on all ranks are in `common.pt`.
Source: megatron-core 0.16, dist_checkpointing/serialization.py, and transformer_block.py
(`sharded_state_dict`, which puts the dim of layers first).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.dcp.reader import METADATA, Dcp
from ckptmap.formats.megatron.common import ARGS, OPTIMIZER, not_read, other_values
from ckptmap.formats.megatron.partition_rules import EXTRA_STATE
from ckptmap.formats.torch_save.reader import load
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.tensor_parallel import unstack
from ckptmap.storage.files import Files
from ckptmap.storage.json_file import read_json
from ckptmap.storage.resource_limits import unreadable
from ckptmap.tensors import Cut, Leaf, Path, StoredTensor

_COMMON, _BACKEND = "common.pt", "metadata.json"
_STACKED = re.compile(r"((?:[^.\d][^.]*\.)*layers\.)(?!\d)(.+)")
"""A key below `layers` without a number, whatever holds the stack: `decoder`, `language_model.decoder`."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\..+")
"""Keys of the optimizer. They begin with `chained_0.` if there are several, as one for the experts."""
_MAX_NBYTES = 1 << 20


class DcpMegatron:
    """Reads such a directory under the keys of Megatron core's model, with one tensor for each layer."""

    name = "torch_dist"

    def claims(self, place: Place) -> bool:
        """Return True for a DCP directory with `common.pt`, or a `metadata.json` of Megatron-LM.

        `index` refuses it if one of both is missing: the layers of each tensor are stacked, and the
        reader of plain DCP would take the stack for one tensor."""
        names = {*place.names}
        if not place.is_dir or METADATA not in names:
            return False
        return _COMMON in names or (_BACKEND in names and _is_megatrons(place))

    def index(self, place: Place) -> Index:
        """Return the weights below `model`, and the plain values of `common.pt` below `extra`.

        Raise SourceError CKM110 if `common.pt` or `metadata.json` is missing, CKM111 for another
        backend, CKM103 if metadata.json is not JSON, and the errors of reading DCP and torch.save files.
        """
        root = FilePath(place.path).absolute()
        _check_complete(root, place)
        _check_backend(root / _BACKEND, place.mounts)
        stored = Dcp().index(place)
        leaves, notes = _by_layer(stored.leaves)
        common = str(root / _COMMON)
        opened = Files(mounts=place.mounts)
        try:
            loaded = load(opened, common)
            if not isinstance(loaded.tree, dict):
                raise SourceError(
                    "CKM106",
                    f"{common}: expected a dict, found {type(loaded.tree).__name__}",
                    "copy the file again, or use an earlier checkpoint",
                )
            extra, left = other_values(flatten(loaded.tree, common, loaded.pickle_nbytes))
        finally:
            opened.close()
        leaves.update(extra)
        notes += [f"left behind: {', '.join(left)} of {_COMMON}"] if left else []
        files = (*stored.files, common, str(root / _BACKEND))
        return replace(
            stored,
            container=self.name,
            leaves=leaves,
            files=files,
            notes=(*stored.notes, *notes),
            unread_files=tuple(name for name in stored.unread_files if name != _COMMON),
        )


def _is_megatrons(place: Place) -> bool:
    """Return True if `metadata.json` has the key that Megatron-LM writes. The name alone is a common one."""
    try:
        settings = read_json(FilePath(place.path) / _BACKEND, place.mounts, max_nbytes=_MAX_NBYTES)
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and "sharded_backend" in settings


def _check_complete(root: FilePath, place: Place) -> None:
    missing = next((name for name in (_BACKEND, _COMMON) if name not in place.names), None)
    if missing is None:
        return
    present = _COMMON if missing == _BACKEND else _BACKEND
    raise SourceError(
        "CKM110",
        f"{root}: holds {present}, but no {missing}, and Megatron-LM writes both",
        f"copy all files of the save; if it is not Megatron-LM's, move {present} to another directory",
    )


def _check_backend(file: FilePath, mounts: Mounts) -> None:
    try:
        settings = read_json(file, mounts, max_nbytes=_MAX_NBYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(file, error) from error
        raise SourceError(
            "CKM103", f"{file}: cannot be read as JSON: {error}", "copy the checkpoint again"
        ) from error
    backend = settings.get("sharded_backend") if isinstance(settings, dict) else None
    if backend != "torch_dist":
        raise SourceError(
            "CKM111",
            f"{file}: sharded_backend, expected 'torch_dist', found {backend!r:.40}",
            "save it again with --ckpt-format torch_dist",
        )


def _by_layer(leaves: Mapping[Path, Leaf]) -> tuple[dict[Path, Leaf], list[str]]:
    """Return the weights below `model`, one tensor for each layer, and notes on the keys left out."""
    split: dict[Path, Leaf] = {}
    states, others = 0, []
    for path, leaf in leaves.items():
        key = ".".join(map(str, path))
        match = _STACKED.fullmatch(key)
        if _OPTIMIZER.fullmatch(key):
            split[OPTIMIZER, ARGS] = not_read()
        elif EXTRA_STATE.fullmatch(key):
            states += 1
        elif isinstance(leaf, Cut):  # a tensor by .metadata, whose items hold something else
            split["model", key] = leaf
        elif not isinstance(leaf, StoredTensor):
            others.append(key.partition("/")[0])
        elif match is None:
            split["model", key] = leaf
        else:
            for layer, part in enumerate(unstack(leaf)):
                split["model", f"{match[1]}{layer}.{match[2]}"] = part
    notes = [f"left behind: {states} _extra_state of FP8 scales, no weights"] if states else []
    more = dict.fromkeys(others)
    return split, [*notes, *([f"left behind: {', '.join(more)}"] if more else [])]
