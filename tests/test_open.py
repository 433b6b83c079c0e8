"""Opening a device: warnings and errors for wrong use, and the line that they name."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import aiocuda
from aiocuda import (
    ClosedError,
    DrainTimeoutWarning,
    DriverError,
    HostDriverWarning,
    InvalidTypeError,
    NoEventLoopError,
)
from aiocuda._base._types import DeviceProperties, SourceLine
from aiocuda.data import DataLoader
from aiocuda.driver import _port
from aiocuda.driver._workers import most_threads
from aiocuda.driver.cuda import _probe
from aiocuda.driver.host import HostDriver
from tests.helpers import PATIENCE, Latch, Peer, open_peer, turns, until

CURE = "use `async with aiocuda.open_device() as device`, or `device = await aiocuda.open_device()`"


def line_of(text: str) -> int:
    """Where this file has these words."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.rstrip().endswith(text))
    return number


def test_used_without_being_opened() -> None:
    opening: Any = aiocuda.open_device(driver="host")
    for name in ("stream", "aclose", "name"):
        with pytest.raises(AttributeError, match=f"no device yet and has no '{name}': {CURE[:12]}") as caught:
            getattr(opening, name)
        assert str(caught.value).endswith(CURE)
    with pytest.raises(AttributeError, match=r"has no 'nonsense'$"):
        _ = opening.nonsense
    assert not hasattr(opening, "stream")
    with pytest.raises(InvalidTypeError, match="not `with`: use `async with"), opening:
        pass


def test_never_awaited() -> None:
    """As it is with a coroutine, and with the place."""
    with pytest.warns(RuntimeWarning, match="open_device\\(\\) was never awaited: use `async with") as told:
        aiocuda.open_device(driver="host")  # here it is forgotten
        gc.collect()
    (warning,) = told
    assert (warning.filename, warning.lineno) == (__file__, line_of("# here it is forgotten"))


def test_without_asyncios_loop() -> None:
    """As trio runs a coroutine, by `send`."""
    with pytest.raises(NoEventLoopError, match=r"asyncio\.run\(main\(\)\).*trio"):
        aiocuda.open_device(driver="host").__await__().send(None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, [(0, 64)]),
        ({"streams_ahead": 3}, [(0, 3)]),
        ({"streams_ahead": 0}, []),
        ({"streams_ahead": 3, "asynchronous": False}, []),  # it has one stream
    ],
)
async def test_driver_is_asked_for_streams_ahead(options: dict[str, Any], asked: list[tuple[int, int]]) -> None:
    peer, found, threads = Peer(), [], set()

    def reserve(device: int, count: int) -> None:
        found.append((device, count))
        threads.add(threading.current_thread())

    peer.before["stream_reserve"] = reserve
    async with open_peer(peer, **options):
        assert found == asked
    assert threading.current_thread() not in threads


@pytest.mark.asyncio
async def test_streams_that_cannot_be_made_ahead_fail_the_opening() -> None:
    with Peer() as peer:
        peer.refuse("stream_reserve")
        with pytest.raises(DriverError, match="does not take this"):
            await aiocuda.open_device(driver=peer.driver)
        await (await aiocuda.open_device(driver=peer.driver)).aclose()


@pytest.mark.asyncio
async def test_awaited_or_entered_device_causes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with aiocuda.open_device(driver="host"):
            pass
        await (await aiocuda.open_device(driver="host")).aclose()
        with pytest.raises(aiocuda.InvalidArgumentError):
            await aiocuda.open_device(9, driver="host")
        gc.collect()


@pytest.mark.asyncio
async def test_fallback_warning_names_the_line_that_opens_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIOCUDA_DRIVER", raising=False)
    monkeypatch.setattr(_probe, "find", lambda: "there is none")
    with pytest.warns(HostDriverWarning, match="there is none") as told:
        async with aiocuda.open_device():  # here it is entered
            pass
    with pytest.warns(HostDriverWarning) as again:
        device = await aiocuda.open_device()  # here it is awaited
    await device.aclose()
    with pytest.warns(HostDriverWarning) as in_a_task:
        opening = aiocuda.open_device()  # here it is called
        await (await asyncio.get_running_loop().create_task(opening.__aenter__())).aclose()
    lines = [(warning.filename, warning.lineno) for warning in (*told, *again, *in_a_task)]
    ends = ("entered", "awaited", "called")
    assert lines == [(__file__, line_of(f"# here it is {end}")) for end in ends]


@pytest.mark.asyncio
async def test_drain_warning_names_the_line_that_leaves_the_device() -> None:
    latches: list[Latch] = []

    async def leave() -> None:
        async with aiocuda.open_device(driver="host") as device:  # here it is left
            device.drain_timeout = 0.01
            latches.append(Latch(device))
            stream = device.stream()
            latches[0].hold(stream)
            await latches[0].held()
            raise ZeroDivisionError

    with (
        pytest.warns(DrainTimeoutWarning, match="1 operation did not finish") as told,
        pytest.raises(ZeroDivisionError),
    ):
        await asyncio.create_task(leave())
    latches[0].release()
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line_of("# here it is left"))]


def test_line_is_warned_about_once_as_usual_in_python() -> None:
    program = """
    from aiocuda._base._types import SourceLine
    for _ in range(3):
        SourceLine.of_caller().warn("once", RuntimeWarning)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stderr.count("RuntimeWarning: once") == 1


def test_the_place_of_what_only_the_loop_called_is_where_the_loop_was_run() -> None:
    found: list[SourceLine] = []

    async def main() -> None:
        of_caller = SourceLine.of_caller.__func__  # type: ignore[attr-defined]  # called by `map`, it has no frame above
        asyncio.get_running_loop().call_soon(found.extend, map(of_caller, [SourceLine]))
        await asyncio.sleep(0)

    asyncio.run(main())  # here the loop runs
    (place,) = found
    assert str(place) == f"{__file__}:{line_of('# here the loop runs')}"


class HeldDriver(HostDriver):
    """A host driver whose threads wait for the test before they open a device or page-lock memory."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[threading.Event] = []  #: set one to let its thread go on
        self.holds = True

    def _wait(self) -> None:
        if self.holds:
            gate = threading.Event()
            self.held.append(gate)
            assert gate.wait(PATIENCE)

    def device_open(self, device: int) -> DeviceProperties:
        self._wait()
        return super().device_open(device)

    def pin(self, address: int, nbytes: int) -> None:
        self._wait()
        super().pin(address, nbytes)

    def let_threads_end_their_jobs(self, count: int) -> None:
        """Wait until at most so many threads have a job, and all others have reported the end of their job."""
        others = threading.Barrier(most_threads() - count + 1)
        port = self.open_port(lambda: None)
        for _ in range(others.parties - 1):
            self.offload(lambda: others.wait(PATIENCE), port, 0)
        others.wait(PATIENCE)
        port.close()


Opener: TypeAlias = Callable[[HeldDriver], AbstractAsyncContextManager[object]]


async def cancel_one_and_open_another(driver: HeldDriver, opener: Opener) -> None:
    """Cancel an opening whose thread is held; let it go on while the thread of the next one is held."""

    async def open_one() -> None:
        async with opener(driver):
            pass

    first = asyncio.create_task(open_one())
    await until(lambda: len(driver.held) == 1)
    first.cancel()
    await turns()
    second = asyncio.create_task(open_one())
    if first.done():  # a loader waits for its thread first
        await until(lambda: len(driver.held) == 2)
    driver.holds = False
    driver.held[0].set()
    driver.let_threads_end_their_jobs(len(driver.held) - 1)
    await turns()
    with pytest.raises(asyncio.CancelledError):
        await first
    for gate in driver.held:
        gate.set()
    await second


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "opener",
    [
        lambda driver: aiocuda.open_device(driver=driver),
        lambda driver: aiocuda.ManagedContext(driver=driver),
    ],
    ids=["device", "context"],
)
async def test_opening_works_after_a_cancelled_one_whose_thread_ends_late(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_port, "_free", {True: deque(), False: deque()})  # the second one gets the port of the first
    driver = HeldDriver()
    try:
        await cancel_one_and_open_another(driver, opener)
    finally:
        driver.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_loader_opens_after_a_cancelled_one_whose_thread_ends_late() -> None:
    driver = HeldDriver()
    driver.holds = False
    try:
        async with aiocuda.open_device(driver=driver) as device:
            driver.holds = True
            await cancel_one_and_open_another(
                driver, lambda _: DataLoader(device, range(3), fields={"x": ((), "i8")}, workers=1, executor="process")
            )
    finally:
        driver.close()


@pytest.mark.asyncio
async def test_a_device_whose_opening_was_cancelled_is_closed() -> None:
    """At each turn of the loop. The thread of the opening may go on."""
    known = {id(each) for each in gc.get_objects() if isinstance(each, HostDriver)}
    for count in range(1, 1000):
        opening = asyncio.ensure_future(aiocuda.open_device(driver="host")._open())
        await turns(count)
        if opening.done():
            await (await opening).aclose()
            break
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for driver in gc.get_objects():
            if isinstance(driver, HostDriver) and id(driver) not in known:
                with pytest.raises(ClosedError):
                    driver.device_open(0)
    else:
        raise AssertionError("no opening has ended")
