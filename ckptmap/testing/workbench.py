"""What all checks of a format share: a source checkpoint, its plan, and its conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmap.planning.plan import Plan
from ckptmap.planning.planner import plan
from ckptmap.protocols import Container, Directory, OutFile, OutState, Setup, Writer
from ckptmap.testing import samples
from ckptmap.testing.base import expect, registered
from ckptmap.testing.images import Tensors, Watched

if TYPE_CHECKING:
    import torch

SHARD_NBYTES = 1000
EXTRA: Mapping[str, object] = {"step": 7, "name": "größe", "lr": 0.1, "betas": [0.9, 0.95]}


@dataclass
class Workbench:
    """A format under test; a sharded setup is sharded over `world_size` ranks."""

    container: Container | Directory
    writer: Writer
    setup: Setup
    tmp_path: Path
    world_size: int = 2
    watched: Watched = field(init=False)

    def __post_init__(self) -> None:
        self.watched = Watched(self.writer)
        self.tmp_path.mkdir(parents=True, exist_ok=True)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the source, by plain FQN."""
        return self.sample(1, ("float32", "bfloat16", "int64", "bool", "uint8", "float64"))

    def sample(self, seed: int, dtypes: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return sample tensors, of the dtypes that the setup's demands do not refuse.

        Override it for a format that cannot hold some of them for another reason.
        """
        demands = self.setup.demands
        held = [d for d in dtypes if demands is None or demands.refusal("dense", d) is None]
        return samples.state(seed, tuple(held))

    @cached_property
    def source(self) -> Path:
        return samples.save(self.tmp_path / "source.pt", self.tensors, EXTRA)

    @property
    def options(self) -> dict[str, Any]:
        """The options of every conversion: small shards, so that a format with shards writes several."""
        ranks = {"world_size": self.world_size} if self.setup.sharded else {}
        shards = {} if self.writer.one_file else {"max_shard_nbytes": SHARD_NBYTES}
        return {**shards, **ranks}

    def planned(self, source: Path, **options: object) -> Plan:
        """Return a plan made with the adapters registered; the answers of the writer are checked."""
        with self.together():
            return plan(source, self.setup.name, **{**self.options, **options})

    def together(self, writer: Writer | None = None) -> AbstractContextManager[None]:
        """Register the format's adapters for a block, perhaps with another writer."""
        return registered(self.container, writer or self.watched, self.setup)

    def converted(self, source: Path, name: str, **how: Any) -> Path:
        out = self.tmp_path / name
        plan = self.planned(source)
        with self.together():
            plan.execute(out, **how)
        return out

    @cached_property
    def output(self) -> Path:
        return self.converted(self.source, "out")

    @cached_property
    def small_tensor(self) -> torch.Tensor:
        return samples.bits((4, 2), "float32", 99)

    def expected_tensors(self, plan: Plan) -> Tensors:
        """Return the tensor that each stored path of the output must hold."""
        return {path: self.tensors[fqn] for path, fqn in plan.keys.items()}

    def writer_call(self, plan: Plan) -> tuple[OutState, str, Sequence[OutFile]]:
        call = self.watched.calls[-1]
        expect(
            [out.name for out in call.files] == [file.out.name for file in plan.files],
            f"{self.setup.name}: the plan has other files than the writer gave",
        )
        return call.state, call.name, call.files
