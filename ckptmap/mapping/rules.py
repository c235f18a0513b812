"""The content of one mapping file as values: rules, drops, ties, refusals, fingerprints.

`README.md` beside this file describes the form of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ckptmap.mapping.name_patterns import NamePattern

if TYPE_CHECKING:
    from ckptmap.mapping.axes import Axes, Slice
    from ckptmap.mapping.expressions import Expr

HUB = "hf"
"""The scheme that all others are described against: the names in Hugging Face checkpoints on disk."""

Absence = Literal["no", "whole", "any"]
"""Which keys of a rule may be absent: none; all of them together; any of them."""


@dataclass(frozen=True)
class Term:
    """One tensor on one side of a rule: its alternative names, its axes (None: any shape), its slices."""

    names: tuple[NamePattern, ...]
    axes: Axes | None
    slices: tuple[Slice, ...] = ()

    @property
    def captures(self) -> tuple[str, ...]:
        return self.names[0].captures


@dataclass(frozen=True)
class Rule:
    """One rule: the tensors `hub` and the tensors `other` lay out one space of axes."""

    label: str
    hub: tuple[Term, ...]
    other: tuple[Term, ...]
    when: Expr | None = None
    ranges: Mapping[str, tuple[Expr, Expr]] = field(default_factory=dict)
    optional: Absence = "no"
    either: str = ""
    """Among rules with such a word, those of exactly one word have keys for each layer."""
    op: str = ""
    """The value operation on the way from the hub, "" without one."""
    pad: Mapping[str, Expr] = field(default_factory=dict)
    """Axis -> the multiple to which the scheme's side is padded with zeros."""

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The captures that both sides have."""
        there = set(self.other[0].captures)
        return tuple(name for name in self.hub[0].captures if name in there)

    @cached_property
    def is_rename(self) -> bool:
        """Whether the rule renames one tensor without rearranging it; `op` may still change values."""
        if len(self.hub) != 1 or len(self.other) != 1 or self.pad:
            return False
        hub_term, other_term = self.hub[0], self.other[0]
        if (
            hub_term.slices
            or other_term.slices
            or set(hub_term.captures) != set(other_term.captures)
        ):
            return False
        return (
            hub_term.axes is None
            or other_term.axes is None
            or hub_term.axes.dims == other_term.axes.dims
        )

    def side(self, hub: bool) -> tuple[Term, ...]:
        return self.hub if hub else self.other


@dataclass(frozen=True)
class Drop:
    """Keys of one side that the other lacks, and the reason why they may be dropped."""

    names: tuple[NamePattern, ...]
    hub: bool
    why: str
    when: Expr | None = None


@dataclass(frozen=True)
class Tie:
    """On one side the tensor `name` may be absent, because it equals `kept`.

    `written`: converting to that side writes it all the same.
    """

    name: NamePattern
    kept: NamePattern
    hub: bool
    when: Expr | None = None
    written: bool = False


@dataclass(frozen=True)
class Refuse:
    """A condition on the config under which the rules do not describe the model."""

    when: Expr
    why: str


@dataclass(frozen=True)
class Detect:
    """The fingerprints of a scheme: names of which any, all or none must occur."""

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
    """The scheme of the family with the same names and axes, which is recognized in its place."""

    @property
    def title(self) -> str:
        """`"llama/meta@era"`, as `--names` takes it."""
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
