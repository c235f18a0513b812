"""How the names of a checkpoint were translated from one naming scheme to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmap.core.printable import advised

if TYPE_CHECKING:
    from ckptmap.mapping.derived_tensor import DerivedTensor
    from ckptmap.mapping.detect import SchemeChoice
    from ckptmap.mapping.rules import NamingScheme


@dataclass(frozen=True)
class NameTranslation:
    """One translation: enough to do it again from the manifest, and what became of each key.

    choice    from which scheme to which
    config    the model's config.json, by which rules compute shapes; None: there was none
    used      the values of it that the rules used
    left      keys of the source that stay behind, each with the reason
    dropped   those, and the keys that the rules drop, each with the reason
    unmapped  keys that no rule knows
    origins   new name -> the stored keys that it was made of, where they differ
    decoded   weights that must be decoded first: their values change, or they are quantized and
              rearranged across their blocks
    """

    choice: SchemeChoice
    config: Mapping[str, object] | None
    used: Mapping[str, object]
    left: Mapping[str, str]
    dropped: Mapping[str, str]
    unmapped: tuple[str, ...]
    origins: Mapping[str, tuple[str, ...]]
    decoded: Mapping[str, DerivedTensor]

    def record(self) -> dict[str, object]:
        """Return JSON, with the mapping files themselves: they may be gone when it is read."""
        return {
            "from": _file(self.choice.source),
            "to": _file(self.choice.target),
            "left": dict(self.left),
            "config": None
            if self.config is None
            else {name: _plain(value) for name, value in self.used.items()},
        }

    @property
    def in_hub_names(self) -> bool:
        """Whether the new names are those of models on the Hugging Face Hub."""
        target = self.choice.target
        return target is None or target.is_hub

    def unknown(self, key: str) -> tuple[str, str]:
        """Return why a key has no name here, and what to do about it."""
        scheme = self.choice.source or self.choice.target
        where = scheme.title if scheme is not None else "the scheme"
        return (
            f"no rule of {self.choice.text} knows it",
            f"leave it behind with {advised(drop=key)}, or add a rule to your own copy of {where}",
        )


def _file(scheme: NamingScheme | None) -> dict[str, str] | None:
    return None if scheme is None else {"title": scheme.title, "text": scheme.text}


def _plain(value: object) -> object:
    """Return a fraction as an int or a float, for JSON; any other value as it is."""
    from fractions import Fraction

    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value
