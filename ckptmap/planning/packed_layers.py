"""Layers with packed codes that transformers fails to load, because it fills their `weight` first.

The initialization of some models reads `q_proj.weight`, `fc1.weight` and their siblings by name, and runs although
the file holds the layer; a layer whose codes are packed has no parameter `weight`. `filled_layers` lists the models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ckptmap.core.printable import advised_patterns
from ckptmap.errors import PlanError
from ckptmap.planning.filled_layers import EVERY, FILLS_EVERY, filled_names
from ckptmap.protocols import Encoding, Refusal
from ckptmap.protocols.encodings import Encoded
from ckptmap.tensors import TensorInfo

SIGLIP = frozenset({
    "siglip", "siglip_text_model", "siglip_vision_model",
    "siglip2", "siglip2_text_model", "siglip2_vision_model",
})  # fmt: skip
"""Their `model_type` in config.json, at its root or within: towers of other models, mostly."""
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"})
_OUT = ("out_proj", "o_proj")
"""What the last projection of an attention is called; a language model and a tower beside it differ in that."""
_MLP = frozenset({"fc1", "fc2"})
PADS_BIASES = {"pp_doclayout_v3": frozenset({"enc_score_head", "enc_bbox_head"})}
"""Model types -> layers with a bias that other layers share: transformers 5.23 pads the bias to the rows of the weight,
which are those of the codes where bitsandbytes packs two into a byte. It leaves such layers dense itself."""
TOWERS = {"vision_config": "vis", "audio_config": "audio", "backbone_config": "backbone"}
"""Sections of a config.json -> how a segment in the names of that model's weights begins: `vision_tower`, `visual`."""
LISTED = 5
"""Names that a hint lists."""


def require_initializable(
    encodings: Mapping[str, Encoded], config: Mapping[str, object], model_types: Collection[str]
) -> None:
    """Raise PlanError CKM203 where a layer that transformers fills would hold no parameter `weight`.

    config       the output's config.json; other libraries than compressed-tensors keep codes in `weight` once loaded
    model_types  its `model_type`, and those of the models that it consists of
    """
    settings, own = config.get("quantization_config"), config.get("model_type")
    if isinstance(settings, Mapping) and settings.get("load_in_4bit") is True:
        _require_unpadded(encodings, str(own))
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method != "compressed-tensors":
        return
    towers = dict(_towers(config))
    for model_type in sorted(model_types):
        whole = model_type in FILLS_EVERY and (model_type == own or model_type in towers)
        names = EVERY if whole else filled_names(model_type)
        packed = [
            fqn
            for fqn, (encoding, info) in (encodings.items() if names else ())
            if (model_type == own or not whole or _is_within(fqn, towers[model_type]))
            and _is_filled(fqn, names, encodings)
            and _is_packed(encoding, info)
        ]
        if packed:
            raise PlanError(
                "CKM203",
                f"{packed[0]}: cannot be {encodings[packed[0]][0].name} beside a config.json with {model_type}:"
                " transformers fills its weight before it loads it, which fails where the codes are packed",
                f"{_left(packed, model_type, whole and model_type != own)}choose --to hf-ct-fp8, which keeps codes in"
                " `weight`",
            )


def _require_unpadded(encodings: Mapping[str, Encoded], model_type: str) -> None:
    """Raise PlanError CKM203 for a layer of `PADS_BIASES` with packed codes."""
    names = PADS_BIASES.get(model_type, frozenset())
    for fqn, (encoding, _) in encodings.items() if names else ():
        if encoding.name != "dense" and not names.isdisjoint(fqn.split(".")):
            raise PlanError(
                "CKM203",
                f"{fqn}: cannot be {encoding.name} beside a config.json with {model_type}: other layers share it, and"
                " transformers pads its bias to the rows of the packed codes",
                f"choose --to hf-bnb-int8; or --to full-{encoding.name}, which ckptmap.load takes",
            )


def _towers(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (`model_type`, how a segment of its weights' names begins) of the vision and audio models within."""
    for section, start in TOWERS.items():
        inner = config.get(section)
        kind = inner.get("model_type") if isinstance(inner, Mapping) else None
        if isinstance(kind, str):
            yield kind, start


def _is_within(fqn: str, start: str) -> bool:
    return any(segment.startswith(start) for segment in fqn.split(".")[:-2])


def _left(packed: Collection[str], model_type: str, is_tower: bool) -> str:
    """Return the hint that leaves these weights as they are, the tower or all of their names; "" for many names."""
    fqn = next(iter(packed))
    if is_tower:
        path, starts = fqn.split("."), tuple(TOWERS.values())
        above = next(n for n, segment in enumerate(path) if segment.startswith(starts))
        return f"leave the tower as it is with {advised_patterns(no_encode='.'.join([*path[: above + 1], '*']))}, or "
    if model_type in SIGLIP:
        around = re.split(r"\.?\b(encoder|head)\b", fqn, maxsplit=1)
        return f"leave the tower as it is with {advised_patterns(no_encode=(around[0] or around[1]) + '.*')}, or "
    globs = dict.fromkeys(f"*.{'.'.join(each.split('.')[-2:])}" for each in packed)
    options = " ".join(advised_patterns(no_encode=glob) for glob in globs)
    return f"leave them as they are with {options}, or " if len(globs) <= LISTED else ""


def _is_filled(fqn: str, names: Collection[str], present: Collection[str]) -> bool:
    """Return whether transformers fills the weight, which has one of these names as its module's."""
    *path, last = fqn.split(".")
    if last != "weight" or not path:
        return False
    name = path[-1]
    if name.isdigit() and len(path) > 1:
        name = f"{path[-2]}[]"
    if name not in names:
        return names is EVERY
    stem = ".".join(path[:-1])
    if name in _ATTENTION:
        return _ends_as(stem, names, present)
    if name in _MLP and not _ATTENTION.isdisjoint(names):
        layer = stem.rpartition(".")[0]
        inside = (f"{layer}.self_attn", f"{layer}.attention")
        return any(_ends_as(each, names, present) for each in inside)
    return True


def _ends_as(attention: str, names: Collection[str], present: Collection[str]) -> bool:
    """Return whether an attention has a last projection of these names; one of a model without any, none at all."""
    if f"{attention}.in_proj_weight" in present:
        return True
    known = [out for out in _OUT if out in names]
    found = [out for out in _OUT if f"{attention}.{out}.weight" in present]
    return bool(set(known) & set(found)) if known else not found


def _is_packed(encoding: Encoding, info: TensorInfo) -> bool:
    """Return whether no part of the encoding is stored by the name of the weight itself."""
    parts = encoding.parts(info)
    return not isinstance(parts, Refusal) and "" not in parts
