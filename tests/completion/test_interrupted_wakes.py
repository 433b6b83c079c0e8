"""Ctrl-C wherever it can come while operations are resolved: it costs at most the one waiter that was being woken.

A signal's handler runs between two instructions: where a function begins, behind a call, where a loop turns. An
interrupt is raised at each of these places in turn, in the modules that resolve.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DeviceFault, Operation
from aiocuda.completion import failing, operation, queue, resolve
from aiocuda.testing import Latch
from tests.helpers import Peer, Reports, block_until, open_peer, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

FILES = frozenset(str(module.__file__) for module in (failing, operation, queue, resolve))
PLACES = ("RESUME", "CALL")


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Where in a function an interrupt can come, and some places more."""
    found, former = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "CACHE":
            continue
        if former.startswith(PLACES):
            found.add(instruction.offset)
        former = instruction.opname
        if "JUMP_BACKWARD" in former:
            found.add(instruction.argval)
    return frozenset(found)


class Interrupt:
    """Ctrl-C at the so-manieth of these places that the block comes by."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where: str | None = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._stepped


class Waiters:
    """Everybody who may wait for operations, several of them for the same."""

    def __init__(self, one: Operation[Any], two: Operation[Any], three: Operation[Any]) -> None:
        self.called: list[str] = []
        self.tasks = [asyncio.create_task(each.wait()) for each in (one, two, two, three)]
        self.tasks.append(asyncio.create_task(self._gather(one, two, three)))
        self._last = three

    async def begin(self) -> None:
        await asyncio.sleep(0)
        for name in ("first", "second", "third"):
            self._last.add_done_callback(lambda _, name=name: self.called.append(name))  # type: ignore[misc]

    async def _gather(self, *operations: Operation[Any]) -> None:
        await aiocuda.gather(*operations, return_exceptions=True)

    async def lost(self) -> int:
        """Who was not told, now that everything has finished; nobody is told twice."""
        await turns()
        assert len(set(self.called)) == len(self.called)
        assert self.called == sorted(self.called)
        lost = 3 - len(self.called)
        for task in self.tasks:
            lost += not task.done()
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return lost


def look(device: Device) -> None:
    """A tick of the watchdog."""
    reactor = device._sites.here().reactor
    if reactor._watchdog is not None:
        reactor._watchdog.cancel()
    reactor._watch()


def sweep() -> Iterator[Interrupt]:
    """One at each place, until there are no more."""
    for at in itertools.count(1):
        interrupt = Interrupt(at)
        yield interrupt
        if interrupt.where is None:
            assert at > 50, "the places were not found"
            return


def check(interrupt: Interrupt, lost: int, operations: list[Operation[Any]], device: Device) -> None:
    assert lost <= 1, interrupt.where
    assert not lost or (interrupt.where is not None and interrupt.where.startswith(("_wake", "Operation._tell")))
    assert all(each._passed for each in operations), interrupt.where
    assert device.statistics().in_flight == 0, interrupt.where


async def test_done() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for interrupt in sweep():
            with Latch(device) as latch:
                latch.hold(stream)
                await latch.held()
                operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(4)]
                operations.append(stream.download(buffer))
                operations[3].abandon()
                waiters = Waiters(operations[0], operations[1], operations[4])
                await waiters.begin()
            block_until(lambda: peer.inner.stream_query(stream._lane.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._lane.poll()
            look(device)
            check(interrupt, await waiters.lost(), operations, device)
            assert (operations[4].result() == 3).all()


async def test_alone() -> None:
    """The one operation of a stream, resolved by an await that lingers: others wait for it, too."""
    async with open_peer(Peer(polls_freely=True)) as (peer, device):
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        for at in range(1, 40):
            interrupt = Interrupt(at)
            only = stream.fill(buffer, at)
            called: list[Any] = []
            only.add_done_callback(called.append)
            block_until(lambda: peer.inner.stream_query(stream._lane.handle), "the device")
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                stream._lane.linger(only)
            look(device)
            await asyncio.sleep(0)
            check(interrupt, 1 - len(called), [only], device)


async def test_faulted() -> None:
    for interrupt in sweep():
        with Reports():
            async with open_peer(max_in_flight=4) as (peer, device):
                stream, other = device.stream(), device.stream()
                buffer = stream.empty(4)
                with Latch(device) as latch:
                    latch.hold(stream)
                    await latch.held()
                    operations: list[Operation[Any]] = [stream.fill(buffer, value) for value in range(6)]
                    assert [each.state for each in operations] == ["submitted"] * 3 + ["queued"] * 3
                    operations += [other.synchronize(), stream.synchronize()]
                    operations[1].abandon()
                    waiters = Waiters(operations[0], operations[2], operations[5])
                    await waiters.begin()
                    fault(peer)
                    with contextlib.suppress(KeyboardInterrupt), interrupt:
                        stream._lane.poll()
                    look(device)
                    check(interrupt, await waiters.lost(), operations, device)
                for each in operations[2:]:
                    assert isinstance(each.exception(), DeviceFault), interrupt.where


def fault(peer: Peer) -> None:
    """All at once, and without a thread."""
    with peer.inner._lock:
        peer.inner._fail(719, 0, "so says the test", ZeroDivisionError())
