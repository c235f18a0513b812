"""The options of a conversion: what is written (`Options`), and how it is run (`RunOptions`).

These two dataclasses are the one place that states an option's name, type, default and meaning.
Python calls take the fields as keyword arguments: `OptionKeywords` and its relatives repeat the
fields for type checkers, and a test holds them equal. The command line makes its options from the
fields, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypedDict

from ckptmap.core import argument_checks
from ckptmap.core.sizes import Size
from ckptmap.errors import ArgumentError
from ckptmap.mapping.renaming import Patterns as RenamePatterns
from ckptmap.mapping.renaming import Renaming
from ckptmap.protocols.file_systems import Mounts
from ckptmap.protocols.progress import Progress
from ckptmap.storage.hub.resolve import local
from ckptmap.storage.hub.uri import is_hub
from ckptmap.typed_options import spelled

MAX_MEMORY = 64 << 20
"""Bytes of all buffers of a process, those of its threads included."""
DEVICE_MEMORY = 256 << 20
"""The same where a device computes: it wants more values at once than a CPU's cache holds."""
Path: TypeAlias = str | os.PathLike[str]
Patterns: TypeAlias = Sequence[str]
"""One glob over names, or several. A string is one pattern, not a sequence of letters."""
STRINGS = ("mesh", "optimizer_keys", "root", "source_root", "names", "names_from")
CHECKPOINT_PATHS = ("like", "names_like", "config_from", "base", "as_")
"""Options that name a checkpoint or a file of one; they may be on the Hub."""
PATTERNS = ("fsdp_units", "include", "exclude", "drop", "encode", "no_encode")
CHECKS = ("stored", "full", "none")
DIGESTS = ("xxh3", "sha256", "none")


@dataclass(frozen=True)
class Options:
    """What is written. With the state of the source, these fields decide the plan completely.

    Building one raises ArgumentError CKM516 where a value is of the wrong kind. Fields have the
    types that are stored; callers may also give what `OptionKeywords` says: any path, any sequence
    of patterns, or one pattern as a string.
    """

    to: str
    """The setup to write: `"hf"`, `"fsdp2-nf4"`; empty: that of the checkpoint `as_`."""
    world_size: int | None = None
    """Ranks that the output is cut for; None: as many as wrote the source."""
    mesh: str | None = None
    """The device mesh of DTensors, dim by dim: `"replicate=2,shard=4"`."""
    tp_plan: str | None = None
    """A TOML or JSON file that says how the mesh dim `tp` cuts: name pattern -> style."""
    fsdp_units: tuple[str, ...] = ()
    """Patterns of the modules that FSDP1 wraps besides the root: `"layers.*"`."""
    use_orig_params: bool = False
    """True where the FSDP1 model that loads the output is built with use_orig_params=True."""
    include: tuple[str, ...] = ()
    """Only weights with these names are written."""
    exclude: tuple[str, ...] = ()
    """Weights with these names are left out."""
    drop: tuple[str, ...] = ()
    """Entries of any kind that are left out, by key."""
    optimizer: str = "keep"
    """`"keep"` or `"drop"` the optimizer state."""
    optimizer_keys: str | None = None
    """The key form of optimizer state in the output: `"fqn"`, `"index"`, `"flattened"`; None: `"fqn"`, and that
    of the source where `keep_layout` holds."""
    param_order: tuple[tuple[str, ...], ...] | None = None
    """The parameters behind the indices of the source's optimizer state, one list a group."""
    like: str | None = None
    """A checkpoint of the same model or its config.json, for names, shapes and order."""
    root: str | None = None
    """The dict of the output that holds the weights: `"app/model"`; `""`: none."""
    keep_layout: bool | None = None
    """True: one torch.save file stays as it is but for names: the dicts of the weights and of the
    optimizer, its keys, and all other entries where they are. None: so where the file holds more
    than weights, only prefixes of names change, and neither `root` nor `optimizer_keys` is given."""
    source_root: str | None = None
    """The dict of the source that holds the weights."""
    wrap: tuple[str, ...] | None = None
    """Names of wrappers, outermost first: `"ddp,compile"`; None: those of the setup."""
    names_like: str | None = None
    """A checkpoint whose names, wrappers included, the output copies."""
    strip_prefix: str | None = None
    """Segments that are removed from the head of the names that begin with them: `"student"`."""
    add_prefix: str | None = None
    """Segments that are put before all names: `"net"`."""
    rename: tuple[str, ...] = ()
    """Patterns `OLD=NEW` of whole names, such as `"student.{x}={x}"`, where a capture is one segment
    or more. All patterns see the names without `strip_prefix`; `add_prefix` comes after them. Calls
    also take a dict of OLD to NEW. The other options, and `names`, go by the new names."""
    names: str | None = None
    """The naming scheme of the output: `"auto"`, `"hf"`, another scheme, or a mapping file."""
    names_from: str | None = None
    """The naming scheme of the source; None: recognized by its keys."""
    encode: tuple[str, ...] = ()
    """Only weights with these names are encoded."""
    no_encode: tuple[str, ...] = ()
    """Weights with these names are not encoded."""
    strict: bool = False
    """Refuse the plan where the shape of a weight keeps it from being encoded."""
    exact_scales: tuple[str, ...] = ()
    """Weights whose quantization scales are stored without loss, where the encoding has a form for
    that; given as True, all weights."""
    base: str | None = None
    """The checkpoint with the scales of payloads that the source holds alone."""
    max_shard_nbytes: int | None = None
    """Bytes of the largest file of a sharded output; None: 5 GB, and one GGUF file, whatever its size."""
    config_from: str | None = None
    """A directory or config.json whose files are carried to the output."""
    as_: str | None = None
    """A checkpoint of the same model that the output is like: its setup, names, encodings, dtypes and
    files. Weights that it decodes to, bit for bit, are its stored bytes again."""

    def __post_init__(self) -> None:
        scales = argument_checks.patterns_or_all("exact_scales", self.exact_scales)
        self._store("exact_scales", scales)
        for name in PATTERNS:
            self._store(name, argument_checks.patterns(name, getattr(self, name)))
        if self.wrap is not None:  # "ddp,compile", as --wrap takes it, is two names
            given = argument_checks.patterns("wrap", self.wrap)
            self._store("wrap", tuple(name for text in given for name in text.split(",")))
        if self.world_size is not None:  # its range is the setup's to check
            argument_checks.integer("world_size", self.world_size, -(1 << 63))
        if self.max_shard_nbytes is not None:
            size = argument_checks.nbytes("max_shard_nbytes", self.max_shard_nbytes)
            self._store("max_shard_nbytes", size)
        renaming = self.renaming
        self._store("rename", renaming.rename)
        self._store("strip_prefix", renaming.strip_prefix or None)
        self._store("add_prefix", renaming.add_prefix or None)
        if self.param_order is not None:
            self._store("param_order", argument_checks.order("param_order", self.param_order))
        argument_checks.choice("optimizer", self.optimizer, ("keep", "drop"))
        for name in (*CHECKPOINT_PATHS, "tp_plan"):
            if getattr(self, name) is not None:
                argument_checks.path(name, getattr(self, name))
                self._store(name, os.fspath(getattr(self, name)))
        for name in ("strict", "use_orig_params"):
            argument_checks.flag(name, getattr(self, name))
        if self.keep_layout is not None:
            argument_checks.flag("keep_layout", self.keep_layout)
        for name in STRINGS:
            if getattr(self, name) is not None:
                argument_checks.string(name, getattr(self, name))

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def renaming(self) -> Renaming:
        """What `strip_prefix`, `rename` and `add_prefix` do to names."""
        return Renaming.of(self.strip_prefix, self.rename, self.add_prefix)

    def located(self, mounts: Mounts) -> Options:
        """Return the options with local paths: a path on the Hub becomes its local mirror in `mounts`.

        Returns the same object where no option names a path on the Hub.
        """
        paths = {name: getattr(self, name) for name in CHECKPOINT_PATHS}
        if not any(path is not None and is_hub(path) for path in paths.values()):
            return self
        mirrored: dict[str, Any] = {name: local(path, mounts) for name, path in paths.items()}
        return replace(self, **mirrored)

    def with_paths_of(self, other: Options) -> Options:
        """Return the options with the checkpoint paths of `other`."""
        paths: dict[str, Any] = {name: getattr(other, name) for name in CHECKPOINT_PATHS}
        return replace(self, **paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. No field but `digest` changes a byte of the output.

    Building one raises ArgumentError CKM516 where a value is of the wrong kind.
    """

    device: str = "cpu"
    """Where arithmetic runs: `"cpu"`, `"cuda"`, `"cuda:1"`. Without an index it is the current GPU, and under
    torchrun the one with the number of the local rank."""
    threads: int | None = None
    """None: one thread a core of this rank's share, at most 4."""
    max_memory: int | None = None
    """Bytes of all buffers of a rank, pinned memory included; None: 64 MiB, and 256 MiB where a
    device computes. Fewer threads run where theirs would not fit; one thread holds up to 2 MiB
    whatever the bound."""
    overwrite: bool = False
    """Replace what is at the destination."""
    digest: str = "xxh3"
    """`"xxh3"`: a digest of every stored chunk. `"sha256"`: one of every file as well. `"none"`:
    bytes may be copied inside the kernel, but `verify` can check structure only, and a run that was
    killed begins anew, because nothing tells whether what it wrote is whole."""
    progress: bool | Progress = False
    """A function to call, `ckptmap.protocols.Progress`; True: print a line on stderr every few
    seconds, on the first rank."""
    low_disk: bool = False
    """Keep one file of a source on the Hub at a time, beside the destination."""
    sync: bool = True
    """False: publish without waiting for the disk, as `cp` does. A killed process still leaves all
    or nothing. A power cut within about half a minute can leave a destination that lacks bytes, and
    nothing of what it replaced: `verify` finds that."""

    check_source: str = "stored"
    """`"stored"`: compare every checksum that the source states with the bytes that are read.
    `"full"`: also read the rest of what a checksum covers where only a part is wanted. `"none"`:
    convert what is there, damaged or not."""

    def __post_init__(self) -> None:
        argument_checks.device("device", self.device)
        argument_checks.choice("digest", self.digest, DIGESTS)
        argument_checks.choice("check_source", self.check_source, CHECKS)
        if self.max_memory is not None:
            bound = argument_checks.nbytes("max_memory", self.max_memory)
            object.__setattr__(self, "max_memory", bound)
        argument_checks.integer("threads", self.threads or 0, 0)
        for name in ("overwrite", "sync", "low_disk"):
            argument_checks.flag(name, getattr(self, name))
        argument_checks.callback("progress", self.progress)

    @property
    def memory(self) -> int:
        """`max_memory`, or its default."""
        if self.max_memory is not None:
            return self.max_memory
        return MAX_MEMORY if self.device == "cpu" else DEVICE_MEMORY


OPTION_NAMES = tuple(field.name for field in fields(Options) if field.name != "to")
RUN_OPTION_NAMES = tuple(field.name for field in fields(RunOptions))

# ---------------------------------------------------------------- keywords of Python calls

ALIASES = {"max_shard_size": "max_shard_nbytes", "quantize": "encode", "keep": "no_encode"}
"""Other names of options, which the command line has, too: `--max-shard-size`."""


class MergeOptionKeywords(TypedDict, total=False):
    """The fields of `Options` that `merge` takes."""

    world_size: int | None
    mesh: str | None
    tp_plan: Path | None
    include: Patterns
    exclude: Patterns
    drop: Patterns
    wrap: Patterns | None
    root: str | None
    config_from: Path | None
    max_shard_nbytes: Size | None
    max_shard_size: Size | None
    like: Path | None
    exact_scales: bool | Patterns
    strip_prefix: str | None
    add_prefix: str | None
    rename: RenamePatterns


class OptionKeywords(MergeOptionKeywords, total=False):
    """The fields of `Options`, save `to`: what `plan` takes."""

    fsdp_units: Patterns
    use_orig_params: bool
    optimizer: str
    optimizer_keys: str | None
    param_order: Sequence[Sequence[str]] | None
    keep_layout: bool | None
    source_root: str | None
    names_like: Path | None
    names: str | None
    names_from: str | None
    encode: Patterns
    no_encode: Patterns
    quantize: Patterns
    keep: Patterns
    strict: bool
    base: Path | None
    as_: Path | None


class RunOptionKeywords(TypedDict, total=False):
    """The fields of `RunOptions`: what `Plan.execute` takes."""

    device: str
    threads: int | None
    max_memory: Size | None
    overwrite: bool
    digest: str
    progress: bool | Progress
    low_disk: bool
    sync: bool
    check_source: str


class ConvertKeywords(OptionKeywords, RunOptionKeywords, total=False):
    """What `convert` takes."""


class MergeKeywords(MergeOptionKeywords, RunOptionKeywords, total=False):
    """What `merge` takes, besides arguments of its own."""


def options_from(to: str, keywords: Mapping[str, object], call: str) -> Options:
    """Return `Options` of keyword arguments; `call` is their function, for the error.

    Raises ArgumentError CKM516 with the nearest name where a keyword is unknown.
    """
    # Values are of types that `Options` turns into those it stores.
    given: dict[str, Any] = _by_field(keywords)
    argument_checks.known_keywords(given, OPTION_NAMES, call)
    with spelled({ALIASES[name]: name for name in keywords if name in ALIASES}):
        return Options(to=to, **given)


def run_options_from(keywords: Mapping[str, object], call: str) -> RunOptions:
    """Return `RunOptions` of keyword arguments. Raises as `options_from` does."""
    argument_checks.known_keywords(keywords, RUN_OPTION_NAMES, call)
    given: dict[str, Any] = dict(keywords)
    if given.get("max_memory") is not None:
        argument_checks.memory_of_conversion("max_memory", given["max_memory"])
    return RunOptions(**given)


def separated(to: str, keywords: Mapping[str, object], call: str) -> tuple[Options, RunOptions]:
    """Return both kinds of options of keyword arguments. Raises as `options_from` does."""
    argument_checks.known_keywords(_by_field(keywords), (*OPTION_NAMES, *RUN_OPTION_NAMES), call)
    of_plan, of_run = by_kind(keywords)
    return options_from(to, of_plan, call), run_options_from(of_run, call)


def by_kind(keywords: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keyword arguments that `RunOptions` does not have, and those that it has."""
    of_run = {name: value for name, value in keywords.items() if name in RUN_OPTION_NAMES}
    return {name: value for name, value in keywords.items() if name not in of_run}, of_run


def _by_field(keywords: Mapping[str, object]) -> dict[str, object]:
    """Return keywords by the names of fields. Raises ArgumentError CKM516 where an option is given
    by both of its names."""
    named: dict[str, object] = {}
    for name, value in keywords.items():
        field_name = ALIASES.get(name, name)
        if field_name in named:
            raise ArgumentError(
                "CKM516",
                f"{name}={value!r}: is {field_name} by another name, expected one of them",
                f"leave out {name}",
            )
        named[field_name] = value
    return named
