from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable

import pytest

from aiocuda.driver._port import open_port
from aiocuda.testing._blocking import LoopGuard
from tests.helpers import PATIENCE


@pytest.fixture(autouse=True)
def no_blocking() -> None:
    """In place of the fixture of this name that guards all other tests: these block their loop on purpose."""


def _call_from_aiocuda(function: Callable[[], None]) -> None:
    """Call a function with aiocuda on the stack: a port without a descriptor calls it to wake its loop."""
    port = open_port(function, watchable=False)
    port.put(1)
    port.close()


def _block(until: Callable[[], bool]) -> None:
    """Block in C, where blockbuster sees nothing."""
    deadline = time.monotonic() + PATIENCE
    while not until() and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            queue.SimpleQueue[None]().get(timeout=0.05)


def _ticks(number: int) -> Callable[[], bool]:
    seen = iter(range(number))
    return lambda: next(seen, None) is None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_call_that_blocks_the_loop_is_found() -> None:
    guard = LoopGuard(asyncio.get_running_loop())
    with pytest.raises(AssertionError, match=r"(?s)^a call of aiocuda blocked the event loop:.*in put"), guard:
        _call_from_aiocuda(lambda: _block(lambda: bool(guard.stalls)))
    assert len(guard.stalls) == 1


@pytest.mark.slow
@pytest.mark.asyncio
async def test_what_the_test_itself_does_is_its_own_business() -> None:
    with LoopGuard(asyncio.get_running_loop()):
        _block(_ticks(10))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_idle_loop_is_not_blocked() -> None:
    loop = asyncio.get_running_loop()
    with LoopGuard(loop):
        await loop.run_in_executor(None, _block, _ticks(10))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_turning_loop_is_not_blocked() -> None:
    with LoopGuard(asyncio.get_running_loop()):
        for _ in range(10_000):
            await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_failure_of_the_block_is_kept() -> None:
    with pytest.raises(ZeroDivisionError), LoopGuard(asyncio.get_running_loop()):
        raise ZeroDivisionError


@pytest.mark.asyncio
async def test_guards_share_one_thread_that_ends_after_them() -> None:
    with LoopGuard(asyncio.get_running_loop()), LoopGuard(asyncio.get_running_loop()):
        assert [each.name for each in threading.enumerate()].count("aiocuda-loop-watch") == 1
    for thread in threading.enumerate():
        if thread.name == "aiocuda-loop-watch":
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.mark.asyncio
async def test_blockbuster_names_what_may_block() -> None:
    blockbuster = pytest.importorskip("blockbuster")
    gate = threading.Event()
    with LoopGuard(asyncio.get_running_loop()):
        gate.wait(0.001)  # the test's own
        with pytest.raises(blockbuster.BlockingError):
            _call_from_aiocuda(lambda: _wait(gate))


def _wait(gate: threading.Event) -> None:
    gate.wait(0.001)
