"""`ckptmap push`: an upload is proven in a pull request, then visible at once; and what can go wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from ckptmap_cli.main import main
from safetensors.torch import save_file

import ckptmap
from ckptmap.errors import CkptmapError, DestinationError, RunError
from ckptmap.operations.hub.content import UploadItem
from tests.support.hub.client import llama, wide
from tests.support.hub.server import Fault, Hub
from tests.support.hub.state import MAIN, Blob, Tree, holds, shown_on


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("hub") / "llama", "60KB")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in float32, in other shards."""
    return llama(tmp_path_factory.mktemp("hub") / "other", "150KB", "float32")


@pytest.fixture
def hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Here everybody is logged in as the owner."""
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    return hub


# ------------------------------------------------------------------ all of it, at once


def test_push_makes_a_repository_that_users_load(hub: Hub, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = ckptmap.push(model, "org/new", private=True)
    repo = hub.repos["org/new"]
    assert repo.private and report.merged and report.pull_request == 1
    assert holds(repo.tree(), model)
    assert [len(tree) for tree in shown_on(repo)] == [1, len(repo.tree())], "first empty, then all"
    loaded = AutoModelForCausalLM.from_pretrained("org/new")
    truth = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in truth.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained("org/new").get_vocab()["a"] == 3


def test_push_converts_first(hub: Hub, model: Path, tmp_path: Path) -> None:
    """A DCP directory becomes what huggingface_hub itself would write."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoModelForCausalLM

    from tests.corpus.models import tiny_llama

    truth = tiny_llama(False, torch.float32).state_dict()
    torch.distributed.checkpoint.save(
        {"model": truth}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    ckptmap.push(
        tmp_path / "dcp", "org/new", to="hf-bf16", config_from=str(model), max_shard_nbytes=100_000
    )
    tree = hub.repos["org/new"].tree()
    state = {fqn: tensor.to(torch.bfloat16) for fqn, tensor in truth.items()}
    split = split_torch_state_dict_into_shards(state, max_shard_size=100_000)
    shards = split.filename_to_tensors
    assert {path for path in tree if path.endswith(".safetensors")} == set(shards)
    index = json.loads(tree["model.safetensors.index.json"].content)
    assert index["weight_map"] == split.tensor_to_filename
    assert index["metadata"]["total_size"] == split.metadata["total_size"]
    config = json.loads(tree["config.json"].content)
    assert {config.get("dtype"), config.get("torch_dtype")} <= {"bfloat16", None}
    loaded = AutoModelForCausalLM.from_pretrained("org/new")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(loaded.state_dict()[fqn], tensor) for fqn, tensor in state.items())
    assert ckptmap.verify("hf://org/new").ok
    assert not list((tmp_path / "home").rglob("*.safetensors.index.json.*"))
    assert not list((tmp_path / "home/assets").rglob("*.safetensors")), "the copy is removed"


QUANTIZED = ("bnb-nf4", "bnb-fp4-dq", "bnb-int8", "int8", "float8", "ct-int8", "ct-fp8")


@pytest.mark.parametrize("to", [f"hf-{encoding}" for encoding in QUANTIZED])
def test_quantized_forms_that_users_load(hub: Hub, model: Path, tmp_path: Path, to: str) -> None:
    """bitsandbytes', torchao's and compressed-tensors' own: from_pretrained by name gives the model
    of a local copy."""
    from transformers import AutoModelForCausalLM

    ckptmap.push(model, "org/new", to=to, base_model="org/base")
    ckptmap.convert(model, tmp_path / "local", to=to)
    tree = hub.repos["org/new"].tree()
    assert tree["config.json"].content == (tmp_path / "local/config.json").read_bytes()
    assert "quantization_config" in json.loads(tree["config.json"].content)
    card = tree["README.md"].content.decode()
    assert "library_name: transformers" in card and "| quantization | 14 tensors as " in card
    tokens = torch.arange(8)[None]
    there = AutoModelForCausalLM.from_pretrained("org/new")(tokens).logits
    here = AutoModelForCausalLM.from_pretrained(tmp_path / "local")(tokens).logits
    assert torch.equal(there, here) and ckptmap.verify("hf://org/new", against=model).ok


def test_block_fp8_that_users_load(hub: Hub, tmp_path: Path) -> None:
    """DeepSeek's form, of a model with dimensions that have whole blocks."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    ckptmap.push(tmp_path / "m", "org/new", to="hf-fp8")
    ckptmap.convert(tmp_path / "m", tmp_path / "local", to="hf-fp8")
    tree, tokens = hub.repos["org/new"].tree(), torch.arange(8)[None]
    declared = json.loads(tree["config.json"].content)["quantization_config"]
    assert (declared["quant_method"], declared["weight_block_size"]) == ("fp8", [128, 128])
    there = AutoModelForCausalLM.from_pretrained("org/new")(tokens).logits
    here = AutoModelForCausalLM.from_pretrained(tmp_path / "local")(tokens).logits
    assert torch.equal(there, here)


def test_push_from_the_hub_to_the_hub(hub: Hub, model: Path) -> None:
    commit = hub.add("org/base", model).refs[MAIN]
    ckptmap.push("hf://org/base", "org/new", to="hf-fp32", low_disk=True)
    tree = hub.repos["org/new"].tree()
    manifest = json.loads(tree["ckptmap.manifest.json"].content)
    assert manifest["source"]["origin"] == f"hf://org/base@{commit}"
    assert json.loads(tree["config.json"].content)["dtype"] == "float32"
    assert ckptmap.diff("hf://org/base", "hf://org/new").changed


def test_new_weights_take_the_place_of_old_ones(
    hub: Hub, model: Path, other: Path, tmp_path: Path
) -> None:
    """A reader of main never finds shards of two models, at no commit."""
    repo = hub.add("org/m", model)
    before = set(repo.tree())
    report = ckptmap.push(other, "org/m")
    new = {file.name for file in other.iterdir()}
    stale = {path for path in before - new if path.endswith(".safetensors")}
    assert stale and set(report.deleted) == stale
    assert len(shown_on(repo)) == 3  # made, the old model, the new one
    assert holds(repo.tree(), other) and not stale & set(repo.tree())
    with ckptmap.open("hf://org/m") as ckpt:
        assert not [note for note in ckpt.notes if "not read" in note]
    ckptmap.push(llama(tmp_path / "one"), "org/m")  # in one file: no index names the old shards
    assert holds(repo.tree(), tmp_path / "one")
    assert [path for path in repo.tree() if "safetensors" in path] == ["model.safetensors"]


def test_new_weights_of_diffusers_take_the_place_of_old_ones(hub: Hub, tmp_path: Path) -> None:
    """Old ones in one file would lie beside new shards, and the card says who loads them."""
    folder = tmp_path / "vae"
    folder.mkdir()
    save_file({"conv.weight": torch.ones(4)}, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text('{"_class_name": "A", "_diffusers_version": "0.42.1"}')
    repo = hub.add("org/m")
    name = "diffusion_pytorch_model"
    old = {
        f"{name}{end}": Blob(b"old", lfs=True)
        for end in (".bin", "-00001-of-00002.safetensors", ".safetensors.index.json")
    }
    variant = {f"{name}.fp16.safetensors": Blob(b"fp16", lfs=True)}
    repo.commit(MAIN, {**repo.tree(), **old, **variant})
    report = ckptmap.push(folder, "org/m", to="hf-bf16")
    assert set(report.deleted) == set(old)
    assert {f"{name}.safetensors", *variant} <= repo.tree().keys()
    assert "library_name: diffusers" in repo.tree()["README.md"].content.decode()


def test_what_are_other_weights_stay(hub: Hub, model: Path) -> None:
    """An adapter, a variant, a folder with another model: not what this push replaces."""
    repo = hub.add("org/m")
    others = {
        name: Blob(name.encode(), lfs=True)
        for name in (
            "adapter_model.safetensors", "model.fp16.safetensors", "fp32/model.safetensors",
            "tf_model.h5",
        )
    }  # fmt: skip
    old = {"model.safetensors": Blob(b"old", True), "pytorch_model.bin": Blob(b"old", True)}
    repo.commit(MAIN, {**repo.tree(), **others, **old})
    report = ckptmap.push(model, "org/m")
    assert set(report.deleted) == set(old)
    assert others.items() <= repo.tree().items() and holds(repo.tree(), model)
    assert "left in the repository, perhaps other weights: tf_model.h5" in report.notes


def test_the_same_again_does_nothing(hub: Hub, model: Path) -> None:
    first = ckptmap.push(model, "org/m")
    again = ckptmap.push(model, "org/m")
    assert again.commit == first.commit and again.sent_nbytes == 0
    assert "was published already" in again.notes
    assert len(hub.repos["org/m"].discussions) == 1


def test_into_a_folder(hub: Hub, model: Path, other: Path) -> None:
    repo = hub.add("org/m", model)
    ckptmap.push(other, "hf://org/m/fp32")
    assert holds(repo.tree(), model) and holds(repo.tree(), other, "fp32/")
    with ckptmap.open("hf://org/m/fp32") as ckpt:
        assert ckpt["lm_head.weight"].dtype == "float32"


def test_one_file(hub: Hub, model: Path) -> None:
    ckptmap.push(model, "org/m", to="full")
    assert set(hub.repos["org/m"].tree()) == {".gitattributes", "README.md", "m.pt"}
    assert ckptmap.diff("hf://org/m/m.pt", model, values=True).equal


def test_what_is_no_part_of_it_stays_here(hub: Hub, model: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(model, tmp_path / "m"))
    (folder / ".env").write_text("HF_TOKEN=hf_secret")
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("[remote]")
    report = ckptmap.push(folder, "org/m")
    assert {"left behind: .env", "left behind: .git/config"} <= set(report.notes)
    assert not [path for path in hub.repos["org/m"].tree() if path.startswith((".env", ".git/"))]


# ------------------------------------------------------------------ revisions and pull requests


def test_a_new_branch_appears_complete(hub: Hub, model: Path, other: Path) -> None:
    repo = hub.add("org/m", model)
    ckptmap.push(other, "org/m", revision="fp32")
    assert holds(repo.tree("fp32"), other) and holds(repo.tree(), model)
    assert set(repo.refs) == {MAIN, "fp32"}, "the work branch is gone"
    assert not repo.discussions


def test_a_branch_moves_once(hub: Hub, model: Path, other: Path) -> None:
    repo = hub.add("org/m", model)
    repo.refs["v2"] = repo.refs[MAIN]
    ckptmap.push(other, "hf://org/m@v2")
    assert len(shown_on(repo, "v2")) == 1 and holds(repo.tree("v2"), other)
    assert holds(repo.tree(), model) and set(repo.refs) == {MAIN, "v2"}


def test_a_branch_that_was_done_but_for_its_work_branch(hub: Hub, model: Path, other: Path) -> None:
    """Stopped after the one step that shows it: the next run finds it there, and tidies up."""
    repo = hub.add("org/m", model)
    hub.faults.append(Fault("DELETE .*/branch/", status=500))
    with pytest.raises(RunError, match="the Hub answers 500 while moving dev"):
        ckptmap.push(other, "org/m", revision="dev")
    assert holds(repo.tree("dev"), other) and len(repo.refs) == 3
    assert "was published already" in ckptmap.push(other, "org/m", revision="dev").notes
    assert set(repo.refs) == {MAIN, "dev"}


def test_a_repository_without_pull_requests(hub: Hub, model: Path, other: Path) -> None:
    """Its owner has turned them off: a work branch, then one commit on main."""
    repo = hub.add("org/m", model)
    hub.faults.append(Fault("(GET|POST) .*/discussions", status=403, times=99))
    report = ckptmap.push(other, "org/m")
    assert report.pull_request is None and len(shown_on(repo)) == 3
    assert holds(repo.tree(), other) and set(repo.refs) == {MAIN}
    with pytest.raises(RunError, match="this token may not do that"):
        ckptmap.push(model, "org/m", pr=True)


def test_a_pull_request_for_review(hub: Hub, model: Path, other: Path) -> None:
    repo = hub.add("org/m", model)
    first = ckptmap.push(other, "org/m", pr=True)
    assert not first.merged and first.url == f"{hub.endpoint}/org/m/discussions/1"
    assert repo.discussions[0].status == "open"
    assert holds(repo.tree("refs/pr/1"), other) and holds(repo.tree(), model)
    again = ckptmap.push(other, "org/m", pr=True)
    assert again.sent_nbytes == 0 and again.pull_request == 1 and len(repo.discussions) == 1
    assert ckptmap.push(other, "org/m").pull_request == 1, "without --pr it is merged"
    assert holds(repo.tree(), other)


# ------------------------------------------------------------------ the card


def test_the_card_says_what_the_manifest_says(hub: Hub, model: Path) -> None:
    commit = hub.add("org/base", model).refs[MAIN]
    ckptmap.push("hf://org/base", "org/new", to="hf-nf4")
    card = hub.repos["org/new"].tree()["README.md"].content.decode()
    for line in (
        "base_model: org/base", "base_model_relation: quantized", "| setup | `hf-nf4` |",
        f"`hf://org/base@{commit}`, a `hf`", "| quantization | 14 tensors as nf4",
        "| 14 | quantize: quantized |", "| 7 | bytes: the same bytes |",
    ):  # fmt: skip
        assert line in card
    assert "library_name" not in card, "transformers does not load ckptmap's own NF4"


def test_a_card_is_never_overwritten(hub: Hub, model: Path, tmp_path: Path) -> None:
    import shutil

    mine = Blob(b"---\nlicense: mit\n---\n# Mine\n", lfs=False)
    repo = hub.add("org/m")
    repo.commit(MAIN, {**repo.tree(), "README.md": mine})
    ckptmap.push(model, "org/m")
    assert repo.tree()["README.md"] == mine
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    (folder / "README.md").write_text("# Another\n")
    report = ckptmap.push(folder, "org/m")
    assert repo.tree()["README.md"] == mine
    assert "README.md: the repository's own is kept" in report.notes


def test_a_card_of_the_source_is_taken(hub: Hub, model: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(model, tmp_path / "m"))
    (folder / "README.md").write_text("# Described\n")
    ckptmap.push(folder, "org/m")
    assert hub.repos["org/m"].tree()["README.md"].content == b"# Described\n"


# ------------------------------------------------------------------ interrupted, damaged


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT /lfs/", status=403, skip=2, times=9),
        Fault("POST .*/commit/", status=500, times=1),
        Fault("POST .*/merge", status=502, times=1),
        Fault("POST .*/status", drop_after=0, times=1),
        Fault("GET .*/tree/", status=403, skip=4, times=1),
    ],
    ids=lambda fault: fault.match,
)
def test_what_fails_is_continued_in_the_same_pull_request(
    hub: Hub, model: Path, other: Path, fault: Fault
) -> None:
    repo = hub.add("org/m", model)
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(RunError, match=r"^hf://org/m: ") as caught:
        ckptmap.push(other, "org/m")
    assert caught.value.exit_code == 3
    assert repo.tree() == shown_on(repo)[1], "main is as it was"
    hub.faults.clear()
    done = ckptmap.push(other, "org/m")
    assert done.pull_request == 1 and len(repo.discussions) == 1
    assert "continued pull request 1" in done.notes
    assert holds(repo.tree(), other) and len(shown_on(repo)) == 3


@pytest.mark.parametrize(
    "foreign", [False, True], ids=["as it was left", "with a file of somebody"]
)
def test_what_fails_is_continued_in_the_same_work_branch(
    hub: Hub, model: Path, other: Path, foreign: bool
) -> None:
    """A work branch into which somebody has written is made anew: nothing of theirs is published."""
    repo = hub.add("org/m", model)
    repo.refs["v2"] = repo.refs[MAIN]
    hub.faults.append(Fault("POST .*/commit/", status=500, times=1))
    with pytest.raises(RunError, match="the Hub answers 500 while uploading"):
        ckptmap.push(other, "hf://org/m@v2")
    (work,) = set(repo.refs) - {MAIN, "v2"}
    assert work.startswith("ckptmap-") and holds(repo.tree("v2"), model)
    if foreign:
        repo.commit(work, {**repo.tree(work), "modeling_llama.py": Blob(b"import os", False)})
    done = ckptmap.push(other, "hf://org/m@v2")
    assert (f"continued branch {work}" in done.notes) is not foreign
    assert holds(repo.tree("v2"), other) and "modeling_llama.py" not in repo.tree("v2")
    assert holds(repo.tree(), model) and set(repo.refs) == {MAIN, "v2"}


def test_files_that_are_there_are_not_sent_again(hub: Hub, other: Path) -> None:
    hub.faults.append(Fault("POST .*/commit/", status=500, times=1))
    with pytest.raises(RunError, match="the Hub answers 500 while uploading"):
        ckptmap.push(other, "org/m")
    puts = len(hub.asked("PUT /lfs/"))
    assert puts == len(list(other.glob("*.safetensors")))
    ckptmap.push(other, "org/m")
    assert len(hub.asked("PUT /lfs/")) == puts


def test_the_client_sends_again_what_the_store_refuses(hub: Hub, other: Path) -> None:
    hub.faults += [Fault("PUT /lfs/", status=500, times=2), Fault("PUT /lfs/", status=429)]
    ckptmap.push(other, "org/m")
    assert holds(hub.repos["org/m"].tree(), other)


@pytest.mark.parametrize("noticed", [True, False])
def test_what_was_damaged_on_the_way_is_not_published(
    hub: Hub, model: Path, other: Path, noticed: bool
) -> None:
    """By the store's own check of the hash, or else by what the tree says afterwards."""
    repo = hub.add("org/m", model)
    hub.faults.append(Fault("PUT /lfs/", damage=True))
    if not noticed:
        hub.faults.append(Fault("POST /lfs/.*/verify", status=200, times=9))
    said = "the Hub answers 400" if noticed else "is not what was sent .1 such.*, found "
    with pytest.raises(RunError, match=said) as caught:
        ckptmap.push(other, "org/m")
    assert caught.value.code == ("CKM708" if noticed else "CKM713")
    assert holds(repo.tree(), model) and len(shown_on(repo)) == 2
    hub.faults.clear()
    repo.lfs_stored = {b.sha256: b.content for b in map(_lfs, repo.lfs_stored.values())}
    ckptmap.push(other, "org/m")
    assert holds(repo.tree(), other)


def _lfs(content: bytes) -> Blob:
    return Blob(content, lfs=True)


def test_a_xet_store_that_cannot_be_reached(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf_xet itself runs, in both directions, and gets no token for its store; the same commands
    continue over HTTP."""
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    repo = hub.add("org/m", model)
    hub.xet = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(RunError, match=r"while fetching|fetching .* failed") as pulled:
        ckptmap.pull("hf://org/m", tmp_path / "out")
    with pytest.raises(RunError, match=r"while uploading|uploading failed") as pushed:
        ckptmap.push(model, "org/new")
    for caught in (pulled, pushed):
        assert caught.value.hint.endswith("to go without xet: HF_HUB_DISABLE_XET=1")
    assert hub.asked("xet-read-token") and hub.asked("xet-write-token")
    assert not (tmp_path / "out").exists() and len(hub.repos["org/new"].tree()) == 1
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    ckptmap.pull("hf://org/m", tmp_path / "out")
    assert ckptmap.push(model, "org/new").pull_request == 1
    assert holds(repo.tree(), tmp_path / "out") and holds(hub.repos["org/new"].tree(), model)


def test_what_the_store_refuses_is_said(hub: Hub, model: Path) -> None:
    """No space left in the account: the client raises a ValueError, which is no defect of ours."""
    error = {"code": 422, "message": "Storage quota exceeded"}
    body = json.dumps({"objects": [{"oid": "0" * 64, "size": 1, "error": error}]}).encode()
    hub.faults.append(Fault("POST .*/objects/batch", status=200, body=body))
    with pytest.raises(RunError, match="uploading failed: LFS batch API returned errors"):
        ckptmap.push(model, "org/m")
    assert ckptmap.push(model, "org/m").pull_request == 1


def test_a_pull_request_of_a_stranger_is_not_merged(hub: Hub, model: Path, other: Path) -> None:
    """It bears our title, and holds one file more."""
    repo = hub.add("org/m", model)
    ckptmap.push(other, "org/m", pr=True)
    title = repo.discussions[0].title
    repo.discussions[0].status = "closed"
    theirs = repo.open_pull(title, "", "reader")
    tree = {**repo.tree("refs/pr/1"), "modeling_llama.py": Blob(b"import os", False)}
    repo.commit(f"refs/pr/{theirs.num}", tree)
    done = ckptmap.push(other, "org/m")
    assert done.pull_request == 3
    assert any("pull request 2 is not continued: modeling_llama.py" in note for note in done.notes)
    assert holds(repo.tree(), other) and "modeling_llama.py" not in repo.tree()


def test_main_that_moves_meanwhile(hub: Hub, model: Path, other: Path) -> None:
    """Another file: both are there. The same file: main is as they left it."""
    repo, moved = hub.add("org/m", model), []

    def write(path: str, blob: Blob) -> Any:
        def hook(request: str, done: bool) -> None:
            if not done and request.endswith("/merge") and path not in moved:
                moved.append(path)
                repo.commit(MAIN, {**repo.tree(), path: blob})

        return hook

    hub.hooks.append(write("notes.txt", Blob(b"theirs", False)))
    ckptmap.push(other, "org/m")
    assert holds(repo.tree(), other) and repo.tree()["notes.txt"].content == b"theirs"
    hub.hooks[:] = [write("config.json", Blob(b"{}", False))]
    with pytest.raises(RunError, match=r"pull request 2 cannot be merged: config\.json") as caught:
        ckptmap.push(model, "org/m")
    assert caught.value.code == "CKM714"
    assert repo.tree()["config.json"].content == b"{}" and holds_weights(repo.tree(), other)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_another_model_that_comes_meanwhile(hub: Hub, model: Path, late: bool) -> None:
    """In files of other names, so that Git would merge both: noticed before the merge, or, where it
    came that late, right after it; the same command then leaves one model."""
    repo, theirs = hub.add("org/m"), {"model.safetensors": Blob(b"theirs", True)}

    def hook(request: str, done: bool) -> None:
        if not done and re.search("/merge$" if late else "/commit/refs/pr", request):
            hub.hooks.clear()
            repo.commit(MAIN, {**repo.tree(), **theirs})

    hub.hooks.append(hook)
    with pytest.raises(RunError, match=r"holds model\.safetensors, which somebody wrote") as caught:
        ckptmap.push(model, "org/m")
    assert caught.value.code == "CKM714" and holds(repo.tree(), model) == late
    done = ckptmap.push(model, "org/m")
    assert done.deleted == ["model.safetensors"] and not theirs.keys() & repo.tree().keys()
    assert done.pull_request == 2 and holds(repo.tree(), model)
    assert late or "pull request 1 began from another main: close it" in done.notes


def test_pushes_at_the_same_time(hub: Hub, model: Path, other: Path) -> None:
    """The same model twice and another: every run ends with one of the two, or says what to do."""
    repo = hub.add("org/m", model)

    def push(folder: Path) -> str:
        try:
            ckptmap.push(folder, "org/m")
        except RunError as error:
            return error.code
        return ""

    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(push, [other, other, model]))
    assert set(codes) <= {"", "CKM708", "CKM713", "CKM714"} and "" in codes
    ckptmap.push(other, "org/m")
    assert holds(repo.tree(), other)
    assert len([path for path in repo.tree() if path.endswith(".safetensors")]) == 3


def holds_weights(tree: Tree, folder: Path) -> bool:
    return all(
        tree[file.name].content == file.read_bytes() for file in folder.glob("*.safetensors")
    )


# ------------------------------------------------------------------ refused before anything is sent


def refused(code: str, said: str, *args: Any, **asked: Any) -> None:
    with pytest.raises(DestinationError, match=said) as caught:
        ckptmap.push(*args, **asked)
    assert caught.value.code == code and caught.value.exit_code == 2 and caught.value.hint


def test_refusals(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/public", model)
    hub.add("org/now", model)
    hub.renamed["org/old"] = "org/now"
    refused("CKM712", "is public, and --private was asked for", model, "org/public", private=True)
    refused("CKM711", "was renamed, it is org/now now", model, "org/old")
    refused("CKM707", "this token may not do that while making it", model, "someone/else")
    refused("CKM715", "expected a local checkpoint and no options", "hf://org/now", "org/m")
    refused("CKM715", "expected a local checkpoint and no options", model, "org/m", drop=("x",))
    refused("CKM715", "names another revision", model, "hf://org/m@a", revision="b")
    refused(
        "CKM715",
        "against main, expected no other branch, found 'dev'",
        model,
        "org/m",
        revision="dev",
        pr=True,
    )
    refused("CKM715", "expected a branch, found 'refs/pr/1'", model, "org/m", revision="refs/pr/1")
    monkeypatch.setenv("HF_TOKEN", "")
    refused("CKM707", "there is no token to push with", model, "org/m")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(CkptmapError, match="this token may not do that") as caught:
        ckptmap.push(model, "org/public")
    assert caught.value.code == "CKM707"
    assert not [seen for seen in hub.seen if seen.method == "PUT"]


def test_a_damaged_output_is_not_published(hub: Hub, model: Path, tmp_path: Path) -> None:
    ckptmap.convert(model, tmp_path / "out", to="hf-fp32")
    weights = next((tmp_path / "out").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused("CKM715", "is not what its manifest says", tmp_path / "out", "org/m")


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, "CKM306"), (errno.EMFILE, "CKM313")])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_file_that_cannot_be_read_is_told_by_name(
    hub: Hub,
    model: Path,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: str,
    at: int,
) -> None:
    """While it is compared with what the Hub has, while it is sent, and while that is checked."""
    repo = hub.add("org/m", other)
    reads, read = [0], UploadItem.reading

    @contextmanager
    def failing(self: UploadItem) -> Iterator[None]:
        with read(self):
            reads[0] += 1
            if reads[0] == at:
                raise OSError(number, os.strerror(number))
            yield

    monkeypatch.setattr(UploadItem, "reading", failing)
    with pytest.raises(RunError, match=r"cannot be read to publish it: ") as caught:
        ckptmap.push(model, "org/m")
    assert caught.value.code == code
    assert holds(repo.tree(), other)


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, "CKM306"), (errno.EMFILE, "CKM313")])
def test_a_file_that_cannot_be_hashed_is_told_by_name(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    """The output of the conversion is read for its hashes before anything is sent."""

    def failing(file: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ckptmap.operations.hub.content.sha256_of", failing)
    with pytest.raises(RunError, match=r"\.json: cannot be read to publish it: ") as caught:
        ckptmap.push(model, "org/hashed")
    assert caught.value.code == code


@pytest.mark.parametrize(("number", "code"), [(errno.EINTR, "CKM306"), (errno.EMFILE, "CKM313")])
def test_a_folder_that_cannot_be_listed_is_told_by_name(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    """Not pushed without what lies in it."""
    source = tmp_path / "model"
    shutil.copytree(model, source)
    (source / "more").mkdir()
    listed = os.scandir

    def failing(path: str) -> object:
        if os.fspath(path).endswith("more"):
            raise OSError(number, os.strerror(number), path)
        return listed(path)

    monkeypatch.setattr("os.scandir", failing)
    with pytest.raises(RunError, match=r"cannot be read to publish it: ") as caught:
        ckptmap.push(source, "org/listed")
    assert caught.value.code == code and str(source) in str(caught.value)


def test_a_plan_with_open_ends_makes_no_repository(hub: Hub, tmp_path: Path) -> None:
    import argparse

    torch.save({"model": {"w": torch.zeros(2)}, "args": argparse.Namespace()}, tmp_path / "a.pt")
    with pytest.raises(CkptmapError, match=r"args"):
        ckptmap.push(tmp_path / "a.pt", "org/m", to="full")
    with pytest.raises(CkptmapError, match="no such file"):
        ckptmap.push(tmp_path / "nothing", "org/m")
    assert not hub.repos


# ------------------------------------------------------------------ the command line


def test_the_command(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(model), "org/m", "--to", "hf-fp32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["merged"], document["revision"]) == (1, True, MAIN)
    assert main(["push", str(model), "org/mine", "--private", "--revision", "dev", "-q"]) == 0
    assert hub.repos["org/mine"].private and holds(hub.repos["org/mine"].tree("dev"), model)
    assert "model.safetensors" not in " ".join(hub.repos["org/mine"].tree())
    assert main(["push", str(model), "org/m", "--pr"]) == 0
    assert "waiting for review: http://" in capsys.readouterr().out
    assert main(["push", str(model), "org/m", "--max-shard-size", "1GB"]) == 2
    assert "need --to SETUP" in capsys.readouterr().err


def test_large_files_go_in_several_commits(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmap.operations.hub import staging as stage

    monkeypatch.setattr(stage, "BATCH_NBYTES", 3_000_000)
    folder = wide(tmp_path / "m")
    ckptmap.push(folder, "org/m")
    repo = hub.repos["org/m"]
    assert len(shown_on(repo, "refs/pr/1")) >= 4 and len(shown_on(repo)) == 2
    assert holds(repo.tree(), folder)


# ------------------------------------------------------------------ names


def test_files_of_git_are_never_pushed(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Such as a clone in a folder below; git's own spellings elsewhere are refused."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for name in (".git/hooks/post-checkout", "below/.git/hooks/post-checkout", "below/.cache/x"):
        (copy / name).parent.mkdir(parents=True)
        (copy / name).write_text("#!/bin/sh")
    report = ckptmap.push(copy, "org/new")
    assert holds(hub.repos["org/new"].tree(), model)
    left = [note for note in report.notes if note.startswith("left behind")]
    assert left == [
        "left behind: .git/hooks/post-checkout",
        "left behind: below/.cache/x",
        "left behind: below/.git/hooks/post-checkout",
    ]


@pytest.mark.parametrize("name", [".GIT/hooks/x", "below/.Git/config", "git~1/hooks/x", "a\\b"])
def test_names_that_no_repository_should_hold_are_refused(
    hub: Hub, model: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("#!/bin/sh")
    with pytest.raises(DestinationError, match="nothing was pushed") as caught:
        ckptmap.push(copy, "org/new")
    assert caught.value.code == "CKM715" and "org/new" not in hub.repos


def test_folders_that_nobody_pushes_into(hub: Hub, model: Path) -> None:
    for folder, code in ((".git/hooks", "CKM701"), ("a/.GIT", "CKM701"), ("a/.cache", "CKM715")):
        with pytest.raises(CkptmapError) as caught:
            ckptmap.push(model, f"hf://org/new/{folder}")
        assert caught.value.code == code and "org/new" not in hub.repos
