"""Give the weights of a transformers model in memory the names that it has on disk.

A Hugging Face directory is read by more than transformers: transformers 4 and inference servers know
the names on disk only, and leave out what they do not know. So `--to hf` writes what `save_pretrained`
would write, unless --names says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.open import open_in
from ckptmap.checkpoint.rename import renamed
from ckptmap.checkpoint.translate_names import translated, translated_by
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.mapping.detect import SchemeChoice, recognise
from ckptmap.mapping.disk_forms import memory_scheme_of
from ckptmap.mapping.memory_names import joined_experts, memory_scheme, named_as_in_memory
from ckptmap.mapping.model_config import config_beside, readable_config
from ckptmap.mapping.renaming import Renaming
from ckptmap.mapping.renamings_on_disk import renamings_on_disk
from ckptmap.mapping.rules import HUB
from ckptmap.planning.options import Options
from ckptmap.planning.reference import Reference
from ckptmap.protocols import Setup
from ckptmap.storage.files import Files

BODY = "model"
"""The segment before the names of a model below its head."""
HEADLESS = f"the model was saved without its head (`AutoModel`): its names are read as {BODY}.*"
READERS = "transformers 5 loads them; transformers 4, vLLM and SGLang do not find them"


def wants_disk_names(ckpt: Checkpoint, options: Options, setup: Setup) -> bool:
    """Return whether nobody has chosen names, and the output is a Hugging Face directory, or the source is of
    a format that has names of its own."""
    chosen = options.names is not None or options.names_like is not None
    done = ckpt.translation is not None or ckpt.merged is not None
    hub = setup.carrier is not None and not setup.holds_extra
    own = bool(ckpt.index.naming) and ckpt.index.naming != setup.names
    return (hub or own) and not chosen and not done


def in_disk_names(
    ckpt: Checkpoint,
    options: Options,
    leave: Callable[[str], str | None],
    casts: bool,
    reference: Reference | None = None,
) -> tuple[Checkpoint, Sequence[str]]:
    """Return the checkpoint under its names on disk, and what to tell the user.

    It stays as it is where its names are no model's in memory, where a rule does not fit it, and where
    a quantized tensor would have to be decoded. Then the notes say who can load it. `casts`: an encoding is
    asked for, in which a tensor is written whether it has to be decoded or not. `reference` is the checkpoint of --as.
    """
    config = _config(ckpt, options, reference)
    if ckpt.index.naming:
        return _from_format(ckpt, options, leave, casts)
    try:
        scheme = memory_scheme(list(ckpt), config)
    except CkptmapError:  # a mapping file of the user's that cannot be read; nobody asked for names
        return ckpt, []
    experts = memory_scheme_of(list(ckpt), config) if scheme is None else None
    title = scheme.title if scheme is not None else "" if experts is None else experts.title
    if not title:
        key = None if config is None else joined_experts(list(ckpt), config)
        if key is not None:
            return ckpt, [_without_rules(key)]
        return _by_modules(ckpt, options, config, reference)
    if config is None:
        return ckpt, [_without_config(title)]
    try:
        if experts is not None:
            on_disk = translated_by(ckpt, SchemeChoice(experts, None), config, leave)
        else:
            on_disk = translated(ckpt, HUB, title, options.config_from, leave)
    except CkptmapError as error:
        return ckpt, [_in_memory(title, str(error.message))]
    reason = _hindrance(on_disk)
    if reason is not None:
        return ckpt, [_in_memory(title, reason)]
    notes = [*on_disk.notes, "names as save_pretrained writes them; as they are: --names hf-memory"]
    return replace(on_disk, notes=notes), []


def is_in_memory(ckpt: Checkpoint, options: Options) -> bool:
    """Return whether the names are those in memory of a family without a mapping file, which are changed on disk."""
    names, config = list(ckpt), _config(ckpt, options)
    return bool(renamings_on_disk(names, config) or memory_scheme_of(names, config))


def _by_modules(
    ckpt: Checkpoint,
    options: Options,
    config: Mapping[str, object] | None,
    reference: Reference | None,
) -> tuple[Checkpoint, Sequence[str]]:
    """Return the checkpoint with its modules named as on disk: as those of the release are, where its weights are at hand."""
    ways = renamings_on_disk(list(ckpt), config)
    if not ways:
        key = named_as_in_memory(list(ckpt), config)
        return ckpt, [] if key is None else [_renamed(key)]
    named = [renamed(ckpt, Renaming.of(rename=way)) for way in ways]
    known = _released(ckpt, options, reference)
    best = max(named, key=lambda one: sum(fqn in known for fqn in one))
    note = "names as save_pretrained writes them; as they are: --names hf-memory"
    return replace(best, notes=[*best.notes, note]), []


def _released(ckpt: Checkpoint, options: Options, reference: Reference | None) -> frozenset[str]:
    """Return the names of the weights of --as, or of those beside the config.json of --config-from; empty: there are none."""
    if reference is not None:
        return frozenset(reference.ckpt)
    if options.config_from is None:
        return frozenset()
    try:
        with open_in(Files(mounts=ckpt.files.mounts), options.config_from) as release:
            return frozenset(release)
    except CkptmapError:
        return frozenset()


def in_own_names(
    ckpt: Checkpoint,
    options: Options,
    scheme: str,
    leave: Callable[[str], str | None],
    reference: Reference | None,
) -> tuple[Checkpoint, Sequence[str]]:
    """Return the checkpoint under the names of the format that is written, and notes.

    Names that no scheme knows stay where no config says of which model they are. Raises PlanError CKM604 for a model
    that has no such names here, and as `translated` does.
    """
    like = None if reference is None else config_beside(reference.ckpt.path, ckpt.files.mounts)
    try:
        return translated(
            ckpt, scheme, options.names_from, options.config_from, leave, config=like
        ), []
    except PlanError as error:
        config = like or _config(ckpt, options)
        if error.code != "CKM604" or options.names_from is not None:
            raise
        if config is not None and (below := _below_its_head(ckpt, config)) is not None:
            at = options.config_from
            return translated(below, scheme, None, at, leave, config=like), [HEADLESS]
        if config is not None:
            raise
        return ckpt, [
            f"the names stay as they are, which no library of {scheme} loads: {error.message}"
        ]


def _below_its_head(ckpt: Checkpoint, config: Mapping[str, object]) -> Checkpoint | None:
    """Return the weights of a model that was saved without its head, as an embedding model is, under the names that
    they have below a head; None where no scheme knows them so, either."""
    below = renamed(ckpt, Renaming.of(add_prefix=BODY))
    found = recognise({fqn: below[fqn].info for fqn in below}, config)
    return below if found else None


def _from_format(
    ckpt: Checkpoint, options: Options, leave: Callable[[str], str | None], casts: bool
) -> tuple[Checkpoint, Sequence[str]]:
    """Return the checkpoint of a format that has names of its own under those on disk, and notes."""
    naming = ckpt.index.naming
    try:
        on_disk = translated(ckpt, HUB, naming, options.config_from, leave)
    except CkptmapError as error:
        return ckpt, [f"the names stay those of {naming}, which no Hugging Face library loads: {error.message}"]  # fmt: skip
    reason = _hindrance(on_disk)
    if reason is None or (casts and on_disk.translation and not on_disk.translation.unmapped):
        return on_disk, []
    return ckpt, [
        f"the names stay those of {naming}, which no Hugging Face library loads: {reason}; with --to hf-bf16"
        " it is decoded"
    ]


def _config(
    ckpt: Checkpoint, options: Options, reference: Reference | None = None
) -> Mapping[str, object] | None:
    """Return the model's config.json, that of --as where it is given, None without one; one that cannot be read is told
    later on."""
    asked = ckpt if reference is None else reference.ckpt
    return readable_config(asked.sidecar_dir, ckpt.files.mounts, options.config_from)


def _hindrance(on_disk: Checkpoint) -> str | None:
    """Return why a translation is not taken unasked."""
    translation = on_disk.translation
    assert translation is not None, "it has just been translated"
    if translation.unmapped:
        return f"no rule knows {translation.unmapped[0]}"
    if translation.decoded:
        return f"{next(iter(translation.decoded))} would have to be decoded"
    return None


def _in_memory(title: str, reason: str) -> str:
    return (
        f"the names stay those of a model in memory ({title}): {reason}; {READERS};"
        " rename them anyway: --names hf"
    )


def _without_config(title: str) -> str:
    return (
        f"the names are those of a model in memory ({title}): {READERS}; with the model's"
        " config.json they become those on disk: --config-from PATH"
    )


def _without_rules(key: str) -> str:
    return (
        f"{key}: all experts of a layer in one tensor, as transformers 5 has them in memory, and ckptmap"
        f" has no rules for this model: {READERS}; rename them with a mapping file: --names FILE"
    )


def _renamed(key: str) -> str:
    return (
        f"{key}: has its name in memory, which save_pretrained changes: transformers 5 loads it, programs that"
        " know the names on disk alone do not; rename it with a mapping file: --names FILE"
    )
