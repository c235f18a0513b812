"""Quantization scales from a base checkpoint (--base), for a source that has codes without scales.

FSDP2 saves the packed codes of a bitsandbytes tensor and drops its quantization state, without which
they cannot be decoded. A base checkpoint of the same quantized model has that state. It is used only
together with comparisons, made in the run, which prove that both have the same packed codes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open_another
from ckptmap.core.formatting import counted
from ckptmap.errors import PlanError
from ckptmap.planning.file_plan import Compare
from ckptmap.protocols import Group

PREFIXES = ("base_model.model.",)
"""What peft puts before the names of the model it wraps."""
INSERTED = ".base_layer."
"""What peft puts between a module and its weight."""
_HINT = "this base has other weights: its scales would decode these codes to wrong values"


def restored(
    ckpt: Checkpoint, path: str | os.PathLike[str]
) -> tuple[Checkpoint, list[Compare], list[str]]:
    """Return `ckpt` with its payloads as the tensors that they are of, by the checkpoint at `path`.

    With it come the comparisons that must hold, and a note. Raises PlanError CKM312 where the base has no
    scales for any payload, or where a payload is of another size than the base's.
    """
    base = open_another(path, ckpt.files.mounts)
    compares: list[Compare] = []
    groups: dict[str, Group] = {}
    for fqn in ckpt:
        known = _known(fqn, base)
        mine = ckpt.group(fqn)
        if known is None:
            continue
        group = base.group(known)
        if mine.encoding.name != "dense" and mine.encoding != group.encoding:
            continue  # it has scales of its own
        packed, payload = group.parts[""], mine.parts[""]
        if payload.info != packed.info:
            if payload.info.dtype == group.info.dtype and payload.info.shape == group.info.shape:
                continue  # it is dense here, only the base is quantized
            raise PlanError(
                "CKM312",
                f"{fqn}: {payload.info}, expected the {packed.info} of {known} in {path}",
                "give the checkpoint that this model was loaded from: --base PATH",
            )
        compares += [Compare(f"{fqn} (and its --base)", packed, c, _HINT) for c in payload.chunks]
        groups[fqn] = Group(fqn, group.info, group.encoding, {**group.parts, "": payload})
    if not groups:
        raise PlanError(
            "CKM312",
            f"{path}: has scales for no tensor of {ckpt.path}",
            "give a quantized checkpoint with the same names: --base PATH",
        )
    more = ", ..." if len(groups) > 1 else ""
    note = f"scales of {counted(len(groups), 'tensor')} are from {path}: {next(iter(groups))}{more}"
    return ckpt.with_groups(groups, base.index.files), compares, [note]


def _known(fqn: str, base: Checkpoint) -> str | None:
    """Return the name under which the base has the tensor quantized; None: it has it under none."""
    for name in _names(fqn):
        if name in base and base.group(name).encoding.name != "dense":
            return name if "" in base.group(name).parts else None
    return None


def _names(fqn: str) -> Iterator[str]:
    """Yield the names that the base may have: the tensor's own, and the one before peft wrapped it."""
    yield fqn
    for prefix in PREFIXES:
        fqn = fqn.removeprefix(prefix)
    yield fqn.replace(INSERTED, ".")
