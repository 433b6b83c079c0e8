"""The types of ASGI, checks of ASGI applications, and whole responses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from ..._base._checks import is_function
from ...errors import InvalidTypeError

__all__ = ["ASGIApp", "Message", "Receive", "Scope", "Send", "answer", "check_app"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_app(app: object, taker: str) -> None:
    """Raise `InvalidTypeError` unless an argument of ``taker`` can be an ASGI application."""
    if not is_function(app):
        raise InvalidTypeError(
            f"{taker} takes an ASGI application, which is called with (scope, receive, send), not {app!r}"
        )
    if inspect.isfunction(app):
        try:
            inspect.signature(app).bind(None, None, None)
        except TypeError:
            raise InvalidTypeError(
                f"{taker} takes an ASGI application, and {app.__qualname__} is an endpoint: for all endpoints "
                f"`app.add_middleware({taker})`, and for one `@cancel_on_disconnect`"
            ) from None


async def answer(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]] = (), /, **fields: str) -> None:
    """Send a response with ``fields`` as its JSON object."""
    body = json.dumps(fields).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
