"""Setups, the values that `--to` names: a layout, a writer, and the files beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckptmap.tensors import Path, TensorInfo

if TYPE_CHECKING:
    from pathlib import Path as FilePath


class Declared(Protocol):
    """The weights that are written, as a config.json beside them must declare them."""

    @property
    def keeps_form(self) -> bool:
        """Whether all weights are stored in the form that the files beside the source's weights state."""

    def config(
        self, present: Mapping[str, object] | None, heads: Collection[str]
    ) -> Mapping[str, object] | None:
        """Return their `quantization_config`; None: there must be none.

        `present` is the source's, `heads` are modules whose weight is tied to another.
        """

    def undeclared(
        self, present: Mapping[str, object] | None, wanted: Mapping[str, object] | None
    ) -> Sequence[str]:
        """Return notes on what `present` declares and `wanted` does not."""

    def check(self, document: Mapping[str, object]) -> None:
        """Raise PlanError CKM203 where a model of this config could not load the weights."""


class CarriedFile(Protocol):
    """A file that lies beside the weights of the source and goes along with them."""

    @property
    def nbytes(self) -> int: ...

    @property
    def mark(self) -> str:
        """A text that identifies the content, the same on every machine."""

    def read(self) -> bytes:
        """Return the content. Raises OSError, and RunError where it cannot be fetched from the Hub."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the content piece by piece. Raises as `read` does."""


class Carrier(Protocol):
    """The files that a framework keeps beside the weights: config, tokenizer.

    `siblings` are the source's files beside its weights; `beside`, if given, is a directory or
    config file to take them from instead.
    """

    def ties(
        self, infos: Mapping[str, TensorInfo], siblings: Sequence[str], beside: str | None
    ) -> Mapping[str, str]:
        """Return FQN -> the FQN that a config ties it to; the first is not written if both are equal."""

    def files(
        self,
        siblings: Sequence[str],
        beside: str | None,
        dtypes: Collection[str],
        quantized: Declared,
        untied: Collection[str],
    ) -> tuple[Mapping[str, CarriedFile], list[str]]:
        """Return the files to write by name, and notes.

        `dtypes` are those of the matrices that are written, `untied` are heads that are no longer
        tied to an embedding.
        """

    def stem(self, carried: Mapping[str, CarriedFile]) -> str | None:
        """Return how names of weight files must begin for the library that loads them beside these
        files; None: as the writer names them."""


@runtime_checkable
class TakesMadeFiles(Protocol):
    """A carrier that also takes files made of a container's own metadata: see `Index.made_files`."""

    def with_made(self, files: Mapping[str, bytes]) -> Carrier:
        """Return the carrier, which uses these files where there are none of their names."""


class Inner(Protocol):
    """What a writer's own files hold besides tensors, from the files beside the weights: `OutState.inner`."""

    def files(
        self, siblings: Sequence[str], given: str | None, source: str | None, like: str | None
    ) -> tuple[Mapping[str, CarriedFile], list[str]]:
        """Return what the writer is given, by name, and notes.

        siblings  the files beside the weights of the source
        given     the value of `--config-from`: a directory or config.json to take in their place
        source    the source, where it is of this format itself
        like      the checkpoint of `--as`, which the output is like
        """


class Demands(Protocol):
    """The dtypes that the loader of a format wants, whatever encoding is asked for."""

    def dtype(self, name: str, info: TensorInfo) -> str | None:
        """Return the dtype that a tensor of this name must have; None: it may have any encoding."""

    def refusal(self, encoding: str, dtype: str) -> str | None:
        """Return why no tensor of this encoding can be written, dense ones by their dtype; None: it can."""


class Filing(Protocol):
    """The files in which a framework's directory keeps extra values (scheduler, random state), one file
    a value, by the value's key."""

    def file_of(self, key: str) -> str | None:
        """Return the file of a value: `"scheduler"` -> `"scheduler.bin"`; None: it has none."""

    def rank_of(self, key: str) -> int | None:
        """Return the rank that the value is of; None: all ranks share it."""

    def new_rank(self, rank: int, first: str) -> tuple[str, CarriedFile] | None:
        """Return name and content of the file that a rank needs and the source lacks, made of rank 0's
        file; None: it needs none."""

    def notes(self, keys: Collection[str], before: int, after: int) -> list[str]:
        """Return notes on values that go from one number of ranks to another."""


class Grouping(Protocol):
    """The parameter groups that the loader of a setup makes, if it keys optimizer state by index."""

    def groups(self, config: FilePath, infos: Mapping[str, TensorInfo]) -> list[list[str]] | None:
        """Return the parameters `infos`, one list a group, as the model of a config.json groups them;
        None: the config is of another model."""


@dataclass(frozen=True)
class Setup:
    """A point on the axes, as `--to` names it."""

    name: str
    layout: str
    writer: str
    wrap: tuple[str, ...] = ()
    """Segments put before every name, outermost first: `("module",)`."""
    sharded: bool = False
    """True: cut over `--world-size` ranks."""
    holds_extra: bool = True
    """False: has no place for what is not a weight (optimizer, step)."""
    carrier: Carrier | None = None
    """Who carries files beside the weights over; None: the setup has no place for them."""
    rooted: bool = False
    """True: the weights are at `model` and the optimizer at `optimizer`, whatever there is."""
    places: tuple[str, ...] | None = None
    """Extra values that it has a place for, plain ones only; None: any."""
    filing: Filing | None = None
    """Who says in which files it keeps extra values, one each; None: they are with the weights."""
    dense: bool = False
    """True: its own loader knows plain tensors only, no payload with scales beside it."""
    optimizer_keys: str = ""
    """The one key form of optimizer state that it takes; empty: any."""
    grouping: Grouping | None = None
    """Who knows the groups that its loader makes; None: the source's are kept."""
    names: str = ""
    """The naming scheme that its loader knows, into which names are translated; empty: they stay."""
    inner: Inner | None = None
    """Who gives what the writer puts into its own files besides tensors; None: nothing. Without a carrier, that
    describes the model."""
    demands: Demands | None = None
    """Who says in which dtypes its loader wants tensors; None: in any."""
    live: str = ""
    """What wraps the live model that it is for: "plain", "compiled", "DDP", "FSDP1" or "FSDP2"; empty:
    nothing is known of what such a model holds."""
    summary: str = ""

    @property
    def head(self) -> str:
        """The first segment that its wrappers put before names; empty without wrappers."""
        return self.wrap[0] if self.wrap else ""

    def has_place_for(self, path: Path, tensor: bool = False) -> bool:
        """Return whether there is a place for this extra value."""
        if self.filing is not None:
            name = self.filing.file_of(str(path[0]))
            return name is not None and not (tensor and name.endswith(".json"))
        if not self.holds_extra or self.places is None:
            return self.holds_extra
        return path[0] in self.places and not tensor
