"""What a checkpoint holds, from its headers: a block of facts, then a table with layers folded.

`ckptmap inspect` prints it, and `ckptmap report` draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptmap.checkpoint.checkpoint import Checkpoint
from ckptmap.core.columns import distinct, distinct_at, each
from ckptmap.core.formatting import counted, human, some
from ckptmap.core.name_globs import matches, suggestion
from ckptmap.core.name_shapes import digit_masks
from ckptmap.core.printable import advised, as_lines, quote
from ckptmap.core.state_paths import join
from ckptmap.core.tensor_table import KeyPattern, TensorSummary, fold, table
from ckptmap.errors import CkptmapError
from ckptmap.mapping.detect import known_below, recognise
from ckptmap.mapping.model_config import config_beside
from ckptmap.mapping.name_patterns import skeletons
from ckptmap.mapping.wrappers import ADAPTER, BASE_LAYER
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.tensors import TensorInfo

SHOWN = 8
"""Entries of `extra`, wrappers and ties that the text lists; JSON has all."""
METADATA_SHOWN = 24
"""Keys of the metadata of a GGUF file that the text lists, each on a line."""
EQUAL_SHOWN = 4
"""Names of one tensor that the text lists: a mask may have one for each layer."""


class Look(NamedTuple):
    """The facts of a tensor that its row of the table and the counts above it show."""

    shape: tuple[int, ...]
    dtype: str
    encoding: str
    nbytes: int
    kind: tuple[str]


class InspectReport:
    """The report of one checkpoint. `keys` is a glob over names that limits only the table."""

    def __init__(self, ckpt: Checkpoint, keys: str = "*") -> None:
        self.ckpt = ckpt
        self.keys = keys
        self.notes = list(ckpt.notes)
        names = list(ckpt)
        looks = _looks(ckpt, names)
        self.looks = dict(zip(names, looks, strict=True))
        self.kinds = _counts(looks)
        if ckpt.optimizer_by_index and ckpt.optimizer_reader.config is not None:
            ckpt.optimizer_reader.named()  # builds the transformers class, as `plan` does
        named = {} if ckpt.optimizer_by_index else ckpt.optimizer
        self.states = [lazy for states in named.values() for lazy in states.values()]
        self.other = list(ckpt.other.values())
        self._masks = digit_masks(names)
        shapes = skeletons(names)
        self.schemes = recognise(names, self._config(), shapes)
        self.notes += self._prefix_notes(names, shapes)
        self.notes += self._adapter_notes(shapes)

    # ------------------------------------------------------------------ as JSON

    def to_json(self) -> dict[str, object]:
        ckpt = self.ckpt
        return {
            "path": ckpt.shown,
            "container": ckpt.index.container,
            "setup": ckpt.setup,
            "world_size": ckpt.world_size,
            "wrappers": list(ckpt.wrappers),
            "about": ckpt.index.about,
            "metadata": dict(ckpt.index.metadata),
            "names": [t for entry in self.schemes for t in (entry.title, *entry.aliases)],
            "encodings": dict(self._count_by("encoding")),
            "dtypes": dict(self._count_by("dtype")),
            "totals": {
                "tensors": len(self.looks),
                "numel": self.numel(),
                "nbytes": self._nbytes(),
                "files": len(ckpt.index.files),
            },
            "optimizer": self._optimizer(),
            "tied": [list(names) for names in self.ckpt.sharing()],
            "extra": ckpt.extra,
            "refused": [
                {"key": item.key, "reason": item.reason, "droppable": item.droppable}
                for item in ckpt.refused
            ],
            "notes": self.notes,
            "tensors": [_entry(role, lazy, ckpt) for role, lazy in self._matching_tensors()],
        }

    def _config(self) -> dict[str, object] | None:
        """Return the config.json beside the weights, None without one; note why one cannot be read."""
        try:
            return config_beside(self.ckpt.sidecar_dir, self.ckpt.files.mounts)
        except CkptmapError as error:
            other = "where a command needs one, give another with --config-from PATH"
            self.notes.append(f"{error.message}; {other}")
            return None

    def _prefix_notes(self, names: list[str], shapes: Sequence[str]) -> list[str]:
        """Return a note where the names are known without a prefix, with the options that take it off."""
        try:
            chosen = bool(self.schemes or self.ckpt.renamings)
            change = None if chosen else known_below(names, shapes=shapes)
        except CkptmapError:  # a malformed mapping file
            return []
        if change is None:
            return []
        drop = f", in convert also {change.drop_options}" if change.drop else ""
        return [
            f"{change.matched} of {change.wanted} names begin with '{change.old}.', and are known without"
            f" it: add {change.names_option}{drop}"
        ]

    def _adapter_notes(self, shapes: Sequence[str]) -> list[str]:
        """Return a note where a model was saved as peft has wrapped it: nothing loads it as it is."""
        kinds = set(shapes)
        if not any(BASE_LAYER in kind for kind in kinds) or not any(
            ADAPTER in kind for kind in kinds
        ):
            return []
        source = quote(self.ckpt.shown)
        return [
            "a model that peft has wrapped, with its adapter; one model is made of it by: ckptmap merge BASE"
            f" {source} DST --adapter-config adapter_config.json"
        ]

    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(prod(look.shape) * count for look, count in self.kinds.items())

    def _nbytes(self) -> int:
        return sum(look.nbytes * count for look, count in self.kinds.items())

    def _count_by(self, field: str) -> Counter[str]:
        """Return the number of tensors by dtype or by encoding."""
        counts: Counter[str] = Counter()
        for look, count in self.kinds.items():
            counts[look.dtype if field == "dtype" else look.encoding] += count
        return counts

    def _optimizer(self) -> dict[str, Any]:
        ckpt = self.ckpt
        if ckpt.optimizer_by_index:
            # SGD without momentum has an empty dict, which is a leaf.
            paths = [path for path in ckpt.roles.optimizer if path[:1] == ("state",)]
            keys = {path[1] for path in paths if len(path) > 1}
            return {"keyed_by": "index", "parameters": len(keys)}
        names = dict.fromkeys(name for states in ckpt.optimizer.values() for name in states)
        return {
            "keyed_by": "fqn" if ckpt.optimizer else None,
            "parameters": len(ckpt.optimizer),
            "states": list(names),
            "nbytes": sum(lazy.nbytes for lazy in self.states),
        }

    def _matching_tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield role and tensor of everything that `keys` matches."""
        for role, tensors in (
            ("model", self.ckpt.values()), ("optimizer", self.states), ("other", self.other)
        ):  # fmt: skip
            for lazy in tensors:
                if self._matches_keys(lazy.fqn):
                    yield role, lazy

    def _matches_keys(self, fqn: str) -> bool:
        return self.keys == "*" or matches(fqn, self.keys)

    # ------------------------------------------------------------------ as text

    def __str__(self) -> str:
        facts = [(name, text) for name, text in self.facts() if text]
        block = [f"  {name:<11}{text}" for name, text in facts]
        lines = self._table()
        if not lines:
            meant = suggestion(self.keys, list(self.ckpt))
            lines = [f"  no tensor has such a name; {meant}".rstrip("; ")]
        return as_lines([self.ckpt.shown, *block, "", *lines])

    def _table(self) -> list[str]:
        """Return the lines of the table. Optimizer state, which repeats every weight two or three
        times, is listed only where `keys` is given."""
        names, looks = self._rows(with_states=self.keys != "*")
        only_weights = self.keys == "*" and len(names) == len(self._masks)
        return table(names, looks, self._masks if only_weights else None)

    def patterns(self) -> list[KeyPattern]:
        """Return the rows of the table, optimizer state among them."""
        return fold(*self._rows(with_states=True))

    def _rows(self, with_states: bool) -> tuple[list[str], list[TensorSummary]]:
        """Return the names that `keys` matches, and what the table shows of each."""
        summaries = self.looks
        if self.keys != "*":
            summaries = {fqn: look for fqn, look in summaries.items() if self._matches_keys(fqn)}
        names = list(summaries)
        looks = each(summaries.values(), lambda look: _row("model", look))
        states = [("optimizer", lazy) for lazy in self.states if with_states]
        for role, lazy in (*states, *(("other", lazy) for lazy in self.other)):
            if self._matches_keys(lazy.fqn):
                names.append(lazy.fqn)
                looks.append(_row(role, look_of(lazy)))
        return names, looks

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each fact; the text is empty where there is none."""
        ckpt = self.ckpt
        world = f", written by {ckpt.world_size} ranks" if ckpt.world_size > 1 else ""
        files = counted(len(ckpt.index.files), "file")
        yield "container", f"{ckpt.index.container}, {files}{world}"
        yield "setup", ckpt.setup
        yield "about", ckpt.index.about
        yield "wrappers", some(list(ckpt.wrappers), SHOWN)
        yield "names", " or ".join(entry.title_with_aliases for entry in self.schemes)
        numel = self.numel()
        size = human(self._nbytes())
        yield "weights", f"{counted(len(self.looks), 'tensor')}, {numel:,} parameters, {size}"
        yield "dtypes", _histogram(self._count_by("dtype"))
        yield "encodings", _histogram(self._count_by("encoding"))
        yield "tied", some([_as_equal(names) for names in self.ckpt.sharing()], SHOWN)
        yield "optimizer", self.optimizer_line()
        yield "other", counted(len(self.other), "tensor") if self.other else ""
        extra = [f"{join(path)} = {_short_text(value)}" for path, value in ckpt.plain.items()]
        yield "extra", some(extra, SHOWN)
        told = [f"{key} = {value}" for key, value in ckpt.index.metadata.items()]
        for number, line in enumerate(told[:METADATA_SHOWN]):
            yield "" if number else "metadata", line
        more = len(told) - METADATA_SHOWN
        yield "", f"and {more:,} more (all of them with --json)" if more > 0 else ""
        for item in ckpt.refused:
            option = f"; {advised(drop=item.key)} leaves it behind" if item.droppable else ""
            yield "refused", f"{item.key}: {item.reason}{option}"
        for note in self.notes:
            yield "note", note

    def optimizer_line(self) -> str:
        """Return what there is of optimizer state; "" where there is none."""
        optimizer = self._optimizer()
        if optimizer["keyed_by"] is None:
            return ""
        count = counted(optimizer["parameters"], "parameter")
        if optimizer["keyed_by"] == "index":
            told = "the file does not say which is which, a config.json would (--like PATH)"
            return f"state of {count}, keyed by index: {told}"
        return f"state of {count} by name: {', '.join(optimizer['states'])}, {human(optimizer['nbytes'])}"


def _entry(role: str, lazy: LazyTensor, ckpt: Checkpoint) -> dict[str, object]:
    return {
        "fqn": lazy.fqn,
        "key": ckpt.names.get(lazy.fqn, lazy.fqn) if role == "model" else lazy.fqn,
        "role": role,
        "shape": list(lazy.shape),
        "dtype": lazy.dtype,
        "encoding": lazy.encoding,
        "nbytes": lazy.nbytes,
    }


def _row(role: str, look: Look) -> TensorSummary:
    return TensorSummary(role, look.shape, look.kind, "", look.nbytes)


def _plain(info: TensorInfo) -> Look:
    return Look(info.shape, info.dtype, "dense", info.nbytes, (info.dtype,))


def _looks(ckpt: Checkpoint, names: Sequence[str]) -> list[Look]:
    """Return the facts of each weight: one object for all of one kind."""
    kinds = ckpt.kinds(names)
    look = {
        id(kind): _plain(kind) if isinstance(kind, TensorInfo) else look_of(ckpt[names[number]])
        for number, kind in distinct_at(kinds)
    }
    return list(map(look.__getitem__, map(id, kinds)))


def _counts(looks: Sequence[Look]) -> Counter[Look]:
    """Return how many weights share each set of facts, of which there are few."""
    many = Counter(map(id, looks))
    kinds: Counter[Look] = Counter()
    for look in distinct(looks).values():
        kinds[look] += many[id(look)]
    return kinds


def look_of(lazy: LazyTensor) -> Look:
    """Return the facts of one tensor."""
    return Look(lazy.shape, lazy.dtype, lazy.encoding, lazy.nbytes, (_kind(lazy),))


def _kind(lazy: LazyTensor) -> str:
    return lazy.dtype if lazy.encoding == "dense" else f"{lazy.encoding}({lazy.dtype})"


def _histogram(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _as_equal(names: Sequence[str]) -> str:
    """Return the names of one tensor: "a = b = c", of many the first and their number."""
    more = f" and {len(names) - EQUAL_SHOWN} more" if len(names) > EQUAL_SHOWN else ""
    return " = ".join(names[:EQUAL_SHOWN]) + more


def _short_text(value: object) -> str:
    text = f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
