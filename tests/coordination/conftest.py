from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from aiocuda import AsyncCoordinator, Device
from tests.helpers import Latch, device, stream

__all__ = ["coordinator", "device", "latch", "stream"]


@pytest.fixture
def latch(device: Device) -> Iterator[Latch]:
    with Latch(device) as opened:
        yield opened


@pytest_asyncio.fixture
async def coordinator(device: Device) -> AsyncIterator[AsyncCoordinator]:
    """A coordinator of `device`."""
    async with AsyncCoordinator(device) as opened:
        yield opened
