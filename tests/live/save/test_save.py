"""`ckptmap.save`: what it writes, on which ranks, and what it refuses."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptmap
from ckptmap.errors import ArgumentError, DestinationError, LoadError, PlanError
from ckptmap.live.model import rng_state as streams
from tests.corpus.ranks import run_ranks
from tests.support.resume_model import net, train
from tests.support.resume_optimizers import ALL, same_state


def run(name: str = "adamw", seed: int = 0) -> tuple[Any, Any]:
    model = net(seed)
    optimizer = ALL[name](model.parameters())
    return model, optimizer


def test_a_saved_run_comes_back_whole(tmp_path: Path) -> None:
    """Weights, state, scheduler, step, extra values and tensors, random streams."""
    model, optimizer = run()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    train(model, optimizer, 0, 3)
    for _ in range(3):
        scheduler.step()
    extra = {"epoch": 3, "seen": torch.arange(4), "deep": {"list": [1, torch.ones(2)]}}
    before = torch.get_rng_state()
    handle = ckptmap.save(tmp_path / "out", model, optimizer, scheduler, step=3, extra=extra)
    torch.rand(10)
    assert handle.wait() == () and handle.done

    again, theirs = run(seed=1)
    later = torch.optim.lr_scheduler.MultiStepLR(theirs, [100, 200])
    report = ckptmap.load(tmp_path / "out", again, theirs, later, exact=True)
    assert not same_state(optimizer, theirs)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert later.state_dict() == scheduler.state_dict()
    assert type(later.milestones) is Counter and later.milestones == Counter([2, 5])
    assert theirs.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert report.step == 3 and report.extra["epoch"] == 3
    assert torch.equal(report.extra["seen"], torch.arange(4))
    assert report.extra["deep"]["list"][0] == 1
    assert torch.equal(report.extra["deep"]["list"][1], torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before) and report.streams == "restored"
    assert ckptmap.verify(tmp_path / "out").ok


class Views(nn.Module):
    """Buffers whose bytes in memory are not their values: torch reads them through a flag, or one
    for several."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("conjugate", torch.randn(3, 2, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.randn(1, dtype=torch.complex64).conj().imag)
        self.register_buffer("expanded", torch.randn(2, 1).expand(2, 3))


@pytest.mark.parametrize("background", [True, False])
def test_buffers_that_are_not_as_they_lie(background: bool, tmp_path: Path) -> None:
    model, again = Views(0), Views(1)
    assert model.get_buffer("conjugate").is_conj() and model.get_buffer("negative").is_neg()
    ckptmap.save(tmp_path / "out", model, background=background).wait()
    ckptmap.load(tmp_path / "out", again)
    with ckptmap.open(tmp_path / "out") as ckpt:
        for name, value in model.named_buffers():
            assert torch.equal(ckpt[name].read(), value), name
            assert torch.equal(again.get_buffer(name), value), name
    made = ckptmap.translate(model.state_dict(), like=Views(2))
    assert all(torch.equal(made[name], value) for name, value in model.named_buffers())


def test_torch_reads_it_alone(tmp_path: Path) -> None:
    model, optimizer = run()
    train(model, optimizer, 0, 2)
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    again, _ = run(seed=1)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "out")  # type: ignore[attr-defined]
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_it_can_be_converted(tmp_path: Path) -> None:
    """Low-bit moments are plain parts with a record: they move as bytes, under any setup."""
    torch.compiler.set_stance("force_eager")
    try:
        model, optimizer = run("ao8")
        train(model, optimizer, 0, 2)
    finally:
        torch.compiler.set_stance("default")
    ckptmap.save(tmp_path / "out", model, optimizer).wait()
    for to, name in (("fsdp2", "shards"), ("full", "one.pt")):
        ckptmap.convert(tmp_path / "out", tmp_path / name, to=to)
        with ckptmap.open(tmp_path / "out") as a, ckptmap.open(tmp_path / name) as b:
            for fqn, state in a.optimizer.items():
                for key, lazy in state.items():
                    other = b.optimizer[fqn][key]
                    assert other.encoding == lazy.encoding, (to, fqn, key)
                    assert torch.equal(other.read(), lazy.read())


class Counted(nn.Linear):
    """A module with extra state, plain and tensor."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_of_modules(tmp_path: Path) -> None:
    """As torch's state dicts have it; none in the checkpoint is said, and is not bit for bit."""
    first, second = Counted(2, 2), Counted(2, 2)
    model = nn.Sequential(first, nn.Sequential(second))
    first.seen = {"steps": 3, "deep": [torch.arange(3), {"a.b": (1, None)}]}
    second.seen = torch.ones(2, dtype=torch.bfloat16)
    torch.save({"model": nn.ModuleDict({"module": model}).state_dict()}, tmp_path / "ddp.pt")
    ckptmap.save(tmp_path / "out", model).wait()

    one, two = Counted(2, 2), Counted(2, 2)
    again = nn.Sequential(one, nn.Sequential(two))
    report = ckptmap.load(tmp_path / "out", again, exact=True)
    assert not report.missing and not report.unexpected and not report.extra
    assert one.seen["steps"] == 3 and one.seen["deep"][1] == {"a.b": (1, None)}
    assert torch.equal(one.seen["deep"][0], torch.arange(3))
    assert torch.equal(two.seen, second.seen)

    one.seen = two.seen = None
    report = ckptmap.load(tmp_path / "ddp.pt", again)
    assert not report.missing and not report.unexpected and not report.extra
    assert torch.equal(one.seen["deep"][0], torch.arange(3)) and one.seen["steps"] == 3
    assert torch.equal(two.seen, second.seen)

    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    report = ckptmap.load(tmp_path / "out", plain)
    assert sorted(report.unexpected) == ["0._extra_state", "1.0._extra_state"]
    ckptmap.save(tmp_path / "none", plain).wait()
    with pytest.raises(LoadError, match=r"no 0\._extra_state, no 1\.0\._extra_state"):
        ckptmap.load(tmp_path / "none", again, exact=True)


def test_tuples_of_tensors(tmp_path: Path) -> None:
    """Tuples come back as tuples, and lists as lists, in what all ranks share, of a rank and of an object;
    torch reads the files alone."""
    value = {
        "pair": (torch.ones(1), [torch.zeros(2), (3, torch.ones(1))]),
        "list": [torch.ones(1), 2],
        "below": {4: ((torch.ones(1),),)},
    }

    class Holder:
        def __init__(self, state: dict[str, object]) -> None:
            self.state = state

        def state_dict(self) -> dict[str, object]:
            return self.state

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.state = state

    model = nn.Linear(2, 2)
    ckptmap.save(
        tmp_path / "out", model, extra=value, extra_per_rank=value, stateful={"one": Holder(value)}
    ).wait()
    again = Holder({})
    report = ckptmap.load(tmp_path / "out", model, stateful={"one": again})
    for found in (report.extra, report.extra_per_rank, again.state):
        assert str(dict(sorted(found.items()))) == str(dict(sorted(value.items())))
    dcp_to_torch_save(str(tmp_path / "out"), str(tmp_path / "torch.pt"))
    assert "pair" in torch.load(tmp_path / "torch.pt")["extra"]
    with pytest.raises(ArgumentError, match=r"names of ckptmap's own"):
        ckptmap.save(tmp_path / "no", model, extra={"ckptmap.tuples": [["pair"]]})


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    """Written in the background while training goes on."""
    model, optimizer = run()
    train(model, optimizer, 0, 2)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    handle = ckptmap.save(tmp_path / "out", model, optimizer)
    train(model, optimizer, 2, 4)
    handle.wait()
    with ckptmap.open(tmp_path / "out") as ckpt:
        assert all(torch.equal(ckpt[name].read(), value) for name, value in want.items())


def test_in_the_foreground_nothing_is_left_running(tmp_path: Path) -> None:
    model, optimizer = run()
    handle = ckptmap.save(tmp_path / "out", model, optimizer, background=False)
    assert handle.done and (tmp_path / "out" / ".metadata").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptmap-save"]


def test_the_destination_is_complete_or_as_it_was(tmp_path: Path) -> None:
    model, _ = run()
    ckptmap.save(tmp_path / "out", model, step=1).wait()
    handle = ckptmap.save(tmp_path / "out", model, step=2)
    with pytest.raises(DestinationError, match="out: exists"):
        handle.wait()
    assert ckptmap.load(tmp_path / "out", model).step == 1
    ckptmap.save(tmp_path / "out", model, step=2, overwrite=True).wait()
    assert ckptmap.load(tmp_path / "out", model).step == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not lose")
    with pytest.raises(DestinationError, match="holds no checkpoint"):
        ckptmap.save(tmp_path / "mine", model, overwrite=True).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_strange_optimizers_and_reserved_names_are_refused(tmp_path: Path) -> None:
    model, _ = run()
    stranger = torch.optim.AdamW(nn.Linear(3, 3).parameters())
    with pytest.raises(LoadError, match=r"parameter 0 \(3, 3\) is not the model's"):
        ckptmap.save(tmp_path / "out", model, stranger)
    with pytest.raises(ArgumentError, match=r"'rng'.*ckptmap's own"):
        ckptmap.save(tmp_path / "out", model, extra={"rng": 1})
    with pytest.raises(PlanError, match=r"extra\.what.*cannot be written"):
        ckptmap.save(tmp_path / "out", model, extra={"what": object()})
    with pytest.raises(ArgumentError, match=r"extra\.deep\.0: is a tensor of torch\.sparse_coo"):
        ckptmap.save(tmp_path / "out", model, extra={"deep": [torch.eye(2).to_sparse()]})
    with pytest.raises(ArgumentError, match=r"extra\.none: is a tensor on meta"):
        ckptmap.save(tmp_path / "out", model, extra={"none": torch.empty(2, device="meta")})
    listing = torch.optim.SGD(model.parameters())
    listing.state[model.embed.weight]["old"] = [torch.ones(2)]
    with pytest.raises(LoadError, match=r"SGD keeps old of embed\.weight as a list") as no:
        ckptmap.save(tmp_path / "out", model, listing)
    assert no.value.code == "CKM508" and "torch.save" in no.value.hint
    with pytest.raises(ValueError, match="replicas='all'"):
        ckptmap.save(tmp_path / "out", model, replicas="all")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(LoadError, match="weight is on meta"):
        ckptmap.save(tmp_path / "out", empty)
    assert not list(tmp_path.iterdir())


def signal() -> float:
    return 0.5


class WithObjects(torch.optim.AdamW):
    """An imitation of GrokAdamW 0.1.2, which keeps functions, and with them its state, in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.param_groups[0]["signal_fns"] = [signal]


def test_objects_in_groups(tmp_path: Path) -> None:
    """Left out with a note: the live optimizer keeps its own. Tensors beside parameters are refused."""
    model, again = net(0), net(1)
    optimizer, theirs = WithObjects(model.parameters()), WithObjects(again.parameters())
    train(model, optimizer, 0, 1)
    (note,) = ckptmap.save(tmp_path / "out", model, optimizer).wait()
    assert note.startswith(
        "optimizer group 0: signal_fns is a list, no plain value, and is not saved"
    )
    assert not ckptmap.load(tmp_path / "out", again, theirs, exact=True).inexact
    assert theirs.param_groups[0]["signal_fns"] == [signal] and not same_state(optimizer, theirs)
    del theirs.param_groups[0]["signal_fns"]
    with pytest.raises(LoadError, match=r"objects in groups: was \['signal_fns'\], is None"):
        ckptmap.load(tmp_path / "out", again, theirs, exact=True)
    optimizer.param_groups[0]["state"] = {next(model.parameters()): {"exp_avg": torch.ones(3)}}
    with pytest.raises(LoadError, match="WithObjects keeps tensors in its group's 'state'") as no:
        ckptmap.save(tmp_path / "no", model, optimizer)
    assert no.value.code == "CKM508" and not (tmp_path / "no").exists()


def test_ranks(tmp_path: Path) -> None:
    """Replicas that drifted, a rank that fails, one save after another: tests/ranks/resume_save.py."""
    run_ranks("tests.ranks.resume_save", 2, [str(tmp_path)], timeout=400)


def test_a_plan_that_is_known(tmp_path: Path) -> None:
    """Of the save before: one collective, and whatever is new is seen: tests/ranks/resume_known_plan.py."""
    run_ranks("tests.ranks.resume_known_plan", 3, [str(tmp_path)], timeout=240)


def test_ranks_that_do_not_agree(tmp_path: Path) -> None:
    """Other weights under one name, errors of one rank, buffers: tests/ranks/resume_agree.py."""
    run_ranks("tests.ranks.resume_agree", 4, [str(tmp_path)], timeout=240)


@pytest.mark.parametrize(
    "scenario",
    [
        "never_saves",
        "dies_while_it_writes",
        "dies_inside_a_save",
        "dies_after_the_rename",
        "never_loads",
        "dies_inside_a_load",
        "dies_while_it_loads",
    ],
)
def test_a_lost_rank_is_named(scenario: str, tmp_path: Path) -> None:
    """With what has become of the checkpoint or the model: tests/ranks/lost_ranks.py."""
    run_ranks("tests.ranks.lost_ranks", 3, [scenario, str(tmp_path)], timeout=120)
    assert {path.name for path in tmp_path.glob("told-*")} == {"told-0", "told-2"}


def test_fresh_streams_follow_the_rule() -> None:
    """The same for the same shard, another for another, whatever was drawn before."""
    seeds = {}
    for shard in ((0,), (1,), (), (0, 1)):
        torch.rand(3)
        seeds[shard] = streams.fresh(b"base", shard)
        first = torch.rand(4)
        assert streams.fresh(b"base", shard) == seeds[shard]
        assert torch.equal(torch.rand(4), first)
    assert len(set(seeds.values())) == 4
    assert streams.fresh(b"other", ()) != seeds[()]


def test_a_malformed_stream_is_refused() -> None:
    with pytest.raises(LoadError, match="not one of this torch"):
        streams.restore({"cpu": torch.zeros(7, dtype=torch.uint8)})


def test_random_numbers_of_numpy_go_on(tmp_path: Path) -> None:
    """Whichever bit generator its global functions draw from."""
    for number, generator in enumerate((np.random.MT19937(3), np.random.PCG64(4))):
        before = np.random.get_bit_generator()
        np.random.set_bit_generator(generator)
        try:
            np.random.standard_normal(3)  # an odd number: of MT19937 one value is kept for later
            folder = tmp_path / str(number)
            ckptmap.save(folder, nn.Linear(2, 2)).wait()
            wanted = np.random.standard_normal(5)
            ckptmap.load(folder, nn.Linear(2, 2), exact=True)
            assert (np.random.standard_normal(5) == wanted).all()
        finally:
            np.random.set_bit_generator(before)
