"""State how Megatron core cuts each tensor over tensor-parallel ranks, by the tensor's name.

    linear_qkv, linear_fc1, embeddings, output_layer    rows     ColumnParallelLinear, and bias
    linear_proj, linear_fc2                             columns  RowParallelLinear, whole bias
    norms, position embeddings, biases of rows          whole

The rows of `linear_qkv` are sorted by query group, so the ranks' rows are concatenated. A gated
`linear_fc1` is [gate; up] on each rank: the gates of all ranks are concatenated, then the ups. Layers
are numbered within a pipeline stage. Source: megatron-core 0.16, tensor_parallel/layers.py,
transformer/attention.py and mlp.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ckptmap.sharding.tensor_parallel import WHOLE, Partition
from ckptmap.tensors import TensorInfo

LAYERS = re.compile(r"decoder\.layers\.(\d+)\.")
EXTRA_STATE = re.compile(r".*\._extra_state(/shard_.*)?")
"""Keys under which Transformer Engine keeps the FP8 scales of each rank. They are not weights."""

_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)"
    r"|decoder\.layers\.\d+\.self_attention\.linear_qkv\.(weight|bias)"
)
_FC1 = re.compile(r"(decoder\.layers\.\d+\.mlp\.)linear_fc1\.(weight|bias)")
_COLUMNS = re.compile(
    r"decoder\.layers\.\d+\.(self_attention\.linear_proj|mlp\.linear_fc2)\.weight"
)
_WHOLE = re.compile(
    r"embedding\.position_embeddings\.weight|decoder\.final_layernorm\.(weight|bias)"
    r"|decoder\.layers\.\d+\.(input_layernorm|pre_mlp_layernorm)\.(weight|bias)"
    r"|decoder\.layers\.\d+\.self_attention\.[qk]_layernorm\.(weight|bias)"
    r"|decoder\.layers\.\d+\.(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)"
    r"|decoder\.layers\.\d+\.(self_attention\.linear_proj|mlp\.linear_fc2)"
    r"\.(bias|post_layernorm\.(weight|bias))"
)


def partition(key: str, part: Callable[[str], TensorInfo | None]) -> Partition | None:
    """Return how the tensor `key` is cut; None if that is not known. `part(key)` returns the shape and
    dtype of a tensor on one rank, or None."""
    if _WHOLE.fullmatch(key):
        return WHOLE
    if _ROWS.fullmatch(key):
        return Partition(0)
    if _COLUMNS.fullmatch(key):
        return Partition(1)
    match = _FC1.fullmatch(key)
    if match is None:
        return None
    gated = _is_gated(part(f"{match[1]}linear_fc1.weight"), part(f"{match[1]}linear_fc2.weight"))
    return None if gated is None else Partition(0, sections=2 if gated else 1)


def _is_gated(fc1: TensorInfo | None, fc2: TensorInfo | None) -> bool | None:
    """Return True if `linear_fc1` has twice as many rows as `linear_fc2` has columns, False if as many;
    None for any other shapes."""
    if fc1 is None or fc2 is None or not fc1.shape or len(fc2.shape) != 2:
        return None
    return {2 * fc2.shape[1]: True, fc2.shape[1]: False}.get(fc1.shape[0])


def renumbered(key: str, offset: int) -> str:
    """Return the key in the whole model, for a pipeline stage that begins with layer `offset`.

    `decoder.layers.0.x`, offset 16 -> `decoder.layers.16.x`
    """
    match = LAYERS.match(key)
    if match is None:
        return key
    return f"decoder.layers.{int(match[1]) + offset}.{key[match.end() :]}"


def layer_count(keys: Mapping[str, object]) -> int:
    """Return the number of layers in a stage: the highest layer number, plus 1."""
    return 1 + max((int(m[1]) for m in map(LAYERS.match, keys) if m is not None), default=-1)
