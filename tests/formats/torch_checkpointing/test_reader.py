"""What torch_checkpointing's own manager saved is read back bit for bit, and converted."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptmap
from ckptmap.errors import PlanError, SourceError
from ckptmap.formats.detect import look
from ckptmap.formats.torch_checkpointing.reader import TorchCheckpointing
from ckptmap.operations.diff import diff
from tests.support.torch_checkpointing_cases import CASES

pytestmark = pytest.mark.ranks
Saves = Callable[[int, str], Path]
ALL = [(world, name) for world, cases in CASES.items() for name in cases]
TELLING = [
    (1, "plain"),
    (2, "plain"),
    (2, "fsdp2"),
    (4, "fsdp2"),
    (4, "tp"),
    (4, "stages"),
    (4, "none"),
]
"""Cases whose files can be joined without `metadata.pkl`."""


def moments(state: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return (FQN, name) -> value of the state of an optimizer item, in each of the forms."""
    if "state" not in state:  # flat
        keys = [key for key in state if key.startswith("state.")]
        return {(k[6:].rpartition(".")[0], k.rpartition(".")[2]): state[k] for k in keys}
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return {
        (names[key] if isinstance(key, int) else key, name): value
        for key, of_param in state["state"].items()
        for name, value in of_param.items()
    }


def check(path: Path, truth: dict[str, Any]) -> None:
    with ckptmap.open(path) as ckpt:
        assert set(ckpt) == set(truth["model"])
        for fqn, tensor in truth["model"].items():
            read = ckpt[fqn].read()
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), fqn
        state = moments(truth.get("optimizer", {"state": {}, "param_groups": []}))
        assert sum(map(len, ckpt.optimizer.values())) == len(state)
        for (fqn, name), value in state.items():
            moment = ckpt.optimizer[fqn][name]
            assert torch.equal(moment.read(), value), (fqn, name)
        shadows = [t for path, t in ckpt.other.items() if path[:2] == ("ema", "shadows")]
        for shadow, tensor in zip(shadows, truth["ema"]["shadows"], strict=True):
            assert torch.equal(shadow.read(), tensor)
        assert not ckpt.refused


@pytest.mark.parametrize(("world", "name"), ALL)
def test_bit_for_bit(saves: Saves, world: int, name: str) -> None:
    folder = saves(world, name)
    check(folder / "step-10", torch.load(folder / "truth.pt"))


@pytest.mark.parametrize(("world", "name"), TELLING)
def test_a_later_save_without_metadata(saves: Saves, world: int, name: str) -> None:
    """A manager that blocks writes metadata.pkl once: DTensors tell the same, and plain tensors are copies."""
    folder = saves(world, name)
    assert not (folder / "step-20" / "metadata.pkl").exists()
    check(folder / "step-20", torch.load(folder / "truth.pt"))


def test_a_later_save_that_only_metadata_can_join(saves: Saves, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saves(2, "layouts"), folder)
    with pytest.raises(
        SourceError, match=r"metadata.pkl is missing.*model_0.safetensors"
    ) as refused:
        ckptmap.open(folder / "step-20")
    command = refused.value.hint.rpartition(": ")[2].split()
    assert command[0] == "cp"
    shutil.copy(command[1], command[2])  # what the hint says
    check(folder / "step-20", torch.load(folder / "truth.pt"))


def test_metadata_of_version_1(saves: Saves, tmp_path: Path) -> None:
    """It lists the paths of all items in one dict, and the layouts by rank. The library reads it, too."""
    from torch_checkpointing.distributed_metadata import DistributedMetadata

    save = tmp_path / "save"
    shutil.copytree(saves(2, "layouts") / "step-10", save)
    new = pickle.loads((save / "metadata.pkl").read_bytes())
    old: dict[str, Any] = {"world_size": 2, "metadata": {}, "rank_to_layout_info_mappings": {}}
    for key, item in new["metadata"].items():
        for path, groups in item["nested_path_to_metadata"].items():
            old["metadata"][json.dumps([key, *json.loads(path)])] = groups
        for rank, layout in item["rank_to_layout_info"].items():
            old["rank_to_layout_info_mappings"].setdefault(rank, {})[key] = layout
    assert DistributedMetadata.from_dict(old) == DistributedMetadata.from_dict(new)
    (save / "metadata.pkl").write_bytes(pickle.dumps(old))
    check(save, torch.load(saves(2, "layouts") / "truth.pt"))


@pytest.mark.parametrize("name", ["tp", "tp_safe"])
def test_metadata_without_split_factors(saves: Saves, tmp_path: Path, name: str) -> None:
    """As 0.1.0 writes them: DTensors in the files still tell the order of the cuts, bare parts do not."""
    save = tmp_path / "save"
    shutil.copytree(saves(4, name) / "step-10", save)
    tree = pickle.loads((save / "metadata.pkl").read_bytes())
    changed = 0
    for item in tree["metadata"].values():
        for groups in item["nested_path_to_metadata"].values():
            for placement in groups[0]["sharding_metadata"]["data"]["placements"]:
                if placement.pop("split_factor", None) is not None:
                    placement["type"], changed = "Shard", changed + 1
    assert changed
    (save / "metadata.pkl").write_bytes(pickle.dumps(tree))
    if name == "tp":
        check(save, torch.load(saves(4, "tp") / "truth.pt"))
        return
    with pytest.raises(SourceError, match="does not tell in which order") as refused:
        ckptmap.open(save)
    assert refused.value.code == "CKM112"


def test_consolidated_copies_beside_the_parts(saves: Saves, tmp_path: Path) -> None:
    """The library's own consolidation writes a Hugging Face directory into the save itself."""
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    save = tmp_path / "save"
    shutil.copytree(saves(2, "layouts") / "step-10", save)
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    consolidate_hf_safetensors_checkpoint(str(save), storage_config=storage)
    assert (save / "model.safetensors.index.json").exists()
    check(save, torch.load(saves(2, "layouts") / "truth.pt"))
    with ckptmap.open(save) as ckpt:
        assert ckpt.index.container == "torch-checkpointing"
        assert ckpt.notes == ["left behind: blob.bin, model-00001-of-00001.safetensors"]


def test_the_other_items(saves: Saves) -> None:
    with ckptmap.open(saves(2, "layouts") / "step-10") as ckpt:
        extra = ckpt.extra
        assert extra["step"] == 10 and extra["lr_scheduler"] == {"last_epoch": 2}
        assert extra["settings"] == {"lr": 0.5, "names": ["a"]}  # JSON
        assert extra["train_state"]["loss"] is None
        ranks = {"dp_rank_0": b"\0", "dp_rank_1": b"\1", "world_size": 2}
        assert extra["dataloader"] == ranks  # one key of each rank, as in DCP
        assert [extra["per_rank"][f"rank{rank}"]["random"]["seed"] for rank in (0, 1)] == [5, 5]
        for rank in (0, 1):
            random = ckpt.other["per_rank", f"rank{rank}", "random", "cpu"].read()
            assert random.tolist() == [rank, 1]
        assert ckpt.other["train_state", "ntokens"].read().item() == 20
        assert ckpt.world_size == 2 and ckpt.notes == ["left behind: blob.bin"]


def test_groups_that_list_names_alone(saves: Saves) -> None:
    """`optimizer_transform_pre` leaves `params` out of the groups, and puts a version beside them."""
    with ckptmap.open(saves(2, "fsdp2") / "step-10") as ckpt:
        (group,) = ckpt.optimizer_groups
        assert group["params"] == list(ckpt.optimizer) and group["lr"] == 0.01
        assert "_optimizer_state_format_version" not in str(ckpt.optimizer_reader.raw.rest)


@pytest.mark.parametrize("setup", ["hf", "full", "fsdp2", "dcp-hf"])
def test_conversions(saves: Saves, tmp_path: Path, setup: str) -> None:
    source = saves(4, "tp") / "step-10"
    ckptmap.convert(source, tmp_path / "out", to=setup)
    assert ckptmap.verify(tmp_path / "out").ok
    with ckptmap.open(source) as before, ckptmap.open(tmp_path / "out") as after:
        assert set(before) == set(after)
        for fqn in before:
            assert torch.equal(before[fqn].read(), after[fqn].read()), fqn


def test_the_library_loads_what_it_becomes(saves: Saves, tmp_path: Path) -> None:
    """`--to torch-checkpointing` is answered with `--to hf`: its manager loads weights from there, in any world."""
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat

    from tests.ranks.torch_checkpointing_saves import manager, net

    with pytest.raises(PlanError) as refused:
        ckptmap.convert(saves(4, "tp") / "step-10", tmp_path / "x", to="torch-checkpointing")
    assert refused.value.hint.endswith("begins with --to hf")
    ckptmap.convert(saves(4, "tp") / "step-10", tmp_path / "hf", to="hf")
    state = net(99).state_dict()
    form = HuggingFaceSafetensorsDistributedMetadataFormat
    manager({}).load(tmp_path / "hf", into={"model": state}, metadata_format=form)
    truth = torch.load(saves(4, "tp") / "truth.pt")["model"]
    for fqn, tensor in state.items():
        assert torch.equal(tensor, truth[fqn]), fqn


def test_nothing_differs_from_its_conversion(saves: Saves, tmp_path: Path) -> None:
    source = saves(2, "flat") / "step-10"
    ckptmap.convert(source, tmp_path / "out", to="full")
    report = diff(source, tmp_path / "out", values=True)
    assert not (report.changed or report.only_a or report.only_b or report.settings)
    assert report.same == 14 + 33 + 2 + 1 + 2  # weights, moments, ema, ntokens, random


def test_names_of_torchtitan(tmp_path: Path) -> None:
    """A model in torchtitan's names, weights and moments, becomes that of transformers by `--names hf`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    pytest.importorskip("torch_checkpointing")
    from tests.ranks.torch_checkpointing_saves import manager

    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    ckptmap.save(tmp_path / "hf", model, optimizer).wait()
    config.save_pretrained(tmp_path / "hf")
    given: dict[str, Any] = {"to": "full", "config_from": tmp_path / "hf/config.json"}
    ckptmap.convert(tmp_path / "hf", tmp_path / "titan.pt", names="llama/torchtitan", **given)
    titan = torch.load(tmp_path / "titan.pt")
    assert "layers.1.attention.qkv_linear.wq.weight" in titan["model"]
    manager({}).save(
        str(tmp_path / "step-10"), {"model": titan["model"], "optimizer": titan["optimizer"]}
    )
    ckptmap.convert(tmp_path / "step-10", tmp_path / "again.pt", names="hf", **given)
    again = torch.load(tmp_path / "again.pt")
    assert again["model"].keys() == model.state_dict().keys()
    assert all(torch.equal(again["model"][k], v) for k, v in model.state_dict().items())
    for fqn, param in model.named_parameters():
        for name, value in optimizer.state[param].items():
            assert torch.equal(again["optimizer"]["state"][fqn][name], value), (fqn, name)


def test_claims_nothing_else(saves: Saves, tmp_path: Path) -> None:
    """Neither epochs that one process saved side by side, nor another program's metadata.pkl."""
    for epoch in (0, 1):
        torch.save({"w": torch.ones(3)}, tmp_path / f"model_{epoch}.pt")
        torch.save({"state": {}}, tmp_path / f"optimizer_{epoch}.pt")
    assert not TorchCheckpointing().claims(look(tmp_path))
    (tmp_path / "metadata.pkl").write_bytes(b"\x80\x04}\x94.")
    assert not TorchCheckpointing().claims(look(tmp_path))
    assert TorchCheckpointing().claims(look(saves(2, "fsdp2") / "step-20"))


def test_a_run_of_steps(saves: Saves, tmp_path: Path) -> None:
    shutil.copytree(saves(2, "fsdp2"), tmp_path / "run")
    shutil.copytree(tmp_path / "run/step-20", tmp_path / "run/tmp_step-30")
    (tmp_path / "run/truth.pt").unlink()
    with pytest.raises(SourceError, match="holds some: step-10, step-20;") as refused:
        ckptmap.open(tmp_path / "run")
    assert refused.value.hint.endswith("step-20")
    with ckptmap.open(tmp_path / "run/tmp_step-30") as ckpt:
        assert "until all ranks have written it" in ckpt.notes[0]
