"""Compare what a config.json states of static scales of activations with those that are stored.

    "activation_scheme": "static"    and    no fc.activation_scale    ->  a note

The weights do not depend on them, so that nothing is refused; a library that quantizes activations would begin with
scales that nobody measured. Sources: `FineGrainedFP8Config` of transformers 5, `QuantizationArgs` of
compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING

from ckptmap.core.columns import distinct, distinct_at, few
from ckptmap.core.formatting import some
from ckptmap.core.quantized_codes import ScalesActivations
from ckptmap.protocols.file_systems import Mounts
from ckptmap.protocols.offers import offers

if TYPE_CHECKING:
    from ckptmap.core.weight_columns import LoneWeight, WeightForm
    from ckptmap.quantization.compressed_tensors.config_json import ConfigGroups

_SCHEMES = {"static": True, "dynamic": False}


def activation_notes(forms: Mapping[str, WeightForm | LoneWeight], mounts: Mounts) -> Iterator[str]:
    """Yield a note on weights with another kind of scales of activations than config.json states.

    forms  FQN of a weight -> its form
    """
    kinds = distinct([form.encoding for form in few(forms)])
    scaling = {key: kind for key, kind in kinds.items() if offers(kind, ScalesActivations)}
    if not scaling:
        return
    # Imported here: few checkpoints have such weights, and `inspect` of the others is not to wait.
    from ckptmap.quantization.blockwise.read_config import quantization_config

    first = next(fqn for fqn, form in forms.items() if id(form.encoding) in scaling)
    parts = forms[first].group(first).parts
    config = quantization_config(next(iter(parts.values())), mounts) if parts else {}
    has_keys = {key: bool(kind.activation_keys(first)) for key, kind in scaling.items()}
    statements = _Statements(config)
    if {*has_keys.values()} == {statements.of_all}:
        return
    fqns, encodings = list(forms), [id(form.encoding) for form in forms.values()]
    if len(scaling) < len(kinds):
        there = list(map(scaling.__contains__, encodings))
        fqns, encodings = list(compress(fqns, there)), list(compress(encodings, there))
    stated = statements.static(fqns)
    wrong: dict[str, list[str]] = {}
    has = map(has_keys.__getitem__, encodings)
    differ = compress(zip(fqns, encodings, stated, strict=True), map(ne, has, stated))
    for fqn, key, said in differ:
        if said is None:
            continue
        if said:
            text = "config.json states static scales of activations, and none is stored"
        else:
            last = _last(scaling[key].activation_keys(fqn)[0])
            text = f"config.json states no static scales of activations, and {last} is stored"
        wrong.setdefault(text, []).append(fqn)
    for text, fqns in wrong.items():
        yield f"{some(fqns, 1)}: {text}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


class _Statements:
    """What a config states of the scales of activations, to be asked for many modules."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.of_all: bool | None = None
        """What is stated of all weights alike; None: they are described one by one, or not."""
        self._groups: ConfigGroups | None = None
        self._told: dict[tuple[int, ...], bool | None] = {}
        method = config.get("quant_method")
        if method == "fp8":
            self.of_all = _SCHEMES.get(str(config.get("activation_scheme")))
        elif method == "compressed-tensors":
            from ckptmap.quantization.compressed_tensors.config_json import ConfigGroups

            self._groups = ConfigGroups(config)
            every = self._groups.of("")
            self.of_all = _of_group(every[0]) if len(every) == 1 else None

    def static(self, fqns: Sequence[str]) -> list[bool | None]:
        """Return whether static scales are stated for the activations of each weight's module; None: it is
        not told."""
        if self._groups is None:
            return [self.of_all] * len(fqns)
        kinds = self._groups.kinds(fqns)
        for number, kind in distinct_at(kinds):
            if kind not in self._told:
                module = fqns[number].rpartition(".")[0]
                stated = {_of_group(group) for group in self._groups.of(module)}
                self._told[kind] = stated.pop() if len(stated) == 1 else None
        return list(map(self._told.__getitem__, kinds))


def _of_group(group: Mapping[str, object]) -> bool | None:
    activations = group.get("input_activations")
    if activations is None:
        return False
    dynamic = activations.get("dynamic", False) if isinstance(activations, Mapping) else None
    return not dynamic if isinstance(dynamic, bool) else None
