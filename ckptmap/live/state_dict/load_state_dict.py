"""Loads a state dict in memory into live tensors, as load() loads a checkpoint.

match the state dict with the targets -> list the boxes that each tensor needs -> exchange them batch
by batch -> dense boxes go straight to their tensor, all others through the steps of load()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.quantized_codes import Coded
from ckptmap.live.load.load_plan import Step
from ckptmap.live.load.mending_names import state_dict_hint
from ckptmap.live.load.tensor_matcher import TensorMatcher
from ckptmap.live.model.live_form import LiveForm, form_of, live_forms
from ckptmap.live.model.live_tensor import LiveTensor, device_for, fallback_device, like
from ckptmap.live.model.load_report import LoadReport, Mismatch
from ckptmap.live.optimizer.local_state import owners
from ckptmap.live.optimizer.param_order_check import says_others
from ckptmap.live.optimizer.state_loader import StateLoader
from ckptmap.live.optimizer.state_matcher import StateMatcher, StatePlan
from ckptmap.live.optimizer.unwrap import unwrapped
from ckptmap.live.state_dict.live_checkpoint import LiveStateDict
from ckptmap.live.state_dict.memory_blocks import LiveReader, LiveStored
from ckptmap.live.state_dict.reshard import Exchange, Need, ReshardTask
from ckptmap.protocols.offers import offers
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ShadowTensor(LiveTensor):
    """A new tensor of the class, mesh and placements of the model's; the model stays as it is."""

    made: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, target: LiveTensor) -> ShadowTensor:
        """Return the shadow of a target. Raises LoadError CKM505 for one that no state dict can hold."""
        form = form_of(target)
        if form is not None:
            form.require_in_state_dict(target)
        return cls(
            target.names, target.places, target.is_buffer, target.fsdp_param, adapted=target.adapted
        )

    @property
    def local(self) -> torch.Tensor:
        made = self.made.get("")
        found: torch.Tensor = super().local if made is None else made
        return found

    def refuse_lost_hooks(self) -> None:
        """Refuse nothing: the model's own tensor stays."""

    def put(self, local: torch.Tensor) -> None:
        self.made[""] = local

    @property
    def result(self) -> torch.Tensor | None:
        """The new tensor, on the model's mesh; None: none was made."""
        made = self.made.get("")
        return None if made is None else like(self.tensor, made)


@tensors_on_cpu()
def load_live(
    live: LiveStateDict,
    targets: Sequence[LiveTensor],
    buffers_on_meta: Sequence[str] = (),
    *,
    optimizer: object = None,
    order: Sequence[Sequence[str]] | None = None,
    weights: bool = True,
    strict: bool = True,
    precision: str = "keep",
    max_memory: int,
) -> LoadReport:
    """Fill the targets, and the optimizer's state, from a state dict of all ranks.

    order       FQNs of the optimizer's parameters by group, for state that is keyed by index
    weights     False: the state dict has optimizer state alone
    max_memory  bytes of messages at once, and of tensors that wait for a step, on each rank; a
                tensor that must be quantized as a whole may take more

    Raises as `ckptmap.load`, on all ranks, before anything is touched.
    """
    import torch

    checkpoint = live.checkpoint
    reader = LiveReader(checkpoint.files, max_memory, live.memory)
    device = fallback_device(targets)
    with torch.no_grad():
        exchange = Exchange(live, max_memory, device)
        scales = [Need(path, box, None, device) for path, box in _decisive_parts(live)]
        units: list[ReshardTask] = []
        with exchange.kept([ReshardTask(scales)]), live.peers.together():
            plan = _Matcher(checkpoint, reader, targets if weights else ()).plan()
            plan.refuse(
                checkpoint.path, strict, False, buffers_on_meta if weights else (),
                lambda: state_dict_hint(list(checkpoint), targets),
            )  # fmt: skip
            for target, step in zip(plan.targets, plan.steps, strict=True):
                source = checkpoint[target.named_in(checkpoint)[0]]
                units.append(_unit(target, source, step, device))
            state = _state(live, targets, optimizer, order, strict, precision)
            units += _state_units(state, device) if state is not None else ()
        exchange.run(units, reader)
    report = plan.report(reader, buffers_on_meta if weights else ())
    return replace(report, state=None if state is None else state.report())


# ------------------------------------------------------------------------------- weights


class _Matcher(TensorMatcher):
    """Keeps the class of the model's tensors: a dense weight gets decoded values, where `load` would
    replace it by a quantized tensor."""

    def _decide(self, target: LiveTensor, source: LazyTensor) -> None:
        if _kept_form(target) is not None or source.encoding == "dense":
            super()._decide(target, source)
            return
        self._decode(target, source, "the model's weight is dense")

    def _forms(self, target: LiveTensor) -> Sequence[LiveForm]:
        form = form_of(target)
        return super()._forms(target) if form is None else (form,)

    def _compare_parts(self, targets: Sequence[LiveTensor], found: Mapping[str, str]) -> None:
        """Compare nothing: no rank has all values."""

    def _out_of_range(self, target: LiveTensor, source: LazyTensor) -> Mismatch | None:
        """Return None: integers are looked at when they are copied."""


def _kept_form(target: LiveTensor) -> LiveForm | None:
    """Return the form whose codes a state dict keeps; None: the weight is filled as a dense one."""
    form = form_of(target)
    return form if form is not None and form.kept_by_state_dict else None


def _unit(target: LiveTensor, source: LazyTensor, step: Step, device: torch.device) -> ReshardTask:
    """Return the task of one tensor. Dense values go straight into a dense tensor, and are cast on
    arrival; in all other cases the boxes are kept for the step."""
    form, where = _kept_form(target), device_for(target, device)
    stored = source.parts.get("")
    if source.encoding == "dense" and form is None and isinstance(stored, LiveStored):
        return ReshardTask(list(_places(target, stored, where)))
    if isinstance(target, ShadowTensor) and form is None:
        target.put(_empty(target, where))  # a step that fills in place must not fill the model
    if form is not None and form.reads_whole(source):
        boxes = [Box.whole(source.shape)]
    else:
        boxes = [box for box, _ in target.windows(target.local)]
    return ReshardTask(list(needs(source, boxes, where)), step)


def _empty(target: LiveTensor, device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(target.local.shape, dtype=target.tensor.dtype, device=device)


def _places(target: LiveTensor, stored: LiveStored, device: torch.device) -> Iterator[Need]:
    if isinstance(target, ShadowTensor) or target.local.is_meta:
        target.put(_empty(target, device))
    for box, view in target.windows(target.local):
        yield Need(stored.path, box, view, device)


def needs(source: LazyTensor, boxes: Sequence[Box], device: torch.device) -> Iterator[Need]:
    """Yield the boxes of every stored part that these boxes of the logical tensor need."""
    whole = set[str]()
    encoding = source.encoding_
    own_scales = any(form.reads_own_scales(source) for form in live_forms())
    if not own_scales and offers(encoding, Coded) and encoding.grid(source.info) is not None:
        whole.update(encoding.scale_parts(source.info))
    for name, part in source.parts.items():
        if not isinstance(part, LiveStored):
            continue  # a part that this rank has in full
        for box in boxes:
            found = None if name in whole else encoding.part_box(source.info, name, box)
            cut = Box.whole(part.info.shape) if found is None else found
            yield Need(part.path, cut, None, device)


def _decisive_parts(live: LiveStateDict) -> Iterator[tuple[Path, Box]]:
    """Yield the stored tensors whose values decide the step of a weight, scales of int8 for one."""
    checkpoint = live.checkpoint
    for fqn in checkpoint:
        source = checkpoint[fqn]
        if source.encoding == "dense":
            continue
        for name in (name for form in live_forms() for name in form.decides_by(source)):
            part = source.parts[name]
            if isinstance(part, LiveStored):
                yield part.path, Box.whole(part.info.shape)


# ------------------------------------------------------------------------------- the optimizer


def _state(
    live: LiveStateDict,
    targets: Sequence[LiveTensor],
    optimizer: object,
    order: Sequence[Sequence[str]] | None,
    strict: bool,
    precision: str,
) -> StatePlan | None:
    if optimizer is None:
        return None
    checkpoint = live.checkpoint
    if order is not None and _is_by_position(checkpoint, targets, optimizer):
        checkpoint = checkpoint.with_optimizer_order(order)
    plan = StateMatcher(checkpoint, targets, optimizer, precision).plan()
    plan.refuse(checkpoint.path, strict)
    return plan


def _is_by_position(
    checkpoint: Checkpoint, targets: Sequence[LiveTensor], optimizer: object
) -> bool:
    """Return whether an index means a parameter of the live optimizer, as torch takes it."""
    if checkpoint.optimizer_by_index:
        return True
    return says_others(checkpoint, owners(unwrapped(optimizer), targets))


def _state_units(plan: StatePlan, device: torch.device) -> Iterator[ReshardTask]:
    for step in plan.steps:
        found = list(_state_needs(step, device)) if isinstance(step, StateLoader) else []
        yield ReshardTask(found, step)


def _state_needs(step: StateLoader, device: torch.device) -> Iterator[Need]:
    """Yield the boxes of a parameter's state: those of this rank for an entry of the parameter's shape,
    all of any other entry."""
    for (target, _), source in zip(step.owner.members, step.sources, strict=True):
        boxes = [box for box, _ in target.windows(target.local)]
        where = device_for(target, device)
        for lazy in source.values():
            if isinstance(lazy, LazyTensor):
                same = lazy.shape == tuple(target.tensor.shape)
                yield from needs(lazy, boxes if same else [Box.whole(lazy.shape)], where)
