"""CancelOnDisconnect: a middleware that cancels the handler of a client that has disconnected."""

from __future__ import annotations

from ._disconnect_watch import WATCHED, DisconnectWatch, may_have_body
from ._hidden_disconnects import HiddenDisconnects
from ._types import ASGIApp, Receive, Scope, Send, check_app

__all__ = ["CancelOnDisconnect"]


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

    def __init__(self, app: ASGIApp) -> None:
        check_app(app, "CancelOnDisconnect")
        self._app = app
        self._hidden = HiddenDisconnects("Make CancelOnDisconnect the outermost middleware.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or WATCHED in scope:
            await self._app(scope, receive, send)
            return
        scope[WATCHED] = True  # not in a copy: code around the middleware may look for entries of the framework
        watch = DisconnectWatch(receive, send, body_received=not may_have_body(scope))
        async with watch:
            await self._app(scope, watch.receive, watch.send)
        self._hidden.report(watch)
