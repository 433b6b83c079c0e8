"""``--delay-jobs``: random delays before the jobs of threads show that no test depends on the speed of threads."""

from __future__ import annotations

import concurrent.futures.thread
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from aiocuda.driver._workers import Workers

__all__ = ["JobDelays"]

T = TypeVar("T")


class JobDelays:
    """Delays each job of a driver's worker threads, each step of a loader's threads, and each job of an executor.

    The jobs of ``asyncio.to_thread`` are those of an executor.

    Parameters
    ----------
    longest
        Seconds of the longest delay. The delays of a test depend on its node id only.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._random = random.Random()
        #: The delays so far.
        self.count = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Delay the jobs of this process until the patches are undone."""
        submit, call_until_false = Workers.submit, Workers.call_until_false
        item = vars(concurrent.futures.thread)["_WorkItem"]
        run = item.run

        def submit_delayed(workers: Workers, work: Callable[[], object], port: Any, tag: int) -> None:
            submit(workers, self._delayed(work), port, tag)

        def call_delayed_until_false(workers: Workers, step: Callable[[], bool]) -> None:
            call_until_false(workers, self._delayed(step))

        def run_delayed(*arguments: Any) -> None:
            self._sleep()  # a job can be cancelled until `run`, as while it is queued
            run(*arguments)

        patch.setattr(Workers, "submit", submit_delayed)
        patch.setattr(Workers, "call_until_false", call_delayed_until_false)
        patch.setattr(item, "run", run_delayed)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin the delays of a test."""
        self._random.seed(item.nodeid)

    def _delayed(self, work: Callable[[], T]) -> Callable[[], T]:
        def call() -> T:
            self._sleep()
            return work()

        return call

    def _sleep(self) -> None:
        self.count += 1
        time.sleep(self._random.uniform(0, self._longest))  # noqa: TID251 - the delay itself
