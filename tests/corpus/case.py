"""What a case of the corpus is: `Spec` before it is built, `Case` after; and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Container = Literal["torch", "safetensors", "hf", "dcp", "ranks"]
WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that only a wrapper makes; `module` is one by its place alone (`Spec.prefix`)."""

Moments = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Gathered:
    """Truth that training made, hence kept by the writer: full tensors by clean FQN."""

    model: Mapping[str, Tensor]
    optimizer: Moments = field(default_factory=dict)


Writer = Callable[[Path], Gathered | None]


@dataclass(frozen=True)
class Spec:
    """A case as it is known without building it.

    `container` is the on-disk format; `file` the checkpoint inside the case's folder ("" the folder
    itself). `root` is the path of the model's keys inside the tree, `prefix` a wrapper prefix of
    every model key and `wrappers` all wrapper segments that occur, outermost first. `tied` names
    groups that share values, of which the file may hold only one. `order` is what tells which
    parameter an index of the optimizer's state means, as `Checkpoint.optimizer_order` says it. `extra` is what is stored beside
    the tensors at the root, `opaque` the root keys that hold foreign classes. A `shimmed` writer changes state of its
    process and is built after all others.
    """

    name: str
    world_size: int
    container: Container
    write: Writer
    truth: Callable[[], Mapping[str, Tensor]] | None = None
    file: str = ""
    root: tuple[str, ...] = ()
    prefix: str = ""
    wrappers: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    optimizer: Literal["", "fqn", "index"] = ""
    order: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    encoding: Literal["dense", "nf4", "int8", "float8"] = "dense"
    shimmed: bool = False
    notes: str = ""

    @property
    def kind(self) -> str:
        return self.container

    def clean(self, key: str) -> str:
        """The FQN without wrappers of a key as stored."""
        bare = key.removeprefix(self.prefix)
        return ".".join(part for part in bare.split(".") if part not in WRAPPER_SEGMENTS)


@dataclass(frozen=True)
class Case:
    """A checkpoint on disk at `path`, what it is (`spec`) and what it must hold (`truth`)."""

    spec: Spec
    folder: Path

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def path(self) -> Path:
        return self.folder / self.spec.name / self.spec.file

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """What each stored name must hold, by clean FQN: torchao's tensors where it has codes."""
        if self.spec.truth is not None:
            return dict(self.spec.truth())
        return dict(self._gathered["model"])

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """The same, decoded: dense tensors by clean FQN, in the saved (logical) dtype."""
        if self.spec.encoding == "dense":
            return self.stored
        from tests.corpus.models import dense

        return dense(self.stored)

    @property
    def coded(self) -> set[str]:
        """Names of what is stored in codes, of any encoding."""
        from tests.corpus.models import is_coded

        return {name for name, value in self.stored.items() if is_coded(value)}

    @cached_property
    def nf4(self) -> dict[str, dict[str, Any]]:
        """Inner tensors and numbers of each NF4 weight by clean FQN; empty for dense cases."""
        if self.spec.encoding != "nf4":
            return {}
        from tests.corpus.models import nf4_parts

        return nf4_parts(self.stored)

    @cached_property
    def optimizer(self) -> dict[str, dict[str, Tensor]]:
        """FQN -> state name -> full tensor; empty where no optimizer was saved."""
        return dict(self._gathered["optimizer"]) if self.spec.optimizer else {}

    @cached_property
    def _gathered(self) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(truth_file(self.folder, self.name), weights_only=True)
        return loaded


def truth_file(folder: Path, name: str) -> Path:
    """Beside the cases, never inside one: a case's folder holds only what its writer wrote."""
    return folder / f"{name}.truth"


CASES: dict[str, Spec] = {}
"""Every case by name, in building order."""


def case(
    name: str, world_size: int, container: Container, **about: Any
) -> Callable[[Writer], Writer]:
    """Register a writer: every rank calls it with the path to write; see `Spec` for `about`."""

    def register(write: Writer) -> Writer:
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Spec(name, world_size, container, write, **about)
        return write

    return register


def names(**wanted: Any) -> list[str]:
    """Names of the cases whose fields equal, or are among, those wanted: `container="dcp"`,
    `world_size=(1, 2)`; a callable is asked."""

    def fits(value: Any, want: Any) -> bool:
        if callable(want):
            return bool(want(value))
        return value in want if isinstance(want, (tuple, set, frozenset)) else value == want

    return [
        name
        for name, spec in CASES.items()
        if all(fits(getattr(spec, key), want) for key, want in wanted.items())
    ]
