"""`health` and `ready`: as applications of their own, and as routes and mounts of Starlette and FastAPI."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount, Route

import aiocuda
from aiocuda import Device, DeviceFault, InvalidArgumentError, InvalidTypeError
from aiocuda._base._faults import FAULTS
from aiocuda.serving.asgi import health, ready
from tests.helpers import PATIENCE, TRAP, Latch, open_peer
from tests.serving.asgi.exchange import Exchange, chunk


async def status_of(app: Any, path: str = "/", **scope: Any) -> int:
    return (await Exchange(chunk(), path=path, **scope).run(app)).status


async def fault(device: Device) -> None:
    async with device.stream() as stream:
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)


@contextlib.asynccontextmanager
async def faulted() -> AsyncIterator[Device]:
    async with aiocuda.open_device(driver="host") as device:
        await fault(device)
        yield device


def routes_of_starlette(app: Any) -> Any:
    return Starlette(routes=[Route("/probe", app)])


def mount_of_starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/probe", app)])


def route_of_fastapi(app: Any) -> Any:
    service = FastAPI()
    service.add_route("/probe", app)
    return service


def endpoint_of_fastapi(app: Any) -> Any:
    """FastAPI took the parameters of ASGI for those of a query, and answered 422."""
    service = FastAPI()
    service.get("/probe")(app)
    service.head("/probe")(app)
    return service


def mount_of_fastapi(app: Any) -> Any:
    service = FastAPI()
    service.mount("/probe", app)
    return service


FRAMEWORKS = [routes_of_starlette, mount_of_starlette, route_of_fastapi, endpoint_of_fastapi, mount_of_fastapi]

each_framework = pytest.mark.parametrize("within", FRAMEWORKS)


@pytest.mark.asyncio
@each_framework
async def test_both_can_be_routes_and_mounts(within: Callable[[Any], Any]) -> None:
    path = "/probe/" if "mount" in within.__name__ else "/probe"
    async with aiocuda.open_device(driver="host") as device:
        for probe in (health, ready(device)):
            app = within(probe)
            assert await status_of(app, path) == 200
            assert await status_of(app, path, method="HEAD") == 200
        await fault(device)
        for probe in (health, ready(device)):
            assert await status_of(within(probe), path) == 503


@pytest.mark.asyncio
async def test_health_fails_with_any_open_device() -> None:
    assert await status_of(health) == 200
    async with aiocuda.open_device(driver="host"):
        async with faulted():
            assert await status_of(health) == 503
        assert await status_of(health) == 200  # the host driver can be opened again


@pytest.mark.asyncio
async def test_health_fails_for_ever_when_cuda_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAULTS, "of_process", None)
    fault = DeviceFault("CUDA has ended", code=700, device=0, operation=None)
    FAULTS.report(fault, ends_process=True)
    assert await status_of(health) == 503  # without an open device


@pytest.mark.asyncio
async def test_ready_is_of_one_device() -> None:
    async with aiocuda.open_device(driver="host") as device, faulted() as other:
        exchange = await Exchange(chunk()).run(ready(device))
        assert (exchange.status, exchange.json) == (200, {"status": "ok"})
        exchange = await Exchange(chunk()).run(ready(other))
        assert (exchange.status, exchange.json) == (503, {"status": "failed", "detail": "The device has faulted."})


@pytest.mark.asyncio
async def test_ready_fails_for_a_closed_device() -> None:
    async with aiocuda.open_device(driver="host") as device:
        probe = ready(device)
    exchange = await Exchange(chunk()).run(probe)
    assert (exchange.status, exchange.json["detail"]) == (503, "The device is closed.")


@pytest.mark.asyncio
async def test_ready_fails_while_the_device_does_not_answer() -> None:
    async with aiocuda.open_device(driver="host", asynchronous=False) as device, device.stream() as stream:
        probe = ready(device, timeout_s=0.02)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            exchange = await Exchange(chunk()).run(probe)
            assert (exchange.status, exchange.json["detail"]) == (503, "The device does not answer.")
            latch.release()
        assert await status_of(ready(device, timeout_s=PATIENCE)) == 200


@pytest.mark.asyncio
async def test_ready_fails_if_the_driver_refuses() -> None:
    async with open_peer() as (peer, device):
        peer.refuse("event_record")
        assert await status_of(ready(device)) == 503
        assert await status_of(ready(device)) == 200


@pytest.mark.asyncio
async def test_probes_refuse_websockets_and_leave_the_lifespan_alone() -> None:
    async with aiocuda.open_device(driver="host") as device:
        for probe in (health, ready(device)):
            exchange = await Exchange(type="websocket").run(probe)
            assert [message["type"] for message in exchange.sent] == ["websocket.close"]
            assert (await Exchange(type="lifespan").run(probe)).sent == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("timeout_s", "error"), [(-1, InvalidArgumentError), ("1", InvalidTypeError), (True, InvalidTypeError)]
)
async def test_wrong_time_limits_are_refused(timeout_s: Any, error: type[Exception]) -> None:
    async with aiocuda.open_device(driver="host") as device:
        with pytest.raises(error, match="timeout_s"):
            ready(device, timeout_s)


@pytest.mark.parametrize(("thing", "text"), [(None, "setup of the lifespan"), ("cuda:0", "not str")])
def test_ready_takes_a_device(thing: Any, text: str) -> None:
    with pytest.raises(InvalidTypeError, match=text):
        ready(thing)


def test_probes_have_names() -> None:
    assert repr(health) == "aiocuda.serving.asgi.health"
