"""`ckptmap pull`: files arrive as they are; a push or a pull that is killed leaves nothing in the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ckptmap_cli.main import main

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError, RunError, SourceError
from tests.corpus.ranks import run_ranks
from tests.support.hub.client import environment, llama, wide
from tests.support.hub.server import Fault, Hub
from tests.support.hub.state import MAIN, Blob, holds, shown_on
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


def same(a: Path, b: Path) -> bool:
    mine, theirs = (
        {f.relative_to(p): f.read_bytes() for f in p.rglob("*") if f.is_file()} for p in (a, b)
    )
    return mine == theirs


# ------------------------------------------------------------------ as it is


def test_pull_brings_the_checkpoint_and_what_lies_beside_it(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    repo = hub.add("org/m", model)
    old = {"pytorch_model.bin": Blob(b"PK\3\4" * 1000, True), "onnx/model.onnx": Blob(b"x", True)}
    repo.commit(MAIN, {**repo.tree(), **old})
    report = ckptmap.pull("hf://org/m", tmp_path / "m")
    assert same(tmp_path / "m", model)
    assert report.files == len(list(model.iterdir()))
    assert "left on the Hub: onnx/model.onnx, pytorch_model.bin" in report.notes
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "m"]
    again = ckptmap.pull("hf://org/m", tmp_path / "m")
    assert "was complete already" in again.notes


def test_pull_brings_the_modules_behind_a_model(hub: Hub, model: Path, tmp_path: Path) -> None:
    """As sentence-transformers keeps them: without their weights its loader fails."""
    repo = hub.add("org/m", model)
    modules = [{"idx": i, "path": path} for i, path in enumerate(("", "2_Dense"))]
    beside = {
        "modules.json": Blob(json.dumps(modules).encode(), False),
        "2_Dense/config.json": Blob(b"{}", False),
        "2_Dense/model.safetensors": Blob(b"dense", True),
        "onnx/model.safetensors": Blob(b"other", True),
    }
    repo.commit(MAIN, {**repo.tree(), **beside})
    report = ckptmap.pull("hf://org/m", tmp_path / "m")
    assert (tmp_path / "m/2_Dense/model.safetensors").read_bytes() == b"dense"
    assert "left on the Hub: onnx/model.safetensors" in report.notes
    assert not [note for note in report.notes if note.startswith("left behind")]


def test_pull_one_file_and_a_folder(hub: Hub, model: Path, tmp_path: Path) -> None:
    repo = hub.add("org/m", model)
    below = {f"a/b/{file.name}": Blob(file.read_bytes(), True) for file in model.iterdir()}
    repo.commit("v2", {**repo.tree(), **below})
    ckptmap.pull("hf://org/m@v2/a/b", tmp_path / "folder")
    assert same(tmp_path / "folder", model)
    shard = sorted(model.glob("*.safetensors"))[0]
    ckptmap.pull(f"hf://org/m/{shard.name}", tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == shard.read_bytes()


def test_pull_with_a_setup_is_convert(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/m", model)
    args = ["pull", "hf://org/m", str(tmp_path / "out.pt"), "--to", "full-bf16", "--low-disk"]
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == {"bytes": 21}
    assert ckptmap.verify(tmp_path / "out.pt", against=model).ok


def test_pull_on_the_command_line(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/m", model)
    assert main(["pull", "hf://org/m", str(tmp_path / "m"), "-q"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"
    assert main(["pull", "hf://org/m", str(tmp_path / "n"), "--low-disk"]) == 2
    assert "need --to SETUP" in capsys.readouterr().err


def test_pull_replaces_only_checkpoints_and_only_if_asked(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.add("org/m", model)
    llama(tmp_path / "old", dtype="float32")
    with pytest.raises(DestinationError, match="exists"):
        ckptmap.pull("hf://org/m", tmp_path / "old")
    ckptmap.pull("hf://org/m", tmp_path / "old", overwrite=True)
    assert same(tmp_path / "old", model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(DestinationError, match="holds no checkpoint"):
        ckptmap.pull("hf://org/m", tmp_path / "mine", overwrite=True)
    with pytest.raises(SourceError, match="is not a place on the Hub"):
        ckptmap.pull(str(model), tmp_path / "x")


def test_pull_of_damaged_bytes_publishes_nothing(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.add("org/m", model)
    hub.faults.append(Fault("GET /cdn/", damage=True, skip=4, times=99))
    with pytest.raises(RunError, match="are not those of") as caught:
        ckptmap.pull("hf://org/m", tmp_path / "m")
    assert caught.value.code == "CKM709" and not (tmp_path / "m").exists()
    hub.faults.clear()
    ckptmap.pull("hf://org/m", tmp_path / "m")
    assert same(tmp_path / "m", model)


def test_pull_continues_with_the_files_that_it_has(hub: Hub, tmp_path: Path) -> None:
    folder = wide(tmp_path / "wide")
    hub.add("org/m", folder)
    hub.faults.append(Fault("(GET|HEAD) .*/resolve/.*/model-00003", status=403, skip=1, times=99))
    with pytest.raises(CkptmapError, match="this token may not do that"):
        ckptmap.pull("hf://org/m", tmp_path / "m")
    hub.faults.clear()
    before = len(hub.seen)
    ckptmap.pull("hf://org/m", tmp_path / "m")
    fetched = [seen for seen in hub.seen[before:] if "/cdn/" in seen.path and not seen.range]
    assert len(fetched) == 2 and same(tmp_path / "m", folder)


# ------------------------------------------------------------------ killed anywhere


def killed_at(hub: Hub, args: list[str], home: Path, token: str, at: int, after: bool) -> int:
    """Run a command line, kill it at its request number `at`, before or after the request has had
    its effect; how many requests there were, of which none had after the kill."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmap", *args], env=environment(hub, home, token), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    count, lock = [0], threading.Lock()

    def hook(request: str, done: bool) -> None:
        with lock:  # requests come from several threads
            count[0] += not done
            if done == after and count[0] >= at >= 0 and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()

    hub.hooks.append(hook)
    _, err = process.communicate(timeout=120)
    hub.hooks.remove(hook)
    assert process.returncode in ((0,) if at < 0 else (-signal.SIGKILL,)), err.decode()
    return count[0]


def test_a_push_killed_anywhere(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """main shows the old model or the new one, whenever the kill comes; the next run completes."""
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    old, home = llama(tmp_path / "old", dtype="float32"), tmp_path / "home"

    def args(repo: str) -> list[str]:
        return ["push", str(model), repo, "--to", "hf", "--max-shard-size", "80KB", "-q"]

    hub.add("org/whole", old)
    total = killed_at(hub, args("org/whole"), home, "hf_owner", at=-1, after=False)
    whole = weights_of(hub, "org/whole")
    points = random.Random(7).sample(range(2, total), 5)
    for number, at in enumerate(points):
        repo = hub.add(f"org/k{number}", old)
        killed_at(hub, args(repo.id), home, "hf_owner", at, after=number % 2 == 0)
        for tree in shown_on(repo)[1:]:
            assert holds(tree, old) or {p: b.sha256 for p, b in tree.items() if b.lfs} == whole
        assert main(args(repo.id)) == 0
        assert weights_of(hub, repo.id) == whole
        assert len(shown_on(repo)) == 3, "made, the old model, the new one"
        assert len(repo.discussions) == 1, "the same pull request"


def weights_of(hub: Hub, name: str) -> dict[str, str]:
    return {path: blob.sha256 for path, blob in hub.repos[name].tree().items() if blob.lfs}


@pytest.mark.parametrize("to", [[], ["--to", "hf-fp32", "--low-disk"]], ids=["as-is", "converted"])
def test_a_pull_killed_anywhere(hub: Hub, model: Path, tmp_path: Path, to: list[str]) -> None:
    hub.add("org/m", model)
    home = tmp_path / "home"
    whole = tmp_path / "whole"
    total = killed_at(hub, ["pull", "hf://org/m", str(whole), "-q", *to], home, "", -1, False)
    for number, at in enumerate(random.Random(3).sample(range(8, total), 3)):
        dst, cold = tmp_path / f"k{number}", tmp_path / f"cold{number}"
        args = ["pull", "hf://org/m", str(dst), "-q", *to]
        killed_at(hub, args, cold, "", at, after=number % 2 == 0)
        assert not dst.exists()
        assert main(args) == 0
        assert same(dst, whole)
        assert not list(tmp_path.glob(f".k{number}.ckptmap-*"))


@pytest.mark.parametrize("command", ["pull", "push", "convert"])
def test_ctrl_c_says_how_to_continue(hub: Hub, model: Path, tmp_path: Path, command: str) -> None:
    repo = hub.add("org/m", llama(tmp_path / "old", dtype="float32"))
    before = repo.tree()
    args = {
        "pull": ["hf://org/m", str(tmp_path / "out"), "-q"],
        "push": [str(model), "org/m", "-q"],
        "convert": ["hf://org/m", str(tmp_path / "out"), "--to", "hf-bf16", "-q"],
    }[command]
    at = "PUT /lfs/" if command == "push" else "GET /cdn/"
    hub.faults.append(Fault(at, delay_s=3.0, times=99, skip=0 if command == "push" else 1))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmap", command, *args], cwd=ROOT, stderr=subprocess.PIPE,
        env=environment(hub, tmp_path / "home", "hf_owner"), text=True,
    )  # fmt: skip
    while not hub.faults[0].times < 99:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"the same command continues it: ckptmap {command} " in err and "Traceback" not in err
    assert repo.tree() == before and not (tmp_path / "out").exists()


def test_ranks_share_a_conversion(hub: Hub, tmp_path: Path) -> None:
    """Each fetches what its share reads; the output is that of one process."""
    wide(tmp_path / "wide")
    hub.add("org/m", tmp_path / "wide")
    ckptmap.convert("hf://org/m", tmp_path / "alone", to="fsdp2-bf16", world_size=2)
    args = ["convert", "hf://org/m", str(tmp_path / "ranks"), "--to", "fsdp2-bf16", "-q"]
    args += ["--world-size", "2", "--low-disk"]
    run_ranks("ckptmap", 2, args, env=environment(hub, tmp_path / "home2"))
    assert same_but_manifest(tmp_path / "alone", tmp_path / "ranks")
    assert not list(tmp_path.glob("ckptmap-hub-*"))


def same_but_manifest(a: Path, b: Path) -> bool:
    names = {file.name for file in a.iterdir()}
    return names == {file.name for file in b.iterdir()} and all(
        (a / name).read_bytes() == (b / name).read_bytes()
        for name in names - {"ckptmap.manifest.json"}
    )


def test_what_a_killed_process_leaves_is_swept(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Placeholders are in the temporary directory, named by their process."""
    hub.add("org/m", model)
    killed_at(hub, ["inspect", "hf://org/m"], tmp_path / "home", "", at=6, after=False)
    left = list(tmp_path.glob("ckptmap-hub-*"))
    assert len(left) == 1
    killed_at(hub, ["inspect", "hf://org/m"], tmp_path / "home", "", at=-1, after=False)
    assert not list(tmp_path.glob("ckptmap-hub-*")), (left, list(tmp_path.glob("*")))
