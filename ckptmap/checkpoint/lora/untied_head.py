"""The output layer (head) that an adapter adds to a model whose head is tied to its embedding.

    base: model.embed_tokens.weight, tied    adapter: lm_head (LoRA, or trained as a whole)
      -> lm_head.weight of its own beside the embedding, tie_word_embeddings false in config.json

peft trains such a head, or an embedding, untied; what was trained is what is written. The head is
made of the base's embedding, which it was until then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.formats.huggingface.tied_embeddings import TIED, states_tied
from ckptmap.mapping.model_config import readable_config
from ckptmap.storage.lazy_tensor import LazyTensor

EMBEDDINGS = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "embed_in", "shared", "tokens_embed"}
    | {"tok_embeddings", "embeddings"}
)
HEADS = frozenset({"lm_head", "embed_out", "output", "proj_out", "decoder"})
_TOWER = "language_model."
_HEAD_OF = {
    "embed_tokens": "lm_head", "wte": "lm_head", "embed_in": "embed_out", "tokens_embed": "lm_head",
    "tok_embeddings": "decoder", "backbone.embeddings": "lm_head",
}  # fmt: skip
"""By the last name of the embedding's module, or by all of it. What is not here has no head that is
known: what would untie it is refused."""
_HEADLESS = ("Classification", "QuestionAnswering", "MultipleChoice")
"""In the names of transformers' classes whose output layer is none of words."""


@dataclass(frozen=True)
class Tied:
    """The embedding of a base that stores no head, and what a head of its own would be called;
    `head` is empty where it can have none: T5 and its kin compute otherwise without the tie."""

    embedding: str
    head: str


def tied_in(ckpt: Checkpoint, config_from: str | os.PathLike[str] | None = None) -> Tied | None:
    """Return the tied embedding of a base that stores no head.

    None: the base has a head, or its model has none, or no config.json tells. The config.json is
    that in `config_from`, a file or its directory, else the one beside the checkpoint.
    """
    config = config_of_base(ckpt, config_from)
    if config is None or not _has_head(config) or not _is_headless(ckpt):
        return None
    stems = {fqn: stem(fqn) for fqn in ckpt if fqn.endswith(".weight")}
    embeddings = [fqn for fqn, name in stems.items() if name in EMBEDDINGS]
    embeddings = embeddings or [fqn for fqn in stems if _has_vocabulary_rows(ckpt[fqn], config)]
    if len(embeddings) != 1:
        return None
    return Tied(embeddings[0], _head(embeddings[0], config))


def may_be_tied(ckpt: Checkpoint, fqn: str, config_from: str | os.PathLike[str] | None) -> bool:
    """Return whether a head could be tied to this embedding: the base has no head, and no config.json
    that tells."""
    return (
        stem(fqn) in EMBEDDINGS and _is_headless(ckpt) and config_of_base(ckpt, config_from) is None
    )


def _is_headless(ckpt: Checkpoint) -> bool:
    return not any(map(is_head, ckpt))


def _has_vocabulary_rows(lazy: LazyTensor, config: Mapping[str, object]) -> bool:
    """Return whether the tensor is a matrix with one row for each word of the vocabulary."""
    return len(lazy.shape) == 2 and lazy.shape[0] == _language_config(config).get("vocab_size")


def stem(fqn: str) -> str:
    """Return the last name of a weight's module."""
    return fqn.rpartition(".")[0].rpartition(".")[2]


def is_head(fqn: str) -> bool:
    return fqn.endswith(".weight") and stem(fqn) in HEADS


def _head(embedding: str, config: Mapping[str, object]) -> str:
    name = _HEAD_OF.get(embedding.removesuffix(".weight")) or _HEAD_OF.get(stem(embedding))
    if name is None or config.get("is_encoder_decoder"):
        return ""
    return f"{_TOWER if embedding.startswith(_TOWER) else ''}{name}.weight"


def config_of_base(
    ckpt: Checkpoint, config_from: str | os.PathLike[str] | None
) -> dict[str, object] | None:
    """Return the config.json asked for, or that beside the weights, or what a GGUF file says; None: none can be read."""
    if not ckpt.index.files:
        return None
    path = None if config_from is None else os.fspath(config_from)
    return readable_config(ckpt.index.files[0], ckpt.files.mounts, path)


def _has_head(config: Mapping[str, object]) -> bool:
    """Return whether the config gives the model a head that is tied to its embedding."""
    said = config.get("architectures")
    names = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    return states_tied(config) is not False and any(map(_names_head, names))


def _names_head(name: str) -> bool:
    """Return whether the class has an output layer over words, as `GPT2LMHeadModel` has."""
    bare = name.endswith("Model") and not name.endswith(("LMHeadModel", "DoubleHeadsModel"))
    return not bare and not any(word in name for word in _HEADLESS)


def _language_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config of the language model where a config has several."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def untied_notes(untied: Mapping[str, str]) -> list[str]:
    """Return a note for each head that is no longer tied to its embedding."""
    return [
        f"{head} is a tensor of its own, no longer tied to {embedding}: {TIED} is false in the"
        " config.json that is written, and must be in the model that this is loaded into"
        for head, embedding in untied.items()
    ]


def tied_change_note(embedding: str, other: str) -> str:
    """Return a note on a product that is added to two tied tensors."""
    return (
        f"{embedding}: the base ties {other} to it, which changes with it as in peft's"
        " merge_and_unload; peft trained the adapter with that as it was: to keep it, give as BASE"
        f" one that has it as a tensor of its own ({TIED} false)"
    )
