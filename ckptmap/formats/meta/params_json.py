"""Read the sizes of a model from `params.json`, which Meta and Mistral AI publish beside their weights.

    {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "multiple_of": 1024,
     "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256}

Mistral AI adds `head_dim` and `hidden_dim`. Llama 2 writes vocab_size -1, because only its tokenizer
states the size. Source: meta-llama/llama-models, models/llama3/args.py and model.py (`FeedForward`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptmap.errors import SourceError
from ckptmap.protocols.file_systems import Mounts
from ckptmap.storage.json_file import read_object
from ckptmap.storage.resource_limits import unreadable

PARAMS = "params.json"
MAX_NBYTES = 1 << 20
MAX_FACTOR = 1024.0
"""Upper bound of ffn_dim_multiplier. Known models have 1.0 to 1.5."""
_LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True)
class Params:
    """The sizes of a model; None where the file does not state one. `where` is the file."""

    where: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int | None
    vocab_size: int | None
    norm_eps: float | None
    rope_theta: float | None

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape that the tensor `key` of the whole model must have; None if the file does
        not state it."""
        name = _LAYER.sub("", key)
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int | None, ...]] = {
            "tok_embeddings.weight": (self.vocab_size, self.dim),
            "output.weight": (self.vocab_size, self.dim),
            "attention.wq.weight": (q, self.dim),
            "attention.wk.weight": (kv, self.dim),
            "attention.wv.weight": (kv, self.dim),
            "attention.wo.weight": (self.dim, q),
            "feed_forward.w1.weight": (self.hidden_dim, self.dim),
            "feed_forward.w2.weight": (self.dim, self.hidden_dim),
            "feed_forward.w3.weight": (self.hidden_dim, self.dim),
            "attention_norm.weight": (self.dim,),
            "ffn_norm.weight": (self.dim,),
            "norm.weight": (self.dim,),
        }
        sizes = shapes.get(name, (None,))
        return tuple(n for n in sizes if n is not None) if None not in sizes else None

    @property
    def config(self) -> dict[str, object]:
        """Return the sizes under the names of a transformers config.json, unknown ones left out.

        There is no model_type in it: the tensors' names tell the family of models.
        """
        sizes = {
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
        }
        return {name: value for name, value in sizes.items() if value is not None}


def read_params(file: Path, mounts: Mounts) -> Params | None:
    """Return the sizes; None if the file lacks dim, n_layers or n_heads, and so describes no model.

    Raise SourceError CKM101 if the file cannot be read, CKM103 if it is not a JSON object or if a size
    is not a positive integer.
    """
    where = str(file)
    values = _object(file, mounts)
    if not {"dim", "n_layers", "n_heads"} <= values.keys():
        return None
    dim, heads = _size(values, "dim", where), _size(values, "n_heads", where)
    hidden = values.get("hidden_dim")
    return Params(
        where,
        dim,
        _size(values, "n_layers", where),
        heads,
        _size(values, "n_kv_heads", where) if values.get("n_kv_heads") is not None else heads,
        _size(values, "head_dim", where) if values.get("head_dim") is not None else dim // heads,
        _hidden(values, dim) if hidden is None else _size(values, "hidden_dim", where),
        _size(values, "vocab_size", where) if values.get("vocab_size") not in (None, -1) else None,
        _number(values.get("norm_eps")),
        _number(values.get("rope_theta")),
    )


def _object(file: Path, mounts: Mounts) -> Mapping[str, object]:
    try:
        return read_object(file, mounts, max_nbytes=MAX_NBYTES, allow_nan=False)
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise SourceError(
            "CKM103", f"{file}: cannot be read as JSON: {error}", "download it again"
        ) from error


def _size(values: Mapping[str, object], name: str, where: str) -> int:
    value = values[name]
    if type(value) is not int or value <= 0:
        raise SourceError(
            "CKM103",
            f"{where}: {name}, expected a positive integer, found {value!r:.40}",
            "download it again",
        )
    return value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _hidden(values: Mapping[str, object], dim: int) -> int | None:
    """Return the hidden size of the feed-forward layers, by the formula of `FeedForward`:

    2/3 * 4 * dim, times ffn_dim_multiplier, rounded up to a multiple of multiple_of.

    Return None if the file has no usable multiple_of, or an impossible multiplier.
    """
    multiple, factor = values.get("multiple_of"), values.get("ffn_dim_multiplier")
    if type(multiple) is not int or multiple <= 0:
        return None
    hidden = 2 * 4 * dim // 3
    if factor is not None:
        number = _number(factor)
        if number is None or not 0 < number < MAX_FACTOR:  # Python's json reads NaN too
            return None
        hidden = int(number * hidden)
    return -(-hidden // multiple) * multiple
