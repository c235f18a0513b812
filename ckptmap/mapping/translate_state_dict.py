"""A state dict in memory under the names of another scheme.

Tensors that are only renamed are the same objects; rearranged ones are new, contiguous, on the
device of their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    """The same tensors by the names, and in the shapes, of another scheme.

    to       `hf`, `auto`, `meta`, `llama/torchtune`, a mapping file
    config   the model's config: a dict, a transformers config, a path; None: sizes come from the
             shapes, where these tell them
    source   the scheme of the state dict; None: by its keys
    partial  True: keys may be missing, as in one rank's or one adapter's part

    DTensors stay on their mesh: those that are rearranged are gathered, one after the other, and
    cut again, so every rank must call it. Raises PlanError CKM603 to CKM610, 613, 614, 617.
    """
    given = as_config(config)
    infos = {key: info_of(tensor) for key, tensor in state_dict.items()}
    choice = choose(infos, to, source, given)
    found = translate(infos, choice.source, choice.target, given, complete=not partial)
    if found.unmapped:
        more = f" and {len(found.unmapped) - 1} more" if len(found.unmapped) > 1 else ""
        raise PlanError(
            "CKM609",
            f"{choice.text}: no rule knows {found.unmapped[0]}{more}",
            "leave them out, or add rules for them to a mapping file of your own",
        )
    return applied(found, state_dict)


def applied(
    resolution: Resolution, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a resolution makes of tensors. Raises PlanError CKM208 where a tensor that is left out
    as tied differs from the one that is kept."""
    import torch

    made = {name: _made(item, state_dict) for name, item in resolution.made.items()}
    for name, kept in resolution.tied.items():
        if made[name] is not made[kept] and not torch.equal(made[name], made[kept]):
            raise PlanError(
                "CKM208", f"{name} is tied to {kept}, and their values differ",
                "correct tie_word_embeddings in the config, or the values",
            )  # fmt: skip
        del made[name]
    return made


def _made(made: MappedTensor, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = state_dict[made.source] if made.source is not None else _put_together(made, state_dict)
    for text, inverse in made.ops:
        found = value_ops.parse_value_op(text).apply(found, inverse)
    return found


def _put_together(made: MappedTensor, state_dict: Mapping[str, Any]) -> torch.Tensor:
    sources = {key: state_dict[key] for key in made.sources}
    if any(hasattr(tensor, "device_mesh") for tensor in sources.values()):
        return _over_ranks(made, sources)
    for key, tensor in sources.items():
        if hasattr(tensor, "__tensor_flatten__"):
            raise _cannot(made, f"{key} is a {type(tensor).__name__}, whose elements it hides")
    return _rearranged(made, {key: tensor.detach() for key, tensor in sources.items()})


def _over_ranks(made: MappedTensor, sources: Mapping[str, Any]) -> torch.Tensor:
    """Gathered one after the other, rearranged, and cut as they were; every rank calls it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    first = next(iter(sources.values()))
    for key, tensor in sources.items():
        if not isinstance(tensor, DTensor) or tensor.device_mesh != first.device_mesh:
            raise _cannot(made, f"{key} does not lie on the mesh of {next(iter(sources))}")
        if tensor.placements != first.placements or any(p.is_partial() for p in tensor.placements):
            raise _cannot(made, f"{key} is placed as {tensor.placements}, not {first.placements}")
        if hasattr(tensor.to_local(), "__tensor_flatten__"):
            kind = type(tensor.to_local()).__name__
            raise _cannot(made, f"{key} is a DTensor of {kind}, whose elements it hides")
    for placement in first.placements:
        if placement.is_shard() and placement.dim >= len(made.info.shape):
            raise _cannot(made, f"{first.placements} cuts a dim that {made.info} has not")
    whole = {key: tensor.detach().full_tensor() for key, tensor in sources.items()}
    out = _rearranged(made, whole)
    return distribute_tensor(out, first.device_mesh, first.placements, src_data_rank=None)


def _cannot(made: MappedTensor, what: str) -> PlanError:
    return PlanError(
        "CKM610",
        f"{made.name} ({made.rule}): {what}: it cannot be rearranged here",
        "convert the saved checkpoint with --names, or gather it first where its elements are plain",
    )


def _rearranged(made: MappedTensor, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    import torch

    first = next(iter(sources.values()))
    fresh = torch.zeros if made.zeros is not None else torch.empty
    out: torch.Tensor = fresh(made.info.shape, dtype=first.dtype, device=first.device)
    infos = {key: info_of(tensor) for key, tensor in sources.items()}
    for piece in pieces_of(made, infos):
        _walk(out, piece.dst).copy_(_walk(sources[piece.source], piece.src))
    return out


def _walk(tensor: torch.Tensor, strided: StridedBox) -> torch.Tensor:
    """The elements of a strided, one dim an axis."""
    strides = tensor.stride()
    start = sum(at * step for at, step in zip(strided.offsets, strides, strict=True))
    steps = [strides[d] * s for d, s in zip(strided.dims, strided.steps, strict=True)]
    return tensor.as_strided(strided.sizes, steps, tensor.storage_offset() + start)
