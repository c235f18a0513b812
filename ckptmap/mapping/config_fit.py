"""Compare names with those of the model that a config.json describes.

transformers loads by name. It initializes at random what it does not find, and says so in a warning
only. So names that are no names of the model are found out before they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import CatalogEntry, available
from ckptmap.mapping.detect import KeyCounts, recognise
from ckptmap.mapping.name_patterns import skeleton, skeletons
from ckptmap.mapping.prefixes import PrefixChange, averaged_model, known_prefix
from ckptmap.mapping.resolve import resolve
from ckptmap.mapping.rule_errors import ShapeError
from ckptmap.mapping.rules import HUB, NamingScheme
from ckptmap.tensors import TensorInfo

AT_RANDOM = "transformers initializes at random what it does not find"
WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How the names of classes end that have the output layer which mapping files list."""


@dataclass(frozen=True)
class Family:
    """A family of models with its names on disk and, where transformers has others, in memory."""

    model_type: str
    disk: NamingScheme
    memory: tuple[NamingScheme, ...]

    def fitting(self, keys: Collection[str]) -> int:
        """Return how many keys are names of the model, with or without the name of its base model.

        transformers adds or removes that name itself: `model.` in front of `layers.0.…`.
        """
        shapes = Counter(skeletons(keys))
        known = {shape for scheme in (self.disk, *self.memory) for shape in _shapes(scheme)}
        bases = {shape.partition(".")[0] + "." for shape in known if "." in shape}
        return max(
            sum(count for shape, count in shapes.items() if base + shape in known)
            for base in ("", *bases)
        )

    @property
    def example(self) -> str:
        """A name of the model, with zeros for its numbers."""
        name = self.disk.rules[0].hub[0].names[0]
        return name.render(dict.fromkeys(name.captures, 0), (0,) * len(name.holes))

    def prefix(self, keys: Collection[str]) -> PrefixChange | None:
        """Return the prefix without which most keys below it are names of the model; None: there is none."""
        return averaged_model(keys) or known_prefix(
            keys, lambda below: KeyCounts(below).left(self.disk, hub=True) < len(below) / 2
        )

    def differences(
        self, infos: Mapping[str, TensorInfo], config: Mapping[str, object]
    ) -> tuple[str | None, Sequence[str]]:
        """Return the first name that the weights lack, or the first shape that differs from the model's, after
        "config.json describes", and the names that are none of the model's; (None, []): they are the model.

        So also where nothing tells: for a class without the output layer, for the names of a base
        model, and where a rule needs a value that the config lacks.
        """
        classes = config.get("architectures")
        if isinstance(classes, list) and not all(str(c).endswith(WITH_HEAD) for c in classes):
            return None, []
        unknown = KeyCounts(infos).left(self.disk, hub=True)
        if unknown > len(infos) / 2:
            return None, []
        strays = self._strays(infos) if unknown else []
        try:
            resolve(self.disk, infos, to_hub=True, config=config)
        except PlanError as error:
            if error.code == "CKM607":
                lacking = error.message.partition("; config")[0]
                return f"more than is there: {lacking}; {AT_RANDOM}", strays
            return (
                f"{error.told}: from_pretrained refuses such weights until config.json is corrected"
                if isinstance(error, ShapeError)
                else None
            ), strays
        return None, strays

    def _strays(self, names: Iterable[str]) -> list[str]:
        """Return the names that are neither the model's, on disk or in memory, nor known to be left out."""
        known = {shape for scheme in (self.disk, *self.memory) for shape in _shapes(scheme)}
        known |= {name.skeleton for drop in self.disk.drops if drop.hub for name in drop.names}
        return [name for name in names if skeleton(name)[0] not in known]


def _shapes(scheme: NamingScheme) -> Iterable[str]:
    for rule in scheme.rules:
        for term in rule.side(scheme.is_hub):
            yield from (name.skeleton for name in term.names)


def family_of(config: Mapping[str, object]) -> Family | None:
    """Return the family of the config's model; None: no mapping file is for it.

    Only the outermost `model_type` counts: the text model inside another has other names there.
    """
    model_type = str(config.get("model_type", ""))
    entries = [entry for entry in available() if model_type in entry.models]
    disk = next((entry for entry in entries if entry.name == HUB), None)
    if disk is None:
        return None
    memory = tuple(e.load() for e in entries if e.name.startswith(f"{HUB}-"))
    return Family(model_type, disk.load(), memory)


def other_scheme(keys: Collection[str], config: Mapping[str, object]) -> CatalogEntry | None:
    """Return the scheme of the config's family, other than the hub's, that these keys have."""
    model_type = str(config.get("model_type", ""))
    schemes = (entry for entry in recognise(keys, config) if model_type in entry.models)
    return next((entry for entry in schemes if entry.name != HUB), None)


def other_family(keys: Collection[str], config: Mapping[str, object]) -> CatalogEntry | None:
    """Return the scheme that these keys have, of a family that is not the config's."""
    model_type = str(config.get("model_type", ""))
    return next((entry for entry in recognise(keys) if model_type not in entry.models), None)
