"""Meta's checkpoints of several model-parallel ranks become one model, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptmap
from ckptmap.errors import CkptmapError, RunError, SourceError
from ckptmap.formats.meta.params_json import read_params
from ckptmap.protocols.file_systems import Mounts
from tests.golden.mappings.tables import digest, read, rows
from tests.golden.parallel import make_meta
from tests.mapping.test_goldens import facts
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import config_of, state_of
from tests.support.parallel_writers import LLAMA_PARAMS, State, meta_rank, write_meta

BY_COLUMNS = {"llama2": True, "llama3": False}


@pytest.fixture(scope="module")
def llama() -> State:
    return state_of("llama", "meta")


def assert_holds(path: Path, state: State) -> None:
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(state)
        for key, value in state.items():
            assert ckpt[key].read().equal(value), key


# ------------------------------------------------------------------------- as it should be


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_files_are_cut_as_fairscale_cuts(name: str, llama: State) -> None:
    assert make_meta.PARAMS == LLAMA_PARAMS
    for rank in range(2):
        own = rows(meta_rank(llama, rank, 2, BY_COLUMNS[name]))
        assert facts(own) == facts(read(make_meta.ROOT / f"meta-{name}" / f"rank{rank}.tsv"))


@pytest.mark.parametrize("name", BY_COLUMNS)
@pytest.mark.parametrize("params", [LLAMA_PARAMS, {**LLAMA_PARAMS, "vocab_size": -1}, None])
def test_ranks_are_joined(name: str, params: Any, llama: State, tmp_path: Path) -> None:
    frequencies = {"rope.freqs": torch.rand(5)}  # Llama 1 and 2 have them on every rank
    state = {**llama, **frequencies} if name == "llama2" else llama
    write_meta(tmp_path / "in", state, 2, params, BY_COLUMNS[name])
    assert_holds(tmp_path / "in", state)
    with ckptmap.open(tmp_path / "in") as ckpt:
        assert ckpt.world_size == 2


def test_as_many_ranks_as_published(tmp_path: Path) -> None:
    """8 ranks, as of 65B and 70B."""
    params, state = sized(heads=16, kv_heads=8)
    write_meta(tmp_path / "in", state, 8, params)
    assert_holds(tmp_path / "in", state)


def test_one_file_needs_no_rule(tmp_path: Path) -> None:
    """A single file may hold anything: Mixtral's experts, for one."""
    state = state_of("mixtral", "meta")
    write_meta(tmp_path / "in", state, 1)
    assert_holds(tmp_path / "in", state)


@pytest.mark.parametrize("to", ["full-nf4", "full-bnb-nf4", "full-int8"])
def test_one_quantized_file_is_no_rank(to: str, tmp_path: Path) -> None:
    """Its matrices have other columns, and its records lie in the zip."""
    _, state = sized(heads=64, kv_heads=64)
    torch.save(state, tmp_path / "model.pt")
    out = tmp_path / "meta" / "consolidated.00.pth"
    out.parent.mkdir()
    ckptmap.convert(tmp_path / "model.pt", out, to=to)
    for path in (out, out.parent):
        with ckptmap.open(path) as ckpt:
            assert set(ckpt) == set(state)
            assert len(ckpt.encodings) == 2


def sized(heads: int, kv_heads: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """params.json and weights of one layer; each number is another one."""
    params = {
        "dim": heads * 6, "n_layers": 1, "n_heads": heads, "n_kv_heads": kv_heads,
        "vocab_size": heads * 13, "multiple_of": 16, "norm_eps": 1e-5,
    }  # fmt: skip
    dim, hidden = heads * 6, -(-(8 * heads * 6 // 3) // 16) * 16
    shapes = {
        "tok_embeddings.weight": (heads * 13, dim),
        "layers.0.attention.wq.weight": (dim, dim),
        "layers.0.attention.wk.weight": (kv_heads * 6, dim),
        "layers.0.attention.wv.weight": (kv_heads * 6, dim),
        "layers.0.attention.wo.weight": (dim, dim),
        "layers.0.feed_forward.w1.weight": (hidden, dim),
        "layers.0.feed_forward.w2.weight": (dim, hidden),
        "layers.0.feed_forward.w3.weight": (hidden, dim),
        "layers.0.attention_norm.weight": (dim,),
        "layers.0.ffn_norm.weight": (dim,),
        "norm.weight": (dim,),
        "output.weight": (heads * 13, dim),
    }
    return params, {key: torch.rand(shape) for key, shape in shapes.items()}


@pytest.fixture
def repeated(tmp_path: Path) -> tuple[Path, State]:
    """4 ranks and 2 key/value heads: two neighbours hold the same one, as 405B on 16 ranks."""
    params, state = sized(heads=8, kv_heads=2)
    spread = {
        key: value.reshape(2, 6, -1).repeat_interleave(2, 0).flatten(0, 1)
        if key.endswith(("wk.weight", "wv.weight"))
        else value
        for key, value in state.items()
    }
    return write_meta(tmp_path / "in", spread, 4, params), state


def test_repeated_heads_are_kept_once(repeated: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = repeated
    assert_holds(folder, state)
    ckptmap.convert(folder, tmp_path / "out.pt", to="full")
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {key: digest(value) for key, value in out.items()} == {
        key: digest(value) for key, value in state.items()
    }


def test_repeated_heads_that_differ_are_refused(
    repeated: tuple[Path, State], tmp_path: Path
) -> None:
    change(repeated[0], 3, lambda state: state["layers.0.attention.wk.weight"].add_(1))
    with pytest.raises(RunError, match=r"layers\.0\.attention\.wk\.weight: the replica") as caught:
        ckptmap.convert(repeated[0], tmp_path / "out.pt", to="full")
    assert caught.value.code == "CKM310"
    assert not (tmp_path / "out.pt").exists()


# ------------------------------------------------------------------------- where it goes to


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_the_model_in_transformers_is_the_same(name: str, tmp_path: Path) -> None:
    """HF -> Meta's files on 2 ranks -> HF: equal logits; sizes come from params.json alone."""
    from transformers import AutoModelForCausalLM

    source = TINY["llama"].build()
    source.save_pretrained(tmp_path / "hf")
    ckptmap.convert(tmp_path / "hf", tmp_path / "whole.pt", to="full", names="meta")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    write_meta(tmp_path / "meta", whole, 2, LLAMA_PARAMS, BY_COLUMNS[name])
    ckptmap.convert(tmp_path / "meta", tmp_path / "plain", to="hf", names="hf")
    config = str(tmp_path / "hf" / "config.json")
    ckptmap.convert(tmp_path / "meta", tmp_path / "back", to="hf", names="hf", config_from=config)
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert model(tokens).logits.equal(source(tokens).logits)


def test_to_torchtune_and_to_shards(llama: State, tmp_path: Path) -> None:
    write_meta(tmp_path / "in", llama, 2, LLAMA_PARAMS, by_columns=True)
    ckptmap.convert(tmp_path / "in", tmp_path / "tune.pt", to="full", names="torchtune")
    tune = torch.load(tmp_path / "tune.pt", weights_only=True)
    assert facts(rows(tune)) == facts(rows(state_of("llama", "torchtune")))
    ckptmap.convert(tmp_path / "in", tmp_path / "dcp", to="fsdp2", world_size=3)
    assert_holds(tmp_path / "dcp", llama)


def test_a_rank_is_read_only_where_it_is_needed(llama: State, tmp_path: Path) -> None:
    folder = write_meta(tmp_path / "in", llama, 2, LLAMA_PARAMS)
    with ckptmap.open(folder) as ckpt:
        wq, wo = (ckpt[f"layers.1.attention.{name}.weight"] for name in ("wq", "wo"))
        assert wq.read().shape == wo.read().shape
    with ckptmap.open(folder) as ckpt:
        wq, wo = (ckpt[f"layers.1.attention.{name}.weight"] for name in ("wq", "wo"))
        assert len(wq.group.parts[""].chunks) == 2  # places are found before the file goes
        (folder / "consolidated.01.pth").write_bytes(b"")
        key = "layers.1.attention.wq.weight"
        assert wq[7:60].equal(llama[key][7:60])
        with pytest.raises((RunError, SourceError), match=r"consolidated\.01\.pth"):
            wq.read()


def test_sizes_of_params_are_those_of_the_config(tmp_path: Path) -> None:
    """What names are translated by, where there is no config.json."""
    write_meta(tmp_path, {}, 0, LLAMA_PARAMS)
    params, config = read_params(tmp_path / "params.json", Mounts()), config_of("llama")
    assert params is not None
    own = {key: value for key, value in params.config.items() if key != "rope_theta"}
    assert own == {key: config[key] for key in own}
    assert {"head_dim", "num_key_value_heads", "intermediate_size"} <= own.keys()
    (tmp_path / "params.json").write_text(json.dumps(config))
    assert read_params(tmp_path / "params.json", Mounts()) is None


# ------------------------------------------------------------------------- as it should not be


def change(folder: Path, rank: int, how: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / f"consolidated.{rank:02d}.pth"
    state = torch.load(file, weights_only=True)
    how(state)
    torch.save(state, file)


def params_of(folder: Path, **values: Any) -> None:
    found = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**found, **values}))


def on_both(how: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        for rank in (0, 1):
            change(folder, rank, how)

    return make


def lose(*names: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return make


def _one_more(folder: Path) -> None:
    (folder / "consolidated.02.pth").write_bytes((folder / "consolidated.01.pth").read_bytes())


def _cut(folder: Path) -> None:
    file = folder / "consolidated.01.pth"
    file.write_bytes(file.read_bytes()[:-3000])


NORM, WQ, WO = "norm.weight", "layers.0.attention.wq.weight", "layers.0.attention.wo.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "first rank lost": (
        lose("consolidated.00.pth"), "CKM110", r"rank 0 of 2 is missing \(consolidated\.00\.pth\)",
    ),
    "last rank lost": (
        lose("consolidated.01.pth"),
        "CKM110", r"rank 1 of 2 is missing.*wo\.weight has 60 of 120 columns",
    ),
    "last rank and params lost": (
        lose("consolidated.01.pth", "params.json"), "CKM110", r"rank 1 of 2 is missing",
    ),
    "a number without end": (
        lambda d: (d / "consolidated.01.pth").rename(d / "consolidated.999999999999.pth"),
        "CKM110", r"rank 1 of 1000000000000 is missing",
    ),
    "a rank too many": (_one_more, "CKM110", r"expected 2 files, found 3"),
    "a rank twice": (
        lambda d: (d / "consolidated.1.pth").write_bytes((d / "consolidated.01.pth").read_bytes()),
        "CKM110", r"consolidated\.0?1\.pth and consolidated\.0?1\.pth are of the same rank, expected one",
    ),
    "a rank of other sizes": (
        lambda d: change(d, 1, lambda s: s.update({WQ: torch.zeros(30, 120)})),
        "CKM113", r"wq\.weight: rank 0 holds float32\[60, 120\], rank 1 float32\[30, 120\]",
    ),
    "a rank of another dtype": (
        lambda d: change(d, 1, lambda s: s.update({WQ: s[WQ].half()})),
        "CKM113", r"rank 0 holds float32\[60, 120\], rank 1 float16",
    ),
    "a rank without a tensor": (
        lambda d: change(d, 1, lambda s: s.pop(WO)),
        "CKM110", r"wo\.weight: is in 1 of 2 files, not in consolidated\.01\.pth",
    ),
    "norms that differ": (
        lambda d: change(d, 1, lambda s: s[NORM].add_(1)), "CKM310", r"norm\.weight: the replica",
    ),
    "another model's params": (
        lambda d: params_of(d, vocab_size=103), "CKM112", r"expected \[103, 120\] by params\.json, found \[102, 120\]",
    ),
    "another ffn": (
        lambda d: params_of(d, multiple_of=64), "CKM112", r"w[123]\.weight.*expected .*64.*, found .*56",
    ),
    "params cut off": (
        lambda d: (d / "params.json").write_text('{"dim": 120,'), "CKM103", r"cannot be read as JSON: line",
    ),
    "params without sense": (
        lambda d: params_of(d, n_heads="12"), "CKM103", r"n_heads, expected a positive integer",
    ),
    "experts": (
        on_both(lambda s: s.update({"layers.0.feed_forward.experts.moe_w_in_eD_F": s[WQ]})),
        "CKM118", r"moe_w_in_eD_F: .*how Meta cuts mixtures of experts",
    ),
    "another model": (
        on_both(lambda s: s.update({"vision.conv1.weight": s[WQ]})),
        "CKM118", r"vision\.conv1\.weight",
    ),
    "fp8": (
        lambda d: torch.save({}, d / "fp8_scales_0.pt"), "CKM111", r"FP8.*fp8_scales_0\.pt",
    ),
    "an embedding of neither form": (
        on_both(lambda s: s.update({"tok_embeddings.weight": torch.zeros(102, 40)})),
        "CKM112", r"tok_embeddings\.weight: expected 120 columns.*, found float32\[102, 40\] on each of 2 ranks",
    ),
    "truncated": (_cut, "CKM104", r"consolidated\.01\.pth"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_set_is_refused(fault: str, llama: State, tmp_path: Path) -> None:
    make, code, message = FAULTS[fault]
    folder = write_meta(tmp_path / "in", llama, 2, LLAMA_PARAMS)
    make(folder)
    with pytest.raises(CkptmapError, match=message) as caught:
        ckptmap.convert(folder, tmp_path / "out.pt", to="full")
    assert caught.value.code == code
    assert not (tmp_path / "out.pt").exists()


def test_one_file_of_many_is_refused(llama: State, tmp_path: Path) -> None:
    """A model of 2 ranks is no model by its first file alone, however it is pointed at."""
    folder = write_meta(tmp_path / "in", llama, 2, LLAMA_PARAMS)
    with pytest.raises(
        SourceError, match="holds a part of the model, as the file of one rank of 2"
    ):
        ckptmap.open(folder / "consolidated.00.pth")
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(SourceError, match=r"rank 1 of 2 is missing"):
        ckptmap.open(folder / "consolidated.00.pth")
