"""Quantized moments of FSDP1's flat shards, saved as they are beside their decoded values.

A block of codes in a flat shard may span two parameters, so that a moment by FQN is stored decoded, in
float32. Quantizing that again gives other codes. To continue bit for bit a rank needs its own codes.
They are saved under its number, and are used if the rank holds the same elements again:

    extra.flat_state.rank0.<FQN>.exp_avg.form     ["adam8bit", 256, true, numel]
    extra.flat_state.rank0.<FQN>.exp_avg.codes    u8 [numel], with .scale and .qmap
    extra.flat_state.rank0.<FQN>.exp_avg.plain    of an entry too small for codes, in its dtype

FQN is that of the first parameter in the flat shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.tensor_reader import TensorReader
from ckptmap.live.optimizer import rank_settings
from ckptmap.live.optimizer.family import Codes, Moment, OptimizerParam, codes_of, local_of
from ckptmap.live.optimizer.local_state import ParamOwner, is_decoded
from ckptmap.optim.lowbit import PLAIN, QMAP
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import Box, Path

if TYPE_CHECKING:
    import torch

    from ckptmap.checkpoint.checkpoint import Checkpoint

KEY = "flat_state"
FORM = "form"


@dataclass(frozen=True)
class FlatCodes:
    """One saved entry: its form, [scheme, block size, signed, numel] or [dtype, numel], and its tensors."""

    form: Sequence[object]
    parts: Mapping[str, LazyTensor]


def exact_entries(owners: Sequence[ParamOwner]) -> dict[str, dict[str, dict[str, object]]]:
    """Return {FQN: {entry: {part: tensor}}} for all entries of this rank that are saved decoded."""
    entries: dict[str, dict[str, dict[str, object]]] = {}
    for owner in owners:
        for name, value in owner.part.family.entries(owner.part.state).items():
            if is_decoded(value, owner):
                entries.setdefault(owner.fqn, {})[name] = _parts(value)
    return entries


def _parts(value: Moment) -> dict[str, object]:
    import torch

    codes = codes_of(value)
    if codes is not None:
        parts = {name: tensor.reshape(-1) for name, tensor in codes.parts.items()}
        return {FORM: _coded_form(codes), **parts}
    assert isinstance(value, torch.Tensor)
    form: list[object] = [str(value.dtype).removeprefix("torch."), value.numel()]
    return {FORM: form, PLAIN: value}


def _coded_form(codes: Codes) -> list[object]:
    numel = 1
    for size in codes.shape:
        numel *= size
    return [codes.scheme, codes.block_size, codes.signed, numel]


# ------------------------------------------------------------------------------- read again


def saved_entries(
    checkpoint: Checkpoint, targets: Sequence[LiveTensor], rank: int
) -> dict[str, dict[str, FlatCodes]] | None:
    """Return {FQN: {entry: FlatCodes}} of this rank in the checkpoint; None: no rank has any, or this
    rank holds other elements than it did."""
    if not any(path[0] == KEY for path in checkpoint.plain):
        return None
    if not rank_settings.is_same_layout(checkpoint, targets):
        return None
    head = (KEY, f"rank{rank}")
    parts: dict[Path, dict[str, LazyTensor]] = {}
    for path, lazy in checkpoint.other.items():
        if path[:2] == head and len(path) == 5:
            parts.setdefault(path[2:4], {})[str(path[4])] = lazy
    entries_by_fqn: dict[str, dict[str, FlatCodes]] = {}
    for path, form in checkpoint.plain.items():
        if path[:2] == head and path[-1] == FORM and isinstance(form, Sequence):
            entries = entries_by_fqn.setdefault(str(path[2]), {})
            entries[str(path[3])] = FlatCodes(list(form), parts.get(path[2:4], {}))
    return entries_by_fqn


def fits(saved: Mapping[str, FlatCodes], part: OptimizerParam) -> bool:
    """Return whether the saved entries belong to a tensor of this size."""
    numel = local_of(part.param).numel()
    return bool(saved) and all(entry.form[-1] == numel for entry in saved.values())


def fill_entry(
    saved: FlatCodes, live: Moment, part: OptimizerParam, reader: TensorReader
) -> Moment | None:
    """Return the live entry filled with the saved one, in its form; None: the optimizer has another."""
    import torch

    codes = codes_of(live)
    if PLAIN in saved.parts:
        dtype: torch.dtype = getattr(torch, str(saved.form[0]))
        if codes is None and isinstance(live, torch.Tensor) and local_of(live).dtype == dtype:
            plain = live
        else:
            plain = part.family.plain(part, dtype)
        if plain.dtype != dtype:
            return None
        _copy(saved.parts[PLAIN], local_of(plain), reader)
        return plain
    if codes is None or list(saved.form) != _coded_form(codes):
        return None
    if any(name not in saved.parts for name in codes.parts):
        return None
    if codes.qmap is not None and not torch.equal(_read(saved.parts[QMAP], codes.qmap), codes.qmap):
        return None
    for name, tensor in codes.parts.items():
        if name != QMAP:
            _copy(saved.parts[name], tensor, reader)
    return live


def _read(lazy: LazyTensor, like: torch.Tensor) -> torch.Tensor:
    return lazy.read().to(like.device)


def _copy(lazy: LazyTensor, out: torch.Tensor, reader: TensorReader) -> None:
    reader.dense(lazy, Box.whole(lazy.shape), out.view(-1).view(lazy.shape))
