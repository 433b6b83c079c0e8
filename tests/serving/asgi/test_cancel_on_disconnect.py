"""`CancelOnDisconnect`: what it asks the server for, what it cancels, and what it leaves alone."""

from __future__ import annotations

import asyncio
import contextvars
import warnings
from typing import Any

import pytest

from aiocuda import InvalidTypeError
from aiocuda.serving.asgi import CancelOnDisconnect
from tests.helpers import quickly, turns, until
from tests.serving.asgi.exchange import DISCONNECT, Exchange, Message, chunk, respond
from tests.task_factories import each_factory, factory_of_tasks

POST = {"method": "POST", "headers": [(b"content-length", b"4")]}

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


class Handler:
    """An ASGI application that reads the body, waits until it is released, and responds."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = reads
        self.waits = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: str | None = None
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.reads:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.ended = "received the disconnect"
                    return
                self.bodies.append(message["body"])
                if not message["more_body"]:
                    break
        self.waits.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        await respond(send)
        self.ended = "responded"


@pytest.mark.asyncio
async def test_disconnect_cancels_the_handler_and_nothing_is_sent() -> None:
    handler, exchange = Handler(), Exchange(chunk(b"body"), **POST)
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert handler.ended == "cancelled"
    assert exchange.sent == []
    assert not task.cancelled()
    assert task.cancelling() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("reads", [True, False])
async def test_request_without_a_body_is_watched_from_its_beginning(reads: bool) -> None:
    handler, exchange = Handler(reads), Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert handler.ended == "cancelled"


@pytest.mark.asyncio
async def test_without_a_disconnect_the_handler_responds() -> None:
    handler, exchange = Handler(), Exchange(chunk(b"body"), **POST)
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    await turns()
    handler.release.set()
    await quickly(task)
    assert (exchange.status, exchange.body) == (200, b"done")
    assert handler.bodies == [b"body"]
    await turns(3)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_server_is_asked_only_after_the_last_chunk_and_for_one_message() -> None:
    taken = asyncio.Event()
    waiting = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await waiting.wait()
        assert (await receive())["body"] == b"ab"
        await taken.wait()
        assert (await receive())["body"] == b"cd"
        await asyncio.Event().wait()

    exchange = Exchange(chunk(b"ab", more=True), chunk(b"cd"), **POST)
    task = exchange.start(CancelOnDisconnect(app))
    await turns()
    assert exchange.asked == 0  # the handler has not read the body
    waiting.set()
    await turns()
    assert exchange.asked == 1  # more of the body follows
    taken.set()
    await turns()
    assert exchange.asked == 3  # one message ahead
    exchange.feed(DISCONNECT, DISCONNECT)
    await quickly(task)
    assert exchange.asked == 3


@pytest.mark.asyncio
async def test_body_of_a_handler_that_does_not_read_stays_with_the_server() -> None:
    handler, exchange = Handler(reads=False), Exchange(chunk(b"body"), DISCONNECT, **POST)
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    await turns()
    assert exchange.asked == 0
    handler.release.set()
    await quickly(task)
    assert exchange.status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("scope", "asked"),
    [
        ({"headers": [(b"content-length", b"0")]}, 2),
        ({"headers": [(b"Content-Length", b"00")], "method": "POST"}, 2),
        ({"headers": [(b"transfer-encoding", b"chunked")]}, 0),
        ({"http_version": "2"}, 2),
        ({"http_version": "2", "method": "POST"}, 0),
        ({"http_version": "1.1", "method": "POST"}, 2),
    ],
)
async def test_headers_tell_whether_there_is_a_body(scope: dict[str, Any], asked: int) -> None:
    handler, exchange = Handler(reads=False), Exchange(chunk(), **scope)
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    await turns()
    assert exchange.asked == asked
    handler.release.set()
    await quickly(task)


@pytest.mark.asyncio
async def test_body_that_comes_against_the_headers_is_not_lost() -> None:
    handler, exchange = Handler(), Exchange(chunk(b"ab", more=True), http_version="2")
    task = exchange.start(CancelOnDisconnect(handler))
    await turns()
    assert exchange.asked <= 2
    exchange.feed(chunk(b"cd"))
    await handler.waits.wait()
    assert handler.bodies == [b"ab", b"cd"]
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert handler.ended == "cancelled"


@pytest.mark.asyncio
async def test_disconnect_within_the_body_reaches_the_handler_itself() -> None:
    handler, exchange = Handler(), Exchange(chunk(b"ab", more=True), DISCONNECT, **POST)
    await exchange.run(CancelOnDisconnect(handler))
    assert handler.ended == "received the disconnect"


@pytest.mark.asyncio
async def test_handler_that_asks_gets_the_message_that_was_read_ahead() -> None:
    answers: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            answers.append((await receive())["type"])
        except asyncio.CancelledError:
            answers.extend([(await receive())["type"], (await receive())["type"]])  # again and again
            raise

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await turns()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert answers == ["http.disconnect", "http.disconnect"]
    assert exchange.asked == 2


@pytest.mark.asyncio
async def test_cancelled_receive_of_the_handler_loses_no_message() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for _ in range(3):  # as `Request.is_disconnected` of Starlette
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await receive()
        await asyncio.Event().wait()

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await until(lambda: exchange.asked == 2)
    await turns()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert exchange.asked == 2


@pytest.mark.asyncio
async def test_handler_is_not_cancelled_after_the_last_chunk_of_its_response() -> None:
    ended: list[str] = []
    sent, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await respond(send)
        sent.set()
        await release.wait()  # a background task
        ended.append("ended")

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await sent.wait()
    exchange.feed(DISCONNECT)
    await turns()
    release.set()
    await quickly(task)
    assert ended == ["ended"]
    assert exchange.status == 200


@pytest.mark.asyncio
async def test_disconnect_that_a_server_reports_within_the_last_send_does_not_cancel() -> None:
    ended: list[str] = []
    exchange = Exchange(chunk())

    async def send(message: Message) -> None:
        exchange.sent.append(message)
        if message["type"] == "http.response.body":
            exchange.feed(DISCONNECT)
            await turns(5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await turns(5)
        await respond(send)
        await turns(5)
        ended.append("ended")

    exchange.send = send  # type: ignore[method-assign]
    await exchange.run(CancelOnDisconnect(app))
    assert ended == ["ended"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "last",
    [
        [{"type": "http.response.pathsend", "path": "/file"}],
        [{"type": "http.response.zerocopysend", "file": 3}],
        [
            {"type": "http.response.body", "body": b""},
            {"type": "http.response.trailers", "headers": [], "more_trailers": False},
        ],
    ],
)
async def test_responses_of_extensions_end_too(last: list[Message]) -> None:
    sent, release, ended = asyncio.Event(), asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": len(last) == 2})
        for message in last:
            await send(message)
        sent.set()
        await release.wait()
        ended.append(True)

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await sent.wait()
    exchange.feed(DISCONNECT)
    await turns()
    release.set()
    await quickly(task)
    assert ended == [True]


@pytest.mark.asyncio
async def test_disconnect_while_a_response_streams_cancels() -> None:
    streaming = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        streaming.set()
        await asyncio.Event().wait()

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await streaming.wait()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert len(exchange.sent) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_websockets_and_the_lifespan_pass_through(kind: str) -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    exchange = Exchange(type=kind)
    await exchange.run(CancelOnDisconnect(app))
    assert seen == [exchange.scope, exchange.receive, exchange.send]
    assert exchange.asked == 0


@pytest.mark.asyncio
async def test_response_with_trailers_does_not_end_with_its_body() -> None:
    streaming = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"all"})
        streaming.set()
        await asyncio.Event().wait()

    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await streaming.wait()
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert len(exchange.sent) == 2


# Middlewares that hide the disconnect


@pytest.mark.asyncio
@pytest.mark.parametrize(("answer", "text"), [(chunk(b"body"), "http.request"), (OSError("odd"), "OSError")])
async def test_middleware_that_hides_the_disconnect_is_reported_once(answer: Any, text: str) -> None:
    app = CancelOnDisconnect(Handler())

    async def request() -> None:
        handler = app._app
        assert isinstance(handler, Handler)
        handler.waits.clear()
        handler.release.clear()
        exchange = Exchange(chunk(b"body"), **POST)
        exchange.feed(*[answer] * 5)
        task = exchange.start(app)
        await handler.waits.wait()
        await turns()
        assert exchange.asked == 2  # it is not asked again and again
        handler.release.set()
        await quickly(task)
        assert exchange.status == 200

    with pytest.warns(RuntimeWarning, match=f"a middleware hides the disconnect.*{text}.*outermost"):
        await request()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await request()


@pytest.mark.asyncio
async def test_error_of_receive_reaches_the_handler_that_asks() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with pytest.raises(OSError, match="odd"):
            await receive()
        await respond(send)

    exchange = Exchange(chunk())
    exchange.feed(OSError("odd"))
    with pytest.warns(RuntimeWarning, match="hides"):
        await exchange.run(CancelOnDisconnect(app))
    assert exchange.status == 200


@pytest.mark.asyncio
async def test_nothing_asks_the_server_after_the_end() -> None:
    exchange = Exchange(chunk())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await turns(10)
        await respond(send)

    await CancelOnDisconnect(app)(exchange.scope, exchange.receive, exchange.send)
    assert exchange.asked == 2
    assert exchange.asking == 0


@pytest.mark.asyncio
async def test_nested_middleware_watches_once() -> None:
    handler, exchange = Handler(), Exchange(chunk())
    cancellations: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await handler(scope, receive, send)
        except asyncio.CancelledError:
            await turns(5)
            cancellations.append(task.cancelling())
            raise

    task = exchange.start(CancelOnDisconnect(CancelOnDisconnect(app)))
    await handler.waits.wait()
    await turns()
    assert exchange.asked == 2
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert cancellations == [1]


# Handlers with a mind of their own


async def leaves(app: Any) -> tuple[Exchange, asyncio.Task[None]]:
    """Run an application that waits, and disconnect."""
    exchange = Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(app))
    await turns(20)
    exchange.feed(DISCONNECT)
    return exchange, task


@pytest.mark.asyncio
async def test_handler_that_suppresses_the_cancellation_sends_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it is not cancelled again
        await respond(send)

    exchange, task = await leaves(app)
    await quickly(task)
    assert exchange.sent == []
    assert task.cancelling() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ValueError, SystemError, asyncio.TimeoutError])
async def test_exception_of_the_handler_is_not_lost(error: type[Exception]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error("of the handler") from None

    _, task = await leaves(app)
    with pytest.raises(error, match="of the handler"):
        await quickly(task)
    assert task.cancelling() == 0


@pytest.mark.asyncio
async def test_exception_without_a_disconnect_passes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("of the handler")

    with pytest.raises(ValueError, match="of the handler"):
        await Exchange(chunk()).run(CancelOnDisconnect(app))


@pytest.mark.asyncio
async def test_cleanup_of_the_handler_runs_undisturbed() -> None:
    cleaned: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            cleaned.append("cleaned")

    _, task = await leaves(app)
    await quickly(task)
    assert cleaned == ["cleaned"]


@pytest.mark.asyncio
async def test_cancellation_by_the_server_reaches_the_handler() -> None:
    handler, exchange = Handler(), Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    assert handler.ended == "cancelled"
    await turns(3)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_cancellation_by_the_server_and_a_disconnect_at_once_are_a_cancellation() -> None:
    handler, exchange = Handler(), Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    await turns(5)
    exchange.feed(DISCONNECT)
    while not task.cancelling():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)


@pytest.mark.asyncio
async def test_timeout_around_the_middleware_stays_a_timeout() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.timeout(0.005):
            await CancelOnDisconnect(Handler())(scope, receive, send)

    with pytest.raises(TimeoutError):
        await Exchange(chunk()).run(app)


@pytest.mark.asyncio
@pytest.mark.parametrize("delay", range(12))
async def test_handler_that_ends_at_the_moment_of_the_disconnect_ends_once(delay: int) -> None:
    handler, exchange = Handler(), Exchange(chunk())
    task = exchange.start(CancelOnDisconnect(handler))
    await handler.waits.wait()
    await turns(5)
    if delay % 2:
        handler.release.set()
        await turns(delay // 2)
        exchange.feed(DISCONNECT)
    else:
        exchange.feed(DISCONNECT)
        await turns(delay // 2)
        handler.release.set()
    await quickly(task)
    assert handler.ended in ("cancelled", "responded")
    assert len(exchange.sent) == (2 if handler.ended == "responded" else 0)
    assert task.cancelling() == 0
    await turns(3)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_context_variables_go_both_ways() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(variable.get())
        variable.set("of the handler")
        await respond(send)

    async def around(scope: Any, receive: Any, send: Any) -> None:
        variable.set("of the request")
        await CancelOnDisconnect(app)(scope, receive, send)
        seen.append(variable.get())

    await Exchange(chunk()).run(around)
    assert seen == ["of the request", "of the handler"]


@pytest.mark.asyncio
async def test_task_group_of_the_handler_ends_with_it() -> None:
    ended: list[str] = []

    async def part(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(part("a"))
            group.create_task(part("b"))

    _, task = await leaves(app)
    await quickly(task)
    assert sorted(ended) == ["a", "b"]


def test_argument_is_an_application() -> None:
    with pytest.raises(InvalidTypeError, match="takes an ASGI application"):
        CancelOnDisconnect(7)  # type: ignore[arg-type]


@pytest.mark.asyncio
@each_factory
async def test_disconnect_cancels_the_handler_with_each_task_factory(factory: str) -> None:
    handler, exchange = Handler(), Exchange(chunk(b"bo", more=True), chunk(b"dy"), **POST)
    with factory_of_tasks("takes no keywords"):
        task = exchange.start(CancelOnDisconnect(handler))
    with factory_of_tasks(factory):
        await handler.waits.wait()
        exchange.feed(DISCONNECT)
        await task
    assert handler.ended == "cancelled"
