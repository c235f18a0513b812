"""Find the naming scheme of a checkpoint's keys: by the fingerprints of mapping files, then by coverage.

["tok_embeddings.weight", "layers.0.attention.wq.weight", ...]  ->  llama/meta
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptmap.core.formatting import some
from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import SUFFIX, CatalogEntry, available, find
from ckptmap.mapping.name_patterns import NamePattern, skeleton, skeletons, tail
from ckptmap.mapping.prefixes import PrefixChange, averaged_model, known_prefix
from ckptmap.mapping.rules import HUB, Detect, NamingScheme
from ckptmap.tensors import TensorInfo

AUTO = "auto"
MEMORY = "hf-memory"
"""The scheme of a transformers model in memory; the same as `hf` where a family has no file for it."""


@dataclass(frozen=True)
class SchemeChoice:
    """A source and a target scheme; None stands for the hub's names of an unknown family."""

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
    """The keys of a checkpoint, counted by skeleton (`layers.{}.w`).

    shapes  the skeletons of the keys; None: they are worked out
    """

    def __init__(self, keys: Collection[str], shapes: Sequence[str] | None = None) -> None:
        self.keys = keys
        self.count = len(keys)
        self.skeletons = Counter(skeletons(keys) if shapes is None else shapes)

    def has(self, name: NamePattern) -> bool:
        if name.skeleton not in self.skeletons:
            return False
        literal = [(i, hole) for i, hole in enumerate(name.holes) if isinstance(hole, int)]
        if not literal:
            return True
        numbers_of_name = (
            numbers for shape, numbers in map(skeleton, self.keys) if shape == name.skeleton
        )
        return any(all(numbers[i] == hole for i, hole in literal) for numbers in numbers_of_name)

    def match(self, detect: Detect) -> bool:
        """Return whether the keys have these fingerprints; a file without any matches nothing."""
        if not (detect.any or detect.all):
            return False
        return (
            (not detect.any or any(map(self.has, detect.any)))
            and all(map(self.has, detect.all))
            and not any(map(self.has, detect.none))
        )

    def left(self, scheme: NamingScheme, hub: bool) -> int:
        """Return how many keys no rule of one side matches."""
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
    keys: Collection[str],
    config: Mapping[str, object] | None = None,
    shapes: Sequence[str] | None = None,
    among: Sequence[CatalogEntry] | None = None,
) -> list[CatalogEntry]:
    """Return the schemes whose fingerprints these keys have, if possible only for the config's model.

    shapes  the skeletons of the keys, where the caller has them
    among   mapping files; None: all that are available
    """
    seen = KeyCounts(keys, shapes)
    entries = available() if among is None else among
    return _for_model(_recognised(seen, config, entries), config)


def known_below(
    keys: Collection[str],
    config: Mapping[str, object] | None = None,
    shapes: Sequence[str] | None = None,
) -> PrefixChange | None:
    """Return the prefix without which the keys are those of a known scheme, or of the model that
    torch's AveragedModel keeps; None: no prefix is the cause.

    shapes  the skeletons of the keys, where the caller has them
    """
    entries = available()
    return averaged_model(keys) or known_prefix(
        keys, lambda below: bool(recognise(below, config, among=entries)), shapes
    )


def model_types(config: Mapping[str, object] | None) -> list[str]:
    """Return `model_type` of the config and of the text model inside it."""
    text = (config or {}).get("text_config")
    configs = (config or {}, text if isinstance(text, Mapping) else {})
    return [str(c["model_type"]) for c in configs if c.get("model_type")]


def _recognised(
    seen: KeyCounts, config: Mapping[str, object] | None, among: Sequence[CatalogEntry]
) -> list[CatalogEntry]:
    """Return the schemes whose fingerprints the keys have, and those of the same names that are for the
    config's model, where they know every key and no fingerprint is of that model.

    Llama with biases in GGUF has Qwen2's fingerprint: only the config can tell.
    """
    entries = [entry for entry in among if seen.match(entry.detect)]
    types = set(model_types(config))
    if not types or any(types.intersection(entry.models) for entry in entries):
        return entries
    schemes = {(entry.name, entry.era) for entry in entries if entry.name != HUB}
    return entries + [
        entry
        for entry in among
        if (entry.name, entry.era) in schemes
        and types.intersection(entry.models)
        and not seen.left(entry.load(), False)
    ]


def _for_model(
    entries: Sequence[CatalogEntry], config: Mapping[str, object] | None
) -> list[CatalogEntry]:
    types = set(model_types(config))
    matches = [entry for entry in entries if types.intersection(entry.models)]
    return matches or list(entries)


def _latest(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """Return the latest era of each family: `find` sorts it first."""
    by_family: dict[str, CatalogEntry] = {}
    for entry in entries:
        by_family.setdefault(entry.family, entry)
    return list(by_family.values())


def _shares(entry: CatalogEntry, source: CatalogEntry) -> bool:
    """Return whether two schemes are for the same models."""
    return entry.family == source.family or not set(entry.models).isdisjoint(source.models)


def _of(entries: Sequence[CatalogEntry], source: CatalogEntry | None) -> list[CatalogEntry]:
    """Return the entries of the source's family, else those for its models."""
    if source is None:
        return []
    own_family = [entry for entry in entries if entry.family == source.family]
    return own_family or [entry for entry in entries if _shares(entry, source)]


def choose(
    keys: Collection[str] | Mapping[str, TensorInfo],
    names: str,
    names_from: str | None = None,
    config: Mapping[str, object] | None = None,
    unmapped: str = "",
) -> SchemeChoice:
    """Return the schemes that `--names` and `--names-from` mean for these keys.

    keys        the keys, with shapes where known: schemes with equal names, such as GPT-2 in
                transformers and in nanoGPT, are told apart by shape
    names       `auto` or `hf`; a scheme, with or without family and era; or a mapping file
    names_from  the source's scheme in the same form; None: by fingerprint
    unmapped    what the source says of itself: a model for which there is no scheme, whatever its names fit

    Raises PlanError CKM603 where a name is unknown, CKM604 where the source is not recognized or could
    be in several schemes, or is another model than they are for.
    """
    chosen = _Choosing(keys, names, names_from, config)
    if unmapped and config is None and not chosen.asked:
        raise PlanError(
            "CKM604",
            f"no mapping file is for {unmapped[:60]!r}, the model that the file says it holds",
            "if it is built like a model of `ckptmap mappings list`, name that scheme with --names-from and give its"
            " config.json with --config-from",
        )
    return chosen.choice()


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

    @property
    def asked(self) -> bool:
        """Whether a family or a mapping file is named, whatever the config says."""
        given = (self.names, self.names_from or "")
        return any("/" in name or name.endswith(SUFFIX) for name in given)

    def choice(self) -> SchemeChoice:
        if self.names in (AUTO, HUB):
            source = self._source(())
            if source is None:
                raise self.unrecognized()
            return SchemeChoice(self._for_this(source).load(), None)
        entries = find(self.names)
        source = self._source({entry.family for entry in entries})
        if self.names.endswith(SUFFIX):
            return self._by_file(entries[0].load(), source)
        if self.names == MEMORY and source is not None and not _of(entries, source):
            return SchemeChoice(self._for_this(source).load(), None)
        target = self._target(_latest(entries), source)
        if source is not None and target.name == HUB and not _shares(target, source):
            raise self._other_family(source, target)
        return SchemeChoice(_loaded(source), self._for_this(target).load())

    # ------------------------------------------------------------------ the source

    def _source(self, families: Collection[str]) -> CatalogEntry | None:
        """Return the scheme of the keys, None where it is not recognized.

        Among several, one of `families` wins.
        """
        if self.names_from is not None:
            hubs = self.names_from == HUB
            candidates = (
                [e for e in available() if e.name == HUB]
                if hubs
                else find(self.names_from, "--names-from")
            )
            return self._best(candidates, families)
        candidates = _recognised(self.seen, self.config, available())
        return self._best(candidates, families) if candidates else None

    def _best(self, entries: Sequence[CatalogEntry], families: Collection[str]) -> CatalogEntry:
        """Return the scheme that matches most keys; among equals, the one for the config's model."""
        entries = _for_model(entries, self.config)
        if len(entries) == 1:
            return entries[0]
        left = {e.title: self.seen.left(e.load(), e.name == HUB) for e in entries}
        best = [entry for entry in entries if left[entry.title] == min(left.values())]
        best = [entry for entry in best if entry.family in families] or best
        if len(best) > 1:
            best = [entry for entry in best if self._fits(entry)] or best
        if len(best) > 1 and any(entry.name != HUB for entry in best):
            self._refuse_strangers(best)
            raise PlanError(
                "CKM604",
                f"the keys could be of {', '.join(entry.title for entry in best)}",
                "say which with --names-from, or give the model's config.json with --config-from",
            )
        return best[0]

    def _fits(self, entry: CatalogEntry) -> bool:
        """Return whether the shapes fit the scheme."""
        from ckptmap.mapping.resolve import resolve  # the engine: `inspect` needs the names only

        try:
            resolve(entry.load(), self.infos or {}, to_hub=True, config=self.config, complete=False)
        except PlanError as error:
            return error.code != "CKM606"
        return True

    # ------------------------------------------------------------------ the target

    def _by_file(self, scheme: NamingScheme, source: CatalogEntry | None) -> SchemeChoice:
        """Return the choice for a mapping file: to its scheme, or from it where the keys are in it already."""
        unmatched, unmatched_by_hub = (self.seen.left(scheme, side) for side in (False, True))
        if self.names_from is None and unmatched < unmatched_by_hub:
            return SchemeChoice(scheme, None)
        return SchemeChoice(_loaded(source), scheme)

    def _target(self, entries: Sequence[CatalogEntry], source: CatalogEntry | None) -> CatalogEntry:
        """Return the target in the source's family, else by the keys its hub side matches, else by model."""
        candidates = _of(entries, source)
        if candidates:
            return candidates[0]
        if source is not None and "/" not in self.names:
            sure = source.name != HUB or self._is_for_model(source)
            if sure and model_types(self.config):
                raise self._missing(source)
        entries = _for_model(entries, self.config)
        if source is None or source.name == HUB:
            left = {entry.title: self.seen.left(entry.load(), True) for entry in entries}
            if min(left.values()) == self.seen.count:
                if source is None:
                    raise self.unrecognized()
                raise self._missing(source)
            entries = [entry for entry in entries if left[entry.title] == min(left.values())]
        if len(entries) > 1:
            self._refuse_strangers(entries)
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
        """Return the entry, or raise PlanError CKM604 where its family is for other models.

        Equal names do not make equal models (rotary order, norms of 1 + w): such a family is used only
        when it is asked for by name.
        """
        types = model_types(self.config)
        family = [other for other in available() if other.family == entry.family]
        known = any(map(self._is_for_model, (entry, *family)))
        if entry.name == HUB or self.asked or not types or known:
            return entry
        option = "--names-from" if self.names in (AUTO, HUB, MEMORY) else "--names"
        raise PlanError(
            "CKM604",
            f"the names fit {entry.title}, but that is for {some(entry.models)}, and the config"
            f" says model_type {types[0]!r}",
            f"if the model is built like one of those, add {option} {entry.title}",
        )

    def _refuse_strangers(self, entries: Sequence[CatalogEntry]) -> None:
        """Raise PlanError CKM604 where the config is of a model that none of several schemes is for."""
        types = model_types(self.config)
        if self.asked or not types or any(map(self._is_for_model, entries)):
            return
        option = "--names-from" if self.names in (AUTO, HUB, MEMORY) else "--names"
        models = sorted({model for entry in entries for model in entry.models})
        raise PlanError(
            "CKM604",
            f"the names fit {some([entry.title for entry in entries])}, but those are for {some(models)}, and the config"
            f" says model_type {types[0]!r}",
            f"if the model is built like one of those, name its scheme: {option} {entries[0].title}",
        )

    def _missing(self, source: CatalogEntry) -> PlanError:
        """Return the error for a known family without the scheme that was asked for."""
        names = sorted({entry.name for entry in available() if _shares(entry, source)} - {MEMORY})
        return PlanError(
            "CKM604",
            f"the keys are in the scheme {source.title}, and {source.family} has no scheme"
            f" {self.names!r}, only {', '.join(names)}",
            "choose one of these, or give a mapping file of your own",
        )

    def _other_family(self, source: CatalogEntry, target: CatalogEntry) -> PlanError:
        """Return the error for the names on disk of a family that the keys are not of: no rule leads there."""
        return PlanError(
            "CKM604",
            f"--names {self.names}: the keys are those of {source.title}, and {target.title} names other models"
            f" ({some(target.models)}): it would change no name",
            "names on disk are those of the family of the keys: --names hf",
        )

    def unrecognized(self) -> PlanError:
        """Return the error for unknown keys; a superfluous common prefix is the most frequent cause."""
        hint = (
            "name the scheme with --names-from (ckptmap mappings list), or draft a mapping file:"
            " ckptmap mappings new --from HF_MODEL --to THIS"
        )
        problem = f"no known naming scheme has keys such as {next(iter(self.keys), 'none')!r}"
        change = known_below(self.keys, self.config)
        if change is not None:
            count = self.seen.count
            keys = f"all {count}" if change.matched == count else f"{change.matched} of {count}"
            problem = f"{keys} keys begin with '{change.old}.', and without it they are known"
            hint = f"add {change.options}"
        return PlanError("CKM604", problem, hint)
