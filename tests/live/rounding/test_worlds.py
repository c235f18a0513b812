"""A run gives the same bits on any number of ranks, and where it may not, `load(exact=True)` says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import disable_cache_limit

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.rounding import install
from ckptmap.live.rounding.position_bits import key_of
from ckptmap.live.rounding.stepping import kernel
from ckptmap.tensors import Box
from tests.corpus.ranks import run_ranks
from tests.ranks import rounding as runs
from tests.support.resume_optimizers import ROUNDING
from tests.support.same_tensors import bits

MODULE = "tests.ranks.rounding"


@pytest.fixture
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def ranks(world: int, folder: Path, part: str, names: str = ",".join(ROUNDING)) -> None:
    run_ranks(MODULE, world, [str(folder), part, names], timeout=400)


def differing(one: Path, two: Path) -> list[str]:
    """Names of weights, and of optimizer state, whose stored parts are not the same bytes."""
    found, wanted = (parts(path) for path in (one, two))
    assert found.keys() == wanted.keys()
    return [name for name in found if not torch.equal(found[name], wanted[name])]


def parts(path: Path) -> dict[str, torch.Tensor]:
    """The stored parts of weights and state by name: codes and scales, where moments have any."""
    with ckptmap.open(path) as checkpoint:
        lazies = {(name, ""): checkpoint[name] for name in checkpoint}
        for fqn, state in checkpoint.optimizer.items():
            lazies |= {(fqn, name): lazy for name, lazy in state.items()}
        assert {fqn for fqn, name in lazies if name} == {*checkpoint} - {"head.weight"}  # tied
        return {
            f"{fqn} {name} {lazy.encoding_} {part}": bits(
                lazy.read_part(part, Box.whole(stored.info.shape))
            )
            for (fqn, name), lazy in lazies.items()
            for part, stored in lazy.parts.items()
        }


def alone(folder: Path, name: str, first: int, source: Path | None = None) -> Path:
    """Steps `first` to ten in this process, from the beginning or from what is saved, and saved."""
    model, optimizer = runs.run(name)
    if source is not None:
        assert ckptmap.load(source, model, optimizer, exact=True).inexact == ()
    runs.train(model, optimizer, first, 10)
    path = folder / f"{name}-alone-{first}"
    ckptmap.save(path, model, optimizer).wait()
    return path


def test_ten_steps_on_any_ranks_in_one_go_or_two(tmp_path: Path, eager: None) -> None:
    """Ten on four ranks, four there and six on two or on one, and ten in this process."""
    ranks(4, tmp_path, "without_stop")
    ranks(2, tmp_path, "goes_on")
    for name in ROUNDING:
        whole = alone(tmp_path, name, 0)
        assert differing(tmp_path / f"{name}-ten", whole) == []
        assert differing(tmp_path / f"{name}-continued", whole) == []
        assert differing(alone(tmp_path, name, 4, tmp_path / f"{name}-four"), whole) == []


def test_steps_of_shards_can_be_compiled(tmp_path: Path, eager: None) -> None:
    """Traced and functionalised, as for every compiler, by one that leaves the kernels alone; without the
    repair of torchao's moments in DTensors."""
    env = {"CKPTMAP_TEST_BACKEND": "aot_eager"}
    run_ranks(MODULE, 2, [str(tmp_path), "one_weight", "ao8"], timeout=400, env=env)
    runs.one_weight(tmp_path, "ao8")
    assert differing(tmp_path / "ao8-of-2", tmp_path / "ao8-of-1") == []


def test_other_meshes_give_the_same_bits(tmp_path: Path, eager: None) -> None:
    """Uneven rows of three ranks, replicas, and rows and columns at once."""
    for world in (3, 4):
        ranks(world, tmp_path, "in_other_meshes", "ao,ao4")
    for name in ("ao", "ao4"):
        model, optimizer = runs.run(name)
        runs.given_gradients(model, optimizer)
        ckptmap.save(tmp_path / name, model, optimizer).wait()
        for mesh in ("3", "replicate", "rows"):
            wrong = differing_values(tmp_path / f"{name}-{mesh}", tmp_path / name)
            assert wrong == [], (name, mesh)


def test_shards_that_end_inside_blocks_give_the_same_bits(tmp_path: Path, eager: None) -> None:
    """On 1, 2, 3 and 4 ranks and two replicas of two, in one go and from what four saved: weights, codes and
    scales."""
    names = ",".join(runs.ODD)
    model, optimizer = runs.odd_model(), ROUNDING["ao"]
    plain = optimizer(model.parameters())
    runs.given_gradients(model, plain)
    ckptmap.save(tmp_path / "plain", model, plain).wait()
    ranks(4, tmp_path, "odd_whole,odd_replicas,odd_gradients,odd_uninstalled", names)
    for world in (2, 3):
        ranks(world, tmp_path, "odd_rest", names)
    for name in runs.ODD:
        runs.odd_whole(tmp_path, name)
        runs.odd_rest(tmp_path, name)
        whole = tmp_path / f"{name}-five-of-1"
        assert differing(tmp_path / f"{name}-two-of-4", tmp_path / f"{name}-two-of-1") == []
        for other in ("five-of-4", "replicas", "rest-of-1", "rest-of-2", "rest-of-3"):
            assert differing(tmp_path / f"{name}-{other}", whole) == [], (name, other)
        for world in (2, 3):
            made = tmp_path / f"{name}-quantized-of-{world}"
            assert differing(made, tmp_path / f"{name}-quantized-of-1") == [], (name, world)


def differing_values(one: Path, two: Path) -> list[str]:
    with ckptmap.open(one) as a, ckptmap.open(two) as b:
        assert [*a] == [*b] and len(a) > 10
        return [name for name in a if not torch.equal(a[name].read(), b[name].read())]


# ------------------------------------------------------------------------------- what cannot be known


def small(**options: Any) -> tuple[Any, Any]:
    model = runs.built(0)
    optimizer = ROUNDING["ao4"](model.parameters())
    install(optimizer, seed=1, model=model, **options)
    return model, optimizer


def test_exact_refuses_what_it_cannot_know(tmp_path: Path, eager: None) -> None:
    ranks(4, tmp_path, "in_blocks_of_shards", "ao4")
    source = tmp_path / "ao4-rows"
    model, optimizer = small(same_gradients=True)
    with pytest.raises(LoadError, match="moments that are not in blocks of the whole tensor") as no:
        ckptmap.load(source, model, optimizer, exact=True)
    assert no.value.code == "CKM507" and "world size" not in str(no.value)
    model, optimizer = small()
    report = ckptmap.load(source, model, optimizer)
    texts = " ".join(report.inexact)
    assert "world size: was 4, is 1" in texts and "same_gradients=True" in texts
    assert report.rounding == f"by position, seed {runs.SEED}, was 1"


def test_dropout_is_not_the_same_on_other_ranks(tmp_path: Path, eager: None) -> None:
    """2 -> 1: `same_gradients=True` does not hold for a rank that drops other values."""
    ranks(2, tmp_path, "with_dropout", "ao")
    model, optimizer = runs.dropping("ao", 0.1)
    before = [param.clone() for param in model.parameters()]
    text = r"dropout draws other numbers than the saved run would \(1 module: 1\)"
    with pytest.raises(LoadError, match=text) as no:
        ckptmap.load(tmp_path / "ao-0.1", model, optimizer, exact=True)
    assert no.value.code == "CKM507" and "same_gradients" not in str(no.value)
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    report = ckptmap.load(tmp_path / "ao-0.1", model, optimizer)
    assert any("dropout draws other numbers" in one for one in report.inexact)
    model, optimizer = runs.dropping("ao", 0.0)
    assert ckptmap.load(tmp_path / "ao-0.0", model, optimizer, exact=True).inexact == ()


def test_ranks_with_different_seeds_are_noticed_by_save(tmp_path: Path) -> None:
    ranks(2, tmp_path, "other_seeds", "ao")
    assert not (tmp_path / "refused").exists()


# ------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("name", ["ao", "ao8"])
def test_a_compiled_step_of_a_shard_is_that_of_the_whole(name: str) -> None:
    """By inductor, of 80 rows and of rows 20 to 40. (Before it is rounded, torchao's own arithmetic gives
    other last places where it is compiled.)"""
    torch.compiler.set_stance("default")
    compiled = torch.compile(kernel(), fullgraph=True, dynamic=False)
    with disable_cache_limit():
        whole, shard = (_step(compiled, name, *rows) for rows in ((0, 80), (20, 40)))
        assert all(torch.equal(a[20:40], b) for a, b in zip(whole, shard, strict=True))


def _step(step: Any, name: str, first: int, last: int) -> list[torch.Tensor]:
    """The weight and its decoded moments after two steps of rows first..last-1 of [80, 128]."""
    generator = torch.Generator().manual_seed(0)
    weight, *grads = (
        torch.randn(80, 128, generator=generator).to(torch.bfloat16)[first:last].clone()
        for _ in range(3)
    )
    optimizer = ROUNDING[name]([torch.nn.Parameter(weight)])
    moments = [
        torch.zeros_like(weight)
        if name == "ao"
        else optimizer._subclass_zeros(weight, signed, optimizer.block_size)
        for signed in (True, False)
    ]
    rows = torch.tensor([first * 128], dtype=torch.int32)
    for number, grad in enumerate(grads, 1):
        state = (torch.tensor(float(number)), *moments, None)
        settings = (torch.tensor(1e-2), 0.9, 0.999, 1e-2, 1e-8, True)
        key = key_of(1, number, "w").tensors()
        step(weight, grad, state, settings, rows, (last - first) * 128, key)
    return [weight, *(m.dequantize() if hasattr(m, "codes") else m for m in moments)]


def test_cuts_of_all_kinds_on_other_meshes(tmp_path: Path) -> None:
    """4 ranks -> 2 and 1, by rows, columns, both, and replicas: tests/ranks/rounding_cuts.py."""
    module = "tests.ranks.rounding_cuts"
    cuts = ["columns", "replicas of rows", "rows and columns", "rows of rows"]
    run_ranks(module, 4, ["save", str(tmp_path), *cuts], timeout=240)
    run_ranks(module, 2, ["load", str(tmp_path), "rows", "columns"], timeout=240)
    run_ranks(module, 1, ["load", str(tmp_path), "whole"], timeout=240)
