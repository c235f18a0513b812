"""What `--to` takes, and what it answers to the words that people write there."""

from __future__ import annotations

import pytest

from ckptmap import registry, setups
from ckptmap.errors import PlanError


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dcp", "fsdp2"),
        ("dcp-nf4", "fsdp2-nf4"),
        ("huggingface", "hf"),
        ("transformers-bf16", "hf-bf16"),
        ("safetensors", "hf"),
        ("pt", "full"),
        ("torch", "full"),
        ("verl", "fsdp2-ranks"),
        ("fsdp2-nf5", "fsdp2-nf4"),
    ],
)
def test_a_word_for_a_format_is_answered_with_the_setup_that_is_meant(
    word: str, meant: str
) -> None:
    with pytest.raises(PlanError) as caught:
        setups.parse(word)
    assert caught.value.code == "CKM201"
    assert caught.value.hint.startswith(f"did you mean --to {meant}? ")
    setups.parse(meant)


def test_no_word_hides_a_setup() -> None:
    names = {setup.name for setup in registry.setups()}
    assert not names & {*setups.MEANT} and names >= {*setups.MEANT.values()}
