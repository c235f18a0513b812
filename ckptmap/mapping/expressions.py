"""Parse and evaluate the expressions of mapping files: `[dims]`, `when`, `range`, `pad` and slices.

    "num_key_value_heads ?? num_attention_heads"      "h + 2 * g"      "model_type == 'gemma2'"

The parser is our own because a mapping file is data: Python never evaluates anything in it. Numbers are
exact fractions. A value that the config lacks is null; without a config every value is unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

from ckptmap.errors import PlanError

FORM = "see a mapping file of the right form: ckptmap mappings show llama/meta"
"""The hint of every error of a mapping file's form: the README beside this file is in no working directory."""
Value: TypeAlias = Fraction | bool | str | None
Lookup: TypeAlias = Callable[[str], Value]
Tree: TypeAlias = tuple[Any, ...]
"""("value", v), ("name", n), or (operator, operand, ...)."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<text>'[^']*')|(?P<sign>\?\?|//|==|!=|<=|>=|[-+*/%<>()]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("or",), ("and",), ("==", "!=", "<", "<=", ">", ">="), ("??",), ("+", "-"), ("*", "/", "//", "%"),
)  # fmt: skip
_NAMED: Mapping[str, Value] = {"true": True, "false": False, "null": None}
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Unknown(Exception):
    """An expression needs values that nobody gave; `names` are their names."""

    def __init__(self, *names: str) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class Expr:
    """A parsed expression, and its text as written."""

    text: str
    tree: Tree

    def evaluate(self, lookup: Lookup) -> Value:
        """Return the value. Raises Unknown where a number is needed and missing, PlanError CKM614
        where types do not fit or a divisor is 0."""
        try:
            return _evaluate(self.tree, lookup)
        except (TypeError, ZeroDivisionError) as error:
            why = "division by zero" if isinstance(error, ZeroDivisionError) else error
            raise PlanError(
                "CKM614", f"{self.text!r}: {why}", "correct the config value or the expression"
            ) from error

    def names(self) -> list[str]:
        """Return the names in the expression, each once."""
        return list(dict.fromkeys(_names(self.tree)))


@lru_cache(maxsize=1024)
def parse_expr(text: str) -> Expr:
    """Parse an expression. Raises PlanError CKM601 where it is malformed."""
    tokens = list(_tokens(text))
    tree, at = _level(tokens, 0, 0, text)
    if at != len(tokens):
        raise _malformed(text, f"unexpected {tokens[at][1]!r}")
    return Expr(text, tree)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    if end > 1000:
        raise _malformed(text[:40] + "...", "is longer than 1000 characters")
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise _malformed(text, f"cannot be read at {text[at : at + 10]!r}")
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()


def _level(
    tokens: list[tuple[str, str]], at: int, level: int, text: str, depth: int = 0
) -> tuple[Tree, int]:
    """Parse the operators of one precedence level, left to right."""
    if depth > 50:
        raise _malformed(text, "is nested too deeply")
    if level == len(_LEVELS):
        return _operand(tokens, at, text, depth + 1)
    tree, at = _level(tokens, at, level + 1, text, depth)
    while at < len(tokens) and tokens[at][0] != "text" and tokens[at][1] in _LEVELS[level]:
        right, after = _level(tokens, at + 1, level + 1, text, depth)
        tree, at = (tokens[at][1], tree, right), after
    return tree, at


def _operand(tokens: list[tuple[str, str]], at: int, text: str, depth: int) -> tuple[Tree, int]:
    if at == len(tokens):
        raise _malformed(text, "ends too early")
    kind, token = tokens[at]
    if kind == "number":
        return ("value", Fraction(token)), at + 1
    if kind == "text":
        return ("value", token[1:-1]), at + 1
    if token == "(":
        tree, at = _level(tokens, at + 1, 0, text, depth + 1)
        if at == len(tokens) or tokens[at][1] != ")":
            raise _malformed(text, "a parenthesis is not closed")
        return tree, at + 1
    if token in ("not", "-"):
        level = 2 if token == "not" else len(_LEVELS)
        tree, at = _level(tokens, at + 1, level, text, depth + 1)
        return ("negative" if token == "-" else "not", tree), at
    if kind != "name" or token in ("and", "or"):
        raise _malformed(text, f"unexpected {token!r}")
    return (("value", _NAMED[token]) if token in _NAMED else ("name", token)), at + 1


def _malformed(text: str, problem: str) -> PlanError:
    return PlanError(
        "CKM601",
        f"expression {text!r}: {problem}",
        FORM,
    )


def _evaluate(tree: Tree, lookup: Lookup) -> Value:
    kind: str = tree[0]
    rest: tuple[Any, ...] = tree[1:]
    if kind == "value":
        value: Value = rest[0]
        return value
    if kind == "name":
        return lookup(rest[0])
    first: Value = _evaluate(rest[0], lookup)
    if kind == "not":
        return not first
    if kind in ("and", "or"):
        return bool(_evaluate(rest[1], lookup)) if bool(first) == (kind == "and") else bool(first)
    if kind == "??":
        return _evaluate(rest[1], lookup) if first is None else first
    if kind == "negative":
        return -_number(first, rest[0])
    second = _evaluate(rest[1], lookup)
    if kind in ("==", "!="):
        return bool(first == second) == (kind == "==")
    a, b = _number(first, rest[0]), _number(second, rest[1])
    if kind in _ORDER:
        return bool(_ORDER[kind](a, b))
    return Fraction(_ARITHMETIC[kind](a, b))


def _number(value: Value, tree: Tree) -> Fraction:
    if value is None:
        raise Unknown(*_names(tree))
    if isinstance(value, str | bool):
        raise TypeError(f"expected a number, found {value!r}")
    return value


def _names(tree: Tree) -> Iterator[str]:
    if tree[0] == "name":
        yield tree[1]
    elif tree[0] != "value":
        for operand in tree[1:]:
            yield from _names(operand)
