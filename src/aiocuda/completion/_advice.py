"""Advice: two checks that the watchdog makes, and that find what makes a program slow, without any error.

`RoundTripWatch` finds *round trips*: a task awaits each operation before it enqueues the next one. The device then has
nothing to do from the end of one operation until the host has noticed it and has enqueued the next one. To find that,
no enqueue and no await does any work: the watchdog compares the reactor's count of operations, and when many short
operations have ended for 0.1 s, a *probe* begins. A probe listens to a few hundred operations. It takes timing events
only where the first operations show round trips, so that nothing else is on the device: between the kernels of many
streams, timing events delay the kernels (measured with 64 streams on an H200: 61 ms instead of 31).

`QueueWatch` finds more busy streams than hardware queues, where streams wait for each other on the device.
`log_few_queues` logs that CUDA has fewer queues than aiocuda would have asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from .._base._advice import advise
from .._base._log import log
from .._base._types import DeviceProperties, SourceLine
from .._core import INTERNAL, Operation, StreamOperation, stream_operation
from ..errors import AiocudaError
from ._methods import KINDS

if TYPE_CHECKING:
    from ._reactor import Reactor

__all__ = ["QueueWatch", "RoundTripWatch", "log_few_queues"]

#: Operations in one pass of the watchdog, which comes every 25 ms. If there are fewer, each takes 1 ms or more, and a
#: round trip of 10 to 60 µs is a small part of that.
LEAST_PER_PASS: Final = 25

#: Passes in a row with so many operations before a probe begins: 0.1 s. Shorter loops lose little time.
BUSY_PASSES: Final = 4

#: Operations and passes of the watchdog after which a probe ends.
MOST_PROBED: Final = 256
MOST_PASSES: Final = 8

#: Operations without timing, after which a probe ends unless most of them were round trips.
FIRST_LOOK: Final = 32

#: Seconds from one probe to the next, at first; after a probe without round trips twice as long, up to the second
#: number. With timing, an operation costs the host some 5 µs more: 256 of them in a second are 0.13 % of it.
PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 64.0

#: The round trips of a probe that are enough for a warning: a quarter of its operations, and 80 % of the operations
#: whose result the host did not need. A loop that enqueues five operations and awaits the last one has 20 %.
LEAST_TRIPS: Final = 64
LEAST_SHARE: Final = 0.8

#: The share of the time in which the device did nothing because of the round trips. Below it, the cure gains little.
LEAST_IDLE: Final = 0.3

#: Seconds of the host from the end of an await to the next enqueue. A task that does more in between has a reason.
MOST_BETWEEN: Final = 1e-3

#: The kinds of operations whose results the host needs before it goes on.
_NEEDED = frozenset(kind.name for kind in KINDS.values() if kind.needed)

#: The packages through which a program calls the methods of a stream. Calls by others, such as pipelines, are theirs.
_METHODS = ("_core", "completion", "device/streams", "device/graphs", "kernels", "pool")

#: Passes of the watchdog in a row that find too many streams: 0.1 s.
QUEUE_PASSES: Final = 4

#: The most hardware queues of CUDA.
MOST_QUEUES: Final = 32

#: The variable that CUDA reads when it starts. The CUDA driver sets it then, if it is unset.
VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


class RoundTripWatch:
    """Looks for round trips in the loop of one reactor, in short probes."""

    __slots__ = ("_busy_passes", "_next", "_pause", "_probe", "_resolved")

    def __init__(self) -> None:
        self._resolved = 0  # the reactor's count at the last pass
        self._busy_passes = 0
        self._pause = PAUSE
        self._next = 0.0  # the time of the next probe
        self._probe: _Probe | None = None

    def look(self, reactor: Reactor) -> None:
        """Begin a probe if many operations have ended, or end the one that runs. Each pass of the watchdog calls it."""
        # ``resolved``: since the last pass.
        resolved, self._resolved = reactor.hot.resolved - self._resolved, reactor.hot.resolved
        probe = self._probe
        if probe is not None:
            probe.passes += 1
            has_rested = not resolved and not reactor.queues  # the loop had no work since the last pass
            if not (probe.ended or probe.passes >= MOST_PASSES or has_rested):
                reactor.watch_again()  # also if there are no operations: a later pass ends the probe
                return
            self.close(reactor)
            if not probe.has_trips:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            probe.advise()
            return
        self._busy_passes = self._busy_passes + 1 if resolved >= LEAST_PER_PASS else 0
        if self._busy_passes < BUSY_PASSES:
            return
        now = reactor.device_state.driver.now()
        if now >= self._next:
            self._next = now + self._pause
            self._probe = _Probe(reactor)
            reactor.device_state.add_listener(self._probe)
            reactor.watch_again()

    def close(self, reactor: Reactor) -> None:
        """End the probe that runs, without advice. The next pass of the reactor, if one comes, begins anew."""
        probe, self._probe = self._probe, None
        self._busy_passes = 0
        if probe is not None:
            reactor.device_state.remove_listener(probe)


#: Names of streams in a message: a program that opens a stream for each request has thousands.
MOST_NAMES = 4


class _Trips:
    """Round trips of one kind, within a stream or between two: their number, the time that they cost, and their lines.

    A line is the one of the program that enqueued the awaited operation.
    """

    __slots__ = ("count", "idle", "lines", "names", "places")

    def __init__(self) -> None:
        self.count = 0
        self.idle = 0.0  # seconds in which the device had no work
        self.lines: Counter[tuple[str, int]] = Counter()  # the number of round trips, by file and number of the line
        self.places: dict[tuple[str, int], SourceLine] = {}  # the line itself, by the same keys
        self.names: dict[str, None] = {}  # of the streams

    def shown_names(self, link: str) -> str:
        """Return the names of the streams, joined by ``link``: of more than `MOST_NAMES`, so many and "others"."""
        names = list(self.names)
        if len(names) > MOST_NAMES:
            names[MOST_NAMES:] = ["others"]
        return link.join(names)

    def add(self, line: SourceLine, idle: float, *names: str) -> None:
        """Count a round trip of two streams, or of one. Beyond `MOST_NAMES`, one more name is kept, for "others"."""
        self.count += 1
        self.idle += max(idle, 0.0)
        self.lines[line.file, line.line] += 1
        self.places[line.file, line.line] = line
        if len(self.names) <= MOST_NAMES:
            self.names.update(dict.fromkeys(names))

    def most_common_line(self) -> SourceLine:
        return self.places[self.lines.most_common(1)[0][0]]


class _Newest:
    """The newest operation of a probe. It is referred to only until its end: an operation holds its buffers."""

    __slots__ = ("_gives_buffer", "kind", "operation", "queue")

    def __init__(self, operation: StreamOperation[Any]) -> None:
        self.operation: StreamOperation[Any] | None = operation
        self.kind, self.queue = operation.kind, operation.queue
        self._gives_buffer = False

    @property
    def gives_buffer(self) -> bool:
        """True if the result is a buffer."""
        return self._gives_buffer if self.operation is None else self.operation.value is not None

    def end(self) -> None:
        """Drop the reference, when the operation has ended."""
        self._gives_buffer, self.operation = self.gives_buffer, None


class _Probe:
    """A listener for a few hundred operations of one loop. It compares each operation with the one before it.

    The first `FIRST_LOOK` operations are counted without timing. If most were round trips, it counts anew, with timing.
    """

    def __init__(self, reactor: Reactor) -> None:
        self.timing = False
        self._reactor = reactor
        self._now = reactor.device_state.driver.now
        self._driver = reactor.device_state.driver
        self.passes = 0
        self.ended = False
        self._seen = 0  # the number of operations
        self._in_flight: dict[int, None] = {}  # ids of operations
        # Of the newest operation, with which the next one is compared:
        self._last: _Newest | None = None  # None if the host needs its result
        self._last_is_staged = False
        self._staged = 0  # the id of the newest copy with chunks, which are submitted before the copy itself
        self._last_task: object = None  # that has enqueued it
        self._last_line: SourceLine | None = None  # that has enqueued it
        self._last_enqueued_at = 0.0
        self._last_awaited_until = 0.0  # 0.0 while no await of it has ended
        self._before_call = 0.0  # seconds between its start event and its call
        self._last_seconds = 0.0  # on the device
        self._first = 0.0  # the time of the first operation
        self._same_stream, self._other_stream = _Trips(), _Trips()
        self._no_trips = 0  # operations that the host enqueued without such a wait
        self._elsewhere = False  # another loop uses the device

    def on_submit(self, operation: Operation[Any]) -> None:
        """Compare an operation with the one before it (`_count`), and keep it for the next comparison."""
        new = stream_operation(operation)
        if new.queue.reactor is not self._reactor:
            self._elsewhere = True
            return
        if self.ended or new.kind == INTERNAL:
            if new.part_of is not None:
                self._staged = new.part_of.id
            return
        now = self._now()
        task = asyncio.current_task()
        line = SourceLine.of_direct_caller(*_METHODS)
        self._first = self._first or now
        if self._last is not None:
            self._count(self._last, new, task, now)
        self._in_flight[new.id] = None
        self._last, self._last_task, self._last_line = None if new.kind in _NEEDED else _Newest(new), task, line
        self._last_is_staged = new.id == self._staged
        # An idle stream reaches the start event before the host has made the call of the operation. The time in between
        # is taken as half of that of the submission.
        self._before_call = (now - new.submitted_at) / 2
        self._last_enqueued_at, self._last_awaited_until, self._last_seconds = now, 0.0, 0.0
        self._seen += 1
        if self._seen == FIRST_LOOK and self.has_trips:
            self._begin_timing()
        elif self._seen == FIRST_LOOK or self._seen >= MOST_PROBED:
            self.ended = True
            self._last = None
            self._reactor.device_state.remove_listener(self)

    def _begin_timing(self) -> None:
        """Add the listener again, with timing, and count anew."""
        device_state = self._reactor.device_state
        device_state.remove_listener(self)
        self.timing = True  # a device reads it when a listener is added
        device_state.add_listener(self)
        self._last, self._first = None, 0.0
        self._same_stream, self._other_stream = _Trips(), _Trips()
        self._no_trips = 0

    def _count(self, last: _Newest, new: StreamOperation[Any], task: object, now: float) -> None:
        """Count ``new`` as the end of a round trip or not; leave it out if it may need the buffer of an upload.

        A round trip: one task has awaited ``last`` and enqueues ``new`` within `MOST_BETWEEN`, while no operation is
        in flight. The device has no work meanwhile.
        """
        if last.kind == "upload" and last.queue is new.queue and (last.gives_buffer or self._last_is_staged):
            return  # ``new`` may need the buffer that an upload returns; a staged copy is timed by its chunks
        if (
            self._in_flight
            or task is None
            or task is not self._last_task
            or self._last_line is None
            or self._last_awaited_until == 0.0
            or now - self._last_awaited_until > MOST_BETWEEN
        ):
            self._no_trips += 1
            return
        trips = self._same_stream if last.queue is new.queue else self._other_stream
        idle = now - self._last_enqueued_at - self._last_seconds  # of the device, since ``last`` was enqueued
        trips.add(self._last_line, idle, last.queue.name, new.queue.name)

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        """Note the end of an operation; of the newest one, its time on the device and whether a task awaited it."""
        done = stream_operation(operation)
        if done.queue.reactor is not self._reactor:
            self._elsewhere = True
            return
        self._in_flight.pop(done.id, None)
        last = self._last
        if last is None or last.operation is not done:
            return
        last.end()
        if done.is_awaited:
            self._last_awaited_until = self._now()
            try:
                seconds = self._driver.event_elapsed_ms(start, end) * 1e-3 if start else 0.0
            except AiocudaError:
                self._last_awaited_until = 0.0  # without its time on the device, it does not count
            else:
                self._last_seconds = max(seconds - self._before_call, 0.0)

    @property
    def has_trips(self) -> bool:
        """True if most operations were enqueued after an await of the one before."""
        counted = self._same_stream.count + self._other_stream.count
        return counted > 0 and counted >= LEAST_SHARE * (counted + self._no_trips)

    def advise(self) -> None:
        """Warn if round trips have left the device without work for much of the time."""
        seconds = self._last_enqueued_at - self._first
        if self._elsewhere or seconds <= 0.0 or not self.has_trips:
            return
        for trips, give in (
            (self._same_stream, _advise_within_streams),
            (self._other_stream, _advise_between_streams),
        ):
            if trips.count >= LEAST_TRIPS and trips.idle >= LEAST_IDLE * seconds:
                self._reactor.guard(give, trips, trips.idle / seconds)


def _advise_within_streams(trips: _Trips, idle: float) -> None:
    """Warn of round trips within streams. ``idle``: the share of the time for which the device had no work."""
    advise(
        "round trips",
        trips.most_common_line(),
        f"{trips.count} times a task awaited an operation of {trips.shown_names(' and ')} before it enqueued the next "
        f"one, and the device had no work for {idle:.0%} of the time: enqueue the operations one after the other, and "
        "await only the last one, or aiocuda.gather(*operations)",
    )


def _advise_between_streams(trips: _Trips, idle: float) -> None:
    """Warn of round trips from one stream to another. ``idle``: as above."""
    advise(
        "host waits",
        trips.most_common_line(),
        f"{trips.count} times a task awaited an operation of one stream before it enqueued the next one on another "
        f"stream ({trips.shown_names(', ')}), and the device had no work for {idle:.0%} of the time: let the stream "
        "wait on the device, stream.wait(operation), or use an AsyncCoordinator or a Pipeline, which do that",
    )


class QueueWatch:
    """Counts the streams of one loop that have unfinished operations, in each pass of the watchdog.

    Streams that share a hardware queue also share the waits for other streams: a stream that waits on the device holds
    up the others. Without such waits, more streams than hardware queues cost nothing that this could measure.
    """

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes = 0

    def look(self, reactor: Reactor) -> None:
        """Warn if more streams than hardware queues were busy in `QUEUE_PASSES` passes in a row, and some wait."""
        most = reactor.device_state.properties.hardware_queues
        if len(reactor.queues) <= most:
            self._passes = 0
            return
        queues: list[Any] = [queue for queue in reactor.queues if not queue.idle]
        if len(queues) <= most or not _some_wait(queues):
            self._passes = 0
            return
        self._passes += 1
        if self._passes == QUEUE_PASSES:
            # The warning names the line that opened the first stream beyond the number of hardware queues.
            opened_at = next(filter(None, (queue.rare.opened_at for queue in queues[most:])), None)
            if opened_at is not None:
                advise("hardware queues", SourceLine.parse(opened_at), _message(len(queues), most))


def _some_wait(queues: Iterable[Any]) -> bool:
    """Return whether a stream waits for another one on the device, by one of its oldest 8 operations or without one."""
    return any(
        queue.unmarked_wait_at >= 0 or any(each.kind == "wait" for each in itertools.islice(queue.pending, 8))
        for queue in queues
    )


def _message(streams: int, most: int) -> str:
    setting = f", or set {VARIABLE}={MOST_QUEUES} before CUDA is first used"
    return (
        f"{streams} streams have unfinished operations, some wait for each other, and the device has {most} hardware "
        "queues: streams that share one wait for each other's work. Lend streams from "
        f"aiocuda.StreamPool(device, maximum={most}){setting * (most < MOST_QUEUES)}"
    )


def log_few_queues(properties: DeviceProperties, index: int) -> None:
    """Log that other code has started CUDA with fewer hardware queues than aiocuda would have asked for.

    Most programs never notice: `QueueWatch` warns those that do.
    """
    if properties.hardware_queues < MOST_QUEUES and VARIABLE not in os.environ:
        queues = properties.hardware_queues
        log("info", "few_hardware_queues", device=properties.name, index=index, hardware_queues=queues)
