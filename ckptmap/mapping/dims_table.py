"""The `[dims]` table of a mapping file, evaluated with the values of one model's config.json.

    [dims]  h = "num_attention_heads"        config {"num_attention_heads": 32}    ->  h: 32

Every expression of a mapping file is evaluated here: extents of axes, `when`, `range`, slices, `pad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from ckptmap.errors import PlanError
from ckptmap.formats.huggingface.tied_embeddings import TIED, states_tied
from ckptmap.mapping.expressions import Expr, Unknown, Value

MAX_NUMBER = 1 << 63
KNOWN: Mapping[str, int] = {"two": 2, "three": 3}
"""Axes with a fixed extent, which need no entry in `[dims]`."""


class Dims:
    """The `[dims]` of one mapping file, evaluated with one model's config.

    With `config` None every expression that needs a config value is unknown. `used` and `missing`
    record the config values that were asked for, so that an error can name them.
    """

    def __init__(self, exprs: Mapping[str, Expr], config: Mapping[str, object] | None) -> None:
        self._exprs = exprs
        self._config = config
        self._known: dict[str, int | None] = {}
        self._open: list[str] = []
        self.used: dict[str, Value] = {}
        """Config values that were asked for and found."""
        self.missing: dict[str, None] = {}
        """Config values that were asked for and not found."""
        self.has_config = config is not None

    def size(self, axis: str) -> int | None:
        """Return the extent of an axis, None where `[dims]` or the config does not determine it."""
        if axis not in self._exprs:
            return KNOWN.get(axis)
        if axis not in self._known:
            try:
                self._known[axis] = self.number(self._exprs[axis])
            except Unknown as unknown:
                self.missing.update(dict.fromkeys(unknown.names))
                self._known[axis] = None
        return self._known[axis]

    def number(self, expr: Expr, extra: Mapping[str, int] | None = None) -> int:
        """Return the value of an expression that must be a whole number of at least 0.

        `extra` maps further axes to their extents. Raises Unknown where a value is missing, PlanError
        CKM614 where the value is not such a number.
        """
        value = expr.evaluate(lambda name: self._value(name, extra or {}))
        if value is None:
            raise Unknown(*expr.names())
        if isinstance(value, str | bool) or value.denominator != 1 or not 0 <= value < MAX_NUMBER:
            values = ", ".join(f"{name} = {_shown(known)}" for name, known in self.used.items())
            raise PlanError(
                "CKM614",
                f"{expr.text!r}: expected a whole number, found {_shown(value)} ({values})",
                "correct the config value, or the mapping file",
            )
        return int(value)

    def holds(self, expr: Expr | None) -> bool | None:
        """Return whether a condition holds; None: unknown, because there is no config."""
        if expr is None:
            return True
        try:
            return bool(expr.evaluate(lambda name: self._value(name, {})))
        except Unknown as unknown:
            self.missing.update(dict.fromkeys(unknown.names))
            return None if self._config is None else False

    def _value(self, name: str, extra: Mapping[str, int]) -> Value:
        if name in extra:
            return Fraction(extra[name])
        if name in self._exprs and name not in self._open:
            self._open.append(name)
            try:
                size = self.size(name)
            finally:
                self._open.pop()
            if size is None:
                raise Unknown(*(self.missing or (name,)))
            return Fraction(size)
        if name in KNOWN and name not in self._exprs:
            return Fraction(KNOWN[name])
        return self._of_config(name)

    def _of_config(self, name: str) -> Value:
        if self._config is None:
            raise Unknown(name)
        entry = self._entry(self._config, name)
        if isinstance(entry, float) and entry == entry and abs(entry) < MAX_NUMBER:
            entry = Fraction(repr(entry))
        elif isinstance(entry, int) and not isinstance(entry, bool):
            entry = Fraction(entry)
        value: Value = entry if isinstance(entry, Fraction | bool | str) else None
        if value is None:
            self.missing[name] = None
        else:
            self.used[name] = value
        return value

    def _entry(self, config: Mapping[str, object], name: str) -> object:
        """Return a config value, that of the text model where the outermost config has none."""
        if name == TIED:
            return states_tied(config)
        entry = _looked_up(config, name.split("."))
        text = config.get("text_config")
        if entry is None and isinstance(text, Mapping):
            return _looked_up(text, name.split("."))
        return entry

    def needed(self, axis: str) -> list[str]:
        """Return the config values that an axis depends on, or the axis itself if `[dims]` lacks it."""
        names: dict[str, None] = {}
        left, seen = [axis], set[str]()
        while left:
            name = left.pop(0)
            if name in self._exprs and name not in seen:
                seen.add(name)
                left += self._exprs[name].names()
            elif name not in KNOWN:
                names[f"axis {name!r} in [dims]" if name == axis and not seen else name] = None
        return list(names)

    def describe(self) -> str:
        """Return the config values that were used, as text for an error message."""
        if not self.used:
            return "no config value was used"
        return "config: " + ", ".join(f"{name} {_shown(v)}" for name, v in self.used.items())


def _looked_up(config: Mapping[str, object], path: list[str]) -> object:
    node: object = config
    if ".".join(path) in config:  # a manifest stores nested values under their dotted path
        return config[".".join(path)]
    for segment in path:
        node = node.get(segment) if isinstance(node, Mapping) else None
    return node


def _shown(value: Value) -> str:
    return str(value) if isinstance(value, Fraction) else repr(value)
