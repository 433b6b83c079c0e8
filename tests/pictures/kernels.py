"""`Watched`: a kernel whose host implementation takes a given time and notes when it began and ended."""

from __future__ import annotations

import time

from aiocuda import Kernel

__all__ = ["Watched"]


class Watched:
    """A kernel ``work(const float* x, float seconds)``, and the times of its launches in milliseconds."""

    def __init__(self) -> None:
        self.kernel = Kernel("work", source="__global__ void work(const float* x, float seconds);", host=self._run)
        self.spans: list[tuple[float, float]] = []  #: in the order in which the launches ended
        self._began = time.perf_counter()

    def start(self) -> None:
        """Let the time begin now, and forget earlier launches."""
        self.spans.clear()
        self._began = time.perf_counter()

    def now(self) -> float:
        """Return the milliseconds since `start`."""
        return (time.perf_counter() - self._began) * 1e3

    def _run(self, x: object, seconds: float) -> None:
        began = self.now()
        time.sleep(float(seconds))
        self.spans.append((began, self.now()))
