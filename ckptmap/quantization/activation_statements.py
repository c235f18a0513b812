"""Compare what a config.json states of static scales of activations with those that are stored.

    "activation_scheme": "static"    and    no fc.activation_scale    ->  a note

The weights do not depend on them, so that nothing is refused; a library that quantizes activations would begin with
scales that nobody measured. Sources: `FineGrainedFP8Config` of transformers 5, `QuantizationArgs` of
compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptmap.core.quantized_codes import ScalesActivations
from ckptmap.protocols import Group
from ckptmap.protocols.file_systems import Mounts

_SCHEMES = {"static": True, "dynamic": False}


def activation_notes(groups: Mapping[str, Group], mounts: Mounts) -> Iterator[str]:
    """Yield a note on weights with another kind of scales of activations than config.json states."""
    scaled = {
        fqn: group
        for fqn, group in groups.items()
        if group.parts and isinstance(group.encoding, ScalesActivations)
    }
    if not scaled:
        return
    # Imported here: few checkpoints have such weights, and `inspect` of the others is not to wait.
    from ckptmap.quantization.blockwise.read_config import quantization_config

    config = quantization_config(next(iter(next(iter(scaled.values())).parts.values())), mounts)
    wrong: dict[str, list[str]] = {}
    for fqn, group in scaled.items():
        stated = _is_static(config, fqn.rpartition(".")[0])
        assert isinstance(group.encoding, ScalesActivations), "chosen above"
        stored = group.encoding.activation_keys(fqn)
        if stated is True and not stored:
            text = "config.json states static scales of activations, and none is stored"
            wrong.setdefault(text, []).append(fqn)
        elif stated is False and stored:
            text = f"config.json states no static scales of activations, and {_last(stored[0])} is stored"
            wrong.setdefault(text, []).append(fqn)
    for text, fqns in wrong.items():
        more = f" and {len(fqns) - 1} more" if len(fqns) > 1 else ""
        yield f"{fqns[0]}{more}: {text}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _is_static(config: Mapping[str, object], module: str) -> bool | None:
    """Return whether a config states static scales for the activations of a module; None: it does not tell."""
    method = config.get("quant_method")
    if method == "fp8":
        return _SCHEMES.get(str(config.get("activation_scheme")))
    if method != "compressed-tensors":
        return None
    from ckptmap.quantization.compressed_tensors.config_json import groups_said

    stated = {_of_group(group) for group in groups_said(config, module)}
    return stated.pop() if len(stated) == 1 else None


def _of_group(group: Mapping[str, object]) -> bool | None:
    activations = group.get("input_activations")
    if activations is None:
        return False
    dynamic = activations.get("dynamic", False) if isinstance(activations, Mapping) else None
    return not dynamic if isinstance(dynamic, bool) else None
