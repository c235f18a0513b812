"""A live model matched with a checkpoint: what is done with each tensor, and what stands against it.

Every tensor gets one step, decided from headers alone; nothing is touched before all are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.errors import LoadError
from ckptmap.live.load.load_plan import LoadPlan
from ckptmap.live.model import aliases as shared_memory
from ckptmap.live.model import peft as peft_live
from ckptmap.live.model.reader import Reader
from ckptmap.live.model.report import Cast, Decoded, Encoded, Mismatch
from ckptmap.live.model.target import (
    INT8_CLASSES,
    NF4_CLASS,
    Target,
    device_for,
    fallback_device,
    held,
    is_nf4,
)
from ckptmap.live.quantized import (
    bnb as bnb_live,
)
from ckptmap.live.quantized import (
    int8 as int8_live,
)
from ckptmap.live.quantized import (
    int8_training as int8_trained,
)
from ckptmap.live.quantized import (
    nf4 as nf4_live,
)
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import ITEMSIZE, Box, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Choices:
    """What a caller may choose for weights.

    nf4       "torchao" or "bnb": whose class holds an NF4 weight
    rounding  of float32 into bfloat16: "nearest", or "stochastic" with `seed`
    """

    nf4: str = "torchao"
    rounding: str = "nearest"
    seed: int = 0


class Matcher:
    """Matches targets with the checkpoint and decides the step of each; reads no weight, save to
    compare two that are one tensor in the model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: Reader,
        targets: Sequence[Target],
        choices: Choices | None = None,
    ) -> None:
        self._choices = choices or Choices()
        self._checkpoint = checkpoint
        self._reader = reader
        self._targets = targets
        self._device = fallback_device(targets)
        self._plan = LoadPlan()

    def plan(self) -> LoadPlan:
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
            problem = _mismatch(target, source)
            if problem is not None:
                plan.mismatched.append(problem)
                plan.unfit.append(target)
                continue
            for other in names[1:]:
                self._compare(target, source, checkpoint[other])
            source.require_replicas(box for box, _ in held(target))
            target.refuse_lost_hooks()
            self._decide(target, source)
        self._compare_views(found)
        plan.unexpected = [name for name in checkpoint if name not in used]
        plan.refused = [f"{one.key} ({one.reason})" for one in checkpoint.refused]
        plan.left = peft_live.left_as_they_are(self._targets, found)
        plan.missing = [target for target in plan.missing if target not in plan.left]
        return plan

    def _decide(self, target: Target, source: LazyTensor) -> None:
        """The step that loads this tensor."""
        live_nf4, nf4 = is_nf4(target.local), source.encoding == "nf4"
        if (live_nf4 or nf4) and target.tensor.requires_grad:
            self._plan.trainable.append(target.fqn)
            return
        self._plan.targets.append(target)
        by_bnb = nf4 and (self._choices.nf4 == "bnb" or bnb_live.is_live(target))
        if by_bnb or bnb_live.live_state(target) is not None:
            self._load_bnb(target, source)
        elif nf4:
            self._load_nf4(target, source)
        elif live_nf4:
            self._quantize(target, source)
        elif int8_trained.is_trained(target.local):
            self._train_int8(target, source)
        elif int8_live.is_int8(source):
            self._load_int8(target, source)
        elif int8_live.is_live(target.local):
            self._quantize_int8(target, source)
        elif source.encoding == "dense":
            self._load_dense(target, source)
        else:
            self._decode(target, source, f"{source.encoding} has no live form here")

    # ------------------------------------------------------------------ one step each

    def _load_dense(self, target: Target, source: LazyTensor) -> None:
        self._note_cast(target, source)
        device = device_for(target, self._device)
        by_chance = self._choices.rounding == "stochastic"
        rounded = by_chance and (source.dtype, target.dtype) == ("float32", "bfloat16")

        def read(reader: Reader, box: Box, out: torch.Tensor) -> None:
            if rounded:
                reader.rounded(source, box, out, self._seed(target, box))
            else:
                reader.dense(source, box, out)

        def step(reader: Reader) -> None:
            _fill(target, device, lambda box, out: read(reader, box, out), reader)

        self._plan.steps.append(step)

    def _decode(self, target: Target, source: LazyTensor, reason: str) -> None:
        self._note_cast(target, source)
        dtype = source.dtype if is_nf4(target.local) else target.dtype
        numel = target.local.numel()
        share = numel / max(1, source.info.numel)
        dense, encoded = numel * ITEMSIZE[dtype], round(source.nbytes * share)
        self._plan.decoded.append(Decoded(target.fqn, reason, dense, encoded))
        device = device_for(target, self._device)

        def step(reader: Reader) -> None:
            _fill(target, device, lambda box, out: reader.decoded(source, box, out), reader)

        self._plan.steps.append(step)

    def _load_nf4(self, target: Target, source: LazyTensor) -> None:
        encoding: Any = source.encoding_
        rows = nf4_live.can_hold(target) or nf4_live.rows_of(target, source.info, encoding)
        if isinstance(rows, str):
            self._decode(target, source, rows)
            return
        self._put(target, source, rows, nf4_live.read_rows)

    def _seed(self, target: Target, box: Box) -> int:
        """Of one box of one tensor: replicas draw the same bits, all others independent ones."""
        text = f"ckptmap round|{self._choices.seed}|{target.fqn}|{box.offsets}|{box.sizes}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _load_bnb(self, target: Target, source: LazyTensor) -> None:
        reason = bnb_live.can_hold(target)
        if reason:
            raise bnb_live.refuse(target, reason)
        if bnb_live.keeps_codes(source, target):
            kind = getattr(bnb_live.live_state(target), "quant_type", "nf4")
            self._plan.encoded.append(Encoded(target.fqn, f"bnb-{kind}", 0, 0, source.nbytes))
        else:
            self._plan.quantized.append(target.fqn)
        device = device_for(target, self._device)

        def step(reader: Reader) -> None:
            with reader.meter.hold(source.nbytes, device):
                bnb_live.put(reader, source, target, device)

        self._plan.steps.append(step)

    def _load_int8(self, target: Target, source: LazyTensor) -> None:
        rows = int8_live.rows_of(target, source)
        if isinstance(rows, str):
            self._decode(target, source, rows)
            return
        self._plan.encoded.append(Encoded(target.fqn, "int8", 0, 0, rows.nbytes))
        self._plan.forms[target.fqn] = (INT8_CLASSES[rows.sharded], target.dtype)
        device = device_for(target, self._device)

        def step(reader: Reader) -> None:
            with reader.meter.hold(rows.nbytes, device):
                made = int8_live.read_rows(reader, source, rows, device)
                target.put(int8_live.computing_as(target.local, made))

        self._plan.steps.append(step)

    def _train_int8(self, target: Target, source: LazyTensor) -> None:
        scales = int8_trained.kept_scales(target, source)
        if scales is None:
            self._plan.quantized.append(target.fqn)
        else:
            self._plan.encoded.append(Encoded(target.fqn, "int8", 0, 0, target.local.numel()))
        self._plan.steps.append(lambda reader: int8_trained.fill(reader, source, target, scales))

    def _quantize_int8(self, target: Target, source: LazyTensor) -> None:
        self._plan.quantized.append(target.fqn)
        device = device_for(target, self._device)

        def step(reader: Reader) -> None:
            made = int8_live.quantize_rows(reader, source, target, device)
            target.put(int8_live.computing_as(target.local, made))

        self._plan.steps.append(step)

    def _quantize(self, target: Target, source: LazyTensor) -> None:
        info = TensorInfo(source.shape, target.dtype)
        encoding = nf4_live.encoding_for(info, source)
        rows = encoding if isinstance(encoding, str) else nf4_live.rows_of(target, info, encoding)
        if isinstance(rows, str):
            raise LoadError(
                "CKM504",
                f"model: {target.fqn} is NF4 but the checkpoint's values cannot be: {rows}",
                "make this weight dense before loading",
            )
        if not nf4_live.keeps_codes(source, rows):
            self._plan.quantized.append(target.fqn)
        self._put(target, source, rows, nf4_live.quantize_rows)

    def _put(
        self,
        target: Target,
        source: LazyTensor,
        rows: nf4_live.Rows,
        make: Callable[[Reader, LazyTensor, nf4_live.Rows, torch.device], torch.Tensor],
    ) -> None:
        stored, live = rows.stored.scaler_block_size, rows.live.scaler_block_size
        self._plan.forms[target.fqn] = (NF4_CLASS, rows.info.dtype)
        self._plan.encoded.append(Encoded(target.fqn, "nf4", stored, live, rows.nbytes))
        device = device_for(target, self._device)

        def step(reader: Reader) -> None:
            with reader.meter.hold(rows.nbytes, device):
                target.put(make(reader, source, rows, device))

        self._plan.steps.append(step)

    # ------------------------------------------------------------------ checks

    def _note_cast(self, target: Target, source: LazyTensor) -> None:
        if source.dtype != target.dtype:
            self._plan.cast.append(Cast(target.fqn, source.dtype, target.dtype))

    def _compare_views(self, found: Mapping[str, str]) -> None:
        """The same for parameters apart on one memory, as `b.weight.data = a.weight.data` makes
        them, or `.t()` or a slice of it: what is loaded last would be the value of both."""
        seen: dict[object, Target] = {}
        for target in self._plan.targets:
            place = _memory(target)
            first = target if place is None else seen.setdefault(place, target)
            if first is not target:
                one, other = (self._checkpoint[found[t.fqn]] for t in (first, target))
                self._compare(target, one, other)
        self._compare_parts([t for t in seen.values() if t.fqn not in self._plan.forms], found)

    def _compare_parts(self, targets: Sequence[Target], found: Mapping[str, str]) -> None:
        """Raise LoadError CKM208 where two that share some bytes differ in them."""
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

    def _compare(self, target: Target, first: LazyTensor, other: LazyTensor) -> None:
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


def _mismatch(target: Target, source: LazyTensor) -> Mismatch | None:
    """A difference that no cast bridges: shape, or floating against integer and the like."""
    import torch

    live = bnb_live.logical(target) or TensorInfo(tuple(target.tensor.shape), target.dtype)
    fits = torch.can_cast(source.torch_dtype, getattr(torch, live.dtype))
    if live.shape == source.shape and fits:
        return None
    return Mismatch(target.fqn, str(live), str(source.info))


def _memory(target: Target) -> object:
    """Where a dense tensor of this rank lies; None: nowhere that another could."""
    import torch

    local = target.local
    if target.is_flat or type(local) is not torch.Tensor or local.is_meta or not local.numel():
        return None
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _is_filled(local: torch.Tensor) -> bool:
    """Do its own bytes become the checkpoint's?"""
    return local.data_ptr() > 0 and not (_overlaps(local) or local.is_conj() or local.is_neg())


def _overlaps(local: torch.Tensor) -> bool:
    """Are some of its elements one in memory, as `expand` makes them? Each has a value of its own
    in the checkpoint."""
    steps = zip(local.shape, local.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in steps)


def _fill(
    target: Target, device: torch.device, read: Callable[[Any, torch.Tensor], None], reader: Reader
) -> None:
    """Fill this rank's part in place, or a new dense one where it is on meta, quantized or
    expanded."""
    import torch

    local = target.local
    replaced = local.is_meta or is_nf4(local) or int8_live.is_live(local) or _overlaps(local)
    if not replaced:
        for box, view in target.windows(local):
            read(box, view)
        return
    new = torch.empty(local.shape, dtype=target.tensor.dtype, device=device)
    with reader.meter.hold(new.numel() * new.element_size(), device):
        for box, view in target.windows(new):
            read(box, view)
        target.put(new)
