"""cancel_on_disconnect: a decorator for endpoints of Starlette and FastAPI."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from ..._base._checks import is_coroutine_function, is_function
from ...errors import InvalidArgumentError, InvalidTypeError
from ._disconnect_watch import WATCHED, DisconnectWatch, may_have_body
from ._hidden_disconnects import HiddenDisconnects

__all__ = ["cancel_on_disconnect"]

P = ParamSpec("P")
R = TypeVar("R")

_MIDDLEWARE = "app.add_middleware(CancelOnDisconnect) needs no parameter, and covers all endpoints"


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
            return cast("R", _client_left())
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
    if request._stream_consumed:
        watch = DisconnectWatch.after_body(request.receive)
    else:
        watch = DisconnectWatch(request.receive, None, body_received=not may_have_body(request.scope))
    request._receive = watch.receive
    return watch


def _client_left() -> object:
    """Return an empty response. The request came from Starlette, so it is installed."""
    from starlette.responses import Response

    return Response(status_code=499)
