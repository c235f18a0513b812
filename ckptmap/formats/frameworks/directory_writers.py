"""Write the directories from which accelerate and transformers' Trainer resume a training run.

Each part of a directory is written by the writer of its own format:

    accelerate                                  trainer
      pytorch_model_fsdp_0/  DCP {"model"}        model.safetensors (shards and index)
      optimizer_0/           DCP {"optimizer"}    optimizer.pt      keyed by index
      scheduler.bin  scaler.pt  ...               scheduler.pt  trainer_state.json  config.json ...

With `accelerate-full`, the weights and the optimizer are the files `pytorch_model_fsdp.bin` and
`optimizer.bin`. `accelerator.load_state` loads the accelerate directory under FSDP1 or FSDP2 with
SHARDED_STATE_DICT at any world size, `Trainer.train(resume_from_checkpoint=...)` the trainer
directory in one process or under DDP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from ckptmap import registry
from ckptmap.core.printable import advised
from ckptmap.core.state_tree import nest
from ckptmap.errors import PlanError
from ckptmap.formats.frameworks.extra_files import STATE, AccelerateFiling, TrainerFiling
from ckptmap.protocols import CarriedFile, Carrier, Filing, OutFile, OutState, OutTensor, Setup
from ckptmap.protocols.file_systems import ReadsFiles, through
from ckptmap.sharding.transformers_param_order import decay_groups
from ckptmap.tensors import Box, Path, TensorInfo

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
NEW_RUN: Mapping[str, object] = {"epoch": 0.0, "global_step": 0, "max_steps": 0, "log_history": []}
"""The trainer_state.json of a run at step 0. Trainer needs one, and the source may have none."""


@dataclass(frozen=True)
class _Part:
    """One part of the directory.

    role     "model", "optimizer" or "extra"
    writer   name of the format's writer
    at       folder (ends in a slash), or name of the one file; "" for the directory itself
    root     path put before the keys inside the part
    """

    role: str
    writer: str
    at: str
    root: Path = ()


class RegisteredHfCarrier(ReadsFiles):
    """Passes each call on to the carrier of the `hf` setup, which the registry finds at the call."""

    def ties(self, *args: Any) -> Mapping[str, str]:
        """Return what `HfCarrier.ties` returns."""
        return through(_hf_carrier(), self.mounts).ties(*args)

    def files(self, *args: Any) -> tuple[Mapping[str, CarriedFile], list[str]]:
        """Return what `HfCarrier.files` returns."""
        return through(_hf_carrier(), self.mounts).files(*args)

    def stem(self, carried: Mapping[str, CarriedFile]) -> None:
        """Return None: Trainer reads weights under the names that the `hf` writer gives by itself."""


def _hf_carrier() -> Carrier:
    carrier = next(setup.carrier for setup in registry.setups() if setup.name == "hf")
    assert carrier is not None, "the setup `hf` has one"
    return carrier


ACCELERATE = Setup(
    "accelerate",
    layout="shard0",
    writer="accelerate",
    sharded=True,
    rooted=True,
    dense=True,
    filing=AccelerateFiling(),
    live="FSDP2",
    summary="directory for accelerator.load_state under FSDP, SHARDED_STATE_DICT",
)
ACCELERATE_FULL = Setup(
    "accelerate-full",
    layout="full",
    writer="accelerate-full",
    rooted=True,
    dense=True,
    filing=AccelerateFiling(),
    optimizer_keys="fqn",
    live="plain",
    summary="directory for accelerator.load_state under FSDP, FULL_STATE_DICT",
)


class DecayGroups(ReadsFiles):
    """Trainer's two parameter groups: weights with decay, and norms and biases without it."""

    def groups(self, config: FilePath, infos: Mapping[str, TensorInfo]) -> list[list[str]] | None:
        """Return the FQNs of both groups, in Trainer's order; None if the config's model is unknown."""
        return decay_groups(config, self.mounts, infos)


TRAINER = Setup(
    "trainer",
    layout="full",
    writer="trainer",
    carrier=RegisteredHfCarrier(),
    rooted=True,
    dense=True,
    filing=TrainerFiling(),
    optimizer_keys="index",
    grouping=DecayGroups(),
    live="plain",
    summary="directory for Trainer.train(resume_from_checkpoint=...), one process or DDP",
)


class _DirectoryWriter:
    """Splits a state by role, and calls the writer of the format of each part."""

    name: str
    one_file = False
    shares_storage = False
    model: _Part
    optimizer: _Part
    filing: Filing

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the files of all parts: model, optimizer, extra values. Raise what their writers
        raise, and PlanError CKM202 for an extra value that its file cannot hold."""
        roles: dict[str, list[OutTensor]] = {MODEL: [], OPTIMIZER: [], EXTRA: []}
        for tensor in state.tensors:
            roles[str(tensor.path[0])].append(tensor)
        files = _files_of_part(self.model, state, roles[MODEL], {})
        plain = {path[1:]: value for path, value in state.extra.items() if path[0] == OPTIMIZER}
        if roles[OPTIMIZER] or plain:
            files += _files_of_part(self.optimizer, state, roles[OPTIMIZER], plain)
        paths = (*(tensor.path for tensor in roles[EXTRA]), *state.extra)
        for key in dict.fromkeys(path[1] for path in paths if path[0] == EXTRA):
            tensors = [tensor for tensor in roles[EXTRA] if tensor.path[1] == key]
            values = {p[2:]: value for p, value in state.extra.items() if p[:2] == (EXTRA, key)}
            files += _extra(str(key), self.filing.file_of(str(key)), state, tensors, values)
        return files


class AccelerateWriter(_DirectoryWriter):
    """Writes the directory that `save_state` writes under FSDP with SHARDED_STATE_DICT."""

    name = "accelerate"
    model = _Part(MODEL, "dcp", "pytorch_model_fsdp_0/", (MODEL,))
    optimizer = _Part(OPTIMIZER, "dcp", "optimizer_0/", (OPTIMIZER,))
    filing = AccelerateFiling()


class AccelerateFullWriter(_DirectoryWriter):
    """Writes the directory that `save_state` writes under FSDP with FULL_STATE_DICT."""

    name = "accelerate-full"
    model = _Part(MODEL, "torch-zip", "pytorch_model_fsdp.bin")
    optimizer = _Part(OPTIMIZER, "torch-zip", "optimizer.bin")
    filing = AccelerateFiling()


class TrainerWriter(_DirectoryWriter):
    """Writes the directory that Trainer writes in one process. If the source has no trainer state,
    the run is a new one, at step 0."""

    name = "trainer"
    model = _Part(MODEL, "hf", "")
    optimizer = _Part(OPTIMIZER, "torch-zip", "optimizer.pt")
    filing = TrainerFiling()

    def files(self, state: OutState, name: str) -> Sequence[OutFile]:
        """Return the files of all parts, with a trainer_state.json in any case."""
        extra = dict(state.extra)
        if not any(path[:2] == (EXTRA, STATE) for path in extra):
            extra[EXTRA, STATE] = dict(NEW_RUN)
        return super().files(replace(state, extra=extra), name)


def _files_of_part(
    part: _Part,
    state: OutState,
    tensors: Sequence[OutTensor],
    plain: Mapping[Path, object],
    depth: int = 1,
) -> list[OutFile]:
    """Return the files of one part.

    The first `depth` segments of a path name the part. The part's writer is given paths without them.
    Then each slot of its files is given the full path again, by which the plan knows it.
    """
    paths = [(*part.root, *tensor.path[depth:]) for tensor in tensors]
    path_of = dict(zip(paths, (tensor.path for tensor in tensors), strict=True))
    inner_tensors = [
        tensor._replace(path=path, alias_of=None)
        for path, tensor in zip(paths, tensors, strict=True)
    ]
    extra = {(*part.root, *path): value for path, value in plain.items()}
    records = _records(state, part.role, part.root)
    writer = registry.writer(part.writer)
    name = part.at.rpartition("/")[2]
    files = writer.files(replace(state, tensors=inner_tensors, extra=extra, records=records), name)
    folder = part.at.removesuffix(name)
    return [_renamed(file, folder, name, path_of) for file in files]


def _records(state: OutState, role: str, root: Path) -> dict[str, Mapping[str, object]]:
    """Return the encoding records of this part's tensors, by the names that they have in the part."""
    return {
        ".".join(map(str, (*root, key.removeprefix(f"{role}.")))): record
        for key, record in state.records.items()
        if key.startswith(f"{role}.")
    }


def _renamed(file: OutFile, folder: str, name: str, path_of: Mapping[Path, Path]) -> OutFile:
    slots = [slot._replace(path=path_of[slot.path]) for slot in file.slots]
    file_name = folder + (name or file.name)
    return replace(file, name=file_name, slots=slots, holds_manifest=False)


def _extra(
    key: str,
    name: str | None,
    state: OutState,
    tensors: Sequence[OutTensor],
    values: Mapping[Path, object],
) -> list[OutFile]:
    """Return the file of one extra value, as torch.save or JSON. Raise PlanError CKM202 if the value
    does not fit into the file."""
    assert name is not None, "a value that has no place was dropped when it was planned"
    if not name.endswith(".json"):
        if () in values and isinstance(values[()], dict):
            values = {(inner,): item for inner, item in values[()].items()}
        elif () in values:
            raise _refuse_value(
                key, f"expected a dict for {name}, found {type(values[()]).__name__}"
            )
        whole = [t._replace(chunks=[(0, Box.whole(t.info.shape))]) for t in tensors]
        part = _Part(EXTRA, "torch-zip", name)
        return _files_of_part(part, state, whole, values, depth=2)
    try:
        content = (json.dumps(nest(values.items()), indent=2) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise _refuse_value(key, str(error)) from error
    return [OutFile(name, len(content), (), _sealed(content))]


def _refuse_value(key: str, reason: str) -> PlanError:
    return PlanError("CKM202", f"{key}: {reason}", f"leave it behind with {advised(drop=key)}")


def _sealed(content: bytes) -> Callable[[Sequence[int], bytes | None], Iterable[tuple[int, bytes]]]:
    return lambda crcs, manifest: ((0, content),)
