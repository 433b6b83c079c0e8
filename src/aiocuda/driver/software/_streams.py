"""Verbs about order."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ...errors import BusyError, InvalidArgumentError
from ._core import Core
from ._model import PRIORITIES

__all__ = ["Streams"]


class Streams(Core):
    """`aiocuda.driver.protocol._streams.Streams` without a GPU."""

    def priority_range(self, device: int) -> tuple[int, int]:
        """(0, -5), as on current GPUs."""
        self._enter()
        self._device(device)
        return PRIORITIES

    def stream_create(self, device: int, priority: int) -> int:
        """A new stream, or one that is kept and idle; the priority is clamped into the range."""
        self._enter()
        self._device(device)
        least, greatest = PRIORITIES
        with self._lock:
            return self._machine.stream_create(device, max(greatest, min(least, priority)))

    def stream_default(self, device: int) -> int:
        """The device's default stream, under a handle of its own."""
        self._enter()
        self._device(device)
        with self._lock:
            return self._machine.stream_default(device)

    def stream_import(self, device: int, handle: int) -> None:
        """A stream that somebody else made on this driver. There are no others."""
        self._enter()
        with self._lock:
            stream = self._machine.stream_known_as(handle)
            self._same_device(stream, self._device(device))
            self._machine.stream_import(stream)
            self._imported[handle] += 1

    def stream_handle(self, stream: int) -> int:
        """The first handle of the stream, by which it is known for good; one for all of a default stream."""
        self._enter()
        with self._lock:
            return self._machine.stream_export(stream)

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        """Is this the handle by which the stream is known?"""
        self._enter()
        return self._machine.stream(stream).handle == handle

    def stream_destroy(self, stream: int) -> None:
        """Forget the stream, or keep it if others know it. Each import has to be forgotten, too."""
        self._enter_release()
        with self._lock:
            if self._imported[stream]:
                self._imported[stream] -= 1
                if not self._imported[stream]:
                    del self._imported[stream]
                    self._machine.stream_forget(stream)
            else:
                self._machine.stream_destroy(stream)

    def stream_priority(self, stream: int) -> int:
        """The priority in force, after clamping."""
        self._enter()
        return self._machine.stream(stream).priority

    def stream_query(self, stream: int) -> bool:
        """Is everything that the stream accepted done?"""
        self._enter()
        return self._machine.stream(stream).is_idle

    def stream_synchronize(self, stream: int) -> None:
        """Wait for all that the stream accepted. **May block.**"""
        self._enter()
        self._synchronize([self._machine.stream(stream)], _nothing)
        if self._refusal is not None:
            raise self._refusal.again()

    def stream_wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits for what the event recorded last, on whatever device."""
        self._enter()
        with self._lock:
            self._machine.wait(self._machine.stream(stream), self._machine.event(event))
            self._advance()

    def stream_capturing(self, stream: int) -> bool:
        """Never: nobody else can enqueue here."""
        self._enter()
        self._machine.stream(stream)
        return False

    def event_create(self, device: int, timing: bool) -> int:
        """A new event, never recorded."""
        self._enter()
        self._device(device)
        with self._lock:
            return self._machine.event_create(device, timing)

    def event_destroy(self, event: int) -> None:
        """Forget the event; waits already enqueued on it still hold."""
        self._enter_release()
        with self._lock:
            self._machine.event_destroy(event)

    def event_record(self, event: int, stream: int) -> None:
        """The event is done when all earlier work of the stream is."""
        self._enter()
        with self._lock:
            self._machine.record(self._machine.event(event), self._machine.stream(stream))
            self._advance()

    def recorder(self, stream: int) -> Callable[[int], None]:
        """`event_record` bound to one stream."""
        return functools.partial(self.event_record, stream=stream)

    def event_query(self, event: int) -> bool:
        """Has everything before the last record been done?"""
        # The hottest verb, and without the lock: a waiting loop must not stand behind a thread that holds it and has
        # lost the GIL.
        if self._refusal is not None:
            raise self._refusal.again()
        self._calls += 1
        last = self._machine.event(event).last
        return last is None or last.done

    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two done timing events."""
        self._enter()
        times = []
        for handle in (start, end):
            event = self._machine.event(handle)
            last = event.last
            if not event.timing or last is None:
                raise InvalidArgumentError(
                    f"event {handle} has no time: "
                    + ("it was never recorded" if event.timing else "make it with timing=True"),
                    event=handle,
                )
            if not last.done:
                raise BusyError(f"event {handle} is not done yet; wait for it first", event=handle)
            times.append(last.ended)
        return (times[1] - times[0]) * self._ms_per_tick

    def begin_queries(self) -> None:
        """Nothing: no query can disturb a capture here."""

    def end_queries(self) -> None:
        """Nothing to put back."""


def _nothing() -> None:
    """It is enough to have waited."""
