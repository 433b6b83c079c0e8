"""health: an ASGI application for liveness probes."""

from __future__ import annotations

from ..._base._faults import FAULTS
from ...lowlevel import OPEN_DEVICES
from ._answer import answer
from ._types import Receive, Scope, Send

__all__ = ["Health", "health", "refuse_other_scopes"]


async def refuse_other_scopes(scope: Scope, send: Send) -> bool:
    """Return False for HTTP. Refuse a websocket, and return True, as for a lifespan, which has nothing to do."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
    return bool(scope["type"] != "http")


class Health:
    """The application `health`. An object and not a function: routes of Starlette call a function with a request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await refuse_other_scopes(scope, send):
            return
        if FAULTS.of_process is None and OPEN_DEVICES.fault() is None:
            await answer(send, 200, status="ok")
        else:
            await answer(send, 503, status="failed", detail="A device of this process has faulted.")

    def __repr__(self) -> str:
        return "aiocuda.serving.asgi.health"


#: An ASGI application that answers 200, and 503 once any device of the process has faulted.
health = Health()
