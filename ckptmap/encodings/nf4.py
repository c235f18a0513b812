"""NF4 as a scheme: how it is recognised, and which tensors it takes as a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmap.encodings.nf4_adopt import adopt_cut, adopt_whole, is_nf4, stored_groups
from ckptmap.encodings.nf4_encoding import DTYPES, NF4, default_encoding
from ckptmap.errors import SourceError
from ckptmap.protocols import Encoding, Group, Refusal
from ckptmap.tensors import Cut, Opaque, StoredTensor, TensorInfo

__all__ = ["NF4", "NF4Scheme"]

# Last module segments of embeddings, heads and routers, lower case: small, or read by index, or
# so close to the output that 4 bits cost accuracy. The segment must be equal: `gate_proj` is fine.
_KEPT = frozenset({
    "wte", "wpe", "shared", "relative_attention_bias",
    "lm_head", "head", "output", "score", "classifier", "decoder", "qa_outputs",
    "router", "gate", "shared_expert_gate",
})  # fmt: skip
_KEPT_WITHIN = ("embed", "norm", "lora_", "modules_to_save")


@dataclass(frozen=True)
class NF4Scheme:
    """Recognises NF4 in all its stored forms, and quantizes linear weights to it."""

    name = "nf4"
    suffix = "nf4"

    def group(
        self, stored: Mapping[str, StoredTensor], records: Mapping[str, Mapping[str, Any]]
    ) -> list[tuple[Group, Sequence[str]]]:
        """Raises SourceError CKM115 where a record's parts are missing or misshapen, or where
        five parts have no record."""
        return stored_groups(stored, records)

    def adopt(self, fqn: str, leaf: Opaque | Cut) -> Group | None:
        if isinstance(leaf, Opaque):
            return adopt_whole(fqn, leaf) if is_nf4(leaf) else None
        found = [is_nf4(piece) for _, piece in leaf.pieces]
        if not any(found):
            return None
        if not all(found):
            raise SourceError(
                "CKM115",
                f"{fqn}: only {sum(found)} of {len(found)} ranks hold an NF4Tensor",
                "these ranks are not of one save",
            )
        return adopt_cut(fqn, leaf)

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """The default choice: weights of linear layers.

        2-D bfloat16, float16 or float32 of a multiple of 64 elements, named `weight`, of a module
        that is no embedding, head or router by its last name (`lm_head`, `output`, `gate`, ...,
        whole names only), and with no `embed`, `norm`, `lora_` or `modules_to_save` in any
        segment of its path. Upper and lower case are the same.
        """
        *path, last = fqn.lower().split(".")
        if last != "weight" or len(info.shape) != 2 or info.dtype not in DTYPES:
            return None
        if path and path[-1] in _KEPT:
            return None
        if any(kept in segment for segment in path for kept in _KEPT_WITHIN):
            return None
        encoding = self.encoding(info)
        return None if isinstance(encoding, Refusal) else encoding

    def encoding(self, info: TensorInfo) -> Encoding | Refusal:
        """The forced choice (`--encode`), whatever the name: the encoding, or why there is none."""
        encoding = default_encoding(info)
        parts = encoding.parts(info)
        return parts if isinstance(parts, Refusal) else encoding
