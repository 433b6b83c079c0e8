"""What a web service on ASGI needs: pure ASGI, for Starlette, FastAPI and others. Imports no framework."""

from __future__ import annotations

from ._cancel_middleware import CancelOnDisconnect
from ._cancel_on_disconnect import cancel_on_disconnect
from ._error_responses import error_responses
from ._health import health
from ._lifespan import lifespan
from ._ready import ready

__all__ = ["CancelOnDisconnect", "cancel_on_disconnect", "error_responses", "health", "lifespan", "ready"]
