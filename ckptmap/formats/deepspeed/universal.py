"""Read a universal checkpoint of DeepSpeed: a folder for each parameter, joined over all ranks.

    zero/<FQN>/fp32.pt exp_avg.pt exp_avg_sq.pt     {"param": [rows, cols], "cat_dim": 0}, or [numel]
                                                    where it was made of stage 3
    zero/<FQN>/step.pt                              the step count; of stage 3 optimizer_state.pt has it
    zero/optimizer_state.pt                         the hyper-parameters
    mp_rank_00_model_states.pt ...                  as they were: shapes, buffers, frozen weights

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.core.formatting import some
from ckptmap.core.state_tree import flatten
from ckptmap.errors import SourceError
from ckptmap.formats.deepspeed.flat_vectors import FlatParameter, FlatSpan
from ckptmap.formats.deepspeed.model_states import ModelStates, Shapes
from ckptmap.formats.deepspeed.optimizer_leaves import GROUPS, PARAMS, STATE
from ckptmap.formats.deepspeed.optimizer_states import KEY, STEP
from ckptmap.formats.deepspeed.pickled import Pickled, read
from ckptmap.formats.deepspeed.step_files import UNIVERSAL, StepFiles
from ckptmap.formats.torch_save.reader import load
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Path, StoredTensor

WEIGHT = "fp32.pt"
SETTINGS = "optimizer_state.pt"
_AGAIN = "make the universal checkpoint again with ds_to_universal"


@dataclass(frozen=True)
class Universal:
    """What the folder `zero` holds.

    weights   FQN -> tensor
    states    FQN -> name of the state -> value
    files     all files in it
    """

    weights: Mapping[str, StoredTensor]
    states: Mapping[str, Mapping[str, Leaf]]
    files: Sequence[str]


def read_universal(opened: Files, files: StepFiles, model: ModelStates) -> Universal:
    """Return the trained weights and their state. Folders of other weights hold copies of those in the model's
    file, which are not read.

    Raise SourceError CKM110 if the folders are not those of the parameters that the model lists, CKM112 for a
    tensor of another shape.
    """
    folder = files.root / UNIVERSAL
    shapes = {name: shape for vector in model.trained for name, shape in vector.items()}
    present = {one.name: one for one in sorted(folder.iterdir()) if one.is_dir()}
    lacking = [name for name in shapes if not (present.get(name, folder) / WEIGHT).is_file()]
    unknown = [name for name in present if name not in shapes and name not in model.module]
    if lacking or unknown:
        problem = (
            f"has no {WEIGHT} of {some(lacking)}" if lacking else f"has {some(unknown)}, which"
        )
        more = "" if lacking else " the model file does not list"
        raise SourceError("CKM110", f"{folder}: {problem}{more}", _AGAIN)
    weights, states, names = {}, {}, []
    for name, shape in shapes.items():
        state = {}
        for file in sorted(present[name].glob("*.pt")):
            value = _value(opened, file, name, shape, (str(files.root), name))
            names.append(str(file))
            if file.name == WEIGHT:
                weights[name] = value
            else:
                state[file.stem] = value
        states[name] = state
    return Universal(_tensors(weights, folder), states, names)


def _tensors(weights: Mapping[str, Leaf], folder: FilePath) -> dict[str, StoredTensor]:
    found = {name: leaf for name, leaf in weights.items() if isinstance(leaf, StoredTensor)}
    for name in weights:
        if name not in found:
            raise SourceError(
                "CKM106",
                f"{folder / name / WEIGHT}: expected a tensor, found another value",
                _AGAIN,
            )
    return found


def _value(
    opened: Files, file: FilePath, name: str, shape: tuple[int, ...], share: tuple[str, str]
) -> Leaf:
    loaded = load(opened, str(file))
    saved = loaded.records.root
    if saved != file.stem and (file.parent / f"{saved}.pt").is_file():
        raise SourceError("CKM110", f"{file}: was saved as {saved}.pt of {name}", _AGAIN)
    tree = loaded.tree
    value = tree.get("param") if isinstance(tree, dict) else tree
    if not isinstance(value, StoredTensor) or file.stem == STEP or value.info.shape == ():
        return value
    if len(value.info.shape) > 1 and value.info.shape != shape:
        return value  # joined over ranks of tensor parallelism, each of which lists its own shape
    if value.info.numel != math.prod(shape):
        raise SourceError(
            "CKM112",
            f"{file}: has {value.info.numel} elements, expected {list(shape)} of {name}",
            _AGAIN,
        )
    whole = FlatParameter(name, shape, 0, (FlatSpan(0, 0, 0, value.info.numel),))
    return whole.tensor([value], share=share if file.name == WEIGHT else None)


def settings_file(opened: Files, files: StepFiles) -> Pickled:
    """Return the values of the optimizer that belong to no parameter. Raise SourceError CKM110 without them."""
    file = files.root / UNIVERSAL / SETTINGS
    if not file.is_file():
        raise SourceError(
            "CKM110", f"{file.parent}: has no {SETTINGS}, which names the parameter groups", _AGAIN
        )
    return read(opened, str(file))


def optimizer_of(
    settings: Pickled, universal: Universal, trained: Sequence[Shapes]
) -> dict[Path, Leaf]:
    """Return the leaves of the optimizer by path.

    Raise SourceError CKM110 where a parameter has a part of the state that others of its group have. One that
    never got a gradient has none.
    """
    inner: dict[object, object] = dict(settings.inside(KEY).mapping(STATE).items())
    leaves: dict[Path, Leaf] = {}
    listed = []
    for group in settings.mappings(GROUPS):
        vectors = [n for n in group.get(PARAMS) or () if type(n) is int and n < len(trained)]
        names = [name for vector in vectors for name in trained[vector]]
        _check_alike({name: universal.states[name] for name in names}, settings.file)
        for vector in vectors:
            steps = inner.get(vector)
            step = steps.get(STEP) if isinstance(steps, dict) else None
            for name in trained[vector]:
                state = universal.states[name]
                leaves.update(_state(name, state, group.get(STEP) if step is None else step))
        listed.append({**group, PARAMS: names})
    return {**leaves, **flatten({GROUPS: listed}, settings.file, settings.nbytes)}


def _check_alike(states: Mapping[str, Mapping[str, Leaf]], file: str) -> None:
    every = dict.fromkeys(key for state in states.values() for key in state)
    for name, state in states.items():
        lacking = [key for key in every if key not in state]
        if state and lacking:
            raise SourceError(
                "CKM110",
                f"{FilePath(file).parent / name}: has no {lacking[0]}.pt, as others have",
                _AGAIN,
            )


def _state(name: str, state: Mapping[str, Leaf], step: Leaf) -> Iterator[tuple[Path, Leaf]]:
    if state and STEP not in state and step is not None:
        yield (STATE, name, STEP), step
    for key, value in state.items():
        yield (STATE, name, key), value
