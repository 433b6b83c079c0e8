"""Fixtures: a device, a latch, and a guard that fails a test whose event loop was blocked by aiocuda.

Fixtures that live in a test's event loop exist twice, for pytest-asyncio and for anyio's plugin, since each of them
runs only its own. The public name chooses by who runs the test.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .blocking import LoopGuard

if TYPE_CHECKING:
    from ..device import Device
    from .latch import Latch


async def _open_device() -> AsyncIterator[Device]:
    from .. import open_device

    async with open_device(driver="host") as device:
        yield device


async def _guard_loop() -> AsyncIterator[None]:
    import asyncio

    with LoopGuard(asyncio.get_running_loop()):
        yield


def _for_asyncio(function: Callable[[], AsyncIterator[Any]], name: str) -> Any:
    pytest_asyncio = sys.modules.get("pytest_asyncio")  # there if it is a plugin of this run, and then it costs nothing
    return (pytest_asyncio or pytest).fixture(name=name)(function)


_device_of_asyncio = _for_asyncio(_open_device, "_aiocuda_device_of_asyncio")
_guard_of_asyncio = _for_asyncio(_guard_loop, "_aiocuda_guard_of_asyncio")
_device_of_anyio = pytest.fixture(name="_aiocuda_device_of_anyio")(_open_device)
_guard_of_anyio = pytest.fixture(name="_aiocuda_guard_of_anyio")(_guard_loop)


def _choose(request: pytest.FixtureRequest, name: str) -> Any:
    if "anyio_backend" in request.fixturenames:
        return request.getfixturevalue(f"_aiocuda_{name}_of_anyio")
    if not request.config.pluginmanager.hasplugin("asyncio"):
        raise pytest.UsageError(
            f"{request.fixturename} runs in an event loop: install pytest-asyncio, or mark the test anyio"
        )
    return request.getfixturevalue(f"_aiocuda_{name}_of_asyncio")


@pytest.fixture
def aiocuda_device(request: pytest.FixtureRequest) -> Device:
    """A device on the host driver, opened and closed in the test's event loop."""
    device: Device = _choose(request, "device")
    return device


@pytest.fixture
def aiocuda_latch(aiocuda_device: Device) -> Iterator[Latch]:
    """A `Latch` for `aiocuda_device`. It is open at the end of the test, whatever the test did."""
    from .latch import Latch

    with Latch(aiocuda_device) as latch:
        yield latch


@pytest.fixture
def aiocuda_no_blocking(request: pytest.FixtureRequest) -> None:
    """Fail the test if a call of aiocuda blocks its event loop; see `aiocuda.testing.blocking`."""
    _choose(request, "guard")
