"""health and ready: ASGI applications for liveness and readiness probes."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Final, overload

from ..._base._checks import check_timeout
from ..._base._faults import FAULTS
from ..._base._mistakes import keywords
from ...device import Device
from ...errors import AiocudaError, ClosedError, DeviceFault, InvalidTypeError
from ...lowlevel import OPEN_DEVICES
from ._protocol import Receive, Scope, Send, answer

__all__ = ["Health", "Probe", "Ready", "health", "ready"]


_IN_SETUP: Final = "call app.add_route('/ready', ready(device)) in the setup of the lifespan, where the device is open"


class Probe:
    """An ASGI application that answers 200, or 503 with the problem.

    It is an object and not a function: routes of Starlette call a function with a request, which the types of
    ``add_route`` expect. As an endpoint of FastAPI, ``app.get("/ready")(probe)``, it is called without arguments. Both
    get a response.
    """

    #: FastAPI reads this signature. It would take the parameters of ASGI for those of a query, and answer 422.
    __signature__: ClassVar = inspect.Signature()

    @overload
    async def __call__(self, request: Any = None, /) -> Any: ...

    @overload
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def __call__(
        self, scope: Scope | None = None, receive: Receive | None = None, send: Send | None = None
    ) -> Any:
        if scope is None or send is None:
            return _response(*_answer_to(await self.problem()))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        if scope["type"] == "http":  # a lifespan has nothing to do
            status, fields = _answer_to(await self.problem())
            await answer(send, status, **fields)
        return None

    async def problem(self) -> str | None:
        """Return why the probe fails; None if it does not."""
        raise NotImplementedError


def _answer_to(problem: str | None) -> tuple[int, dict[str, str]]:
    """Return the status and the JSON object of a response."""
    return (200, {"status": "ok"}) if problem is None else (503, {"status": "failed", "detail": problem})


def _response(status: int, fields: dict[str, str]) -> object:
    """Return a response of Starlette, for FastAPI."""
    from starlette.responses import JSONResponse

    return JSONResponse(fields, status)


class Health(Probe):
    """The application `health`."""

    async def problem(self) -> str | None:
        """Return the problem if a device of the process has faulted."""
        faulted = FAULTS.of_process is not None or OPEN_DEVICES.fault() is not None
        return "A device of this process has faulted." if faulted else None

    def __repr__(self) -> str:
        return "aiocuda.serving.asgi.health"


#: An ASGI application that answers 200, and 503 once any device of the process has faulted.
health = Health()


@keywords("ready takes a device and timeout_s=", _IN_SETUP)
def ready(device: Device, timeout_s: float | None = 1.0) -> Probe:
    """Return an ASGI application that answers 200 while a device works, and 503 if not, for readiness probes.

    Each request waits for `Device.ping`. The answer is 503 if the device does not answer within ``timeout_s`` seconds,
    has faulted, or is closed. Requests that overlap wait for one ping.

    In FastAPI, ``app.get("/ready")(ready(device))`` adds it, too. The device is opened in the ``setup`` of `lifespan`,
    so add the route there::

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
        cure = _IN_SETUP
        if hasattr(device, "healthy"):  # a cluster or a batcher
            cure = "its attribute healthy is for a route of your own"
        raise InvalidTypeError(f"ready takes an aiocuda.Device, not {type(device).__name__}: {cure}")
    return Ready(device, check_timeout(timeout_s, "timeout_s of ready(device, timeout_s)"))


class Ready(Probe):
    """The application that `ready` returns."""

    def __init__(self, device: Device, timeout_s: float | None) -> None:
        self._device = device
        self._timeout_s = timeout_s

    async def problem(self) -> str | None:
        """Return the problem if the device does not answer a ping."""
        try:
            await self._device.ping(self._timeout_s)
        except DeviceFault:
            return "The device has faulted."
        except ClosedError:
            return "The device is closed."
        except TimeoutError:
            return "The device does not answer."
        except AiocudaError:
            return "The device cannot be used."
        return None

    def __repr__(self) -> str:
        return f"aiocuda.serving.asgi.ready({self._device!r}, {self._timeout_s})"
