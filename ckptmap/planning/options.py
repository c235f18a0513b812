"""What the user asked for: of the plan, and of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckptmap.core import argument_checks
from ckptmap.storage.hub.resolve import local
from ckptmap.storage.hub.uri import is_hub

MAX_SHARD_NBYTES = 5_000_000_000
MAX_MEMORY = 64 << 20
"""Bytes of buffers in all, threads included, unless the user says otherwise."""
Progress = Callable[[int, str], None]
"""Called with bytes just written and the key they belong to, from any thread, one at a time."""
TEXTS = ("mesh", "optimizer_keys", "root", "source_root", "names", "names_from")
"""Options that are one text."""
PATHS = ("like", "names_like", "config_from", "base")
"""Options that name a checkpoint, or something beside one."""
PATTERNS = ("fsdp_units", "include", "exclude", "drop", "encode", "no_encode", "exact_scales")
"""Options that are patterns of names."""
DIGESTS = ("xxh3", "sha256", "none")


@dataclass(frozen=True)
class Options:
    """What is to be written; with the source's state it decides the plan wholly."""

    to: str
    world_size: int | None = None
    mesh: str | None = None
    """`"replicate=2,shard=4"`: the mesh that DTensors are cut over."""
    tp_plan: str | None = None
    """A file that says how the mesh dim `tp` cuts: pattern -> style."""
    fsdp_units: tuple[str, ...] = ()
    """Patterns of the modules that FSDP1 wraps, beside the root: `"layers.*"`."""
    use_orig_params: bool = False
    """Is the FSDP1 model that loads flat parameters built so?"""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    optimizer: str = "keep"
    optimizer_keys: str = "fqn"
    """How the output keys optimizer state: the name of a key form."""
    param_order: tuple[tuple[str, ...], ...] | None = None
    """The parameters behind the indices of the source's optimizer state, one tuple a group."""
    like: str | None = None
    root: str | None = None
    source_root: str | None = None
    wrap: tuple[str, ...] | None = None
    names_like: str | None = None
    names: str | None = None
    """The naming scheme of the output: `auto`, `hf`, a scheme, or a mapping file."""
    names_from: str | None = None
    """That of the source; None: by its keys."""
    encode: tuple[str, ...] = ()
    no_encode: tuple[str, ...] = ()
    strict: bool = False
    """Is it refused that a weight which is encoded by its name stays as it is, for its shape?"""
    exact_scales: tuple[str, ...] = ()
    """Patterns of weights whose quantization scales are stored without loss, where the encoding
    has a form for that. True is every weight, as the flag is on the command line."""
    base: str | None = None
    """The checkpoint that has the scales of payloads which the source holds alone."""
    max_shard_nbytes: int = MAX_SHARD_NBYTES
    config_from: str | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError CKM516. A text where several patterns may stand is one of them, and
        not its letters, of which `*` would be one."""
        object.__setattr__(
            self, "exact_scales", argument_checks.patterns_or_all("exact_scales", self.exact_scales)
        )
        for name in PATTERNS:
            object.__setattr__(self, name, argument_checks.patterns(name, getattr(self, name)))
        if self.wrap is not None:  # as --wrap is written: "ddp,compile"
            names = [
                name
                for text in argument_checks.patterns("wrap", self.wrap)
                for name in text.split(",")
            ]
            object.__setattr__(self, "wrap", tuple(names))
        if self.world_size is not None:  # what it must be is the setup's to say
            argument_checks.integer("world_size", self.world_size, -(1 << 63))
        argument_checks.integer("max_shard_nbytes", self.max_shard_nbytes, 1)
        argument_checks.choice("optimizer", self.optimizer, ("keep", "drop"))
        for name in (*PATHS, "tp_plan"):
            argument_checks.path(name, getattr(self, name) or "")
        for name in TEXTS:
            argument_checks.string(name, getattr(self, name) or "")

    def located(self) -> Options:
        """With paths where they can be looked at: what is on the Hub in its mirror; itself where
        nothing is there."""
        paths = {name: getattr(self, name) for name in PATHS}
        if not any(path is not None and is_hub(path) for path in paths.values()):
            return self
        away: dict[str, Any] = {name: local(path) for name, path in paths.items()}
        return replace(self, **away)

    def written_as(self, other: Options) -> Options:
        """With paths as in `other`."""
        written: dict[str, Any] = {name: getattr(other, name) for name in PATHS}
        return replace(self, **written)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. Nothing of it changes what is written, save of its digests.

    max_memory  bytes of buffers in all, a rank; threads are reduced where they would not fit, and
                the last one holds up to 2 MiB whatever is asked for
    threads     None: one a core that is this rank's share, at most 4
    low_disk    keep one file of a source on the Hub at a time, beside the destination
    digest      "xxh3" a stored chunk, or "sha256": the files' too; "none": bytes may move inside the
                kernel, but then `verify` can check structure only, and a run that was killed begins
                anew, since nothing could tell whether what it wrote is whole
    progress    what is called; True: a line on stderr every few seconds
    sync        False: publish without waiting for the disk, as `cp` does. A killed process still
                leaves all or nothing, but a power cut within about half a minute can leave a
                destination whose bytes are not all there, and nothing of what it replaced:
                `verify` tells
    """

    device: str = "cpu"
    threads: int | None = None
    max_memory: int = MAX_MEMORY
    overwrite: bool = False
    digest: str = "xxh3"
    progress: bool | Progress = False
    low_disk: bool = False
    sync: bool = True

    def __post_init__(self) -> None:
        """Raises ArgumentError CKM516."""
        argument_checks.choice("digest", self.digest, DIGESTS)
        argument_checks.integer("max_memory", self.max_memory, 1)
        argument_checks.integer("threads", self.threads or 0, 0)
        argument_checks.callback("progress", self.progress)
