"""Threads that have nothing to do take pieces of what another one does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptmap.storage.crew import Crew

PATIENCE_S = 60


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def taken(pieces: deque[int]) -> Iterator[int]:
    while pieces:
        try:
            yield pieces.popleft()
        except IndexError:
            return


def test_every_piece_is_done_once_by_all_threads(pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(4, timeout=PATIENCE_S)
    done: list[int] = []
    pieces = deque(range(40))

    def work() -> None:
        for count, piece in enumerate(taken(pieces)):
            if not count:
                together.wait()  # this thread and three helpers work at a time, or this fails
            done.append(piece)

    Crew(pool.submit).run(pieces, work)
    assert sorted(done) == list(range(40))


def test_it_returns_when_the_last_helper_has_ended(pool: ThreadPoolExecutor) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()
    owner, pieces = threading.current_thread(), deque(range(2))

    def work() -> None:
        for piece in taken(pieces):
            if threading.current_thread() is owner:
                assert begun.wait(PATIENCE_S)
                threading.Timer(0.1, go_on.set).start()
            else:
                begun.set()
                assert go_on.wait(PATIENCE_S)
            done.append(piece)

    Crew(pool.submit).run(pieces, work)
    assert sorted(done) == [0, 1]


def test_where_all_threads_are_busy_nobody_waits_for_help(pool: ThreadPoolExecutor) -> None:
    stop = threading.Event()
    others = [pool.submit(stop.wait, PATIENCE_S) for _ in range(3)]
    pieces, done = deque(range(5)), list[int]()
    Crew(pool.submit).run(pieces, lambda: done.extend(taken(pieces)))
    assert done == list(range(5)) and not any(other.done() for other in others)
    stop.set()


@pytest.mark.parametrize("who", ["owner", "helper"])
def test_an_error_ends_it_and_is_raised(who: str, pool: ThreadPoolExecutor) -> None:
    owner, failed, done = threading.current_thread(), threading.Event(), list[int]()
    pieces = deque(range(1000))

    def work() -> None:
        for piece in taken(pieces):
            if (threading.current_thread() is owner) == (who == "owner"):
                failed.set()
                raise ValueError(f"piece {piece}")
            assert failed.wait(PATIENCE_S)
            done.append(piece)

    with pytest.raises(ValueError, match="piece"):
        Crew(pool.submit).run(pieces, work)
    assert not pieces and len(done) < 999


def test_a_pool_that_is_about_to_end_helps_nobody() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    pieces, done = deque(range(5)), list[int]()
    Crew(pool.submit).run(pieces, lambda: done.extend(taken(pieces)))
    assert done == list(range(5))
