"""Compare the names that a Hugging Face directory will hold with the model that its config.json describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.formatting import counted
from ckptmap.core.printable import advised, quote
from ckptmap.errors import CkptmapError, PlanError
from ckptmap.mapping.config_fit import AT_RANDOM, Family, family_of, other_family, other_scheme
from ckptmap.mapping.detect import MEMORY, choose
from ckptmap.mapping.model_config import readable_config
from ckptmap.mapping.rules import HUB
from ckptmap.mapping.wrappers import ADAPTER, BASE_LAYER
from ckptmap.planning.class_names import ModelClass, class_of
from ckptmap.planning.key_selection import Selection
from ckptmap.planning.output_names import OutputNames
from ckptmap.planning.remarks import Remarks
from ckptmap.planning.request import Request
from ckptmap.quantization.unsupported_schemes import foreign_tensors
from ckptmap.tensors import TensorInfo

DIRECTORIES = ("hf", "hf-bin")
"""Containers whose weights lie beside the config.json of their model."""
FITTING = 0.1
"""Share of the names below which they are taken for those of another model: the last norm has one name
in many schemes."""


def config_names(request: Request, selection: Selection, names: OutputNames) -> Remarks:
    """Return notes where config.json describes more than is written, or other names.

    Raises PlanError CKM619 where hardly a name is one of the model: the output would load, with its
    weights at random. It is a note only where names were chosen by an option, where the source is a
    Hugging Face directory with these names already, and where the config names code of its own.
    """
    if request.carrier is None:
        return Remarks(notes=_lacking(request))
    infos = request.ckpt.infos()
    named = map(names.weights.__getitem__, selection.weights)
    written = dict(zip(named, map(infos.__getitem__, selection.weights), strict=True))
    config = _config(request)
    if not _is_in_place(request):
        _refuse_adapter(request, written)
    if config is None:
        return Remarks()
    left_out = len(infos) - len(written)
    family = _family(config)
    if family is None:
        _require_class_names(request, written, config)
        return Remarks(notes=_left_out(left_out))
    fitting = family.fitting(written)
    if _are_strangers(fitting, written):
        error = _stranger(request, family, written, fitting, config)
        if _is_wanted(request, config):
            return Remarks(notes=[error.message])
        raise error
    if not left_out and _is_in_place(request) and request.options.config_from is None:
        return Remarks()
    difference, strays = family.differences(written, config)
    notes = [_strays(family, strays)] if strays else []
    if difference is None:
        kept = {*selection.weights}
        of_model = family.fitting({fqn: infos[fqn] for fqn in infos if fqn not in kept})
        return Remarks(notes=[*notes, *_left_out(of_model)])
    if not _is_wanted(request, config):
        _require_own_axes(request, family, written, config)
    return Remarks(notes=[f"config.json describes {difference}", *notes])


def _require_own_axes(
    request: Request,
    family: Family,
    written: Mapping[str, TensorInfo],
    config: Mapping[str, object],
) -> None:
    """Raise PlanError CKM619 where the names are the model's and the shapes those of another program's scheme, as nanoGPT's
    matrices of GPT-2: square ones would load, transposed."""
    try:
        source = choose(written, HUB, request.options.names_from, config).source
    except PlanError:  # no scheme, or several, have these shapes
        return
    loads = (HUB, MEMORY)  # transformers takes the names in memory, too
    if source is not None and source.name not in loads:
        raise PlanError(
            "CKM619",
            f"{request.ckpt.shown}: the names fit {family.model_type}, which config.json describes, and the shapes are"
            f" those of {source.title}: matrices lie in another order of their axes",
            "add --names hf",
        )


def _require_class_names(
    request: Request, written: Mapping[str, TensorInfo], config: Mapping[str, object]
) -> None:
    """Raise PlanError CKM619 where a prefix is all that keeps the names from being those of the config's class."""
    if _is_wanted(request, config):
        return
    given, ckpt = request.options.config_from, request.ckpt
    model = class_of(config, ckpt.sidecar_dir, given, written, ckpt.files.mounts)
    if model is None:
        return
    fitting = model.fitting(written)
    if _are_strangers(fitting, written) and model.prefix(written) is not None:
        raise _stranger(request, model, written, fitting, config)


def _are_strangers(fitting: int, written: Mapping[str, TensorInfo]) -> bool:
    """Return whether hardly a name is one of the model, parts of quantized weights of foreign forms left aside."""
    if fitting >= len(written) * FITTING:
        return False
    return fitting < (len(written) - len(foreign_tensors(written))) * FITTING


def _strays(family: Family, names: Sequence[str]) -> str:
    """Return the note that the model has no weights of these names."""
    subject = f"{counted(len(names), 'name')} {'does' if len(names) == 1 else 'do'} not belong"
    return (
        f"{subject} to {family.model_type}, the model of config.json, first {names[0]!r}:"
        f" transformers does not load them; leave them out with {advised(exclude=names[0])}"
    )


def _config(request: Request) -> Mapping[str, object] | None:
    """Return the config.json that goes beside the weights; None: there is none, or it is the carrier's
    to refuse."""
    options, ckpt = request.options, request.ckpt
    if request.reference is not None:  # its config.json is that of its weights
        return None
    if options.wrap is not None or options.names_like is not None:
        return None
    return _config_of(ckpt, options.config_from)


def _config_of(ckpt: Checkpoint, given: str | None) -> Mapping[str, object] | None:
    return readable_config(ckpt.sidecar_dir, ckpt.files.mounts, given)


def _lacking(request: Request) -> list[str]:
    """Return a note where a Hugging Face directory lacks a weight of the model that its config.json describes, or
    holds one of another shape. The output has no config.json, so that nobody compares the two again."""
    ckpt = request.ckpt
    if ckpt.index.container not in DIRECTORIES or ckpt.translation is not None:
        return []
    config = _config_of(ckpt, None)
    family = None if config is None else _family(config)
    if config is None or family is None:
        return []
    difference, _ = family.differences(ckpt.infos(), config)
    return [] if difference is None else [f"config.json beside the source describes {difference}"]


def _family(config: Mapping[str, object]) -> Family | None:
    try:
        return family_of(config)
    except CkptmapError:  # a mapping file of the user's that cannot be read; nobody asked for it
        return None


def _is_wanted(request: Request, config: Mapping[str, object]) -> bool:
    """Return whether names that transformers does not know can be what the user wants."""
    return request.options.names is not None or _is_in_place(request) or "auto_map" in config


def _is_in_place(request: Request) -> bool:
    """Return whether the source is what is written, with names that somebody loads."""
    return request.ckpt.index.container == request.setup.writer


def _stranger(
    request: Request,
    family: Family | ModelClass,
    written: Mapping[str, TensorInfo],
    fitting: int,
    config: Mapping[str, object],
) -> PlanError:
    first = next(iter(written))
    message = (
        f"{fitting or 'none'} of {counted(len(written), 'name')} fits {family.model_type}, which config.json"
        f" describes: found {first!r}, expected such as {family.example!r}; {AT_RANDOM}"
    )
    change, scheme = family.prefix(written), other_scheme(written, config)
    other = other_family(written, config)
    if change is not None:
        hint = (
            f"{change.matched} of {change.wanted} fit without '{change.old}.': add {change.options}"
        )
    elif scheme is not None:
        hint = f"the names are those of {scheme.title}: add --names hf"
    elif other is not None:
        hint = f"the names are those of {other.title}: give the config.json of that model with --config-from"
    else:
        hint = "give the config.json of this model with --config-from, or rename its weights: --rename 'OLD.{x}=NEW.{x}'"
    return PlanError("CKM619", f"{request.ckpt.shown}: {message}", hint)


def _refuse_adapter(request: Request, names: Collection[str]) -> None:
    """Raise PlanError CKM619 for what a model saved that peft has wrapped: its base and an adapter."""
    below = next((name for name in names if BASE_LAYER in name), None)
    if below is None or not any(ADAPTER in name for name in names):
        return
    from ckptmap.checkpoint.lora.adapter_files import HEAD, held_in

    head, _, rest = next(iter(names)).partition(HEAD)
    # `merge` takes off what stands before all names.
    separate = bool(head and rest) and not held_in(names)
    path, source = "WRAPPED.pt", quote(request.ckpt.shown)
    before = (
        f"ckptmap convert {source} {path} --to full --strip-prefix {quote(head.rstrip('.'))}, then "
    )
    merge = f"ckptmap merge BASE {path if separate else source} DST --to {request.aim.text}"
    raise PlanError(
        "CKM619",
        f"{request.ckpt.shown}: {below}: is a weight below peft's adapter; {AT_RANDOM}",
        f"merge the adapter into its base: {before if separate else ''}{merge} --adapter-config"
        " adapter_config.json",
    )


def _left_out(count: int) -> list[str]:
    if not count:
        return []
    return [
        f"config.json describes the whole model, and {counted(count, 'weight')} of it"
        f" {'stays' if count == 1 else 'stay'} behind: {AT_RANDOM}"
    ]
