from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from aiocuda import AsyncCoordinator, Device


@pytest_asyncio.fixture
async def coordinator(device: Device) -> AsyncIterator[AsyncCoordinator]:
    """A coordinator of `device`."""
    async with AsyncCoordinator(device) as opened:
        yield opened
