"""The rule form as values: what one mapping file says, parsed and not yet proven.

The form itself is described in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ckptmap.mapping.axes import Axes, Slice
from ckptmap.mapping.expressions import Expr
from ckptmap.mapping.name_patterns import NamePattern

HUB = "hf"
"""The scheme that every other one is described against: Hugging Face's names on disk."""

Absence = Literal["no", "whole", "any"]
"""May a rule's keys be absent: no; all of them together; any of them."""


@dataclass(frozen=True)
class Term:
    """One tensor of a rule's side: alternatives of its name, its axes (None: any shape), slices."""

    names: tuple[NamePattern, ...]
    axes: Axes | None
    slices: tuple[Slice, ...] = ()

    @property
    def captures(self) -> tuple[str, ...]:
        return self.names[0].captures


@dataclass(frozen=True)
class Rule:
    """`hub` and `other` lay out one space of axes; an identity has the same on both sides."""

    label: str
    hub: tuple[Term, ...]
    other: tuple[Term, ...]
    when: Expr | None = None
    ranges: Mapping[str, tuple[Expr, Expr]] = field(default_factory=dict)
    optional: Absence = "no"
    either: str = ""
    """Of rules with such a word, one word's are there for each number of their first capture."""
    op: str = ""
    """Value op on the way from the hub; "" none."""
    pad: Mapping[str, Expr] = field(default_factory=dict)
    """Axis -> the multiple that the scheme's side fills it up to."""

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """Captures that both sides have."""
        there = set(self.other[0].captures)
        return tuple(name for name in self.hub[0].captures if name in there)

    @cached_property
    def is_rename(self) -> bool:
        """One tensor to one tensor, as it lies; `op` may change values."""
        if len(self.hub) != 1 or len(self.other) != 1 or self.pad:
            return False
        one, two = self.hub[0], self.other[0]
        if one.slices or two.slices or set(one.captures) != set(two.captures):
            return False
        return one.axes is None or two.axes is None or one.axes.dims == two.axes.dims

    def side(self, hub: bool) -> tuple[Term, ...]:
        return self.hub if hub else self.other


@dataclass(frozen=True)
class Drop:
    """A key of one side that the other does not have, and why it may go."""

    names: tuple[NamePattern, ...]
    hub: bool
    why: str
    when: Expr | None = None


@dataclass(frozen=True)
class Tie:
    """On one side the tensor `name` may be absent: it is `kept`. `written`: going there it is written
    all the same."""

    name: NamePattern
    kept: NamePattern
    hub: bool
    when: Expr | None = None
    written: bool = False


@dataclass(frozen=True)
class Refuse:
    """Configurations that the rules do not describe."""

    when: Expr
    why: str


@dataclass(frozen=True)
class Detect:
    """Fingerprints of the scheme's own names."""

    any: tuple[NamePattern, ...] = ()
    all: tuple[NamePattern, ...] = ()
    none: tuple[NamePattern, ...] = ()


@dataclass(frozen=True)
class SchemeHead:
    """What a mapping file is for, without its rules."""

    family: str
    name: str
    era: str
    models: tuple[str, ...]
    """Values of config.json's model_type."""
    summary: str
    detect: Detect
    same_as: str = ""
    """The scheme of the family with the same names and axes, which is recognised in its place."""

    @property
    def title(self) -> str:
        """`"llama/meta@era"`, as it can be asked for."""
        return f"{self.family}/{self.name}" + (f"@{self.era}" if self.era else "")


@dataclass(frozen=True, kw_only=True)
class NamingScheme(SchemeHead):
    """One mapping file; `text` is the file itself, so that a manifest can carry it."""

    dims: Mapping[str, Expr]
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...]
    ties: tuple[Tie, ...]
    refuses: tuple[Refuse, ...]
    where: str
    text: str

    @property
    def is_hub(self) -> bool:
        return self.name == HUB
