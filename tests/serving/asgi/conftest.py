from __future__ import annotations

from tests.helpers import device

__all__ = ["device"]
