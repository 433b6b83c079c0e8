"""`cancel_on_disconnect` on endpoints of Starlette and FastAPI."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.serving.asgi import CancelOnDisconnect, cancel_on_disconnect
from tests.helpers import quickly, turns
from tests.serving.asgi.endpoints import Work, fastapi_app, starlette_app
from tests.serving.asgi.exchange import DISCONNECT, Exchange, chunk

BODY = b'{"text": "a"}'

POST = {"method": "POST", "headers": [(b"content-length", b"13"), (b"content-type", b"application/json")]}

App = Callable[..., Any]

REQUESTS = [
    pytest.param(starlette_app, "/plain", {}, id="starlette"),
    pytest.param(starlette_app, "/plain", POST, id="starlette-body"),
    pytest.param(starlette_app, "/unnamed", {}, id="starlette-unnamed"),
    pytest.param(starlette_app, "/class", {}, id="starlette-class"),
    pytest.param(fastapi_app, "/plain", {}, id="fastapi"),
    pytest.param(fastapi_app, "/item", POST, id="fastapi-body"),
    pytest.param(fastapi_app, "/dependency", POST, id="fastapi-dependency"),
]


def exchange_with(path: str, scope: dict[str, Any]) -> Exchange:
    return Exchange(chunk(BODY if scope else b""), path=path, raw_path=path.encode(), **scope)


@pytest.mark.asyncio
@pytest.mark.parametrize(("make", "path", "scope"), REQUESTS)
async def test_disconnect_cancels_the_endpoint(make: App, path: str, scope: dict[str, Any]) -> None:
    work, exchange = Work(), exchange_with(path, scope)
    task = exchange.start(make(work))
    await quickly(work.begun.wait())
    await turns(5)
    assert exchange.asked == 2
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert work.ended == ["cancelled"]
    assert (exchange.status, exchange.body) == (499, b"")  # which the server drops
    assert task.cancelling() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("make", "path", "scope"), REQUESTS)
async def test_endpoint_responds_as_without_the_decorator(make: App, path: str, scope: dict[str, Any]) -> None:
    work, exchange = Work(), exchange_with(path, scope)
    work.release.set()
    await quickly(exchange.start(make(work)))
    assert work.ended == ["done"]
    assert exchange.status == 200
    assert set(work.bodies) <= {BODY if scope else b""}
    await turns(3)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_query_parameters_of_fastapi_stay() -> None:
    work, exchange = Work(), Exchange(chunk(), path="/plain", query_string=b"q=7")
    work.release.set()
    await exchange.run(fastapi_app(work))
    assert exchange.json == {"q": 7}


@pytest.mark.asyncio
@pytest.mark.parametrize(("make", "path", "scope"), REQUESTS)
async def test_middleware_around_the_decorator_watches(make: App, path: str, scope: dict[str, Any]) -> None:
    work, exchange = Work(), exchange_with(path, scope)
    task = exchange.start(make(work, middleware=[Middleware(CancelOnDisconnect)]))
    await quickly(work.begun.wait())
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert work.ended == ["cancelled"]
    assert exchange.sent == []


class Passes(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-passed"] = "yes"
        return response


@pytest.mark.asyncio
@pytest.mark.parametrize(("make", "path", "scope"), REQUESTS)
async def test_decorator_inside_of_a_middleware_of_starlette(make: App, path: str, scope: dict[str, Any]) -> None:
    work, exchange = Work(), exchange_with(path, scope)
    task = exchange.start(make(work, middleware=[Middleware(Passes)]))
    await quickly(work.begun.wait())
    await turns(10)
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert work.ended == ["cancelled"]
    assert exchange.headers["x-passed"] == "yes"


@pytest.mark.asyncio
@pytest.mark.parametrize(("make", "path", "scope"), REQUESTS)
async def test_middleware_outside_of_one_of_starlette(make: App, path: str, scope: dict[str, Any]) -> None:
    work, exchange = Work(), exchange_with(path, scope)
    task = exchange.start(make(work, middleware=[Middleware(CancelOnDisconnect), Middleware(Passes)]))
    await quickly(work.begun.wait())
    await turns(10)
    exchange.feed(DISCONNECT)
    await quickly(task)
    assert work.ended == ["cancelled"]
    assert exchange.sent == []


class Hides:
    """A middleware that gives the body again and again, as many do that read it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()

        async def again() -> Any:
            return message

        await self.app(scope, again, send)


@pytest.mark.asyncio
async def test_hidden_disconnect_is_reported_once() -> None:
    work = Work()
    app = starlette_app(work, middleware=[Middleware(Hides)])

    async def request() -> None:
        work.begun.clear()
        work.release.clear()
        exchange = exchange_with("/plain", {})
        task = exchange.start(app)
        await quickly(work.begun.wait())
        await turns(5)
        work.release.set()
        await quickly(task)
        assert exchange.status == 200

    with pytest.warns(RuntimeWarning, match=r"a middleware hides the disconnect.*add_middleware\(CancelOnDisconnect\)"):
        await request()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await request()


@pytest.mark.asyncio
async def test_exception_of_the_endpoint_passes() -> None:
    @cancel_on_disconnect
    async def endpoint(request: Request) -> None:
        raise ValueError("of the endpoint")

    exchange = Exchange(chunk())
    with pytest.raises(ValueError, match="of the endpoint"):
        await endpoint(Request(exchange.scope, exchange.receive, exchange.send))


@pytest.mark.asyncio
async def test_cancellation_by_the_server_reaches_the_endpoint() -> None:
    work, exchange = Work(), exchange_with("/plain", {})
    task = exchange.start(starlette_app(work))
    await quickly(work.begun.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(task)
    assert work.ended == ["cancelled"]


def test_signature_stays() -> None:
    async def endpoint(request: Request, q: int = 0) -> int:
        """Its docstring."""
        return q

    wrapped = cancel_on_disconnect(endpoint)
    assert inspect.signature(wrapped) == inspect.signature(endpoint)
    assert inspect.iscoroutinefunction(wrapped)
    assert wrapped.__doc__ == endpoint.__doc__


async def _none() -> None: ...


async def _item(item: int, q: str = "") -> None: ...


async def _unmarked(item, q):  # type: ignore[no-untyped-def]
    ...


@pytest.mark.parametrize("endpoint", [_none, _item, _unmarked])
def test_endpoint_without_a_request_is_refused_with_the_cure(endpoint: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"no parameter for the request.*request: Request.*CancelOnDisconnect"
    ):
        cancel_on_disconnect(endpoint)


@pytest.mark.asyncio
async def test_value_that_is_no_request_is_refused() -> None:
    @cancel_on_disconnect
    async def endpoint(request: Any) -> None: ...

    with pytest.raises(InvalidTypeError, match="is a request of Starlette, not 7"):
        await endpoint(7)
    with pytest.raises(InvalidTypeError, match="not None"):
        await endpoint()  # type: ignore[call-arg]


def test_plain_functions_are_refused() -> None:
    def endpoint(request: Request) -> None: ...

    with pytest.raises(InvalidTypeError, match="async def"):
        cancel_on_disconnect(endpoint)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="decorates an endpoint"):
        cancel_on_disconnect("/plain")  # type: ignore[arg-type]
