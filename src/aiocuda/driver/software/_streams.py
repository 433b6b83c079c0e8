"""The methods about streams and events, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...errors import AiocudaError, BusyError, InvalidArgumentError
from ._core import Core
from ._model import PRIORITIES

__all__ = ["Streams"]


class Streams(Core):
    """`aiocuda.driver.protocol.Streams` without a GPU."""

    def priority_range(self, device: int) -> tuple[int, int]:
        """Return (0, -5), as current GPUs do."""
        self._enter_device(device)
        return PRIORITIES

    def stream_reserve(self, device: int, count: int) -> None:
        """Do nothing: to create a stream never waits here."""
        self._check_device(device)

    def stream_create(self, device: int, priority: int) -> int:
        """Return a new stream, or a kept stream that is idle. The priority is clamped into the range."""
        self._enter_device(device)
        least, greatest = PRIORITIES
        with self._lock:
            return self._machine.stream_create(device, max(greatest, min(least, priority)))

    def stream_default(self, device: int) -> int:
        self._enter_device(device)
        with self._lock:
            return self._machine.stream_default(device)

    def stream_import(self, device: int, handle: int) -> int:
        """Import a stream by its handle.

        Only handles that `stream_handle` returned are known: other libraries create no streams without a GPU.
        """
        self._enter()
        with self._lock:
            stream = self._machine.exported_stream(handle)
            self._check_same_device(stream, self._check_device(device))
            self._machine.stream_import(stream)
            self._imported[handle] += 1
        return handle

    def stream_handle(self, stream: int) -> int:
        """Return the first handle of the stream, which never changes. A default stream has one for all its handles."""
        self._enter()
        with self._lock:
            return self._machine.stream_export(stream)

    def stream_has_handle(self, stream: int, handle: int) -> bool:
        self._enter()
        return self._machine.stream(stream).handle == handle

    def stream_destroy(self, stream: int) -> None:
        """Destroy the stream, or keep it if its handle was read. Call it once more for each import."""
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
        self._enter()
        return self._machine.stream(stream).priority

    def stream_query(self, stream: int) -> bool:
        self._enter()
        return self._machine.stream(stream).is_idle

    def stream_synchronize(self, stream: int) -> None:
        self._enter()
        self._synchronize([self._machine.stream(stream)], _do_nothing)
        if self._call_error is not None:
            raise AiocudaError.again(self._call_error)

    def stream_wait(self, stream: int, event: int) -> None:
        """Make later work of the stream wait for the event's last record, on any device."""
        self._enter()
        with self._lock:
            self._machine.wait(self._machine.stream(stream), self._machine.event(event))
            self._advance()

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        def wait(event: int) -> None:
            for stream in streams:
                self.stream_wait(stream, event)

        return wait

    def stream_capturing(self, stream: int) -> bool:
        """Return False: these streams cannot be captured."""
        self._enter()
        self._machine.stream(stream)
        return False

    def event_create(self, device: int, timing: bool) -> int:
        self._enter_device(device)
        with self._lock:
            return self._machine.event_create(device, timing)

    def event_destroy(self, event: int) -> None:
        self._enter_release()
        with self._lock:
            self._machine.event_destroy(event)

    def event_record(self, event: int, stream: int) -> None:
        self._enter()
        with self._lock:
            self._machine.record(self._machine.event(event), self._machine.stream(stream))
            self._advance()

    def recorder(self, stream: int) -> Callable[[int], None]:
        return functools.partial(self.event_record, stream=stream)

    def event_query(self, event: int) -> bool:
        # The method that is called most often. It does not take the lock: else a waiting loop would wait for a thread
        # that holds the lock and has lost the GIL.
        if self._call_error is not None:
            raise AiocudaError.again(self._call_error)
        self._calls += 1
        last = self._machine.event(event).last
        return last is None or last.done

    def event_elapsed_ms(self, start: int, end: int) -> float:
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
        """Do nothing: these streams cannot be captured."""

    def end_queries(self) -> None:
        """Do nothing: `begin_queries` changed nothing."""


def _do_nothing() -> None:
    """Do nothing after `Core._synchronize`."""
