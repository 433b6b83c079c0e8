"""What the tests of streams and memory share: kernels, drivers that do one thing differently, and ways to wait."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, DeviceFault, DriverError, Kernel, Stream
from aiocuda._base import _host_use
from aiocuda._base._checks import has_gil
from aiocuda._base._fault_watch import FaultWatch
from aiocuda._base._faults import FAULTS
from aiocuda._base._types import DeviceProperties, Dim3
from aiocuda.device._resources import resources_of
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Driver, RecordedCall, record_after
from aiocuda.testing import kernels
from aiocuda.testing.kernels import Sample

#: Seconds after which something that must come has not come.
PATIENCE = 60.0
#: Seconds for which a latch holds a stream, if no test releases it: longer than every wait of a test.
LATCH = 2 * PATIENCE

try:
    import uvloop
except ImportError:  # `make` installs it; where only what aiocuda needs is there, its loop is left out
    UVLOOP: Callable[[], asyncio.AbstractEventLoop] | None = None
else:
    UVLOOP = uvloop.new_event_loop


def _kernel(sample: Sample) -> Kernel:
    return Kernel(sample.name, source=sample.source, host=sample.host)


SAXPY, AFFINE, SPIN, TRAP = map(_kernel, (kernels.SAXPY, kernels.AFFINE, kernels.SPIN, kernels.TRAP))


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A device of each driver, with its kernels loaded: CUDA loads code while no kernel runs, so not beside a latch."""
    async with aiocuda.open_device(driver=request.param) as opened:
        if request.param == "cuda":
            for kernel in (SAXPY, AFFINE, SPIN):
                await opened.load(kernel)
        yield opened


@pytest_asyncio.fixture
async def stream(device: Device) -> AsyncIterator[Stream]:
    """A stream of `device`."""
    async with device.stream(name="left") as opened:
        yield opened


@pytest_asyncio.fixture
async def other(device: Device) -> AsyncIterator[Stream]:
    """Another one."""
    async with device.stream(name="right") as opened:
        yield opened


@pytest.fixture
def latch(device: Device, stream: Stream, other: Stream) -> Iterator[Latch]:
    """A latch for `device`, open at the end of the test, whatever the test did, and before its streams close."""
    with Latch(device) as opened:
        yield opened


class Latch(aiocuda.testing.Latch):
    """A latch that does not end by itself before the test fails."""

    def __init__(self, device: Device, *, seconds: float = LATCH) -> None:
        super().__init__(device, seconds=seconds)


@pytest.fixture
def no_blocking_calls() -> Iterator[None]:
    """An error where aiocuda calls a function that may block the loop, by its name: no time is measured."""
    if importlib.util.find_spec("blockbuster") is None:
        yield
        return
    from blockbuster import blockbuster_ctx

    with blockbuster_ctx("aiocuda", excluded_modules=["aiocuda.testing"]):
        yield


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe the GIL from the start of a run or an epoch, for a tenth of a second."""
    monkeypatch.setattr(_host_use, "PROBE_AFTER", 0.0)
    monkeypatch.setattr(_host_use, "PROBE_SECONDS", 0.1)


class FaultListener(FaultWatch):
    """Calls a function with each fault of the process, on the thread that finds it, until it is stopped."""

    def __init__(self, call: Callable[[DeviceFault], object]) -> None:
        self._tell = call
        FAULTS.add(self)

    def on_fault(self, fault: DeviceFault) -> None:
        self._tell(fault)


def installed(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a test hides it
        return False


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Let the loop turn until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {PATIENCE} s"
        await asyncio.sleep(0.001)


async def until_gone(things: Iterable[weakref.ref[Any]]) -> None:
    """Run the loop until the last of them has been collected; otherwise fail with the referrers of the rest."""
    left = list(things)
    with contextlib.suppress(AssertionError):
        await until(lambda: (gc.collect(), not any(thing() is not None for thing in left))[1])
    assert not (stayed := [thing() for thing in left if thing() is not None]), holders(stayed)


def holders(things: list[Any], deepest: int = 10) -> str:
    """The referrers of each object, and their referrers, as far as the garbage collector knows them."""
    lines: list[str] = []
    known = {id(things), id(lines), id(sys._getframe())}

    def look(thing: object, depth: int) -> None:
        referrers = gc.get_referrers(thing)
        known.update((id(referrers), id(sys._getframe()), id(sys._getframe(1))))
        for one in referrers:
            if id(one) in known or len(lines) > 200:
                continue
            known.add(id(one))
            code = getattr(one, "f_code", None) or getattr(one, "cr_code", None)
            where = f" {code.co_qualname}:{getattr(one, 'f_lineno', None)}" if code is not None else ""
            lines.append(f"{'  ' * depth}{type(one).__name__}{where or ' ' + str(one)[:100]}")
            if depth < deepest:
                look(one, depth + 1)

    for thing in things:
        known.add(id(thing))
        lines.append(f"{thing!r:.100} is held by")
        look(thing, 1)
    return "\n".join(lines)


async def jobs_done(device: Device) -> None:
    """Return when the running loop has no job on a thread of the device. At first, staging memory is being locked."""
    jobs = resources_of(device).loop_states.here().reactor.jobs
    await until(lambda: not jobs.running and not len(jobs), "the end of all jobs")


async def turns(count: int = 200) -> None:
    """Let the loop turn so often, in 2 ms: what could come by itself has come. For what must not."""
    for _ in range(count):
        await asyncio.sleep(0)


def block_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Block the loop until the condition holds, so that the loop finds everything that happened in one iteration."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {PATIENCE} s"
        pause.wait(0.001)


async def quickly(awaitable: Any) -> Any:
    """Its result, or an error if it never comes."""
    return await asyncio.wait_for(awaitable, PATIENCE)


def in_thread(main: Callable[[], Any]) -> Any:
    """Run a coroutine function in an event loop of its own, in a thread of its own."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((asyncio.run(main()), None))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(1.5 * PATIENCE)  # what waits in it fails before
    assert not thread.is_alive(), "the other loop hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def in_a_child(tell: Callable[[], str]) -> str:
    """The output of a forked child. The child exits by itself and runs no clean-up of its parent."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, tell().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


class FewQueues(HostDriver):
    """A host driver with as few hardware queues as CUDA has by default."""

    def device_open(self, device: int) -> DeviceProperties:
        return dataclasses.replace(super().device_open(device), hardware_queues=8)


class Peer:
    """A driver that hands every verb on to another one, counts it, and does first what a test has asked for.

    ``before["fill"]`` is called with a fill's arguments before the fill; raising there, the verb fails. A launch is
    counted and met as ``"launch"``.
    """

    def __init__(self, inner: Any = None, *, polls_freely: bool | None = None) -> None:
        self.inner = HostDriver() if inner is None else inner
        #: A loop that polls the host driver takes the time of its threads, so none does, unless a test wants it.
        self.polls_freely: bool = self.inner.polls_freely if polls_freely is None else polls_freely
        self.calls: Counter[str] = Counter()
        self.before: dict[str, Callable[..., object]] = {}
        self.wants_image: bool = self.inner.wants_image

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.inner, name)
        if not callable(verb):
            return verb

        def call(*arguments: Any) -> Any:
            self.meet(name, *arguments)
            return verb(*arguments)

        return call

    def recorder(self, stream: int) -> Callable[[int], None]:
        return lambda event: self.event_record(event, stream)

    def meet(self, name: str, *arguments: Any) -> None:
        self.calls[name] += 1
        before = self.before.get(name)
        if before is not None:
            before(*arguments)

    def launcher(
        self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int
    ) -> Callable[[Sequence[Any]], None]:
        enqueue = self.inner.launcher(stream, function, grid, block, shared_bytes)

        def launch(values: Sequence[Any]) -> None:
            self.meet("launch", values)
            enqueue(values)

        return launch

    def recorded_launch(self, stream: int, *bound: Any) -> RecordedCall:
        return record_after(self.launcher(stream, *bound), self.recorder(stream))

    def recorded_upload(self, stream: int, *ends: int) -> RecordedCall:
        return record_after(lambda _: self.upload(stream, *ends), self.recorder(stream))

    def recorded_download(self, stream: int, *ends: int) -> RecordedCall:
        return record_after(lambda _: self.download(stream, *ends), self.recorder(stream))

    def recorded_wait(self, stream: int) -> RecordedCall:
        return record_after(lambda events: [self.stream_wait(stream, each) for each in events], self.recorder(stream))

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        def wait(event: int) -> None:
            for stream in streams:
                self.stream_wait(stream, event)

        return wait

    def refuse(self, name: str, times: int = 1, error: Callable[[], BaseException] | None = None) -> None:
        """The next calls of a verb fail."""
        left = itertools.repeat(None, times)

        def fail(*arguments: object) -> None:
            for _ in left:
                raise (refusal if error is None else error)()  # noqa: RSE102 - it is called

        self.before[name] = fail

    def refuse_here(self, name: str) -> None:
        """The next call of a verb by this very thread fails."""
        here, former = threading.get_ident(), self.before.get(name)
        left = itertools.repeat(None, 1)

        def fail(*arguments: object) -> None:
            if former is not None:
                former(*arguments)
            if threading.get_ident() == here:
                for _ in left:
                    raise refusal()

        self.before[name] = fail

    @contextlib.contextmanager
    def holding_jobs(self) -> Iterator[None]:
        """Delay the start of calls that may block until the block ends."""
        held: list[tuple[Any, ...]] = []
        self.__dict__["offload"] = lambda *job: held.append(job)
        try:
            yield
        finally:
            del self.__dict__["offload"]
            for job in held:
                self.inner.offload(*job)

    @property
    def driver(self) -> Driver:
        """Itself, as what it is."""
        return cast("Driver", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.inner, HostDriver):
            self.inner.close()


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, with an author for its commits, and return what it prints."""
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def refusal() -> DriverError:
    """What a driver answers to a call that it does not take, and that leaves it usable."""
    return DriverError("the driver does not take this", code=1, call="cuSomething")


@contextlib.asynccontextmanager
async def open_peer(peer: Peer | None = None, **options: Any) -> AsyncIterator[tuple[Peer, Device]]:
    """A device whose driver is a peer. Without the GIL, skip the test of one that poses as CUDA's."""
    with peer or Peer() as opened:
        if opened.driver.name == "cuda" and not has_gil():
            pytest.skip("CUDA is refused on free-threaded Python")
        async with aiocuda.open_device(driver=opened.driver, **options) as device:
            yield opened, device


class Reports:
    """The contexts that the running loop's exception handler receives."""

    def __init__(self) -> None:
        self.contexts: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.contexts.append(context))
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.get_running_loop().set_exception_handler(None)

    @property
    def failures(self) -> list[BaseException]:
        return [context["exception"] for context in self.contexts]
