"""8- and 4-bit moments of weights that are cut by columns inside blocks: one run on any mesh, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import disable_cache_limit

import ckptmap
from ckptmap.live.optimizer import whole_blocks
from ckptmap.live.optimizer.family import Codes, codes_of
from ckptmap.live.optimizer.local_state import decoded
from ckptmap.live.rounding import install, stepping
from ckptmap.live.rounding.position_bits import key_of
from ckptmap.live.rounding.positions import positions
from ckptmap.optim.block_segments import segments_of
from ckptmap.quantization.blockwise.dequantize import window
from ckptmap.tensors import Box
from tests.corpus.ranks import run_ranks
from tests.ranks import rounding_columns as runs
from tests.support.same_tensors import bits

MODULE = "tests.ranks.rounding_columns"


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def ranks(world: int, folder: Path, parts: str, names: Iterable[str] = runs.BUILT) -> None:
    run_ranks(MODULE, world, [str(folder), parts, ",".join(names)], timeout=400)


def values(path: Path) -> dict[str, torch.Tensor]:
    """The bits of weights and decoded moments, by name."""
    with ckptmap.open(path) as checkpoint:
        found = {name: bits(checkpoint[name].read()) for name in checkpoint}
        for fqn, state in checkpoint.optimizer.items():
            found |= {f"{fqn} {name}": bits(lazy.read()) for name, lazy in state.items()}
        return found


def differing(one: Path, two: Path) -> list[str]:
    found, wanted = values(one), values(two)
    assert found.keys() == wanted.keys() and len(found) > 50
    return [name for name in found if not torch.equal(found[name], wanted[name])]


def test_ten_steps_on_any_mesh_in_one_go_or_two(tmp_path: Path) -> None:
    """Tensor parallelism, FSDP2 over it, and FSDP2 that cuts columns, on four ranks, and what these saved on the way
    on four, three, two and one: as all steps in one process."""
    ranks(4, tmp_path, "without_stop")
    for name in runs.BUILT:
        runs.without_stop(tmp_path, name)
        for steps in ("some", "all"):
            alone = tmp_path / f"{name}-alone-{steps}"
            for setup in runs.SETUPS:
                assert differing(tmp_path / f"{name}-{setup}-{steps}", alone) == [], setup
    for world in (2, 3, 4):
        ranks(world, tmp_path, "goes_on")
    for name in runs.BUILT:
        runs.goes_on(tmp_path, name)
        continued = sorted(tmp_path.glob(f"{name}-*-some-then-*"))
        assert len(continued) == sum(
            len(one) for of in runs.GOES_ON.values() for one in of.values()
        )
        for path in continued:
            assert differing(path, tmp_path / f"{name}-alone-all") == [], path.name


def test_odd_cases_on_four_ranks(tmp_path: Path) -> None:
    """NaN, gradients on some ranks only, replicas, moments of other optimizers, and torch's own ways to save."""
    torch.manual_seed(0)
    model = runs.Net().to(torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters())
    runs.given(model, plain, 2)
    ckptmap.save(tmp_path / "torch", model, plain).wait()
    ranks(4, tmp_path, "values_that_are_none,replicas")
    ranks(4, tmp_path, "some_gradients", ["ao8"])  # found before any moment is touched
    ranks(4, tmp_path, "recoded,as_tensors,by_planners,without_rounding", runs.ENCODINGS)
    for name in runs.ENCODINGS:
        runs.recoded(tmp_path, name)
        for what in ("recoded", "decoded"):
            alone, others = (tmp_path / f"{name}-{what}-of-{world}" for world in (1, 4))
            assert differing(others, alone) == [], others.name
        takes_whole_blocks(tmp_path / f"{name}-own-step", name)
    for name in runs.BUILT:
        runs.values_that_are_none(tmp_path, name)
        for what in ("nan", "inf"):
            alone, others = (tmp_path / f"{name}-{what}-of-{world}" for world in (1, 4))
            assert differing(others, alone) == [], others.name
        torch.manual_seed(0)
        model = runs.Net().to(torch.bfloat16)
        optimizer = runs.BUILT[name](model.parameters())
        install(optimizer, seed=runs.SEED, model=model)
        runs.given(model, optimizer, 3)
        ckptmap.save(tmp_path / f"{name}-one", model, optimizer).wait()
        assert differing(tmp_path / f"{name}-replicas", tmp_path / f"{name}-one") == []


def takes_whole_blocks(path: Path, name: str) -> None:
    """Codes of columns that end between blocks are copied; the others are decoded."""
    model = runs.Net().to(torch.bfloat16)
    optimizer = runs.BUILT[name](model.parameters())
    report = ckptmap.load(path, model, optimizer)
    state = optimizer.state[model.whole.down.weight]
    with ckptmap.open(path) as checkpoint:
        for entry in ("exp_avg", "exp_avg_sq"):
            assert report.state and f"whole.down.weight.{entry}" in report.state.copied
            stored = checkpoint.optimizer["whole.down.weight"][entry].read()
            assert torch.equal(state[entry].dequantize(), stored)
            assert f"odd.down.weight.{entry}" not in report.state.copied


# ------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("name", ["ao8", "ao4", "aofp8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_compiled_step_of_columns_is_that_of_the_whole(name: str, device: str) -> None:
    """By inductor, of [128, 100] and of both halves of its columns, which share a kernel, two steps: weights, codes
    and scales. Rows begin and end inside blocks of 256 and 128 elements; 50 columns fill no vector of 8 or 16."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.compiler.set_stance("default")
    shape = (128, 100)
    boxes = [Box((0, 0), (128, 50)), Box((0, 50), (128, 50))]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    optimizer = runs.BUILT[name]([torch.nn.Parameter(weight)])
    block = int(optimizer.block_size)
    whole = [optimizer._subclass_zeros(weight, signed, block) for signed in (True, False)]
    weights = [weight.clone(), *(window(weight, box).clone() for box in boxes)]
    cut = [[in_columns(moment, box, shape) for moment in whole] for box in boxes]
    with disable_cache_limit():
        for number in (1, 2):
            maker = torch.Generator().manual_seed(number)
            grad = torch.randn(shape, generator=maker).bfloat16().to(device)
            step(weights[0], grad, whole, number, Box.whole(shape), shape)
            new = []
            for box, some, codes in zip(boxes, weights[1:], cut, strict=True):
                wide = [decoded(one).view(box.sizes) for one in codes]
                step(some, window(grad, box), wide, number, box, shape)
                new.append(wide)
            for at in (0, 1):
                peaks = torch.zeros(128 * 100 // block, device=device)
                for codes, wide in zip(cut, new, strict=True):
                    torch.maximum(peaks, of_all(codes[at], wide[at], len(peaks)), out=peaks)
                for codes, wide in zip(cut, new, strict=True):
                    segments = codes[at].segments
                    assert segments is not None
                    mine = peaks[segments.first :][: segments.count]
                    whole_blocks.encode(codes[at], wide[at], mine)
    for box, some, codes in zip(boxes, weights[1:], cut, strict=True):
        assert torch.equal(window(weights[0], box), some)
        for one, moment in zip(codes, whole, strict=True):
            assert torch.equal(window(moment.dequantize(), box), decoded(one).view(box.sizes))


def test_a_kernel_for_a_device_computes_as_operations_one_by_one_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole blocks are decoded and quantized in the kernel, those that ranks share outside of it: Triton divides
    approximately, contracts and flushes unless it is told not to."""
    asked: dict[str, Any] = {}

    def compile_(run: Any, **options: Any) -> Any:
        asked[kind] = options["options"]
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    for kind in ("cpu", "cuda"):
        stepping.compiled.__wrapped__(stepping.kernel, kind)
    assert asked["cpu"] is None
    division = {"eager_numerics.division_rounding", "emulate_divison_rounding"}
    assert asked["cuda"]["emulate_precision_casts"] and division & asked["cuda"].keys()
    with torch._inductor.config.patch(asked["cuda"]):  # each is known to this release
        pass


def step(
    weight: torch.Tensor, grad: torch.Tensor, moments: list[Any], number: int, box: Box,
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    compiled = stepping.compiled(stepping.kernel, weight.device.type)
    settings = (torch.tensor(1e-2), 0.9, 0.999, 1e-2, 1e-8, True)
    at = positions(shape, [(box, Box.whole(box.sizes))], box.sizes, weight.device)
    state = (torch.tensor(float(number)), *moments, None)
    key = key_of(1, number, "w").tensors()
    compiled(weight, grad, state, settings, at.rows, at.width, key)


def in_columns(moment: Any, box: Box, shape: tuple[int, ...]) -> Codes:
    codes = codes_of(moment)
    assert codes is not None
    segments = segments_of(shape, box, codes.block_size).on(codes.codes.device)
    numel = -(-box.numel * codes.codes.numel() // moment.numel())
    return replace(
        codes, codes=codes.codes.new_zeros(numel), scale=codes.scale.new_zeros(segments.count),
        shape=box.sizes, segments=segments,
    )  # fmt: skip


def of_all(codes: Codes, values: torch.Tensor, count: int) -> torch.Tensor:
    segments, peaks = codes.segments, values.new_zeros(count)
    assert segments is not None
    peaks[segments.first : segments.first + segments.count] = segments.peaks(values)
    return peaks
