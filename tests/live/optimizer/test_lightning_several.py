"""Lightning's own .ckpt of a module with two optimizers and two schedulers: the optimizers that are given take its
list of states in their order, and training goes on as the run that was not stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptmap
from ckptmap.errors import LoadError, SourceError

pl = pytest.importorskip("pytorch_lightning")
ROWS = torch.randn(10, 4, 4, generator=torch.Generator().manual_seed(3))


class Gan(pl.LightningModule):  # type: ignore[misc,name-defined]
    """The optimizer of the part that comes second in the model is the first one."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.named = named
        self.maker = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.judge = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def configure_optimizers(self) -> Any:
        def params(part: nn.Module, head: str) -> Any:
            named = [(f"{head}.{name}", param) for name, param in part.named_parameters()]
            return named if self.named else [param for _, param in named]

        judge = params(self.judge, "judge")
        groups = [{"params": judge[:2]}, {"params": judge[2:], "lr": 0.2}]
        first = torch.optim.AdamW(groups, lr=0.1)
        second = torch.optim.AdamW(params(self.maker, "maker"), lr=1e-2)
        schedules = [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.9),
            torch.optim.lr_scheduler.StepLR(second, 2, 0.5),
        ]
        return [first, second], schedules

    def losses(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [self.judge(rows).square().mean(), (self.maker(rows) - rows).square().mean()]

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()


def fitted(steps: int, path: Path, named: bool = False) -> Gan:
    torch.manual_seed(0)
    model = Gan(named)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=None)  # type: ignore[arg-type,var-annotated]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=2 * steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=path.parent,
        )  # fmt: skip
        trainer.fit(model, loader)
    trainer.save_checkpoint(path)
    return model


def continued(model: Gan, optimizers: Any, schedulers: Any, first: int, last: int) -> None:
    for rows in ROWS[first:last]:
        for optimizer, loss in zip(optimizers, model.losses(rows), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


@pytest.fixture(scope="module", params=[False, True], ids=["numbered", "named"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path, Gan]:
    """Whether groups name their parameters, a .ckpt after 4 steps, and the model after 8."""
    folder = tmp_path_factory.mktemp("lightning")
    fitted(4, folder / "half.ckpt", request.param)
    return request.param, folder / "half.ckpt", fitted(8, folder / "whole.ckpt", request.param)


@pytest.mark.parametrize("form", ["list", "dict", "reversed"])
def test_two_optimizers_go_on(form: str, saved: tuple[bool, Path, Gan]) -> None:
    """Where the file names parameters, the order in which they are given does not matter."""
    named, path, whole = saved
    model = Gan(named)
    optimizers, schedulers = model.configure_optimizers()
    given: Any = (optimizers, schedulers)
    if form == "dict":
        given = tuple(dict(zip(("judge", "maker"), ones, strict=True)) for ones in given)
    if form == "reversed" and named:
        given = (optimizers[::-1], schedulers)
    report = ckptmap.load(path, model, *given)
    assert report.state is not None and len(report.state.loaded) == 16
    assert not report.state.initialised and not report.state.left
    continued(model, optimizers, schedulers, 4, 8)
    truth, found = dict(whole.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(truth[name], found[name]) for name in truth)


def test_others_than_were_saved_are_refused(saved: tuple[bool, Path, Gan]) -> None:
    named, path, _ = saved
    model = Gan()
    (first, second), _ = model.configure_optimizers()
    with pytest.raises(
        LoadError, match="the state of 2 optimizers, and ckptmap carries one"
    ) as one:
        ckptmap.load(path, model, first)
    assert "load(path, model, [first, second])" in one.value.hint
    third = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(LoadError, match="has the states of 2 optimizers, and 3 are given"):
        ckptmap.load(path, model, [first, second, third])
    if not named:
        with pytest.raises(SourceError) as order:
            ckptmap.load(path, model, [second, first])
        assert order.value.code == "CKM207"
