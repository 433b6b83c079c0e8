"""error_responses: a middleware that answers overload, missed deadlines, device faults and lost replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from ..._base._mistakes import keywords
from ...errors import DeadlineError, DeviceFault, ReplicaLostError
from .._errors import OverloadedError
from ._protocol import ASGIApp, Message, Receive, Scope, Send, answer, check_app

__all__ = ["ErrorResponses", "error_responses"]

#: Status and message by error. Of several errors in a group, the first in this order decides.
_ANSWERS: tuple[tuple[type[Exception], int, str], ...] = (
    (DeviceFault, 503, "The service is not available."),
    (ReplicaLostError, 503, "The service is not available."),
    (OverloadedError, 429, "Too many requests are waiting. Try again later."),
    (DeadlineError, 504, "The request cannot be completed within its deadline."),
)

#: The most of ``Retry-After``: a day. 1e300 s would be a header of 301 digits, which clients do not read.
MOST_SECONDS: Final = 86_400

_ANSWERED = tuple(kind for kind, _, _ in _ANSWERS)


@keywords("it takes the application", "pass it without a call, Middleware(error_responses)")
def error_responses(app: ASGIApp) -> ASGIApp:
    """Answer errors of devices, batchers and clusters with the status that HTTP clients expect. A pure ASGI middleware.

    ==================  ======  ====================================================================================
    exception           status  headers
    ==================  ======  ====================================================================================
    `OverloadedError`   429     ``Retry-After``: the error's ``retry_after_s`` in whole seconds, rounded up, up to a day
    `DeadlineError`     504
    `DeviceFault`       503
    `ReplicaLostError`  503     of `aiocuda.cluster`
    ==================  ======  ====================================================================================

    The body is a JSON object with a short ``detail`` and no internals. An `ExceptionGroup`, as a task group raises it,
    is answered if all its exceptions are in the table; a device fault or a lost replica then decides before an
    overload, and an overload before a deadline. Other exceptions are not touched, and neither is an exception after the
    response has started.

    In Starlette and FastAPI use ``middleware=[Middleware(error_responses)]`` or `add_middleware`: their own handler,
    which answers unknown exceptions with 500, is outside of it. An exception handler of the application for one of
    these classes, or for `RuntimeError`, comes first. An application that is wrapped from the outside, as in
    ``error_responses(Starlette(…))``, has answered with 500 already.
    """
    check_app(app, "error_responses")
    return ErrorResponses(app)


class ErrorResponses:
    """The middleware that `error_responses` returns."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except Exception as error:
            found = None if started else _answer_to(error)
            if found is None:
                raise
            status, detail, headers = found
        else:
            return
        # Not inside the `except`: an error of `send` is not an error during the handling of the first one.
        await answer(send, status, headers, detail=detail)


def _answer_to(error: Exception) -> tuple[int, str, list[tuple[bytes, bytes]]] | None:
    """Return status, message and headers; None if an error, or one of a group, has no answer."""
    leaves = list(_leaves(error))
    if not all(isinstance(leaf, _ANSWERED) for leaf in leaves):
        return None
    kind, status, detail = next(found for found in _ANSWERS if any(isinstance(leaf, found[0]) for leaf in leaves))
    headers = [(b"retry-after", b"%d" % _retry_after(leaves))] if kind is OverloadedError else []
    return status, detail, headers


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group, and of the groups in it; of another exception, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _retry_after(leaves: list[BaseException]) -> int:
    """Return whole seconds, at least 1, at most `MOST_SECONDS`."""
    return max(_whole_seconds(getattr(leaf, "retry_after_s", None)) for leaf in leaves)


def _whole_seconds(seconds: Any) -> int:
    """Return a time in whole seconds, rounded up. An `OverloadedError` of the application may have none."""
    try:
        return min(max(1, math.ceil(float(seconds))), MOST_SECONDS)
    except (TypeError, ValueError, OverflowError):  # None, text, or no finite number
        return 1
