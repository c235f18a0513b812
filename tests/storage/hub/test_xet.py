"""hf_xet, which carries most weights of the Hub today, to and from its content store."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptmap
from ckptmap.errors import RunError
from tests.support.hub.client import llama
from tests.support.hub.server import Hub
from tests.support.hub.state import holds

pytest.importorskip("hf_xet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


@pytest.fixture
def hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Everything large is in xet's store, and everybody is logged in as the owner."""
    from huggingface_hub import constants

    hub.xet = hub.cas = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    return hub


def test_weights_go_and_come_by_xet(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Chunks that hf_xet cut, packed and described are the model; and are it again here."""
    ckptmap.push(model, "org/m")
    assert holds(hub.repos["org/m"].tree(), model)
    assert hub.asked("POST /v1/shards") and hub.xorbs and not hub.asked("PUT /lfs/")
    ckptmap.pull("hf://org/m", tmp_path / "out")
    ckptmap.convert("hf://org/m", tmp_path / "bf16.pt", to="full-bf16", low_disk=True)
    weights = list(model.glob("*.safetensors"))
    assert all((tmp_path / "out" / f.name).read_bytes() == f.read_bytes() for f in weights)
    assert ckptmap.verify(tmp_path / "bf16.pt", against=model).ok
    assert len(hub.asked("GET /xorb/")) == 2 * len(weights)
    assert all(seen.range for seen in hub.asked("GET /cdn/")), "headers alone"


def test_what_xet_puts_together_is_checked(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Its store gives other bytes than the tree promises, each time."""
    repo = hub.add("org/m", model)

    def damage(request: str, done: bool) -> None:
        if not done and request.startswith("GET /xorb/"):
            name = request.rpartition("/")[2]
            repo.lfs_stored[name] = repo.lfs_stored[name][:-1] + b"\x55"

    hub.hooks.append(damage)
    with pytest.raises(RunError, match="are not those of") as caught:
        ckptmap.pull("hf://org/m", tmp_path / "out")
    assert caught.value.code == "CKM709" and not (tmp_path / "out").exists()
    hub.hooks.clear()
    ckptmap.pull("hf://org/m", tmp_path / "out")
    assert holds(repo.tree(), tmp_path / "out")
