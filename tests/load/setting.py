"""What all servers have in common: the model, its device, the size of a batch, and the deadline.

The device is emulated, in the same way for all: it computes one batch at a time, and a batch of ``n`` requests takes
``BATCH_S + n * ITEM_S``, in which the processor is idle (``time.sleep``). A server that computes each request alone
therefore pays `BATCH_S` for each. Nothing here imports aiocuda or another server.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .connection import post

__all__ = [
    "BATCH_S",
    "BOUND",
    "CLIENT_DEADLINE_S",
    "ITEM_S",
    "MOST_IN_BATCH",
    "PATH",
    "SERVER_DEADLINE_S",
    "WAIT_S",
    "EmulatedDevice",
    "batch_seconds",
    "is_right",
    "most_in_flight",
    "outputs_of",
    "request",
]

#: Seconds of a batch of any size, and of each request in it.
BATCH_S, ITEM_S = 10e-3, 0.1e-3

#: The largest batch, and how long the first request of a batch waits for others.
MOST_IN_BATCH, WAIT_S = 16, 2e-3

#: Requests per second of the device with full batches, one directly after the other.
BOUND = MOST_IN_BATCH / (BATCH_S + MOST_IN_BATCH * ITEM_S)

#: Seconds in which a result is of use, from the time at which the client should have sent the request.
CLIENT_DEADLINE_S = 0.1

#: The part of it that a server may use: the rest is for both ways through sockets and event loops.
SERVER_DEADLINE_S = 0.085

PATH = "/predict"


def batch_seconds(count: int) -> float:
    """Return the seconds that the device needs for a batch."""
    return BATCH_S + count * ITEM_S


def most_in_flight(rate: float) -> int:
    """Return the limit of requests in flight of a server with this capacity: 0.75 of those it computes in time."""
    return int(0.75 * SERVER_DEADLINE_S * rate)


def outputs_of(inputs: Sequence[float]) -> list[float]:
    """Return the results of a batch: the model."""
    return [2.0 * value + 1.0 for value in inputs]


class EmulatedDevice:
    """Computes one batch at a time.

    Parameters
    ----------
    shared
        A file that all processes of the server lock, if several of them use the device.
    """

    def __init__(self, shared: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._file = None if shared is None else open(shared, "rb")  # as long as the process

    def compute(self, inputs: Sequence[float]) -> list[float]:
        """Return the results of a batch. **Blocks** until the device is free, and for the time of the batch."""
        with self._lock:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            time.sleep(batch_seconds(len(inputs)))  # noqa: TID251 - it stands for the work of a GPU
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return outputs_of(inputs)


def request(number: int) -> bytes:
    """Return the HTTP request with a number."""
    return post(PATH, b'{"input": %d}' % (number % 1000))


def is_right(number: int, body: bytes) -> bool:
    """Return True if this is the body of the response to the request with that number."""
    return bool(json.loads(body) == {"output": outputs_of([number % 1000])[0]})
