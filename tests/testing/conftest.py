from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiocuda.testing import SimulatedLoop


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=SimulatedLoop) as opened:
        yield opened


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    opened = SimulatedLoop()
    yield opened
    opened.close()
