"""Every shipped mapping file gives what the peers' own code makes of the same numbers.

The goldens stand in `tests/golden/mappings`; who made each of them, its first line says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmap.errors import PlanError
from ckptmap.mapping.catalog import _shipped, available
from ckptmap.mapping.detect import choose, recognise
from ckptmap.mapping.dims_table import Dims
from ckptmap.mapping.expected_keys import expected_tensors
from ckptmap.mapping.name_patterns import NamePattern, skeleton, tail
from ckptmap.mapping.rules import HUB, NamingScheme
from tests.golden.mappings.tables import ROOT, Row, rows
from tests.support.mapping_configs import TINY
from tests.support.mapping_state import (
    State,
    config_of,
    entry_of,
    golden,
    hub_state,
    infos,
    state_of,
    translated,
)

TABLES = [(path.parent.name, path.stem) for path in sorted(ROOT.glob("*/*.tsv"))]
CASES = [(model, scheme) for model, scheme in TABLES if scheme != HUB]
SCHEMES = {model: [scheme for n, scheme in TABLES if n == model] for model, _ in TABLES}
"""Model -> its schemes, the Hub's among them."""
PAIRS = [(m, a, b) for m, a in CASES for n, b in CASES if m == n and a != b]
MTP_COPIES = {
    "model.layers.3.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight",
}
"""What the next-token layer of DeepSeek-V3 repeats; schemes that share it leave it out."""


def facts(table: dict[str, Row]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {key: (row.dtype, row.shape, row.hash) for key, row in table.items()}


def assert_hub(back: State, model: str, *, without: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """`back` is the model's hub state; a tied output matrix may stand beside its embedding."""
    expected = hub_state(model)
    assert {key for key in expected if key not in back} == without
    assert [key for key in back if key in expected and not back[key].equal(expected[key])] == []
    for key in back.keys() - expected.keys():
        assert key.endswith("lm_head.weight") and config_of(model)["tie_word_embeddings"]
        assert any(back[key].equal(tensor) for tensor in expected.values())


def dropped(model: str, scheme: str) -> set[str]:
    shares = model == "deepseek_v3_mtp" and scheme != HUB
    return MTP_COPIES if shares else set()


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("model", dict.fromkeys(model for model, _ in CASES))
def test_forward_equals_what_the_peer_makes_and_reverse_gives_the_hub_back(model: str) -> None:
    for scheme in SCHEMES[model]:
        if scheme != HUB:
            assert facts(rows(state_of(model, scheme))) == facts(golden(model, scheme)), scheme
            source = entry_of(model, scheme).load()
            back = translated(state_of(model, scheme), config_of(model), source, None)
            assert_hub(back, model, without=dropped(model, scheme))


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_composition_equals_what_the_other_peer_makes(model: str, source: str, target: str) -> None:
    schemes = entry_of(model, source).load(), entry_of(model, target).load()
    made = translated(state_of(model, source), config_of(model), *schemes)
    assert facts(rows(made)) == facts(golden(model, target))


def test_every_shipped_file_has_a_golden() -> None:
    covered = {entry_of(model, scheme).title for model, scheme in TABLES}
    shipped = {entry.title for entry in available() if entry.path.startswith(str(_shipped()))}
    assert shipped == covered


def test_the_table_of_families_in_the_readme() -> None:
    lines = (Path(_shipped()) / "README.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    cells = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}
    for entry in available():
        row = cells[entry.family]
        assert set(entry.models) <= set(row["config.json's model_type"].replace(",", "").split())
        if entry.name == "torchtitan-fused":
            assert "fused" in row["torchtitan"]
        elif entry.name != HUB:
            assert (entry.era or "x") in row[entry.name]
    count = {
        family: sum(len(row[s].replace("= hf", "").replace(", fused", "").split()) for s in row)
        for family, row in cells.items()
        for row in [{s: cell for s, cell in row.items() if s in table[0][2:]}]
    }
    shipped = [e.family for e in available() if e.name not in (HUB, "torchtitan-fused")]
    assert count == {family: shipped.count(family) for family in cells}


# --------------------------------------------------------------------------- names and axes


def axes_in(scheme: NamingScheme, key: str, model: str) -> set[str]:
    """The patterns that the rules for a key give it."""
    dims = Dims(scheme.dims, config_of(model))
    return {
        term.axes.text
        for rule in scheme.rules
        if dims.holds(rule.when) is not False
        for term in rule.side(scheme.is_hub)
        for name in term.names
        if term.axes is not None and is_of(name, key)
    }


def is_of(name: NamePattern, key: str) -> bool:
    shape, numbers = skeleton(key)
    end = tail(shape) if name.skeleton != shape else None
    if end is not None:
        shape, numbers = end[0], (*numbers, end[1])
    return name.skeleton == shape and all(
        not isinstance(hole, int) or hole == number
        for hole, number in zip(name.holes, numbers, strict=True)
    )


@pytest.mark.parametrize("model", SCHEMES)
def test_axes_are_those_of_the_table(model: str) -> None:
    """The shape says which axes there are, this column in which order they are meant."""
    for scheme in SCHEMES[model]:
        loaded = entry_of(model, scheme).load()
        for key, row in golden(model, scheme).items():
            assert axes_in(loaded, key, model) == {row.axes}, (scheme, key)


@pytest.mark.parametrize("model", SCHEMES)
def test_rules_and_config_say_which_keys_there_are(model: str) -> None:
    """Not one more, and not one less, than transformers writes."""
    known = {key: row.shape for key, row in golden(model, HUB).items()}
    for scheme in SCHEMES[model]:
        asked = expected_tensors(entry_of(model, scheme).load(), config_of(model), hub=True)
        assert {key: info.shape for key, info in asked.items()} == {
            key: shape for key, shape in known.items() if key not in dropped(model, scheme)
        }, scheme


@pytest.mark.parametrize("model", TINY)
def test_hub_file_knows_every_key(model: str) -> None:
    hub = entry_of(model, HUB).load()
    made = translated(hub_state(model), config_of(model), hub, None)
    assert_hub(made, model)


@pytest.mark.parametrize("model", TINY)
def test_hub_file_finds_a_key_that_is_missing(model: str) -> None:
    hub = entry_of(model, HUB).load()
    state = dict(hub_state(model))
    lost = next(key for key in state if "norm" in key or "ln_" in key)
    del state[lost]
    with pytest.raises(PlanError, match=f"{lost} is missing") as caught:
        translated(state, config_of(model), hub, None)
    assert caught.value.code == "CKM607"


# --------------------------------------------------------------------------- fingerprints

UNSEEN: dict[tuple[str, str], str | None] = {
    # The same names and the same rows as Meta's: nothing to tell apart, and nothing to lose.
    ("llama", "torchtitan@2025-07"): "meta",
    # What transformers 5 reads from disk, too.
    ("gemma3", "hf-memory@4.50"): HUB,
    # Biases on all four projections: no fingerprint of its own, to be named with --names-from.
    ("llama_bias", HUB): None,
}


@pytest.mark.parametrize("model", SCHEMES)
def test_fingerprints_tell_schemes_and_eras_apart(model: str) -> None:
    """Of all shipped files, those of one scheme and era alone recognise the keys."""
    for scheme in SCHEMES[model]:
        keys = list(golden(model, scheme))
        expected = UNSEEN.get((model, scheme), scheme)
        labels = {entry.title.partition("/")[2] for entry in recognise(keys)}
        # transformers' GPT-2 in memory has the very names of nanoGPT: told apart by shapes, below.
        also = {HUB} if scheme == "nanogpt" else set()
        assert labels == ({expected} if expected else set()) | also, scheme


@pytest.mark.parametrize("model", SCHEMES)
def test_with_a_config_the_fingerprint_is_of_one_file(model: str) -> None:
    for scheme in SCHEMES[model]:
        expected = UNSEEN.get((model, scheme), scheme)
        keys, config = infos(state_of(model, scheme)), config_of(model)
        if expected is None:
            with pytest.raises(PlanError, match="no known naming scheme has keys"):
                choose(keys, HUB, None, config)
        else:
            choice = choose(keys, HUB, None, config)
            assert choice.source == entry_of(model, expected).load(), scheme


def test_a_config_tells_llama_with_biases_from_qwen2() -> None:
    """GGUF's names of both are Qwen2's to a fingerprint; a model that lacks keys' rules is not chosen."""
    llama, qwen2 = (infos(state_of(model, "gguf")) for model in ("llama_bias", "qwen2"))
    config = config_of("llama_bias")
    assert [entry.title for entry in recognise(llama)] == ["qwen2/gguf"]
    assert [entry.title for entry in recognise(llama, config)] == ["llama/gguf"]
    assert [entry.title for entry in recognise(qwen2, config_of("qwen2"))] == ["qwen2/gguf"]
    with pytest.raises(PlanError, match="the names fit qwen2/gguf, but that is for qwen2"):
        choose(qwen2, HUB, None, config_of("phi3"))


def test_what_is_the_same_as_another_scheme_says_so() -> None:
    """By its rules, and by what the peers' code makes of one model."""
    alike = {entry.title: entry for entry in available() if entry.same_as}
    assert alike.keys() == {"llama/torchtitan@2025-07"}
    for entry in alike.values():
        other = entry_of("llama", entry.same_as)
        assert (
            other.aliases == [entry.title]
            and other.title_with_aliases == "llama/meta (= torchtitan@2025-07)"
        )
        mine, theirs = entry.load(), other.load()
        assert [(r.hub, r.other) for r in mine.rules] == [(r.hub, r.other) for r in theirs.rules]
        assert mine.ties == theirs.ties
        assert golden("llama", entry.title.partition("/")[2]) == golden("llama", entry.same_as)


def test_names_that_more_than_one_file_knows() -> None:
    """GPT-2's are told apart by shapes. torchtune's Llama and Phi-3 have rows in another order and
    the same shapes, Megatron's are the same tensors: refused without a config, which says what they
    are called on disk; see `test_convert.py`."""
    twofold = {
        tuple(entry.title for entry in found)
        for model, scheme in TABLES
        if len(found := recognise(list(golden(model, scheme)))) > 1
    }
    assert twofold == {
        ("gpt2/hf", "gpt2/nanogpt"),
        ("llama/torchtune", "phi3/torchtune"),
        ("llama/megatron", "phi3/megatron"),
    }
