"""`error_responses`: the status of each error, alone, in Starlette and in FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from aiocuda import DeviceFault, InvalidTypeError, QueueFullError
from aiocuda.cluster import ReplicaLostError
from aiocuda.serving import Batch, DeadlineError, MicroBatcher, OverloadedError
from aiocuda.serving.asgi import error_responses
from tests.serving.asgi.exchange import Exchange, chunk

OVERLOAD = OverloadedError("1 024 requests wait, secret", retry_after_s=2.1, queued=1024)
DEADLINE = DeadlineError("the deadline of 0.1 s, secret", deadline_s=0.1, predicted_s=0.2)
LOST = ReplicaLostError("replica 0 was lost, secret", replica=0, epoch=1, reason="secret")
FAULT = DeviceFault("device 0 has faulted, secret", code=700, device=0, operation=None)


def raising(error: BaseException) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    return app


def pure(error: BaseException) -> Any:
    return error_responses(raising(error))


def starlette(error: BaseException) -> Any:
    async def endpoint(request: Request) -> Any:
        raise error

    return Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(error_responses)])


def fastapi(error: BaseException) -> Any:
    app = FastAPI()
    app.add_middleware(error_responses)

    @app.get("/")
    async def endpoint() -> None:
        raise error

    return app


each_framework = pytest.mark.parametrize("make", [pure, starlette, fastapi])


@pytest.mark.asyncio
@each_framework
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        pytest.param(OVERLOAD, 429, "3", id="overload"),
        pytest.param(DEADLINE, 504, None, id="deadline"),
        pytest.param(FAULT, 503, None, id="fault"),
        pytest.param(LOST, 503, None, id="lost-replica"),
        pytest.param(ExceptionGroup("", [FAULT]), 503, None, id="group"),
        pytest.param(ExceptionGroup("", [OVERLOAD, DEADLINE]), 429, "3", id="overload-first"),
        pytest.param(ExceptionGroup("", [OVERLOAD, ExceptionGroup("", [FAULT])]), 503, None, id="fault-first"),
    ],
)
async def test_status_of_each_error(
    make: Callable[[BaseException], Any], error: Exception, status: int, retry_after: str | None
) -> None:
    exchange = await Exchange(chunk()).run(make(error))
    assert exchange.status == status
    assert exchange.headers.get("retry-after") == retry_after
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.headers["content-length"] == str(len(exchange.body))
    assert exchange.json.keys() == {"detail"}
    assert "secret" not in exchange.json["detail"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        *[(0.001, "1"), (1.0, "1"), (1.001, "2"), (59.5, "60"), (float("inf"), "1"), (float("nan"), "1")],
        *[(86_400, "86400"), (1e300, "86400")],
        # Of an application.
        *[(None, "1"), ("soon", "1"), ("30", "30"), ([], "1"), (-5, "1"), pytest.param(10**400, "1", id="huge")],
    ],
)
async def test_retry_after_is_in_whole_seconds(seconds: Any, header: str) -> None:
    exchange = await Exchange(chunk()).run(pure(OverloadedError("full", retry_after_s=seconds)))
    assert exchange.headers["retry-after"] == header


@pytest.mark.asyncio
@pytest.mark.parametrize(("header", "status"), [(b"60", 200), (b"-1", 504), (b"-inf", 504)])
async def test_deadline_that_has_passed_is_answered_as_a_missed_one(header: bytes, status: int) -> None:
    async def infer(batch: Batch[int]) -> list[int]:
        return batch.items

    async def endpoint(request: Request) -> Response:
        await batcher.submit(1, deadline_s=float(request.headers["x-deadline"]))
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(error_responses)])
    async with MicroBatcher(infer, max_batch_size=4) as batcher:
        exchange = await Exchange(chunk(), headers=[(b"x-deadline", header)]).run(app)
    assert exchange.status == status
    statistics = batcher.statistics()
    assert (statistics.accepted, statistics.refused) == ((1, 0) if status == 200 else (0, 1))


@pytest.mark.asyncio
async def test_overload_without_a_time_is_answered() -> None:
    exchange = await Exchange(chunk()).run(pure(OverloadedError("of the application itself")))
    assert (exchange.status, exchange.headers["retry-after"]) == (429, "1")


@pytest.mark.asyncio
@each_framework
@pytest.mark.parametrize(
    "error",
    [
        ValueError("other"),
        TimeoutError("other"),
        QueueFullError("other"),
        ExceptionGroup("", [FAULT, ValueError("other")]),
    ],
)
async def test_other_exceptions_pass(make: Callable[[BaseException], Any], error: Exception) -> None:
    exchange = Exchange(chunk())
    with pytest.raises(type(error)) as caught:
        await exchange.run(make(error))
    assert caught.value is error
    assert [message["status"] for message in exchange.sent[:1]] == ([] if make is pure else [500])


@pytest.mark.asyncio
async def test_error_after_the_start_of_the_response_passes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise FAULT

    exchange = Exchange(chunk())
    with pytest.raises(DeviceFault):
        await exchange.run(error_responses(app))
    assert len(exchange.sent) == 1


@pytest.mark.asyncio
async def test_handler_of_the_application_comes_first() -> None:
    async def handler(request: Request, error: Exception) -> Response:
        return PlainTextResponse("own", 500)

    app = fastapi(FAULT)
    app.add_exception_handler(DeviceFault, handler)
    exchange = await Exchange(chunk()).run(app)
    assert (exchange.status, exchange.body) == (500, b"own")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_scopes_pass(kind: str) -> None:
    with pytest.raises(DeviceFault):
        await Exchange(type=kind).run(pure(FAULT))


@pytest.mark.asyncio
async def test_error_of_send_has_no_context_of_the_answered_error() -> None:
    exchange = Exchange(chunk())

    async def send(message: Any) -> None:
        raise OSError("gone")

    exchange.send = send  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone") as caught:
        await exchange.run(pure(FAULT))
    assert caught.value.__context__ is None


def test_argument_is_an_application() -> None:
    with pytest.raises(InvalidTypeError, match="error_responses takes an ASGI application"):
        error_responses(None)  # type: ignore[arg-type]
