"""Programs in virtual time: an event loop, and a driver's clock, that no thread and no real second ever touch."""

from __future__ import annotations
