"""Which naming scheme are these keys in? By the fingerprints of mapping files, then by coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import SUFFIX, CatalogEntry, available, find
from ckptmap.mapping.name_patterns import NamePattern, skeleton, skeletons, tail
from ckptmap.mapping.rules import HUB, Detect, NamingScheme
from ckptmap.tensors import TensorInfo

AUTO = "auto"
MEMORY = "hf-memory"
"""The names of a model in memory: the hub's, in every family that has no file for them."""


@dataclass(frozen=True)
class SchemeChoice:
    """From one scheme to another; None: the hub's names, of no known family."""

    source: NamingScheme | None
    target: NamingScheme | None

    @property
    def text(self) -> str:
        return f"{_title(self.source)} -> {_title(self.target)}"


def _loaded(entry: CatalogEntry | None) -> NamingScheme | None:
    return None if entry is None else entry.load()


def _title(scheme: NamingScheme | None) -> str:
    return HUB if scheme is None else scheme.title


class KeyCounts:
    """The keys of a checkpoint as fingerprints see them."""

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = keys
        self.count = len(keys)
        self.skeletons = Counter(skeletons(keys))

    def has(self, name: NamePattern) -> bool:
        if name.skeleton not in self.skeletons:
            return False
        literal = [(i, hole) for i, hole in enumerate(name.holes) if isinstance(hole, int)]
        if not literal:
            return True
        found = (numbers for shape, numbers in map(skeleton, self.keys) if shape == name.skeleton)
        return any(all(numbers[i] == hole for i, hole in literal) for numbers in found)

    def match(self, detect: Detect) -> bool:
        """A file without fingerprints recognises nothing."""
        if not (detect.any or detect.all):
            return False
        return (
            (not detect.any or any(map(self.has, detect.any)))
            and all(map(self.has, detect.all))
            and not any(map(self.has, detect.none))
        )

    def left(self, scheme: NamingScheme, hub: bool) -> int:
        """How many keys no rule of one side knows."""
        known = {
            name.skeleton for rule in scheme.rules for term in rule.side(hub) for name in term.names
        }
        known |= {name.skeleton for drop in scheme.drops if drop.hub == hub for name in drop.names}
        return sum(
            count
            for shape, count in self.skeletons.items()
            if shape not in known and (tail(shape) or ("",))[0] not in known
        )


def recognise(
    keys: Collection[str], config: Mapping[str, object] | None = None
) -> list[CatalogEntry]:
    """The schemes whose fingerprints these keys have; those for the config's model type alone, if
    there are any."""
    seen = KeyCounts(keys)
    return _for_model([entry for entry in available() if seen.match(entry.detect)], config)


def model_types(config: Mapping[str, object] | None) -> list[str]:
    """`model_type` of the config, and of the text model in it."""
    text = (config or {}).get("text_config")
    configs = (config or {}, text if isinstance(text, Mapping) else {})
    return [str(c["model_type"]) for c in configs if c.get("model_type")]


def _for_model(
    entries: Sequence[CatalogEntry], config: Mapping[str, object] | None
) -> list[CatalogEntry]:
    wanted = set(model_types(config))
    found = [entry for entry in entries if wanted.intersection(entry.models)]
    return found or list(entries)


def _latest(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """Of each family the latest era: `find` sorts them first."""
    found: dict[str, CatalogEntry] = {}
    for entry in entries:
        found.setdefault(entry.family, entry)
    return list(found.values())


def _shares(entry: CatalogEntry, source: CatalogEntry) -> bool:
    """Are both for the same models?"""
    return entry.family == source.family or not set(entry.models).isdisjoint(source.models)


def _of(entries: Sequence[CatalogEntry], source: CatalogEntry | None) -> list[CatalogEntry]:
    """Those of the source's family, or else for its models."""
    if source is None:
        return []
    mine = [entry for entry in entries if entry.family == source.family]
    return mine or [entry for entry in entries if _shares(entry, source)]


def choose(
    keys: Collection[str] | Mapping[str, TensorInfo],
    names: str,
    names_from: str | None = None,
    config: Mapping[str, object] | None = None,
) -> SchemeChoice:
    """What `--names` and `--names-from` mean for these keys.

    keys        with the shapes of the tensors, where these are known: of schemes that have the same
                names, such as transformers' and nanoGPT's GPT-2, those whose shapes fit are left
    names       `auto` or `hf`; a scheme, with or without family and era; a mapping file
    names_from  likewise, for the source; None: by fingerprint
    Raises PlanError CKM603 where a name is unknown, CKM604 where the source is not recognised, or
    could be of several schemes.
    """
    return _Choosing(keys, names, names_from, config).choice()


class _Choosing:
    def __init__(
        self,
        keys: Collection[str] | Mapping[str, TensorInfo],
        names: str,
        names_from: str | None,
        config: Mapping[str, object] | None,
    ) -> None:
        self.names, self.names_from, self.config = names, names_from, config
        self.keys, self.seen = keys, KeyCounts(keys)
        self.infos = keys if isinstance(keys, Mapping) else None

    def choice(self) -> SchemeChoice:
        if self.names in (AUTO, HUB):
            source = self._source(())
            if source is None:
                raise self.unrecognised()
            return SchemeChoice(self._for_this(source).load(), None)
        entries = find(self.names)
        source = self._source({entry.family for entry in entries})
        if self.names.endswith(SUFFIX):
            return self._by_file(entries[0].load(), source)
        if self.names == MEMORY and source is not None and not _of(entries, source):
            return SchemeChoice(self._for_this(source).load(), None)
        return SchemeChoice(
            _loaded(source), self._for_this(self._target(_latest(entries), source)).load()
        )

    # ------------------------------------------------------------------ the source

    def _source(self, families: Collection[str]) -> CatalogEntry | None:
        """The one scheme that the keys are in, of these families if that decides; None: not
        recognised."""
        if self.names_from is not None:
            hubs = self.names_from == HUB
            found = [e for e in available() if e.name == HUB] if hubs else find(self.names_from)
            return self._best(found, families)
        found = [entry for entry in available() if self.seen.match(entry.detect)]
        return self._best(found, families) if found else None

    def _best(self, entries: Sequence[CatalogEntry], families: Collection[str]) -> CatalogEntry:
        """The one that knows most keys; of several that know as many, the one for the model."""
        entries = _for_model(entries, self.config)
        if len(entries) == 1:
            return entries[0]
        left = {e.title: self.seen.left(e.load(), e.name == HUB) for e in entries}
        found = [entry for entry in entries if left[entry.title] == min(left.values())]
        found = [entry for entry in found if entry.family in families] or found
        if len(found) > 1:
            found = [entry for entry in found if self._fits(entry)] or found
        if len(found) > 1 and any(entry.name != HUB for entry in found):
            raise PlanError(
                "CKM604",
                f"the keys could be of {', '.join(entry.title for entry in found)}",
                "say which with --names-from, or give the model's config.json with --config-from",
            )
        return found[0]

    def _fits(self, entry: CatalogEntry) -> bool:
        """Could tensors of these shapes be in the scheme?"""
        from ckptmap.mapping.resolve import resolve  # the engine: `inspect` needs the names only

        try:
            resolve(entry.load(), self.infos or {}, to_hub=True, config=self.config, complete=False)
        except PlanError as error:
            return error.code != "CKM606"
        return True

    # ------------------------------------------------------------------ the target

    def _by_file(self, scheme: NamingScheme, source: CatalogEntry | None) -> SchemeChoice:
        """To the scheme of a file; from it, where the keys are those of its own side."""
        mine, hub = (self.seen.left(scheme, side) for side in (False, True))
        if self.names_from is None and mine < hub:
            return SchemeChoice(scheme, None)
        return SchemeChoice(_loaded(source), scheme)

    def _target(self, entries: Sequence[CatalogEntry], source: CatalogEntry | None) -> CatalogEntry:
        """Of the source's family, else the one whose hub side knows the keys, else by the model."""
        mine = _of(entries, source)
        if mine:
            return mine[0]
        if source is not None and "/" not in self.names:
            sure = source.name != HUB or self._is_for_model(source)
            if sure and model_types(self.config):
                raise self._missing(source)
        entries = _for_model(entries, self.config)
        if source is None or source.name == HUB:
            left = {entry.title: self.seen.left(entry.load(), True) for entry in entries}
            if min(left.values()) == self.seen.count:
                raise self.unrecognised() if source is None else self._missing(source)
            entries = [entry for entry in entries if left[entry.title] == min(left.values())]
        if len(entries) > 1:
            raise PlanError(
                "CKM604",
                f"--names {self.names} could be {', '.join(entry.title for entry in entries)}",
                f"say which, for example --names {entries[0].title}, or give the model's"
                " config.json with --config-from",
            )
        return entries[0]

    # ------------------------------------------------------------------ nothing fits

    def _is_for_model(self, entry: CatalogEntry) -> bool:
        return not set(entry.models).isdisjoint(model_types(self.config))

    def _for_this(self, entry: CatalogEntry) -> CatalogEntry:
        """Names alike are not models alike (rotary order, norms of 1 + w): a family that is for other
        models than the config's is taken where it is asked for by its name, and never guessed."""
        types = model_types(self.config)
        asked = "/" in self.names or "/" in (self.names_from or "")
        family = [other for other in available() if other.family == entry.family]
        known = any(map(self._is_for_model, (entry, *family)))
        if entry.name == HUB or asked or not types or known:
            return entry
        option = "--names-from" if self.names in (AUTO, HUB, MEMORY) else "--names"
        raise PlanError(
            "CKM604",
            f"the names fit {entry.title}, but that is for {', '.join(entry.models)}, and the config"
            f" says model_type {types[0]!r}",
            f"if the model is built as those are, say so: {option} {entry.title}",
        )

    def _missing(self, source: CatalogEntry) -> PlanError:
        """The family is known, and has no such scheme."""
        names = sorted({entry.name for entry in available() if _shares(entry, source)} - {MEMORY})
        return PlanError(
            "CKM604",
            f"the keys are those of {source.title}, and {source.family} has no scheme"
            f" {self.names!r}, only {', '.join(names)}",
            "choose one of these, or give a mapping file of your own",
        )

    def unrecognised(self) -> PlanError:
        """With the reason that is most often behind it: one prefix too many."""
        hint = "see `ckptmap mappings list`; say which with --names-from, or give a mapping file"
        prefix = self._prefix()
        what = f"no naming scheme is known that has keys such as {next(iter(self.keys), 'none')!r}"
        if prefix:
            what = (
                f"all {self.seen.count} keys begin with {prefix!r}, and without it they are known"
            )
            hint = f"name the dict that holds the weights, or rename them without {prefix!r}"
        return PlanError("CKM604", what, hint)

    def _prefix(self) -> str:
        """A common beginning without which a scheme is recognised; "" where there is none."""
        heads = Counter(key.partition(".")[0] for key in self.keys)
        prefix = ""
        keys = list(self.keys)
        while len(heads) == 1 and keys:
            head = next(iter(heads)) + "."
            if not all(key.startswith(head) for key in keys):
                return ""
            prefix += head
            keys = [key[len(head) :] for key in keys]
            if recognise(keys, self.config):
                return prefix
            heads = Counter(key.partition(".")[0] for key in keys)
        return ""
