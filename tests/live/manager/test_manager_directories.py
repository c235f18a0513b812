"""`CheckpointManager` over directories that other programs wrote: Trainer, accelerate, torchtitan's DCP;
and the position of torchdata's StatefulDataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptmap
from ckptmap.operations.list_steps import list_steps
from tests.support.files import flip_byte_of


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What transformers' Trainer saved at steps 9 and 10, and the trainer."""
    folder = tmp_path_factory.mktemp("trainer")
    words = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10, per_device_train_batch_size=4, report_to=[],
        save_steps=0.9, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(llama(0), arguments, train_dataset=rows)
    trainer.train()
    return folder, trainer


def test_trainer(trained: tuple[Path, Any]) -> None:
    """checkpoint-10 comes after checkpoint-9; weights and moments are those of the trainer."""
    folder, trainer = trained
    manager = ckptmap.CheckpointManager(folder)
    assert manager.steps() == [9, 10] and manager.latest() == folder / "checkpoint-10"
    assert [one.is_managed for one in list_steps(folder).steps] == [False, False]
    model = llama(1)
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    report = manager.restore(model, optimizer)
    assert report is not None and report.step == 10 and report.missing == ()
    theirs = trainer.optimizer.optimizer.state
    pairs = zip(model.parameters(), trainer.model.parameters(), strict=True)
    for mine, other in pairs:
        assert torch.equal(mine, other)
        assert torch.equal(optimizer.state[mine]["exp_avg"], theirs[other]["exp_avg"])


def test_an_optimizer_with_other_groups_than_trainer(trained: tuple[Path, Any]) -> None:
    """config.json names the numbers, as for `load`. It was refused: the live groups were said to be a given order."""
    folder, trainer = trained
    model = llama(1)
    optimizer = torch.optim.AdamW(model.parameters())
    report = ckptmap.CheckpointManager(folder).restore(model, optimizer)
    assert report is not None and report.step == 10
    theirs = trainer.optimizer.optimizer.state
    for mine, other in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], theirs[other]["exp_avg"])


def test_a_run_that_leaves_trainer(trained: tuple[Path, Any]) -> None:
    """The manager saves beside Trainer's directories, and removes none of them."""
    folder, _ = trained
    before = [path.name for path in folder.iterdir()]
    with ckptmap.CheckpointManager(folder, keep=1) as manager:
        model = llama(2)
        for step in (11, 12):
            manager.save(step, model)
    try:
        assert {path.name for path in folder.iterdir()} == {*before, "step-12", "latest"}
        flip_byte_of(folder / "step-12", "model.norm.weight")
        report = manager.restore(llama(3))
        assert report is not None and report.step == 10 and "step-12" in report.skipped[0]
    finally:
        for path in (folder / "step-12").iterdir():
            path.unlink()
        (folder / "step-12").rmdir()


class Titan(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in range(11)})


def test_torchtitan(tmp_path: Path) -> None:
    """As torchtitan's `_save` writes it, by its calls of `dcp.save`: weights at the root, optimizer state
    by flattened FQNs beside them, step-9 before step-10. (Its trainer is not installed here.)"""
    for step in (9, 10):
        model = Titan(step)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for layer in model.layers.values():
            layer(torch.ones(4)).sum().backward()
        optimizer.step()
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        states = {
            **model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
            "lr_scheduler": {"last_epoch": step},
            "train_state": {"step": torch.tensor(step), "ntokens_seen": torch.tensor(7)},
        }
        dcp.save(states, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    manager = ckptmap.CheckpointManager(tmp_path)
    assert manager.steps() == [9, 10]
    again = Titan(0)
    other = torch.optim.AdamW(again.parameters())
    report = manager.restore(again, other)
    assert report is not None and report.step == 10 and report.missing == report.unexpected == ()
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader(workers: int, tmp_path: Path) -> None:
    """Resumed in the middle of an epoch, in random order, it yields the batches that were left."""

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(
            range(40), batch_size=4, shuffle=True, num_workers=workers, generator=generator
        )  # type: ignore[var-annotated]

    first, model = loader(), nn.Linear(2, 2)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    with ckptmap.CheckpointManager(tmp_path) as manager:
        manager.save(4, model, stateful={"loader": first}, extra_per_rank={"l": first.state_dict()})
    left = [batch.tolist() for batch in batches]
    again = loader()
    report = manager.restore(model, stateful={"loader": again})
    assert report is not None and [batch.tolist() for batch in again] == left and len(left) == 6
    assert report.notes == ()
    once_more = loader()
    once_more.load_state_dict(report.extra_per_rank["l"])
    assert [batch.tolist() for batch in once_more] == left


def test_a_loader_that_draws_from_torchs_stream_gives_it_back(tmp_path: Path) -> None:
    """The seed that its next iterator draws: dropout after it has the random numbers of a run that went on."""
    loader: Any = StatefulDataLoader(range(8), batch_size=2, shuffle=True)
    batches = iter(loader)
    next(batches)
    model = nn.Linear(2, 2)
    ckptmap.save(tmp_path / "a", model, stateful={"data": loader}).wait()
    left, then = [batch.tolist() for batch in batches], torch.rand(1)
    again: Any = StatefulDataLoader(range(8), batch_size=2, shuffle=True)
    report = ckptmap.load(tmp_path / "a", model, stateful={"data": again}, exact=True)
    assert [batch.tolist() for batch in again] == left
    assert torch.rand(1) == then
    assert report.notes == ()
