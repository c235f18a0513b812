"""How Megatron core cuts its tensors over tensor-parallel ranks, and numbers layers: by name.

    linear_qkv, linear_fc1, embeddings, output_layer    rows     ColumnParallelLinear, and bias
    linear_proj, linear_fc2                             columns  RowParallelLinear, whole bias
    norms, position embeddings, biases of rows          whole

Query groups lie one after the other, so that the rows of `linear_qkv` are simply joined; a gated
`linear_fc1` is [gate; up] on each rank, which are joined one by one. Source: megatron-core 0.16,
tensor_parallel/layers.py, transformer/attention.py and mlp.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ckptmap.sharding.tensor_parallel import WHOLE, Partition
from ckptmap.tensors import TensorInfo

LAYERS = re.compile(r"decoder\.layers\.(\d+)\.")
EXTRA_STATE = re.compile(r".*\._extra_state(/shard_.*)?")
"""What Transformer Engine keeps of its FP8 scales, by rank; no weight."""

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
    """How the tensor `key` is cut, where `part` says what a rank holds; None: it is not known."""
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
    """Twice as many rows go out as come in again; None: neither that nor as many."""
    if fc1 is None or fc2 is None or not fc1.shape or len(fc2.shape) != 2:
        return None
    return {2 * fc2.shape[1]: True, fc2.shape[1]: False}.get(fc1.shape[0])


def renumbered(key: str, offset: int) -> str:
    """`decoder.layers.0.x` of a pipeline stage that begins with layer `offset` of the model."""
    match = LAYERS.match(key)
    if match is None:
        return key
    return f"decoder.layers.{int(match[1]) + offset}.{key[match.end() :]}"


def layer_count(keys: Mapping[str, object]) -> int:
    """How many layers a stage has."""
    return 1 + max((int(m[1]) for m in map(LAYERS.match, keys) if m is not None), default=-1)
