"""The reference readers of what training frameworks save: Lightning, Megatron-LM, flat ranks of FSDP1.

Their own loaders need the model or a GPU; torch reads their files here, of classes only those that they
are known to hold, and the ranks' parts are joined by the frameworks' documented rules. Nothing here
knows ckptmap. A reader raises where the parts do not fit.
"""

from __future__ import annotations

import functools
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.corpus.loaders import same_bits
from tests.support.parallel_writers import COLUMNS, FC1, ROWS
from tests.torture.readers import WRAPPERS, Named, check_crcs, flat, read_dcp

HYPER_PARAMETERS = (
    functools.partial, torch.optim.AdamW, nn.Sequential, nn.Linear, nn.ReLU, nn.BatchNorm1d, nn.MSELoss,
)  # fmt: skip
"""What the LightningModules of `golden/lightning` were given."""


def _loaded(path: Path, classes: Sequence[Any]) -> dict[str, Any]:
    check_crcs(path)
    with torch.serialization.safe_globals([*classes]):
        tree: dict[str, Any] = torch.load(path, weights_only=True)
    return tree


# ------------------------------------------------------------------------------- Lightning


def read_lightning(path: Path) -> Named:
    """A `.ckpt` file of Trainer, without hyper-parameters. One with weights only has no optimizer_states."""
    tree = _loaded(path, HYPER_PARAMETERS)
    tree.pop("hyper_parameters", None)
    weights, optimizer = tree.pop("state_dict"), tree.pop("optimizer_states", {})
    return dict(flat({"extra": tree, "model": weights, "optimizer": optimizer}))


def read_lightning_directory(path: Path) -> Named:
    """DCP files, and `meta.pt` beside them; Fabric's user gave the names `net` and `optim`."""
    beside = _loaded(path / "meta.pt", HYPER_PARAMETERS)
    beside.pop("hyper_parameters", None)
    saved = {}
    for name, value in read_dcp(path).items():
        root, _, rest = name.partition(".")
        optimizer = root in ("optimizer_0", "optim")
        saved[f"optimizer.{rest}" if optimizer else f"model.{rest}"] = value
    return {**dict(flat({"extra": beside})), **saved}


# ------------------------------------------------------------------------------- Megatron-LM


def read_megatron(path: Path) -> Named:
    """The files of all tensor- and pipeline-parallel ranks, each read where its folder's name says."""
    ranks: dict[tuple[int, int], Mapping[str, Any]] = {}
    for file in sorted(path.glob("mp_rank_*/model_optim_rng.pt")):
        match = re.fullmatch(r"mp_rank_(\d+)_(\d+)", file.parent.name)
        if match is None:
            raise ValueError(f"{file}: is of no rank")
        ranks[int(match[1]), int(match[2])] = _loaded(file, (Namespace, HTTPStatus))["model"]
    tensors, stages = (1 + max(at) for at in zip(*ranks, strict=True))
    found: dict[str, Tensor] = {}
    layers = 0
    for stage in range(stages):
        parts = [ranks[rank, stage] for rank in range(tensors)]
        named = {key: value for key, value in parts[0].items() if isinstance(value, Tensor)}
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError(f"stage {stage}: the ranks hold different keys")
        for key in named:
            name = _in_whole(key, layers)
            if name in found:
                raise ValueError(f"{name}: is on two stages")
            found[name] = _joined(parts, key)
        numbers = [re.match(r"decoder\.layers\.(\d+)\.", key) for key in named]
        layers += 1 + max((int(match[1]) for match in numbers if match), default=-1)
    return found


def _in_whole(key: str, before: int) -> str:
    head = re.match(r"decoder\.layers\.(\d+)", key)
    return f"decoder.layers.{int(head[1]) + before}{key[head.end() :]}" if head else key


def _joined(parts: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    """Return a whole tensor, of which each rank holds rows, columns, a part of [gate; up], or all."""
    values = [part[key] for part in parts]
    if key.endswith(FC1):
        columns = parts[0][f"{key.rpartition('linear_fc1')[0]}linear_fc2.weight"].shape[1]
        halves = [value.chunk(2 if len(value) == 2 * columns else 1) for value in values]
        return torch.cat([half for section in zip(*halves, strict=True) for half in section])
    if key.endswith((*ROWS, *COLUMNS)):
        return torch.cat(values, 0 if key.endswith(ROWS) else 1)
    if not all(same_bits(value, values[0]) for value in values):
        raise ValueError(f"{key}: the ranks hold different values")
    return values[0]


def read_torch_dist(path: Path) -> Named:
    """The format `torch_dist`: DCP files whose tensors hold all layers, and `common.pt`."""
    if json.loads((path / "metadata.json").read_text())["sharded_backend"] != "torch_dist":
        raise ValueError("metadata.json: another backend")
    _loaded(path / "common.pt", (Namespace, HTTPStatus))
    found: dict[str, Tensor] = {}
    for key, value in read_dcp(path).items():
        match = re.fullmatch(r"decoder\.layers\.(?!\d)(.+)", key)
        layers = {key: value} if match is None else {
            f"decoder.layers.{number}.{match[1]}": layer for number, layer in enumerate(value)
        }  # fmt: skip
        if layers.keys() & found.keys():
            raise ValueError(f"{key}: is stored twice")
        found |= layers
    return found


# ------------------------------------------------------------------------------- FSDP1


def read_flat_ranks(path: Path, like: Mapping[str, Tensor]) -> Named:
    """LOCAL_STATE_DICT of FSDP1 with `use_orig_params=False`, perhaps with the optimizer's own state.

    `like`: the model's state dict, in whose order a unit's parameters follow one another.
    """
    world = len([*path.glob("model_*.pt")])
    files = [_of_rank(path, rank, world) for rank in range(world)]
    units = _units(like)
    found: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for key in files[0]["model"]:
        name = ".".join(part for part in key.split(".") if part not in WRAPPERS)
        values = [file["model"][key] for file in files]
        if not name.endswith("_flat_param"):
            found[f"model.{name}"] = _same(values, name)
            continue
        unit = name.removesuffix("_flat_param").removesuffix(".")
        whole[unit] = _assembled(values)
        found |= {f"model.{n}": v for n, v in _cut(whole[unit], units[unit], like).items()}
    missing = units.keys() - whole.keys()
    if missing or any(file["model"].keys() != files[0]["model"].keys() for file in files):
        raise ValueError(f"the ranks hold different keys, or not all: {missing}")
    states = [file["optimizer"]["state"] for file in files]
    for number, state in states[0].items():
        unit = [*whole][number]
        for name, value in state.items():
            values = [other[number][name] for other in states]
            if value.ndim == 0:
                moments = dict.fromkeys(units[unit], _same(values, name))
            else:
                moments = _cut(torch.cat(values)[: whole[unit].numel()], units[unit], like)
            found |= {f"optimizer.{n}.{name}": v for n, v in moments.items()}
    return found


def _of_rank(path: Path, rank: int, world: int) -> dict[str, Any]:
    """Return {"model": ..., "optimizer": ...} of a rank, whose files are one or two."""
    name = f"model_world_size_{world}_rank_{rank}.pt"
    beside = path / name.replace("model", "optim")
    with _ranks(rank, world):
        model = _loaded(path / name, _sharded_classes())
    optimizer = _loaded(beside, ()) if beside.exists() else {"state": {}}
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _ranks(rank: int, world: int) -> Iterator[None]:
    """A process group of one process, without which a ShardedTensor is not unpickled."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded_classes() -> Sequence[Any]:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, metadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.remote_device import _remote_device

    def inside(kind: Any, name: str) -> object:
        """Return what `getattr` is pickled for: a class inside another."""
        if (kind, name) != (ShardedTensor, "ProcessGroupState"):
            raise ValueError(f"{name} of {kind}")
        return ShardedTensor.ProcessGroupState

    return (
        ShardedTensor, Shard, ShardMetadata, ChunkShardingSpec, _remote_device, metadata.ShardedTensorMetadata,
        metadata.TensorProperties, metadata.MEM_FORMAT_ENCODING, ShardedTensor.ProcessGroupState, (inside, "builtins.getattr"),
    )  # fmt: skip


def _assembled(values: Sequence[Any]) -> Tensor:
    """Return the vector that the shards [numel] of all ranks cover, each element once."""
    (size,) = values[0].metadata().size
    first = next(shard for value in values for shard in value.local_shards()).tensor
    whole, count = torch.empty(size, dtype=first.dtype), 0
    for value in values:
        if tuple(value.metadata().size) != (size,):
            raise ValueError("the ranks state different sizes")
        for shard in value.local_shards():
            (at,) = shard.metadata.shard_offsets
            whole[at : at + len(shard.tensor)] = shard.tensor
            count += len(shard.tensor)
    if count != size:
        raise ValueError(f"{count} elements of {size}")
    return whole


def _units(like: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return unit -> its parameters: each layer is one, the rest another."""
    units: dict[str, list[str]] = {}
    for name in like:
        match = re.match(r"layers\.\d+", name)
        units.setdefault(match[0] if match else "", []).append(name)
    return units


def _cut(whole: Tensor, names: Sequence[str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = whole.split([like[name].numel() for name in names])
    return {n: part.view(like[n].shape) for n, part in zip(names, parts, strict=True)}


def _same(values: Sequence[Tensor], name: str) -> Tensor:
    if not all(same_bits(value, values[0]) for value in values):
        raise ValueError(f"{name}: the ranks hold different values")
    return values[0]
