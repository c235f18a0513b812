"""Optimizer state in a plan: whether it is written, under which keys, and what of it is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.optim.optimizer_reader import OptimizerReader
from ckptmap.optim.state import KeyForm, Optimizer, Same, key_forms
from ckptmap.planning.encoding_choice import encoding_for
from ckptmap.planning.kept_layout import optimizer_keys
from ckptmap.planning.options import Options
from ckptmap.planning.output_sharding import OutputSharding
from ckptmap.planning.remarks import Remarks, Unresolved
from ckptmap.planning.request import Request
from ckptmap.protocols import Encoding
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Path, PlainValue


class StateTensor(NamedTuple):
    """A tensor of optimizer state, at its path in the output."""

    path: Path
    tensor: LazyTensor
    encoding: Encoding | None
    """The encoding it is stored in anew, because it is stored malformed; None: as it is."""


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer state that is written.

    values   path in the output -> hyper-parameters and step counts that are no tensors
    same     pairs of tensors that must hold the same bytes, of which the first is written
    """

    tensors: Sequence[StateTensor] = ()
    values: Mapping[Path, PlainValue] = field(default_factory=dict)
    same: Sequence[Same] = ()
    remarks: Remarks = field(default_factory=Remarks)


def is_optimizer_written(request: Request) -> tuple[bool, Remarks]:
    """Return whether optimizer state is written, and why it is not."""
    reader = request.ckpt.optimizer_reader
    if not reader.present:
        return False, Remarks()
    reason = request.dropped("optimizer")
    if request.options.optimizer == "drop":
        reason = "--optimizer drop"
    elif not request.setup.holds_extra:
        reason = f"{request.setup.name} has no place for optimizer state"
    # Naming state that is keyed by index may build a model, so what is dropped is never named.
    if reason is not None:
        return False, Remarks({"optimizer": reason})
    state = reader.named()
    if reader.by_index or reader.form is None:
        return False, Remarks(unresolved=[_unnamed(reader)])
    notes = []
    if reader.order:
        notes.append(f"optimizer order: {reader.order}")
    elif request.options.param_order is not None:
        notes.append("optimizer order: by name in the file, --param-order is not used")
    return bool(state.leaves or state.groups or state.rest), Remarks(notes=notes)


def optimizer_state(
    request: Request, sharding: OutputSharding, dropped: Mapping[str, str], kept: bool
) -> OptimizerState:
    """Return the state of all weights but the `dropped` ones, in the key form that was asked for.

    kept  it stays in the dict of the source, in its key form

    Raises PlanError CKM201 for an unknown key form, CKM207 for one that the setup cannot hold, CKM203
    for state that the optimizer's library could not load from it.
    """
    # Few plans have optimizer state; the modules that arrange it take long to import.
    from ckptmap.optim.loader_forms import for_loader
    from ckptmap.optim.select_state import select_state
    from ckptmap.planning.optimizer_groups import arrange_for_loader

    form, ckpt, options = _key_form(request, kept), request.ckpt, request.options
    selected = select_state(ckpt.optimizer_reader.named(), ckpt, dropped, request.dropped)
    strangers = [
        Unresolved(
            f"optimizer.{fqn}",
            "its optimizer state belongs to no weight of the checkpoint",
            f"leave it behind with {advised(drop=f'optimizer.{fqn}')}, or all with --optimizer drop",
        )
        for fqn in selected.strangers
    ]
    optimizer, notes = arrange_for_loader(
        selected.optimizer, ckpt, request.setup, sharding, options
    )
    if form.whole or request.setup.filing is not None:  # the library's own loader will read it
        who = f"--optimizer-keys {form.name}" if form.whole else request.setup.name
        optimizer, more = for_loader(optimizer, form.whole, who)
        notes = [*notes, *more]
    remarks = Remarks(selected.dropped, strangers, notes)
    root = request.ckpt.roles.optimizer_root if kept else None
    root = ("optimizer",) if root is None else root
    return _by_path(form, optimizer, root, request.options, remarks)


def _by_path(
    form: KeyForm, optimizer: Optimizer, root: Path, options: Options, remarks: Remarks
) -> OptimizerState:
    tensors: list[StateTensor] = []
    values: dict[Path, PlainValue] = {}
    for path, leaf in [*form.write(optimizer), *optimizer.rest.items()]:
        if isinstance(leaf, LazyTensor):
            encoding = encoding_for(leaf, None, options)
            tensors.append(StateTensor((*root, *path), leaf, encoding))
        else:
            values[(*root, *path)] = leaf
    return OptimizerState(tensors, values, optimizer.same, remarks)


def _key_form(request: Request, kept: bool) -> KeyForm:
    name = request.setup.optimizer_keys or optimizer_keys(request, kept)
    form = next((form for form in key_forms() if form.name == name), None)
    if form is None:
        known = ", ".join(form.name for form in key_forms())
        raise PlanError(
            "CKM201",
            f"--optimizer-keys {name!r} is not a form of optimizer keys",
            f"choose one of {known}",
        )
    if form.whole and request.setup.sharded:
        raise PlanError(
            "CKM207",
            f"--optimizer-keys {name}: {request.setup.name} is cut over ranks, and state that is"
            " keyed by index can be written to one file of whole tensors only",
            "use --optimizer-keys fqn, which set_optimizer_state_dict takes",
        )
    return form


def _unnamed(reader: OptimizerReader) -> Unresolved:
    if reader.form is None:
        return Unresolved(
            "optimizer",
            reader.why or "its state has keys of no known form",
            "convert the weights alone with --optimizer drop",
        )
    return Unresolved(
        "optimizer",
        f"its state is keyed by parameter index, and the file does not name the parameters:"
        f" {reader.why}",
        f"{_first_way(reader)}, or give the names in order with --param-order FILE, or convert the weights"
        " alone with --optimizer drop",
    )


def _first_way(reader: OptimizerReader) -> str:
    """Return the easiest way to names: the model's config.json, and transformers to build its class."""
    if reader.config is None:
        return "give the model's config.json with --config-from PATH"
    if find_spec("transformers") is None:
        return f"pip install transformers, whose class {reader.config.name} names"
    return (
        f"the transformers class of {reader.config.name} has not these parameters: give the config.json"
        " of this model with --config-from PATH"
    )
