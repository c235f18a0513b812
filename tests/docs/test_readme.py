"""The README: every command of its table does what its row says, on what a real writer made."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.corpus.models import tiny_llama
from tests.docs.given import (
    Make,
    Writers,
    average,
    directory,
    four_bit,
    hub_model,
    lora,
    plain_state_dict,
    training_script,
    zero,
)
from tests.docs.page import output
from tests.support.paths import GOLDEN, ROOT

README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `(ckptmap [^`]+)` \|$", README, re.MULTILINE)


def meta(path: Path, writers: Callable[[], Writers]) -> None:
    """The layout of Meta's release, which ckptmap made of a Hugging Face model."""
    import ckptmap

    base = path.with_name("base-of-meta")
    tiny_llama().save_pretrained(base)
    path.mkdir()
    ckptmap.convert(base, path / "consolidated.00.pth", "full", names="meta")


def lightning(path: Path, writers: Callable[[], Writers]) -> None:
    """What Lightning's Trainer wrote, with a Llama in the place of its model, as `self.model` of a module whose
    hyperparameters are numbers."""
    (written,) = (GOLDEN / "lightning/trainer").glob("*.ckpt")
    saved = torch.load(written, weights_only=False)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    named = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    saved |= {"state_dict": named, "optimizer_states": [optimizer.state_dict()]}
    torch.save({**saved, "hyper_parameters": {"lr": 1e-3}}, path)


TRAINER = partial(directory, "trainer_fsdp_sharded_w2/checkpoint-2")
GIVEN: dict[str, Make] = {
    "model.pt": training_script,
    "plain.pt": plain_state_dict,
    "file.pt": training_script,
    "ema.pt": average,
    "run": TRAINER,
    "checkpoint-500": partial(directory, "trainer_w1/checkpoint-2"),
    "last.ckpt": lightning,
    "zero-run": zero,
    "actor": partial(directory, "verl_w2/actor"),
    "base": hub_model,
    "model": four_bit,
    "adapter": lora,
    "consolidated": meta,
    "a": hub_model,
    "b": partial(hub_model, dtype=torch.float32),
}
"""The paths that the rows name, and what lies there."""


@pytest.mark.ranks
@pytest.mark.parametrize(("have", "want", "command"), ROWS, ids=[row[2] for row in ROWS])
def test_row(
    have: str,
    want: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    def writers() -> Writers:
        return Writers(
            request.getfixturevalue("corpus"), request.getfixturevalue("framework_directories")
        )

    for word in command.split():
        if word in GIVEN and not (tmp_path / word).exists():
            GIVEN[word](tmp_path / word, writers)
    monkeypatch.chdir(tmp_path)
    code, printed = output(command)
    assert code == (1 if command.startswith("ckptmap diff") else 0), printed
    destination = re.search(r"wrote (\S+):", printed)
    if destination:
        code, verified = output(f"ckptmap verify {destination[1]}")
        assert code == 0, verified


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) == 18  # and one on paths of the Hub, which recipes/hub.md runs


def test_the_python_of_the_readme_names_what_there_is() -> None:
    """By name only: `demo/` is made by `make demo`, which a test of its own runs."""
    import ckptmap

    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    called = {
        node.attr
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ckptmap"
    }
    assert called and called <= set(ckptmap.__all__)


def test_it_is_one_page() -> None:
    assert len(README.splitlines()) <= 150
