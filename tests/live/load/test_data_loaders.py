"""Runs with torchdata's loaders, stopped and resumed, against runs that were not stopped: bit for bit, or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptmap
from ckptmap.errors import LoadError
from ckptmap.live.model.load_report import LoadReport

ROWS = [torch.randn(4, generator=torch.Generator().manual_seed(row)) for row in range(8)]
END = 9
"""Steps of a run; an epoch has four."""


def a_loader(own: bool = False, **keywords: Any) -> Any:
    generator = torch.Generator().manual_seed(3) if own else None
    return StatefulDataLoader(
        keywords.pop("rows", ROWS), batch_size=2, generator=generator, **keywords
    )


class Run:
    """A small model with dropout, its optimizer and its loader."""

    def __init__(self, loader: Callable[[], Any], rate: float = 0.5) -> None:
        torch.manual_seed(5)
        random.seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(rate), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.loader = loader()
        self.seen: list[torch.Tensor] = []

    def train(self, step: int = 0, save: Callable[[Run, str], None] | None = None) -> Run:
        while step < END:
            epoch_of = getattr(self.loader.sampler, "set_epoch", lambda _: None)
            epoch_of(step // 4)
            for rows in self.loader:
                self.optimizer.zero_grad()
                self.model(rows).pow(2).mean().backward()
                self.optimizer.step()
                self.seen.append(rows)
                step += 1
                if save is not None:
                    save(self, f"{step}")
                if step == END:
                    return self
            if save is not None:
                save(self, f"after {step}")
        return self

    def equals(self, other: Run) -> bool:
        ours, theirs = self.model.state_dict().values(), other.model.state_dict().values()
        return all(map(torch.equal, ours, theirs))

    def restore(self, path: Path, **keywords: Any) -> LoadReport:
        torch.manual_seed(99)
        random.seed(99)
        return ckptmap.load(path, self.model, self.optimizer, exact=True, **keywords)


def as_stateful(root: Path, *whens: str) -> Callable[[Run, str], None]:
    def save(run: Run, when: str) -> None:
        if when in whens:
            objects = {"loader": run.loader}
            ckptmap.save(root / when, run.model, run.optimizer, stateful=objects).wait()

    return save


def as_extra(root: Path, argument: str) -> Callable[[Run, str], None]:
    def save(run: Run, when: str) -> None:
        if when == "2":
            values: Any = {argument: {"loader": run.loader.state_dict()}}
            ckptmap.save(root / when, run.model, run.optimizer, **values).wait()

    return save


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("workers", "persistent", "shuffle"),
    [(0, False, False), (0, False, True), (2, False, True), (2, True, True), (2, True, False)],
)
def test_a_loader_goes_on_as_if_it_had_not_stopped(
    workers: int, persistent: bool, shuffle: bool, own: bool, tmp_path: Path
) -> None:
    """In the middle of an epoch, at its last batch, and after it; beside dropout, which draws from torch's stream."""

    def make() -> Any:
        return a_loader(own, shuffle=shuffle, num_workers=workers, persistent_workers=persistent)

    whens = ("1", "4", "after 4") if workers else ("1", "4", "after 4", "6", "after 8")
    whole = Run(make).train(save=as_stateful(tmp_path, *whens))
    for when in whens:
        again, step = Run(make), int(when.split()[-1])
        report = again.restore(tmp_path / when, stateful={"loader": again.loader})
        again.train(step)
        assert not report.notes and not report.inexact
        assert all(map(torch.equal, again.seen, whole.seen[step:])), f"other batches: {when}"
        assert again.equals(whole), when


class Noisy:
    """Rows with noise that a worker draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> torch.Tensor:
        return ROWS[row] + self.draw()


class Keeping(Noisy):
    """Keeps the stream from which it draws."""

    def state_dict(self) -> dict[str, Any]:
        return {"stream": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["stream"])


def of_torch() -> float:
    return torch.rand(()).item()


def seeded_by_the_row() -> float:
    torch.manual_seed(3)
    return of_torch()


@pytest.mark.parametrize(
    ("rows", "persistent", "refused", "fine"),
    [
        (Noisy(of_torch), False, ("1",), ("after 4",)),
        (Noisy(random.random), True, ("after 4",), ()),
        (Noisy(numpy.random.rand), False, ("2",), ("4",)),
        (Noisy(seeded_by_the_row), False, (), ("1",)),
        (Keeping(random.random), True, (), ("1", "after 4")),
    ],
)
def test_rows_that_draw_in_workers_go_on_or_are_refused(
    rows: Any, persistent: bool, refused: tuple[str, ...], fine: tuple[str, ...], tmp_path: Path
) -> None:
    """torchdata saves the seed of workers, and not how much they have drawn."""

    def make() -> Any:
        return a_loader(rows=rows, num_workers=2, persistent_workers=persistent, shuffle=True)

    whole = Run(make).train(save=as_stateful(tmp_path, *refused, *fine))
    for when in (*refused, *fine):
        again, step = Run(make), int(when.split()[-1])
        again.restore(tmp_path / when, stateful={"loader": again.loader})
        if when in refused:
            with pytest.raises(
                LoadError, match=r"stateful\['loader'\]: rows .* draw random numbers"
            ) as no:
                again.train(step)
            assert no.value.code == "CKM507" and "\n" not in no.value.message
        else:
            assert again.train(step).equals(whole), when
    if refused:
        again = Run(make)
        objects: Any = {"loader": again.loader}
        ckptmap.load(tmp_path / refused[0], again.model, again.optimizer, stateful=objects)
        again.train(4)


def test_a_loader_that_was_saved_before_its_first_batch(tmp_path: Path) -> None:
    """Its state makes an iterator, which draws the seed; the run that goes on takes that iterator."""
    whole, again = (Run(lambda: a_loader(shuffle=True)) for _ in range(2))
    as_stateful(tmp_path, "0")(whole, "0")
    whole.train()
    again.restore(tmp_path / "0", stateful={"loader": again.loader})
    assert again.train().equals(whole)


def test_a_loader_is_loaded_twice_copied_or_not_used(tmp_path: Path) -> None:
    def make() -> Any:
        return a_loader(shuffle=True)

    whole = Run(make).train(save=as_stateful(tmp_path, "2", "4"))
    again = Run(make)
    again.restore(tmp_path / "4", stateful={"loader": again.loader})
    again.restore(tmp_path / "2", stateful={"loader": again.loader})
    unused, again.loader = again.loader, copy.deepcopy(again.loader)
    assert again.train(2).equals(whole)
    before = torch.get_rng_state()
    assert unused.state_dict()["_num_yielded"] == 2  # it makes the iterator
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(batch) for batch in unused] == [2, 2]


@pytest.mark.parametrize("argument", ["extra", "extra_per_rank"])
def test_a_state_in_extra_is_refused_beside_dropout_and_taken_with_its_loader(
    argument: str, tmp_path: Path
) -> None:
    def make() -> Any:
        return a_loader()

    whole = Run(make).train(save=as_extra(tmp_path, argument))
    again = Run(make)
    text = (
        r"extra\['loader'\] is the state of a StatefulDataLoader .* give the loader to load, as"
        r" stateful={'loader': loader}; dropout \(1 module: 1\) draws from it, too"
    )
    with pytest.raises(LoadError, match=text):
        again.restore(tmp_path / "2")
    report = again.restore(tmp_path / "2", stateful={"loader": again.loader})
    assert again.train(2).equals(whole) and not report.notes
    report = ckptmap.load(tmp_path / "2", again.model, again.optimizer)
    assert any("extra['loader']" in text for text in report.inexact)


def test_a_state_in_extra_without_anything_that_draws_is_a_note(tmp_path: Path) -> None:
    whole = Run(a_loader, rate=0.0).train(save=as_extra(tmp_path, "extra"))
    again = Run(a_loader, rate=0.0)
    report = again.restore(tmp_path / "2")
    again.loader.load_state_dict(report.extra["loader"])
    assert again.train(2).equals(whole)
    (note,) = report.notes
    assert "extra['loader']" in note and "stateful={'loader': loader}" in note


def test_an_own_generator_that_shuffles_must_be_saved(tmp_path: Path) -> None:
    """torchdata does not save what the seed has drawn from it: the order of the next epoch was another."""

    def make() -> Any:
        return a_loader(own=True, shuffle=True)

    Run(make, 0.0).train(save=as_extra(tmp_path, "extra"))
    again = Run(make, 0.0)
    with pytest.raises(
        LoadError, match="the next epoch's order is another: give the loader to load"
    ):
        again.restore(tmp_path / "2")
    with pytest.raises(LoadError, match=r"no state of its generator= is recorded"):
        again.restore(tmp_path / "2", stateful={"loader": again.loader})


@pytest.mark.parametrize("own", [False, True])
def test_a_generator_in_one_run_only_is_refused(own: bool, tmp_path: Path) -> None:
    run, again = Run(lambda: a_loader(own), 0.0), Run(lambda: a_loader(not own), 0.0)
    run.train(save=as_stateful(tmp_path, "2"))
    text = (
        "had a generator= of its own, and has no"
        if own
        else "had no generator= of its own, and has a"
    )
    with pytest.raises(LoadError, match=text):
        again.restore(tmp_path / "2", stateful={"loader": again.loader})


def test_the_order_of_torchs_samplers_is_not_saved(tmp_path: Path) -> None:
    """In the middle of an epoch it is lost; at its end the next is drawn from the restored stream."""

    def make() -> Any:
        return a_loader(sampler=RandomSampler(ROWS))

    def make_own() -> Any:
        generator = torch.Generator().manual_seed(1)
        return a_loader(sampler=SubsetRandomSampler(range(8), generator=generator))

    whole = Run(make).train(save=as_stateful(tmp_path / "a", "2", "4"))
    again = Run(make)
    with pytest.raises(LoadError, match="the order of torch's RandomSampler is not saved"):
        again.restore(tmp_path / "a/2", stateful={"loader": again.loader})
    again.restore(tmp_path / "a/4", stateful={"loader": again.loader})
    assert again.train(4).equals(whole)
    again = Run(make_own)
    again.train(save=as_stateful(tmp_path / "b", "4"))
    with pytest.raises(LoadError, match="the order of torch's SubsetRandomSampler is not saved"):
        again.restore(tmp_path / "b/4", stateful={"loader": again.loader})


class Shuffled(Sampler[int]):
    """A sampler of the caller's, that draws its order from Python's random stream."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(8))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 8


def test_a_sampler_that_draws_anew_is_refused_when_it_does(tmp_path: Path) -> None:
    def make() -> Any:
        return a_loader(sampler=Shuffled())

    whole = Run(make).train(save=as_stateful(tmp_path, "2", "4"))
    again = Run(make)
    again.restore(tmp_path / "2", stateful={"loader": again.loader})
    with pytest.raises(
        LoadError, match=r"stateful\['loader'\]: its sampler, a Shuffled, has drawn"
    ):
        iter(again.loader)
    again.restore(tmp_path / "4", stateful={"loader": again.loader})
    assert again.train(4).equals(whole)
    ckptmap.load(tmp_path / "2", again.model, stateful={"loader": again.loader})
    assert len(list(again.loader)) == 2, "not refused without exact=True"


def test_set_epoch_may_follow_the_load(tmp_path: Path) -> None:
    """The iterator is made at `iter()`, not before: the order is that of the epoch that the caller sets."""

    def make() -> Any:
        return a_loader(sampler=DistributedSampler(ROWS, num_replicas=1, rank=0, seed=4))

    whole = Run(make).train(save=as_stateful(tmp_path, "6"))
    again = Run(make)
    again.restore(tmp_path / "6", stateful={"loader": again.loader})
    assert again.train(6).equals(whole)


class Noisy(IterableDataset):  # type: ignore[type-arg]
    """Rows with noise of torch's stream, which are drawn again to find the position."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (row + torch.randn(4) for row in ROWS)


def test_samples_that_are_drawn_again_move_no_stream(tmp_path: Path) -> None:
    def make() -> Any:
        return a_loader(rows=Noisy())

    whole = Run(make).train(save=as_stateful(tmp_path, "2"))
    again = Run(make)
    again.restore(tmp_path / "2", stateful={"loader": again.loader})
    assert again.train(2).equals(whole)


class Positioned(DataLoader):  # type: ignore[type-arg]
    """Another loader with a state: nobody knows what it draws, and when."""

    def state_dict(self) -> dict[str, object]:
        return {"at": 2}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.at = state["at"]


def test_another_loader_is_refused_beside_dropout(tmp_path: Path) -> None:
    def make() -> Any:
        return Positioned(ROWS, batch_size=2)  # type: ignore[var-annotated]

    Run(make).train(save=as_stateful(tmp_path, "2"))
    again = Run(make)
    with pytest.raises(
        LoadError, match="this Positioned draws a seed from torch's random stream: give it a gen"
    ):
        again.restore(tmp_path / "2", stateful={"loader": again.loader})
    ckptmap.save(tmp_path / "own", again.model, stateful={"loader": again.loader}).wait()
    again.loader.generator = torch.Generator()
    assert not ckptmap.load(tmp_path / "2", again.model, stateful={"loader": again.loader}).notes
    quiet = Run(make, rate=0.0)
    ckptmap.save(tmp_path / "b", quiet.model, stateful={"loader": quiet.loader}).wait()
    report = ckptmap.load(
        tmp_path / "b", quiet.model, exact=True, stateful={"loader": quiet.loader}
    )
    (note,) = report.notes
    assert "stateful['loader']" in note and "generator=" in note


class Holder:
    """The caller's object that has a loader inside."""

    def __init__(self, loader: Any) -> None:
        self.inner = loader

    def state_dict(self) -> dict[str, Any]:
        return {"inside": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inside"])


def test_a_loader_inside_of_another_object_is_refused_beside_dropout(tmp_path: Path) -> None:
    run = Run(a_loader)
    next(iter(run.loader))
    ckptmap.save(tmp_path / "a", run.model, stateful={"data": Holder(run.loader)}).wait()
    with pytest.raises(
        LoadError, match=r"stateful\['data'\] holds the state of a StatefulDataLoader"
    ):
        ckptmap.load(tmp_path / "a", run.model, exact=True, stateful={"data": Holder(run.loader)})


def test_accelerates_loader(tmp_path: Path) -> None:
    """It wraps torchdata's, and asks for one batch ahead."""
    from accelerate.data_loader import DataLoaderShard

    def make() -> Any:
        return DataLoaderShard(
            ROWS, use_stateful_dataloader=True, batch_size=2, shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip

    whole = Run(make).train(save=as_stateful(tmp_path, "1", "4", "6"))
    for step in (1, 4, 6):
        again = Run(make)
        again.restore(tmp_path / str(step), stateful={"loader": again.loader})
        assert again.train(step).equals(whole), step
