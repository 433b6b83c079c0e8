"""ready: an ASGI application for readiness probes."""

from __future__ import annotations

from ..._base._checks import check_timeout
from ...device import Device
from ...errors import AiocudaError, ClosedError, DeviceFault, InvalidTypeError
from ._answer import answer
from ._health import refuse_other_scopes
from ._types import ASGIApp, Receive, Scope, Send

__all__ = ["Ready", "ready"]


def ready(device: Device, timeout_s: float | None = 1.0) -> ASGIApp:
    """Return an ASGI application that answers 200 while a device works, and 503 if not, for readiness probes.

    Each request waits for `Device.ping`. The answer is 503 if the device does not answer within ``timeout_s`` seconds,
    has faulted, or is closed. Requests that overlap wait for one ping.

    The device is opened in the ``setup`` of `lifespan`, so add the route there::

        @contextlib.asynccontextmanager
        async def setup(app):
            async with aiocuda.open_device() as device:
                app.add_route("/ready", ready(device))
                yield {"device": device}

    Parameters
    ----------
    device
        An open device. Each worker process has its own.
    timeout_s
        Seconds within which the device has to answer; None for no limit. Choose less than the time limit of the probe.
    """
    if not isinstance(device, Device):
        cure = "; call ready(device) in the setup of the lifespan, where the device is open" if device is None else ""
        if hasattr(device, "healthy"):  # a cluster or a batcher
            cure = "; its attribute healthy is for a route of your own"
        raise InvalidTypeError(f"ready takes an aiocuda.Device, not {type(device).__name__}{cure}")
    return Ready(device, check_timeout(timeout_s, "timeout_s"))


class Ready:
    """The application that `ready` returns. An object: routes of Starlette call a function with a request."""

    def __init__(self, device: Device, timeout_s: float | None) -> None:
        self._device = device
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await refuse_other_scopes(scope, send):
            return
        try:
            await self._device.ping(self._timeout_s)
        except DeviceFault:
            detail = "The device has faulted."
        except ClosedError:
            detail = "The device is closed."
        except TimeoutError:
            detail = "The device does not answer."
        except AiocudaError:
            detail = "The device cannot be used."
        else:
            await answer(send, 200, status="ok")
            return
        await answer(send, 503, status="failed", detail=detail)

    def __repr__(self) -> str:
        return f"aiocuda.serving.asgi.ready({self._device!r}, {self._timeout_s})"
