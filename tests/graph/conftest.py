from __future__ import annotations

from tests.helpers import device, latch, other, stream

__all__ = ["device", "latch", "other", "stream"]
