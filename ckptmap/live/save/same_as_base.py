"""Which weights of a live model are those of a base, bit for bit, so that a save may leave them out.

    memory of this rank  =  digest that an earlier proof of the same files remembers     -> the base's
    else memory of this rank  =  what a load of the base would put there                 -> the base's
    else                                                                                 -> changed

The first save reads the base once, each rank its own boxes; later ones read memory alone. A weight of which
nothing can be proven counts as changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.live.model import loaded_bases
from ckptmap.live.model.base_names import as_loaded
from ckptmap.live.model.live_form import LoadContext, LoadStep, form_of, live_forms
from ckptmap.live.model.live_tensor import LiveTensor, fallback_device, like
from ckptmap.live.model.loaded_bases import LoadedBase, SameAsBase
from ckptmap.live.model.local_digest import is_same, local_digest
from ckptmap.live.model.tensor_reader import TensorReader, window
from ckptmap.live.options import MAX_MEMORY, LoadOptions
from ckptmap.quantization.blockwise.chunks import smaller
from ckptmap.storage.box_reader import row_major_boxes
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

COPIES = 4
"""Buffers of the size of a box that a comparison holds: of the file, decoded, cast, of the model."""


def changed(
    left: Sequence[LiveTensor],
    base: LoadedBase,
    opened: Checkpoint,
    model: torch.nn.Module,
    head: str,
) -> list[LiveTensor]:
    """Return the tensors whose values on this rank are not those of the base.

    opened  the base, as it is now
    head    the name of the model among several whose base it is; empty: of all"""
    found = []
    named: Checkpoint | None = None
    reader = TensorReader(opened.files, MAX_MEMORY)
    for target in left:
        now = local_digest(target)
        proof = loaded_bases.proof_of(target)
        if now and proof and proof.is_of(base, opened) and is_same(target, now, proof.digest):
            continue
        named = named or as_loaded(opened, base.names, base.drop, head, model, left)
        names = target.named_in(named)
        if now and names and _is_loaded(target, named[names[0]], reader):
            loaded_bases.prove(target, SameAsBase.of(base, opened, now))
        else:
            found.append(target)
    return found


def _is_loaded(target: LiveTensor, source: LazyTensor, reader: TensorReader) -> bool:
    """Return whether a load of `source` would leave the memory of this rank as it is."""
    form = form_of(target)
    if form is None:
        return tuple(target.tensor.shape) == tuple(source.shape) and all(
            _same_box(reader, source, box, view) for box, view in target.windows(target.local)
        )
    if form.takes_values and form.logical(target) is None:
        return False  # a load would write into the tensor itself
    return _is_quantized_so(target, source, reader)


def _same_box(reader: TensorReader, source: LazyTensor, box: Box, live: torch.Tensor) -> bool:
    import torch

    read = reader.dense if source.encoding == "dense" else reader.decoded
    itemsize = max(source.info.itemsize, live.element_size())
    for part in row_major_boxes(box, smaller(max(1, reader.max_memory // (COPIES * itemsize)))):
        values = torch.empty(part.sizes, dtype=live.dtype, device=live.device)
        read(source, part, values)
        mine = window(live, part.relative_to(box.offsets)).contiguous()
        a, b = (one.resolve_conj().resolve_neg().view(-1) for one in (values, mine))
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


def _is_quantized_so(target: LiveTensor, source: LazyTensor, reader: TensorReader) -> bool:
    """Load the weight once more, beside the model, and compare the bytes of both."""
    try:
        beside = _beside(target)
        context = LoadContext(LoadOptions(), fallback_device([target]))
        answers = (form.step(beside, source, context) for form in live_forms())
        step = next((answer for answer in answers if answer is not None), None)
        if not isinstance(step, LoadStep):
            return False
        reader.run(step.run)
    except Exception:  # whatever the library says: nothing is proven, and the weight is saved
        return False
    made, now = local_digest(beside), local_digest(target)
    return made is not None and now is not None and is_same(target, now, made)


class _Beside(LiveTensor):
    """A tensor in a copy of its module alone, where a load replaces it, and not in the model."""

    def put(self, local: torch.Tensor) -> None:
        module, name = self.places[0]
        _held(module, self.is_buffer)[name] = like(self.tensor, local)


def _held(module: torch.nn.Module, is_buffer: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = module.__dict__["_buffers" if is_buffer else "_parameters"]
    return found


def _beside(target: LiveTensor) -> LiveTensor:
    module, name = target.places[0]
    twin = object.__new__(type(module))  # FSDP2's classes refuse copy.copy
    own = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
    twin.__dict__ = module.__dict__ | own
    return _Beside(target.names, ((twin, name),), target.is_buffer, target.fsdp_param)
