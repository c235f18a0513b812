"""Changes the encoding of a state dict in memory: decode, cast, or quantize into torchao's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptmap import registry
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.formatting import some
from ckptmap.errors import LoadError, RunError
from ckptmap.live.model.live_form import live_forms
from ckptmap.live.model.live_tensor import is_dtensor, like, shard_of
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.model.value_range import Casts, lost_values
from ckptmap.live.state_dict.live_checkpoint import (
    WHERE,
    StateDictTensor,
    any_sharded,
    open_state_dict,
)
from ckptmap.live.state_dict.load_state_dict import needs
from ckptmap.live.state_dict.memory_blocks import LiveReader
from ckptmap.live.state_dict.reshard import Exchange, ReshardTask
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box

if TYPE_CHECKING:
    import torch

    State = Mapping[str, torch.Tensor]

DENSE = "dense"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def quantizing_schemes() -> tuple[str, ...]:
    """Return the schemes by which a state dict in memory can be quantized."""
    return tuple(form.scheme for form in live_forms() if form.scheme)


@tensors_on_cpu()
def decoded(state: State, peers: RankGroup, max_memory: int) -> dict[str, torch.Tensor]:
    """Return the state dict with quantized tensors decoded into plain ones of their dtype, cut as they
    were. bitsandbytes' are decoded by the entries beside them. All ranks of `peers` call it."""
    import torch

    live = open_state_dict(state, peers, "model")
    checkpoint, units, made = live.checkpoint, list[ReshardTask](), dict[str, torch.Tensor]()
    reader = LiveReader(checkpoint.files, max_memory, live.memory)
    with torch.no_grad():
        for fqn in checkpoint:
            source, given = checkpoint[fqn], state.get(fqn)
            if source.encoding == DENSE and given is not None:
                made[fqn] = given
                continue
            unit, made[fqn] = _decoding(source, given)
            units.append(unit)
        Exchange(live, max_memory, torch.device("cpu")).run(units, reader)
    return made


def _decoding(source: LazyTensor, given: torch.Tensor | None) -> tuple[ReshardTask, torch.Tensor]:
    """Return the task that decodes one tensor into a new one, and the new tensor."""
    import torch

    whole = given is None or tuple(given.shape) != source.shape
    leaf = StateDictTensor((source.fqn,), (), False, None, None if whole else given)
    device = torch.device("cpu") if given is None else given.device
    shape = source.shape if whole else tuple(leaf.local.shape)
    new = torch.empty(shape, dtype=source.torch_dtype, device=device)
    places = [(Box.whole(source.shape), new)] if whole else leaf.windows(new)

    def step(reader: TensorReader) -> None:
        for box, view in places:
            reader.decoded(source, box, view)

    unit = ReshardTask(list(needs(source, [box for box, _ in places], device)), step)
    return unit, new if whole else like(given, new)


def cast(state: State, encoding: str) -> dict[str, torch.Tensor]:
    """Return the state dict with floating tensors cast by `torch.Tensor.to`. Raises RunError CKM309 for finite values
    of this rank that the dtype does not hold."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[encoding])
    made = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    casts = []
    for key, given in state.items():
        values, new = map(_values_of, (given, made[key]))
        if values is not None and new is not None:
            casts.append(Casts(key, values.dtype, new.dtype))
            casts[-1].look(new, values)
    if lost := lost_values(casts):
        raise RunError(
            "CKM309",
            f"{WHERE}: {some([one.name for one in lost])}: finite values are too large for {dtype}",
            "cast with encoding='bf16' or encoding='fp32'",
        )
    return made


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the plain tensor of this rank's values; None: it is of a class that keeps them otherwise."""
    import torch

    local = shard_of(tensor) if is_dtensor(tensor) else tensor.detach()
    return local if type(local) is torch.Tensor and not local.is_meta else None


@tensors_on_cpu()
def quantized(state: State, encoding: str, max_memory: int) -> dict[str, torch.Tensor]:
    """Return the state dict with those matrices as torchao's tensors that a conversion quantizes.

    Raises LoadError CKM504 for DTensors: only a model says which rows of a quantized weight a rank
    holds.
    """
    import torch

    if any_sharded(list(state.values())):
        raise LoadError(
            "CKM504",
            f"{WHERE}: its tensors are cut over ranks, and only a model says how to cut {encoding}",
            "pass the model that will take them: translate(state_dict, like=model)",
        )
    scheme = next(found for found in registry.schemes() if found.suffix == encoding)
    live = open_state_dict(state, RankGroup(), "model")
    made = dict(state)
    with torch.no_grad():
        reader = LiveReader(live.checkpoint.files, max_memory, live.memory)
        for fqn in live.checkpoint:
            source = live.checkpoint[fqn]
            if source.encoding == DENSE and scheme.target(fqn, source.info) is not None:
                made[fqn] = _quantized(reader, source, state[fqn], encoding)
    return made


def _quantized(
    reader: TensorReader, source: LazyTensor, given: torch.Tensor, encoding: str
) -> torch.Tensor:
    leaf = StateDictTensor((source.fqn,), (), False, None, given)
    form = next(form for form in live_forms() if form.scheme == encoding)
    made = form.quantized(reader, source, leaf)
    return given if made is None else made  # a conversion leaves such a shape dense, too
