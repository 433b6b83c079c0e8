from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.bad_input.case import World, open_world

_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[World]:
    """The host driver's world."""
    async with open_world("host") as world:
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", _CUDA])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Another driver's."""
    async with open_world(request.param) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["host", "simulated", _CUDA])
async def each(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each driver's."""
    async with open_world(request.param) as opened:
        yield opened
