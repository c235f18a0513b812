"""Conversion from the Hub: what is fetched, verified and continued; the commit is pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ckptmap_cli.main import main
from safetensors.torch import load_file

import ckptmap
from ckptmap.errors import DestinationError, RunError, SourceError
from tests.support.hub.client import llama, wide
from tests.support.hub.server import Fault, Hub
from tests.support.hub.state import MAIN, Blob


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 2 MiB."""
    return wide(tmp_path_factory.mktemp("hub") / "wide")


# ------------------------------------------------------------------ faults while reading


def test_a_range_that_fails_is_asked_for_again(hub: Hub, large: Path) -> None:
    hub.add("org/m", large)
    hub.faults += [
        Fault("GET /cdn/", status=500, times=2), Fault("GET /cdn/", status=429, times=1),
        Fault("GET /cdn/", drop_after=100, times=2),
    ]  # fmt: skip
    assert len(ckptmap.open("hf://org/m")) == 4


def test_an_answer_that_is_no_range_is_refused(hub: Hub, large: Path) -> None:
    hub.add("org/m", large)
    hub.faults.append(Fault("GET /cdn/", truncate=1000, times=99))
    with pytest.raises(SourceError, match=r"asked for bytes 0\.\.65536 of \d+, found 64536"):
        ckptmap.open("hf://org/m")


@pytest.mark.parametrize("to", ["full", "hf-bf16", "fsdp2-nf4"])
def test_convert_is_the_same_as_from_a_local_copy(
    hub: Hub, model: Path, tmp_path: Path, to: str
) -> None:
    hub.add("org/m", model)
    for low_disk in (False, True):
        ckptmap.convert("hf://org/m", tmp_path / f"there{low_disk}", to=to, low_disk=low_disk)
    ckptmap.convert(model, tmp_path / "here", to=to)
    assert ckptmap.verify(tmp_path / "thereTrue", against="hf://org/m").ok
    for low_disk in (False, True):
        assert contents(tmp_path / f"there{low_disk}") == contents(tmp_path / "here")


def contents(place: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the source and the plan."""
    if place.is_file():
        return {key: t.numpy(force=True).tobytes() for key, t in _flat(torch.load(place)).items()}
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in sorted(place.rglob("*"))
        if file.name != "ckptmap.manifest.json"
    }


def _flat(state: Any) -> dict[str, torch.Tensor]:
    return {key: value.view(torch.uint8) for key, value in state.items()}


def test_convert_fetches_only_what_the_plan_needs(hub: Hub, large: Path, tmp_path: Path) -> None:
    hub.add("org/m", large)
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full", include=("layers.2.*",))
    fetched = [seen for seen in hub.asked("GET /cdn/") if not seen.range]
    assert len(fetched) == 1
    saved = torch.load(tmp_path / "out.pt")
    truth = load_file(sorted(large.glob("*.safetensors"))[2])
    assert torch.equal(saved["layers.2.weight"], truth["layers.2.weight"])


def test_what_lies_beside_is_fetched_when_it_is_written(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    """A plan knows it by the tree alone: its sizes are in the total, and its hashes in the digest."""
    repo = hub.add("org/m", model)
    plan = ckptmap.plan("hf://org/m", "hf")
    assert {"config.json", "tokenizer.json"} <= set(plan.carried) and not hub.asked("tokenizer")
    assert plan.nbytes_out == ckptmap.plan(model, "hf").nbytes_out
    hub.faults.append(Fault(".*/resolve/.*tokenizer.json", status=403))
    with pytest.raises(
        RunError, match=r"this token may not do that while fetching tokenizer\.json"
    ):
        plan.execute(tmp_path / "out")
    assert plan.execute(tmp_path / "out").continued_nbytes > 0
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    repo.commit(MAIN, {**repo.tree(), "tokenizer.json": Blob(b"{}", lfs=False)})
    moved = ckptmap.plan(f"hf://org/m@{repo.refs[MAIN]}", "hf")
    assert moved.digest != plan.digest


def test_low_disk_keeps_one_shard_at_a_time(
    hub: Hub, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmap.storage.hub.mirror import Mirror

    hub.add("org/m", large)
    most, fetch = [0], Mirror.fetch

    def counted(mirror: Mirror, file: str, into: Path | None = None) -> str:
        path = fetch(mirror, file, into)
        most[0] = max(most[0], len(list(tmp_path.glob(".out.pt.ckptmap-*/source-0/*.safetensors"))))
        return path

    monkeypatch.setattr(Mirror, "fetch", counted)
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full-bf16", low_disk=True)
    assert most[0] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "out.pt"]
    assert not list((tmp_path / "home").rglob("*.safetensors")), "nothing of it is in the cache"


def test_what_is_in_the_cache_is_used_and_stays(hub: Hub, large: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    hub.add("org/m", large)
    held = Path(snapshot_download("org/m"))
    before = len(hub.asked("GET /cdn/"))
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full", low_disk=True)
    assert not [seen for seen in hub.asked("GET /cdn/")[before:] if not seen.range]
    assert len(list(held.glob("*.safetensors"))) == 4


def test_a_damaged_download_is_fetched_again(hub: Hub, large: Path, tmp_path: Path) -> None:
    hub.add("org/m", large)
    hub.faults.append(Fault("GET /cdn/", damage=True, times=1, skip=4))
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_a_download_that_stays_damaged_publishes_nothing(
    hub: Hub, large: Path, tmp_path: Path
) -> None:
    hub.add("org/m", large)
    hub.faults.append(Fault("GET /cdn/", damage=True, times=99, skip=4))
    with pytest.raises(RunError, match=r"bytes were downloaded that are not those of") as caught:
        ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert caught.value.code == "CKM709" and not (tmp_path / "out.pt").exists()
    hub.faults.clear()
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_a_body_cut_short_is_refused(hub: Hub, large: Path, tmp_path: Path) -> None:
    """Complete by its own length, shorter than the tree says."""
    hub.add("org/m", large)
    hub.faults.append(Fault("GET /cdn/", truncate=1000, times=99, skip=4))
    with pytest.raises(RunError, match=r"fetching model-\S+ failed: Consistency check failed"):
        ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


def test_the_hub_is_no_destination_of_convert(large: Path) -> None:
    with pytest.raises(
        DestinationError, match=r"^hf://org/m: is not a path on this machine"
    ) as caught:
        ckptmap.convert(large, "hf://org/m", to="hf")
    assert "ckptmap push" in caught.value.hint


def test_a_truncated_file_in_the_cache_is_found(hub: Hub, large: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    hub.add("org/m", large)
    blob = sorted(Path(snapshot_download("org/m")).glob("*.safetensors"))[0].resolve()
    blob.write_bytes(blob.read_bytes()[:-100])
    ckptmap.convert("hf://org/m", tmp_path / "out.pt", to="full")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_a_cut_download_is_continued(
    hub: Hub, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client resumes within a file; whole files of an earlier run are not fetched again."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # what it keeps of a cut body
    hub.add("org/m", large)
    hub.faults.append(Fault("GET /cdn/", drop_after=1_000_000, times=2, skip=4))
    ckptmap.convert("hf://org/m", tmp_path / "one.pt", to="full")
    assert any(seen.range.startswith("bytes=1000000-") for seen in hub.asked("GET /cdn/"))
    before = len(hub.seen)
    hub.faults.append(Fault("GET /cdn/", status=404, times=99, skip=4))
    ckptmap.convert("hf://org/m", tmp_path / "two.pt", to="full")
    assert not [seen for seen in hub.seen[before:] if "/cdn/" in seen.path and not seen.range]


def test_no_space_is_said_before_the_download(
    hub: Hub, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from types import SimpleNamespace

    hub.add("org/m", large)
    plan = ckptmap.plan("hf://org/m", "full")
    real = shutil.disk_usage

    def small(path: Any) -> Any:
        return SimpleNamespace(free=5_000_000) if "home" in str(path) else real(path)

    monkeypatch.setattr(shutil, "disk_usage", small)
    with pytest.raises(RunError, match=r"needs 8.0 MiB for hf://org/m@") as caught:
        plan.execute(tmp_path / "out.pt")
    assert caught.value.code == "CKM710" and "--low-disk" in caught.value.hint
    assert not [seen for seen in hub.asked("GET /cdn/") if not seen.range]


def test_a_live_model_is_loaded_from_verified_files(hub: Hub, model: Path) -> None:
    from tests.corpus.models import tiny_llama

    hub.add("org/m", model)
    live, truth = tiny_llama(False, torch.bfloat16), tiny_llama(False, torch.bfloat16)
    for parameter in live.parameters():
        parameter.data.zero_()
    ckptmap.load("hf://org/m", live)
    for name, tensor in truth.state_dict().items():
        assert torch.equal(live.state_dict()[name], tensor)
    assert len([seen for seen in hub.asked("GET /cdn/") if not seen.range]) == 4


# ------------------------------------------------------------------ the commit is pinned


def test_a_revision_is_resolved_once(hub: Hub, large: Path, tmp_path: Path) -> None:
    repo = hub.add("org/m", large)
    plan = ckptmap.plan("hf://org/m", "full")
    moved = {path: Blob(b"other", blob.lfs) for path, blob in repo.tree().items()}
    repo.commit(MAIN, moved)
    plan.execute(tmp_path / "out.pt")
    assert ckptmap.verify(tmp_path / "out.pt", against=large).ok


def test_a_saved_plan_names_the_commit(
    hub: Hub, large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = hub.add("org/m", large)
    saved = str(tmp_path / "plan.json")
    assert main(["plan", "hf://org/m", "--to", "full", "-o", saved]) == 0
    capsys.readouterr()
    assert main(["convert", "hf://org/m", str(tmp_path / "a.pt"), "--plan", saved, "-q"]) == 0
    repo.commit(MAIN, {**repo.tree(), "more.txt": Blob(b"x", False)})
    hub_name = f"hf://org/m@{repo.refs[MAIN]}"
    assert main(["convert", hub_name, str(tmp_path / "b.pt"), "--plan", saved]) == 2
    assert "plans a conversion of hf://org/m@" in capsys.readouterr().err


def test_options_take_places_on_the_hub(hub: Hub, model: Path, large: Path, tmp_path: Path) -> None:
    hub.add("org/m", model)
    from safetensors.torch import save_file

    state = {fqn: ckptmap.open(model)[fqn].read() for fqn in ckptmap.open(model)}
    save_file(state, tmp_path / "plain.safetensors")
    ckptmap.convert(
        tmp_path / "plain.safetensors", tmp_path / "out", to="hf", config_from="hf://org/m"
    )
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_a_renamed_repository_is_followed_and_said(hub: Hub, large: Path) -> None:
    hub.add("org/new", large)
    hub.renamed["org/old"] = "org/new"
    ckpt = ckptmap.open("hf://org/old")
    assert len(ckpt) == 4 and ckpt.origin.startswith("hf://org/new@")
    assert "hf://org/old is now hf://org/new: write that" in ckpt.notes
