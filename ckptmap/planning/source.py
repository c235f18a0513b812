"""The checkpoint that a plan starts from: opened, its scales restored, under the names asked for."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import located_like, open_in
from ckptmap.checkpoint.rename import renamed
from ckptmap.checkpoint.translate_names import translated
from ckptmap.core.name_globs import matches
from ckptmap.core.printable import quote
from ckptmap.errors import PlanError
from ckptmap.mapping.detect import MEMORY
from ckptmap.mapping.rules import HUB
from ckptmap.planning.disk_names import (
    in_disk_names,
    in_own_names,
    is_in_memory,
    wants_disk_names,
)
from ckptmap.planning.file_plan import Compare
from ckptmap.planning.options import Options
from ckptmap.planning.reference import Reference
from ckptmap.planning.restored_scales import restored
from ckptmap.protocols import Setup
from ckptmap.setups import Aim
from ckptmap.storage.files import Files
from ckptmap.storage.hub.resolve import errors_by_given_path, refuse_elsewhere

UNNAMED = "names stay as they are without --names, which says into which scheme"


@dataclass(frozen=True)
class PlanSource:
    """A checkpoint to plan on.

    compares  codes that must equal those of --base, whose scales were taken
    """

    ckpt: Checkpoint
    compares: Sequence[Compare] = ()
    notes: Sequence[str] = ()


def open_source(
    source: str | os.PathLike[str] | Checkpoint, options: Options, aim: Aim, files: Files,
    reference: Reference | None,
) -> PlanSource:  # fmt: skip
    """Return the checkpoint at `source`, or derived from it; an opened one stays as it is.

    aim    what is written: a Hugging Face directory has names of its own
    files  those of the opened one, else the ones that will read it
    reference  the checkpoint of --as, whose names may be those of the source already

    Prefixes come off first: the scales of a base and the schemes of names go by what is below them.
    Scales are restored before names are translated: codes without scales have another shape than
    their tensor, and schemes of names are recognized by shapes. Raises SourceError and PlanError.
    """
    _require_config(options.config_from, aim.setup)
    if not isinstance(source, Checkpoint):
        source = open_in(files, source, root=options.source_root, like=options.like)
    elif options.like is not None:
        located_like(options.like, files.mounts)
    source = source.with_optimizer_order(options.param_order, options.like or options.config_from)
    source = renamed(source, options.renaming)
    compares: Sequence[Compare] = ()
    notes: Sequence[str] = ()
    with errors_by_given_path(files.mounts):
        if options.base is not None:
            source, compares, notes = restored(source, options.base)
        leave = partial(_left_behind, options)
        names = options.names or _names_by_setup(options, aim.setup)
        own = aim.setup.names
        if names is None and own and not _has_names_of(own, source, options, reference):
            source, told = in_own_names(source, options, own, leave, reference)
            notes = [*notes, *told]
        elif names == MEMORY and is_in_memory(source, options):
            pass
        elif names is not None:
            config = options.config_from
            source = translated(source, names, options.names_from, config, leave)
        elif reference is not None and all(fqn in source for fqn in reference.ckpt):
            pass
        elif wants_disk_names(source, options, aim.setup):
            source, told = in_disk_names(source, options, leave, aim.scheme is not None, reference)
            notes = [*notes, *told]
    if names is None and options.names_from is not None:
        notes = [*notes, f"--names-from {options.names_from}: {UNNAMED}"]
    return PlanSource(source, compares, notes)


def _names_by_setup(options: Options, setup: Setup) -> str | None:
    """Return Hugging Face's names for its directory, where --names-from says what the source has."""
    wanted = options.names_from is not None and setup.carrier is not None and not setup.holds_extra
    return HUB if wanted else None


def _has_names_of(
    scheme: str, source: Checkpoint, options: Options, reference: Reference | None
) -> bool:
    """Return whether the names are those of the format that is written, or were chosen by the user."""
    if reference is not None:
        return all(fqn in source for fqn in reference.ckpt)
    translated_to_merge = source.merged is not None and bool(source.index.naming)
    chosen = options.names_like is not None or (
        source.translation is not None and not translated_to_merge
    )
    return chosen or (source.index.naming == scheme and not translated_to_merge)


def _require_config(path: str | None, setup: Setup) -> None:
    """Raise PlanError CKM101 where --config-from does not exist: a config.json beside the weights
    must not be taken in its place in silence. Raise CKM103 for a file that is no config.json; a writer that describes
    the model inside of its own file takes one of its kind, too."""
    if path is not None and not Path(path).exists():
        refuse_elsewhere(path)
        raise PlanError(
            "CKM101",
            f"--config-from {path}: no such file or directory",
            "give the path of a config.json, or of the directory that holds it",
        )
    describes = setup.inner is not None and setup.carrier is None
    if path is not None and not describes and Path(path).is_file():
        with open(path, "rb") as file:
            start = file.read(64)
        if start.removeprefix(BOM_UTF8).lstrip()[:1] not in (b"{", b""):
            made = f"; that of a GGUF file is made by ckptmap convert {quote(path)} DIR --to hf"
            of_gguf = made if start[:4] == b"GGUF" else ""
            raise PlanError(
                "CKM103",
                f"--config-from {path}: expected a config.json, found a file that begins with {start[:4]!r}",
                f"give the path of a config.json, or of the directory that holds it{of_gguf}",
            )


def _left_behind(options: Options, key: str) -> str | None:
    """Return the option that leaves out a key of the source, by its name before the translation."""
    for name, patterns in (("exclude", options.exclude), ("drop", options.drop)):
        for pattern in patterns:
            if matches(key, pattern):
                return f"--{name} {pattern}"
    return None
