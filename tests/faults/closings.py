"""Event loops that are closed at random instants, with work in flight, in eight threads that share one device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import random
import sys
import threading
import warnings
from collections import Counter
from typing import Any

import numpy as np

import aiocuda
from aiocuda import Device
from aiocuda.device._resources import resources_of
from aiocuda.driver import _port as ports
from aiocuda.testing.fixtures import left_on
from tests.helpers import AFFINE, PATIENCE, SPIN, until

THREADS = 8

#: The messages of asyncio for a loop that is closed with pending tasks. They are expected here.
EXPECTED = "Task was destroyed but it is pending!"


@dataclasses.dataclass
class Told:
    """What came of it."""

    closed: Counter[str] = dataclasses.field(default_factory=Counter)  #: loops, by how they ended
    errors: list[str] = dataclasses.field(default_factory=list)
    kept_working: int = 0  #: chains that one loop finished in this time
    ports: int = 0  #: created in this time
    resolved: int = 0
    abandoned: int = 0


class Decoys:
    """Pipes with the descriptor numbers that a closed loop has released. No thread may write into them."""

    def __init__(self) -> None:
        self._pipes: list[tuple[int, int]] = []

    def lay(self) -> None:
        while len(self._pipes) < 4:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._pipes.append((reader, writer))

    def take_up(self) -> None:
        for reader, writer in self._pipes:
            with contextlib.suppress(BlockingIOError):
                heard = os.read(reader, 4096)
                raise AssertionError(f"somebody wrote {heard!r} into descriptor {writer}, which is not theirs")
            os.close(reader)
            os.close(writer)
        self._pipes.clear()


async def chain(device: Device, length: int) -> None:
    """Kernels whose order matters, and copies that threads stage."""
    async with device.stream() as stream:
        buffer = await stream.upload(np.zeros(1, np.uint32))
        value = 0
        for index in range(length):
            operation = stream.launch(AFFINE, 1, 1, buffer, 1, 3, index)
            value = (value * 3 + index) % 2**32
            if index % 7 == 0:
                await operation
        assert int((await stream.download(buffer))[0]) == value


async def work(device: Device, chance: random.Random) -> None:
    """Work of every kind, without an end of its own."""
    stream, other = device.stream(), device.stream()
    large = np.ones(300_000, np.uint8)
    while True:
        buffer = stream.empty(large.shape, np.uint8)
        await stream.launch(SPIN, 1, 1, chance.randrange(6_000_000))
        copy = stream.copy(buffer, large)
        other.wait(copy)
        download = other.download(buffer)
        other.launch(SPIN, 1, 1, chance.randrange(6_000_000))
        pinned = device.pinned(100)
        stream.copy(buffer[:400].view(np.float32), pinned)
        waiting = [asyncio.ensure_future(_wait(thing)) for thing in (copy, download, stream.synchronize())]
        await asyncio.wait(waiting, return_when=chance.choice((asyncio.FIRST_COMPLETED, asyncio.ALL_COMPLETED)))
        buffer.free(other)


async def _wait(operation: Any) -> None:
    await operation


def one_loop(device: Device, chance: random.Random, told: Told) -> None:
    """A loop from its making to its end."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: told.errors.append(f"{context['message']} {context!r}"))
    end = chance.choice(("stopped", "cancelled", "raised"))
    told.closed[end] += 1
    task = loop.create_task(work(device, chance))
    seconds = chance.random() ** 3 * 0.02
    if end == "stopped":
        loop.call_later(seconds, loop.stop)
        loop.run_forever()
    elif end == "cancelled":
        loop.call_later(seconds, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    else:

        def leave() -> None:
            raise SystemExit

        loop.call_later(seconds, leave)
        with contextlib.suppress(SystemExit):
            loop.run_forever()
    loop.close()


def thread(device: Device, loops: int, seed: int, told: Told) -> None:
    chance, decoys = random.Random(seed), Decoys()
    try:
        for _ in range(loops):
            one_loop(device, chance, told)
            decoys.lay()
            if chance.random() < 0.2:
                decoys.take_up()
        decoys.take_up()
    except BaseException as error:  # noqa: BLE001 - told in the test's own thread
        told.errors.append(f"in a thread: {error!r}")


async def keep_working(device: Device, threads: list[threading.Thread], told: Told) -> None:
    """The loop that stays: nothing of it may be disturbed, and it takes back what the others leave."""
    while any(each.is_alive() for each in threads):
        await asyncio.wait_for(chain(device, 40), PATIENCE)
        told.kept_working += 1
        await asyncio.sleep(0.002)


async def run(driver: Any, loops: int, seed: int) -> Told:
    """So many loops, each closed at an instant of its own."""
    told = Told()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.errors.append(repr(context)))
    sys.unraisablehook, unraisable = functools.partial(_unraisable, told), sys.unraisablehook
    try:
        device = await aiocuda.open_device(driver=driver)
        await device.load(SPIN)
        await device.load(AFFINE)
        before, pipes = len(ports._ports), _pipes()
        threads = [
            threading.Thread(target=thread, args=(device, loops // THREADS, seed + number, told))
            for number in range(THREADS)
        ]
        for each in threads:
            each.start()
        await keep_working(device, threads, told)
        for each in threads:
            each.join(PATIENCE)
        assert pipes.items() <= _pipes().items()
        await device.drain()
        await until(lambda: _is_quiet(device), "the end of all that the loops left")
        statistics = device.statistics()
        told.ports = len(ports._ports) - before
        told.resolved, told.abandoned = statistics.resolved, statistics.abandoned
        # Notifiers that a starved thread of the host driver rings late count as lost wakes, and are none.
        assert (statistics.in_flight, statistics.failed) == (0, 0), statistics
        assert device.driver.fault is None
        await device.aclose()
    finally:
        sys.unraisablehook = unraisable
        asyncio.get_running_loop().set_exception_handler(None)
    told.errors = [error for error in told.errors if EXPECTED not in error]
    return told


def _pipes() -> dict[int, int]:
    """The identity of each port's descriptor: none may be another pipe later."""
    descriptors = [port.fileno() for port in ports._ports]
    return {descriptor: os.fstat(descriptor).st_ino for descriptor in descriptors if descriptor is not None}


def _is_quiet(device: Device) -> bool:
    gc.collect()
    resources_of(device).loop_states.reclaim()
    return device.statistics().streams <= 1 and left_on(device) == []


def _unraisable(told: Told, what: Any) -> None:
    # If a garbage collection happens while a named tuple is created, whose frame has no builtins, CPython cannot import
    # the
    # module that warns about coroutines that never started, and reports this instead.
    if repr(what.exc_value) != "KeyError('__import__')" or getattr(what.object, "__name__", "") != _wait.__name__:
        told.errors.append(f"unraisable: {what.exc_value!r} in {what.object!r}")


def main(driver: Any, loops: int, seed: int) -> Told:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # streams that the test leaves open on purpose
        warnings.simplefilter("ignore", RuntimeWarning)  # and coroutines that were never begun
        return asyncio.run(run(driver, loops, seed))
