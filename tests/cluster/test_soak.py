"""Calls in an open loop while replicas are killed, stopped and faulted, on each engine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aiocuda.cluster import Cluster, DeadlineError, ReplicaHandle, ReplicaLostError
from tests.cluster.conftest import Opener
from tests.cluster.processes import children, open_files
from tests.cluster.things import Recorder
from tests.helpers import PATIENCE, until

REPLICAS = 2

#: Seconds between two disturbances, and between two calls.
DISTURBED_EVERY, CALLED_EVERY = 2.0, 0.01


class Load:
    """Calls with ids, and their outcomes."""

    def __init__(self, handle: ReplicaHandle, chance: random.Random) -> None:
        self.handle = handle
        self.chance = chance
        self.outcomes: dict[int, list[str]] = collections.defaultdict(list)
        self.with_retry: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def call(self, number: int) -> None:
        retry = self.chance.random() < 0.5
        if retry:
            self.with_retry.add(number)
        try:
            answer = await self.handle.call(
                "record", number, self.chance.expovariate(20.0), deadline_s=10.0, retry=retry
            )
            self.outcomes[number].append("answered" if answer == number else f"wrong: {answer}")
        except ReplicaLostError:
            self.outcomes[number].append("lost")
        except DeadlineError:
            self.outcomes[number].append("late")

    async def run(self, seconds: float, is_enough: Callable[[], bool]) -> int:
        """Call for so long, and until it is enough. Return the number of calls."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        number = 0
        while number * CALLED_EVERY < seconds or not is_enough():
            await asyncio.sleep(max(0.0, began + number * CALLED_EVERY - loop.time()))
            task = asyncio.create_task(self.call(number))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            number += 1
        await asyncio.gather(*self.tasks)
        return number


async def disturb(cluster: Cluster, handle: ReplicaHandle, folder: Path, chance: random.Random) -> None:
    """Kill, stop or fault a replica that runs, again and again."""
    while True:
        await asyncio.sleep(DISTURBED_EVERY)
        running = [each.index for each in cluster.statistics().replicas if each.state == "running"]
        if not running:
            continue
        how = chance.choice(["kill", "stop", "fault"])
        if how == "fault":
            with contextlib.suppress(ReplicaLostError, DeadlineError):
                await handle.call("fault", deadline_s=10.0)
        else:
            pid = int((folder / f"{chance.choice(running)}.pid").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seconds", [pytest.param(15, marks=pytest.mark.heavy), pytest.param(300, marks=pytest.mark.soak)]
)
async def test_calls_while_replicas_are_lost(opened: Opener, tmp_path: Path, seconds: float) -> None:
    chance = random.Random(seconds)
    before = children()
    gc.collect()
    files = open_files()
    async with opened(REPLICAS, restarts=1000) as cluster:
        handle = await cluster.spawn(Recorder, tmp_path)
        load = Load(handle, chance)
        disturbing = asyncio.create_task(disturb(cluster, handle, tmp_path, chance))
        calls = await load.run(
            seconds, lambda: sum(each.restarts for each in cluster.statistics().replicas) >= seconds / 8
        )
        disturbing.cancel()
        async with asyncio.timeout(PATIENCE):  # a back-off of 5 s, a stopped replica, and the restart of a worker
            assert await handle.call("record", -1, 0.0, retry=True) == -1
    assert children() == before
    gc.collect()
    # Dask closes connections in later callbacks. The resource tracker of multiprocessing and Dask keep three.
    await until(lambda: open_files() <= files + 3, "the end of Dask's connections")
    assert sorted(load.outcomes) == list(range(calls))
    assert {len(each) for each in load.outcomes.values()} == {1}
    kinds = collections.Counter(each[0] for each in load.outcomes.values())
    assert set(kinds) <= {"answered", "lost", "late"}
    assert kinds["answered"]
    check_runs(tmp_path, load)


def check_runs(folder: Path, load: Load) -> None:
    """A call runs once in an epoch; without retry once in all; and where it is answered, at least once."""
    runs: collections.Counter[int] = collections.Counter()
    for file in folder.glob("*.runs"):
        numbers = file.read_text().split()
        assert len(set(numbers)) == len(numbers), f"a call has run twice in {file.name}"
        runs.update(map(int, numbers))
    assert all(runs[number] <= 1 for number in load.outcomes if number not in load.with_retry)
    assert all(runs[number] for number, outcome in load.outcomes.items() if outcome == ["answered"])
