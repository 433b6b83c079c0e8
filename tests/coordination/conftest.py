from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocuda import Device
from aiocuda.testing import Latch
from tests.helpers import device

__all__ = ["device", "latch"]


@pytest.fixture
def latch(device: Device) -> Iterator[Latch]:
    with Latch(device) as opened:
        yield opened
