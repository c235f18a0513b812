"""Find the shape of a weight that quanto packed in groups: its file does not state it.

    fc.weight [out, in]  ->  codes [out * in / group, group]

quanto takes it from the model that it loads into. Here it follows from the bias of the layer ([out]), or, for the
layers of the usual decoders and the head of GPT-2 (`n_embd`), from the sizes in config.json; both must agree with the number of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptmap.protocols.file_systems import Mounts
from ckptmap.quantization.blockwise.group_checks import CONTRADICTORY, file_of, malformed
from ckptmap.quantization.blockwise.read_config import MAX_NBYTES
from ckptmap.storage.json_file import read_json
from ckptmap.tensors import StoredTensor

GROUPS = (128, 96, 64, 32)
"""The group sizes that quanto chooses (`QModuleMixin`, optimum-quanto 0.2), for rows of more than 128."""

_FROM_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_TO_HIDDEN = ("o_proj", "down_proj")
_OF_A_DECODER = ("model.layers.", "lm_head.")
"""Layers whose [in] or [out] is the hidden size of a decoder as Llama's; other towers of a model have their own."""


def config_beside(stored: StoredTensor, mounts: Mounts) -> Mapping[str, object]:
    """Return the config.json beside a tensor's file; empty where there is none."""
    try:
        config = read_json(
            Path(file_of(stored)).parent / "config.json", mounts, max_nbytes=MAX_NBYTES
        )
    except (OSError, ValueError):
        return {}
    if not isinstance(config, Mapping):
        return {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def shape_of(
    fqn: str, rows: int, width: int, bias: StoredTensor | None, config: Mapping[str, object]
) -> tuple[int, int] | None:
    """Return [out, in] of a matrix of codes [rows, width]; None: nothing tells it.

    Raise SourceError CKM115 where rows of codes are rows of the weight, but not those that are stated.
    """
    if width not in GROUPS:
        _require_stated(fqn, rows, width, bias, config)
        return rows, width
    if bias is not None:
        out = bias.info.numel
        return _checked(out, rows * width // out if out else 0, rows, width)
    stated = _stated(fqn.split(".")[-2:-1], config)
    return None if stated is None else _checked(*stated, rows, width)


def _require_stated(
    fqn: str, rows: int, width: int, bias: StoredTensor | None, config: Mapping[str, object]
) -> None:
    hidden, last = _size(config, "hidden_size"), fqn.split(".")[-2:-1]
    sides = {**dict.fromkeys(_FROM_HIDDEN, width), **dict.fromkeys(_TO_HIDDEN, rows)}
    side = sides.get(last[0]) if last and fqn.startswith(_OF_A_DECODER) else None
    if bias is not None and bias.info.numel != rows:
        stated = f"the bias of {fqn.rpartition('.')[0]} has {bias.info.numel} elements"
    elif hidden and side is not None and side != hidden:
        stated = f"config.json states hidden_size {hidden}"
    else:
        return
    raise malformed(
        fqn, f"{stated}, and its codes are of a weight [{rows}, {width}]", CONTRADICTORY
    )


def _checked(out: int, inner: int, rows: int, width: int) -> tuple[int, int] | None:
    """Return the shape if quanto makes such codes of it."""
    if min(out, inner) < 1 or out * inner != rows * width:
        return None
    return (out, inner) if _group(inner) == width else None


def _group(inner: int) -> int:
    """Return the elements of a row of codes, for weights with so many columns."""
    if inner <= GROUPS[0]:
        return inner
    return next((size for size in GROUPS if inner % size == 0), inner)


def _stated(module: list[str], config: Mapping[str, object]) -> tuple[int, int] | None:
    """Return [out, in] of a layer of a decoder as Llama's, by the last segment of its name."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head = _size(config, "head_dim") or (hidden // heads if heads else 0)
    inner, vocab = _size(config, "intermediate_size"), _size(config, "vocab_size")
    keys = (_size(config, "num_key_value_heads") or heads) * head
    shapes = {
        "q_proj": (heads * head, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, heads * head), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
        "down_proj": (hidden, inner), "lm_head": (vocab, hidden or _size(config, "n_embd")),
    }  # fmt: skip
    return shapes.get(module[0]) if module else None


def _size(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else 0
