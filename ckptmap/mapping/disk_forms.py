"""The naming scheme of a model in memory, made of its names, for families without a mapping file.

    model.layers.1.mlp.experts.gate_up_proj [e, 2m, i]                       in memory: all experts of a layer in one tensor
    model.layers.1.mlp.experts.3.{gate,up}_proj.weight [m, i], two tensors   on disk, as releases have them

    model.layers.1.mlp.gate.weight                    in memory: MiniMax-M2
    model.layers.1.block_sparse_moe.gate.weight       on disk

No mapping file lists the weights of these families: the rules are made of the names that a model has, and of
`disk_forms.toml`, which says what differs on disk.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmap.core.tensor_table import NUMBER
from ckptmap.errors import PlanError
from ckptmap.mapping.mapping_file import parse_scheme
from ckptmap.mapping.rules import NamingScheme

TABLE = Path(__file__).with_name("disk_forms.toml")
JOINED, UP, DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"
"""How names of joined experts end; a model without gates has `up_proj` alone."""


@dataclass(frozen=True)
class DiskForm:
    """What differs on disk from the names in memory, for one family.

    experts  the names of one expert's gate, up and down; (): experts keep their form
    rename   (segments in memory, segments on disk), applied one after the other; `^` begins the name
    also     (segments on disk, segments that some programs write in their place), which are read, too
    parts    segments of a tensor on disk -> those of the tensors of equal size that it is stored as
    """

    experts: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    also: tuple[tuple[str, str], ...] = ()
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def renamed(self, name: str) -> str:
        """Return the name with its segments as on disk; experts are still joined."""
        for old, new in self.rename:
            name = _replaced(name, old, new)
        return name

    def changes(self, name: str) -> bool:
        return (
            self.renamed(name) != name
            or self._is_stack(name)
            or any(_has(name, whole) for whole in self.parts)
        )

    def rule(self, name: str) -> str:
        """Return the rule of a pattern in memory. Any may be absent on disk: a layer without experts has none of the names
        of one, and a tied head is left out."""
        disk, memory = f'"{" | ".join(self._on_disk(name))}"', name
        whole = next((one for one in self.parts if _has(self.renamed(name), one)), None)
        if self._is_stack(name):
            disk, memory = self._stack(self.renamed(name), name)
        elif whole is not None:
            disk, memory = self._whole(self.renamed(name), whole, name)
        optional = '"any"' if "{" in name else "true"
        return f'[[rule]]\nhf = {disk}\nhf-memory = "{memory}"\noptional = {optional}\n'

    def _on_disk(self, name: str) -> Sequence[str]:
        """Return what the tensor is called on disk; the first is written."""
        renamed = self.renamed(name)
        others = (_replaced(renamed, old, new) for old, new in self.also)
        return list(dict.fromkeys([renamed, *others]))

    def _is_stack(self, name: str) -> bool:
        return bool(self.experts) and name.endswith((JOINED, UP, DOWN))

    def _stack(self, disk: str, memory: str) -> tuple[str, str]:
        """Return both sides of the rule of a stack of experts."""
        end = next(end for end in (JOINED, UP, DOWN) if disk.endswith(end))
        expert = f"{disk.removesuffix(end)}.experts.{{e}}"
        gate, up, down = self.experts
        if end == JOINED:
            halves = ((0, gate), (1, up))
            listed = (f'"{expert}.{half}.weight :: m i @ two[{at}]"' for at, half in halves)
            return f"[{', '.join(listed)}]", f"{memory} :: e (two m) i"
        leaf, axes = (up, "m i") if end == UP else (down, "i m")
        return f'"{expert}.{leaf}.weight :: {axes}"', f"{memory} :: e {axes}"

    def _whole(self, disk: str, whole: str, memory: str) -> tuple[str, str]:
        """Return both sides of the rule of a tensor that consists of others; a convolution has a kernel."""
        names = self.parts[whole]
        rest = "i j" if "conv1d" in whole else "i"
        listed = (
            f'"{_replaced(disk, whole, part)} :: m {rest} @ s[{at}]"'
            for at, part in enumerate(names)
        )
        return f"[{', '.join(listed)}]", f"{memory} :: (s m) {rest}"

    @property
    def dims(self) -> str:
        """Return the axis that counts the parts."""
        counts = {len(names) for names in self.parts.values()}
        return f"[dims]\ns = {counts.pop()}\n" if counts else ""


@functools.cache
def forms() -> Mapping[str, DiskForm]:
    """Return `model_type` -> what differs on disk."""
    document = tomllib.loads(TABLE.read_text("utf-8"))
    return {
        kind: DiskForm(
            tuple(form.get("experts", ())),
            _pairs(form, "rename"),
            _pairs(form, "also"),
            form.get("parts", {}),
        )
        for form in document["form"]
        for kind in form["models"].split()
    }


def _pairs(form: Mapping[str, Any], name: str) -> tuple[tuple[str, str], ...]:
    return tuple((old, new) for old, new in form.get(name, ()))


def memory_scheme_of(
    keys: Collection[str], config: Mapping[str, object] | None
) -> NamingScheme | None:
    """Return the scheme of a model that has these names in memory; None: it is of no such family, or has other names."""
    kind = str((config or {}).get("model_type"))
    form = forms().get(kind)
    if form is None or not any(map(form.changes, keys)):
        return None
    rules = [form.rule(name) for name in dict.fromkeys(map(_pattern, keys))]
    head = f'schema = 1\nfamily = "{kind}"\nscheme = "hf-memory"\n{form.dims}'
    try:
        return parse_scheme("\n".join([head, *rules]), f"{kind}/hf-memory")
    except PlanError:  # half of the names are those on disk already: two rules make one name
        return None


def _pattern(key: str) -> str:
    """Return the name with a capture in place of its first number, that of the layer. Others have gaps: `mlp.0`, `mlp.2`."""
    return NUMBER.sub("{n}", key, count=1)


def _has(name: str, segments: str) -> bool:
    return f".{segments}." in f".{name}."


def _replaced(name: str, old: str, new: str) -> str:
    """Return the name with its first run of the segments `old` replaced; `^`: only where it begins with them."""
    start, old = old.startswith("^"), old.removeprefix("^")
    dotted = f".{name}."
    if start and not dotted.startswith(f".{old}."):
        return name
    return dotted.replace(f".{old}.", f".{new}.", 1)[1:-1]
