"""`translate`: state dicts in memory go into live models and under other names; live DTensors are
resharded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import ckptmap
from ckptmap.errors import CkptmapError, LoadError, RunError
from ckptmap.live.model.rank_group import RankGroup
from ckptmap.live.state_dict.live_checkpoint import open_state_dict
from ckptmap.live.state_dict.memory_blocks import LiveReader, Memory
from ckptmap.live.state_dict.reshard import Exchange
from ckptmap.live.state_dict.reshard_rounds import around, batches, rounds
from ckptmap.tensors import Box, Path, TensorInfo
from tests.corpus.ranks import run_ranks
from tests.support.examples import examples
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import config_of
from tests.support.resume_model import net

ON_RANKS = {2: "layouts,names,rank0,errors,nf4,int8", 3: "layouts,nf4", 4: "layouts,names,nf4,int8"}


@pytest.mark.parametrize("world", ON_RANKS)
def test_live_dtensors(world: int, tmp_path: FilePath) -> None:
    """1-D, HSDP, TP, columns, replicated and plain, each into each, uneven shards included, in
    messages smaller than a tensor: bit for bit, the live model untouched. Codes of NF4 and int8
    move; 3 ranks, which cannot cut NF4, get dense shards; dense shards are quantized as the whole
    tensor would be."""
    args = [ON_RANKS[world], str(tmp_path)]
    run_ranks("tests.ranks.translate_mesh", world, args, timeout=300)


# ------------------------------------------------------------------ one process


def wrapped(model: nn.Module, prefix: str = "module._orig_mod.") -> dict[str, Any]:
    return {prefix + name: value for name, value in model.state_dict().items()}


def test_wrappers_off_and_the_model_untouched() -> None:
    source, model = net(0), net(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = ckptmap.translate(wrapped(source), like=model)
    assert list(made) and set(made) == set(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(made[name], source.state_dict()[name])
    model.load_state_dict(made)


def test_wrappers_on() -> None:
    compiled = torch.compile(net(1), backend="eager")
    made = ckptmap.translate(net(0).state_dict(), like=compiled)  # type: ignore[arg-type]
    assert all(name.startswith("_orig_mod.") for name in made)
    plain = ckptmap.translate(made)
    assert set(plain) == set(net(0).state_dict())
    again = ckptmap.translate(plain, wrap=("ddp", "compile"))
    assert set(again) == {f"module._orig_mod.{name}" for name in plain}


def test_dtype_of_the_model() -> None:
    made = ckptmap.translate(net(0).state_dict(), like=net(1, torch.bfloat16))
    assert made.report is not None and made.report.cast
    want = net(0).layers[0].up.weight.to(torch.bfloat16)
    assert torch.equal(made["layers.0.up.weight"], want)


def test_encodings_without_a_model() -> None:
    """NF4 as torchao's to_nf4, back as it decodes, int8 as torchao quantizes, and casts."""
    state = dict(net(0, torch.bfloat16).state_dict())
    nf4: Any = ckptmap.translate(wrapped_dict(state), encoding="nf4")
    up = "layers.0.up.weight"
    assert torch.equal(nf4[up].quantized_data, to_nf4(state[up]).quantized_data)
    assert torch.equal(nf4["layers.0.norm.weight"], state["layers.0.norm.weight"])
    dense = ckptmap.translate(nf4, encoding="dense", wrap=("ddp",))
    assert torch.equal(dense[f"module.{up}"], nf4[up].get_original_weight())
    wide = ckptmap.translate(nf4, encoding="fp32")
    assert torch.equal(wide[up], nf4[up].get_original_weight().float())
    int8: Any = ckptmap.translate(state, encoding="int8")
    model = net(0, torch.bfloat16)
    quantize_(model.layers[0], Int8WeightOnlyConfig())
    assert torch.equal(int8[up].qdata, model.layers[0].up.weight.qdata)  # type: ignore[operator]
    with pytest.raises(ValueError, match="encoding='int3', expected one of"):
        ckptmap.translate(state, encoding="int3")


def test_bitsandbytes_state_dict_is_decoded() -> None:
    """Its payload and the tensors beside it are one weight."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 128)})
    layer.to("cpu")
    x = torch.randn(3, 128)
    want = layer(x)
    state = {f"fc.{name}": value for name, value in layer.state_dict().items()}
    assert len(state) > 1
    made = ckptmap.translate(state, encoding="dense")
    assert list(made) == ["fc.weight"] and made["fc.weight"].shape == (64, 128)
    assert torch.allclose(x @ made["fc.weight"].float().t(), want, atol=1e-4)


def quantized(seed: int) -> Any:
    model = net(seed, torch.bfloat16)
    up = model.layers[0].up
    up.weight = nn.Parameter(to_nf4(up.weight.detach()), requires_grad=False)
    return model


def test_dense_becomes_nf4_and_nf4_dense() -> None:
    source, model = net(0, torch.bfloat16), quantized(1)
    made = ckptmap.translate(source.state_dict(), like=model)
    want = to_nf4(source.layers[0].up.weight.detach())
    found: Any = made["layers.0.up.weight"]
    assert torch.equal(found.quantized_data, want.quantized_data)
    assert made.report is not None and made.report.quantized == ("layers.0.up.weight",)

    back = ckptmap.translate(made, like=source)
    assert torch.equal(back["layers.0.up.weight"], found.get_original_weight())
    assert back.report is not None and [d.fqn for d in back.report.decoded] == [
        "layers.0.up.weight"
    ]


def test_nf4_codes_are_the_same_bytes() -> None:
    source, model = quantized(0), quantized(1)
    made: Any = ckptmap.translate(source.state_dict(), like=model)["layers.0.up.weight"]
    for part in ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean"):
        assert torch.equal(getattr(made, part), getattr(source.layers[0].up.weight, part)), part


def test_int8_codes_are_kept_and_decoded() -> None:
    source, model, dense = (net(seed) for seed in range(3))
    for one in (source, model):
        quantize_(one.layers[0], Int8WeightOnlyConfig())
    made: Any = ckptmap.translate(source.state_dict(), like=model)
    live: Any = source.layers[0].up.weight
    assert torch.equal(made["layers.0.up.weight"].qdata, live.qdata)
    assert torch.equal(made["layers.0.up.weight"].scale, live.scale)
    for param in dense.parameters():
        param.requires_grad_(False)
    values = ckptmap.translate(source.state_dict(), like=dense)["layers.0.up.weight"]
    assert torch.equal(values, live.dequantize())


def test_a_model_on_meta_gets_tensors() -> None:
    with torch.device("meta"):
        model = type(net(0))()
    made = ckptmap.translate(net(0).state_dict(), like=model)
    model.load_state_dict(made, assign=True)
    assert torch.equal(model.embed.weight, net(0).embed.weight)


def test_ties_stay_one_tensor() -> None:
    made = ckptmap.translate(net(0).state_dict(), like=net(1))
    assert made["embed.weight"] is made["head.weight"]
    state = dict(net(0).state_dict())
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(CkptmapError, match="differ"):
        ckptmap.translate(state, like=net(1))


@pytest.mark.parametrize("scheme", ["meta", "torchtitan@2025-07"])
def test_names_of_another_scheme_and_back(scheme: str) -> None:
    torch.manual_seed(0)
    source = TINY["llama"].build()
    config = config_of("llama")
    state = source.state_dict()
    foreign = ckptmap.translate(state, to=scheme, config=config)
    assert not set(foreign) & set(state)
    torch.manual_seed(1)
    model = TINY["llama"].build()
    made = ckptmap.translate(wrapped_dict(foreign), like=model, config=config)
    for name, value in state.items():
        assert torch.equal(made[name], value), name


def wrapped_dict(state: dict[str, Any]) -> dict[str, Any]:
    return {f"_orig_mod.{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("calls"), "missing: calls"),
        (lambda s: s.update(more=torch.ones(1)), "unexpected: more"),
        (lambda s: s.update(calls=torch.ones(4)), r"calls: model float32\[3\]"),
        (lambda s: s.update(calls=torch.ones(3, device="meta")), "on meta"),
        (lambda s: s.update(calls=torch.ones(3).to_sparse()), "layout torch.sparse_coo"),
    ],
)
def test_refused_before_anything(change: Any, match: str) -> None:
    state = dict(net(0).state_dict())
    change(state)
    with pytest.raises(LoadError, match=match):
        ckptmap.translate(state, like=net(1))


def test_a_whole_checkpoint_is_no_state_dict() -> None:
    nested: Any = {"model": net(0).state_dict(), "step": 3}
    with pytest.raises(LoadError, match="'model' is a OrderedDict, expected tensors by name"):
        ckptmap.translate(nested, like=net(1))


def test_not_strict_makes_what_matches() -> None:
    state = dict(net(0).state_dict()) | {"more": torch.ones(1)}
    del state["calls"]
    made = ckptmap.translate(state, like=net(1), strict=False)
    assert "calls" not in made and made.report is not None
    assert made.report.missing == ("calls",) and made.report.unexpected == ("more",)


def test_like_and_to_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave out the others"):
        ckptmap.translate({}, like=net(0), to="hf")


def test_views_are_read_as_they_lie() -> None:
    """Transposed, expanded, sliced: strides are the tensor's own business."""
    base = torch.arange(48, dtype=torch.float32).view(6, 8)
    state = {
        "t": base.t(),
        "e": base[:1].expand(3, 8),
        "s": base[1::2, ::3],
        "z": torch.tensor(3.0),
    }
    live = open_state_dict(state, RankGroup(), "model")
    for name, tensor in state.items():
        assert torch.equal(live.checkpoint[name].read(), tensor), name
        assert torch.equal(live.checkpoint[name].read(device="cpu"), tensor.contiguous())


def test_two_memories_do_not_see_each_other() -> None:
    """Their placeholders have the same name, and each checkpoint reads its own memory."""
    states = [{"w": torch.full((3,), float(number))} for number in range(2)]
    one, two = (open_state_dict(state, RankGroup(), "model").checkpoint for state in states)
    assert one.group("w").parts[""].chunks[0].region == two.group("w").parts[""].chunks[0].region
    for checkpoint, state in zip((one, two), states, strict=True):
        assert torch.equal(checkpoint["w"].read(), state["w"])
    one.close()
    assert not one.files.mounts
    assert torch.equal(two["w"].read(), states[1]["w"])


# ------------------------------------------------------------------ the plan of moves

CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def tiles(rows: list[int], columns: list[int], ranks: int) -> list[tuple[int, Box]]:
    found, top = [], 0
    for i, height in enumerate(rows):
        left = 0
        for j, width in enumerate(columns):
            found.append(((i * len(columns) + j) % ranks, Box((top, left), (height, width))))
            left += width
        top += height
    return found


def fitted(cuts: list[int], size: int) -> list[int]:
    """The same cuts of another length."""
    found, left = [], size
    for cut in cuts:
        if left:
            found.append(min(cut, left))
            left -= found[-1]
    return [*found, left] if left else found


@examples(150)
@given(CUTS, CUTS, CUTS, CUTS, st.integers(1, 4), st.integers(64, 400), st.booleans())
def test_moves_fill_every_want_once_within_the_budget(
    rows: list[int], columns: list[int], their_rows: list[int], their_columns: list[int],
    ranks: int, budget: int, keep: bool,
) -> None:  # fmt: skip
    path: Path = ("model", "w")
    shape = (sum(rows), sum(columns))
    held = tiles(rows, columns, ranks)
    wanted = tiles(fitted(their_rows, shape[0]), fitted(their_columns, shape[1]), ranks)
    wanted += [(0, Box((0, 0), shape))]
    sources = {path: (TensorInfo(shape, "float32"), held)}
    wants = [
        [[(path, box, keep)] for target, box in wanted if target == rank] for rank in range(ranks)
    ]
    truth = torch.randn(shape)
    outs: dict[tuple[int, int], Any] = {}
    for first, end, moves in batches(wants, sources, budget):
        kept = [sum(b.numel * 4 for u in units[first:end] for _, b, k in u if k) for units in wants]
        assert end == first + 1 or max(kept) <= budget
        for one in moves:
            used = [0] * ranks
            for part in one:
                box = wants[part.target][part.unit][part.need][1]
                out = outs.setdefault((part.target, part.unit), torch.zeros(box.sizes))
                place = part.box.relative_to(box.offsets)
                spot = tuple(slice(o, o + n) for o, n in zip(*place, strict=True))
                assert not out[spot].any(), "filled twice"
                spot_there = tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))
                assert any(
                    rank == part.source and own.intersect(part.box) == part.box
                    for rank, own in held
                ), "the source does not hold it"
                out[spot] = truth[spot_there]
                if part.source != part.target:
                    used[part.source] += part.room
                    used[part.target] += part.room
            assert max(used) <= budget
    for rank, units in enumerate(wants):
        for number, ((_, box, _),) in enumerate(units):
            spot = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
            assert torch.equal(outs[rank, number], truth[spot])


def test_a_rank_copies_its_own_replica_and_sends_none() -> None:
    """Of replicas the rank's own; of others' the one that has least to send."""
    path: Path = ("w",)
    whole = Box((0,), (8,))
    sources = {path: (TensorInfo((8,), "float32"), [(0, whole), (1, whole)])}
    wants = [[[(path, whole, False)]] for _ in range(2)] + [[[(path, whole, False)]] * 2]
    ((_, _, moves),) = batches(wants, sources, 1 << 20)
    ways = [(part.source, part.target) for one in moves for part in one]
    assert sorted(ways) == [(0, 0), (0, 2), (1, 1), (1, 2)]


def test_elements_that_no_rank_holds_are_an_error() -> None:
    path: Path = ("w",)
    sources = {path: (TensorInfo((8,), "float32"), [(0, Box((0,), (5,)))])}
    with pytest.raises(CkptmapError, match=r"no rank holds \[5\]\+\[3\], which rank 0 needs"):
        batches([[[(path, Box((0,), (8,)), False)]]], sources, 1 << 20)


@given(st.data())
def test_around_tiles_the_rest(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    box = Box((1,) * len(sizes), tuple(sizes))
    low = [data.draw(st.integers(0, n - 1)) for n in sizes]
    inner = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(sizes, low, strict=True))
    hole = Box(tuple(1 + a for a in low), inner)
    rest = around(box, hole)
    assert sum(b.numel for b in rest) == math.prod(sizes) - hole.numel
    assert all(b.intersect(hole) is None and b.intersect(box) == b for b in rest)
    assert all(a.intersect(b) is None for i, a in enumerate(rest) for b in rest[:i])


def test_ranks_that_plan_otherwise_are_told() -> None:
    class Odd(RankGroup):
        def all(self, value: Any) -> Any:
            return [value, "another"] if isinstance(value, str) else [value]

    live = open_state_dict({"w": torch.ones(3)}, RankGroup(), "model")
    odd = Exchange(replace(live, peers=Odd()), 1 << 10, torch.device("cpu"))
    with pytest.raises(RunError, match="rank 1 has plan another"):
        odd.run([], LiveReader(live.checkpoint.files, 1 << 10, live.memory))


def test_no_transfers_make_no_rounds() -> None:
    assert list(rounds(iter(()), 64)) == []


def test_memory_says_what_is_not_here() -> None:
    memory = Memory()
    memory.add_own(("w",), Box((0,), (4,)), torch.ones(4))
    with pytest.raises(CkptmapError, match="4 of the 8 elements"):
        memory.copy(("w",), Box((0,), (8,)), torch.zeros(8))
