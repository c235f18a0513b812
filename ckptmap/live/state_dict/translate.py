"""translate(): a state dict in memory for another setup. No file is read or written.

state_dict, like=model   names, encodings and shards of a live model, DTensors resharded
state_dict, to="meta"    names of another scheme, wrappers off and on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptmap.core import argument_checks
from ckptmap.core.devices import tensors_on_cpu
from ckptmap.core.signatures import nearest_keyword
from ckptmap.core.sizes import Size
from ckptmap.errors import ArgumentError, CkptmapError, LoadError
from ckptmap.live.model.collective_errors import peer_groups
from ckptmap.live.model.find_targets import find_targets
from ckptmap.live.model.flat_params import is_fsdp1
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.live.model.load_report import LoadReport
from ckptmap.live.model.name_scheme import has_unknown_names, missing_count, schemes_for
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.state_dict.encode_state_dict import (
    DENSE,
    DTYPES,
    cast,
    decoded,
    quantized,
    quantizing_schemes,
)
from ckptmap.live.state_dict.fsdp1_state_dict import own_keys, shadows
from ckptmap.live.state_dict.live_checkpoint import WHERE, any_sharded, open_state_dict
from ckptmap.live.state_dict.load_state_dict import load_live
from ckptmap.mapping.model_config import as_config
from ckptmap.mapping.translate_state_dict import translate_names
from ckptmap.mapping.wrappers import strip_wrappers, wrap_prefix

if TYPE_CHECKING:
    import torch

    State = Mapping[str, torch.Tensor]

MAX_MEMORY = 64 << 20
"""Bytes of messages on each rank by default."""
PURPOSE = "translate"
EXTRA_STATE = "_extra_state"


class Translation(dict[str, "torch.Tensor"]):
    """The new state dict; `report` lists what was cast, decoded or quantized. None: only names
    changed."""

    report: LoadReport | None = None


@nearest_keyword
@tensors_on_cpu()
def translate(
    state_dict: State,
    *,
    like: torch.nn.Module | None = None,
    to: str | None = None,
    config: object = None,
    source: str | None = None,
    wrap: Sequence[str] = (),
    encoding: str | None = None,
    strict: bool = True,
    max_memory: Size = MAX_MEMORY,
) -> Translation:
    """Return the weights of a state dict by other names, in other encodings, in other shards.

    like        a live model, which stays as it is. The result is a state dict that its own
                `load_state_dict` takes: its names, dtypes, NF4 or int8 tensors, mesh and
                placements. The ranks that hold the model together call it together, each with its
                shards of any mesh, with everything, or with nothing. An FSDP1 model's state dict
                type decides between whole tensors and rows. DTensors of another mesh move from
                device to device, in messages of at most `max_memory` bytes (or `"64MiB"`) on each
                rank
    to          a scheme of names: `hf`, `auto`, `meta`, `llama/torchtune`, a mapping file. None:
                the names as they are, without wrapper segments
    config      the model's config, for `to`: a dict, a transformers config, a path
    source      the scheme of the state dict's names; None: recognised by its keys
    wrap        wrapper segments to add, outermost first: `("ddp", "compile")`
    encoding    "dense": decode quantized tensors; "bf16", "fp16", "fp32": decode and cast; "nf4",
                "int8": quantize the matrices that a conversion would, as torchao's tensors.
                None: as they are
    strict      True: names must match `like`; False: make what matches, `report` has the rest

    Raises LoadError as `ckptmap.load` does; PlanError CKM601 to CKM617 for names; RunError CKM510
    and CKM513 where the ranks' parts do not make whole tensors.
    """
    argument_checks.state_dict("state_dict", state_dict)
    max_memory = argument_checks.nbytes("max_memory", max_memory)
    if to is not None:
        argument_checks.path("to", to)
    if encoding is not None:
        argument_checks.choice("encoding", encoding, (DENSE, *DTYPES, *quantizing_schemes()))
    _refuse_nested(state_dict)
    if like is not None:
        argument_checks.module("like", like)
    else:
        named = _named(state_dict, to, config, source, encoding, max_memory)
        prefix = wrap_prefix(wrap)
        return Translation({prefix + name: tensor for name, tensor in named.items()})
    if to is not None or wrap or encoding:
        beside = {"to": to, "wrap": wrap, "encoding": encoding}
        given = [
            f"{name}={value!r}" for name, value in beside.items() if value not in (None, (), [])
        ]
        raise ArgumentError(
            "CKM516",
            f"{', '.join(given)}, expected nothing beside like=: the model decides names, wrappers"
            " and encodings",
            "leave out the others, or like=",
        )
    return _like(state_dict, like, config, source, strict, max_memory)


def _named(
    state_dict: State,
    to: str | None,
    config: object,
    source: str | None,
    encoding: str | None,
    max_memory: int,
) -> dict[str, torch.Tensor]:
    """Return the state dict by other names. Tensors are decoded before names change, which may
    rearrange elements, and quantized after. A module's extra state stays as it is."""
    plain = _plain(state_dict)
    extra = {name: value for name, value in plain.items() if name.endswith(EXTRA_STATE)}
    made = {name: tensor for name, tensor in plain.items() if name not in extra}
    if encoding == DENSE or encoding in DTYPES:
        peers = RankGroup.join(PURPOSE) if any_sharded(list(made.values())) else RankGroup()
        made = decoded(made, peers, max_memory)
    if to is not None:
        made = translate_names(made, to, config, source=source)
    if encoding in DTYPES:
        made = cast(made, encoding)
    if encoding in quantizing_schemes():
        made = quantized(made, encoding, max_memory)
    return made | extra


def _refuse_nested(state_dict: Mapping[str, object]) -> None:
    import torch

    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) and not key.endswith(EXTRA_STATE):
            raise LoadError(
                "CKM505",
                f"{WHERE}: {key!r} is a {type(value).__name__}, expected tensors by name",
                f"pass the dict of the weights alone, state_dict[{key!r}] if that is it",
            )


def _plain(state_dict: State) -> dict[str, torch.Tensor]:
    names = strip_wrappers(list(state_dict), WHERE)
    return {plain: state_dict[key] for key, plain in names.items()}


def _like(
    state_dict: State,
    model: torch.nn.Module,
    config: object,
    source: str | None,
    strict: bool,
    max_memory: int,
) -> Translation:
    targets, buffers_on_meta = find_targets(model)
    peers = joined(state_dict, model)
    with peers.together():
        made = shadows(model, targets)
        weights = renamed(state_dict, targets, config or getattr(model, "config", None), source)
    live = open_state_dict(weights, peers, "model")
    report = load_live(live, made, buffers_on_meta, strict=strict, max_memory=max_memory)
    keys = live_keys(model, targets)
    found = Translation()
    for shadow in made:
        result = shadow.result
        if result is not None:
            found |= {keys.get(name, name): result for name in shadow.names}
    found.report = report
    return found


def load_weights(
    model: torch.nn.Module, weights: State, targets: Sequence[LiveTensor], buffers_on_meta: Sequence[str],
    peers: RankGroup, config: object, max_memory: int,
) -> LoadReport:  # fmt: skip
    """Load what matches of the weights of a state dict, by the model's names, into a live model."""
    with peers.together():
        named = renamed(weights, targets, config or getattr(model, "config", None), None)
    live = open_state_dict(named, peers, "model")
    return load_live(live, targets, buffers_on_meta, strict=False, max_memory=max_memory)


def joined(state_dict: State, model: torch.nn.Module) -> RankGroup:
    """Return all ranks where the model or the state dict is cut over them, else this rank alone."""
    if peer_groups(model) or any_sharded(list(state_dict.values())):
        return RankGroup.join(PURPOSE)
    return RankGroup()


def live_keys(model: torch.nn.Module, targets: Sequence[LiveTensor]) -> dict[str, str]:
    """Return plain name -> the name in the model's own state dict."""
    if any(map(is_fsdp1, model.modules())):
        return own_keys(model, targets)
    keys = [key for key in model.state_dict() if not key.endswith(EXTRA_STATE)]
    return {plain: key for key, plain in strip_wrappers(keys, "model").items()}


def renamed(
    state_dict: State, targets: Sequence[LiveTensor], config: object, source: str | None
) -> dict[str, torch.Tensor]:
    """Return the state dict by the model's names, where its names are of another known scheme; else
    without wrapper segments. The matcher reports names that still do not match."""
    plain = _plain({k: v for k, v in state_dict.items() if not k.endswith(EXTRA_STATE)})
    lacking = missing_count(targets, plain)
    if not plain or not lacking or not has_unknown_names(targets, plain):
        return plain
    given = as_config(config)
    for name in schemes_for(targets, given):
        try:
            found = translate_names(plain, name, given, source=source)
        except CkptmapError:
            continue  # another scheme may be the one
        if missing_count(targets, found) < lacking:
            return found
    return plain
