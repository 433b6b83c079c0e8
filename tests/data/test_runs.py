"""Runs of samples: how many a worker thread takes at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.data import DataLoader
from aiocuda.data._fields import SampleDecoder
from aiocuda.data._job import BatchJob, RowQueue
from aiocuda.data._resources import TAKE_SECONDS
from aiocuda.data._sources import BatchPlan
from aiocuda.data._thread_limit import WINDOW, ThreadLimit
from aiocuda.data._threads import LoaderThreads, ThreadDecoder
from aiocuda.data._upload import HostSlot
from aiocuda.lowlevel import resources_of
from tests.helpers import PATIENCE, quickly

SIZE, MOST = 64, 1.0


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def job() -> BatchJob:
    numbers = tuple(range(SIZE))
    plan = BatchPlan(0, numbers, list(numbers), 0, SIZE, 0, numbers)
    return BatchJob(plan, HostSlot(0, None, None), lambda job: None)


def test_a_job_may_be_added_while_a_worker_counts_the_rows_that_wait() -> None:
    """The loop adds jobs without the lock of the workers, for which it would wait."""
    queue = RowQueue(1, MOST)

    class Counted(BatchJob):
        """A job whose rows are counted while the loop adds another job."""

        def __getattribute__(self, name: str) -> Any:
            if name == "left":
                queue.put(job())
            return super().__getattribute__(name)

    numbers = tuple(range(SIZE))
    plan = BatchPlan(0, numbers, list(numbers), 0, SIZE, 0, numbers)
    for _ in range(2):
        queue.put(Counted(plan, HostSlot(0, None, None), lambda job: None))
    queue.note_times(MOST / 4, MOST / 4, 1)
    taken = queue.take()
    assert taken is not None
    assert len(taken[1]) == 4


def runs(rows: RowQueue) -> list[int]:
    found = []
    while (taken := rows.take()) is not None:
        found.append(len(taken[1]))
    return found


@pytest.mark.parametrize(
    ("each", "cpu", "wanted"),
    [
        (1e-3, 1e-3, [25, 25, 14]),  # 25 need the least time on a processor
        (4e-3, 1e-3, [25, 25, 14]),  # no more than four times as long in all
        (10e-3, 1e-3, [16, 12, 10, 10, 10, 6]),  # it waits for a disk: the parts of four workers, or 100 ms
        (50e-3, 50e-3, [16, 12, 9, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_run_of_quick_rows_takes_the_least_time(each: float, cpu: float, wanted: list[int]) -> None:
    rows = RowQueue(4, MOST, 25e-3)
    rows.note_times(each, cpu, 1)
    rows.put(job())
    assert runs(rows) == wanted


@pytest.mark.parametrize(
    ("each", "jobs", "wanted"),
    [
        (0.0, 1, [1] * SIZE),  # not known yet
        (MOST, 1, [1] * SIZE),
        (MOST / 10, 1, [10] * 5 + [7, 3, 2, 1, 1]),
        (1e-6, 1, [32, 16, 8, 4, 2, 1, 1]),
        (1e-6, 2, [64, 32, 16, 8, 4, 2, 1, 1]),
    ],
)
def test_runs_are_shares_of_the_rows_that_are_left(each: float, jobs: int, wanted: list[int]) -> None:
    rows = RowQueue(2, MOST)
    if each:
        rows.note_times(each, each, 1)
    for _ in range(jobs):
        rows.put(job())
    assert runs(rows) == wanted


def decoder(rows: RowQueue, now: Callable[[], float], decode: Callable[[int], object]) -> ThreadDecoder:
    return ThreadDecoder(SampleDecoder(None, decode), False, rows, now)


def test_rows_after_a_slow_one_are_put_back() -> None:
    clock, rows, one, seen = Clock(), RowQueue(2, MOST), job(), list[int]()

    def decode(sample: int) -> int:
        clock.time += 2 * MOST + 0.1 if sample == 2 else 1e-6
        seen.append(sample)
        return -sample

    rows.note_times(1e-6, 1e-6, 1)
    rows.put(one)
    taken = rows.take()
    assert taken is not None
    assert len(taken[1]) == 32
    assert decoder(rows, clock, decode).decode(*taken) == (False, True)
    assert seen == [0, 1, 2]
    assert one.results == {0: 0, 1: -1, 2: -2}
    assert one.left == SIZE - 3
    order = list[int]()
    while (taken := rows.take()) is not None:
        order += taken[1]
        one.report(taken[1], {}, {}, one.times)
    assert order == list(range(3, SIZE))
    assert one.done


def test_a_batch_that_is_not_wanted_any_more_is_not_decoded_on() -> None:
    rows, one, seen = RowQueue(2, MOST), job(), list[int]()

    def decode(sample: int) -> None:
        seen.append(sample)
        if sample == 2:
            one.cancel()

    rows.note_times(1e-6, 1e-6, 1)
    rows.put(one)
    taken = rows.take()
    assert taken is not None
    assert decoder(rows, Clock(), decode).decode(*taken) == (True, False)
    assert seen == [0, 1, 2]
    assert rows.take() is None


@pytest.mark.asyncio
async def test_threads_share_the_samples_that_became_slow() -> None:
    """Of each two samples after the slow one, both are decoded at a time: else the barrier would break."""
    barrier = threading.Barrier(2)

    def decode(sample: int, out: Any) -> None:
        if sample == SIZE:
            end = time.monotonic() + 2 * TAKE_SECONDS["thread"] + 1e-3
            while time.monotonic() < end:
                pass
        elif sample in (SIZE + 1, SIZE + 2):
            barrier.wait(PATIENCE)
        out["x"][...] = sample

    fields: Any = {"x": ((), np.int64)}
    async with aiocuda.open_device(driver="host") as device:
        options: Any = {"fields": fields, "decode": decode, "batch_size": SIZE, "workers": 2, "prefetch": 1}
        async with DataLoader(device, range(3 * SIZE), **options) as loader:
            batches = aiter(loader)
            for number in range(3):
                batch = await quickly(anext(batches))
                found = await batch.stream.download(batch["x"])
                assert found.tolist() == list(range(number * SIZE, (number + 1) * SIZE))


class AloneAtFirst:
    """Four threads of a loader, of which one decodes the samples of a batch at first: a trial has begun."""

    def __init__(self, device: aiocuda.Device, decode: Callable[[int], object]) -> None:
        self.clock, rows = Clock(), RowQueue(4, 0.0)
        decoder = ThreadDecoder(SampleDecoder(None, decode), False, rows, self.clock, 4)
        self.limit = decoder.limit
        self.limit.is_one = self.limit._is_trial = True
        self.limit._before, self.limit._began = 1e9, self.clock.time  # samples per second of all threads
        self.threads = LoaderThreads(resources_of(device).open_reactor().jobs, "test", 4, rows, decoder)
        self.ended = asyncio.Event()
        numbers = tuple(range(SIZE))
        plan = BatchPlan(0, numbers, list(numbers), 0, SIZE, 0, numbers)
        self.job = BatchJob(plan, HostSlot(0, None, None), lambda job: self.ended.set())
        self.threads.decode(self.job)
        assert self.threads._active == 1

    async def end(self) -> None:
        await quickly(self.ended.wait())
        assert not self.limit.is_one
        assert self.job.errors == {}
        self.threads.close()


@pytest.mark.asyncio
async def test_one_thread_decodes_alone_until_all_are_better() -> None:
    """A call is made meanwhile, by another thread."""
    go, meeting = threading.Event(), threading.Barrier(4)

    def decode(sample: int) -> None:
        if sample == 0:
            assert go.wait(PATIENCE)
        elif sample <= 4:
            meeting.wait(PATIENCE)  # it breaks, and raises, if not four come

    async with aiocuda.open_device(driver="host") as device:
        alone, called = AloneAtFirst(device, decode), asyncio.Event()
        alone.threads.start(lambda: None, lambda result, error: called.set())
        await quickly(called.wait())
        alone.clock.time = 2 * WINDOW  # the trial has ended
        go.set()
        await alone.end()


@pytest.mark.asyncio
async def test_sample_that_blocks_the_only_thread_does_not_stop_the_others() -> None:
    others = threading.Semaphore(0)

    def decode(sample: int) -> None:
        if sample:
            others.release()
        else:
            assert all(others.acquire(timeout=PATIENCE) for _ in range(SIZE - 1))

    async with aiocuda.open_device(driver="host") as device:
        await AloneAtFirst(device, decode).end()


@pytest.mark.asyncio
async def test_thread_that_stays_the_only_one_in_a_long_sample_is_watched() -> None:
    """The run that makes it the only one is late, and puts samples back."""
    clock, rows, others, go = Clock(), RowQueue(2, MOST), threading.Semaphore(0), threading.Event()

    class OneFromNow(ThreadLimit):
        def note(self, *_: object) -> bool:
            self.is_one = not others._value
            return False

    def decode(sample: int) -> None:
        if sample == 0:
            assert all(others.acquire(timeout=PATIENCE) for _ in range(33, SIZE))
        elif sample == 32:
            assert go.wait(PATIENCE)
            clock.time += 2 * MOST + 0.1
        elif sample > 32:
            others.release()

    async with aiocuda.open_device(driver="host") as device:
        decoder = ThreadDecoder(SampleDecoder(None, decode), False, rows, clock, 2)
        decoder.limit = OneFromNow(2)
        threads = LoaderThreads(resources_of(device).open_reactor().jobs, "test", 2, rows, decoder)
        ended, numbers = asyncio.Event(), tuple(range(SIZE))
        rows.note_times(1e-6, 1e-6, 1)
        plan = BatchPlan(0, numbers, list(numbers), 0, SIZE, 0, numbers)
        one = BatchJob(plan, HostSlot(0, None, None), lambda job: ended.set())
        threads.decode(one)
        go.set()
        await quickly(ended.wait())
        assert one.errors == {}
        threads.close()
