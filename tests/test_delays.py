"""Tests of ``--delay-jobs``."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiocuda.driver._workers import Workers
from tests.delays import JobDelays


def test_jobs_of_drivers_loaders_and_executors_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = JobDelays(0.0)
    delays.install(monkeypatch)
    workers, steps, tags = Workers(1), iter((True, True, False)), queue.SimpleQueue[int]()
    workers.call_until_false(lambda: next(steps))
    workers.submit(lambda: None, tags, 7)  # after the steps, on the only thread
    assert tags.get() == 7
    assert delays.count == 1 + 3 + 1
    workers.close()
    with ThreadPoolExecutor() as executor:
        assert executor.submit(lambda: 5).result() == 5
    assert delays.count == 6
