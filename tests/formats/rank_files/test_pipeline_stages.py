"""Ranks that hold different tensors: pipeline stages and experts, each rank with names of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptmap
from ckptmap.errors import LoadError, RunError, SourceError


def save_ranks(folder: Path, trees: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / f"rank{rank}.pt")
    return folder


# ------------------------------------------------------------------ one name, other values


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.expert = nn.Linear(4, 4, bias=False)


@pytest.fixture(params=[True, False], ids=["crc", "bytes"])
def crc(request: pytest.FixtureRequest) -> Any:
    torch.serialization.set_crc32_options(request.param)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.fixture
def experts(crc: None, tmp_path: Path) -> Path:
    """As expert parallelism leaves them: each rank calls its own expert `expert`."""
    trees: list[Any] = []
    for rank in range(2):
        torch.manual_seed(0)
        model = Experts()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            model.expert.weight.add_(rank)
        (model.gate(torch.ones(4)).sum() + model.expert(torch.ones(4)).sum()).backward()
        optimizer.step()
        trees.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return save_ranks(tmp_path / "experts", trees)


OTHER = r"expert\.weight: the replica at \[0, 0\] in .*rank1\.pt differs from .*rank0\.pt"


def test_weights_that_differ_by_rank_are_never_read_as_one(experts: Path) -> None:
    ckpt = ckptmap.open(experts)
    assert ckpt["gate.weight"].read().shape == (2, 4)
    reads: list[Callable[[], object]] = [
        lambda: ckpt["expert.weight"].read(),
        lambda: ckpt["expert.weight"][1:3],
        lambda: ckptmap.diff(experts, experts, values=True),
    ]
    for read in reads:
        with pytest.raises(RunError, match=OTHER) as caught:
            read()
        assert caught.value.code == "CKM310"


def test_nothing_is_loaded_where_ranks_differ(experts: Path) -> None:
    model = Experts()
    before = model.gate.weight.detach().clone()
    with pytest.raises(RunError, match=OTHER):
        ckptmap.load(experts, model)
    assert torch.equal(model.gate.weight, before)


def test_moments_that_differ_by_rank_are_not_loaded(crc: None, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    trees: list[Any] = []
    for rank in range(2):
        optimizer = torch.optim.AdamW(model.parameters())
        state = {p: torch.full((2, 2), float(rank + 1)) for p in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.weight] = {**state, "step": torch.tensor(1.0)}
        trees.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    source = save_ranks(tmp_path / "ranks", trees)
    live = nn.Linear(2, 2)
    with pytest.raises(RunError, match=r"exp_avg: the replica at"):
        ckptmap.load(source, live, torch.optim.AdamW(live.parameters()))
    ckptmap.load(source, live)
    assert torch.equal(live.weight, model.weight)


# ------------------------------------------------------------------ other names


def test_a_rank_that_holds_nothing(tmp_path: Path) -> None:
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    for name, trees in {
        "bare": [{}, weights],
        "model": [{"model": weights, "step": 3}, {"model": {}, "step": 3}],
    }.items():
        ckpt = ckptmap.open(save_ranks(tmp_path / name, trees))
        assert {key: ckpt[key].read().tolist() for key in ckpt} == {
            key: value.tolist() for key, value in weights.items()
        }
        ckptmap.convert(tmp_path / name, tmp_path / f"{name}.pt", to="full")


def save_sharded(
    file: Path, rank: int, meshes: list[list[int]], keys: list[dict[str, Tensor]]
) -> None:
    """What a rank holds: a mesh a stage, made of its ranks alone."""
    world = sum(map(len, meshes))
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        stage = next(n for n, ranks in enumerate(meshes) if rank in ranks)
        mesh, at = DeviceMesh("cpu", meshes[stage]), meshes[stage].index(rank)
        parts = {
            key: whole.chunk(len(meshes[stage]))[at].clone() for key, whole in keys[stage].items()
        }
        torch.save(
            {
                key: DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                for key, part in parts.items()
            },
            file,
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["rank{}.pt", "model_world_size_4_rank_{}.pt"])
def test_stages_with_meshes_of_their_own(name: str, tmp_path: Path) -> None:
    """As DeviceMesh.from_group makes them: they know nothing of the other stage."""
    first = {"embed": torch.randn(4, 3), "layers.0": torch.randn(4, 2)}
    last = {"layers.1": torch.randn(4, 2), "embed": first["embed"]}
    for tied, keys in {
        True: [first, last],
        False: [first, {**last, "embed": torch.ones(4, 3)}],
    }.items():
        folder = tmp_path / str(tied)
        folder.mkdir()
        for rank in range(4):
            save_sharded(folder / name.format(rank), rank, [[0, 1], [2, 3]], keys)
        ckpt = ckptmap.open(folder)
        assert torch.equal(ckpt["layers.1"].read(), last["layers.1"])
        if tied:
            ckptmap.convert(folder, tmp_path / "out.pt", to="full")
            found = torch.load(tmp_path / "out.pt")
            assert set(found) == {*first, *last}
            assert all(torch.equal(found[key], value) for key, value in (first | last).items())
        else:
            with pytest.raises(RunError, match="embed: the replica"):
                ckpt["embed"].read()
    (folder / name.format(3)).unlink()
    with pytest.raises(SourceError, match="rank 3 of 4 is missing"):
        ckptmap.open(folder)


def test_halves_of_two_stages_are_no_tensor(tmp_path: Path) -> None:
    """Rank 0 holds the upper half of one stage's, rank 3 the lower half of another's."""
    embed, other = {"embed": torch.randn(4, 3)}, {"other": torch.randn(4, 3)}
    for rank in range(4):
        held = embed if rank in (0, 3) else other
        save_sharded(tmp_path / f"rank{rank}.pt", rank, [[0, 1], [2, 3]], [held, held])
    with pytest.raises(SourceError, match=r"embed: .* hold 6 elements of 12|embed: is cut over"):
        ckptmap.open(tmp_path)


# ------------------------------------------------------------------ optimizers of stages


def stage(seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential()
    module.add_module(f"l{seed}", nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def both() -> tuple[nn.Module, torch.optim.Optimizer]:
    whole = nn.Sequential()
    whole.add_module("l0", nn.Linear(3, 3))
    whole.add_module("l1", nn.Linear(3, 3))
    groups = [{"params": list(part.parameters()), "lr": 5.0} for part in whole]
    return whole, torch.optim.AdamW(groups)


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 0.25)])
def test_groups_of_stages_by_name_are_one_optimizers(
    rates: tuple[float, float], tmp_path: Path
) -> None:
    stages = [stage(seed, lr) for seed, lr in enumerate(rates)]
    trees = [
        {"model": m.state_dict(), "optimizer": get_optimizer_state_dict(m, o)} for m, o in stages
    ]
    source = save_ranks(tmp_path / "ranks", trees)
    ckptmap.convert(source, tmp_path / "out", to="fsdp2")
    for path in (source, tmp_path / "out"):
        groups = ckptmap.open(path).optimizer_groups
        assert sorted({group["lr"] for group in groups}) == sorted(set(rates))
        assert sum(len(group["params"]) for group in groups) == 4
        model, optimizer = both()
        ckptmap.load(path, model, optimizer)
        assert tuple(group["lr"] for group in optimizer.param_groups) == rates
        for (module, saved), part in zip(stages, model, strict=True):
            for mine, theirs in zip(part.parameters(), module.parameters(), strict=True):
                assert torch.equal(optimizer.state[mine]["exp_avg"], saved.state[theirs]["exp_avg"])


def test_groups_of_stages_by_number_are_refused_by_name(tmp_path: Path) -> None:
    trees = [
        {"model": m.state_dict(), "optimizer": o.state_dict()}
        for m, o in (stage(0, 0.5), stage(1, 0.25))
    ]
    source = save_ranks(tmp_path / "ranks", trees)
    model, optimizer = both()
    with pytest.raises(LoadError, match="its ranks have different param_groups"):
        ckptmap.load(source, model, optimizer)


def test_settings_that_were_not_saved_are_told(tmp_path: Path) -> None:
    """torch's DCP keeps the list of one rank: the groups of the other stages are not in it."""
    stages = [stage(0, 0.5), stage(1, 0.25)]
    states = [get_optimizer_state_dict(m, o) for m, o in stages]
    weights = {k: v for m, _ in stages for k, v in m.state_dict().items()}
    state = {k: v for one in states for k, v in one["state"].items()}
    tree = {
        "model": weights,
        "optimizer": {"state": state, "param_groups": states[0]["param_groups"]},
    }
    torch.save(tree, tmp_path / "one.pt")
    model = nn.Sequential()
    model.add_module("l0", nn.Linear(3, 3))
    model.add_module("l1", nn.Linear(3, 3))
    report = ckptmap.load(tmp_path / "one.pt", model, torch.optim.AdamW(model.parameters()))
    assert report.state is not None
    assert any(
        "2 of its parameters is not in the checkpoint: l1.weight" in s
        for s in report.state.settings
    )
