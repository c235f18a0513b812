"""FSDP1's rank files: ShardedTensors and flat parameters are joined to the tensors that were saved."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptmap
from ckptmap.core.tiling import prove_tiling
from ckptmap.errors import SourceError
from ckptmap.sharding.flat_range_boxes import rectangles
from ckptmap.sharding.reference_model import is_alphabetical
from tests.corpus import Case, names
from tests.corpus.case import CASES
from tests.corpus.models import tiny_llama
from tests.corpus.ranks import run_ranks
from tests.corpus.writers_fsdp1_local import LOCAL
from tests.support.same_tensors import assert_same, expected_keys

SHARDED = [name for name in names(container="ranks") if name.startswith("fsdp1")]
FLAT = sorted(LOCAL)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """LOCAL cases by name; a world size is built when first asked for."""
    folder = tmp_path_factory.mktemp("local")

    def get(name: str) -> Case:
        spec = LOCAL[name]
        out = folder / f"world{spec.world_size}"
        if not out.exists():
            run_ranks("tests.corpus.build_local", spec.world_size, ["--out", str(out)], 120.0)
        return Case(spec, out)

    return get


def like(case: Case, path: Path) -> Path:
    """Another checkpoint of the model: the same names and shapes, other values."""
    state = {key: torch.zeros_like(value) for key, value in case.truth.items()}
    for group in case.spec.tied:
        state.update({name: state[group[0]] for name in group})
    torch.save(state, path)
    return path


def assert_is(ckpt: ckptmap.Checkpoint, case: Case) -> None:
    assert set(ckpt) == set(case.truth)
    for fqn, value in case.truth.items():
        assert_same(ckpt[fqn].read(), value, fqn)
        if value.ndim == 2:
            assert_same(ckpt[fqn][1:, 2:7], value[1:, 2:7], fqn)


def check_there_and_back(ckpt: ckptmap.Checkpoint, case: Case, tmp: Path) -> None:
    """Through the plan and its coverage proof, to hf and on to DCP, every bit."""
    ckptmap.convert(ckpt, tmp / "hf", to="hf", optimizer="drop")
    ckptmap.convert(tmp / "hf", tmp / "dcp", to="fsdp2", world_size=3)
    must, _ = expected_keys(case)
    with ckptmap.open(tmp / "dcp") as back:
        assert must <= set(back)
        for fqn in back:
            assert_same(back[fqn].read(), case.truth[fqn], fqn)


# --------------------------------------------------------------------- ShardedTensor


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_joined(name: str, corpus: Any, tmp_path: Path) -> None:
    case = corpus[name]
    with ckptmap.open(case.path) as ckpt:
        assert ckpt.world_size == case.world_size and not ckpt.refused
        assert_is(ckpt, case)
        for fqn, states in case.optimizer.items():
            for state, value in states.items():
                assert_same(ckpt.optimizer[fqn][state].read(), value, f"{fqn} {state}")
        check_there_and_back(ckpt, case, tmp_path)


def spoil(file: Path, offset: int, nbytes: int) -> None:
    """Change a record and its checksum, as a writer that saved other values would have."""
    data = file.read_bytes()
    record = data[offset : offset + nbytes]
    other = bytes([record[0] ^ 255]) + record[1:]
    old, new = (zlib.crc32(raw).to_bytes(4, "little") for raw in (record, other))
    assert data.count(old) == 2  # its data descriptor and its directory entry
    file.write_bytes((data[:offset] + other + data[offset + nbytes :]).replace(old, new))


def test_replicas_of_hybrid_shards_are_compared(corpus: Any, tmp_path: Path) -> None:
    case = corpus["fsdp1_ranks_hybrid_w4"]
    path = Path(shutil.copytree(case.path, tmp_path / "ranks"))
    with ckptmap.open(path) as ckpt:
        part = ckpt["embed.weight"].parts[""]
        assert sum(chunk.box.numel for chunk in part.replicas) == part.info.numel
        [at] = [chunk.region for chunk in part.replicas if chunk.box.offsets[0] == 0]
    spoil(Path(at.file), at.offset, at.nbytes)
    with pytest.raises(ckptmap.CkptmapError, match=r"embed\.weight") as caught:
        ckptmap.convert(path, tmp_path / "out", to="hf")
    assert caught.value.code in ("CKM105", "CKM310")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------- broken sets


@pytest.fixture
def four(corpus: Any, tmp_path: Path) -> Path:
    """A copy of the ShardedTensor files of 4 ranks under names that say no world size."""
    (tmp_path / "four").mkdir()
    for rank in range(4):
        source = corpus["fsdp1_ranks_w4"].path / f"model_world_size_4_rank_{rank}.pt"
        shutil.copy(source, tmp_path / "four" / f"shard-rank{rank}.pt")
    return tmp_path / "four"


def refused(path: Path, match: str, code: str = "CKM110", **options: Any) -> None:
    with pytest.raises(SourceError, match=match) as caught:
        ckptmap.open(path, **options)
    assert caught.value.code == code and "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_rank_is_named(four: Path, rank: int) -> None:
    (four / f"shard-rank{rank}.pt").unlink()
    refused(four, rf"rank {rank} of 4 is missing \(shard-rank{rank}\.pt\)")


def test_a_rank_of_another_world_size_is_refused(four: Path, corpus: Any) -> None:
    other = corpus["fsdp1_ranks_w2"].path / "model_world_size_2_rank_1.pt"
    shutil.copy(other, four / "shard-rank1.pt")
    refused(four, r"shard-rank1\.pt: was saved by 2 ranks, but the file of rank 0 by 4")


def test_a_rank_of_another_model_is_refused(four: Path, corpus: Any, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for rank, name in enumerate(("fsdp1_ranks_w2", "fsdp1_ranks_flat_bf16_w2")):
        source = corpus[name].path / f"model_world_size_2_rank_{rank}.pt"
        shutil.copy(source, tmp_path / "two")
    refused(tmp_path / "two", "bfloat16.*by 2 ranks, but rank 0 as .*float32")


def test_a_file_under_another_ranks_name_is_refused(four: Path) -> None:
    shutil.copy(four / "shard-rank0.pt", four / "shard-rank1.pt")
    refused(four, r"shard-rank1\.pt: was written by rank 0, its name says rank 1")


def test_one_file_alone_is_refused(four: Path) -> None:
    refused(four / "shard-rank1.pt", "is cut over 4 ranks, found the parts of 1; 3 rank files")


# --------------------------------------------------------------------- flat parameters


@pytest.mark.parametrize("name", FLAT)
def test_flat_parameters_are_unflattened(
    name: str, flat: Callable[[str], Case], tmp_path: Path
) -> None:
    case = flat(name)
    with ckptmap.open(case.path, like=like(case, tmp_path / "like.pt")) as ckpt:
        assert ckpt.world_size == case.world_size and not ckpt.refused
        assert_is(ckpt, case)
        assert bool(ckpt.wrappers) == bool(case.spec.wrappers)
        check_there_and_back(ckpt, case, tmp_path)


def test_plans_take_like_and_outputs_verify(flat: Callable[[str], Case], tmp_path: Path) -> None:
    """By path and option, as the command line does; cast on the way, cut over other ranks."""
    case = flat("local_flat_w2")
    known = like(case, tmp_path / "like.pt")
    report = ckptmap.convert(
        case.path, tmp_path / "out", to="fsdp2-bf16", world_size=3, like=str(known)
    )
    assert report.fidelity["cast"] > 30
    with ckptmap.open(case.path, like=known) as source:
        verified = ckptmap.verify(tmp_path / "out", against=source)
    assert verified.ok, str(verified)
    known_as = ["--like", str(known)]
    assert main(["verify", str(tmp_path / "out"), "--against", str(case.path), *known_as]) == 0
    assert main(["inspect", str(case.path), *known_as]) == 0
    assert main(["diff", str(case.path), str(known), *known_as]) == 0


@pytest.mark.parametrize("name", ["local_named_w2", "local_flat_w2"])
def test_without_shapes_the_next_step_is_said(name: str, flat: Callable[[str], Case]) -> None:
    refused(flat(name).path, "carry no shapes; give --like PATH", "CKM112")


@pytest.mark.parametrize("name", ["local_named_tied_w2", "local_flat_tied_w2"])
def test_ties_are_kept(name: str, flat: Callable[[str], Case], tmp_path: Path) -> None:
    case = flat(name)
    [tied] = case.spec.tied
    path = like(case, tmp_path / "like.pt")
    with ckptmap.open(case.path, like=path) as ckpt:
        ckptmap.convert(ckpt, tmp_path / "out.pt", to="full")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len({loaded[fqn].data_ptr() for fqn in tied}) == 1


def test_ties_that_the_other_checkpoint_stores_twice(
    flat: Callable[[str], Case], corpus: Any, tmp_path: Path
) -> None:
    """A DCP directory does not say that two tensors are one; equal values do."""
    case = flat("local_flat_tied_w2")
    with ckptmap.open(case.path, like=corpus["fsdp1_dcp_tied_w2"].path) as ckpt:
        assert_is(ckpt, case)
    untied = corpus["fsdp1_dcp_w2"].path
    refused(case.path, "_flat_param holds .* elements, the tensors of", "CKM112", like=untied)


def test_the_order_of_the_alphabet_is_no_order_of_modules(
    flat: Callable[[str], Case], tmp_path: Path
) -> None:
    """Sorted names would fill the same numel with the wrong values. Named slices need no order."""
    case = flat("local_flat_w2")
    save_file({key: value.clone() for key, value in case.truth.items()}, tmp_path / "m.safetensors")
    refused(
        case.path, "lists them in an order that may be another; .*config.json", "CKM112",
        like=tmp_path / "m.safetensors",
    )  # fmt: skip
    ckptmap.convert(tmp_path / "m.safetensors", tmp_path / "m.pt", to="full")
    refused(case.path, "in an order that may be another", "CKM112", like=tmp_path / "m.pt")
    named = flat("local_named_w2")
    with ckptmap.open(named.path, like=tmp_path / "m.safetensors") as ckpt:
        assert_is(ckpt, named)
    assert not is_alphabetical(list(case.truth), ["x"] * len(case.truth))


def test_an_order_of_files_or_of_ranks_is_none_of_modules(
    flat: Callable[[str], Case], tmp_path: Path
) -> None:
    """Neither is sorted: shards each are, and DCP gives replicated tensors to ranks by size."""
    from huggingface_hub import save_torch_state_dict

    case = flat("local_flat_w2")
    state = {key: value.clone() for key, value in case.truth.items()}
    (tmp_path / "hf").mkdir()
    save_torch_state_dict(state, tmp_path / "hf", max_shard_size="100KB")
    for path in (tmp_path / "hf", case.path.parent / "replicas"):
        with ckptmap.open(path) as ckpt:
            dtypes = [ckpt[fqn].info.dtype for fqn in ckpt]
            assert set(ckpt) == set(case.truth) and not is_alphabetical(list(ckpt), dtypes)
        refused(case.path, "lists them in an order that may be another", "CKM112", like=path)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "tokenizer.json").write_text("{}")
    config = {"architectures": ["NoSuchModel"], "model_type": "llama"}
    for folder in ("hf", "only"):
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    refused(case.path, "order that may be another", "CKM112", like=tmp_path / "hf")
    refused(case.path, "NoSuchModel", "CKM101", like=tmp_path / "only")


def test_another_model_does_not_fit(
    flat: Callable[[str], Case], corpus: Any, tmp_path: Path
) -> None:
    other = dict(CASES["fsdp2_dcp_shard1_w2"].truth())  # type: ignore[misc]
    torch.save(other, tmp_path / "like.pt")
    options = {"like": tmp_path / "like.pt"}
    refused(flat("local_flat_w2").path, "_flat_param holds", "CKM112", **options)
    refused(flat("local_named_w2").path, "the ranks hold 48048 elements", "CKM112", **options)
    smaller = like(flat("local_flat_w2"), tmp_path / "less.pt")
    state = torch.load(smaller)
    state["layers.9.extra"] = torch.zeros(3)
    del state["layers.1.mlp.up_proj.weight"]
    torch.save(state, smaller)
    refused(flat("local_named_w2").path, "does not have it", "CKM112", like=smaller)


def test_flat_ranks_of_one_save_only(flat: Callable[[str], Case], tmp_path: Path) -> None:
    case = flat("local_flat_w2")
    path = Path(shutil.copytree(case.path, tmp_path / "ranks"))
    known = like(case, tmp_path / "like.pt")
    (path / "model_world_size_2_rank_0.pt").unlink()
    refused(path, "rank 0 of 2 is missing", like=known)
    shutil.copy(flat("local_flat_tied_w2").path / "model_world_size_2_rank_0.pt", path)
    refused(path, "the ranks' flat parameters differ in size", like=known)


@pytest.mark.parametrize("name", ["llama-orig", "llama-flat"])
def test_config_json_unflattens_what_fsdp1_saved(
    flat: Callable[[str], Case], tmp_path: Path, name: str
) -> None:
    """Shapes, order and ties of real shards from the config alone, on its own or beside them."""
    path = tmp_path / name
    shutil.copytree(flat("local_flat_w2").path.parent / name, path)
    with pytest.raises(SourceError, match="no shapes") as caught:
        set(ckptmap.open(path))
    assert "--like" in str(caught.value) + str(caught.value.hint)
    model = tiny_llama(tied=True)
    model.config.architectures = [type(model).__name__]  # as save_pretrained sets it
    model.config.save_pretrained(tmp_path / "base")
    truth = model.state_dict()
    with ckptmap.open(path, like=str(tmp_path / "base" / "config.json")) as found:
        for fqn, value in found.items():
            assert_same(value.read(), truth[fqn], fqn)
        assert {*found, *found.ties} == set(truth)


def test_config_json_gives_shapes_order_and_ties(tmp_path: Path) -> None:
    """The config names them as the model itself does; a class that transformers has not is refused."""
    transformers = pytest.importorskip("transformers")
    from ckptmap.protocols.file_systems import Mounts
    from ckptmap.sharding.reference_model import like_config

    for tied in (False, True):
        model = tiny_llama(tied=tied)
        model.config.architectures = [type(model).__name__]  # as save_pretrained sets it
        model.config.save_pretrained(tmp_path)
        found = like_config(tmp_path / "config.json", Mounts())
        state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert list(found.shapes.items()) == list(state.items())
        expected = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        assert dict(found.ties) == expected
    document = json.loads((tmp_path / "config.json").read_text())
    document["architectures"] = ["os.system"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(
        SourceError,
        match=r"architecture 'os\.system', which the installed transformers does not have",
    ):
        like_config(tmp_path / "config.json", Mounts())
    unfit = json.dumps(document | {"architectures": [type(model).__name__], "hidden_size": -8})
    for text, problem in (('{"a": 1,', "cannot be read as JSON: line 1"), (unfit, r"\w+Error: .+")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SourceError, match=rf"config\.json: {problem}") as refused:
            like_config(tmp_path / "config.json", Mounts())
        assert refused.value.code == "CKM101"
    assert transformers is not None


# --------------------------------------------------------------------- rectangles


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.data())
def test_rectangles_are_the_slice(shape: tuple[int, ...], data: st.DataObject) -> None:
    """In order, contiguous in the flat tensor, each element of the slice once, and few of them."""
    numel = int(torch.tensor(shape).prod()) if shape else 1
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).reshape(shape)
    held: list[int] = []
    found = list(rectangles(shape, start, stop))
    for box, at in found:
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            assert offset >= 0 and offset + size <= shape[dim]
            part = part.narrow(dim, offset, size)
        values = part.reshape(-1).tolist()
        assert values == list(range(at, at + box.numel))
        held += values
    assert held == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    rest = [box for box, _ in (*rectangles(shape, 0, start), *rectangles(shape, stop, numel))]
    assert prove_tiling(shape, [box for box, _ in found] + rest) is None
