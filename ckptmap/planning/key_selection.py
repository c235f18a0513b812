"""Select the leaves of the source that go into the output: weights, other tensors, plain values, optimizer state.

A leaf that is not selected is tied to a selected weight, dropped with a reason, or unresolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ckptmap.core.formatting import some
from ckptmap.core.name_globs import suggestion
from ckptmap.core.printable import advised
from ckptmap.core.state_paths import join
from ckptmap.errors import PlanError
from ckptmap.planning.copied_files import CopiedFiles, copied_files
from ckptmap.planning.optimizer_state import is_optimizer_written
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.planning.unmatched_patterns import sample
from ckptmap.protocols import Setup
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path, PlainValue

T = TypeVar("T")
NAMES_SHOWN = 3
"""Names that an error shows of a checkpoint."""
UNITS_SHOWN = 4
"""Patterns of FSDP units that a note lists."""
_SAVE_PLAIN = (
    "save it as a plain tensor: weight.dequantize() makes one of a quantized tensor; or convert the dense"
    " checkpoint that it was made from; ckptmap never builds objects of a class that it does not know"
)


@dataclass(frozen=True)
class Selection:
    """The leaves of the source that go into the output.

    weights    FQNs in the order in which they are written, tied ones among them
    ties       FQN of a weight that is not written -> FQN of the weight that it must equal
    others     tensors that are neither weights nor optimizer state, by path in the source
    values     values that are no tensors, by path in the source
    optimizer  whether optimizer state is written
    copied     files of the source that are copied whole
    """

    weights: Sequence[str]
    ties: Mapping[str, str]
    others: Mapping[Path, LazyTensor]
    values: Mapping[Path, PlainValue]
    optimizer: bool
    copied: CopiedFiles
    remarks: Remarks

    @cached_property
    def written(self) -> Sequence[str]:
        """FQNs of the weights without the tied ones, which are not written."""
        if not self.ties:
            return self.weights
        return [fqn for fqn in self.weights if fqn not in self.ties]


def select(request: Request, sharding: OutputSharding) -> Selection:
    """Account for every leaf of the source.

    Raises PlanError CKM206 where no weight is left, CKM504 where the order of the weights decides
    the output and is not known, SourceError CKM116 for a file that is a link out of the source.
    """
    ckpt = request.ckpt
    copied = copied_files(ckpt, request.setup, sharding.world_size, request.dropped_whole)
    optimizer, more = is_optimizer_written(request)
    remarks = _refused(request, optimizer) + _untranslated(request)
    values, dropped_values = _extra(request, copied, ckpt.plain, tensors=False)
    others, dropped_others = _extra(request, copied, ckpt.other, tensors=True)
    remarks = remarks + more + Remarks({**dropped_values, **dropped_others})
    order, notes = _order(request, sharding)
    weights, dropped = _weights(request, order)
    ties = _ties(request, weights)
    remarks = remarks + Remarks(dropped, notes=notes)
    selection = Selection(weights, ties, others, values, optimizer, copied, remarks)
    if not selection.written:
        raise _nothing_left(request)
    return selection


def no_place(setup: Setup) -> str:
    """Return why an entry that is no weight is dropped."""
    return f"{setup.name} has no place for what is not a weight"


def _nothing_left(request: Request) -> PlanError:
    """Return PlanError CKM206 with some names, and those that may be meant by --include."""
    ckpt, include = request.ckpt, request.options.include
    names = list(ckpt)
    meant = " ".join(filter(None, (suggestion(pattern, names) for pattern in include)))
    hint = f"{meant} {sample(names)}".lstrip() if names else "it holds no weights"
    if ckpt.translation is not None:
        hint += "; --include goes by the names in DST"
    return PlanError("CKM206", f"{ckpt.path}: no tensor is left to convert of {len(ckpt)}", hint)


def _refused(request: Request, optimizer: bool) -> Remarks:
    """Return the objects of foreign classes: dropped if the user says so or the setup has no place for them,
    else unresolved. What is not written needs no decoding."""
    setup = request.setup
    dropped: dict[str, str] = {}
    unresolved: list[Unresolved] = []
    left: dict[str, str] = {}
    for item in request.ckpt.refused:
        if item.of_optimizer and not optimizer:
            continue  # the state is left out as a whole, and the plan says why
        reason = request.dropped_whole(item.key) if item.droppable else None
        if reason is None and item.place is not None and not setup.has_place_for(item.place):
            left[item.key] = item.reason
            reason = no_place(setup)
        if reason is not None:
            dropped[item.key] = reason
            continue
        option, hint = "", _SAVE_PLAIN
        if item.droppable:
            option = advised(drop=item.key)
            repair = f"{item.repair}; or " if item.repair else ""
            hint = f"{repair}leave it behind with {option}{_in_group(item.key)}"
        unresolved.append(Unresolved(item.key, item.reason, hint, option))
    return Remarks(dropped, unresolved, _unread(left))


def _unread(left: Mapping[str, str]) -> list[str]:
    """Return a note on entries that are left out, of which nothing was read but the names of classes."""
    if not left:
        return []
    named = [f"{key} ({kind})" for key, kind in left.items()]
    return [f"left out, and not read: {some(named, NAMES_SHOWN)}"]


def _in_group(key: str) -> str:
    """Return what is to be done after an object of an optimizer's group was left behind: torch's
    load_state_dict puts the saved groups in place of the live ones."""
    parts = key.split(".")
    if parts[:2] != ["optimizer", "param_groups"] or len(parts) < 4:
        return ""
    return f", and after load_state_dict set {parts[3]!r} in the optimizer's groups again, for its next step"


def _untranslated(request: Request) -> Remarks:
    """Return the keys that have no name in the scheme of --names."""
    translation = request.ckpt.translation
    if translation is None:
        return Remarks()
    dropped = dict(translation.dropped)
    unresolved: list[Unresolved] = []
    for key in translation.unmapped:
        reason = request.excluded(key)
        if reason is not None:
            dropped[key] = reason
        else:
            unresolved.append(Unresolved(key, *translation.unknown(key)))
    return Remarks(dropped, unresolved)


def _extra(
    request: Request, copied: CopiedFiles, leaves: Mapping[Path, T], *, tensors: bool
) -> tuple[dict[Path, T], dict[str, str]]:
    """Return the leaves beside weights and optimizer state that are written, and why others are not."""
    selected: dict[Path, T] = {}
    dropped: dict[str, str] = {}
    for path, leaf in leaves.items():
        if copied.holds(path):
            continue
        reason = request.dropped_whole(join(path))
        if reason is None and not request.setup.has_place_for(path, tensor=tensors):
            reason = no_place(request.setup)
        if reason is None:
            selected[path] = leaf
        else:
            dropped[join(path)] = reason
    return selected, dropped


def _order(request: Request, sharding: OutputSharding) -> tuple[Sequence[str], list[str]]:
    """Return the weights in the order of the source, or of the model where a flat parameter joins
    them, and a note on where the model's order is from."""
    ckpt, options = request.ckpt, request.options
    if not sharding.by_order:
        return list(ckpt), []
    left_out = {
        fqn
        for fqn in ckpt
        if sharding.unit(fqn, ckpt[fqn].info) and request.excluded(fqn) is not None
    }
    from ckptmap.planning.flat_param_order import model_order

    order, known_from = model_order(ckpt, options.like or options.config_from, left_out)
    units = list(options.fsdp_units[:UNITS_SHOWN])
    if len(options.fsdp_units) > UNITS_SHOWN:
        units.append(f"... ({len(options.fsdp_units)})")
    return order, [
        f"FSDP units: {', '.join([*units, 'the root'])}; use_orig_params={options.use_orig_params};"
        f" order of parameters: {known_from}"
    ]


def _weights(request: Request, order: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
    """Return the weights that the options keep, and why the others are left out."""
    if request.takes_all:
        return order, {}
    selected: list[str] = []
    dropped: dict[str, str] = {}
    for fqn in order:
        reason = request.excluded(fqn)
        if reason is None:
            selected.append(fqn)
        else:
            dropped[fqn] = reason
    return selected, dropped


def _ties(request: Request, weights: Sequence[str]) -> dict[str, str]:
    """Return the tied weights, each with the weight that is written in its place."""
    selected = set(weights)
    ties = {**_ties_of_config(request, selected), **request.ckpt.ties}
    if request.reference is not None:  # what it stores is written, whatever ties it
        ties = {fqn: other for fqn, other in ties.items() if fqn not in request.reference.ckpt}
    return {fqn: written for fqn, written in ties.items() if fqn in selected}


def _ties_of_config(request: Request, selected: set[str]) -> dict[str, str]:
    """Return the ties that the config.json beside the weights declares."""
    carrier, ckpt = request.carrier, request.ckpt
    if carrier is None or (ckpt.translation is not None and not ckpt.translation.in_hub_names):
        return {}  # a config.json has the hub's names; another scheme has ties of its own
    infos = ckpt.infos()
    if len(selected) < len(infos):
        infos = {fqn: info for fqn, info in infos.items() if fqn in selected}
    ties = carrier.ties(infos, request.siblings, request.options.config_from)
    return {
        fqn: written
        for fqn, written in ties.items()
        if fqn not in ckpt.untied
        if ckpt.group(fqn).encoding == ckpt.group(written).encoding
    }
