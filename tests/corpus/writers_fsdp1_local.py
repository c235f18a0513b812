"""FSDP1 rank files: SHARDED_STATE_DICT (ShardedTensor, DTensor) and LOCAL_STATE_DICT (flat).

The flat ones open only with `like`, so they are no cases of the corpus but in a table of their own,
LOCAL, which `tests.corpus.build_local` builds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    LocalStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.corpus.case import Gathered, Spec, case
from tests.corpus.models import (
    Attention,
    Layer,
    Mlp,
    Recipe,
    optimizer_for,
    tiny,
    train,
    truth,
)
from tests.corpus.writers_fsdp1 import gathered, sharded_type, wrapped
from tests.corpus.writers_fsdp2 import rank_file
from tests.corpus.writers_single import BF16, TIED, TIED_NAMES, compile_layers

# --------------------------------------------------------------------- SHARDED_STATE_DICT


def save_sharded_ranks(recipe: Recipe, use_orig_params: bool, path: Path) -> None:
    model = wrapped(tiny(recipe), use_orig_params)
    sharded_type(model)
    torch.save(model.state_dict(), rank_file(path))


for world_size in (2, 4):
    case(
        f"fsdp1_ranks_w{world_size}", world_size, "ranks", truth=truth,
        notes="ShardedTensors; at 4 ranks one without shards",
    )(partial(save_sharded_ranks, Recipe(), True))  # fmt: skip
case(
    "fsdp1_ranks_flat_bf16_w2", 2, "ranks", truth=partial(truth, BF16),
    notes="use_orig_params=False",
)(partial(save_sharded_ranks, BF16, False))  # fmt: skip


@case("fsdp1_ranks_optimizer_w2", 2, "ranks", root=("model",), optimizer="fqn", extra={"step": 3})
def fsdp1_ranks_optimizer(path: Path) -> Gathered:
    model = wrapped(tiny())
    optimizer = optimizer_for(model)
    train(model, optimizer)
    sharded_type(model)
    state = {
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
        "step": 3,
    }
    torch.save(state, rank_file(path))
    return gathered(model, optimizer)


@case(
    "fsdp1_ranks_mesh_w2", 2, "ranks", truth=truth, notes="a device mesh: DTensors in place of them"
)  # fmt: skip
def fsdp1_ranks_mesh(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = wrapped(tiny(), device_mesh=mesh)
    sharded_type(model)
    torch.save(model.state_dict(), rank_file(path))


@case(
    "fsdp1_ranks_hybrid_w4", 4, "ranks", truth=truth,
    notes="HYBRID_SHARD over process groups: ShardedTensors, each on two ranks",
)  # fmt: skip
def fsdp1_ranks_hybrid(path: Path) -> None:
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = wrapped(
        tiny(),
        process_group=(shards[rank // 2], replicas[rank % 2]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    sharded_type(model)
    torch.save(model.state_dict(), rank_file(path))


# --------------------------------------------------------------------- LOCAL_STATE_DICT

LOCAL: dict[str, Spec] = {}
"""Cases that open only with the shapes of another checkpoint."""


def local_state(model: FSDP) -> dict[str, Any]:
    config = LocalStateDictConfig(offload_to_cpu=False)
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT, config)
    state: dict[str, Any] = model.state_dict()
    return state


def save_local(recipe: Recipe, options: dict[str, Any], path: Path) -> None:
    torch.save(local_state(wrapped(tiny(recipe), **options)), rank_file(path))


def save_local_dcp(recipe: Recipe, options: dict[str, Any], path: Path) -> None:
    """As FSDP1's examples for LOCAL_STATE_DICT do; DCP keeps one rank's slices."""
    save_dcp(local_state(wrapped(tiny(recipe), **options)), checkpoint_id=path)


def save_nested(use_orig_params: bool, path: Path) -> None:
    """Units inside units: each layer, and in it its attention and its MLP."""
    model = FSDP(
        tiny(),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Layer, Attention, Mlp}),
    )
    torch.save(local_state(model), rank_file(path))


def save_ignored(use_orig_params: bool, path: Path) -> None:
    """A matrix, and a module with a vector, that FSDP leaves alone."""
    model = tiny()
    named = dict(model.named_parameters())
    ignored: list[nn.Parameter] = [named["score.weight"], named["layers.0.input_norm.weight"]]
    torch.save(
        local_state(wrapped(model, use_orig_params, ignored_states=ignored)), rank_file(path)
    )


def save_compiled(use_orig_params: bool, path: Path) -> None:
    """`layers.N._orig_mod.` in names and in flat parameters' names."""
    model = compile_layers(tiny())
    torch.save(local_state(wrapped(model, use_orig_params)), rank_file(path))


def save_raw(
    recipe: Recipe, orig: bool, how: Callable[[nn.Module], dict[str, Any]] | None, make: Callable[[FSDP], torch.optim.Optimizer],
    file: Callable[[FSDP, torch.optim.Optimizer, Path], None], path: Path,
) -> Gathered:  # fmt: skip
    """Trained, with the rank's own `optimizer.state_dict()`; the truth is FSDP's own gathering."""
    inner = tiny(recipe)
    more = {} if how is None else how(inner)
    model = wrapped(inner, orig, **more)
    optimizer = make(model)
    train(model, optimizer)
    file(model, optimizer, path)
    return gathered(model, optimizer)


def in_one_file(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state = {"model": local_state(model), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, rank_file(path))


def in_two_files(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """As verl names them."""
    torch.save(local_state(model), rank_file(path))
    rank = rank_file(path).name.replace("model", "optim")
    torch.save(optimizer.state_dict(), path / rank)


def sharded_in_two_files(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    sharded_type(model)
    torch.save(model.state_dict(), rank_file(path))
    rank = rank_file(path).name.replace("model", "optim")
    torch.save(optimizer.state_dict(), path / rank)


def sharded_names_lost(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The same in a plain dict, which has no list of modules."""
    sharded_type(model)
    torch.save(dict(model.state_dict()), rank_file(path))
    rank = rank_file(path).name.replace("model", "optim")
    torch.save(optimizer.state_dict(), path / rank)


def nested_wrap(model: nn.Module) -> dict[str, Any]:
    return {"auto_wrap_policy": ModuleWrapPolicy({Layer, Attention, Mlp})}


def mesh_wrap(model: nn.Module) -> dict[str, Any]:
    """A device mesh, as verl gives one: DTensors in place of ShardedTensors."""
    return {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}


def hybrid_wrap(model: nn.Module) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    return {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}


def no_shard_wrap(model: nn.Module) -> dict[str, Any]:
    """Whole parameters on every rank; the optimizer sees flat ones all the same."""
    return {"sharding_strategy": ShardingStrategy.NO_SHARD}


def ignored_wrap(model: nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters())
    return {"ignored_states": [named["score.weight"], named["layers.0.input_norm.weight"]]}


def adam(model: FSDP) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def named_adam(model: FSDP) -> torch.optim.Optimizer:
    """Parameters in an order of its own, by name."""
    return torch.optim.AdamW(list(model.named_parameters())[::-1], lr=1e-2)


def momentum(model: FSDP) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


MIXED = MixedPrecision(param_dtype=torch.bfloat16)


def _register() -> None:
    def add(name: str, world_size: int, write: Any, container: str = "ranks", **about: Any) -> None:
        LOCAL[name] = Spec(name, world_size, container, write, **about)

    for orig in (True, False):
        kind = "named" if orig else "flat"
        plain: dict[str, Any] = {"use_orig_params": orig}
        for world in (2, 4):
            add(f"local_{kind}_w{world}", world, partial(save_local, Recipe(), plain), truth=truth)
        add(
            f"local_{kind}_tied_w2", 2, partial(save_local, TIED, plain),
            truth=partial(truth, TIED), tied=TIED_NAMES,
        )  # fmt: skip
        add(
            f"local_{kind}_bf16_w2", 2, partial(save_local, BF16, plain), truth=partial(truth, BF16)
        )
        add(
            f"local_{kind}_mixed_w2", 2,
            partial(save_local, Recipe(), {**plain, "mixed_precision": MIXED}), truth=truth,
        )  # fmt: skip
        dcp = {"container": "dcp", "truth": truth}
        add(f"local_{kind}_dcp_w2", 2, partial(save_local_dcp, Recipe(), plain), **dcp)
        add(f"local_{kind}_dcp_w4", 4, partial(save_local_dcp, Recipe(), plain), **dcp)
        add(
            f"local_{kind}_dcp_mixed_w2", 2,
            partial(save_local_dcp, Recipe(), {**plain, "mixed_precision": MIXED}), **dcp,
        )  # fmt: skip
        add(
            f"local_{kind}_dcp_tied_w2", 2, partial(save_local_dcp, TIED, plain), "dcp",
            truth=partial(truth, TIED), tied=TIED_NAMES,
        )  # fmt: skip
        add(f"local_{kind}_nested_w4", 4, partial(save_nested, orig), truth=truth)
        add(f"local_{kind}_ignored_w2", 2, partial(save_ignored, orig), truth=truth)
        add(
            f"local_{kind}_compiled_w2", 2, partial(save_compiled, orig), truth=truth,
            wrappers=("_orig_mod",) if orig else (),
        )  # fmt: skip


PLAIN = Recipe()
RAW: dict[str, Spec] = {}
"""Those with raw optimizer state, built with LOCAL's."""


def _register_raw() -> None:
    def add(
        name: str, world: int, orig: bool, make: Any, file: Any, recipe: Recipe = PLAIN,
        how: Any = None,
    ) -> None:  # fmt: skip
        about: dict[str, Any] = {"root": ("model",)} if file is in_one_file else {}
        about["order"] = (
            "param_names in the groups" if make is named_adam
            else "the order of the saved model dict"
        )  # fmt: skip
        if recipe is TIED:
            about["tied"] = TIED_NAMES
        write = partial(save_raw, recipe, orig, how, make, file)
        RAW[name] = Spec(name, world, "ranks", write, optimizer="fqn", **about)

    add("raw_flat_w2", 2, False, adam, in_two_files)
    add("raw_flat_w4", 4, False, momentum, in_two_files)
    add("raw_flat_tied_w2", 2, False, adam, in_two_files, recipe=TIED)
    add("raw_flat_ignored_w2", 2, False, momentum, in_two_files, how=ignored_wrap)
    add("raw_flat_named_w2", 2, False, named_adam, in_one_file)
    add("raw_named_w2", 2, True, optimizer_for, in_one_file)
    add("raw_named_w4", 4, True, adam, in_two_files)
    add("raw_named_tied_w2", 2, True, adam, in_one_file, recipe=TIED)
    add("raw_named_named_w2", 2, True, named_adam, in_two_files)
    add("raw_sharded_named_w2", 2, True, adam, sharded_in_two_files)
    files = sharded_in_two_files
    add("raw_sharded_flat_w2", 2, False, adam, files)
    add("raw_sharded_flat_w4", 4, False, adam, files, how=nested_wrap)
    add("raw_sharded_flat_tied_w2", 2, False, adam, files, TIED)
    add("raw_sharded_flat_named_w2", 2, False, named_adam, files, how=nested_wrap)
    add("raw_sharded_flat_mesh_w2", 2, False, adam, files, TIED, mesh_wrap)
    add("raw_sharded_flat_ignored_w2", 2, False, adam, files, how=ignored_wrap)
    add("raw_sharded_flat_hybrid_w4", 4, False, adam, files, how=hybrid_wrap)
    add("raw_sharded_named_hybrid_w4", 4, True, momentum, files, how=hybrid_wrap)
    add("raw_whole_flat_tied_w2", 2, False, adam, in_one_file, TIED, no_shard_wrap)
    add("raw_whole_named_w2", 2, True, adam, files, how=no_shard_wrap)
    add("raw_whole_flat_w1", 1, False, adam, files)
    add("raw_sharded_lost_w2", 2, False, adam, sharded_names_lost)


_register()
_register_raw()
