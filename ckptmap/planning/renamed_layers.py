"""Layers that transformers renames or cuts while it loads a model, so that a library may not find their codes.

A checkpoint of EXAONE names a layer `transformer.h.0.mlp.c_fc_0`, the model `model.layers.0.mlp.gate_proj`; one of
nomic_bert holds `attn.Wqkv`, the model three layers. `formats.huggingface.loaded_names` lists the models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.loaded_names import CUT, FAILS_BESIDE, UNKNOWN
from ckptmap.protocols import Encoding
from ckptmap.protocols.encodings import Encoded
from ckptmap.protocols.offers import offers
from ckptmap.quantization.linear_weights import is_expert, is_linear_weight, is_wide
from ckptmap.tensors import TensorInfo

TAKE_ALL = frozenset({"bitsandbytes", "compressed-tensors"})
"""Libraries that put a layer of their own in the place of every linear layer but those that the config names, and fail
where the file holds dense values for it. transformers' own FP8 layer takes them."""

BY_MODULE = "bnb-int8"
"""The encoding whose codes transformers finds by the module that it has made, whatever it is called on disk."""


@runtime_checkable
class FindsByLoadedName(Protocol):
    """A scheme whose library looks up a weight by its name in the loaded model, not in the file."""

    by_loaded_name: bool


@runtime_checkable
class HasTarget(Protocol):
    """A scheme that says how it encodes a weight by default."""

    def target(self, fqn: str, info: TensorInfo) -> Encoding | None:
        """Return the encoding; None: the weight stays as it is."""


def require_found(
    encodings: Mapping[str, Encoded],
    schemes: Mapping[str, object],
    settings: object,
    model_types: Collection[str],
) -> None:
    """Raise PlanError CKM203 where transformers would not find what is encoded once the model is loaded.

    encodings    each weight's encoding and logical info, one of them not dense
    settings     the output's `quantization_config`; None: it has none
    model_types  `model_type` of config.json and of the models that it consists of
    """
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    cut = sorted((CUT | FAILS_BESIDE.get(str(method), frozenset())).intersection(model_types))
    renamed = sorted(UNKNOWN.intersection(model_types))
    if not cut and not renamed:
        return
    encoded = {fqn: e.name for fqn, (e, _) in encodings.items() if e.name != "dense"}
    fqn, name = next(iter(encoded.items()))
    if cut:
        raise PlanError(
            "CKM203",
            f"{fqn}: cannot be {name} beside a config.json: transformers cuts or joins layers of"
            f" {cut[0]} while loading, which fails with {name}",
            f"leave them as they are, --to hf or hf-bf16; or --to full-{name}, which ckptmap.load takes",
        )
    for fqn, name in encoded.items():
        if offers(schemes.get(name), FindsByLoadedName):
            raise PlanError(
                "CKM203",
                f"{fqn}: cannot be {name} beside a config.json: transformers renames the weights"
                f" of {renamed[0]} while loading, and would not find {name} of the names on disk",
                f"choose {_by_module(encodings, schemes.get(BY_MODULE))}--to full-{name}, which ckptmap.load takes",
            )
    for other, (encoding, info) in encodings.items():
        if method in TAKE_ALL and encoding.name == "dense" and _is_taken(other, info):
            raise PlanError(
                "CKM203",
                f"{other}: cannot stay dense beside {name} and a config.json: transformers renames the"
                f" weights of {renamed[0]} while loading, and would take the layer for {name}",
                f"choose --to full-{name}, which ckptmap.load takes",
            )


def _by_module(encodings: Mapping[str, Encoded], scheme: object) -> str:
    """Return the part of a hint that names bitsandbytes' int8; "" where it would be refused in its turn, because
    a layer that the library takes stays dense."""
    if not offers(scheme, HasTarget):
        return ""
    dense = (
        fqn
        for fqn, (encoding, info) in encodings.items()
        if _is_taken(fqn, info) and (encoding.name == "dense" or scheme.target(fqn, info) is None)
    )
    return "" if any(dense) else f"--to hf-{BY_MODULE}, which it finds by module; or "


def _is_taken(fqn: str, info: TensorInfo) -> bool:
    """Return whether the weight is, by its name, one of a layer in the model that a library would replace."""
    return is_linear_weight(fqn, info) and not is_expert(fqn) and not is_wide(fqn)
