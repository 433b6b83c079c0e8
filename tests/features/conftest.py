from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocuda import Device
from tests.helpers import Latch, device

__all__ = ["device", "latch"]


@pytest.fixture
def latch(device: Device) -> Iterator[Latch]:
    """A latch for `device`. What it holds ends by itself, so that a test that fails ends too."""
    with Latch(device) as opened:
        yield opened
