"""What a shell completes: as bash asks for it, by the variables that typer's script sets."""

from __future__ import annotations

import pytest
from ckptmap_cli.main import main

from ckptmap import registry, setups
from ckptmap.error_codes import CODES


def completed(
    line: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The words that are offered for the last word of a line."""
    patch.setenv("_CKPTMAP_COMPLETE", "complete_bash")
    patch.setenv("COMP_WORDS", line)
    patch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    assert main([]) == 0
    return capsys.readouterr().out.split()


CASES = {
    "ckptmap convert a b --to ": set(setups.names()),
    "ckptmap plan a --to fsdp2-nf": {"fsdp2-nf4"},
    "ckptmap merge a b c --to hf-b": {"hf-bnb-nf4", "hf-bf16"},
    "ckptmap push a o/n --to hf-bf": {"hf-bf16"},
    "ckptmap pull hf://o/n b --to trai": {"trainer"},
    "ckptmap convert a b --names llama/me": {"llama/megatron", "llama/meta"},
    "ckptmap convert a b --names au": {"auto"},
    "ckptmap convert a b --names-from llama/met": {"llama/meta"},
    "ckptmap convert a b --optimizer-keys ": {form.name for form in registry.key_forms()},
    "ckptmap convert a b --optimizer ": {"keep", "drop"},
    "ckptmap convert a b --digest ": {"xxh3", "sha256", "none"},
    "ckptmap explain ": {*CODES},
    "ckptmap mappings ch": {"check"},
    "ckptmap mappings show llama/meta": {"llama/meta"},
    "ckptmap expl": {"explain"},
}


@pytest.mark.parametrize("line", CASES)
def test_values(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = completed(line, monkeypatch, capsys)
    assert CASES[line] <= {*words}
    assert all(word.startswith(line.split(" ")[-1]) for word in words)
