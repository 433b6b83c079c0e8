"""Row 82, web services: pings and the parts for ASGI."""

from __future__ import annotations

from typing import Any

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.serving.asgi import CancelOnDisconnect, cancel_on_disconnect, error_responses, lifespan, ready
from tests.bad_input.case import Case, each_of


def _setup(app: Any) -> Any: ...


async def _coroutine(app: Any) -> None: ...


async def _without_request(item: int) -> None: ...


def _plain(request: Any) -> None: ...


CASES: list[Case] = [
    *(
        Case(
            82, f"{name} {value!r}", each_of(verb, value), error, str(value) if error is InvalidArgumentError else "_s"
        )
        for name, verb in (
            ("ping", lambda world, given: world.device.ping(given)),
            ("ready", lambda world, given: ready(world.device, given)),
        )
        for value, error in (
            (-1.0, InvalidArgumentError),
            (float("nan"), InvalidArgumentError),
            ("1 s", InvalidTypeError),
            (True, InvalidTypeError),
        )
    ),
    *(
        Case(82, f"ready of {value!r}", each_of(lambda _, given: ready(given), value), InvalidTypeError, text)
        for value, text in ((None, "setup of the lifespan"), ("cuda:0", "not str"))
    ),
    *(
        Case(
            82,
            f"exit_on_fault {value!r}",
            each_of(lambda _, given: lifespan(_setup, exit_on_fault=given), value),
            error,
            str(value),
        )
        for value, error in (
            (0, InvalidArgumentError),
            (256, InvalidArgumentError),
            (-1, InvalidArgumentError),
            (True, InvalidTypeError),
            ("70", InvalidTypeError),
        )
    ),
    *(
        Case(82, f"setup {name}", each_of(lambda _, given: lifespan(given), value), InvalidTypeError, text)
        for name, value, text in (
            ("None", None, "not None"),
            ("coroutine function", _coroutine, "contextlib.asynccontextmanager"),
        )
    ),
    *(
        Case(82, f"endpoint {name}", each_of(lambda _, given: cancel_on_disconnect(given), value), error, text)
        for name, value, error, text in (
            ("without a request", _without_request, InvalidArgumentError, "app.add_middleware(CancelOnDisconnect)"),
            ("plain function", _plain, InvalidTypeError, "async def"),
            ("path", "/path", InvalidTypeError, "'/path'"),
        )
    ),
    *(
        Case(
            82, f"{middleware.__name__} of 7", each_of(lambda _, given: given(7), middleware), InvalidTypeError, "not 7"
        )
        for middleware in (CancelOnDisconnect, error_responses)
    ),
]
