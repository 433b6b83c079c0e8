"""What a web service on ASGI needs: pure ASGI, for Starlette, FastAPI and others. Imports no framework."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..._base._mistakes import lacking
from ._disconnects import CancelOnDisconnect, cancel_on_disconnect
from ._error_responses import error_responses
from ._lifespan import lifespan
from ._probes import health, ready

__all__ = ["CancelOnDisconnect", "cancel_on_disconnect", "error_responses", "health", "lifespan", "ready"]

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    __getattr__ = partial(lacking, __name__)
