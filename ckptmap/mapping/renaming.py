"""Rename weights by a prefix or by whole-key patterns: --strip-prefix, --rename, --add-prefix.

    student.layers.0.weight  --strip-prefix student   ->  layers.0.weight
    layers.0.weight          --rename 'layers.{x}=blocks.{x}'  ->  blocks.0.weight
    blocks.0.weight          --add-prefix net         ->  net.blocks.0.weight

Names change by path segment or as whole keys, never by substring. They are plain FQNs: wrappers are
off already. A prefix or a pattern that matches nothing is refused, and so are two keys that would
become one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ckptmap.core import argument_checks
from ckptmap.core.printable import advised
from ckptmap.errors import PlanError
from ckptmap.mapping.rename_pattern import RenamePattern, parse_pattern
from ckptmap.mapping.wrappers import ANYWHERE, HEAD, LIGHTNING, SEGMENTS

Patterns: TypeAlias = Sequence[str] | Mapping[str, str]
"""Patterns as a caller gives them: `"OLD=NEW"`, several of these, or a dict of OLD to NEW. A string is
one pattern."""

HEADS_SHOWN = 4
"""First segments that the refusal of a prefix lists."""


@dataclass(frozen=True)
class Renaming:
    """What is done to every name, in this order.

    strip_prefix  segments that are removed from the head of the names that begin with them
    rename        patterns `OLD=NEW`: a key that OLD matches is named by NEW, any other stays
    add_prefix    segments that are put before all names
    """

    strip_prefix: str = ""
    rename: tuple[str, ...] = ()
    add_prefix: str = ""

    def __bool__(self) -> bool:
        return bool(self.strip_prefix or self.rename or self.add_prefix)

    @classmethod
    def of(
        cls,
        strip_prefix: str | None = None,
        rename: Patterns = (),
        add_prefix: str | None = None,
    ) -> Renaming:
        """Return the renaming of options as a user gives them.

        Raises ArgumentError CKM516 for a value of the wrong kind, PlanError CKM618 for an empty
        prefix and for a pattern that is malformed or no bijection.
        """
        if isinstance(rename, Mapping):
            rename = [f"{old}={new}" for old, new in rename.items()]
        patterns = argument_checks.patterns("rename", rename)
        for text in patterns:
            parse_pattern(text)
        strip = "" if strip_prefix is None else _prefix("strip_prefix", strip_prefix)
        add = "" if add_prefix is None else _prefix("add_prefix", add_prefix)
        return cls(strip, patterns, add)

    @property
    def arguments(self) -> str:
        """The renaming as keyword arguments: `strip_prefix='student', rename=['a.{x}=b.{x}']`."""
        given = (
            ("strip_prefix", self.strip_prefix),
            ("rename", list(self.rename)),
            ("add_prefix", self.add_prefix),
        )
        return ", ".join(f"{name}={value!r}" for name, value in given if value)

    @cached_property
    def patterns(self) -> tuple[RenamePattern, ...]:
        return tuple(map(parse_pattern, self.rename))

    def record(self) -> dict[str, object]:
        """Return JSON, for a manifest; `Renaming.recorded` reads it."""
        return {
            "strip_prefix": self.strip_prefix,
            "rename": list(self.rename),
            "add_prefix": self.add_prefix,
        }

    @classmethod
    def recorded(cls, record: object) -> Renaming:
        """Return the renaming that `record` made. Raises PlanError CKM618 where it made none."""
        given = record if isinstance(record, Mapping) else {}
        rename = given.get("rename")
        values = (given.get("strip_prefix"), given.get("add_prefix"))
        if not isinstance(rename, list | tuple) or not all(
            isinstance(value, str) for value in (*values, *rename)
        ):
            raise PlanError(
                "CKM618",
                "the manifest's record of new names is malformed",
                "convert the source again: ckptmap did not write this record",
            )
        return cls(str(values[0]), tuple(map(str, rename)), str(values[1]))

    def names(self, keys: Collection[str], where: str) -> dict[str, str]:
        """Return key -> new name, in the given order.

        Raises PlanError CKM618 where a prefix or a pattern matches no key, or a new name could not be
        read back; CKM114 where two keys would become one name.
        """
        stripped = self._stripped(keys, where)
        named = self._by_patterns(stripped, where)
        if self.add_prefix:
            named = {key: f"{self.add_prefix}.{name}" for key, name in named.items()}
        self.require_distinct(named, where)
        _require_readable(named, where)
        return named

    def lenient(self, known: Mapping[str, str]) -> Callable[[str], str]:
        """Return a function that names any key: as `known` does, else by the same rules. It is for keys
        beside those that `names` has checked."""

        def name(key: str) -> str:
            if key in known:
                return known[key]
            fqn = key.removeprefix(f"{self.strip_prefix}.") if self.strip_prefix else key
            fqn = next(iter(self._results(fqn)), fqn)
            return f"{self.add_prefix}.{fqn}" if self.add_prefix else fqn

        return name

    # ------------------------------------------------------------------ the three steps

    def _stripped(self, keys: Collection[str], where: str) -> dict[str, str]:
        if not self.strip_prefix:
            return dict(zip(keys, keys, strict=True))
        head = f"{self.strip_prefix}."
        stripped = {key: key.removeprefix(head) for key in keys}
        if keys and all(key == name for key, name in stripped.items()):
            raise PlanError(
                "CKM618",
                f"{where}: --strip-prefix {self.strip_prefix!r}: no name begins with"
                f" {head!r}, the first is {next(iter(keys))!r}",
                self._without_wrapper(keys)
                or f"names begin with {_heads(keys)}; those of wrappers are off already",
            )
        return stripped

    def _without_wrapper(self, keys: Collection[str]) -> str:
        """Return a hint where the prefix is right but for DDP's segment, which is off already; else ""."""
        rest = self.strip_prefix.removeprefix(f"{HEAD}.")
        if rest == self.strip_prefix or not any(key.startswith(f"{rest}.") for key in keys):
            return ""
        return f"{HEAD!r} of DDP is off already: {advised(strip_prefix=rest)}"

    def _by_patterns(self, stripped: Mapping[str, str], where: str) -> dict[str, str]:
        """Return key -> name after every pattern, of key -> name without the prefix."""
        if not self.patterns:
            return dict(stripped)
        named: dict[str, str] = {}
        unused = dict.fromkeys(pattern.text for pattern in self.patterns)
        for key, name in stripped.items():
            results = self._results(name)
            for texts in results.values():
                for text in texts:
                    unused.pop(text, None)
            if len(results) > 1:
                (first, one), (second, two) = list(results.items())[:2]
                raise PlanError(
                    "CKM618",
                    f"{where}: {name!r} matches --rename {one[0]!r}, as {first!r}, and"
                    f" --rename {two[0]!r}, as {second!r}",
                    "change the patterns so that one of them matches it",
                )
            named[key] = next(iter(results), name)
        for text in unused:
            raise PlanError(
                "CKM618",
                f"{where}: --rename {text!r} matches no name, the first is"
                f" {next(iter(stripped.values()), 'none')!r}",
                _whole_below(text, stripped.values())
                + f"names begin with {_heads(stripped.values())}; a pattern is a whole name, in which"
                " {x} takes one segment or more",
            )
        return named

    def _results(self, name: str) -> dict[str, list[str]]:
        """Return the names that patterns give, each with the patterns that give it."""
        results: dict[str, list[str]] = {}
        for pattern in self.patterns:
            renamed = pattern.renamed(name)
            if renamed is not None:
                results.setdefault(renamed, []).append(pattern.text)
        return results

    def require_distinct(self, named: Mapping[str, str], where: str) -> None:
        """Raise PlanError CKM114 where two keys have one new name."""
        if len(set(named.values())) == len(named):
            return
        key_of: dict[str, str] = {}
        for key, name in named.items():
            first = key_of.setdefault(name, key)
            if first == key:
                continue
            kept = name if first == name else key
            aside = f"other.{kept}"
            hint = f"move one out of the way: {advised(rename=f'{kept}={aside}', drop=aside)}"
            if self.strip_prefix:
                whole = advised(rename=f"{self.strip_prefix}.{{x}}={{x}}")
                hint += f", and {whole} in place of --strip-prefix"
            raise PlanError(
                "CKM114", f"{where}: {first!r} and {key!r} would both become {name!r}", hint
            )


def _prefix(name: str, text: str) -> str:
    """Return a prefix without the dot at its end and without segments of wrappers."""
    argument_checks.string(name, text)
    segments = text.removesuffix(".").split(".")
    shown = f"--{name.replace('_', '-')} {text!r}"
    if name == "add_prefix" and (wrapper := _wrapper(segments)):
        raise PlanError(
            "CKM618",
            f"{shown}: readers take the segment {SEGMENTS.get(wrapper, LIGHTNING)!r} for a wrapper",
            f"name the weights as below that wrapper: {advised(wrap=wrapper)}"
            if wrapper in SEGMENTS
            else "choose another prefix: Lightning puts this one on by itself",
        )
    kept = [segment for segment in segments if segment not in ANYWHERE]
    if not kept:
        raise PlanError(
            "CKM618",
            f"{shown}: the segments of wrappers come off by themselves",
            f"leave --{name.replace('_', '-')} out",
        )
    if not all(kept):
        raise PlanError(
            "CKM618",
            f"{shown}: expected segments of a name, with dots between them",
            f"for example {advised(**{name: 'model'})}",
        )
    return ".".join(kept)


def _wrapper(segments: Collection[str]) -> str | None:
    """Return the wrapper that puts one of these segments into names; DDP's may be an attribute, too."""
    names = {"Lightning's": LIGHTNING, **SEGMENTS}
    return next(
        (name for name, segment in names.items() if segment in ANYWHERE and segment in segments),
        None,
    )


def _require_readable(named: Mapping[str, str], where: str) -> None:
    """Raise PlanError CKM618 for a name that is empty or that would be read back as another."""
    text = "\n".join(named.values())
    if "" not in named.values() and not any(segment in text for segment in ANYWHERE):
        return
    for key, name in named.items():
        wrapper = _wrapper(name.split("."))
        if not name or wrapper:
            what = f"is the segment of a wrapper, {wrapper}" if wrapper else "is empty"
            raise PlanError(
                "CKM618",
                f"{where}: {key!r} would become {name!r}, which {what}",
                "choose other names; --wrap puts the segments of wrappers before all of them",
            )


def _whole_below(text: str, names: Iterable[str]) -> str:
    """Return the pattern for all names below a module that was given without a capture, as the begin of a hint."""
    old, new = (side.strip() for side in text.split("="))
    if "{" in text or not any(name.startswith(f"{old}.") for name in names):
        return ""
    meant = advised(rename=f"{old}.{{x}}={new}.{{x}}")
    return f"all names below it are renamed by {meant}; "


def _heads(keys: Collection[str]) -> str:
    """Return the first segments of names, as a hint lists them."""
    return ", ".join(repr(head) for head in _first_heads(keys)) or "nothing"


def _first_heads(keys: Collection[str]) -> Iterator[str]:
    heads = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    yield from heads[:HEADS_SHOWN]
    if len(heads) > HEADS_SHOWN:
        yield "..."
