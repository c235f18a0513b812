"""Rename the tensors of a state dict in memory to the names of another scheme.

    {"layers.0.attention.wq.weight": [out, in]}  ->  {"model.layers.0.self_attn.q_proj.weight": [out, in]}

A tensor that is only renamed stays the same object. A tensor that is rearranged is a new contiguous
tensor on the device of its sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptmap.core.formatting import some
from ckptmap.core.strided_boxes import StridedBox
from ckptmap.errors import PlanError
from ckptmap.mapping import value_ops
from ckptmap.mapping.detect import choose
from ckptmap.mapping.model_config import as_config
from ckptmap.mapping.resolve import MappedTensor, Resolution
from ckptmap.mapping.scheme_to_scheme import pieces_of, translate
from ckptmap.storage.lazy_tensor import info_of

if TYPE_CHECKING:
    import torch


def translate_names(
    state_dict: Mapping[str, torch.Tensor],
    to: str,
    config: object = None,
    *,
    source: str | None = None,
    partial: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict under the names, and in the shapes, of another scheme.

    to       `hf`, `auto`, `meta`, `llama/torchtune`, or the path of a mapping file
    config   the model's config: a dict, a transformers config or a path; None: the shapes must
             determine every size
    source   the scheme of the state dict; None: it is recognized by its keys
    partial  True: keys may be missing, as in the state dict of one rank or of an adapter

    DTensors stay on their mesh. One that is rearranged is gathered and sharded again, one tensor at a
    time, so every rank must call this function. Raises PlanError CKM603 to CKM610, 613, 614, 617.
    """
    model_config = as_config(config)
    infos = {key: info_of(tensor) for key, tensor in state_dict.items()}
    choice = choose(infos, to, source, model_config)
    resolution = translate(infos, choice.source, choice.target, model_config, complete=not partial)
    if resolution.unmapped:
        raise PlanError(
            "CKM609",
            f"{choice.text}: no rule matches {some(resolution.unmapped, 1)}",
            "leave them out, or add rules for them to a mapping file of your own",
        )
    return applied(resolution, state_dict)


def applied(
    resolution: Resolution, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors that a resolution makes of a state dict.

    Raises PlanError CKM208 where a tensor is left out as tied and differs from the one it is tied to.
    """
    import torch

    tensors = {name: _map_tensor(mapped, state_dict) for name, mapped in resolution.targets.items()}
    for name, kept in resolution.tied.items():
        if tensors[name] is not tensors[kept] and not torch.equal(tensors[name], tensors[kept]):
            raise PlanError(
                "CKM208", f"{name} is tied to {kept}, and their values differ",
                "correct tie_word_embeddings in the config, or make the values equal",
            )  # fmt: skip
        del tensors[name]
    return tensors


def _map_tensor(mapped: MappedTensor, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = (
        state_dict[mapped.source] if mapped.source is not None else _rearrange(mapped, state_dict)
    )
    for text, inverse in mapped.ops:
        tensor = value_ops.parse_value_op(text).apply(tensor, inverse)
    return tensor


def _rearrange(mapped: MappedTensor, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    sources = {key: state_dict[key] for key in mapped.sources}
    if any(hasattr(tensor, "device_mesh") for tensor in sources.values()):
        return _rearrange_dtensor(mapped, sources)
    for key, tensor in sources.items():
        if hasattr(tensor, "__tensor_flatten__"):
            raise _cannot_rearrange(
                mapped, f"{key} is a {type(tensor).__name__}, which hides its elements"
            )
    return _assemble(mapped, {key: tensor.detach() for key, tensor in sources.items()})


def _rearrange_dtensor(mapped: MappedTensor, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Gather DTensors one after the other, rearrange them, and shard the result as they were.

    Every rank must call this: gathering is collective.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    first = next(tensor for tensor in sources.values() if isinstance(tensor, DTensor))
    gathered: dict[str, torch.Tensor] = {}
    for key, tensor in sources.items():
        if not isinstance(tensor, DTensor) or tensor.device_mesh != first.device_mesh:
            raise _cannot_rearrange(
                mapped, f"{key} is not on the same device mesh as the other sources"
            )
        if tensor.placements != first.placements or any(p.is_partial() for p in tensor.placements):
            raise _cannot_rearrange(
                mapped, f"{key} is placed as {tensor.placements}, not {first.placements}"
            )
        if hasattr(tensor.to_local(), "__tensor_flatten__"):
            kind = type(tensor.to_local()).__name__
            raise _cannot_rearrange(
                mapped, f"{key} is a DTensor of {kind}, which hides its elements"
            )
    for placement in first.placements:
        dim = getattr(placement, "dim", None)
        if isinstance(dim, int) and dim >= len(mapped.info.shape):
            raise _cannot_rearrange(
                mapped, f"{first.placements} shards a dim that {mapped.info} does not have"
            )
    for key, tensor in sources.items():
        local = tensor.detach()
        assert isinstance(local, DTensor), "checked above"
        gathered[key] = local.full_tensor()
    out = _assemble(mapped, gathered)
    return distribute_tensor(out, first.device_mesh, first.placements, src_data_rank=None)


def _cannot_rearrange(mapped: MappedTensor, reason: str) -> PlanError:
    return PlanError(
        "CKM610",
        f"{mapped.name} ({mapped.rule}): {reason}, so it cannot be rearranged in memory",
        "convert the saved checkpoint with --names, or gather the tensor first if it is not quantized",
    )


def _assemble(mapped: MappedTensor, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    import torch

    first = next(iter(sources.values()))
    allocate = torch.zeros if mapped.zeros is not None else torch.empty
    out: torch.Tensor = allocate(mapped.info.shape, dtype=first.dtype, device=first.device)
    infos = {key: info_of(tensor) for key, tensor in sources.items()}
    for piece in pieces_of(mapped, infos):
        _walk(out, piece.dst).copy_(_walk(sources[piece.source], piece.src))
    return out


def _walk(tensor: torch.Tensor, strided: StridedBox) -> torch.Tensor:
    """Return a view of the elements of a strided box, with one dim for each of its axes."""
    strides = tensor.stride()
    start = sum(at * step for at, step in zip(strided.offsets, strides, strict=True))
    steps = [strides[d] * s for d, s in zip(strided.dims, strided.steps, strict=True)]
    return tensor.as_strided(strided.sizes, steps, tensor.storage_offset() + start)
