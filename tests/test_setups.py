"""What `--to` takes, and what it answers to the words that people write there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmap import registry, setups
from ckptmap.errors import PlanError
from ckptmap.formats.detect import look
from ckptmap.protocols import Place
from tests.support.paths import GOLDEN


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dcp", "fsdp2"),
        ("dcp-nf4", "fsdp2-nf4"),
        ("huggingface", "hf"),
        ("vllm", "hf"),
        ("llama.cpp", "gguf"),
        ("transformers-bf16", "hf-bf16"),
        ("safetensors", "hf"),
        ("pt", "full"),
        ("torch", "full"),
        ("verl", "fsdp2-ranks"),
        ("fsdp2-nf5", "fsdp2-nf4"),
        ("hf-int4", "hf-ct-int4"),
        ("int4", "hf-ct-int4"),
        ("hf-4bit", "hf-bnb-nf4"),
        ("8bit", "hf-bnb-int8"),
        ("transformers-float16", "hf-fp16"),
        ("fsdp2-qlora", "fsdp2-nf4"),
        ("q8", "gguf-q8_0"),
        ("gguf-q4", "gguf-q4_0"),
        ("hf-bin", "full"),
        ("hf-safetensors", "hf"),
        ("fsdp2-pt", "full"),
    ],
)
def test_a_word_for_a_format_is_answered_with_the_setup_that_is_meant(
    word: str, meant: str
) -> None:
    with pytest.raises(PlanError) as caught:
        setups.parse(word)
    assert caught.value.code == "CKM201"
    assert caught.value.hint.startswith(f"did you mean --to {meant}?")
    setups.parse(meant)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("awq", "awq is read, and not written; as wide is --to hf-ct-int4"),
        ("hf-gptq", "gptq is read, and not written; as wide is --to hf-ct-int4"),
        ("fsdp2-quanto", "quanto is read, and not written; as wide is --to fsdp2-int8"),
        ("gguf-q4_k_m", "K and IQ types of llama.cpp are read, and not written"),
        ("q6_k", "K and IQ types of llama.cpp are read, and not written"),
        ("gguf-iq4_xs", "K and IQ types of llama.cpp are read, and not written"),
    ],
)
def test_a_form_that_is_only_read_is_answered_with_one_that_is_written(
    word: str, said: str
) -> None:
    """It was answered with the nearest name: `hf-fp8` for `hf-gptq`."""
    with pytest.raises(PlanError) as caught:
        setups.parse(word)
    assert caught.value.hint.startswith(said)
    for named in caught.value.hint.split("--to ")[1:]:
        setups.parse(named.partition(",")[0].split()[0])


def test_no_word_for_an_encoding_hides_one() -> None:
    suffixes = {scheme.suffix for scheme in registry.schemes()}
    words = {*setups.ENCODINGS_MEANT, *setups.ONLY_READ}
    assert not suffixes & words
    assert suffixes >= {*setups.ENCODINGS_MEANT.values(), *setups.ONLY_READ.values()}


def test_no_word_hides_a_setup() -> None:
    names = {setup.name for setup in registry.setups()}
    assert not names & {*setups.MEANT} and names >= {*setups.MEANT.values()}


def test_setups_of_a_writer_are_those_that_name_it() -> None:
    """The table names each setup's writer, so that no other writer is imported."""
    for writer in {setup.writer for setup in registry.setups()}:
        wanted = tuple(setup for setup in registry.setups() if setup.writer == writer)
        assert registry.setups_of(writer) == wanted


def places(folder: Path) -> Iterator[Place]:
    """Real checkpoints of other programs, and model-parallel files of ours that are cut as theirs."""
    from tests.support.mapping_state import state_of
    from tests.support.parallel_writers import (
        LLAMA_PARAMS,
        Grid,
        write_megatron,
        write_meta,
        write_torch_dist,
    )

    state = state_of("llama", "megatron")
    write_torch_dist(folder / "dist", state)
    write_megatron(folder / "iter_1", state, Grid(2, (2,)))
    write_meta(folder / "meta", state_of("llama", "meta"), 2, LLAMA_PARAMS)
    kept = [GOLDEN / name for name in ("lightning", "composer", "hub")]
    for path in [at for root in (folder, *kept) for at in root.rglob("*")]:
        if path.is_dir() or path.suffix in (".pt", ".ckpt", ".pth", ".bin", ".safetensors"):
            yield look(path)


def test_marks_hide_no_format_from_what_it_claims(tmp_path: Path) -> None:
    found = set()
    for place in places(tmp_path):
        for known in (registry.CONTAINERS, registry.DIRECTORIES):
            claiming = [one for one in known if registry._load(one.spec).claims(place)]
            assert all(one.may_claim(place) for one in claiming), place.path
            found |= {one.spec for one in claiming}
    assert len(found) >= 8


@pytest.mark.parametrize("word", ["megatron", "onnx", "deepspeed"])
def test_a_format_that_is_not_written_is_said_so(word: str) -> None:
    with pytest.raises(PlanError, match="is not a setup") as caught:
        setups.parse(word)
    assert caught.value.hint.startswith(f"{word}'s own format is not written; ")
    setups.parse(caught.value.hint.rpartition("--to ")[2])
