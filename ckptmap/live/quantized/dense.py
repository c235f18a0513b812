"""Fills a dense live tensor: values are copied, cast, rounded, or decoded from a quantized weight.

    checkpoint [out, in] float32  ->  this rank's box  ->  live [out / world, in] bfloat16

A load takes this way where no LiveForm answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptmap.live.model.live_form import LoadContext, LoadStep, is_quantized
from ckptmap.live.model.live_tensor import LiveTensor, device_for
from ckptmap.live.model.load_report import CastTensor, Decoded
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.model.values_in_memory import expanded
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import ITEMSIZE, Box

if TYPE_CHECKING:
    import torch

DENSE = "dense"


def fill_step(target: LiveTensor, source: LazyTensor, context: LoadContext) -> LoadStep:
    """Return the step that fills `target` with the values of `source`."""
    if source.encoding != DENSE:
        return decode_step(target, source, context, f"{source.encoding} has no live form here")
    by_chance = context.options.rounding == "stochastic"
    rounds = by_chance and (source.dtype, target.dtype) == ("float32", "bfloat16")
    device = device_for(target, context.fallback)

    def read(reader: TensorReader, box: Box, out: torch.Tensor) -> None:
        if rounds:
            reader.rounded(source, box, out, _seed(context.options.seed, target, box))
        else:
            reader.dense(source, box, out)

    return LoadStep(lambda reader: _fill(reader, target, device, read), _cast(target, source))


def decode_step(
    target: LiveTensor, source: LazyTensor, context: LoadContext, reason: str
) -> LoadStep:
    """Return the step that decodes `source` into `target`; `reason` says why the codes cannot be kept."""
    numel = target.local.numel()
    share = numel / max(1, source.info.numel)
    encoded = round(source.nbytes * share)
    device = device_for(target, context.fallback)
    return LoadStep(
        lambda reader: _fill(
            reader, target, device, lambda reader, box, out: reader.decoded(source, box, out)
        ),
        _cast(target, source),
        decoded=Decoded(target.fqn, reason, numel * ITEMSIZE[target.dtype], encoded),
    )


def overwrite(reader: TensorReader, source: LazyTensor, target: LiveTensor) -> None:
    """Write this rank's boxes of `source`, of any encoding, into the live tensor."""
    read = reader.dense if source.encoding == DENSE else reader.decoded
    for box, view in target.windows(target.local):
        read(source, box, view)


def _cast(target: LiveTensor, source: LazyTensor) -> CastTensor | None:
    if source.dtype == target.dtype or _is_cast_back(target, source):
        return None
    return CastTensor(target.fqn, source.dtype, target.dtype)


def _is_cast_back(target: LiveTensor, source: LazyTensor) -> bool:
    """Return whether FSDP1 will cast the buffer back to the stored dtype before its first forward, and
    the live dtype holds every stored value until then."""
    holds_all = target.dtype in ("float32", "float64")
    wider = ITEMSIZE[target.dtype] > ITEMSIZE[source.dtype]
    return source.dtype == target.forward_dtype and holds_all and wider


def _seed(seed: int, target: LiveTensor, box: Box) -> int:
    """Return the seed of one box of one tensor: replicas draw the same bits, all other boxes
    independent ones."""
    text = f"ckptmap round|{seed}|{target.fqn}|{box.offsets}|{box.sizes}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _fill(
    reader: TensorReader,
    target: LiveTensor,
    device: torch.device,
    read: Callable[[TensorReader, Box, torch.Tensor], None],
) -> None:
    """Fill this rank's part in place; a new dense tensor takes its place where it is on meta,
    quantized or expanded."""
    import torch

    local = target.local
    if not (local.is_meta or is_quantized(target) or expanded(local)):
        for box, view in target.windows(local):
            read(reader, box, view)
        return
    new = torch.empty(local.shape, dtype=target.tensor.dtype, device=device)
    with reader.meter.hold(new.numel() * new.element_size(), device):
        for box, view in target.windows(new):
            read(reader, box, view)
        target.put(new)
