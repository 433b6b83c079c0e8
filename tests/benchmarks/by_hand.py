"""The triple buffer as one writes it with events: upload, compute and download on a stream each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from select import select

from .peers.raw import Raw


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The work of one item."""

    up: int  #: bytes
    seconds: float  #: of the kernel
    down: int  #: bytes


class ByHand:
    """Host addresses are pinned. All items have the same source, and each slot has its own target.

    A single target for all slots would stay in the processor's cache, and take less time than any pipeline whose
    results last.
    """

    def __init__(
        self, raw: Raw, shape: Shape, depth: int, source: int | None = None, targets: Sequence[int] | None = None
    ) -> None:
        self._raw = raw
        self._shape = shape
        self._source = raw.pinned(shape.up) if source is None else source
        self._targets = [raw.pinned(shape.down) for _ in range(depth)] if targets is None else targets
        self._buffers = [raw.device_memory(max(shape.up, shape.down)) for _ in range(depth)]
        self._up, self._compute, self._down = raw.stream(), raw.stream(), raw.stream()
        self._launch = raw.launcher(self._compute, shape.seconds)
        self._launch_first = raw.launcher(self._up, shape.seconds)
        self._uploaded = [raw.event() for _ in self._buffers]
        self._computed = [raw.event() for _ in self._buffers]
        self._downloaded = [raw.event() for _ in self._buffers]
        self._marks = [raw.event(timing=True) for _ in range(4)]

    def run(self, iterations: int, *, paced: bool = False) -> None:
        """Enqueue all items in advance, and wait once.

        ``paced``: an item is enqueued only after the previous result of its slot has returned. A program that reads the
        results can do no better: it never reads a slot that is overwritten earlier.
        """
        raw = self._raw
        for iteration in range(iterations):
            slot = iteration % len(self._buffers)
            if iteration >= len(self._buffers):
                if paced:
                    while not raw.done(self._downloaded[slot]):
                        # The host driver needs the interpreter, too. This gives it away for half a microsecond;
                        # `time.sleep(0)`, from Python 3.11 on, for the 50 of the timer's slack, and more.
                        select((), (), (), 0)
                else:
                    raw.wait(self._up, self._downloaded[slot])  # the slot is free
            raw.upload(self._up, self._buffers[slot], self._source, self._shape.up)
            raw.record(self._uploaded[slot], self._up)

            raw.wait(self._compute, self._uploaded[slot])
            self._launch()
            raw.record(self._computed[slot], self._compute)

            raw.wait(self._down, self._computed[slot])
            raw.download(self._down, self._targets[slot], self._buffers[slot], self._shape.down)
            raw.record(self._downloaded[slot], self._down)
        raw.synchronize(self._down)

    def alone(self) -> tuple[float, float, float]:
        """Seconds of device time of upload, kernel and download, one after the other in one stream."""
        raw, stream, buffer = self._raw, self._up, self._buffers[0]
        raw.record(self._marks[0], stream)
        raw.upload(stream, buffer, self._source, self._shape.up)
        raw.record(self._marks[1], stream)
        self._launch_first()
        raw.record(self._marks[2], stream)
        raw.download(stream, self._targets[0], buffer, self._shape.down)
        raw.record(self._marks[3], stream)
        raw.synchronize(stream)
        up, seconds, down = (raw.elapsed(self._marks[one], self._marks[one + 1]) for one in range(3))
        return up, seconds, down

    def duplex(self) -> tuple[float, float]:
        """Seconds of an upload and of a download while the other direction copies, too: three of each, side by side."""
        raw, times, count = self._raw, 2, 3
        for begin, stream in ((0, self._up), (2, self._down)):
            raw.record(self._marks[begin], stream)
        for one in range(count):
            target = self._targets[one % len(self._targets)]
            raw.upload(self._up, self._buffers[0], self._source, self._shape.up)
            raw.download(self._down, target, self._buffers[-1], self._shape.down)
        for begin, stream in ((0, self._up), (2, self._down)):
            raw.record(self._marks[begin + 1], stream)
            raw.synchronize(stream)
        up, down = (raw.elapsed(self._marks[2 * one], self._marks[2 * one + 1]) / count for one in range(times))
        return up, down
