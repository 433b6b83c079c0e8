"""The types of ASGI, and checks of ASGI applications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from ..._base._checks import is_function
from ...errors import InvalidTypeError

__all__ = ["ASGIApp", "Message", "Receive", "Scope", "Send", "check_app"]

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
