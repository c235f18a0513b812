"""Rename the weights of a checkpoint from one naming scheme to another: Meta's to Hugging Face's.

    Checkpoint (meta names) --choose, resolve--> Checkpoint (hf names)

No tensor is read. A tensor that is only renamed keeps its stored parts. A tensor that is split, fused
or permuted is a stored tensor made of regions of its sources. A tensor that must be decoded first,
because its values change or because it is quantized and cut across its blocks, is read through its
sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.compare_tensors import same_parts
from ckptmap.checkpoint.logical_tensors import DENSE, LogicalTensors
from ckptmap.checkpoint.name_translation import NameTranslation
from ckptmap.core.formatting import some
from ckptmap.core.gc_pause import paused_gc
from ckptmap.errors import PlanError
from ckptmap.mapping.derived_tensor import DerivedTensor
from ckptmap.mapping.detect import SchemeChoice, choose, known_below, recognise
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.mapped_tensor import mapped_tensor
from ckptmap.mapping.mapping_file import parse_scheme
from ckptmap.mapping.model_config import config_beside
from ckptmap.mapping.resolve import MappedTensor, Resolution
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.optim.translate_state import translate_state
from ckptmap.protocols import Group
from ckptmap.quantization.unsupported_schemes import RESTORE, payloads_without_scales
from ckptmap.tensors import StoredTensor


def _translated(
    base: Checkpoint,
    resolution: Resolution,
    choice: SchemeChoice,
    config: Mapping[str, object] | None,
    left: Mapping[str, str],
) -> Checkpoint:
    """Return `base` under the names of `resolution`."""
    decoded: dict[str, DerivedTensor] = {}
    groups: dict[str, Group | StoredTensor] = {}
    for name, mapped in resolution.targets.items():
        groups[name] = _renamed_or_derived(base, mapped, decoded)
    keys = {n: [base.names[key] for key in m.sources] for n, m in resolution.targets.items()}
    untied = {
        name: resolution.tied[name]
        for name in resolution.tied
        if name in resolution.targets
        and not base.untied.keys().isdisjoint(resolution.targets[name].sources)
    }
    notes = [*base.notes, f"names: {choice.text}", *_decoding_notes(decoded)]
    before = base.translation  # of a base whose format has names of its own, to merge an adapter
    dropped = {**({} if before is None else before.dropped), **left, **resolution.dropped}
    reader = base.optimizer_reader
    if reader.present and reader.form is not None and not reader.by_index:
        infos = base.infos()
        dropped |= _state_left(base, resolution)
        reader = reader.named_as(lambda state: translate_state(state, resolution, infos, DENSE))
        values = (leaf.value for leaf in reader.named().leaves)
        moments = {lazy.fqn: lazy for lazy in values if isinstance(lazy, DerivedTensor)}
        notes += [f"optimizer: {note}" for note in _decoding_notes(moments)]
    return replace(
        base,
        groups=LogicalTensors(groups),
        names={name: name for name in groups},
        notes=notes,
        optimizer_reader=reader,
        ties={name: kept for name, kept in resolution.tied.items() if name not in untied},
        untied=untied or base.untied,
        translation=NameTranslation(
            choice=choice,
            config=config,
            used=resolution.used,
            left=left,
            dropped=dropped,
            unmapped=(*(() if before is None else before.unmapped), *resolution.unmapped),
            origins={name: tuple(stored) for name, stored in keys.items() if stored != [name]},
            decoded=decoded,
        ),
    )


def _state_left(base: Checkpoint, resolution: Resolution) -> dict[str, str]:
    """Return the optimizer state of weights that have no place in the other scheme, which stays
    behind with them: key -> reason."""
    used = {key for mapped in resolution.targets.values() for key in mapped.sources}
    keys = base.optimizer_reader.named().keys
    return {
        f"optimizer.{key}": "with its weight" for key in keys if key in base and key not in used
    }


def _renamed_or_derived(
    base: Checkpoint, mapped: MappedTensor, decoded: dict[str, DerivedTensor]
) -> Group | StoredTensor:
    """Return the stored parts of a weight under its new name; one that must be decoded first is
    added to `decoded`."""
    if mapped.source is not None and not mapped.ops:
        original = base.groups.dense_or_group(mapped.source)
        return original._replace(fqn=mapped.name) if isinstance(original, Group) else original
    tensor = mapped_tensor(mapped, {key: base[key] for key in mapped.sources}, DENSE)
    if isinstance(tensor, DerivedTensor):
        decoded[mapped.name] = tensor
        return tensor.group
    return tensor


def _decoding_notes(tensors: Mapping[str, DerivedTensor]) -> Iterator[str]:
    """Yield one note for all tensors that are decoded for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for name, lazy in tensors.items():
        by_reason.setdefault(lazy.why, []).append(name)
    for reason, names in by_reason.items():
        yield f"{some(names, 1)}: {reason}"


def translated(
    ckpt: Checkpoint,
    names: str,
    names_from: str | None = None,
    config_from: str | None = None,
    leave: Callable[[str], str | None] = lambda key: None,
    config: Mapping[str, object] | None = None,
) -> Checkpoint:
    """Return the checkpoint under the names that are asked for.

    `leave` returns why a key stays behind, or None. `config` is used where no config.json lies
    beside the weights. Raises PlanError CKM601 to CKM617.
    """
    config = config_beside(ckpt.sidecar_dir, ckpt.files.mounts, config_from) or config
    with paused_gc():
        left = {key: why for key in ckpt if (why := leave(key)) is not None}
        infos = {key: info for key, info in ckpt.infos().items() if key not in left}
        unmapped = "" if names == ckpt.index.naming else ckpt.index.unmapped_model
        choice = choose(infos, names, names_from, config, unmapped)
        return _apply_choice(ckpt, choice, config, left)


def translated_by(
    ckpt: Checkpoint,
    choice: SchemeChoice,
    config: Mapping[str, object] | None,
    leave: Callable[[str], str | None] = lambda key: None,
) -> Checkpoint:
    """Return the checkpoint translated from one scheme to another. Raises PlanError as `translated` does."""
    with paused_gc():
        left = {key: why for key in ckpt if (why := leave(key)) is not None}
        return _apply_choice(ckpt, choice, config, left)


def translated_as(ckpt: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint translated as the record of a manifest says."""
    source, target = (
        None if record[side] is None else parse_scheme(record[side]["text"], record[side]["title"])
        for side in ("from", "to")
    )
    return _apply_choice(ckpt, SchemeChoice(source, target), record["config"], record["left"])


def translated_like_output(
    ckpt: Checkpoint, record: Mapping[str, object], weights: Iterable[str]
) -> Checkpoint:
    """Return `ckpt` translated as an output was.

    It stays as it is if that fails and it has the output's `weights` by name already: a model that
    went to another scheme and back is compared with the original.
    """
    try:
        return translated_as(ckpt, record)
    except PlanError:
        if not all(name in ckpt for name in weights):
            raise
        return ckpt


def left_out_as_tied(
    ckpt: Checkpoint, record: Mapping[str, Any] | None, present: Collection[str]
) -> set[str]:
    """Return the keys of `ckpt` that the schemes of a translation tie to one of the `present` keys and
    that hold the same bytes: such as a head that an output leaves out."""
    tied = set()
    for side in ("from", "to") if record is not None else ():
        if record is None or record[side] is None:
            continue
        scheme = parse_scheme(record[side]["text"], record[side]["title"])
        dims = Dims(scheme.dims, record["config"])
        for tie in scheme.ties:
            name, kept = tie.name.text, tie.kept.text
            if name in present or name not in ckpt or kept not in present or kept not in ckpt:
                continue
            if dims.holds(tie.when) and same_parts(ckpt[kept], ckpt[name]) is None:
                tied.add(name)
    return tied


def _apply_choice(
    ckpt: Checkpoint,
    choice: SchemeChoice,
    config: Mapping[str, object] | None,
    left: Mapping[str, str],
) -> Checkpoint:
    infos = {key: info for key, info in ckpt.infos().items() if key not in left}
    try:
        resolution = translate(infos, choice.source, choice.target, config, left=left)
    except PlanError as error:
        if error.code == "CKM606" and payloads_without_scales(
            infos
        ):  # its shape is that of packed codes
            error.hint = RESTORE + error.hint
        if error.code == "CKM607":
            error.hint = _prefix_hint(infos, config) or error.hint
        raise
    if not resolution.targets and infos:
        raise PlanError(
            "CKM609",
            f"{ckpt.path}: {choice.text}: no rule matches any of its keys, the first is {next(iter(infos))}",
            _prefix_hint(infos, config)
            or "list the schemes with: ckptmap mappings list; name that of this checkpoint with --names-from",
        )
    return _translated(ckpt, resolution, choice, config, left)


def _prefix_hint(keys: Collection[str], config: Mapping[str, object] | None) -> str:
    """Return the options that take off the prefix without which the keys are known; "": there is none."""
    change = None if recognise(keys, config) else known_below(keys, config)
    return "" if change is None else f"without '{change.old}.' they are known: add {change.options}"
