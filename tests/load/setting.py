"""What all servers have in common: the model, its device, the size of a batch, and the deadline.

Nothing here imports aiocuda or another server.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from .connection import post

__all__ = ["MOST_IN_BATCH", "PATH", "SCALE", "EmulatedDevice", "Setting", "is_right", "outputs_of", "request"]

#: The largest batch.
MOST_IN_BATCH = 16

PATH = "/predict"

#: The environment variable with `Setting.scale`, for the processes of a server.
SCALE = "AIOCUDA_LOAD_SCALE"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The times of a run, in seconds.

    The device computes one batch at a time, and a batch of ``n`` requests takes ``batch_s + n * item_s``, in which the
    processor is idle. A server that computes each request alone therefore pays ``batch_s`` for each.

    Attributes
    ----------
    scale
        Multiplies all times. A slow device shows the behaviour of a server also on a machine that is busy.
    """

    scale: float = 1.0

    @classmethod
    def of_environment(cls) -> Self:
        """Return the setting of a server's process."""
        return cls(float(os.environ.get(SCALE, "1")))

    @property
    def batch_s(self) -> float:
        """Time of a batch of any size."""
        return 10e-3 * self.scale

    @property
    def item_s(self) -> float:
        """Time of each request in a batch, in addition."""
        return 0.1e-3 * self.scale

    @property
    def wait_s(self) -> float:
        """How long the first request of a batch waits for others."""
        return 2e-3 * self.scale

    @property
    def client_deadline_s(self) -> float:
        """How long a result is of use, from the time at which the client should have sent the request."""
        return 0.1 * self.scale

    @property
    def server_deadline_s(self) -> float:
        """The part of it that a server may use: the rest is for both ways through sockets and event loops."""
        return 0.085 * self.scale

    def batch_seconds(self, count: int) -> float:
        """Return the time of a batch."""
        return self.batch_s + count * self.item_s

    @property
    def bound(self) -> float:
        """Requests per second of the device with full batches, one directly after the other."""
        return MOST_IN_BATCH / self.batch_seconds(MOST_IN_BATCH)

    def most_in_flight(self, rate: float) -> int:
        """Return the limit of requests in flight for a server of this capacity: 0.75 of those it computes in time."""
        return int(0.75 * self.server_deadline_s * rate)


class EmulatedDevice:
    """Computes one batch at a time.

    Parameters
    ----------
    setting
        The times.
    shared
        A file that all processes of the server lock, if several of them use the device.
    """

    def __init__(self, setting: Setting, shared: Path | None = None) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        self._file = None if shared is None else open(shared, "rb")  # as long as the process

    def compute(self, inputs: Sequence[float]) -> list[float]:
        """Return the results of a batch. **Blocks** until the device is free, and for the time of the batch."""
        with self._lock:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            time.sleep(self._setting.batch_seconds(len(inputs)))  # noqa: TID251 - it stands for the work of a GPU
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return outputs_of(inputs)


def outputs_of(inputs: Sequence[float]) -> list[float]:
    """Return the results of a batch: the model."""
    return [2.0 * value + 1.0 for value in inputs]


def request(number: int) -> bytes:
    """Return the HTTP request with a number."""
    return post(PATH, b'{"input": %d}' % (number % 1000))


def is_right(number: int, body: bytes) -> bool:
    """Return True if this is the body of the response to the request with that number."""
    return bool(json.loads(body) == {"output": outputs_of([number % 1000])[0]})
