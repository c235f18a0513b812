"""The optimizer's part of a plan: is it carried, in which key form, which tensors and settings."""

from __future__ import annotations

from ckptmap.errors import PlanError
from ckptmap.optim.carrying import carried
from ckptmap.optim.reading import OptimizerReader
from ckptmap.optim.state import KeyForm, key_forms
from ckptmap.planning.encoding_choice import encoding_for
from ckptmap.planning.optimizer_groups import arranged
from ckptmap.planning.plan import Unresolved
from ckptmap.planning.request import Request
from ckptmap.planning.tensor_layout import LayoutBuilder
from ckptmap.storage.lazy_tensor import LazyTensor


def is_carried(draft: LayoutBuilder, asked: Request) -> bool:
    """Does optimizer state go along? Why it does not, or cannot, is put down in the draft."""
    reader = asked.ckpt.optimizer_reader
    if not reader.present:
        return False
    why = asked.dropped("optimizer")
    if asked.options.optimizer == "drop":
        why = "--optimizer drop"
    elif not asked.setup.holds_extra:
        why = f"{asked.setup.name} has no place for optimizer state"
    if why is not None:  # before anybody builds a model to name what is left behind
        draft.dropped["optimizer"] = why
        return False
    found = reader.named()
    if reader.by_index or reader.form is None:
        draft.unresolved.append(_unnamed(reader))
    else:
        if reader.order:
            draft.notes.append(f"optimizer order: {reader.order}")
        elif asked.options.param_order is not None:
            draft.notes.append("optimizer order: by name in the file, --param-order is not used")
        return bool(found.leaves or found.groups or found.rest)
    return False


def put(draft: LayoutBuilder, asked: Request) -> None:
    """State of the weights that are carried, in the key form that was asked for.

    Raises PlanError CKM201 or CKM207 for a key form that is none, or none of this setup's.
    """
    form, ckpt, options = _key_form(asked), asked.ckpt, asked.options
    found = carried(ckpt.optimizer_reader.named(), ckpt, draft.dropped, asked.dropped)
    draft.dropped.update(found.dropped)
    for fqn in found.strangers:
        draft.unresolved.append(
            Unresolved(
                f"optimizer.{fqn}",
                "its optimizer state belongs to no weight of the checkpoint",
                f"leave it behind with --drop 'optimizer.{fqn}', or all with --optimizer drop",
            )
        )
    optimizer, notes = arranged(found.optimizer, ckpt, asked.setup, draft.cutter, options)
    draft.notes += notes
    for path, value in [*form.write(optimizer), *optimizer.rest.items()]:
        if isinstance(value, LazyTensor):
            encoding = encoding_for(value, None, options)
            draft.tensor(value, "optimizer", ("optimizer", *path), encoding)
        else:
            draft.extra["optimizer", *path] = value
    for kept, other, hint in optimizer.same:
        draft.must_equal(kept, other, f"{kept.fqn} of {other.fqn}", hint)


def _key_form(asked: Request) -> KeyForm:
    name = asked.setup.optimizer_keys or asked.options.optimizer_keys
    form = next((form for form in key_forms() if form.name == name), None)
    if form is None:
        known = ", ".join(found.name for found in key_forms())
        raise PlanError(
            "CKM201", f"--optimizer-keys {name!r} is no key form", f"choose one of {known}"
        )
    if form.whole and asked.setup.sharded:
        raise PlanError(
            "CKM207",
            f"--optimizer-keys {name}: {asked.setup.name} is of several ranks, and"
            " state that is keyed by index holds in one file of whole tensors only",
            "use --optimizer-keys fqn, which set_optimizer_state_dict takes",
        )
    return form


def _unnamed(reader: OptimizerReader) -> Unresolved:
    if reader.form is None:
        return Unresolved(
            "optimizer",
            reader.why or "its state is keyed in no form that is known",
            "convert the weights alone with --optimizer drop",
        )
    return Unresolved(
        "optimizer",
        f"its state is keyed by parameter index, and the file does not say which is which:"
        f" {reader.why}",
        "give the names in order with --param-order FILE, or convert the weights alone with"
        " --optimizer drop",
    )
