"""A checkpoint whose names are of another scheme than the live model's, translated to the model's.

    model.layers.0.block_sparse_moe.experts.{0,1}.w2.weight      as transformers saves Mixtral
    -> model.layers.0.mlp.experts.down_proj                      as transformers 5 holds it

A translation is tried only where the checkpoint lacks names of the model and has others. The first
that has more of the model's names is taken, and the report says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.checkpoint.rename import renamed
from ckptmap.checkpoint.translate_names import translated, translated_by
from ckptmap.errors import CkptmapError
from ckptmap.live.model.live_form import form_of
from ckptmap.live.model.live_tensor import LiveTensor
from ckptmap.mapping.detect import MEMORY, SchemeChoice, choose, recognise
from ckptmap.mapping.disk_forms import memory_scheme_of
from ckptmap.mapping.model_config import as_config
from ckptmap.mapping.renaming import Renaming
from ckptmap.mapping.renamings_on_disk import renamings_on_disk
from ckptmap.mapping.rules import HUB

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint by the model's names.

    names     the schemes that were translated, "meta -> hf"; empty: none were
    unmapped  keys that no rule of the mapping knows
    """

    checkpoint: Checkpoint
    names: str = ""
    unmapped: tuple[str, ...] = ()


def by_model_names(
    checkpoint: Checkpoint, model: torch.nn.Module, targets: Sequence[LiveTensor]
) -> NamedCheckpoint:
    """Return the checkpoint by the model's names; the checkpoint itself where its names are the
    model's, or no scheme has more of them."""
    lacking = missing_count(targets, checkpoint)
    config = config_of(model)
    if not lacking:
        return _in_other_axes(checkpoint, targets, config) or NamedCheckpoint(checkpoint)
    if not has_unknown_names(targets, checkpoint):
        return NamedCheckpoint(checkpoint)
    names = dict.fromkeys(name for target in targets for name in target.known)
    ways = [{new: old for old, new in way.items()} for way in renamings_on_disk(names, config)]
    by_modules = [renamed(checkpoint, Renaming.of(rename=way), lenient=True) for way in ways]
    best = min(by_modules, key=partial(missing_count, targets), default=checkpoint)
    if missing_count(targets, best) < lacking:
        return NamedCheckpoint(best, f"{HUB} -> {MEMORY}")
    experts = memory_scheme_of(names, config)
    if experts is not None:
        try:
            joined = translated_by(checkpoint, SchemeChoice(None, experts), config)
        except CkptmapError:
            joined = checkpoint
        if missing_count(targets, joined) < lacking:
            return _named(joined)
    for scheme in schemes_for(targets, config):
        try:
            found = translated(checkpoint, scheme, config=config)
        except CkptmapError:
            continue  # another scheme may be the one
        if found.translation is not None and missing_count(targets, found) < lacking:
            return _named(found)
    return NamedCheckpoint(checkpoint)


def _named(found: Checkpoint) -> NamedCheckpoint:
    """Return a translated checkpoint, whose optimizer state goes by the new names."""
    how = found.translation
    assert how is not None, "it has just been translated"
    reader = found.optimizer_reader.of_weights(found.infos())
    return NamedCheckpoint(replace(found, optimizer_reader=reader), how.choice.text, how.unmapped)


def _in_other_axes(
    checkpoint: Checkpoint, targets: Sequence[LiveTensor], config: Mapping[str, object] | None
) -> NamedCheckpoint | None:
    """Return the checkpoint translated, where its names are the model's and its shapes those of another scheme, as nanoGPT's
    matrices of GPT-2; None: they are the model's, or no such scheme."""
    infos = checkpoint.infos()
    pairs = ((one, infos[name].shape) for one in targets for name in one.named_in(infos))
    # A quantized weight may have any shape, and bitsandbytes' that of the transpose.
    fit = (tuple(one.tensor.shape) == stored or form_of(one) is not None for one, stored in pairs)
    if config is None or all(fit):
        return None
    try:
        choice = choose(infos, HUB, None, config)
        if choice.source is None or choice.source.is_hub:
            return None
        found = translated_by(checkpoint, choice, config)
    except CkptmapError:
        return None
    return None if missing_count(targets, found) else _named(found)


def missing_count(targets: Sequence[LiveTensor], source: Collection[str]) -> int:
    """Return how many tensors of the model `source` does not have."""
    return sum(not target.named_in(source) for target in targets)


def has_unknown_names(targets: Sequence[LiveTensor], source: Collection[str]) -> bool:
    """Return whether `source` has names that no tensor of the model has."""
    known = {name for target in targets for name in target.known}
    return any(name not in known for name in source)


def schemes_for(
    targets: Sequence[LiveTensor], config: Mapping[str, object] | None
) -> Iterator[str]:
    """Yield the schemes that the model's names may follow: that of Hugging Face files, that of
    transformers in memory, and those that the names are recognised by."""
    yield HUB
    yield MEMORY
    wanted = sorted({name for target in targets for name in target.known})
    yield from (entry.title for entry in recognise(wanted, config))


def config_of(model: torch.nn.Module) -> dict[str, object] | None:
    """Return the config of the model inside its wrappers, transformers' or what torchtitan's says of sizes; None: it
    has neither."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "model_type") and hasattr(config, "to_dict"):
            return as_config(config)
        if type(config).__module__.startswith("torchtitan.models."):
            return _sizes_of_titan(config)
    return None


def _sizes_of_titan(config: Any) -> dict[str, object] | None:
    """Return the sizes that torchtitan's config of a decoder states, by the words of transformers. Source:
    torchtitan, models/common/attention.py: `n_kv_heads` is that of the fused layer, or of the attention."""
    try:
        layers, attention = config.layers, config.layers[0].attention
        heads, projections = attention.n_heads, attention.qkv_linear
        shared = [getattr(one, "n_kv_heads", None) for one in (projections, attention)]
        return {
            "hidden_size": config.dim,
            "vocab_size": config.vocab_size,
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": next(filter(None, shared), heads),
            "head_dim": projections.head_dim,
        }
    except (AttributeError, IndexError, TypeError):
        return None  # of another model, or release
