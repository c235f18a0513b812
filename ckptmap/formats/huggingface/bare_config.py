"""Tell a config.json that describes a model from one that names its family alone.

{"model_type": "llama"}                       ->  bare: so it lies beside GGUF files of many repositories
{"model_type": "llama", "hidden_size": 64}    ->  a model's
"""

from __future__ import annotations

from collections.abc import Mapping

SIZES = frozenset({
    "hidden_size", "n_embd", "d_model", "dim", "num_hidden_layers", "num_layers", "n_layer", "n_layers",
})  # fmt: skip
"""Words of transformers for the width and the number of layers."""


def is_bare(config: Mapping[str, object]) -> bool:
    """Return whether a config states no size of a model, nor one of a model inside it."""
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    return SIZES.isdisjoint(config) and all(map(is_bare, inner))
