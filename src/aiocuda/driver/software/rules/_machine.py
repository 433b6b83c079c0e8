"""The rules: in which order a device does what its streams were told."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ....errors import InvalidArgumentError, StaleHandleError, WrongDeviceError
from ..._kept_streams import KeptStreams
from ._command import Command, Kind, State
from ._engine import Engine, EngineKind
from ._event import Event
from ._stream import Stream

__all__ = ["Chooser", "Machine", "Step"]

#: Picks one of several commands that CUDA's rules leave in any order, by index. ``"start"``: which ready command a free
#: engine takes, the candidates by priority and arrival. ``"settle"``: which stream's head moves on first, by arrival.
#: Asked only where there are two or more.
Chooser: TypeAlias = Callable[[Literal["start", "settle"], Sequence[Command]], int]


class Step(NamedTuple):
    """What came of one step. Carry out ``ends`` in order, then ``starts`` in order."""

    starts: list[Command]  #: engines have taken these
    ends: list[Command]  #: done now: timed commands, and those without time that have an action
    next: float | None  #: when the next timed command ends


class Machine:
    """Streams, events and engines of one or more devices.

    Whoever drives it calls `step` after each submission and each `finish`, with a time that never goes back; what is
    submitted counts as submitted at the time of the step before. Calls are not synchronised: one thread at a time.

    Parameters
    ----------
    devices
        How many devices there are.
    compute_slots
        How many kernels, fills and copies within the device run at once on each.
    choose
        Decides what CUDA leaves open. None takes the first: by priority, then by arrival.
    """

    def __init__(self, devices: int, compute_slots: int, choose: Chooser | None = None) -> None:
        self.streams: dict[int, Stream] = {0: Stream(0, 0, 0, is_default=True)}  # CUDA's default stream
        self._defaults = {0: self.streams[0]}  # by device
        self.events: dict[int, Event] = {}
        self.streams_created = 0
        self.kept: KeptStreams[Stream] = KeptStreams()
        self._exported: dict[int, Stream] = {}  # by their first handles, by which others know them
        self._choose = choose
        slots: dict[EngineKind, int] = {"upload": 1, "download": 1, "compute": compute_slots}
        self._engines = {
            (device, kind): Engine(kind, device, count) for device in range(devices) for kind, count in slots.items()
        }
        self._parting: list[Stream] = []  # without a handle, and with work to do
        self._handles = itertools.count(1)
        self._orders = itertools.count()
        self._unsettled: list[Stream] = []  # the head may be able to move; a stream is here at most once
        self._touched: list[Engine] = []  # got a command or a free slot
        self._timed: list[tuple[float, int, Command]] = []

    # Handles

    def stream(self, handle: int) -> Stream:
        """The stream of a handle, or `StaleHandleError`."""
        try:
            return self.streams[handle]
        except KeyError:
            raise StaleHandleError(f"{handle} is not a stream, or the stream was destroyed", handle=handle) from None

    def event(self, handle: int) -> Event:
        """The event of a handle, or `StaleHandleError`."""
        try:
            return self.events[handle]
        except KeyError:
            raise StaleHandleError(f"{handle} is not an event, or the event was destroyed", handle=handle) from None

    def engine(self, device: int, kind: EngineKind) -> Engine:
        """One of a device's engines."""
        return self._engines[device, kind]

    def stream_create(self, device: int, priority: int) -> int:
        """A stream under a new handle: one that is kept and idle, or else a new one."""
        stream = self.kept.take(device, priority, self._is_free)
        if stream is None:
            stream = self.side_stream(device, priority)
            stream.name = stream.handle
            self.streams_created += 1
        else:
            stream.name = next(self._handles)
        self.streams[stream.name] = stream
        return stream.name

    def _is_free(self, stream: Stream) -> bool:
        return stream.is_idle and stream.handle not in self.streams  # else somebody has imported it

    def side_stream(self, device: int, priority: int) -> Stream:
        """A stream of the driver's own, which no handle names."""
        return Stream(next(self._handles), device, priority)

    def stream_default(self, device: int) -> int:
        """One more handle of a device's default stream."""
        stream = self._defaults.get(device)
        if stream is None:
            stream = self._defaults[device] = Stream(next(self._handles), device, 0, is_default=True)
            self.streams[stream.handle] = stream
        handle = next(self._handles)
        self.streams[handle] = stream
        return handle

    def stream_export(self, handle: int) -> int:
        """The handle by which others know a stream: its first one. It is never destroyed from then on."""
        stream = self.stream(handle)
        if not stream.is_default:
            stream.exported = True
            self._exported[stream.handle] = stream
        return stream.handle

    def stream_known_as(self, handle: int) -> Stream:
        """The stream that others know by this handle, whether it has an owner or not."""
        stream = self._exported.get(handle) or self.stream(handle)
        if stream.handle != handle:
            raise StaleHandleError(f"{handle} is how its owner calls a stream, and no handle of it", handle=handle)
        return stream

    def stream_import(self, stream: Stream) -> None:
        """The handle by which others know a stream names it here, too."""
        self.streams[stream.handle] = stream

    def stream_forget(self, handle: int) -> None:
        """End an import. The owner's handle stays."""
        stream = self.stream(handle)
        if stream.name != handle and not stream.is_default:
            del self.streams[handle]
            self._part(stream)

    def stream_destroy(self, handle: int) -> None:
        """Forget the handle. What the stream has accepted still runs. An exported stream is kept."""
        stream = self.stream(handle)
        if handle == stream.handle and stream.is_default:
            raise InvalidArgumentError(f"stream {handle} is the default stream, which cannot be destroyed")
        del self.streams[handle]
        if stream.is_default:
            return
        stream.name = None
        self._part(stream)
        if stream.exported:
            self.kept.put(stream.device, stream.priority, stream)

    def _part(self, stream: Stream) -> None:
        """No handle names the stream any more, perhaps."""
        self._parting = [other for other in (*self._parting, stream) if not other.is_idle]

    def busy_streams(self) -> list[Stream]:
        """Every stream that was given out and has work to do, destroyed and kept ones included."""
        return [stream for stream in dict.fromkeys((*self.streams.values(), *self._parting)) if not stream.is_idle]

    def event_create(self, device: int, timing: bool) -> int:
        """A new event's handle."""
        handle = next(self._handles)
        self.events[handle] = Event(handle, device, timing)
        return handle

    def event_destroy(self, handle: int) -> None:
        """Forget the handle. Waits hold the record itself, and still hold."""
        self.event(handle)
        del self.events[handle]

    # Submission

    def submit(
        self, stream: Stream, kind: Kind, action: Any = None, engine: Engine | None = None, seconds: float | None = None
    ) -> Command:
        """Put a command behind all that the stream has accepted.

        Without an engine it takes no time. With one it takes ``seconds``, or runs until `finish` if they are None.
        """
        command = Command(kind, stream, action, engine, seconds)
        self._append(stream, command)
        return command

    def record(self, event: Event, stream: Stream) -> None:
        """The event is done when all that the stream has accepted so far is. `WrongDeviceError` across devices."""
        if event.device != stream.device:
            raise WrongDeviceError(
                f"event {event.handle} belongs to device {event.device} and cannot be recorded on stream "
                f"{stream.handle} of device {stream.device}; record one of that device, and wait for it here",
                device=event.device,
                expected=stream.device,
            )
        command = Command("record", stream, None, None, None)
        self._append(stream, command)
        event.last = command

    def wait(self, stream: Stream, event: Event) -> None:
        """Later commands of the stream come after what the event recorded last, on whatever device."""
        if event.last is not None:
            self.follow(stream, event.last)

    def follow(self, stream: Stream, last: Command) -> None:
        """Later commands of the stream come after this one, of another stream."""
        if last.done:
            return
        command = Command("wait", stream, None, None, None)
        command.after = last
        self._append(stream, command)

    def finish(self, command: Command, now: float) -> None:
        """End a running command from outside."""
        if command.state is not State.RUNNING or command.seconds is not None:
            raise RuntimeError(f"{command!r} cannot be ended from outside: it is not running, or its time is known")
        self._end(command, now)

    # Progress

    @property
    def is_settled(self) -> bool:
        """Would a step change nothing before the next timed command ends?"""
        return not self._unsettled and not self._touched

    def step(self, now: float) -> Step:
        """Go on to ``now``: end what is due, in order of time; move every stream and engine that can move."""
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
            # A timed command of no length is due at once, and what stands behind it may go on.
            if not timed or timed[0][0] > now:
                return Step(starts, ends, timed[0][0] if timed else None)

    def _append(self, stream: Stream, command: Command) -> None:
        stream.queue.append(command)
        if len(stream.queue) == 1:
            self._unsettled.append(stream)

    def _end(self, command: Command, when: float) -> None:
        engine = command.engine
        assert engine is not None  # only these run
        engine.running -= 1
        if engine.ready:
            self._touched.append(engine)
        self._leave(command, when)

    def _leave(self, command: Command, when: float) -> None:
        """The head of a stream is done: whoever stood behind it, or waited for it, may go on."""
        command.ended = when
        command.state = State.DONE
        command.done = True
        command.after = None
        stream = command.stream
        stream.queue.popleft()
        if stream.queue:
            self._unsettled.append(stream)
        if command.waiters is not None:
            self._unsettled.extend(command.waiters)
            command.waiters = None

    def _settle(self, when: float, ends: list[Command]) -> None:
        """Move heads of streams until none can: commands without time end, the others reach their engines."""
        unsettled = self._unsettled
        while unsettled:
            index = 0
            if self._choose is not None and len(unsettled) > 1:
                index = self._choose("settle", [stream.queue[0] for stream in unsettled])
            stream = unsettled.pop(index)
            command = stream.queue[0]
            engine = command.engine
            if engine is not None:
                command.state = State.READY
                command.order = next(self._orders)
                insort(engine.ready, command, key=_rank)
                self._touched.append(engine)
                continue
            after = command.after
            if after is not None and not after.done:
                if after.waiters is None:
                    after.waiters = []
                after.waiters.append(stream)
                continue
            self._leave(command, when)
            if command.action is not None:
                ends.append(command)

    def _start(self, when: float, starts: list[Command]) -> None:
        """Let engines with a free slot take what is ready."""
        touched = self._touched
        while touched:
            engine = touched.pop()
            ready = engine.ready
            while ready and engine.running < engine.slots:
                choice = 0 if self._choose is None or len(ready) == 1 else self._choose("start", ready)
                command = ready.pop(choice)
                engine.running += 1
                command.state = State.RUNNING
                command.started = when
                starts.append(command)
                if command.seconds is not None:
                    heapq.heappush(self._timed, (when + command.seconds, command.order, command))


def _rank(command: Command) -> tuple[int, int]:
    return command.stream.priority, command.order
