"""Make the metadata of a GGUF file from the config.json of a model: the way back of `config_json`.

    "model_type": "llama"    ->  general.architecture = llama
    "hidden_size": 4096      ->  llama.embedding_length = u32 4096
    "rope_scaling": llama3   ->  the tensor rope_freqs.weight, f32 [head_dim / 2]

Source: llama.cpp, convert_hf_to_gguf.py (`set_gguf_parameters`, `generate_extra_tensors`) and
gguf-py/gguf/constants.py for the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import TypeGuard

from ckptmap.formats.gguf.config_json import (
    ARCHITECTURES,
    ASSUMED,
    LOCAL_BASE,
    NEEDED,
    SIZES,
    SOFTCAPS,
    YARN,
)
from ckptmap.formats.gguf.key_values import f32, text, u32
from ckptmap.formats.gguf.rope_factors import LLAMA, LONG, SHORT, llama3_factors

Config = Mapping[str, object]
ALSO: Mapping[str, str] = {"mistral": "llama", "mixtral": "llama"}
"""Model types that are an architecture of another name in GGUF."""
_OF_TYPE: Mapping[str, str] = {
    **{each.model_type: name for name, each in ARCHITECTURES.items()},
    **ALSO,
}
FLOATS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", *SOFTCAPS, *LOCAL_BASE)
OTHER_WORDS: Mapping[str, str] = {"num_experts": "num_local_experts"}
"""Key of a config -> the same in other releases of transformers."""
NEEDED_SIZES = (
    *NEEDED,
    "context_length",
    "feed_forward_length",
    "attention.layer_norm_rms_epsilon",
)
"""Keys without which llama.cpp loads none of these models (src/llama-model.cpp, `get_key`)."""
OF_EXPERTS, EXPERT_SIZES = (
    ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"),
    ("expert_count", "expert_used_count"),
)
WITHOUT_WINDOW = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe")
"""Architectures in which llama.cpp slides no window."""
MAX_U32 = 2**32 - 1
PART = "partial_rotary_factor"
TOLD_APART = "phi3"
"""Phi-4 has no sliding window and states one of 0, by which llama.cpp tells it from Phi-3."""


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says of a model.

    keys     key -> type and value
    factors  name -> values of the tensors of rotary factors, which are metadata in other libraries
    notes    what of the config has no key
    """

    keys: Mapping[str, bytes]
    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def architecture_of(config: Config) -> str:
    """Return the architecture in GGUF; "" where the config's model is not known here."""
    return _OF_TYPE.get(str(config.get("model_type")), "")


def model_types() -> list[str]:
    """Return the model types that have an architecture."""
    return sorted(_OF_TYPE)


def metadata_of(config: Config) -> ModelMetadata:
    """Return the metadata of a model that `architecture_of` knows."""
    name = architecture_of(config)
    config = _with_rope(config)
    named = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    keys = {
        "general.architecture": text(name),
        "general.type": text("model"),
        "general.name": text(named or str(config.get("model_type"))),
    }
    keys |= {f"{name}.{key}": value for key, value in _sizes(name, config).items()}
    scaling, factors, notes = _rope_scaling(name, config)
    notes += _unstated(name, config) + _otherwise(name, config)
    keys |= {f"{name}.{key}": value for key, value in scaling.items()}
    return ModelMetadata(keys, factors, notes)


def _with_rope(config: Config) -> dict[str, object]:
    """Return the config with `rope_theta` and `rope_scaling`, which transformers 5 states in `rope_parameters`."""
    stated = config.get("rope_parameters")
    found = dict(config)
    if isinstance(stated, dict) and isinstance(stated.get("full_attention"), dict):
        local = stated.get("sliding_attention")
        if isinstance(local, dict):
            found.setdefault("rope_local_base_freq", local.get("rope_theta"))
        stated = stated["full_attention"]
    if isinstance(stated, dict):
        found.setdefault("rope_theta", stated.get("rope_theta"))
        if found.get("rope_theta") is None:
            found["rope_theta"] = stated.get("rope_theta")
        if stated.get("rope_type", "default") != "default" and not found.get("rope_scaling"):
            found["rope_scaling"] = stated
        if "partial_rotary_factor" in stated:
            found.setdefault("partial_rotary_factor", stated["partial_rotary_factor"])
    return found


def _sizes(name: str, config: Config) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for key, named in {**SIZES, **_own(name)}.items():
        value = _value(config, named)
        if key == "attention.sliding_window" and name in WITHOUT_WINDOW:
            continue
        if (number := _number(key, value)) is not None:
            found[key] = number
    if "attention.head_count" in found:
        found.setdefault("attention.head_count_kv", found["attention.head_count"])
    if "attention.key_length" in found:
        found["attention.value_length"] = found["attention.key_length"]
    if vocab := _int(config, "vocab_size"):
        found["vocab_size"] = u32(vocab)
    if rotary := _rotary(config):
        found["rope.dimension_count"] = u32(rotary)
    if name == TOLD_APART:
        found.setdefault("attention.sliding_window", u32(0))
        found |= _context(config)
    return found


def _unstated(name: str, config: Config) -> list[str]:
    """Return notes on sizes that the config lacks, or states in a way that GGUF has no number for."""
    found = _sizes(name, config)
    words = {named: key for key, named in {**SIZES, **_own(name)}.items()}
    words["vocab_size"] = "vocab_size"
    needed = (*NEEDED_SIZES, *(EXPERT_SIZES if str(config.get("model_type")) in OF_EXPERTS else ()))
    lacking = [
        f"{named} ({name}.{key})"
        for named, key in words.items()
        if key in needed and key not in found and _value(config, named) is None
    ]
    notes = []
    if lacking:
        notes.append(
            f"config.json: states no {', '.join(lacking)}, without which llama.cpp loads no {name}: give a config.json"
            " that does, --config-from PATH"
        )
    for named, key in words.items():
        value = _value(config, named)
        if value is not None and _number(key, value) is None:
            notes.append(_odd(named, value, f"{name}.{key}"))
    part = config.get(PART)
    if part is not None and not _is_part(part):
        notes.append(_odd(PART, part, f"{name}.rope.dimension_count"))
    return notes


def _otherwise(name: str, config: Config) -> list[str]:
    """Return notes on what llama.cpp computes otherwise than the config says, since GGUF has no key for it."""
    sizes = [named for key, named in SIZES.items() if key in NEEDED]
    known = all(_int(config, named) for named in sizes)
    assumed = dict(ASSUMED[name](dict(config))) if name in ASSUMED and known else {}
    slides = config.get("use_sliding_window", config.get("model_type") in ALSO)
    shorter = _int(config, "sliding_window") < _int(config, "max_position_embeddings")
    if name in WITHOUT_WINDOW and slides and shorter:
        assumed["sliding_window"] = None
    return [
        f"config.json: {key}: {config[key]!r:.40} has no key in GGUF for {name}: llama.cpp computes"
        f" {'without it' if value is None else f'with {value}'}"
        for key, value in assumed.items()
        if config.get(key) is not None and config[key] != value
    ]


def _odd(named: str, value: object, key: str) -> str:
    return (
        f"config.json: {named}: {value!r:.40} is no number that {key} can have, and is left out: give a config.json"
        " that states one, --config-from PATH"
    )


def _is_part(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value <= 1


def _number(key: str, value: object) -> bytes | None:
    """Return what a key says; None where GGUF has no number for what the config states."""
    if key in FLOATS:
        return f32(float(value)) if _is_number(value) else None
    return u32(value) if type(value) is int and 0 <= value <= MAX_U32 else None


def _value(config: Config, named: str) -> object:
    return config.get(named, config.get(OTHER_WORDS.get(named, "")))


def _own(name: str) -> Mapping[str, str]:
    mixed = {"expert_count": "num_local_experts"} if name == "llama" else {}
    return {**ARCHITECTURES[name].keys, **mixed}


def _rotary(config: Config) -> int:
    """Return how many numbers of a head are turned; 0 where the config does not say it."""
    hidden, heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    per_head = _int(config, "head_dim") or (hidden // heads if heads else 0)
    part = config.get(PART)
    return int(per_head * part) if _is_part(part) else per_head


def _rope_scaling(
    name: str, config: Config
) -> tuple[dict[str, bytes], dict[str, Sequence[float]], list[str]]:
    """Return keys, tensors of factors, and notes on a scaling that is not written: llama.cpp refuses factors
    beside an architecture that has none."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return {}, {}, []
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    factor = scaling.get("factor")
    if kind in ("default", "mrope"):
        return {}, {}, []
    if kind in ("linear", "yarn") and _is_number(factor):
        keys = {"rope.scaling.type": text(kind), "rope.scaling.factor": f32(float(factor))}
        return keys | _context(scaling) | (_yarn(scaling) if kind == "yarn" else {}), {}, []
    if kind == "llama3" and name == "llama" and (factors := _llama3(config, scaling)):
        return {}, {LLAMA: factors}, []
    if kind in ("longrope", "su") and name == TOLD_APART and (both := _longrope(config, scaling)):
        return _of_longrope(config, scaling), both, []
    return (
        {},
        {},
        [
            f"config.json: rope_scaling of type {kind[:40]!r} with such numbers has no keys in GGUF for {name} and is left"
            " out: the model will be wrong beyond its first context, perhaps before"
        ],
    )


def _context(scaling: Mapping[str, object]) -> dict[str, bytes]:
    before = _int(scaling, "original_max_position_embeddings")
    return {"rope.scaling.original_context_length": u32(before)} if before else {}


def _yarn(scaling: Mapping[str, object]) -> dict[str, bytes]:
    """Return the numbers of YaRN that a config states; llama.cpp has transformers' own for the others."""
    stated = {key: scaling.get(name) for key, name in YARN.items()}
    return {f"rope.scaling.{key}": f32(float(n)) for key, n in stated.items() if _is_number(n)}


def _llama3(config: Config, scaling: Mapping[str, object]) -> list[float]:
    """Return the factors; none where the numbers make no sense."""
    theta = config.get("rope_theta")
    numbers = [
        scaling.get(key, default)
        for key, default in (("factor", None), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
                             ("original_max_position_embeddings", 8192))
    ]  # fmt: skip
    numbers.append(10000.0 if theta is None else theta)
    factor, low, high, before, base = (float(n) if _is_number(n) else 0.0 for n in numbers)
    if min(factor, before, base) <= 0 or not low < high:
        return []
    return llama3_factors(base, _rotary(config), factor, low, high, before)


def _longrope(config: Config, scaling: Mapping[str, object]) -> dict[str, Sequence[float]]:
    """Return the factors of Phi-3 by tensor; none where they are not those of half of a head's rotary numbers."""
    found: dict[str, Sequence[float]] = {}
    for tensor, key in ((LONG, "long_factor"), (SHORT, "short_factor")):
        values = scaling.get(key)
        if not isinstance(values, list) or not all(map(_is_number, values)):
            return {}
        found[tensor] = [float(v) for v in values]
    whole = all(len(values) == _rotary(config) // 2 for values in found.values())
    return found if whole else {}


def _of_longrope(config: Config, scaling: Mapping[str, object]) -> dict[str, bytes]:
    """Return the context that the long factors begin beyond, and what attention is scaled by: llama.cpp does not
    compute it (`Phi3MiniModel.generate_extra_tensors`, `_compute_longrope_parameters` of transformers)."""
    name = "original_max_position_embeddings"
    before, most = (
        _int(config, name) or _int(scaling, name),
        _int(config, "max_position_embeddings"),
    )
    if not before:
        return {}
    stated, ratio = scaling.get("attention_factor"), most / before
    computed = sqrt(1 + log(ratio) / log(before)) if ratio > 1 < before else 1.0
    scale = float(stated) if _is_number(stated) else computed
    keys = {"rope.scaling.original_context_length": u32(before)}
    return keys | {"rope.scaling.attn_factor": f32(scale)}


def _int(config: Config, key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and 0 <= value <= MAX_U32 else 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38
