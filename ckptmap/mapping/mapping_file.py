"""Parse a mapping file: TOML text to a proven `NamingScheme`, with every keyword checked.

A mapping file is data: nothing in it is imported, called or evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckptmap.core.formatting import human
from ckptmap.errors import PlanError
from ckptmap.mapping.name_patterns import NamePattern, parse_names
from ckptmap.mapping.rules import (
    HUB,
    Absence,
    Detect,
    Drop,
    NamingScheme,
    Refuse,
    Rule,
    SchemeHead,
    Term,
    Tie,
)
from ckptmap.storage.resource_limits import unreadable

if TYPE_CHECKING:
    from ckptmap.mapping.expressions import Expr

SCHEMA = 1
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
_TOP = {
    "schema", "family", "models", "scheme", "era", "summary", "dims", "detect", "rule", "drop",
    "tie", "refuse", "same_as",
}  # fmt: skip
_RULE = {"when", "range", "optional", "either", "op", "pad"}
_OPTIONAL: Mapping[object, Absence] = {False: "no", True: "whole", "any": "any"}


def load_scheme(path: str | Path) -> NamingScheme:
    """Return the scheme that a file describes, proven.

    Raises PlanError CKM601 where it is malformed, CKM602 where it contradicts itself, CKM603 where it
    cannot be read.
    """
    from ckptmap.core.toml_text import MAX_NBYTES  # deferred, as below

    file = Path(path)
    try:
        if file.stat().st_size > MAX_NBYTES:
            raise PlanError(
                "CKM601", f"{file}: {human(file.stat().st_size)}, expected at most {human(MAX_NBYTES)}",
                "a mapping file is a few kilobytes of TOML",
            )  # fmt: skip
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError):
            raise unreadable(file, error) from error
        raise PlanError(
            "CKM603",
            f"{file}: cannot be read: {error}",
            "list the schemes with: ckptmap mappings list",
        ) from error
    return parse_scheme(text, str(file))


def parse_scheme(text: str, where: str) -> NamingScheme:
    """Return the scheme that a text describes; `where` names the text in messages."""
    from ckptmap.core.toml_text import TomlError, parse_toml
    from ckptmap.mapping.prove_scheme import (
        prove,  # deferred: recognizing names needs no proof
    )

    try:
        document = parse_toml(text)
    except TomlError as error:
        raise PlanError(
            "CKM601", f"{where}: is not valid TOML: {error}", "correct that line of the file"
        ) from error
    scheme = _Reader(where).scheme(document, text)
    prove(scheme)
    return scheme


def read_head(document: Mapping[str, object], where: str) -> SchemeHead:
    """Return the head of a parsed file: its keys before the tables, and [detect]. Raises CKM601."""
    return _Reader(where).head(document)


class _Reader:
    """The parser of one file; `where` names it in messages."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._scheme = ""

    def head(self, document: Mapping[str, object]) -> SchemeHead:
        self._check_keys(document, _TOP, "the file")
        if document.get("schema") != SCHEMA:
            raise self._error(f"schema {document.get('schema')!r}, expected {SCHEMA}")
        family = self._word(document, "family")
        return SchemeHead(
            family,
            self._word(document, "scheme"),
            self._word(document, "era") if "era" in document else "",
            tuple(self._texts(document.get("models", [family]), "models")),
            self._text(document.get("summary", ""), "summary"),
            self._detect(self._table(document, "detect")),
            self._text(document.get("same_as", ""), "same_as"),
        )

    def scheme(self, document: Mapping[str, object], text: str) -> NamingScheme:
        head = self.head(document)
        self._scheme = head.name
        dims = self._table(document, "dims")
        rules = [self._rule(i, rule) for i, rule in enumerate(self._tables(document, "rule"), 1)]
        if not rules:
            raise self._error("has no [[rule]]")
        return NamingScheme(
            **vars(head),
            dims={axis: self._expr(value, f"[dims] {axis}") for axis, value in dims.items()},
            rules=tuple(rules),
            drops=tuple(self._drop(drop) for drop in self._tables(document, "drop")),
            ties=tuple(t for tie in self._tables(document, "tie") for t in self._ties(tie)),
            refuses=tuple(self._refuse(item) for item in self._tables(document, "refuse")),
            where=self._where,
            text=text,
        )

    # ------------------------------------------------------------------ entries

    def _rule(self, number: int, entry: Mapping[str, object]) -> Rule:
        where = f"{self._where}: rule {number}"
        self._check_keys(entry, _RULE | {HUB, self._scheme}, f"rule {number}")
        hub, other = (self._side(entry, side, where) for side in (HUB, self._scheme))
        hub, other = _with_default_axes(hub, other), _with_default_axes(other, hub)
        ranges = {
            name: self._range(text, f"rule {number}: range {name}")
            for name, text in self._table(entry, "range").items()
        }
        optional = entry.get("optional", False)
        if not isinstance(optional, bool | str) or optional not in _OPTIONAL:
            raise self._error(f'rule {number}: optional {optional!r}, expected true or "any"')
        pad = {
            axis: self._expr(value, f"rule {number}: pad {axis}")
            for axis, value in self._table(entry, "pad").items()
        }
        return Rule(
            label=f"rule {number} ({other[0].names[0].text})",
            hub=hub,
            other=other,
            when=self._condition(entry),
            ranges=ranges,
            optional="any" if "either" in entry else _OPTIONAL[optional],
            either=self._word(entry, "either") if "either" in entry else "",
            op=self._text(entry.get("op", ""), f"rule {number}: op"),
            pad=pad,
        )

    def _side(self, entry: Mapping[str, object], side: str, where: str) -> tuple[Term, ...]:
        if side not in entry:
            raise PlanError(
                "CKM601", f"{where}: has no side {side!r}", f"write {side} = \"NAME :: AXES\""
            )  # fmt: skip
        value = entry[side]
        texts = list(self._texts(value if isinstance(value, list) else [value], side))
        if not texts:
            raise PlanError("CKM601", f"{where}: {side} is empty", "write the name of a tensor")
        from ckptmap.mapping.axes import parse_axes  # deferred: recognizing names needs no axes

        terms = []
        for text in texts:
            names, _, axes = text.partition("::")
            parsed = parse_axes(axes, where) if "::" in text else (None, ())
            terms.append(Term(parse_names(names.strip(), where), *parsed))
        return tuple(terms)

    def _range(self, text: object, label: str) -> tuple[Expr, Expr]:
        low, colon, high = self._text(text, label).partition(":")
        if not colon or not high.strip():
            raise self._error(f'{label} is {text!r}, expected "LOW : END"')
        return self._parse(low.strip() or "0", label), self._parse(high.strip(), label)

    def _detect(self, entry: Mapping[str, object]) -> Detect:
        self._check_keys(entry, {"any", "all", "none"}, "[detect]")
        patterns: dict[str, tuple[NamePattern, ...]] = {
            kind: tuple(
                name
                for text in self._texts(texts, f"detect {kind}")
                for name in parse_names(text, f"{self._where}: [detect]")
            )
            for kind, texts in entry.items()
        }
        return Detect(**patterns)

    def _drop(self, entry: Mapping[str, object]) -> Drop:
        self._check_keys(entry, {HUB, self._scheme, "why", "when"}, "[[drop]]")
        sides = [side for side in dict.fromkeys((HUB, self._scheme)) if side in entry]
        if len(sides) != 1 or not entry.get("why"):
            raise self._error("[[drop]] needs names of one side, and a why")
        value = entry[sides[0]]
        names = tuple(
            name
            for text in self._texts(value if isinstance(value, list) else [value], "drop")
            for name in parse_names(text, f"{self._where}: [[drop]]")
        )
        why = self._text(entry["why"], "why")
        return Drop(names, sides[0] == HUB, why, self._condition(entry))

    def _ties(self, entry: Mapping[str, object]) -> Iterator[Tie]:
        self._check_keys(entry, {HUB, self._scheme, "when", "written"}, "[[tie]]")
        written = entry.get("written", False)
        if not isinstance(written, bool):
            raise self._error(f"[[tie]] written is {written!r}, expected true or false")
        sides = [side for side in dict.fromkeys((HUB, self._scheme)) if side in entry]
        for side in sides:
            names = [
                name
                for text in self._texts(entry[side], "tie")
                for name in parse_names(text, f"{self._where}: [[tie]]")
            ]
            if len(names) != 2 or any(name.captures for name in names):
                raise self._error("[[tie]] needs two names of a side, without captures")
            keeps = written and side != HUB
            yield Tie(names[0], names[1], side == HUB, self._condition(entry), keeps)
        if not sides:
            raise self._error("[[tie]] names no side")

    def _refuse(self, entry: Mapping[str, object]) -> Refuse:
        self._check_keys(entry, {"when", "why"}, "[[refuse]]")
        when = self._condition(entry)
        if when is None or not entry.get("why"):
            raise self._error("[[refuse]] needs a when and a why")
        return Refuse(when, self._text(entry["why"], "why"))

    # ------------------------------------------------------------------ values

    def _condition(self, entry: Mapping[str, object]) -> Expr | None:
        return self._expr(entry["when"], "when") if "when" in entry else None

    def _expr(self, value: object, label: str) -> Expr:
        if isinstance(value, int) and not isinstance(value, bool):
            return self._parse(str(value), label)
        return self._parse(self._text(value, label), label)

    def _parse(self, text: str, label: str) -> Expr:
        from ckptmap.mapping.expressions import parse_expr  # deferred, as axes are

        try:
            return parse_expr(text)
        except PlanError as error:
            raise self._error(f"{label}: {error.message}") from error

    def _text(self, value: object, label: str) -> str:
        if not isinstance(value, str):
            raise self._error(f"{label} is {value!r}, expected text")
        return value

    def _word(self, entry: Mapping[str, object], key: str) -> str:
        text = self._text(entry.get(key), key)
        if not _WORD.fullmatch(text):
            raise self._error(f"{key} is {text!r}, expected a word")
        return text

    def _texts(self, value: object, label: str) -> Iterable[str]:
        if not isinstance(value, list):
            raise self._error(f"{label} is {value!r}, expected a list of texts")
        return [self._text(item, label) for item in value]

    def _table(self, entry: Mapping[str, object], key: str) -> Mapping[str, object]:
        table = entry.get(key, {})
        if not isinstance(table, dict):
            raise self._error(f"{key} is {table!r}, expected a table")
        return table

    def _tables(self, entry: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
        tables = entry.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
            raise self._error(f"{key} must be written [[{key}]]")
        return cast("list[Mapping[str, object]]", tables)

    def _check_keys(self, entry: Mapping[str, object], words: set[str], label: str) -> None:
        strange = next((key for key in entry if key not in words), None)
        if strange is not None:
            raise self._error(
                f"{label} has {strange!r}, expected one of {', '.join(sorted(words))}"
            )

    def _error(self, problem: str) -> PlanError:
        from ckptmap.mapping.expressions import FORM  # deferred, as its parser is

        return PlanError("CKM601", f"{self._where}: {problem}", FORM)


def _with_default_axes(terms: tuple[Term, ...], others: tuple[Term, ...]) -> tuple[Term, ...]:
    """Give a lone tensor without axes those of the other side."""
    if len(terms) == len(others) == 1 and terms[0].axes is None and not others[0].slices:
        return (Term(terms[0].names, others[0].axes),)
    return terms
