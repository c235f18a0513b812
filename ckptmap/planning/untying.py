"""A head that an adapter gives to a model whose output layer is its input embedding.

    base: model.embed_tokens.weight, tied    adapter: lm_head (LoRA, or trained as a whole)
      -> lm_head.weight of its own beside the embedding, tie_word_embeddings false in config.json

peft trains such a head, or an embedding, untied; what was trained is what is written. The head is
made of the base's embedding, which it was until then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmap.checkpoint import Checkpoint
from ckptmap.disk.files import whole

EMBEDDINGS = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "shared"})
HEADS = frozenset({"lm_head", "embed_out", "output", "proj_out", "decoder"})
TIED = "tie_word_embeddings"
_TOWER = "language_model."
_HEAD_OF = {"embed_tokens": "lm_head", "wte": "lm_head", "embed_in": "embed_out"}


@dataclass(frozen=True)
class Tied:
    """The embedding of a base that stores no head, and what a head of its own would be called;
    `head` is empty where it can have none: T5 and its kin compute otherwise without the tie."""

    embedding: str
    head: str


def tied_in(ckpt: Checkpoint) -> Tied | None:
    """None: the model has a head, or none at all, or no config.json says which."""
    stems = {fqn: stem(fqn) for fqn in ckpt if fqn.endswith(".weight")}
    embeddings = [fqn for fqn, name in stems.items() if name in EMBEDDINGS]
    config = _config(ckpt)
    if config is None or not _has_head(config) or not HEADS.isdisjoint(stems.values()):
        return None
    if len(embeddings) != 1:
        return None
    return Tied(embeddings[0], _head(embeddings[0], config))


def stem(fqn: str) -> str:
    """The last name of a weight's module."""
    return fqn.rpartition(".")[0].rpartition(".")[2]


def is_head(fqn: str) -> bool:
    return fqn.endswith(".weight") and stem(fqn) in HEADS


def _head(embedding: str, config: Mapping[str, Any]) -> str:
    name = _HEAD_OF.get(stem(embedding))
    if name is None or config.get("is_encoder_decoder"):
        return ""
    return f"{_TOWER if embedding.startswith(_TOWER) else ''}{name}.weight"


def _config(ckpt: Checkpoint) -> dict[str, Any] | None:
    try:
        config = json.loads(whole(Path(ckpt.index.files[0]).parent / "config.json").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return config if isinstance(config, dict) else None


def _has_head(config: Mapping[str, Any]) -> bool:
    """Does it give the model a head, tied to its embedding?"""
    said = config.get("architectures")
    names = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else config
    tied = config.get(TIED, inner.get(TIED, True))
    return tied is not False and any(not name.endswith("Model") for name in names)


def noted(untied: Mapping[str, str]) -> list[str]:
    return [
        f"{head} is a tensor of its own, no longer tied to {embedding}: {TIED} is false in the"
        " config.json that is written, and must be in the model that this is loaded into"
        for head, embedding in untied.items()
    ]
