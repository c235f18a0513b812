"""Names of the class of transformers that a config.json asks for, where no mapping file knows its family.

The class is built on meta, which imports transformers. So it is asked only where nearly all names begin alike: that is
how names look that a module gives the model it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptmap.errors import CkptmapError
from ckptmap.mapping.prefixes import PrefixChange, averaged_model, known_prefix
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.reference_model import like_config
from ckptmap.sharding.transformers_param_order import find_config

ALIKE = 0.9
"""Share of names with one first segment from which on the class is asked."""


@dataclass(frozen=True)
class ModelClass:
    """The model of a config.json as its class names it; the counterpart of `Family`."""

    model_type: str
    names: frozenset[str]

    def fitting(self, keys: Collection[str]) -> int:
        """Return how many keys are names of the model, with or without the name of its base model."""
        bases = {name.partition(".")[0] + "." for name in self.names if "." in name}
        return max(sum(base + key in self.names for key in keys) for base in ("", *bases))

    @property
    def example(self) -> str:
        return min(self.names)

    def prefix(self, keys: Collection[str]) -> PrefixChange | None:
        """Return the prefix without which most keys below it are names of the model; None: there is none."""
        return averaged_model(keys) or known_prefix(
            keys, lambda below: self.fitting(below) * 2 > len(below)
        )


def class_of(
    config: Mapping[str, object],
    path: str,
    given: str | None,
    names: Collection[str],
    mounts: Mounts,
) -> ModelClass | None:
    """Return the model of the config.json at `given`, or else beside `path`; None where the names need no look, or the
    installed transformers does not have its class."""
    first = Counter(name.partition(".")[0] for name in names)
    if not first or first.most_common(1)[0][1] < len(names) * ALIKE:
        return None
    file = find_config(path, given)
    if file is None:
        return None
    try:
        like = like_config(file, mounts)
    except CkptmapError:  # nothing can be told then
        return None
    return (
        ModelClass(str(config.get("model_type", "")), frozenset(like.shapes))
        if like.shapes
        else None
    )
