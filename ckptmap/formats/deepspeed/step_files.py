"""List the files of one step of DeepSpeed, and prove by their names that no rank is missing.

    mp_rank_00_model_states.pt                              the model under stages 1 and 2
    zero_pp_rank_R_mp_rank_00_model_states.pt               that of rank R under stage 3
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt        the partition of rank R
    zero/<FQN>/fp32.pt                                      a universal checkpoint
    layer_NN-model_MM-model_states.pt                       a pipeline, layer by layer
    layer_L_expert_E_mp_rank_00_model_states.pt             a mixture of experts

Source: deepspeed 0.19.8, runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
`_get_expert_ckpt_name`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.core.printable import join
from ckptmap.errors import SourceError
from ckptmap.protocols import Place

OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*\.pt")
UNIVERSAL = "zero"
ONE_SAVE = "copy the files of all ranks of one save into this directory"


@dataclass(frozen=True)
class StepFiles:
    """The files of a step, as absolute paths in rank order.

    root        the directory
    optimizers  the partitions of the ranks; empty in a universal checkpoint
    models      the model of each rank under stage 3, else the one of all ranks; of a universal checkpoint
                those of all ranks of tensor parallelism
    """

    root: FilePath
    optimizers: Sequence[str]
    models: Sequence[str]


def is_step(names: Iterable[str]) -> bool:
    """Return whether a directory of these entries is a step of ZeRO, or a universal checkpoint.

    A step of stage 0 is one file of a whole model, which the reader of rank files opens."""
    names = set(names)
    if any(OPTIMIZER.fullmatch(name) or MODEL_OF_RANK.fullmatch(name) for name in names):
        return True
    return UNIVERSAL in names and any(map(MODEL.fullmatch, names))


def step_files(place: Place) -> StepFiles:
    """Return the files. Raise SourceError CKM110 where a rank is missing or files are of two saves,
    CKM118 where the model was cut in another way than over the ranks of data parallelism."""
    root = FilePath(place.path).absolute()
    optimizers, models = _by_rank(place.names, OPTIMIZER), _by_rank(place.names, MODEL_OF_RANK)
    whole = [name for name in place.names if MODEL.fullmatch(name)]
    universal = UNIVERSAL in place.names and (root / UNIVERSAL).is_dir()
    _refuse_other_cuts(root, place.names, universal)
    if not models and not whole:
        raise SourceError(
            "CKM110",
            f"{root}: has no mp_rank_00_model_states.pt, which names the weights and their shapes",
            ONE_SAVE,
        )
    if not universal:
        _require_ranks(root, optimizers, _optimizer_name(optimizers))
        if models:
            world = max(len(optimizers), max(models) + 1)
            _require_ranks(root, models, "zero_pp_rank_{}_mp_rank_00_model_states.pt", world)
    model_names = [models[rank] for rank in sorted(models)] or whole
    return StepFiles(
        root,
        () if universal else [str(root / optimizers[rank]) for rank in sorted(optimizers)],
        [str(root / name) for name in model_names],
    )


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return rank -> name of the files of model-parallel rank 0."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None or int(match[match.re.groups]):
            continue
        rank = int(match[match.re.groups - 1])
        if rank in found:
            raise SourceError(
                "CKM110",
                f"{name}: is of rank {rank}, as {found[rank]} is: expected the files of one save",
                "move the files of the other save to another directory",
            )
        found[rank] = name
    return found


def _optimizer_name(found: Mapping[int, str]) -> str:
    """Return how the files are named, with {} for the rank."""
    first = OPTIMIZER.fullmatch(next(iter(found.values()), ""))
    prefix = first[1] if first else ""
    return f"{prefix}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt"


def _require_ranks(root: FilePath, found: Mapping[int, str], name: str, world: int = 0) -> None:
    world = max(world, 1 + max(found, default=0))
    missing = next((rank for rank in range(world) if rank not in found), None)
    if missing is not None:
        raise missing_rank(root, missing, world, name)


def missing_rank(root: FilePath, rank: int, world: int, name: str) -> SourceError:
    return SourceError(
        "CKM110", f"{root}: rank {rank} of {world} is missing ({name.format(rank)})", ONE_SAVE
    )


def _refuse_other_cuts(root: FilePath, names: Sequence[str], universal: bool) -> None:
    """Raise SourceError CKM118 for files of pipeline or tensor parallelism or of experts. In a universal
    checkpoint they were joined."""
    for name in names:
        expert, layer = _EXPERT.fullmatch(name), _LAYER.fullmatch(name)
        match = OPTIMIZER.fullmatch(name) or MODEL_OF_RANK.fullmatch(name) or MODEL.fullmatch(name)
        other = match is not None and int(match[match.re.groups]) > 0
        if expert:
            raise SourceError(
                "CKM118",
                f"{root}: {name} holds an expert, and the files do not say which experts a rank trained",
                "save the experts of all ranks as one state dict where the model is trained",
            )
        if universal or not (layer or other):
            continue
        kind = "a layer of a pipeline" if layer else "a part of the model (tensor or pipeline)"
        raise cut_otherwise(root, f"{name} holds {kind}, and the files do not say how to join them")


def cut_otherwise(root: FilePath, problem: str) -> SourceError:
    """Return the error for a cut that DeepSpeed itself joins."""
    command = ["python", "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(root)]
    out = f"{root}_universal"
    return SourceError(
        "CKM118",
        f"{root}: {problem}",
        f"join them by DeepSpeed, and give {out}: {join([*command, '--output_folder', out])}",
    )
