"""Read Megatron-LM's checkpoints of the format `torch`: one file per tensor- and pipeline-parallel
rank.

    iter_0000100/mp_rank_TT/model_optim_rng.pt          tensor-parallel rank TT
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      and pipeline stage PPP

    {"model": {"decoder.layers.0.mlp.linear_fc1.weight": t, ...}, "args": Namespace, "iteration": 100}

The ranks' parts of each tensor are joined by a rule for its name (`partition_rules`). Each stage
numbers its layers from 0, and the reader continues the numbers of the stage before. A tied embedding
is stored on two stages, and the conversion compares the two. Models older than Megatron core, and
experts that are spread over ranks, are refused. Source: Megatron-LM,
training/checkpointing.py (`get_checkpoint_name`, `generate_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ckptmap.core.formatting import counted
from ckptmap.core.printable import quote
from ckptmap.errors import SourceError
from ckptmap.formats.megatron.common import (
    ARGS,
    OPTIMIZER,
    arguments,
    not_read,
    number,
    other_values,
)
from ckptmap.formats.megatron.partition_rules import EXTRA_STATE, layer_count, partition, renumbered
from ckptmap.formats.rank_files.rank_trees import RankReader, RankTree
from ckptmap.protocols import Index, Place
from ckptmap.protocols.file_systems import Mounts
from ckptmap.sharding.tensor_parallel import join_parts
from ckptmap.storage.files import Files
from ckptmap.tensors import Leaf, Path, StoredTensor, TensorInfo

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_FILE = "model_optim_rng.pt"
_OPTIMIZER_FILE = "distrib_optim.pt"
_MAGICS = (b"PK\3\4", b"\x80\x02\x8a\n")
"""First bytes of torch.save files. The second is the form before torch 1.6, which the reader
refuses with an error that names it."""
_CHUNK = re.compile(r"model\d+")
_TWICE = re.compile(r"(embedding\.word_embeddings|output_layer)\.weight")
"""Keys that two stages may hold: a tied embedding is on the first and on the last."""
_ONE_SAVE = "copy the files of all ranks of one save into one directory"
_CORE = "convert it with Megatron-LM's tools/checkpoint/convert.py --saver core to TP 1, PP 1 first"


@dataclass(frozen=True)
class _Rank:
    """The file of one rank: `args` are its plain arguments, `keys` maps the model's keys to leaves."""

    name: str
    tree: RankTree
    args: Mapping[str, object]
    keys: Mapping[str, Leaf]

    def tensor(self, key: str) -> StoredTensor | None:
        """Return this rank's part of a tensor of the model; None if `key` is no tensor."""
        leaf = self.tree.get(("model", key))
        return leaf if isinstance(leaf, StoredTensor) else None

    def info(self, key: str) -> TensorInfo | None:
        """Return shape and dtype of this rank's part of a tensor; None if `key` is no tensor."""
        tensor = self.tensor(key)
        return None if tensor is None else tensor.info


class Megatron:
    """Reads the files of all ranks as one model under Megatron core's names."""

    name = "megatron"

    def claims(self, place: Place) -> bool:
        """Return True for a directory of `mp_rank_` folders, or for the file in one of them.

        `index` refuses the file of one rank of several."""
        path = FilePath(place.path)
        if not place.is_dir:
            named = path.name == _FILE and _RANK.fullmatch(path.absolute().parent.name)
            return bool(named) and place.head.startswith(_MAGICS)
        return any(
            _is_saved(path / name / _FILE, place.mounts)
            for name in place.names
            if _RANK.fullmatch(name)
        )

    def index(self, place: Place) -> Index:
        """Return the joined tensors below `model`, and the plain values beside them.

        Raise SourceError CKM110 if ranks are missing or belong to several saves, CKM111 for a model
        older than Megatron core, CKM112 and CKM113 if parts do not fit together, CKM118 for a
        tensor of which the cut is not known, CKM206 for a file without a model, and the errors of
        reading a torch.save file.
        """
        path = FilePath(place.path).absolute()
        root = path if place.is_dir else path.parent.parent
        names = place.names if place.is_dir else (path.parent.name,)
        if not place.is_dir:
            _refuse_one_of_many(path, root)
        stages = _stages(root, _ranks(root, names, place.mounts))
        tensors, notes = _Model(stages, str(root)).join_stages()
        first = stages[0][0]
        extra, left = other_values(_others(first))
        if any((root / rank.name / _OPTIMIZER_FILE).exists() for rank in stages[0]):
            extra[OPTIMIZER, ARGS] = not_read()
        notes += [f"left behind: {', '.join(left)}"] if left else []
        files = [str(root / rank.name / _FILE) for stage in stages for rank in stage]
        leaves: dict[Path, Leaf] = {("model", key): leaf for key, leaf in tensors.items()}
        leaves.update(extra)
        return Index(self.name, leaves, tuple(files), world=len(files), notes=tuple(notes))


def _is_saved(path: FilePath, mounts: Mounts) -> bool:
    try:
        return mounts.read_head(path, len(_MAGICS[0])) in _MAGICS
    except OSError:
        return False


def _refuse_one_of_many(path: FilePath, root: FilePath) -> None:
    """Raise SourceError CKM110 for the file of one rank of several."""
    count = sum(bool(_RANK.fullmatch(entry.name)) for entry in root.iterdir())
    if count > 1:
        raise SourceError(
            "CKM110",
            f"{path}: holds a part of the model, as the file of one rank of {count}",
            f"open the directory of all ranks: {quote(str(root))}",
        )


def _others(rank: _Rank) -> dict[Path, Leaf]:
    """Return path -> leaf of the values beside the model in the file of a rank."""
    leaves = rank.tree.parsed.leaves
    return {path: rank.tree.get(path) for path in leaves if path and path[0] != "model"}


# ------------------------------------------------------------------------------------ files


def _ranks(root: FilePath, names: Sequence[str], mounts: Mounts) -> dict[tuple[int, int], _Rank]:
    """Return (tensor-parallel rank, pipeline stage) -> the parsed file of that rank."""
    opened, reader = Files(mounts=mounts), RankReader()
    ranks: dict[tuple[int, int], _Rank] = {}
    try:
        for name in names:
            match = _RANK.fullmatch(name)
            if match is None:
                continue
            rank = _read(root, name, reader, opened)
            at = (int(match[1]), int(match[2] or 0))
            if match[3] is not None or (number(rank.args, "expert_model_parallel_size") or 1) > 1:
                raise _unknown(root / name, "its experts are spread over ranks (expert parallel)")
            if at in ranks:
                raise SourceError(
                    "CKM110",
                    f"{root}: {ranks[at].name} and {name} are of the same rank, expected one of them",
                    _ONE_SAVE,
                )
            ranks[at] = rank
    finally:
        opened.close()
    return ranks


def _read(root: FilePath, name: str, reader: RankReader, opened: Files) -> _Rank:
    file = root / name / _FILE
    if not file.is_file():
        raise SourceError("CKM110", f"{root}: {name} has no {_FILE}", _ONE_SAVE)
    tree = reader.read(opened, str(file))
    leaves = tree.parsed.leaves
    keys = {str(path[1]): leaf for path, leaf in leaves.items() if _is_model(path)}
    if any(path[:2] == ("model", "language_model") for path in leaves):
        raise SourceError(
            "CKM111", f"{file}: holds a model from before Megatron core (language_model)", _CORE
        )
    chunk = next((path[0] for path in leaves if path and _CHUNK.fullmatch(str(path[0]))), None)
    if chunk is not None:
        raise _unknown(file, f"it holds {chunk}, a part of an interleaved (virtual) pipeline")
    if not keys:
        raise SourceError(
            "CKM206",
            f"{file}: expected a dict 'model' of tensors, found none",
            "give the path of files that hold weights",
        )
    return _Rank(name, tree, arguments(tree.get((ARGS,))), keys)


def _is_model(path: Path) -> bool:
    return len(path) == 2 and path[0] == "model"


def _unknown(where: FilePath | str, problem: str) -> SourceError:
    return SourceError("CKM118", f"{where}: {problem}, which is not read", _CORE)


def _stages(root: FilePath, ranks: Mapping[tuple[int, int], _Rank]) -> list[list[_Rank]]:
    """Return the ranks of each pipeline stage, in order. Raise SourceError CKM110 if one is missing,
    if there are too many, or if they belong to several saves."""
    first = next(iter(ranks.values()))
    sizes_found = [1 + max(at[dim] for at in ranks) for dim in (0, 1)]
    sizes_stated = [
        number(first.args, f"{dim}_model_parallel_size") or count
        for dim, count in zip(("tensor", "pipeline"), sizes_found, strict=True)
    ]
    for tensor in range(max(sizes_stated[0], sizes_found[0])):
        for stage in range(max(sizes_stated[1], sizes_found[1])):
            if (tensor, stage) not in ranks:
                raise SourceError(
                    "CKM110",
                    f"{root}: tensor-parallel rank {tensor} of pipeline stage {stage} is missing,"
                    f" expected {sizes_stated[0]} ranks of {sizes_stated[1]} stages, found {len(ranks)} in all",
                    _ONE_SAVE,
                )
    if sizes_found != sizes_stated:
        raise SourceError(
            "CKM110",
            f"{root}: expected {sizes_stated[0]} ranks of {sizes_stated[1]} stages, found {len(ranks)} in all",
            "move the folders of other saves to another directory",
        )
    _check_save(root, ranks)
    _check_order(root, ranks)
    return [
        [ranks[tensor, stage] for tensor in range(sizes_found[0])]
        for stage in range(sizes_found[1])
    ]


def _check_save(root: FilePath, ranks: Mapping[tuple[int, int], _Rank]) -> None:
    iterations = {rank.name: rank.tree.get(("iteration",)) for rank in ranks.values()}
    (name, first), *others = iterations.items()
    other = next((other for other, value in others if value != first), None)
    if other is not None:
        raise SourceError(
            "CKM110",
            f"{root}: {name} is of iteration {first}, but {other} is of {iterations[other]}",
            _ONE_SAVE,
        )


def _check_order(root: FilePath, ranks: Mapping[tuple[int, int], _Rank]) -> None:
    """Raise SourceError CKM110 if the files of two ranks have been exchanged.

    Each process saves its own rank among the arguments. In every order of process groups the ranks
    grow with the tensor-parallel rank, and with the stage (megatron-core, parallel_state.py,
    RankGenerator). Tools that write all files from one process state one rank in all of them: then
    nothing is compared.
    """
    stated = {at: rank.args.get("rank") for at, rank in ranks.items()}
    if len({*map(repr, stated.values())}) < len(stated):
        return
    for at, value in stated.items():
        for before in ((at[0] - 1, at[1]), (at[0], at[1] - 1)):
            other = stated.get(before, -1)
            if type(value) is int and type(other) is int and other > value:
                raise SourceError(
                    "CKM110",
                    f"{root}: {ranks[before].name} was saved by rank {other}, but {ranks[at].name} by"
                    f" rank {value}, expected a higher one",
                    "the files of these ranks were exchanged: copy the files again",
                )


# ------------------------------------------------------------------------------------ tensors


class _Model:
    """Joins the tensors of the ranks, stage by stage."""

    def __init__(self, stages: Sequence[Sequence[_Rank]], where: str) -> None:
        self.stages, self.where = stages, where
        self.left = 0

    def join_stages(self) -> tuple[dict[str, Leaf], list[str]]:
        """Return the tensors by the keys of the whole model, and notes."""
        tensors: dict[str, Leaf] = {}
        offset = 0
        for number_, stage in enumerate(self.stages):
            for key, leaf in self._stage(number_, stage):
                name = renumbered(key, offset)
                if name in tensors:
                    leaf = self._both(name, tensors[name], leaf)
                tensors[name] = leaf
            offset += layer_count(stage[0].keys)
        stated = number(self.stages[0][0].args, "num_layers")
        if stated is not None and stated != offset:
            raise SourceError(
                "CKM110",
                f"{self.where}: expected {stated} layers by the saved arguments, found {offset} in"
                f" {counted(len(self.stages), 'stage')}",
                _ONE_SAVE,
            )
        notes = [f"left behind: {self.left} _extra_state of FP8 scales, no weights"]
        return tensors, notes if self.left else []

    def _stage(self, stage: int, ranks: Sequence[_Rank]) -> Iterator[tuple[str, Leaf]]:
        for rank in ranks[1:]:
            differing = set(rank.keys) ^ set(ranks[0].keys)
            if differing:
                raise SourceError(
                    "CKM110",
                    f"{self.where}: only one of {ranks[0].name} and {rank.name} holds {min(differing)}",
                    _ONE_SAVE,
                )
        for key in ranks[0].keys:
            if EXTRA_STATE.fullmatch(key):
                self.left += 1
                continue
            parts = [part for rank in ranks if (part := rank.tensor(key)) is not None]
            if len(parts) == len(ranks):
                yield key, self._whole(key, parts, stage)
            elif parts:
                odd = next(rank.name for rank in ranks if rank.tensor(key) is None)
                raise SourceError(
                    "CKM113",
                    f"{self.where}: {key}: is a tensor on {len(parts)} of {len(ranks)} ranks, but not"
                    f" in {odd}",
                    _ONE_SAVE,
                )
            else:
                yield key, ranks[0].tree.get(("model", key))

    def _whole(self, key: str, parts: Sequence[StoredTensor], stage: int) -> StoredTensor:
        if len(parts) == 1:
            return parts[0]
        cut = partition(key, self.stages[stage][0].info)
        if cut is None:
            raise _unknown(
                self.where, f"{key}: {len(parts)} ranks hold {parts[0].info} each, cut in a way"
            )  # fmt: skip
        return join_parts(parts, cut, key, _ONE_SAVE)

    def _both(self, key: str, first: Leaf, other: Leaf) -> StoredTensor:
        """Return the tensor that two stages hold, with the later stage's as a replica.

        Raise SourceError CKM118 for another key than a tied embedding's, CKM113 if shape or dtype
        differ."""
        if (
            not isinstance(first, StoredTensor)
            or not isinstance(other, StoredTensor)
            or not _TWICE.fullmatch(key)
        ):
            raise _unknown(self.where, f"{key}: is on two pipeline stages")
        if first.info != other.info:
            raise SourceError(
                "CKM113",
                f"{self.where}: {key}: is {first.info} on one stage, but {other.info} on another",
                _ONE_SAVE,
            )
        replicas = (*first.replicas, *other.chunks, *other.replicas)
        return StoredTensor(first.info, lambda: first.chunks, replicas)
