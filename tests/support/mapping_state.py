"""State dicts of the tiny models under every scheme, moved by resolutions without the spine.

`moved` reads what a resolution says with torch's own strided views, so that these tests do not rest
on the code that moves bytes; `tests/mapping/test_convert.py` runs that on files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptmap.core.strided_boxes import StridedBox
from ckptmap.mapping.catalog import CatalogEntry, available
from ckptmap.mapping.resolve import MappedTensor, Resolution
from ckptmap.mapping.rules import HUB, NamingScheme
from ckptmap.mapping.scheme_to_scheme import translate
from ckptmap.tensors import TensorInfo
from tests.golden.mappings.tables import ROOT, Row, read
from tests.support.mapping_configs import TINY, iota

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


@cache
def config_of(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / model / "config.json").read_text())
    return found


@cache
def golden(model: str, scheme: str) -> dict[str, Row]:
    return read(ROOT / model / f"{scheme}.tsv")


@cache
def hub_state(model: str) -> State:
    """The numbers that all tables of a model hold, under the hub's names."""
    return dict(iota({key: row.shape for key, row in golden(model, HUB).items()}))


@cache
def entry_of(model: str, scheme: str) -> CatalogEntry:
    """The shipped file of a scheme (`meta`, `torchtitan@2026-06`) for a model."""
    kind = TINY[model].config["model_type"]
    name, _, era = scheme.partition("@")
    found = [e for e in available() if (e.name, e.era) == (name, era) and kind in e.models]
    assert len(found) == 1, [entry.title for entry in found]
    return found[0]


@cache
def state_of(model: str, scheme: str) -> State:
    """A scheme's state dict, by the shipped mapping."""
    if scheme == HUB:
        return hub_state(model)
    return translated(hub_state(model), config_of(model), None, entry_of(model, scheme).load())


def translated(
    state: State,
    config: Mapping[str, Any] | None,
    source: NamingScheme | None,
    target: NamingScheme | None,
) -> State:
    """`state` under another scheme's names."""
    resolution = translate(infos(state), source, target, config)
    assert not resolution.unmapped
    return moved(resolution, state)


def infos(state: State) -> dict[str, TensorInfo]:
    return {
        key: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in state.items()
    }


def moved(resolution: Resolution, state: State) -> State:
    """Every tensor that is made, but for those that their scheme leaves out."""
    return {
        name: _made(made, state)
        for name, made in resolution.targets.items()
        if name not in resolution.tied
    }


def _made(made: MappedTensor, state: State) -> Tensor:
    import torch

    if made.source is not None:
        return _changed(state[made.source], made.ops)
    result = torch.zeros(made.info.shape, dtype=getattr(torch, made.info.dtype))
    for piece in made.pieces:
        _view(result, piece.dst).copy_(_view(state[piece.source], piece.src))
    return _changed(result, made.ops)


def _changed(values: Tensor, ops: Sequence[tuple[str, bool]]) -> Tensor:
    """The values after operations, of which shipped files have `add` only."""
    for text, inverse in ops:
        op, number, *_ = text.split()  # `add 1 float32`: the states are fp32 already
        assert op == "add", text
        values = values - float(number) if inverse else values + float(number)
    return values


def _view(tensor: Tensor, strided: StridedBox) -> Tensor:
    strides = tensor.contiguous().stride()
    start = sum(at * stride for at, stride in zip(strided.offsets, strides, strict=True))
    steps = [n * strides[dim] for n, dim in zip(strided.steps, strided.dims, strict=True)]
    return tensor.contiguous().as_strided(strided.sizes, steps, start)
