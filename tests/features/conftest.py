from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocuda import Device
from aiocuda.testing import Latch
from tests.helpers import device

__all__ = ["device", "latch"]


@pytest.fixture
def latch(device: Device) -> Iterator[Latch]:
    """A latch for `device`. What it holds ends by itself, so that a test that fails ends too."""
    with Latch(device, seconds=10) as opened:
        yield opened
