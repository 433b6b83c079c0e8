"""CancelOnDisconnect and cancel_on_disconnect: cancel the handler of a request whose client has disconnected."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

from ..._base._checks import is_coroutine_function, is_function
from ..._base._mistakes import keywords
from ..._base._tasks import start_task
from ...errors import InvalidArgumentError, InvalidTypeError
from ._protocol import ASGIApp, Message, Receive, Scope, Send, check_app

__all__ = ["CancelOnDisconnect", "DisconnectWatch", "HiddenDisconnects", "cancel_on_disconnect"]

P = ParamSpec("P")
R = TypeVar("R")

#: A key of a request's scope: a middleware outside of this one watches the client already.
WATCHED: Final = "aiocuda.disconnect_is_watched"

_DISCONNECT: Final = "http.disconnect"

_MIDDLEWARE: Final = "app.add_middleware(CancelOnDisconnect) needs no parameter, and covers all endpoints"


class DisconnectWatch:
    """The `receive` and `send` of one request, and a block around its handler.

    The handler runs in the task that enters the block, which is the task of the server: context variables that it sets
    are visible to the code around the middleware, as without it, and a cancellation of the server reaches it directly.
    A task of its own would cost a copy of the context, and one more task for each request. The other side is that the
    block has to distinguish its own cancellation from others. It counts them as `asyncio.timeout` does.

    A body must stay with the server until the handler reads it: the server stops reading from the client while the body
    is not taken, and sends ``100 Continue`` when it is asked for the body. So the watch asks for messages itself only
    after the last chunk of the body, when only the disconnect can follow. It keeps the message that it has read, and
    gives it to the handler if that asks.

    Attributes
    ----------
    disconnected : bool
        The client has left, and the handler was cancelled.
    hidden : str or None
        Why the watch cannot see the disconnect: what ``receive`` did after the last chunk.
    """

    def __init__(
        self, receive: Receive, send: Send | None, *, body_received: bool, last_chunk_read: bool = False
    ) -> None:
        self.disconnected = False
        self.hidden: str | None = None
        self._receive = receive
        self._send = send
        self._begins_ahead = body_received
        self._body_received = last_chunk_read  # a request without a body has a last chunk, too
        self._kept: deque[Message] = deque()
        self._error: BaseException | None = None  # of `receive`, for the next message
        self._look: asyncio.Task[None] | None = None
        self._over = False  # the last chunk of the response was sent, or the handler has ended
        self._has_trailers = False
        self._task: asyncio.Task[object] | None = None
        self._cancellations = 0

    # -- the block -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None  # a coroutine of asyncio runs in a task
        self._cancellations = self._task.cancelling()
        if self._begins_ahead:
            self._look_ahead()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> bool:
        self._over = True
        ours = False
        if self.disconnected:
            assert self._task is not None
            # Another cancellation, of the server, goes on. So does an exception that the handler raised instead.
            ours = self._task.uncancel() <= self._cancellations and kind is asyncio.CancelledError
        look = self._look
        # The tasks and the error refer to this object, by frames: each request would leave objects to the collector.
        self._look = self._task = self._error = None
        if look is not None and not look.done():
            look.cancel()
            await asyncio.wait({look})
        return ours

    # -- messages ------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Return the next message of the client: one that the watch has read, or one from the server."""
        while not self._kept:
            if self._look is not None and not self._look.done():
                await asyncio.wait({self._look})  # not awaited itself: a cancellation would end the look
            elif self._error is not None:
                raise self._error
            elif self.disconnected:
                return {"type": _DISCONNECT}
            else:
                message = await self._receive()
                if _is_last_chunk(message):
                    self._body_received = True
                    self._look_ahead()
                return message
        return self._kept.popleft()

    async def send(self, message: Message) -> None:
        """Send a message, unless the client has left. After the last one the handler is not cancelled any more."""
        assert self._send is not None
        if self.disconnected:
            return
        if self._ends_response(message):
            # Before it is sent: then a server may report a disconnect although the client is there.
            self._over = True
        await self._send(message)

    def _ends_response(self, message: Message) -> bool:
        kind = message["type"]
        if kind == "http.response.start":
            self._has_trailers = bool(message.get("trailers"))
        if kind == "http.response.trailers":
            return not message.get("more_trailers", False)
        if self._has_trailers:
            return False
        if kind in ("http.response.body", "http.response.zerocopysend"):
            return not message.get("more_body", False)
        return bool(kind == "http.response.pathsend")

    # -- looking ahead -------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Ask for the next message, unless the handler cannot be cancelled any more."""
        if not self._over:
            self._look = start_task(self._read_ahead)

    async def _read_ahead(self) -> None:
        """Read one message. When this task is done, the message is kept, or the error."""
        try:
            message = await self._receive()
        except Exception as error:  # noqa: BLE001 - the handler gets it if it asks for a message
            self._error = error
            if not self._over:
                self.hidden = f"raised {error!r}"
            return
        self._kept.append(message)
        if self._over:
            return
        if message["type"] == _DISCONNECT:
            self._client_left()
        elif self._body_received:
            self.hidden = f"returned {message['type']!r}"
        elif _is_last_chunk(message):  # of a request without a body
            self._body_received = True
            self._look_ahead()

    def _client_left(self) -> None:
        assert self._task is not None  # the handler runs
        self.disconnected = True
        self._task.cancel("the client has disconnected")


class HiddenDisconnects:
    """Warns once that handlers are not cancelled, because another middleware replaces ``receive``."""

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._reported = False

    def report(self, watch: DisconnectWatch) -> None:
        """Warn if the watch could not see the disconnect."""
        if watch.hidden is not None and not self._reported:
            self._reported = True
            warnings.warn(
                "a handler is not cancelled when its client disconnects: a middleware hides the disconnect; after the "
                f"last chunk of the body its `receive` {watch.hidden} and not 'http.disconnect'. {self._cure}",
                RuntimeWarning,
                stacklevel=2,
            )


class CancelOnDisconnect:
    """A pure ASGI middleware: when a client disconnects, the handler of its request is cancelled.

    Servers and frameworks do not do that: the handler runs to its end, and its result is dropped. With the middleware,
    the await at which the handler waits raises `asyncio.CancelledError`, once. Nothing is sent after it. An exception
    that the handler raises instead goes on to the server.

    The middleware asks the server for messages only after the handler has read the last chunk of the request's body,
    and then for one message. A request without a body is watched from its beginning. It does not cancel after the last
    chunk of the response was sent, so background tasks run to their end. Websockets and the lifespan pass through.

    Make it the outermost middleware: the first of ``middleware=[Middleware(CancelOnDisconnect), …]``, or the last that
    ``app.add_middleware(CancelOnDisconnect)`` adds. A middleware outside of it may hide the disconnect; the first such
    request causes a `RuntimeWarning`. Starlette's `BaseHTTPMiddleware` hides nothing, but outside of it raises
    "No response returned" for a handler that was cancelled. uvicorn stops reading from a client that sends
    its next request before the response (HTTP pipelining), so it does not see this client disconnect.

    Parameters
    ----------
    app
        The ASGI application.
    """

    @keywords("it takes the application", "pass it without a call, Middleware(CancelOnDisconnect)")
    def __init__(self, app: ASGIApp) -> None:
        check_app(app, "CancelOnDisconnect")
        self._app = app
        self._hidden = HiddenDisconnects("Make CancelOnDisconnect the outermost middleware.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or WATCHED in scope:
            await self._app(scope, receive, send)
            return
        scope[WATCHED] = True  # not in a copy: code around the middleware may look for entries of the framework
        watch = DisconnectWatch(receive, send, body_received=not _may_have_body(scope))
        async with watch:
            await self._app(scope, watch.receive, watch.send)
        self._hidden.report(watch)


@keywords("it takes the endpoint", "it decorates an endpoint without a call, `@cancel_on_disconnect`")
def cancel_on_disconnect(endpoint: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Cancel an endpoint of Starlette or FastAPI when its client disconnects. A decorator::

        @app.post("/embed")
        @cancel_on_disconnect
        async def embed(request: Request, item: Item) -> Embedding:
            return await batcher.submit(item)

    The endpoint is a coroutine function with a parameter for the request: it has the name ``request``, or the
    annotation ``Request``, or is the only one. The await at which the endpoint waits raises `asyncio.CancelledError`,
    once, as in `CancelOnDisconnect`. The framework then gets an empty response with status 499, so that the middlewares
    around the endpoint work as usual; the server drops it.

    The endpoint is watched until it returns: a response that streams, and background tasks, are not. If
    `CancelOnDisconnect` watches the request already, the decorator does nothing.

    Raises
    ------
    InvalidTypeError
        It is not a coroutine function.
    InvalidArgumentError
        It has no parameter for the request.
    """
    if not is_function(endpoint):
        raise InvalidTypeError(f"cancel_on_disconnect decorates an endpoint, not {endpoint!r}")
    if not is_coroutine_function(endpoint):
        raise InvalidTypeError(
            f"{_name(endpoint)} is no coroutine function, and a function on a thread cannot be cancelled: make it "
            "`async def`"
        )
    parameter = _RequestParameter(endpoint)
    hidden = HiddenDisconnects(f"Use the middleware: {_MIDDLEWARE}.")

    @functools.wraps(endpoint)
    async def watched(*args: P.args, **kwargs: P.kwargs) -> R:
        request = parameter.of_call(args, kwargs)
        if request.scope["type"] != "http" or WATCHED in request.scope:
            return await endpoint(*args, **kwargs)
        async with _watch(request) as watch:
            result = await endpoint(*args, **kwargs)
        if watch.disconnected:
            return cast("R", _empty_response())
        hidden.report(watch)
        return result

    return watched


class _RequestParameter:
    """The parameter of an endpoint that receives the request."""

    def __init__(self, endpoint: Callable[..., object]) -> None:
        self._endpoint = _name(endpoint)
        usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(inspect.signature(endpoint).parameters.values())
        positional = [each for each in parameters if each.kind in usual]
        alone = [each for each in parameters if each.name != "self"]
        found = [each for each in parameters if each.name == "request"] or [
            each for each in parameters if _is_request(each.annotation)
        ]
        if not found and len(alone) == 1 and alone[0] in positional and alone[0].annotation is inspect.Parameter.empty:
            found = alone
        if not found:
            raise InvalidArgumentError(
                f"{self._endpoint} has no parameter for the request, by which a disconnect is seen: add "
                f"`request: Request`, or use the middleware: {_MIDDLEWARE}",
                argument="endpoint",
            )
        self._name = found[0].name
        self._position = positional.index(found[0]) if found[0] in positional else None

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the request of one call."""
        if self._name in kwargs:
            request = kwargs[self._name]
        elif self._position is not None and self._position < len(args):
            request = args[self._position]
        else:
            request = None
        if not hasattr(request, "scope"):
            raise InvalidTypeError(
                f"{self._name} of {self._endpoint} is a request of Starlette, not {request!r}; {_MIDDLEWARE}"
            )
        return request


def _name(endpoint: Any) -> str:
    return getattr(endpoint, "__qualname__", None) or repr(endpoint)


def _is_request(annotation: Any) -> bool:
    """Return whether an annotation is the class ``Request`` of a framework, or its name as a string."""
    if isinstance(annotation, str):
        return annotation.strip().rpartition(".")[2] == "Request"
    return isinstance(annotation, type) and any(base.__name__ == "Request" for base in annotation.__mro__)


def _watch(request: Any) -> DisconnectWatch:
    """Return a watch of a request of Starlette, which then reads its body through the watch.

    A request has no public way to replace its ``receive``, and to know whether its body was read. Both attributes have
    these names since 2018; the tests use the present version.
    """
    consumed = request._stream_consumed
    body_received = consumed or not _may_have_body(request.scope)
    watch = DisconnectWatch(request.receive, None, body_received=body_received, last_chunk_read=consumed)
    request._receive = watch.receive
    return watch


def _empty_response() -> object:
    """Return a response that the server drops. The request came from Starlette, so it is installed."""
    from starlette.responses import Response

    return Response(status_code=499)


def _may_have_body(scope: Scope) -> bool:
    """Return False if the headers show that the request has no body.

    A body in HTTP/1 has one of two headers. One in HTTP/2 may have neither; only GET and HEAD then have none.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    if b"transfer-encoding" in headers:
        return True
    if b"content-length" in headers:
        return bool(headers[b"content-length"].strip(b" 0"))
    return not scope.get("http_version", "1.1").startswith("1") and scope["method"] not in ("GET", "HEAD")


def _is_last_chunk(message: Message) -> bool:
    return bool(message["type"] == "http.request" and not message.get("more_body", False))
