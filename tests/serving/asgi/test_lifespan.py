"""`lifespan` without a server: states, errors, and what a fault asks for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import aiocuda
from aiocuda import ClosedError, Device, DeviceFault, InvalidArgumentError, InvalidTypeError
from aiocuda._base._faults import FAULTS
from aiocuda.serving.asgi import _fault_exit, lifespan, ready
from tests.helpers import PATIENCE, TRAP, UVLOOP, Reports, turns, until
from tests.serving.asgi.exchange import Exchange, chunk

LOOPS = pytest.mark.parametrize(
    "factory",
    [asyncio.new_event_loop, pytest.param(UVLOOP, marks=pytest.mark.skipif(not UVLOOP, reason="no uvloop"))],
    ids=["asyncio", "uvloop"],
)


@pytest.fixture(autouse=True)
def process_goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process of the tests does not end; a server that does not end by itself is cancelled early."""
    monkeypatch.setattr(_fault_exit, "_SERVER_SECONDS", 0.02)
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.name == "aiocuda-exit":
            thread.cancel()
            thread.join(PATIENCE)


async def fault(device: Device) -> None:
    async with device.stream() as stream:
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)


@contextlib.asynccontextmanager
async def setup(app: Any) -> AsyncIterator[dict[str, Any]]:
    async with aiocuda.open_device(driver="host") as device:
        app.add_route("/ready", ready(device))
        yield {"device": device}


class Server:
    """The server's side of a lifespan."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.sent: list[str] = []
        self.state: dict[str, Any] = {}

    async def _send(self, message: Any) -> None:
        self.sent.append(message["type"])

    async def __aenter__(self) -> Self:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        self.task = asyncio.create_task(self._app(scope, self._messages.get, self._send))
        self._messages.put_nowait({"type": "lifespan.startup"})
        await until(lambda: self.sent or self.task.done())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        if exc[0] is None:
            await asyncio.wait({self.task}, timeout=PATIENCE)  # `wait_for` of Python 3.11 loses a cancellation
            self.task.result()


@pytest.mark.asyncio
@pytest.mark.parametrize("framework", [Starlette, FastAPI])
async def test_setup_opens_and_closes_and_gives_the_state(framework: Any) -> None:
    async def endpoint(request: Request) -> Any:
        return PlainTextResponse(request.state.device.name)

    app = framework(routes=[Route("/", endpoint)], lifespan=lifespan(setup))
    async with Server(app) as server:
        device = server.state["device"]
        assert not device.closed
        assert (await Exchange(chunk(), state=dict(server.state)).run(app)).body.decode() == device.name
        assert (await Exchange(chunk(), path="/ready").run(app)).status == 200
    assert device.closed
    assert server.sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.asyncio
async def test_state_can_be_none() -> None:
    @contextlib.asynccontextmanager
    async def empty(app: Any) -> AsyncIterator[None]:
        yield

    async with Server(Starlette(lifespan=lifespan(empty))) as server:
        assert server.state == {}


@pytest.mark.asyncio
async def test_parts_are_closed_in_reverse_order() -> None:
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *exc: object) -> None:
            closed.append(self.name)

    @contextlib.asynccontextmanager
    async def parts(app: Any) -> AsyncIterator[None]:
        async with Part("device"), Part("batcher"):
            yield

    async with Server(Starlette(lifespan=lifespan(parts, exit_on_fault=70))):
        assert closed == []
    assert closed == ["batcher", "device"]


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [None, 70])
async def test_error_of_setup_is_a_failed_start(code: int | None) -> None:
    @contextlib.asynccontextmanager
    async def fails(app: Any) -> AsyncIterator[None]:
        async with aiocuda.open_device(driver="host") as device:
            await fault(device)
            raise device.fault or AssertionError
        yield  # type: ignore[unreachable,unused-ignore]

    server = Server(Starlette(lifespan=lifespan(fails, exit_on_fault=code)))
    with sigterm_handler() as seen:
        with pytest.raises(DeviceFault):
            async with server:
                pass
        await turns()
    assert seen == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert server.sent == ["lifespan.startup.failed"]


@pytest.mark.asyncio
async def test_error_at_the_end_of_setup_is_a_failed_shutdown() -> None:
    @contextlib.asynccontextmanager
    async def fails(app: Any) -> AsyncIterator[None]:
        yield
        raise ClosedError("at the end")

    with pytest.raises(ClosedError, match="at the end"):
        async with Server(Starlette(lifespan=lifespan(fails, exit_on_fault=70))) as server:
            pass
    assert server.sent == ["lifespan.startup.complete", "lifespan.shutdown.failed"]


@contextlib.contextmanager
def sigterm_handler() -> Iterator[list[int]]:
    """Count SIGTERM, as a server does."""
    seen: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, former)


def test_fault_asks_the_server_to_end_once_and_the_loop_ends_with_the_code() -> None:
    ended: list[str] = []
    watches = FAULTS.watches

    @contextlib.asynccontextmanager
    async def around(app: Any) -> AsyncIterator[Any]:
        async with lifespan(setup, exit_on_fault=70)(app) as state:
            yield state
        await turns(3)  # the end of another lifespan around it
        ended.append("around")

    async def main() -> None:
        async with Server(Starlette(lifespan=around)) as server:
            assert seen == []
            await fault(server.state["device"])
            async with aiocuda.open_device(driver="host") as other:
                await fault(other)
            await until(lambda: seen)
            await turns()
        await asyncio.Event().wait()  # a server that would not end

    try:
        with sigterm_handler() as seen, pytest.raises(SystemExit) as caught:
            asyncio.run(main())
    finally:
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert caught.value.code == 70
    assert seen == [signal.SIGTERM]
    assert ended == ["around"]
    assert signal.SIGTERM in blocked
    assert [watch for watch in FAULTS.watches if watch not in watches] == []


@LOOPS
@pytest.mark.parametrize("unfinished", ["nothing", "an older task", "a newer task", "a generator"])
@pytest.mark.parametrize("late", range(6))
def test_the_loop_ends_with_the_code_whenever_the_main_task_ends(
    factory: Any, unfinished: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main task ends some iterations after the lifespan, perhaps before the callbacks of the lifespan's task."""
    monkeypatch.setattr(_fault_exit, "_SERVER_SECONDS", PATIENCE)
    ended: list[str] = []
    kept: list[Any] = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns(2)
            ended.append(unfinished)

    async def generate() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await turns(2)
            ended.append(unfinished)

    async def main() -> None:
        shutdown, complete = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with lifespan(setup, exit_on_fault=70)(Starlette()) as state:
                assert state is not None
                await fault(state["device"])
                if unfinished == "a newer task":
                    kept.append(asyncio.create_task(background()))
                await shutdown.wait()
            complete.set()

        if unfinished == "an older task":
            kept.append(asyncio.create_task(background()))
        kept.append(asyncio.create_task(serve()))
        await asyncio.to_thread(int)
        await until(lambda: seen)
        if unfinished == "a generator":
            kept.append(generate())
            await anext(kept[-1])
        shutdown.set()
        await complete.wait()
        await turns(late)

    try:
        with sigterm_handler() as seen, pytest.raises(SystemExit) as caught:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert caught.value.code == 70
    assert ended == ([] if unfinished == "nothing" else [unfinished])


def test_fault_during_the_shutdown_ends_with_the_code_too() -> None:
    @contextlib.asynccontextmanager
    async def late(app: Any) -> AsyncIterator[Any]:
        async with aiocuda.open_device(driver="host") as device:
            yield
            await fault(device)

    async def main() -> None:
        async with Server(Starlette(lifespan=lifespan(late, exit_on_fault=71))):
            pass
        await asyncio.Event().wait()

    try:
        with sigterm_handler(), pytest.raises(SystemExit) as caught:
            asyncio.run(main())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert caught.value.code == 71


def test_fault_before_the_service_starts_ends_it() -> None:
    @contextlib.asynccontextmanager
    async def continues(app: Any) -> AsyncIterator[Any]:
        async with aiocuda.open_device(driver="host") as device:
            await fault(device)
            yield

    async def main() -> None:
        async with Server(Starlette(lifespan=lifespan(continues, exit_on_fault=70))):
            await until(lambda: seen)
        await asyncio.Event().wait()

    try:
        with sigterm_handler() as seen, pytest.raises(SystemExit):
            asyncio.run(main())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@pytest.mark.asyncio
async def test_without_an_exit_code_a_fault_changes_nothing() -> None:
    with sigterm_handler() as seen:
        async with Server(Starlette(lifespan=lifespan(setup))) as server:
            await fault(server.state["device"])
            await turns()
    assert seen == []


@pytest.mark.asyncio
async def test_server_without_a_handler_of_sigterm_is_reported_and_goes_on() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with Reports() as reports:
        async with Server(Starlette(lifespan=lifespan(setup, exit_on_fault=70))) as server:
            await fault(server.state["device"])
            await until(lambda: reports.contexts)
    assert "exit_on_fault=70 cannot end the process" in reports.contexts[0]["message"]
    assert "liveness probe" in reports.contexts[0]["message"]
    assert isinstance(reports.failures[0], DeviceFault)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, InvalidArgumentError, "from 1 to 255, not 0"),
        (256, InvalidArgumentError, "256"),
        (-1, InvalidArgumentError, "-1"),
        (True, InvalidTypeError, "True"),
        ("70", InvalidTypeError, "'70'"),
    ],
)
def test_wrong_exit_codes_are_refused(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lifespan(setup, exit_on_fault=value)


async def _generator(app: Any) -> AsyncIterator[None]:
    yield


async def _coroutine(app: Any) -> None: ...


def _sync_generator(app: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize("wrong", [_generator, _coroutine, _sync_generator])
def test_setup_that_is_not_decorated_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"contextlib\.asynccontextmanager"):
        lifespan(wrong)


def test_setup_that_was_called_is_refused() -> None:
    @contextlib.asynccontextmanager
    async def setup(app: Any) -> AsyncIterator[None]:
        yield

    with pytest.raises(InvalidTypeError, match="setup was called already"):
        lifespan(setup(None))  # type: ignore[arg-type]


def test_setup_is_a_function() -> None:
    with pytest.raises(InvalidTypeError, match="takes the application, not None"):
        lifespan(None)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_result_of_setup_is_checked() -> None:
    with pytest.raises(InvalidTypeError, match="not an async context manager"):
        async with lifespan(lambda app: contextlib.nullcontext if app else 7)(None):  # type: ignore[arg-type]
            pass


@pytest.mark.asyncio
async def test_state_is_a_mapping() -> None:
    @contextlib.asynccontextmanager
    async def wrong(app: Any) -> AsyncIterator[Any]:
        yield ["device"]

    with pytest.raises(InvalidTypeError, match="yields a mapping or None, not list"):
        async with lifespan(wrong)(None):
            pass
