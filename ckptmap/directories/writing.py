"""Directories that frameworks resume from, written: parts placed by the writers of their formats.

    accelerate                                  trainer
      pytorch_model_fsdp_0/  DCP {"model"}        model.safetensors (shards and index)
      optimizer_0/           DCP {"optimizer"}    optimizer.pt      keyed by index
      scheduler.bin  scaler.pt                    scheduler.pt  trainer_state.json  config.json ...

With `accelerate-full` the first two are files, `pytorch_model_fsdp.bin` and `optimizer.bin`.
`accelerator.load_state` takes the first under FSDP1 or FSDP2 with SHARDED_STATE_DICT, at any world
size; `Trainer.train(resume_from_checkpoint=...)` the second, in one process or under DDP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from ckptmap import registry
from ckptmap.errors import PlanError
from ckptmap.optim.classes import decay_groups
from ckptmap.protocols import Carrier, Declared, OutFile, OutState, OutTensor, Setup
from ckptmap.siblings import Sibling
from ckptmap.tensors import Path, TensorInfo
from ckptmap.wire.tree import nest

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
STATE = "trainer_state"
NEW_RUN: Mapping[str, Any] = {"epoch": 0.0, "global_step": 0, "max_steps": 0, "log_history": []}
"""What Trainer needs to find, where the source is of no Trainer: it starts with step 0."""


@dataclass(frozen=True)
class _Part:
    """What goes where: `at` is a directory (ends in a slash), or the name of the one file.
    `root` is the path inside; an extra value's role is its key."""

    role: str
    writer: str
    at: str
    root: Path = ()


class HfCarrier:
    """The carrier of the `hf` setup, found when it is first asked."""

    def ties(
        self, infos: Mapping[str, TensorInfo], siblings: Sequence[str], beside: str | None
    ) -> Mapping[str, str]:
        return _hf_carrier().ties(infos, siblings, beside)

    def files(
        self,
        siblings: Sequence[str],
        beside: str | None,
        dtypes: Collection[str],
        quantized: Declared,
    ) -> tuple[dict[str, Sibling], list[str]]:
        return _hf_carrier().files(siblings, beside, dtypes, quantized)


def _hf_carrier() -> Carrier:
    found = next(setup.carrier for setup in registry.setups() if setup.name == "hf")
    assert found is not None
    return found


ACCELERATE = Setup(
    "accelerate",
    layout="shard0",
    writer="accelerate",
    sharded=True,
    rooted=True,
    dense=True,
    places=("scheduler", "scaler"),
    summary="directory for accelerator.load_state under FSDP, SHARDED_STATE_DICT",
)
ACCELERATE_FULL = Setup(
    "accelerate-full",
    layout="full",
    writer="accelerate-full",
    rooted=True,
    dense=True,
    places=("scheduler", "scaler"),
    optimizer_keys="fqn",
    summary="directory for accelerator.load_state under FSDP, FULL_STATE_DICT",
)


class DecayGroups:
    """Trainer's two groups of parameters: those that decay, and norms and biases."""

    def groups(self, config: FilePath, infos: Mapping[str, TensorInfo]) -> list[list[str]] | None:
        return decay_groups(config, infos)


TRAINER = Setup(
    "trainer",
    layout="full",
    writer="trainer",
    carrier=HfCarrier(),
    rooted=True,
    dense=True,
    places=("scheduler", STATE),
    optimizer_keys="index",
    grouping=DecayGroups(),
    summary="directory for Trainer.train(resume_from_checkpoint=...), one process or DDP",
)


class _DirectoryWriter:
    """Splits a state by role and hands each part to the writer of its format."""

    name: str
    one_file = False
    shares_storage = False
    model: _Part
    optimizer: _Part
    plain: Sequence[_Part] = ()

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """The parts' files, below one another. Raises what the parts' writers raise."""
        roles: dict[str, list[OutTensor]] = {MODEL: [], OPTIMIZER: [], EXTRA: []}
        for tensor in state.tensors:
            roles[str(tensor.path[0])].append(tensor)
        assert not roles[EXTRA], "the setup has no place for tensors beside weights and optimizer"
        made = _placed(self.model, state, roles[MODEL], {})
        plain = {path[1:]: value for path, value in state.extra.items() if path[0] == OPTIMIZER}
        if roles[OPTIMIZER] or plain:
            made += _placed(self.optimizer, state, roles[OPTIMIZER], plain)
        for part in self.plain:
            at = (EXTRA, part.role)
            found = {p[2:]: value for p, value in state.extra.items() if p[:2] == at}
            if found:
                made += _extra(part, nest(found.items()))
        return made


_ACCELERATE = (
    _Part("scheduler", "torch-zip", "scheduler.bin"),
    _Part("scaler", "torch-zip", "scaler.pt"),
)
"""`load_state` of an fp16 run with a scheduler needs both."""


class AccelerateWriter(_DirectoryWriter):
    """As `save_state` leaves it under FSDP with SHARDED_STATE_DICT."""

    name = "accelerate"
    model = _Part(MODEL, "dcp", "pytorch_model_fsdp_0/", (MODEL,))
    optimizer = _Part(OPTIMIZER, "dcp", "optimizer_0/", (OPTIMIZER,))
    plain = _ACCELERATE


class AccelerateFullWriter(_DirectoryWriter):
    """As `save_state` leaves it under FSDP with FULL_STATE_DICT."""

    name = "accelerate-full"
    model = _Part(MODEL, "torch-zip", "pytorch_model_fsdp.bin")
    optimizer = _Part(OPTIMIZER, "torch-zip", "optimizer.bin")
    plain = _ACCELERATE


class TrainerWriter(_DirectoryWriter):
    """As Trainer leaves it in one process. Where the source is of no Trainer, the run is new."""

    name = "trainer"
    model = _Part(MODEL, "hf", "")
    optimizer = _Part(OPTIMIZER, "torch-zip", "optimizer.pt")
    plain = (
        _Part("scheduler", "torch-zip", "scheduler.pt"),
        _Part(STATE, "json", "trainer_state.json"),
    )

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        extra = dict(state.extra)
        if not any(path[:2] == (EXTRA, STATE) for path in extra):
            extra[EXTRA, STATE] = dict(NEW_RUN)
        return super().files(replace(state, extra=extra), name)


def _placed(
    part: _Part,
    state: OutState,
    tensors: Sequence[OutTensor],
    plain: Mapping[Path, Any],
) -> list[OutFile]:
    """One part's files, with slots named by the paths that the plan gave."""
    paths = [(*part.root, *tensor.path[1:]) for tensor in tensors]
    inner = dict(zip(paths, (tensor.path for tensor in tensors), strict=True))
    moved = [
        tensor._replace(path=path, alias_of=None)
        for path, tensor in zip(paths, tensors, strict=True)
    ]
    extra = {(*part.root, *path): value for path, value in plain.items()}
    records = _records(state, part.role, part.root)
    writer = registry.writer(part.writer)
    name = part.at.rpartition("/")[2]
    made = writer.files(replace(state, tensors=moved, extra=extra, records=records), name)
    folder = part.at.removesuffix(name)
    return [_renamed(file, folder, name, inner) for file in made]


def _records(state: OutState, role: str, root: Path) -> dict[str, Mapping[str, Any]]:
    """The encoding records of this part's tensors, under the names that they have inside."""
    return {
        ".".join(map(str, (*root, key.removeprefix(f"{role}.")))): record
        for key, record in state.records.items()
        if key.startswith(f"{role}.")
    }


def _renamed(file: OutFile, folder: str, name: str, inner: Mapping[Path, Path]) -> OutFile:
    slots = [slot._replace(path=inner[slot.path]) for slot in file.slots]
    file_name = folder + (name or file.name)
    return replace(file, name=file_name, slots=slots, holds_manifest=False)


def _extra(part: _Part, value: Any) -> list[OutFile]:
    """A file of plain values: torch.save's form, or JSON."""
    if part.writer != "json":
        if not isinstance(value, dict):
            raise PlanError(
                "CKM202",
                f"{part.role}: expected a dict for {part.at}, found {type(value).__name__}",
                f"leave it behind with --drop {part.role}",
            )
        state = OutState((), {(key,): item for key, item in value.items()})
        made = registry.writer(part.writer).files(state, part.at)
        return [replace(file, name=part.at, holds_manifest=False) for file in made]
    try:
        content = (json.dumps(value, indent=2) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise PlanError(
            "CKM202", f"{part.role}: {error}", f"leave it behind with --drop {part.role}"
        ) from error
    return [OutFile(part.at, len(content), (), _sealed(content))]


def _sealed(content: bytes) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    return lambda crcs, manifest: ((0, content),)
