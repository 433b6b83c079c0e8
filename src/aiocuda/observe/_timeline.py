"""Timeline: when each operation of a device began and ended, what it waited for, and what the host did meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias, cast

from .._base._clock import running_clock
from .._base._mistakes import lacks
from ..completion import INTERNAL, EndedRequest, Operation, StartedBatch
from ..device import Device, Event
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError
from ..lowlevel import Queue, StreamOperation, resources_of
from ._drawing import draw
from ._listener import DeviceListener
from ._loop_monitor import LoopMonitor
from ._page import page_of
from ._recording import Batch, HostSlice, Recording, Request, TimelineSpan, WaitedCall
from ._trace import trace, trace_of

__all__ = ["Timeline", "TimelineSpan", "trace"]

IN_FLIGHT = "operations in flight"
ON_HOST = "operations on the host"
MEMORY = "device memory, bytes"


@lacks
class Timeline(DeviceListener):
    """Records when each operation began and ended, for the operations that begin and end in its ``async with`` block.

    The times are those of a timing event before and after each operation (``cuEventElapsedTime``). Their resolution is
    half a microsecond; after 8 s it is lower, because CUDA returns milliseconds in single precision. In the block, each
    operation costs the host some ten microseconds more; after the block, nothing::

        async with Timeline(device) as timeline:
            async for result in pipeline.run(items):
                ...
        Path("overlap.html").write_text(timeline.to_html(), encoding="utf-8")
        Path("overlap.svg").write_text(timeline.to_svg(), encoding="utf-8")
        Path("overlap.json").write_text(timeline.to_trace(), encoding="utf-8")  # for https://ui.perfetto.dev

    A copy of pageable memory has chunks: its span begins with the first and ends with the last. At the end of the
    block, the timeline waits for the operations of this event loop.

    The timeline also records the host: iterations of the event loops in which operations begin or end, iterations that
    block a loop for more than 5 ms, the awaits that operations resume, jobs of the device's worker threads, calls of
    the driver that took more than 20 ms beside unfinished work, and the numbers of operations and bytes. An iteration
    that blocks for 15 ms or more has the line at which it was seen, and the call of the driver, as in the log event
    ``loop_blocked``. Host times are put on the axis of the device times as late as causality allows, so that no
    operation ends after the await that it resumed; their error is at most `accuracy_us`.

    Of each `aiocuda.serving.MicroBatcher` with this device, it records the batches, and the requests that are submitted
    and get their outcome in the block: from the call of ``submit`` until the batch is formed, and from there until the
    answer; also those that fail, expire or are cancelled.

    Several timelines and profilers may listen to a device at the same time. A second block of the same timeline
    replaces what the first one has recorded.

    Parameters
    ----------
    device
        The device of the streams.

    Attributes
    ----------
    spans : list of TimelineSpan
        In the order in which the operations finished.
    untimed : int
        Operations without times: they failed, were enqueued before the timeline began, or recorded an event without
        timing.
    """

    _noun = "timeline"

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.spans: list[TimelineSpan] = []
        self.untimed = 0
        self._base: Event | None = None
        self._chunks: dict[int, list[tuple[float, float]]] = {}  # by the id of an unfinished copy
        self._waited_for: dict[int, tuple[int, ...]] = {}  # by the id of an unfinished operation
        self._following: dict[Queue, list[int]] = {}  # the next operation of the queue waits for these
        self._in_flight: set[int] = set()
        self._on_host: dict[Queue, int] = {}
        self._counters: dict[str, list[tuple[float, int]]] = {}
        self._monitors: dict[asyncio.AbstractEventLoop, LoopMonitor] = {}
        self._watched: list[Callable[[], None]] = []  # functions that end the watch of worker threads and of calls
        self._jobs: list[HostSlice] = []
        self._calls: list[WaitedCall] = []
        self._requests: RequestLog | None = None
        self._clock: Callable[[], float] = device.driver.now
        self._began = 0.0
        self._seen = 0.0
        self._host_zero = 0.0
        self._changing = threading.Lock()  # held while the base is used, a loop gets its monitor, or the block ends

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as listening:
            listening.enter_context(self.device.listen(self))
            self._forget()
            async with self.device.stream(name="timeline") as stream:
                self._began = self._clock()
                base = stream.record(timing=True)
                self._own_operations.add(base.operation.id)
                try:
                    await base
                    self._seen = self._host_zero = self._clock()
                finally:
                    self._own_operations.discard(base.operation.id)
            self._base = base  # operations that finish before this are not part of the block
            self._requests = RequestLog(self._touch, self._seen)
            self._monitor()
            calls = resources_of(self.device).waiting_calls
            calls.watch(self._on_call)
            self._watched.append(functools.partial(calls.unwatch, self._on_call))
            self._listening = listening.pop_all()
        return self

    @property
    def accuracy_us(self) -> float:
        """The largest error of host times on the axis of the device times, in microseconds.

        It is the time from the record of the timeline's first event until its end was seen, less what later operations
        show. A GPU's clock drifts from the host's clock by some microseconds in a second, which adds to it.
        """
        error = self._host_zero - self._began
        return (error if error >= 0 else self._seen - self._host_zero) * 1e6

    def _forget(self) -> None:
        """Begin anew: times of another block have another zero."""
        self.spans, self.untimed = [], 0
        self._counters, self._jobs, self._calls, self._monitors, self._requests = {}, [], [], {}, None
        self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        self._chunks.clear()
        self._waited_for.clear()
        self._following.clear()
        self._in_flight.clear()
        self._on_host.clear()

    def _on_stopped(self) -> None:
        with self._changing:
            base, self._base = self._base, None
            watched, self._watched = self._watched, []
        for monitor in self._monitors.values():
            monitor.stop()
        if self._requests is not None:
            self._requests.close()
        for end in watched:
            end()
        self._forget_unfinished()
        if base is not None and self.device.driver.fault is None:
            base.release()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def on_follow(self, queue: Queue, operation: StreamOperation[Any]) -> None:
        """Note that the next operation of a queue waits for one of another stream, which no "wait" shows."""
        self._following.setdefault(queue, []).append(operation.id)

    def on_submit(self, operation: Operation[Any]) -> None:
        """Note what an operation waits for."""
        super().on_submit(operation)
        own = cast("StreamOperation[Any]", operation)
        copy = own.part_of
        if operation.kind != INTERNAL:
            self._in_flight.add(operation.id)
        if operation.kind != INTERNAL or copy is not None:  # not for markers: the next operation waits
            waited_for = self._following.pop(own.queue, [])
            if own.waits_for is not None:
                waited_for.append(own.waits_for.id)
            if waited_for:
                key = operation.id if copy is None else copy.id
                self._waited_for[key] = (*self._waited_for.get(key, ()), *waited_for)
        self._note_counts(self._touch(), own.queue)

    def on_batch(self, batch: StartedBatch) -> End | None:
        """Note a batch of a batcher. The hook of `BatchListener`."""
        return None if self._requests is None else self._requests.begin(batch)

    def on_outcome(self, request: EndedRequest) -> None:
        """Note a request of a batcher that has its outcome."""
        if self._requests is not None:
            self._requests.add(request)

    def _on_internal(self, operation: Operation[Any]) -> None:
        self._in_flight.discard(operation.id)

    def _on_finished(self, operation: Operation[Any], copy: int | None, start: int, end: int) -> None:
        is_known = operation.id in self._in_flight  # another listener may have asked for the times of an earlier one
        if copy is None:
            self._in_flight.discard(operation.id)
            waited_for = self._waited_for.pop(operation.id, ())
        if self._base is None:
            return
        at = self._touch()
        times = self._times(start, end) if start and (is_known or copy is not None) else None
        if times is not None:
            self._host_zero = min(self._host_zero, at - times[1] * 1e-6)
        if copy is not None:
            if times is not None:
                self._chunks.setdefault(copy, []).append(times)
            return
        own = cast("StreamOperation[Any]", operation)
        self._note_counts(at, own.queue)
        chunks = self._chunks.pop(operation.id, [])
        name, kind, kernel, label = operation.stream_name, operation.kind, operation.kernel, operation.label
        if own.is_awaited:
            self._note_await(own, kernel or kind, label)
        if times is None:
            self.untimed += 1
            return
        begin = min((chunk[0] for chunk in chunks), default=times[0])
        self.spans.append(
            TimelineSpan(name, kind, begin, times[1], operation.id, kernel, label, operation.nbytes, waited_for)
        )

    def _times(self, start: int, end: int) -> tuple[float, float] | None:
        elapsed = self.device.driver.event_elapsed_ms
        with self._changing:  # another loop's thread may end the block meanwhile, and release the event
            if self._base is None:
                return None
            try:
                return elapsed(self._base.handle, start) * 1e3, elapsed(self._base.handle, end) * 1e3
            except AiocudaError:  # after a device fault, which every waiter gets
                return None

    def _note_await(self, operation: StreamOperation[Any], name: str, label: str | None) -> None:
        monitor = self._monitor()
        if monitor is not None:
            suspended = operation.waiters is not None
            monitor.resume(operation.id, name, label, soon=suspended)

    # -- the host ------------------------------------------------------------------------------------------------

    def _touch(self) -> float:
        monitor = self._monitor()
        return self._clock() if monitor is None else monitor.touch()

    def _monitor(self) -> LoopMonitor | None:
        """Return the monitor of the running loop; None outside of loops and of the block."""
        loop = asyncio._get_running_loop()
        monitor = None if loop is None else self._monitors.get(loop)
        if monitor is None and loop is not None:
            with self._changing:
                if self._base is None:
                    return None
                monitor = self._monitors[loop] = LoopMonitor(loop, self._clock, timer=running_clock() is None)
                loop_state = resources_of(self.device).loop_states.get(loop)
                if loop_state is not None:
                    jobs = loop_state.reactor.jobs
                    jobs.watch(self._on_job)
                    self._watched.append(functools.partial(jobs.unwatch, self._on_job))
            monitor.start(functools.partial(self._on_beat, loop))
        return monitor

    def _on_job(self, name: str, start: float, end: float) -> None:
        """Note a job. A worker thread calls it."""
        self._jobs.append(HostSlice(threading.get_ident(), name, start, end))

    def _on_call(self, call: tuple[str, float, float, str]) -> None:
        """Note a call of the driver that has waited. Any thread calls it."""
        self._calls.append(WaitedCall(*call))

    def _on_beat(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Count the operations that wait on the host: no hook is called when they begin to."""
        loop_state = resources_of(self.device).loop_states.get(loop)
        for queue in () if loop_state is None else tuple(loop_state.queues):
            self._note_counts(at, queue)

    def _note_counts(self, at: float, queue: Queue) -> None:
        self._count(IN_FLIGHT, at, len(self._in_flight))
        self._count(MEMORY, at, self.device.memory.live_bytes)
        entries = len(queue.on_host)
        if entries or queue in self._on_host:
            self._on_host[queue] = entries
            self._count(ON_HOST, at, sum(list(self._on_host.values())))

    def _count(self, name: str, at: float, value: int) -> None:
        values = self._counters.setdefault(name, [])
        if not values or values[-1][1] != value:
            values.append((at, value))

    # -- outputs -------------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Return everything that has been recorded so far. `to_trace` and `to_html` are made from it."""
        self._check_entered()
        batches, requests = ((), ()) if self._requests is None else self._requests.record()
        return Recording(
            f"{self.device.name} ({self.device.driver.name} driver)",
            sorted(self.spans, key=lambda span: span.operation),  # the rows are in the order of first use
            [monitor.record() for monitor in list(self._monitors.values())],
            tuple(self._jobs),
            {name: tuple(values) for name, values in list(self._counters.items())},
            self._host_zero,
            self.accuracy_us,
            batches,
            requests,
            tuple(self._calls),
        )

    def to_svg(self, title: str | None = None) -> str:
        """Return a picture with a row for each stream and a rectangle for each operation; time goes from left to right.

        Each operation is a ``<rect>`` with ``data-stream``, ``data-kind``, ``data-start-us`` and ``data-end-us``, and
        ``data-label`` if it has a label. There are no other ``<rect>`` elements. Labels have at most 1000 characters.
        Host and requests are in the page and in the trace only.
        """
        title, recording = _title(title), self.recording()
        return draw(recording.spans, title or f"Streams of {recording.device}")

    def to_html(self, title: str | None = None) -> str:
        """Return a page for a browser, to zoom into the timeline, to search it, and to see what waited for what.

        The page is complete in one file: it needs no server and no network, and loads nothing. It shows the streams,
        the rows of the host, and the requests of batchers; a selected operation shows its label, its bytes, and arrows
        to the operations that it waited for and to the await that it resumed; a request has an arrow to its batch.
        """
        title, recording = _title(title), self.recording()
        return page_of([recording], title or f"Timeline of {recording.device}")

    def to_trace(self) -> str:
        """Return a trace as JSON in Chrome's format, for https://ui.perfetto.dev and ``chrome://tracing``.

        Each stream is a thread of the device's process. Each operation is a slice, with the name of its kernel or its
        kind; the kind is also its category, and its arguments are its id, its label and its bytes. An operation that
        ends after the next one begins is cut there: the overlap is an error of the timing events' resolution.

        Arrows (flows) lead from an operation to a wait for it, and to the await that it resumed. The process of the
        host has threads for event loops, their blocked iterations, awaits, worker threads and the calls of the driver
        that have waited for running work, and counters of the operations in flight, the operations that wait on the
        host, and the device memory in use. A third process has the batches of batchers and as many threads as there are
        requests at a time. A request is a slice ``queued``, with a flow to its batch, and one with the name of its
        outcome.
        """
        return trace_of([self.recording()])

    def __repr__(self) -> str:
        return f"<Timeline of {self.device.name}: {len(self.spans)} operation{'s' * (len(self.spans) != 1)}>"


def _title(title: str | None) -> str | None:
    if title is not None and not isinstance(title, str):
        raise InvalidTypeError(f"a title is a string, not {title!r}")
    if title is not None and title.endswith((".html", ".svg")):
        method = "svg" if title.endswith(".svg") else "html"
        cure = f"Path({title!r}).write_text(timeline.to_{method}(), encoding='utf-8')"
        raise InvalidArgumentError(f"{title!r} is no title: it returns a string, {cure}", title=title)
    return title


#: What `RequestLog.begin` returns: a function that is called when the batch has ended.
End: TypeAlias = Callable[[Sequence[BaseException | None]], None]


class RequestLog:
    """Batches that began and ended, and requests that were submitted and ended, from `since` on.

    The hooks give durations, because the loop's clock is not the driver's: `clock` is read in the hook, and the times
    before it follow. uvloop counts milliseconds, so there these times are as coarse.

    Parameters
    ----------
    clock
        Returns the time of the driver's clock.
    since
        The time at which the recording begins.
    """

    def __init__(self, clock: Callable[[], float], since: float) -> None:
        self._clock = clock
        self._since = since
        self._is_open = True
        self._batches: list[Batch] = []
        self._requests: list[Request] = []

    def begin(self, batch: StartedBatch) -> End | None:
        """Note the begin of a batch. Return the function for its end."""
        if not self._is_open:
            return None
        began = self._clock()

        def end(errors: Sequence[BaseException | None]) -> None:
            if self._is_open:
                failed = sum(error is not None for error in errors)
                own = Batch(batch.batcher, batch.function, batch.number, began, self._clock(), batch.size, failed)
                self._batches.append(own)

        return end

    def add(self, request: EndedRequest) -> None:
        """Note a request that has its outcome."""
        now = self._clock()
        submitted = now - request.seconds
        if not self._is_open or submitted < self._since:
            return
        began = None if request.waited_s is None else submitted + request.waited_s
        self._requests.append(
            Request(
                request.batcher, request.function, request.number, submitted, began, now, request.outcome,
                request.batch, request.label,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Record nothing more. Any thread may call it."""
        self._is_open = False

    def record(self) -> tuple[tuple[Batch, ...], tuple[Request, ...]]:
        """Return the batches and the requests so far. Any thread may call it."""
        return tuple(self._batches), tuple(self._requests)
