"""`Machine`: the order in which devices execute the commands of their streams."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ....errors import InvalidArgumentError, StaleHandleError, WrongDeviceError
from ..._kept_streams import KeptStreams
from ._stream import Command, Engine, EngineKind, Event, Kind, State, Stream

__all__ = ["Chooser", "Machine", "Step"]

#: Returns the index of one of several commands that CUDA's rules leave unordered. It is only called for two or more.
#: ``"start"``: the ready command that a free engine takes; candidates are sorted by priority and arrival. ``"settle"``:
#: the first command of a stream that proceeds first; candidates are sorted by arrival.
Chooser: TypeAlias = Callable[[Literal["start", "settle"], Sequence[Command]], int]


class Step(NamedTuple):
    """The result of one step. The driver carries out ``ends`` in order, then ``starts`` in order."""

    starts: list[Command]  #: commands that engines have taken
    ends: list[Command]  #: commands that are done now: those of engines, and those without time that have an action
    next: float | None  #: the time at which the next timed command ends


class Machine:
    """Streams, events and engines of one or more devices.

    The driver calls `step` after each submission and each `finish`, with a time that never decreases. A command counts
    as submitted at the time of the previous step. Calls are not synchronised: only one thread may call at a time.

    Parameters
    ----------
    devices
        The number of devices.
    compute_slots
        The number of kernels, fills and copies within the device that run simultaneously on each device.
    choose
        Chooses between unordered commands. None takes the first: by priority, then by arrival.
    """

    def __init__(self, devices: int, compute_slots: int, choose: Chooser | None = None) -> None:
        self.streams: dict[int, Stream] = {0: Stream(0, 0, 0, is_default=True)}  # CUDA's default stream
        self._defaults = {0: self.streams[0]}  # by device
        self.events: dict[int, Event] = {}
        self.streams_created = 0
        self.kept: KeptStreams[Stream] = KeptStreams()
        self._exported: dict[int, Stream] = {}  # by their first handles, which other libraries use
        self._choose = choose
        slots: dict[EngineKind, int] = {"upload": 1, "download": 1, "compute": compute_slots}
        self._engines = {
            (device, kind): Engine(kind, device, count) for device in range(devices) for kind, count in slots.items()
        }
        self._unnamed: list[Stream] = []  # streams that may have no handle left, and have unfinished work
        self._handles = itertools.count(1)
        self._orders = itertools.count()
        self._unsettled: list[Stream] = []  # the first command may be able to proceed; no stream is here twice
        self._changed_engines: list[Engine] = []  # received a command or have a free slot
        self._timed: list[tuple[float, int, Command]] = []

    # Handles

    def stream(self, handle: int) -> Stream:
        """Return the stream of a handle, or raise `StaleHandleError`."""
        try:
            return self.streams[handle]
        except KeyError:
            raise StaleHandleError(f"{handle} is not a stream, or the stream was destroyed", handle=handle) from None

    def event(self, handle: int) -> Event:
        """Return the event of a handle, or raise `StaleHandleError`."""
        try:
            return self.events[handle]
        except KeyError:
            raise StaleHandleError(f"{handle} is not an event, or the event was destroyed", handle=handle) from None

    def engine(self, device: int, kind: EngineKind) -> Engine:
        """Return an engine of a device."""
        return self._engines[device, kind]

    def stream_create(self, device: int, priority: int) -> int:
        """Return a new handle: of a kept stream that is idle, or else of a new stream."""
        stream = self.kept.take(device, priority, self._is_free)
        if stream is None:
            stream = self.side_stream(device, priority)
            name = stream.handle
            self.streams_created += 1
        else:
            name = next(self._handles)
        stream.lend(name)
        self.streams[name] = stream
        return name

    def _is_free(self, stream: Stream) -> bool:
        return stream.is_idle and stream.handle not in self.streams  # else it has been imported

    def side_stream(self, device: int, priority: int) -> Stream:
        """Return a new stream without a handle, for the driver's own use."""
        return Stream(next(self._handles), device, priority)

    def stream_default(self, device: int) -> int:
        """Return a new handle of a device's default stream."""
        stream = self._defaults.get(device)
        if stream is None:
            stream = self._defaults[device] = Stream(next(self._handles), device, 0, is_default=True)
            self.streams[stream.handle] = stream
        handle = next(self._handles)
        self.streams[handle] = stream
        return handle

    def stream_export(self, handle: int) -> int:
        """Return a stream's first handle, for other libraries. The stream is never destroyed afterwards."""
        stream = self.stream(handle)
        if not stream.is_default:
            stream.export()
            self._exported[stream.handle] = stream
        return stream.handle

    def exported_stream(self, handle: int) -> Stream:
        """Return the stream whose first handle this is, whether it has an owner or not."""
        stream = self._exported.get(handle) or self.stream(handle)
        if stream.handle != handle:
            raise StaleHandleError(f"{handle} is not the handle that stream_handle() returns", handle=handle)
        return stream

    def stream_import(self, stream: Stream) -> None:
        """Make a stream available by its first handle."""
        self.streams[stream.handle] = stream

    def stream_forget(self, handle: int) -> None:
        """End an import. The owner's handle stays valid."""
        stream = self.stream(handle)
        if stream.name != handle and not stream.is_default:
            del self.streams[handle]
            self._keep_while_busy(stream)

    def stream_destroy(self, handle: int) -> None:
        """Make the handle stale. Work that the stream has accepted still runs. An exported stream is kept."""
        stream = self.stream(handle)
        if handle == stream.handle and stream.is_default:
            raise InvalidArgumentError(f"stream {handle} is the default stream, which cannot be destroyed")
        del self.streams[handle]
        if stream.is_default:
            return
        stream.give_back()
        self._keep_while_busy(stream)
        if stream.exported:
            self.kept.put(stream.device, stream.priority, stream)

    def _keep_while_busy(self, stream: Stream) -> None:
        """Keep a stream that may have no handle left until it is idle, for `busy_streams`."""
        self._unnamed = [other for other in (*self._unnamed, stream) if not other.is_idle]

    def busy_streams(self) -> list[Stream]:
        """Return the streams with unfinished work, including destroyed and kept ones, without side streams."""
        return [stream for stream in dict.fromkeys((*self.streams.values(), *self._unnamed)) if not stream.is_idle]

    def event_create(self, device: int, timing: bool) -> int:
        """Return the handle of a new event."""
        handle = next(self._handles)
        self.events[handle] = Event(handle, device, timing)
        return handle

    def event_destroy(self, handle: int) -> None:
        """Make the handle stale. Enqueued waits refer to the record command, and stay in force."""
        self.event(handle)
        del self.events[handle]

    # Submission

    def submit(
        self, stream: Stream, kind: Kind, action: Any = None, engine: Engine | None = None, seconds: float | None = None
    ) -> Command:
        """Append a command to a stream.

        Without an engine it takes no time. With an engine it takes ``seconds``, or runs until `finish` if that is None.
        """
        command = Command(kind, stream, action, engine, seconds)
        self._append(stream, command)
        return command

    def record(self, event: Event, stream: Stream) -> None:
        """Append a record command to the stream; the event is done when it is. `WrongDeviceError` across devices."""
        if event.device != stream.device:
            raise WrongDeviceError(
                f"event {event.handle} belongs to device {event.device} and cannot be recorded on stream "
                f"{stream.handle} of device {stream.device}; record one of that device, and wait for it here",
                device=event.device,
                expected=stream.device,
            )
        command = Command("record", stream)
        self._append(stream, command)
        event.record(command)

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later commands of the stream wait for the event's last record, on any device."""
        if event.last is not None:
            self.follow(stream, event.last)

    def follow(self, stream: Stream, last: Command) -> None:
        """Make later commands of the stream wait for a command of another stream."""
        if not last.done:
            self._append(stream, Command("wait", stream, after=last))

    def finish(self, command: Command, now: float) -> None:
        """End a running command that was submitted without a duration."""
        if command.state is not State.RUNNING or command.seconds is not None:
            raise RuntimeError(f"{command!r} cannot be finished: it is not running, or it has a duration")
        self._end(command, now)

    # Progress

    @property
    def is_settled(self) -> bool:
        """True if a step changes nothing before the next timed command ends."""
        return not self._unsettled and not self._changed_engines

    def step(self, now: float) -> Step:
        """Proceed to ``now``: end timed commands that are due, in order of time; start all that can start."""
        starts: list[Command] = []
        ends: list[Command] = []
        timed = self._timed
        while True:
            while timed and timed[0][0] <= now:
                due, _, command = heapq.heappop(timed)
                self._end(command, due)
                ends.append(command)
                self._settle(due, ends)
                self._start(due, starts)
            self._settle(now, ends)
            self._start(now, starts)
            # A timed command with duration 0 is due immediately, and the next command of its stream may start.
            if not timed or timed[0][0] > now:
                return Step(starts, ends, timed[0][0] if timed else None)

    def _append(self, stream: Stream, command: Command) -> None:
        stream.queue.append(command)
        if len(stream.queue) == 1:
            self._unsettled.append(stream)

    def _end(self, command: Command, when: float) -> None:
        engine = command.engine
        assert engine is not None  # only commands with an engine run
        if engine.release():
            self._changed_engines.append(engine)
        self._set_done(command, when)

    def _set_done(self, command: Command, when: float) -> None:
        """Mark the first command of a stream as done. Its successor, and the commands that waited for it, may start."""
        waiters = command.end(when)
        stream = command.stream
        stream.queue.popleft()
        if stream.queue:
            self._unsettled.append(stream)
        self._unsettled.extend(waiters)

    def _settle(self, when: float, ends: list[Command]) -> None:
        """Let first commands of streams proceed: commands without time end, the others become ready."""
        unsettled = self._unsettled
        while unsettled:
            index = 0
            if self._choose is not None and len(unsettled) > 1:
                index = self._choose("settle", [stream.queue[0] for stream in unsettled])
            stream = unsettled.pop(index)
            command = stream.queue[0]
            engine = command.engine
            if engine is not None:
                command.make_ready(next(self._orders))
                insort(engine.ready, command, key=_rank)
                self._changed_engines.append(engine)
                continue
            after = command.after
            if after is not None and not after.done:
                after.add_waiter(stream)
                continue
            self._set_done(command, when)
            if command.action is not None:
                ends.append(command)

    def _start(self, when: float, starts: list[Command]) -> None:
        """Let engines with a free slot take ready commands."""
        changed = self._changed_engines
        while changed:
            engine = changed.pop()
            ready = engine.ready
            while ready and engine.running < engine.slots:
                choice = 0 if self._choose is None or len(ready) == 1 else self._choose("start", ready)
                command = engine.start(choice, when)
                starts.append(command)
                if command.seconds is not None:
                    heapq.heappush(self._timed, (when + command.seconds, command.order, command))


def _rank(command: Command) -> tuple[int, int]:
    return command.stream.priority, command.order
