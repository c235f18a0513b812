"""A live model matched with a checkpoint: the step that fills each tensor, and what does not match.

Each step is decided from headers alone, and all are decided before the first tensor is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import LoadError
from ckptmap.live.load.load_plan import LoadPlan
from ckptmap.live.model import peft, shared_memory, value_range
from ckptmap.live.model.live_form import (
    Decode,
    LiveForm,
    LoadContext,
    LoadStep,
    NeedsFrozen,
    live_forms,
    logical_info,
)
from ckptmap.live.model.live_tensor import LiveTensor, fallback_device, local_boxes
from ckptmap.live.model.load_report import Mismatch
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.model.values_in_memory import expanded
from ckptmap.live.options import LoadOptions
from ckptmap.live.quantized.dense import DENSE, decode_step, fill_step
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, TensorInfo

if TYPE_CHECKING:
    import torch


class TensorMatcher:
    """Matches targets with the checkpoint and decides the step of each. It reads weights only to compare
    two that are one tensor in the model, and integers that a smaller dtype will hold."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: TensorReader,
        targets: Sequence[LiveTensor],
        options: LoadOptions | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._targets = targets
        self._context = LoadContext(options or LoadOptions(), fallback_device(targets))
        self._plan = LoadPlan()

    def plan(self) -> LoadPlan:
        """Return the plan: a step for every tensor that both sides have, and the names of all others."""
        plan, checkpoint, used = self._plan, self._checkpoint, set[str]()
        found: dict[str, str] = {}
        for target in self._targets:
            names = target.named_in(checkpoint)
            used.update(names)
            if not names:
                plan.missing.append(target)
                continue
            found[target.fqn] = names[0]
            source = checkpoint[names[0]]
            problem = _mismatch(target, source) or self._out_of_range(target, source)
            if problem is not None:
                plan.mismatched.append(problem)
                plan.unfit.append(target)
                continue
            for other in names[1:]:
                self._compare(target, source, checkpoint[other])
            source.require_replicas(box for box, _ in local_boxes(target))
            target.refuse_lost_hooks()
            self._decide(target, source)
        self._compare_views(found)
        plan.unexpected = [name for name in checkpoint if name not in used]
        plan.refused = [f"{one.key} ({one.reason})" for one in checkpoint.refused]
        plan.left = peft.targets_to_leave(self._targets, found)
        plan.missing = [target for target in plan.missing if target not in plan.left]
        return plan

    def _decide(self, target: LiveTensor, source: LazyTensor) -> None:
        """Ask every live form for the step that loads this tensor; a dense tensor has none."""
        answers = (form.step(target, source, self._context) for form in self._forms(target))
        answer = next((answer for answer in answers if answer is not None), None)
        match answer:
            case NeedsFrozen():
                self._plan.trainable.setdefault(answer.title, []).append(target.fqn)
            case Decode():
                self._decode(target, source, answer.reason)
            case LoadStep():
                self._plan.add(target, answer)
            case None:
                self._plan.add(target, fill_step(target, source, self._context))

    def _forms(self, target: LiveTensor) -> Sequence[LiveForm]:
        """Return the forms that may hold the weight, in the order in which they are asked."""
        return live_forms()

    def _decode(self, target: LiveTensor, source: LazyTensor, reason: str) -> None:
        self._plan.add(target, decode_step(target, source, self._context, reason))

    # ------------------------------------------------------------------ checks

    def _out_of_range(self, target: LiveTensor, source: LazyTensor) -> Mismatch | None:
        """Return the first integer that the model's dtype does not hold; None: it holds all. Every rank reads the
        whole tensor, so that all answer alike."""
        live = target.tensor.dtype
        if source.encoding != DENSE or not value_range.narrows(source.torch_dtype, live):
            return None
        most = max(1, self._reader.max_memory // (2 * source.info.itemsize))
        for part in row_major_boxes(Box.whole(source.shape), most):
            found = value_range.outside(source.read(part.offsets, part.sizes), live)
            if found is not None:
                info = TensorInfo(source.shape, target.dtype)
                return Mismatch(target.fqn, str(info), str(source.info), found)
        return None

    def _compare_views(self, found: Mapping[str, str]) -> None:
        """Compare the sources of parameters that are different objects on the same memory, as
        `b.weight.data = a.weight.data` makes them, or `.t()`, or a slice: the tensor that is loaded
        last would set the values of both."""
        seen: dict[object, LiveTensor] = {}
        for target in self._plan.targets:
            place = _memory(target)
            first = target if place is None else seen.setdefault(place, target)
            if first is not target:
                one, other = (self._checkpoint[found[t.fqn]] for t in (first, target))
                self._compare(target, one, other)
        self._compare_parts([t for t in seen.values() if t.fqn not in self._plan.becomes], found)

    def _compare_parts(self, targets: Sequence[LiveTensor], found: Mapping[str, str]) -> None:
        """Raise LoadError CKM208 where two tensors that share some bytes of memory differ in them."""
        filled = [target for target in targets if _is_filled(target.local)]
        for cluster in shared_memory.clusters(filled):
            sources = [(target, self._checkpoint[found[target.fqn]]) for target in cluster]
            pair = shared_memory.conflict(self._reader, sources)
            if pair is not None:
                raise LoadError(
                    "CKM208",
                    f"{self._checkpoint.path}: {pair[0].fqn} and {pair[1].fqn} differ where they"
                    " share memory in the model",
                    "untie them in the model, or drop one from the checkpoint",
                )

    def _compare(self, target: LiveTensor, first: LazyTensor, other: LazyTensor) -> None:
        """Raise LoadError CKM208 where two tensors that are one in the model differ."""
        if first.info == other.info and _one_storage(first, other):
            return
        same = first.info == other.info and all(
            self._reader.same(first, other, box) for box, _ in target.windows(target.local)
        )
        if not same:
            raise LoadError(
                "CKM208",
                f"{self._checkpoint.path}: {first.fqn} and {other.fqn} differ, "
                "but are one tensor in the model",
                "untie them in the model, or drop one from the checkpoint",
            )


def _one_storage(first: LazyTensor, other: LazyTensor) -> bool:
    shares = [[part.share for part in lazy.parts.values()] for lazy in (first, other)]
    return shares[0] == shares[1] and None not in shares[0]


def _mismatch(target: LiveTensor, source: LazyTensor) -> Mismatch | None:
    """Return a difference that no cast bridges: of shape, or floating against integer; None: they
    match."""
    import torch

    live = logical_info(target) or TensorInfo(tuple(target.tensor.shape), target.dtype)
    fits = torch.can_cast(source.torch_dtype, getattr(torch, live.dtype))
    if live.shape == source.shape and fits:
        return None
    return Mismatch(target.fqn, str(live), str(source.info))


def _memory(target: LiveTensor) -> object:
    """Return the address, shape, strides and dtype of a dense tensor of this rank; None: no other
    tensor can share its memory."""
    import torch

    local = target.local
    if target.is_flat or type(local) is not torch.Tensor or local.is_meta or not local.numel():
        return None
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _is_filled(local: torch.Tensor) -> bool:
    """Return whether the load writes the checkpoint's values into the tensor's own bytes."""
    return local.data_ptr() > 0 and not (expanded(local) or local.is_conj() or local.is_neg())
