"""The forms of NF4: records in files, torchao's pickles, shards of ranks, outputs, live tensors."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ckptmap.checkpoint.open import open as open_checkpoint
from ckptmap.errors import LoadError, SourceError
from ckptmap.formats.torch_save.reader import load
from ckptmap.live.quantized.nf4_torchao import from_torchao, live_scaler_block, regroup, to_torchao
from ckptmap.protocols import Group, Refusal, Scheme
from ckptmap.quantization.nf4.encoding import PARTS, default_encoding
from ckptmap.quantization.nf4.scheme import NF4, NF4Scheme
from ckptmap.storage.files import Files
from ckptmap.storage.lazy_tensor import LazyTensor
from ckptmap.storage.process_guards import one_torch_thread
from ckptmap.tensors import Box, Chunk, Cut, Opaque, Region, StoredTensor, TensorInfo
from tests.support.examples import examples
from tests.support.nf4_cases import DTYPES, MODULE, decode, info_of, quantize, slices, weights

SCHEME: Scheme = NF4Scheme()


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """torchao's mean depends on the thread count; ours is that of one thread."""
    with one_torch_thread(True):
        yield


# ------------------------------------------------------------------------------- stored parts


def stored(info: TensorInfo, start: int = 0) -> StoredTensor:
    box = Box.whole(info.shape)
    return StoredTensor(
        info, [Chunk(box, Region.contiguous("/x", start, info.shape, info.itemsize))]
    )


def stored_parts(fqn: str, info: TensorInfo) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    encoding = default_encoding(info)
    parts = encoding.parts(info)
    assert not isinstance(parts, Refusal)
    record = encoding.record(info)
    assert record is not None
    return {f"{fqn}.{name}": stored(part) for name, part in parts.items()}, {fqn: dict(record)}


def test_a_record_makes_a_group_of_its_five_parts() -> None:
    info = TensorInfo((96, 128), "bfloat16")
    tensors, records = stored_parts("a.weight", info)
    tensors["a.bias"] = stored(TensorInfo((96,), "bfloat16"))
    records["other"] = {"scheme": "int8"}
    ((group, keys),) = SCHEME.group(tensors, records)
    assert (group.fqn, group.info, group.encoding) == ("a.weight", info, NF4(64, 64))
    assert set(keys) == set(tensors) - {"a.bias"} and set(group.parts) == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_or_misshapen_part_is_refused(part: str) -> None:
    info = TensorInfo((96, 128), "bfloat16")
    tensors, records = stored_parts("a.weight", info)
    whole = tensors.pop(f"a.weight.{part}")
    with pytest.raises(SourceError, match=f"a.weight: NF4 part '{part}' is missing, expected"):
        SCHEME.group(tensors, records)
    for wrong in (TensorInfo((5,), whole.info.dtype), TensorInfo(whole.info.shape, "int64")):
        tensors[f"a.weight.{part}"] = stored(wrong)
        with pytest.raises(SourceError, match=rf"'{part}', expected .*, found {wrong.dtype}\["):
            SCHEME.group(tensors, records)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"block_size": 0},
        {"block_size": 63},
        {"scaler_block_size": "64"},
        {"shape": [-96, 128]},
        {"shape": 12288},
        {"shape": [True, 12288]},
        {"dtype": None},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    tensors, records = stored_parts("a.weight", TensorInfo((96, 128), "bfloat16"))
    records["a.weight"] |= change
    with pytest.raises(SourceError, match=r"a.weight: .*(NF4|block)") as caught:
        SCHEME.group(tensors, records)
    assert caught.value.code == "CKM115"


def test_five_parts_without_a_record_are_refused_and_fewer_are_plain_tensors() -> None:
    tensors, _ = stored_parts("a.weight", TensorInfo((96, 128), "bfloat16"))
    with pytest.raises(
        SourceError, match=r"a.weight: .* no record.*ckptmap.manifest.json"
    ) as caught:
        SCHEME.group(tensors, {})
    assert caught.value.code == "CKM115"
    del tensors["a.weight.scaler_mean"]
    assert SCHEME.group(tensors, {}) == []


# ------------------------------------------------------------------------------- torchao pickles


def saved(tmp_path: Path, value: Any) -> Any:
    """What is read, without torch, of a file that torch.save wrote."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
    torch.save({"w": value}, path)
    return load(Files(), str(path)).tree["w"]


def changed(leaf: Opaque, **fields: Any) -> Opaque:
    """The same pickled object with another state or outer shape."""
    return Opaque(
        leaf.module, leaf.name, leaf.args, **{"state": leaf.state, "info": leaf.info} | fields
    )


def read(group: Group | None) -> torch.Tensor:
    assert group is not None
    return LazyTensor("w", group, Files()).read()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pickled_nf4tensor_is_adopted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = MODULE.to_nf4(weights((512, 128), dtype), 64, 256)
    group = SCHEME.adopt("w", saved(tmp_path, tensor))
    assert group is not None and group.encoding == NF4(64, 256)
    assert group.info == TensorInfo((512, 128), str(dtype).removeprefix("torch."))
    assert torch.equal(read(group), tensor.get_original_weight())


@pytest.mark.parametrize("waited", [True, False])
def test_a_gathered_one_that_nobody_waited_for_is_said(tmp_path: Path, waited: bool) -> None:
    """Its parts are what torch's collectives return: saved at once, they may not be there yet."""
    tensor = MODULE.to_nf4(weights((512, 128), torch.bfloat16), 64, 256)
    wanted = tensor.get_original_weight()
    for name in ("quantized_scalers", "quantization_factor", "quantized_data"):
        part = AsyncCollectiveTensor(getattr(tensor, name))
        part.completed = waited
        setattr(tensor, name, part)
    torch.save({"w": tensor}, tmp_path / "gathered.pt")
    ckpt = open_checkpoint(tmp_path / "gathered.pt")
    said = [note for note in ckpt.notes if "before torch had waited" in note]
    assert len(said) == (not waited) and all(note.startswith("3 parts of") for note in said)
    assert torch.equal(ckpt["w"].read(), wanted)


def at_old_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let today's class be pickled under the path it had up to torchao 0.17."""
    old: Any = types.ModuleType("torchao.dtypes.nf4tensor")
    old.NF4Tensor = MODULE.NF4Tensor
    monkeypatch.setitem(sys.modules, old.__name__, old)
    monkeypatch.setattr(MODULE.NF4Tensor, "__module__", old.__name__)


def test_the_module_path_of_old_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickle is a real one, but written by today's torchao whose class says that its module
    is the old one; pickles by torchao 0.7 to 0.17 themselves are in `test_int8_torchao`."""
    tensor = MODULE.to_nf4(weights((256, 64), torch.bfloat16))
    at_old_path(monkeypatch)
    leaf = saved(tmp_path, tensor)
    assert leaf.module == "torchao.dtypes.nf4tensor"
    assert torch.equal(read(SCHEME.adopt("w", leaf)), tensor.get_original_weight())
    # 0.1 labelled each tensor with a placeholder.
    leaf = changed(leaf, info=TensorInfo((256, 64), "float8_e5m2fnuz"))
    group = SCHEME.adopt("w", leaf)
    assert group is not None and group.info == TensorInfo((256, 64), "bfloat16")


def test_other_classes_are_not_adopted() -> None:
    assert SCHEME.adopt("w", Opaque("torchao.quantization", "Int8Tensor")) is None
    assert SCHEME.adopt("w", Opaque("mine.nf4tensor", "Other")) is None


def test_a_zombie_is_refused(tmp_path: Path) -> None:
    linear = torch.nn.Linear(64, 256, bias=False)
    linear.weight = torch.nn.Parameter(MODULE.to_nf4(linear.weight.detach()), requires_grad=False)
    linear.half()
    leaf = saved(tmp_path, linear.weight.data)
    with pytest.raises(SourceError, match=r"w: .*labelled float16 holds float32 parts") as caught:
        SCHEME.adopt("w", leaf)
    assert caught.value.code == "CKM115"
    with pytest.raises(LoadError, match=r"labelled torch.float16 holds torch.float32"):
        from_torchao(linear.weight.data)


@pytest.mark.parametrize("gone", ["block_size", "nf4", "quantized_scalers", "scaler_mean"])
def test_a_pickle_that_lacks_an_attribute_is_refused(tmp_path: Path, gone: str) -> None:
    leaf = saved(tmp_path, MODULE.to_nf4(weights((256, 64), torch.bfloat16)))
    state = {key: value for key, value in leaf.state.items() if key != gone}
    with pytest.raises(SourceError, match=r"w: .*(missing|expected block_size)") as caught:
        SCHEME.adopt("w", changed(leaf, state=state))
    assert caught.value.code == "CKM115"


def test_a_pickle_whose_parts_do_not_fit_its_shape_is_refused(tmp_path: Path) -> None:
    leaf = saved(tmp_path, MODULE.to_nf4(weights((256, 64), torch.bfloat16)))
    with pytest.raises(SourceError, match=r"'quantized_data', expected uint8\[16384\], found"):
        SCHEME.adopt("w", changed(leaf, info=TensorInfo((512, 64), "bfloat16")))
    odd = saved(tmp_path, torch.nn.Module())
    with pytest.raises(SourceError, match=r"'scaler_mean', expected .* found torch.nn"):
        SCHEME.adopt("w", changed(leaf, state={**leaf.state, "scaler_mean": odd}))


# ------------------------------------------------------------------------------- shards


def shards(tmp_path: Path, tensor: torch.Tensor, count: int) -> list[tuple[Box, Opaque]]:
    """Each rank's own file, as FSDP2 leaves them: a chunk is a view of the whole's storage."""
    rows, rest = tensor.shape[0] // count, tuple(tensor.shape[1:])
    return [
        (Box((i * rows, *[0] * len(rest)), (rows, *rest)), saved(tmp_path, chunk))
        for i, chunk in enumerate(torch.chunk(tensor, count))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_chunks_are_joined(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    tensor = MODULE.to_nf4(weights((512, 128), dtype))
    pieces = shards(tmp_path, tensor, count)
    assert pieces[0][1].state["n_blocks"] == 1024, "torchao keeps the whole tensor's count"
    group = SCHEME.adopt("w", Cut(info_of(tensor), tuple(reversed(pieces))))
    assert group is not None and group.encoding == NF4(64, 256)
    assert torch.equal(read(group), tensor.get_original_weight())
    box = Box((100, 3), (300, 5))
    found = LazyTensor("w", group, Files()).read(box.offsets, box.sizes)
    assert torch.equal(found, tensor.get_original_weight()[slices(box)])
    assert [len(group.parts[name].chunks) for name in PARTS] == [count, count, count, 1, 1]
    assert [len(group.parts[name].replicas) for name in PARTS] == [0, 0, 0, count - 1, count - 1]


def test_a_box_held_twice_is_a_replica(tmp_path: Path) -> None:
    tensor = MODULE.to_nf4(weights((512, 128), torch.bfloat16))
    pieces = shards(tmp_path, tensor, 2)
    group = SCHEME.adopt("w", Cut(info_of(tensor), (*pieces, *shards(tmp_path, tensor, 2))))
    assert group is not None
    assert [len(group.parts[name].replicas) for name in PARTS] == [2, 2, 2, 3, 3]
    for name in PARTS:
        whole, files = getattr(tensor, name), Files()
        part = group.parts[name]
        for chunk in (*part.chunks, *part.replicas):
            data = files.read(chunk.region.file, chunk.region.offset, chunk.region.nbytes)
            assert data == bytes(whole[slices(chunk.box)].contiguous().view(-1).view(torch.uint8))


def test_shards_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    tensor = MODULE.to_nf4(weights((512, 128), torch.bfloat16))
    info, pieces = info_of(tensor), shards(tmp_path, tensor, 4)
    other = shards(tmp_path, MODULE.to_nf4(weights((512, 128), torch.bfloat16), 64, 128), 4)
    columns = [(Box((0, i * 32), (512, 32)), leaf) for i, (_, leaf) in enumerate(pieces)]
    wrong = changed(pieces[3][1], info=TensorInfo((64, 128), "bfloat16"))
    cases: list[tuple[str, Any]] = [
        ("expected 512 rows, found 384", pieces[:3]),
        ("expected one at row 0", pieces[1:]),
        ("expected one at row 128", [pieces[0], *pieces[2:]]),
        ("quantized differently", [*pieces[:3], other[3]]),
        (r"expected shape \[128, 128\], found \[64, 128\]", [*pieces[:3], (pieces[3][0], wrong)]),
        (r"expected shape \[512, 32\]|expected one at row 0", columns),
        ("only 3 of 4 ranks", [*pieces[:3], (pieces[3][0], Opaque("a", "B"))]),
    ]
    for match, case in cases:
        with pytest.raises(SourceError, match=match) as caught:
            SCHEME.adopt("w", Cut(info, tuple(case)))
        assert caught.value.code == "CKM115" and str(caught.value).startswith("w: ")


# ------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "fqn",
    [
        "weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "layers.3.feed_forward.w1.weight", "transformer.h.0.attn.c_attn.weight",
        "bert.encoder.layer.0.attention.output.dense.weight",
    ],
)  # fmt: skip
def test_linear_weights_are_quantized(fqn: str) -> None:
    assert SCHEME.target(fqn, TensorInfo((128, 64), "bfloat16")) == NF4(64, 128)


@pytest.mark.parametrize(
    "fqn",
    [
        "lm_head.weight", "model.embed_tokens.weight", "tok_embeddings.weight", "output.weight",
        "transformer.wte.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight",
        "block.router.weight", "model.layers.0.q_proj.bias", "gate_up_proj", "score.weight",
        "encoder.LayerNorm.weight", "q_proj.lora_A.default.weight", "shared.weight",
    ],
)  # fmt: skip
def test_embeddings_heads_norms_and_routers_are_left(fqn: str) -> None:
    assert SCHEME.target(fqn, TensorInfo((128, 64), "bfloat16")) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((128,), "bfloat16", None),
        ((2, 64, 64), "bfloat16", r"1 or 2 dims.*\[2, 64, 64\]"),
        ((128, 64), "int8", "found int8"),
        ((128, 64), "float64", "found float64"),
        ((5, 48), "bfloat16", "240 elements are not a multiple of the block 64"),
        ((0, 64), "bfloat16", "0 elements"),
    ],
)
def test_a_tensor_that_nf4_does_not_target_is_encoded_or_refused_where_forced(
    shape: Any, dtype: str, reason: str | None
) -> None:
    info = TensorInfo(shape, dtype)
    assert SCHEME.target("a.weight", info) is None
    forced = SCHEME.encoding(info)
    if reason is None:
        assert forced == NF4(64, 2)
    else:
        assert isinstance(forced, Refusal)
        assert re.search(reason, forced.reason), forced.reason


@pytest.mark.parametrize(
    ("shape", "scaler_block"),
    [
        ((4096, 4096), 256),
        ((151936, 896), 256),
        ((50257, 768), 4),
        ((1001, 64), 1),
        ((192, 96), 32),
    ],
)
def test_the_scaler_block_follows_from_the_shape(shape: tuple[int, int], scaler_block: int) -> None:
    assert SCHEME.encoding(TensorInfo(shape, "bfloat16")) == NF4(64, scaler_block)


# ------------------------------------------------------------------------------- live models


def live_weight(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.get_original_weight()
    return found


def test_to_torchao_and_back() -> None:
    w = weights((512, 128), torch.bfloat16)
    parts, _ = quantize(w)
    info, encoding = info_of(w), default_encoding(info_of(w))
    live = to_torchao(parts, info, encoding)
    assert type(live) is MODULE.NF4Tensor and not live.requires_grad
    reference = MODULE.to_nf4(w)
    assert torch.equal(live_weight(live), live_weight(reference))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(MODULE.linear_nf4(x, live), MODULE.linear_nf4(x, reference))
    found_info, found_encoding, found = from_torchao(live)
    assert (found_info, found_encoding) == (info, encoding)
    assert all(found[name] is parts[name] for name in PARTS)
    with pytest.raises(ValueError, match=r"'quantized_data', expected uint8\[16384\]"):
        to_torchao(parts, TensorInfo((256, 128), "bfloat16"), encoding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_regrouped_scalers_decode_to_the_same_bits(dtype: torch.dtype) -> None:
    w = weights((768, 64), dtype, "heavy")
    info, encoding = info_of(w), NF4(64, 256)
    parts, _ = quantize(w)
    whole = decode(info, encoding, parts, Box.whole(w.shape))
    assert live_scaler_block(info, encoding, 3) == 256
    assert live_scaler_block(info, encoding, 4) == 64
    smaller = regroup(parts, encoding, 64)
    assert torch.equal(decode(info, NF4(64, 64), smaller, Box.whole(w.shape)), whole)
    live = to_torchao(smaller, info, NF4(64, 64))
    assert torch.equal(torch.cat([live_weight(c) for c in live.chunk(4)]), whole)
    with pytest.raises(ValueError, match="scaler block 96 does not divide 256"):
        regroup(parts, encoding, 96)


@pytest.mark.parametrize(
    ("shape", "world_size", "scaler_block"),
    [
        ((4096, 4096), 8, 256), ((14336, 4096), 3, None), ((4864, 896), 8, 64),
        ((151936, 896), 8, 32), ((1001, 64), 7, 1), ((512, 32), 512, None), ((96, 64), 1, 32),
    ],
)  # fmt: skip
def test_the_scaler_block_for_a_world_size(
    shape: tuple[int, int], world_size: int, scaler_block: int | None
) -> None:
    info = TensorInfo(shape, "bfloat16")
    found = live_scaler_block(info, default_encoding(info), world_size)
    assert found == scaler_block
    if found is not None:
        shard = TensorInfo((shape[0] // world_size, shape[1]), "bfloat16")
        assert not isinstance(NF4(64, found).parts(shard), Refusal)


@examples(40)
@given(
    rows=st.integers(1, 24), of_world=st.booleans(), columns=st.sampled_from([16, 48, 64, 96, 320]),
    world_size=st.sampled_from([1, 2, 3, 4, 8]), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_every_even_shard_of_every_shape_is_exact(
    rows: int, of_world: bool, columns: int, world_size: int, dtype: torch.dtype
) -> None:
    """By torchao's own cut of the live tensor; None exactly where a shard ends within a block."""
    w = weights((rows * (world_size if of_world else 1), columns), dtype)
    info = info_of(w)
    encoding = SCHEME.encoding(info)
    if isinstance(encoding, Refusal):
        return
    assert isinstance(encoding, NF4)
    parts, _ = quantize(w, encoding)
    scaler_block = live_scaler_block(info, encoding, world_size)
    even = info.shape[0] % world_size == 0 and info.numel // world_size % 64 == 0
    assert (scaler_block is not None) == even
    if scaler_block is not None:
        live = to_torchao(regroup(parts, encoding, scaler_block), info, NF4(64, scaler_block))
        shards = live.chunk(world_size)
        assert len(shards) == world_size
        whole = decode(info, encoding, parts, Box.whole(w.shape))
        assert torch.equal(torch.cat([live_weight(shard) for shard in shards]), whole)
