from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiocuda.driver._port import Port, open_port
from aiocuda.driver._workers import Workers, most_threads
from aiocuda.errors import ClosedError, ForkedProcessError

PATIENCE = 60.0


class Mailbox:
    """A port, and a thread's way to wait for its tags."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.port: Port = open_port(self._woken.set, watchable=False)
        self.tags: list[int] = []

    def wait(self, count: int) -> list[int]:
        """Return once ``count`` tags have come."""
        while len(self.tags) < count:
            assert self._woken.wait(PATIENCE), f"only {self.tags} came"
            self._woken.clear()
            self.tags += self.port.drain()
        return self.tags


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.port.close()


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} does not end"


def noted(log: list[int], number: int) -> Callable[[], object]:
    return lambda: log.append(number)


def test_no_thread_before_there_is_work(mailbox: Mailbox) -> None:
    workers = Workers(4, name="lazy")
    assert workers.alive == 0
    workers.submit(noted([], 0), mailbox.port, 1)
    mailbox.wait(1)
    assert workers.alive == 1
    (thread,) = threads_named("lazy")
    assert thread.daemon
    workers.close()
    join([thread])
    assert workers.alive == 0


def test_tag_comes_after_the_work(mailbox: Mailbox) -> None:
    workers = Workers(2)
    log: list[int] = []
    for number in range(50):
        workers.submit(noted(log, number), mailbox.port, number)
        mailbox.wait(number + 1)
        assert log[-1] == number
    assert workers.alive == 1  # there was never more work than one thread could do
    workers.close()


def test_work_starts_in_order(mailbox: Mailbox) -> None:
    workers = Workers(1)
    log: list[int] = []
    for number in range(50):
        workers.submit(noted(log, number), mailbox.port, number)
    assert mailbox.wait(50) == log == list(range(50))
    workers.close()


def test_as_much_runs_at_once_as_there_may_be_threads(mailbox: Mailbox) -> None:
    workers = Workers(3)
    together = threading.Barrier(3)
    gate = threading.Event()
    for number in range(3):
        workers.submit(lambda: together.wait(PATIENCE), mailbox.port, number)
    mailbox.wait(3)
    for number in range(3, 7):
        workers.submit(lambda: gate.wait(PATIENCE), mailbox.port, number)
    assert workers.alive == 3
    gate.set()
    mailbox.wait(7)
    workers.close()


def test_busy_thread_does_not_count_as_idle(mailbox: Mailbox) -> None:
    """Two jobs that need one another run, although both came before any thread could take the first."""
    workers = Workers(2)
    meeting = threading.Barrier(2)
    met: list[int] = []
    for number in range(20):
        workers.submit(lambda: met.append(meeting.wait(PATIENCE)), mailbox.port, 2 * number)
        workers.submit(lambda: met.append(meeting.wait(PATIENCE)), mailbox.port, 2 * number + 1)
        mailbox.wait(2 * number + 2)
    assert sorted(met) == [0] * 20 + [1] * 20
    workers.close()


def test_close_runs_what_is_queued_and_ends_the_threads(mailbox: Mailbox) -> None:
    workers = Workers(1, name="closing")
    gate = threading.Event()
    log: list[int] = []
    workers.submit(lambda: gate.wait(PATIENCE), mailbox.port, 0)
    for number in range(1, 5):
        workers.submit(noted(log, number), mailbox.port, number)
    threads = threads_named("closing")
    workers.close()
    workers.close()
    with pytest.raises(ClosedError, match="have been closed"):
        workers.submit(noted(log, 5), mailbox.port, 5)
    gate.set()
    join(threads)
    assert mailbox.wait(5) == [0, 1, 2, 3, 4]
    assert log == [1, 2, 3, 4]


def test_threads_end_when_the_workers_are_collected(mailbox: Mailbox) -> None:
    workers = Workers(2, name="collected")
    meeting = threading.Barrier(2)
    for number in range(2):
        workers.submit(lambda: meeting.wait(PATIENCE), mailbox.port, number)
    mailbox.wait(2)
    threads = threads_named("collected")
    assert len(threads) == 2
    gc.disable()  # no cycle holds it either
    try:
        del workers
        join(threads)
    finally:
        gc.enable()


def test_idle_thread_keeps_nothing_alive(mailbox: Mailbox) -> None:
    class Heavy:
        def __del__(self) -> None:
            gone.put(None)

    gone: queue.SimpleQueue[None] = queue.SimpleQueue()
    workers = Workers(1)
    heavy = Heavy()
    workers.submit(lambda held=heavy: held, mailbox.port, 1)  # type: ignore[misc]
    mailbox.wait(1)
    del heavy
    gone.get(timeout=PATIENCE)
    workers.close()


def test_references_are_dropped_before_the_tag_is_put() -> None:
    """An array that a copy has read may be resized, or its file unmapped, in the next line."""

    class Slow:
        entered, gate = threading.Event(), threading.Event()

        def put(self, tag: int) -> None:
            self.entered.set()
            assert self.gate.wait(PATIENCE)

    slow, array, workers = Slow(), bytearray(8), Workers(1)
    view = memoryview(array)
    workers.submit(lambda held=view: held, slow, 1)  # type: ignore[misc]
    del view
    assert slow.entered.wait(PATIENCE)
    try:
        array.append(1)  # which it refuses while anybody has a view of it
    finally:
        slow.gate.set()
        workers.close()


def test_work_that_raises_is_reported_and_its_thread_continues(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    workers = Workers(1)

    def broken() -> None:
        raise ValueError("a bug")

    workers.submit(broken, mailbox.port, 1)
    workers.submit(noted([], 0), mailbox.port, 2)
    assert mailbox.wait(2) == [1, 2]
    assert [repr(report.exc_value) for report in reported] == ["ValueError('a bug')"]
    assert workers.alive == 1
    workers.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_is_refused(mailbox: Mailbox) -> None:
    workers = Workers(1)
    workers.submit(noted([], 0), mailbox.port, 1)
    mailbox.wait(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            workers.submit(noted([], 0), mailbox.port, 2)
        except ForkedProcessError:
            workers.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    workers.submit(noted([], 0), mailbox.port, 3)
    assert mailbox.wait(2) == [1, 3]
    workers.close()


@pytest.mark.parametrize(("processors", "threads"), [(1, 4), (2, 4), (6, 6), (8, 8), (96, 8)])
def test_as_many_threads_as_the_machine_is_good_for(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that may use two processors of 96 has two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)), raising=False)
    assert most_threads() == threads
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert most_threads() == threads
