"""Strip the segments that wrappers (DDP, torch.compile, FSDP1, activation checkpointing) put into FQNs.

    module.layers.0._orig_mod.fc.weight -> layers.0.fc.weight

Names change by path segment, never by substring. No user names an attribute `_orig_mod`,
`_fsdp_wrapped_module`, `_checkpoint_wrapped_module` or `_forward_module`, so these go wherever they stand. `module` is a
legal attribute: it goes only from the head of the path, and only where every key has it there. Two keys
that would become one are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from ckptmap.core.name_shapes import digit_masks
from ckptmap.errors import PlanError, SourceError

SEGMENTS: Mapping[str, str] = {
    "compile": "_orig_mod",
    "fsdp1": "_fsdp_wrapped_module",
    "checkpoint": "_checkpoint_wrapped_module",
    "ddp": "module",
}
"""Wrapper name, as `--wrap` takes it -> the segment it puts into names."""

BASE_LAYER, ADAPTER = ".base_layer.", ".lora_"
"""Parts of names that peft gives the weights of a layer that it has wrapped, and those of its adapter. They do not come
off: the weights of such a layer are another model's without its adapter."""
LIGHTNING = "_forward_module"
"""The attribute by which Lightning before 2.0, its strategy for DeepSpeed and Fabric hold the module that they wrap. They
take it off by themselves when they load, so `--wrap` does not put it on."""
ANYWHERE = frozenset({LIGHTNING, *SEGMENTS.values()} - {SEGMENTS["ddp"]})
HEAD = SEGMENTS["ddp"]


def strip_wrappers(keys: Collection[str], where: str = "checkpoint") -> dict[str, str]:
    """Return stored key -> plain FQN, in the given order. Raises SourceError CKM114 on a collision."""
    head, text = HEAD + ".", "\n".join({*digit_masks(keys)})  # of 100,000 names, some hundred
    if not (any(segment in text for segment in ANYWHERE) or next(iter(keys), "").startswith(head)):
        plain = dict(zip(keys, keys, strict=True))
        if len(plain) == len(keys) and "" not in plain:
            return plain  # most checkpoints: one search of all names shows that there is nothing to strip
    plain = {key: _strip_segments(key) if "_" in key else key for key in keys}
    while plain and all(fqn.startswith(head) for fqn in plain.values()):
        plain = {key: fqn[len(head) :] for key, fqn in plain.items()}
    result: dict[str, str] = {}
    key_of: dict[str, str] = {}
    for key, fqn in plain.items():
        if not fqn:
            raise SourceError(
                "CKM114",
                f"{where}: key {key!r} is empty, or consists of wrapper segments alone",
                "rename it and save the checkpoint again",
            )
        if fqn in key_of:
            raise SourceError(
                "CKM114",
                f"{where}: keys {key_of[fqn]!r} and {key!r} are both {fqn!r} without their"
                " wrapper segments",
                "rename or delete the one that the model does not have, and save the checkpoint again",
            )
        key_of[fqn] = key
        result[key] = fqn
    return result


def plain_path(module: str) -> str:
    """Return the name of a module without wrapper segments; a wrapper and what it holds have one name then."""
    return _strip_segments(f"{module}.").removeprefix(f"{HEAD}.").rstrip(".")


def _strip_segments(key: str) -> str:
    if not any(segment in key for segment in ANYWHERE):
        return key
    return ".".join([segment for segment in key.split(".") if segment not in ANYWHERE])


def describe_wrappers(names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the stripped patterns, each once, numbers replaced by N: `("layers.N._orig_mod.",)`."""
    seen: dict[str, None] = {}
    for key, fqn in names.items():
        if key != fqn:
            seen[_pattern(key.split("."), fqn.split("."))] = None
    return tuple(seen)


def _pattern(key: Sequence[str], fqn: Sequence[str]) -> str:
    """Return the key up to its last wrapper segment, that is without the tail it shares with the FQN."""
    tail = 0
    while tail < len(fqn) and key[-1 - tail] == fqn[-1 - tail]:
        tail += 1
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", ".".join(key[: len(key) - tail]) + ".")


def wrap_prefix(wrappers: Sequence[str]) -> str:
    """Return the prefix of wrappers: `("ddp", "compile")`, outermost first -> `"module._orig_mod."`."""
    unknown = [name for name in wrappers if name not in SEGMENTS]
    if unknown:
        raise PlanError(
            "CKM201",
            f"unknown wrapper {unknown[0]!r}, expected one of {', '.join(sorted(SEGMENTS))}",
            "for example --wrap ddp,compile",
        )
    return "".join(SEGMENTS[name] + "." for name in wrappers)
