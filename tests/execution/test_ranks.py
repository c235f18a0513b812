"""Several ranks make one conversion: the same bytes as one process, or one line that says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import ckptmap
from ckptmap.errors import DestinationError, PlanError, SourceError
from ckptmap.execution.heartbeat import Heartbeat, Stopped
from ckptmap.execution.ranks import ALONE, GlooRanks, Ranks, join
from ckptmap.execution.ranks import _error as sent_error
from ckptmap.execution.ranks import _own_words as own_words
from ckptmap.execution.split_by_rank import Share, split
from ckptmap.operations.convert import run
from ckptmap.planning.plan import Plan
from ckptmap.storage.direct_io import ALIGN, OutputFile
from ckptmap.storage.journal import Journal, Written
from tests.corpus import ranks
from tests.support.files import leftovers, tree
from tests.support.paths import ROOT

SETUPS: dict[str, dict[str, Any]] = {
    "hf": {"max_shard_nbytes": 5 << 20},
    "full": {},
    "fsdp2": {"world_size": 4},
    "fsdp2-nf4": {"world_size": 4},
    "fsdp2-bf16": {"world_size": 3},
    "full-nf4": {},
}

COMMAND_LINE = "tests.ranks.command_line"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 MB: large slots and small ones, more than one page shared between ranks."""
    file = tmp_path_factory.mktemp("many") / "src.safetensors"
    torch.manual_seed(3)
    weights = {f"l.{i}.weight": torch.randn(512, 1024) for i in range(12)}
    biases = {f"l.{i}.bias": torch.randn(1001) for i in range(60)}
    save_file(weights | biases | {"odd": torch.randn(1001, 703), "empty": torch.empty(0, 4)}, file)
    return file


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What one process writes, by setup."""
    folder = tmp_path_factory.mktemp("one")
    for to, options in SETUPS.items():
        ckptmap.convert(source, folder / to, to, **options)
    return {to: tree(folder / to) for to in SETUPS}


# ---------------------------------------------------------------------------------- launching


@dataclass
class Rank:
    started: ranks.Started

    def send(self, what: signal.Signals) -> None:
        os.kill(self.started.process.pid, what)

    def ended(self, timeout: float) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        deadline = time.monotonic() + timeout
        while self.started.process.poll() is None:
            assert time.monotonic() < deadline, f"not done after {timeout:g} s"
            time.sleep(0.01)
        output = self.started.output()
        return output.returncode, output.stdout, output.stderr


@contextmanager
def launched(folder: Path, world_size: int, module: str, *args: str) -> Iterator[list[Rank]]:
    """`python -m MODULE ARGS` on every rank, as torchrun would start it, but nobody ends it with the others."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[ranks.Started] = []
    ranks.make_ready(world_size)
    try:
        for rank in range(world_size):
            env = ranks.rank_environment(rank, world_size, store.port)
            place = folder / f"log-{time.monotonic_ns()}"
            started.append(ranks.start(rank, module, args, place, env))
        yield [Rank(one) for one in started]
    finally:
        ranks.kill(started)


def command(source: Path, dst: Path, to: str, *more: str) -> list[str]:
    line = [COMMAND_LINE, "convert", str(source), str(dst), "--to", to, "--quiet"]
    sharded = ["--world-size", "4"] if to.startswith("fsdp") else []
    return [*line, *sharded, "--threads", "1", *more]


def wait_for_units(folder: Path, journal: str, units: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [file.read_bytes().count(b"\n") for file in folder.glob(f".*/{journal}")]
        if found and found[0] > units:
            return
        time.sleep(0.002)
    raise AssertionError(f"{journal} never had {units} units")


def shown(group: Sequence[Rank], timeout: float) -> tuple[list[int], str]:
    """Exit codes, and the stderr of all together, once all have ended."""
    ends = [rank.ended(timeout) for rank in group]
    return [code for code, _, _ in ends], "".join(err for _, _, err in ends)


# ------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_output_is_that_of_one_process(
    world_size: int, source: Path, expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    args = (str(source), str(tmp_path / "out"), json.dumps(SETUPS))
    with launched(tmp_path, world_size, "tests.ranks.convert_twice", *args) as group:
        codes, err = shown(group, 120)
    assert codes == [0] * world_size, err
    assert err == ""
    assert {to: tree(tmp_path / "out" / to) for to in SETUPS} == expected
    assert leftovers(tmp_path / "out") == []


def test_torchrun(source: Path, expected: dict[str, dict[str, str]], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    _, *args = command(source, tmp_path / "out", "fsdp2-nf4")
    line += ["--standalone", "-m", "ckptmap", *args]
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out")
    assert tree(tmp_path / "out") == expected["fsdp2-nf4"]


# ------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_stops_all_and_another_number_continues(
    victim: int, source: Path, expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    dst = tmp_path / "dst" / "out"
    with launched(tmp_path, 3, *command(source, dst, "fsdp2-nf4")) as group:
        wait_for_units(dst.parent, f"journal-{victim}.jsonl" if victim else "journal.jsonl", 1)
        group[victim].send(signal.SIGKILL)
        start = time.monotonic()
        codes, err = shown(group, 30)
        assert time.monotonic() - start < 15
    assert codes[victim] == -signal.SIGKILL
    assert all(codes)
    assert err.count(f"error[CKM307]: [rank {victim}] its process ended without a word") == 1
    assert err.count("error") == 1, err
    assert not dst.exists()
    world_size = 2 if victim else 1
    with launched(tmp_path, world_size, *command(source, dst, "fsdp2-nf4", "--json")) as group:
        ends = [rank.ended(60) for rank in group]
    assert [code for code, _, _ in ends] == [0] * world_size, ends
    assert all((out, err) == ("", "") for _, out, err in ends[1:])
    assert '"continued_nbytes": 0' not in ends[0][1]
    assert tree(dst) == expected["fsdp2-nf4"]
    assert leftovers(dst.parent) == []


def test_a_hanging_rank_is_given_up_and_keeps_its_place(
    source: Path, expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    dst = tmp_path / "dst" / "out"
    line = command(source, dst, "fsdp2-nf4", "--rank-timeout", "3")
    with launched(tmp_path, 2, *line) as group:
        wait_for_units(dst.parent, "journal-1.jsonl", 1)
        group[1].send(signal.SIGSTOP)
        code, _, err = group[0].ended(20)
        assert code == 3
        assert "[rank 1] gave no sign of life for 3 s" in err
        assert not dst.exists()
        alone = command(source, dst, "fsdp2-nf4")
        with launched(tmp_path, 1, *alone) as (refused,):
            code, _, err = refused.ended(60)
        assert code == 2
        assert "error[CKM305]" in err
        group[1].send(signal.SIGCONT)
        code, out, err = group[1].ended(30)
        assert code != 0
        assert out == ""
    with launched(tmp_path, 1, *alone, "--json") as (done,):
        code, out, err = done.ended(60)
    assert code == 0, err
    assert '"continued_nbytes": 0' not in out
    assert tree(dst) == expected["fsdp2-nf4"]
    assert leftovers(dst.parent) == []


@pytest.mark.parametrize("problem", ["nan", "damage"])
def test_an_error_of_one_rank_is_shown_once_and_leaves_nothing(
    problem: str, tmp_path: Path
) -> None:
    """No run could continue it, so it is a refusal, as with one process: exit code 2 on every rank."""
    weights = {f"l.{i}.weight": torch.randn(256, 256) for i in range(4)}
    source, dst = tmp_path / "source.pt", tmp_path / "dst" / "out.pt"
    if problem == "nan":
        weights["l.3.weight"][7, 7] = torch.nan
    torch.save(weights, source)
    if problem == "damage":
        content = bytearray(source.read_bytes())
        content[content.index(weights["l.3.weight"].numpy().tobytes()) + 4096] ^= 1
        source.write_bytes(content)
    with launched(tmp_path, 3, *command(source, dst, "full-nf4")) as group:
        codes, err = shown(group, 60)
    assert codes == [2, 2, 2]
    code = {"nan": "CKM309", "damage": "CKM105"}[problem]
    assert err.count(f"error[{code}]: [rank 2] l.3.weight: ") == 1, err
    assert err.count("error[") == 1, err
    assert list(dst.parent.iterdir()) == []


def test_a_rank_that_does_not_see_the_work_directory_ends_all(source: Path, tmp_path: Path) -> None:
    """The destination is on a disk of rank 0's machine alone: refused before a byte, and nothing is left there."""
    dst = tmp_path / "dst" / "out"
    _, *args = command(source, dst, "fsdp2")
    with launched(tmp_path, 2, "tests.ranks.blind_command_line", *args) as group:
        codes, err = shown(group, 60)
    assert codes == [2, 2], err
    assert err.count("error[CKM304]: [rank 1] ") == err.count("error[") == 1, err
    assert "rank 0 has made this directory, but this machine does not see it" in err
    assert "hint: choose a destination on a file system that all ranks share" in err
    assert list(dst.parent.iterdir()) == []
    with launched(tmp_path, 2, COMMAND_LINE, *args) as group:  # and on one that both see
        assert shown(group, 60)[0] == [0, 0] and dst.is_dir()


def test_an_error_of_all_ranks_is_shown_once_and_names_none(tmp_path: Path) -> None:
    with launched(tmp_path, 2, *command(tmp_path / "none", tmp_path / "out", "hf")) as group:
        codes, err = shown(group, 60)
    assert codes == [2, 2]
    assert err.count("error[CKM101]") == 1
    assert "[rank" not in err


# ------------------------------------------------------------------------------- the parts of it


def test_ranks_must_plan_alike() -> None:
    class Three(Ranks):
        def gather(self, data: bytes) -> list[bytes]:
            return [data, b"0123456789abcdef", data]

    Three().agree("0123456789abcdef")
    with pytest.raises(PlanError, match=r"fedcba987654 on rank 0, 2; 0123456789ab on rank 1"):
        Three().agree("fedcba9876543210")


def test_without_torchrun_a_process_is_alone() -> None:
    assert join(env={}) is ALONE
    assert join(env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}) is ALONE
    assert not isinstance(ALONE, GlooRanks)


def plan_of(source: Path, to: str) -> Plan:
    return ckptmap.plan(source, to, **SETUPS.get(to, {}))


def work_of(plan: Plan, share: Share) -> list[tuple[int, int]]:
    """(file, slot) of all that a share writes."""
    copied = [
        (file, slot)
        for file, slots in enumerate(share.slots)
        for slot in slots
        if plan.files[file].sources[slot] is not None
    ]
    encoded = [
        (target.file, target.slot)
        for _, step in share.encodes
        for targets in step.targets.values()
        for target in targets
    ]
    return copied + encoded


@pytest.mark.parametrize("to", [*SETUPS, "hf-bf16"])
def test_shares_do_everything_once_and_evenly(to: str, source: Path) -> None:
    plan = plan_of(source, to)
    slots = {
        (f, s): slot for f, item in enumerate(plan.files) for s, slot in enumerate(item.out.slots)
    }
    largest = max(slot.nbytes for slot in slots.values())
    if to == "fsdp2-nf4":  # a tensor's parts stay together
        largest *= 5
    for world_size in (1, 2, 3, 7, 50):
        shares = split(plan.files, plan.encodes, plan.compares, world_size)
        work = [work_of(plan, share) for share in shares]
        assert sorted(slot for mine in work for slot in mine) == sorted(slots), world_size
        nbytes = [sum(slots[slot].nbytes for slot in mine) for mine in work]
        even = sum(nbytes) / world_size
        assert max(nbytes) <= max(1.25 * even, even + largest), world_size
        for share, mine in zip(shares, work, strict=True):
            assert {file for file, _ in mine} <= set(share.files), world_size


def test_a_file_is_one_ranks_where_there_are_enough(source: Path) -> None:
    plan = plan_of(source, "hf")
    shares = split(plan.files, plan.encodes, plan.compares, 3)
    for file, item in enumerate(plan.files):
        assert sum(bool(share.slots[file]) for share in shares) == bool(item.out.slots)


def test_a_tensor_that_is_encoded_whole_stays_on_one_rank(source: Path) -> None:
    plan = plan_of(source, "fsdp2-nf4")
    shares = split(plan.files, plan.encodes, plan.compares, 4)
    names = [name for share in shares for name, _ in share.encodes]
    assert sorted(names) == sorted(f"encode:{index}" for index in range(len(plan.encodes)))
    cast = plan_of(source, "fsdp2-bf16")
    for share in split(cast.files, cast.encodes, cast.compares, 3):
        assert len({target.file for _, step in share.encodes for target in step.targets[""]}) == 1


class Together(Ranks):
    """Ranks as threads of this process."""

    def __init__(self, rank: int, given: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(given)
        self._given, self._barrier = given, barrier

    def gather(self, data: bytes) -> list[bytes]:
        self._given[self.rank] = data
        self._barrier.wait(30)
        found = list(self._given)
        self._barrier.wait(30)
        return found


@pytest.mark.parametrize("to", ["full", "fsdp2-nf4"])
def test_no_page_is_written_directly_that_another_write_touches(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the page cache and through it at once, one would undo the other."""
    pages: dict[str, list[tuple[str, int]]] = {"_write_direct": [], "_write": []}
    for name in pages:
        monkeypatch.setattr(OutputFile, name, noting(getattr(OutputFile, name), pages[name]))
    plan = plan_of(source, to)
    given, barrier = [b""] * 3, threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(run, plan, tmp_path / "out", ranks=Together(rank, given, barrier))
            for rank in range(3)
        ]
        assert len({str(running.result(60).fidelity) for running in runs}) == 1
    direct = pages["_write_direct"]
    assert direct or not takes_direct(tmp_path)
    assert len(set(direct)) == len(direct)
    assert set(direct).isdisjoint(pages["_write"])


def noting(write: Any, pages: list[tuple[str, int]]) -> Any:
    def noted(self: OutputFile, offset: int, data: memoryview) -> Any:
        if data.nbytes:
            last = (offset + data.nbytes - 1) // ALIGN
            pages.extend((str(self.path), page) for page in range(offset // ALIGN, last + 1))
        return write(self, offset, data)

    return noted


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def beating(timeout: float, world_size: int = 2) -> list[Heartbeat]:
    """All ranks in this process, over one store."""
    store = HashStore()
    ranks = [Heartbeat(store, rank, world_size, timeout) for rank in range(world_size)]
    for rank in ranks:
        rank.announce()
    for rank in ranks:
        rank.start()
    return ranks


def test_a_rank_that_beats_but_does_not_work_is_lost() -> None:
    lead, busy, stuck = ranks = beating(1.5, 3)
    busy.working = stuck.working = True
    until = time.monotonic() + 15
    while not lead.lost and time.monotonic() < until:
        busy.advance(10)
        time.sleep(0.02)
    assert lead.lost.keys() == {2}
    with pytest.raises(Stopped, match="another rank"):
        lead.meet()
    time.sleep(0.5)
    with pytest.raises(Stopped, match="another rank"):
        busy.check()
    assert lead.advance(0) >= 10
    for rank in ranks:
        rank.close()


def test_a_meeting_waits_longer_than_the_timeout_for_those_alive() -> None:
    lead, late = ranks = beating(1.0)
    thread = threading.Thread(target=lead.meet)
    thread.start()
    time.sleep(1.8)
    assert thread.is_alive()
    late.meet()
    thread.join(5)
    assert not thread.is_alive()
    for rank in ranks:
        rank.close()


def test_journals_of_all_ranks_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    units = {rank: [Written(rank, 0, "ab", 1)] for rank in range(3)}
    journals = [Journal(path, "plan", rank) for rank in range(3)]
    for rank, journal in enumerate(journals):
        journal.add(f"u{rank}", units[rank])
    with pytest.raises(DestinationError, match=r"journal-1\.jsonl: is still held"):
        Journal(path, "plan")
    for journal in journals:
        journal.close()
    with Journal(path, "plan") as lead, Journal(path, "plan", 1) as other:
        assert lead.entries == {f"u{rank}": tuple(units[rank]) for rank in range(3)}
        assert other.entries == lead.entries
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal-1.jsonl", "journal.jsonl"]
    with Journal(path, "other") as lead:
        assert lead.entries == {}


def test_the_exit_code_of_kept_work_goes_from_rank_to_rank() -> None:
    """2 says that nothing is left written: an error of the source that keeps the work says 3, on every rank."""
    error = SourceError("CKM101", "a.pt: cannot be read", "check the disk")
    assert sent_error(json.loads(own_words(error))).exit_code == 2
    error.keep_work()
    error.keep_work()
    assert error.hint == "check the disk; then run the same command again to continue"
    sent = sent_error(json.loads(own_words(error)), "[rank 1] ")
    assert (type(sent), sent.exit_code) == (SourceError, 3)
    stopped = Stopped()
    stopped.keep_work()
    assert stopped.exit_code == 3 and stopped.keeps_work
