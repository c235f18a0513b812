"""Read a step of DeepSpeed ZeRO: the fp32 weights and the optimizer state that the ranks' files hold.

    global_step500/ or any other tag: the files that `step_files` lists

The weights are those that the optimizer trains, in fp32. The 16-bit copies of stages 1 and 2 are not
read: they are rounded, and what resumes training rounds them again. Nothing of DeepSpeed is imported, and
no tensor is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted
from ckptmap.formats.deepspeed.model_states import OWN, ModelStates
from ckptmap.formats.deepspeed.optimizer_leaves import optimizer_leaves
from ckptmap.formats.deepspeed.optimizer_states import partition_of, settings_of
from ckptmap.formats.deepspeed.partitions import members_of
from ckptmap.formats.deepspeed.pickled import read
from ckptmap.formats.deepspeed.step_files import StepFiles, is_step, step_files
from ckptmap.formats.deepspeed.universal import optimizer_of, read_universal, settings_file
from ckptmap.protocols import Index, Place, in_saved_order
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Path, StoredTensor

OPTIMIZER = "optimizer"


class ZeroStep:
    """Reads the files of all ranks of one step. It refuses an incomplete set."""

    name = "zero-step"

    def claims(self, place: Place) -> bool:
        """Return True for a directory with a rank's file of ZeRO, or with the folder of a universal checkpoint."""
        return place.is_dir and is_step(place.names)

    def index(self, place: Place) -> Index:
        """Return the weights below `module`, the state below `optimizer`, other values below `extra`.

        Raise SourceError CKM110 if ranks are missing or belong to several saves, CKM118 for cuts that are
        not of data parallelism, and the errors of `torch_save.reader.load`.
        """
        files = step_files(place)
        opened = Files(mounts=place.mounts)
        try:
            step = _partitioned(opened, files) if files.optimizers else _universal(opened, files)
        finally:
            opened.close()
        leaves: dict[Path, Leaf] = dict(step.model.weights(step.trained, str(files.root)))
        leaves |= {(OPTIMIZER, *path): leaf for path, leaf in step.optimizer.items()}
        leaves |= {(*OWN, key): leaf for key, leaf in step.settings.items()}
        leaves |= step.model.extra()
        return Index(
            self.name,
            leaves,
            tuple(step.files),
            world=step.world,
            notes=tuple(_notes_on(step.model, step.trained)),
            sidecar_dir=_sidecar_dir(files.root),
            keeps_order=in_saved_order,
        )


@dataclass(frozen=True)
class _Step:
    """What the files of a step hold."""

    model: ModelStates
    trained: Mapping[str, StoredTensor]
    optimizer: Mapping[Path, Leaf]
    settings: Mapping[str, Leaf]
    world: int
    files: Sequence[str]


def _partitioned(opened: Files, files: StepFiles) -> _Step:
    model = ModelStates.of([read(opened, file) for file in files.models])
    ranks = [partition_of(read(opened, file)) for file in files.optimizers]
    members = members_of(model, ranks, files)
    trained = {
        member.fqn: member.tensor(
            [rank.vectors[member.vector] for rank in ranks], share=(str(files.root), member.fqn)
        )
        for member in members
    }
    optimizer = optimizer_leaves(members, ranks)
    return _Step(
        model,
        trained,
        optimizer,
        ranks[0].settings(),
        len(ranks),
        (*files.models, *files.optimizers),
    )


def _universal(opened: Files, files: StepFiles) -> _Step:
    read_files = [read(opened, file) for file in files.models]
    model = ModelStates.joined(read_files)
    joined = read_universal(opened, files, model)
    settings = settings_file(opened, files)
    optimizer = optimizer_of(settings, joined, model.trained)
    return _Step(
        model,
        joined.weights,
        optimizer,
        settings_of(settings),
        1,
        (*files.models, *joined.files, settings.file),
    )


def _notes_on(model: ModelStates, trained: Mapping[str, StoredTensor]) -> list[str]:
    """Return notes on the values of which another copy is read."""
    notes = [
        f"the weights are those that the optimizer keeps; {counted(number, 'copy')} in {dtype} in"
        f" {model.ranks[0].name} {'is' if number == 1 else 'are'} not read"
        for dtype, number in model.copies(trained).items()
    ]
    buffers = len(model.ranks[0].sequence("buffer_names"))
    if buffers and len(model.ranks) > 1:
        notes.append(f"{counted(buffers, 'buffer')}: rank 0's are read, as each rank has its own")
    return notes


def _sidecar_dir(root: FilePath) -> str | None:
    """Return the directory with the config of the model: the one that holds the step, if it has one."""
    return str(root.parent) if (root.parent / "config.json").is_file() else None
