"""Old names, until `device_uses.py` has been run."""

from __future__ import annotations

from typing import Any

from .._device_resources import resources_of
from ..completion._stream_queue import StreamQueue


def refuse(queue: StreamQueue) -> None:
    if not queue.ended:
        queue.check_loop()
        queue.refuse()


def leave(device: Any, queue: StreamQueue) -> None:
    resources_of(device).streams.leave(queue)


def give_up(device: Any, queue: StreamQueue) -> None:
    resources_of(device).streams.give_up(queue)
