"""FSDP1 as destination: translate() makes what its own load_state_dict takes, and with the hooks it
takes anything.  python -m tests.ranks.hooks_fsdp1
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp import StateDictType as Type
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from tests.corpus.writers_fsdp1 import full_type
from tests.support.resume_model import built, compiled_layers, fsdp2, net, train

UP = "layers.0.up.weight"
SMALL = 20_000
"""Bytes of messages: less than any matrix here."""


def typed(model: Any, kind: Type) -> Any:
    """The FSDP1 module in it, of that state dict type."""
    root: Any = next(module for module in model.modules() if isinstance(module, FSDP))
    if kind == Type.FULL_STATE_DICT:
        full_type(root)
    else:
        FSDP.set_state_dict_type(
            root, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )
    return root


def whole(model: Any) -> dict[str, Any]:
    """All of every tensor, by plain name, as torch gathers them."""
    state = typed(model, Type.FULL_STATE_DICT).state_dict()
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in state.items()}


def held(model: Any) -> dict[str, Any]:
    """What this rank holds of the model: its flat shards and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in tensors}


def sharded_state(wrap: str) -> dict[str, Any]:
    model = built(wrap, "eager", 0)
    return dict(typed(model, Type.SHARDED_STATE_DICT).state_dict())


def nf4_state() -> dict[str, Any]:
    """On rank 0 alone, under the names of DDP and compile, one weight in codes."""
    if dist.get_rank():
        return {}
    state: dict[str, Any] = dict(net(0).state_dict())
    state[UP] = to_nf4(state[UP])
    return {f"module._orig_mod.{name}": value for name, value in state.items()}


SOURCES: dict[str, Callable[[], Any]] = {
    "fsdp2": lambda: compiled_layers(net(0), fsdp2).state_dict(),
    "fsdp1": lambda: sharded_state("fsdp1"),
    "nf4 on rank 0": nf4_state,
}


def truth_of(source: str) -> dict[str, Any]:
    truth: dict[str, Any] = dict(net(0).state_dict())
    if source.startswith("nf4"):
        truth[UP] = to_nf4(truth[UP]).get_original_weight()
    return truth


def same(found: dict[str, Any], truth: dict[str, Any], where: object) -> None:
    assert found.keys() == truth.keys(), (where, found.keys() ^ truth.keys())
    for name, want in truth.items():
        assert torch.equal(found[name], want), (where, name)


def translated(wrap: str, mode: str) -> None:
    for kind in (Type.FULL_STATE_DICT, Type.SHARDED_STATE_DICT):
        for name, source in SOURCES.items():
            model = built(wrap, mode, 1)
            before = held(model)
            typed(model, kind)
            made = ckptmap.translate(source(), like=model, max_memory=SMALL)
            assert bool(made.report.decoded) == name.startswith("nf4"), made.report  # type: ignore[union-attr]
            same(held(model), before, "the model was changed")
            typed(model, kind)
            assert made.keys() == model.state_dict().keys()
            model.load_state_dict(made)
            same(whole(model), truth_of(name), (wrap, mode, kind, name))


def meshed() -> None:
    """Wrapped with a device mesh its rows are DTensors; HYBRID_SHARD has them on several ranks."""
    world = dist.get_world_size()
    hybrid = init_device_mesh("cpu", (world // 2, 2)) if world % 2 == 0 else None
    for mesh in filter(None, (init_device_mesh("cpu", (world,)), hybrid)):
        strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
        model = FSDP(
            net(1), device_mesh=mesh, use_orig_params=True, sharding_strategy=strategy,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        typed(model, Type.SHARDED_STATE_DICT)
        made: Any = ckptmap.translate(SOURCES["fsdp2"](), like=model, max_memory=SMALL)
        for name, live in model.state_dict().items():
            if isinstance(live, DTensor):
                assert made[name].placements == live.placements, name
                assert made[name].device_mesh == live.device_mesh, name
        model.load_state_dict(made)
        same(whole(model), truth_of("fsdp2"), mesh)
        with ckptmap.hooks.install(model):
            model.load_state_dict({name: value * 2 for name, value in net(0).state_dict().items()})
        same(whole(model), {name: value * 2 for name, value in net(0).state_dict().items()}, mesh)


def hooked(wrap: str, mode: str) -> None:
    for name, source in SOURCES.items():
        model = built(wrap, mode, 1)
        with ckptmap.hooks.install(model, max_memory=SMALL) as handle:
            assert not model.load_state_dict(source()).missing_keys
            assert len(handle.reports["model"].loaded) == len(list(net(0).named_parameters())) + 1
        assert "load_state_dict" not in model.__dict__
        same(whole(model), truth_of(name), (wrap, mode, name))


def strict_as_torch(wrap: str) -> None:
    model = built(wrap, "eager", 1)
    state = {f"module.{name}": value for name, value in net(0).state_dict().items()}
    del state["module.calls"]
    state["module.more"] = torch.ones(2)
    with ckptmap.hooks.install(model):
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            assert 'Missing key(s) in state_dict: "calls"' in str(error), error
            assert 'Unexpected key(s) in state_dict: "more"' in str(error), error
        else:
            raise AssertionError("missing names were not noticed")
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["calls"], ["more"])
        # flat shards are FSDP1's own
        again = built(wrap, "eager", 0)
        if wrap == "fsdp1-flat":
            for one in (model, again):
                FSDP.set_state_dict_type(typed(one, Type.FULL_STATE_DICT), Type.LOCAL_STATE_DICT)
            model.load_state_dict(again.state_dict())
            same(whole(model), whole(again), "local")
    try:
        FSDP.set_state_dict_type(typed(model, Type.FULL_STATE_DICT), Type.LOCAL_STATE_DICT)
        ckptmap.translate(state, like=model)
    except ckptmap.CkptmapError as error:
        assert error.code == "CKM505" and "LOCAL_STATE_DICT" in error.message, error
    else:
        raise AssertionError("flat shards were made")


# ------------------------------------------------------------------------------- the optimizer


def moments(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole moments by plain name, as torch gathers them of FSDP1."""
    root = typed(model, Type.FULL_STATE_DICT)
    state = FSDP.optim_state_dict(root, optimizer)["state"]
    return {
        f"{name.replace('_orig_mod.', '')}.{key}": value
        for name, entries in state.items()
        for key, value in entries.items()
    }


def source_run(wrap: str, make: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    model = built(wrap, "eager", 0)
    optimizer = make(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 2)  # the same words on all ranks: the same moments in every wrapping
    return model, optimizer


def by_index(wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain or FSDP2 optimizer's own state dict, keyed by index, and its whole moments."""
    model, optimizer = source_run(wrap)
    truth = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            whole_value: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
            truth[f"{name}.{key}"] = whole_value
    return optimizer.state_dict(), truth


def by_name(wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """FSDP1's sharded optimizer state, or FSDP2's by torch.distributed's own function."""
    model, optimizer = source_run(wrap)
    if wrap == "fsdp2":
        return dict(get_optimizer_state_dict(model, optimizer)), by_index(wrap)[1]
    truth = moments(model, optimizer)
    return FSDP.optim_state_dict(typed(model, Type.SHARDED_STATE_DICT), optimizer), truth


def optimizers(wrap: str, mode: str) -> None:
    found = [by_index("plain"), by_index("fsdp2"), by_name("fsdp2"), by_name("fsdp1")]
    for number, (state, truth) in enumerate(found):
        model = built(wrap, mode, 1)
        theirs = torch.optim.AdamW(model.parameters(), lr=9.0)
        with ckptmap.hooks.install(model, theirs, max_memory=SMALL) as handle:
            theirs.load_state_dict(state)
        report = handle.reports["optimizer"].state
        assert report is not None and not report.initialised, report
        assert theirs.param_groups[0]["lr"] == 1e-3
        before = moments(model, theirs)
        same(before, truth, (wrap, mode, number))
        own = theirs.state_dict()
        train(model, theirs, 2, 4, dist.get_rank())
        with ckptmap.hooks.install(model, theirs) as handle:
            theirs.load_state_dict(own)  # its own shards are torch's business
            assert not handle.reports
        assert before.keys() == moments(model, theirs).keys()


def low_bits(wrap: str) -> None:
    """8-bit moments of FSDP2 rows into FSDP1's flat shards, decoded and encoded anew."""
    model, optimizer = source_run("fsdp2", AdamW8bit)
    other = built(wrap, "eager", 1)
    theirs = AdamW8bit(other.parameters(), lr=9.0)
    with ckptmap.hooks.install(other, theirs, precision="fp32") as handle:
        other.load_state_dict(model.state_dict())
        theirs.load_state_dict(optimizer.state_dict())
    report = handle.reports["optimizer"].state
    assert report is not None and not report.initialised, report
    found = moments(other, theirs)
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            parts: list[Any] = [None] * dist.get_world_size()
            local: Any = optimizer.state[param][key].to_local()
            values = local.dequantize() if hasattr(local, "codes") else local
            dist.all_gather_object(parts, values)
            assert torch.equal(found[f"{name}.{key}"], torch.cat(parts)), (name, key)
    train(other, theirs, 2, 4, dist.get_rank())


def main() -> None:
    """Three ranks cut inside tensors, and unevenly; where two cut, they do, too: two ranks take one of both ways."""
    meshed()
    both = (
        ("fsdp1", "compiled-layers", "checkpointed"),
        ("fsdp1-flat", "checkpointed", "eager"),
    )
    for wrap, mode, other in both if dist.get_world_size() == 3 else both[:1]:
        translated(wrap, mode)
        hooked(wrap, mode)
        strict_as_torch(wrap)
        optimizers(wrap, other)
        low_bits(wrap)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # FSDP1's own deprecations
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    main()
    dist.barrier()
    dist.destroy_process_group()
