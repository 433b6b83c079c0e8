"""`SimulatedDriver`: the methods of `aiocuda.driver.software`, executed by a virtual clock.

There are no threads and no sleep, and time is the time of the clock. It passes as follows:

    * Every method takes a little time, a query always 1 µs. Polling therefore lets time pass.
    * A simulated event loop without other work advances the clock to the next entry.
    * On any other loop, the port asks to be drained in every turn of the loop, and each drain runs one entry.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ..._base._clock import Clock, running_clock
from ...errors import AiocudaError, ClosedError, DeviceFault, DeviceOutOfMemory, InvalidTypeError
from .._codes import error_class, translate
from .._workers import Workers
from ..protocol import Port, Program
from ..software import Model, Recorded
from ..software._model import BANDWIDTH, LATENCY, MEMORY, PRIORITIES
from ..software._replay import NodeWork
from ..software._work import HostKernelError, KernelCall, Work, used_addresses
from ..software.rules import Command, IllegalAddressError, Kind, PageKind, Stream
from ._choices import QUERY_NS, WORK_NS, SeededChoices
from ._order import OrderChecker
from ._upset import Upset, Upsets

__all__ = ["MOST_ENTRIES", "SimulatedDriver", "SimulatedNotifier", "SimulatedPort"]

#: On a GPU a stream with this many entries blocks its caller (measured: the 1 021st entry does).
MOST_ENTRIES = 1_021

#: Methods that change nothing.
QUERIES = frozenset({"event_query", "stream_query"})

#: Calls of CUDA that wait for all running kernels, or hold the launches of other threads, by the method of the driver.
WAITING: Final[Mapping[str, str]] = {
    "load": "cuKernelGetFunction",
    "managed_deallocate": "cuMemFree",
    "pin": "cuMemHostRegister",
    "pinned_allocate": "cuMemHostAlloc",
    "pinned_deallocate": "cuMemFreeHost",
    "unpin": "cuMemHostUnregister",
}

#: The method that releases each kind of host memory.
_RELEASES: Final[Mapping[PageKind, str]] = {
    "managed": "managed_deallocate", "pinned": "pinned_deallocate", "registered": "unpin"
}  # fmt: skip

#: Commands that take no entry of a hardware queue.
_WITHOUT_ENTRY: frozenset[Kind] = frozenset({"record", "wait", "call", "allocate", "free"})


class _Served(threading.local):
    """The driver for which a worker thread runs, by thread. One object for all drivers, since each takes 1 KB."""

    driver: SimulatedDriver | None = None

    def run(self, driver: SimulatedDriver, work: Callable[[], object]) -> None:
        """Run a function on this thread, for a driver."""
        self.driver = driver
        try:
            work()
        finally:
            self.driver = None  # an idle thread must not keep the driver alive


_served: Final = _Served()


class _WorkerThreads:
    """The worker threads of one user. Each call of their function has a moment of its own on the clock."""

    def __init__(self, driver: SimulatedDriver, step: Callable[[], bool], port: SimulatedPort, tag: int) -> None:
        self._driver = driver
        self._step = step
        self._port = port
        self._tag = tag
        self._closed = False

    def wake(self, threads: int) -> None:
        if self._closed:
            raise ClosedError("the worker threads have been closed")
        for _ in range(threads):
            self._driver.call_steps(self._step)

    def notify(self) -> None:
        self._driver.notify_later(self._port, self._tag)

    def resize(self, threads: int) -> None:
        """Do nothing: the caller counts the threads that it wakes."""

    def close(self) -> None:
        self._closed = True


class SimulatedPort:
    """A port without a descriptor: it wakes its loop, which then drains it.

    On a loop that is not simulated, each drain runs one entry of the clock, and asks for the next drain.
    """

    def __init__(self, driver: SimulatedDriver, wake: Callable[[], None]) -> None:
        self._driver = weakref.ref(driver)  # ports may outlive their drivers
        self._wake: Callable[[], None] | None = wake
        self._tags: list[int] = []
        self._wake_pending = False  # the loop was woken, and has not drained yet

    def fileno(self) -> None:
        """None: there is no descriptor to watch."""

    def put(self, tag: int) -> None:
        """Put a tag into the port. A closed port discards it."""
        if self._wake is not None:
            self._tags.append(tag)
            self.request_drain()

    def request_drain(self) -> None:
        """Wake the loop, unless it was woken and has not drained yet."""
        wake = self._wake  # another thread may close the port meanwhile
        if wake is not None and not self._wake_pending:
            self._wake_pending = True
            wake()

    def drain(self) -> list[int]:
        """Return and remove the tags that have arrived."""
        self._wake_pending = False
        driver = self._driver()
        if driver is not None and not driver.attached and driver.run_next():
            self.request_drain()
        tags = []
        while self._tags:
            tags.append(self._tags.pop(0))
        return tags

    def close(self) -> None:
        """Discard the tags that arrive from now on."""
        self._wake = None
        self._tags.clear()
        driver = self._driver()
        if driver is not None:
            driver.forget_port(self)


class SimulatedNotifier:
    """A side stream whose host function puts a tag into a port, after a delay."""

    def __init__(self, call_after: Callable[[int, int], None]) -> None:
        self._call_after = call_after

    def ring(self, event: int, tag: int) -> None:
        self._call_after(event, tag)


class _Job:
    """Offloaded work on virtual time. It is finished when the work has returned and all its waits have ended."""

    __slots__ = ("_finished", "_unfinished")

    def __init__(self, finished: Callable[[], object]) -> None:
        self._finished = finished
        self._unfinished = 1  # the work itself, and its waits

    def part_begun(self) -> None:
        """The work has to wait, and returns before the wait has ended."""
        self._unfinished += 1

    def part_done(self) -> None:
        """The work has returned, or one of its waits has ended."""
        self._unfinished -= 1
        if self._unfinished == 0:
            self._finished()


class _StreamWait:
    """A wait until streams have finished the work that they have accepted. A fault ends it, too.

    It calls ``then`` when it ends, and is in ``waits`` until then.
    """

    __slots__ = ("_job", "_streams_left", "_then", "_waits", "ended")

    def __init__(
        self, streams: int, then: Callable[[], object], job: _Job | None, waits: dict[_StreamWait, None]
    ) -> None:
        self._streams_left = streams
        self._then = then
        self._job = job
        self._waits = waits
        self.ended = threading.Event()
        waits[self] = None
        if job is not None:
            job.part_begun()

    def stream_done(self) -> None:
        """Note that a stream has finished."""
        self._streams_left -= 1
        if self._streams_left == 0:
            self.end()

    def end(self) -> None:
        """End the wait."""
        if not self.ended.is_set():
            self.ended.set()
            self._waits.pop(self, None)
            self._then()
            if self._job is not None:
                self._job.part_done()


class SimulatedDriver(Recorded):
    """A driver with virtual time. A seed decides everything that CUDA leaves open.

    CUDA's order is always obeyed. Unordered operations run in any order, a different one for each seed. The seed also
    sets all durations and the delays of notifications. A buffer's content changes when an operation completes, and not
    before. On an `aiocuda.testing.SimulatedLoop` the same seed gives the same run, to the last byte of the trace, and
    hours of virtual time take no real time. On any other loop one step happens per turn; the run obeys CUDA's rules,
    but is not reproducible.

    A kernel's host implementation runs when the kernel completes. If it is a generator function, it runs in parts and
    yields the seconds between them.

    Parameters
    ----------
    seed
        Decides everything that CUDA leaves open. With None, every duration is that of the model, the first command
        goes first, and nothing is delayed.
    devices, memory, bandwidth, latency
        As in `aiocuda.driver.host.HostDriver`; times are virtual.
    upsets
        The failures to inject. None leaves them to the seed: no failure in half of all cases, else one to three.
        ``()`` injects none.
    """

    __slots__ = (  # the names of `Core` are in a dictionary; with more than thirty names it would take 1.6 KB
        *("_callback_thread", "_choices", "_duration_key", "_job", "_next_step", "_offset_ns", "_order"),
        *("_paused_kernels", "_ports", "_waits", "_workers"),
        *("clock", "refused", "seed", "trace", "upsets", "violations"),
    )

    name = "simulated"
    _ms_per_tick = 1e-6

    #: True: a query lets virtual time pass, and no other thread needs the GIL.
    polls_freely = True

    def __init__(
        self,
        seed: int | None = 0,
        *,
        devices: int = 1,
        memory: int = MEMORY,
        bandwidth: float = BANDWIDTH,
        latency: float = LATENCY,
        upsets: Iterable[Upset] | None = (),
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidTypeError(f"seed={seed!r} must be an int, or None")
        self._choices = SeededChoices(seed)
        super().__init__(Model(devices, memory, bandwidth, latency), self._choices.choose)
        self.seed = seed
        self.clock = running_clock() or Clock()
        self._offset_ns = 0  # the driver's time minus the clock's; not 0 after a change to another clock
        self.upsets = Upsets.drawn(self._choices) if upsets is None else Upsets(upsets)
        #: If it is a list, every step is appended to it as a line.
        self.trace: list[str] | None = None
        #: The rules of CUDA that the program has broken, with the method that broke them.
        self.violations: list[str] = []
        #: The methods that were called after the fault, in order.
        self.refused: list[str] = []
        self._order = OrderChecker()
        self._next_step: int | None = None
        self._paused_kernels: dict[Command, Iterator[float]] = {}  # host implementations that run in parts
        self._waits: dict[_StreamWait, None] = {}
        self._duration_key = 0  # the stream whose pace sets the duration of the command that is being submitted
        self._job: _Job | None = None  # the job that runs now, on virtual time
        self._callback_thread = 0  # the thread in which a callback of the driver runs now; other threads may call
        self._workers = Workers()
        self._ports: list[SimulatedPort] = []

    def __repr__(self) -> str:
        return f"SimulatedDriver(seed={self.seed})"

    # Time

    @property
    def attached(self) -> bool:
        """True if a simulated loop advances the driver's clock."""
        return running_clock() is self.clock

    @property
    def now_ns(self) -> int:
        """The driver's time in nanoseconds. It never decreases, also when the driver changes its clock."""
        return self.clock.now_ns + self._offset_ns

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_ns / 1e9

    def follow_running_clock(self) -> None:
        """Use the clock of the simulated loop that runs in this thread, if there is one, now and in its later runs."""
        clock = running_clock()
        if clock is None:
            return
        clock.add_follower(self)
        if clock is not self.clock:
            with self._lock:
                now = self.now_ns
                clock.move_entries(self, self.clock)
                self.clock = clock
                self._offset_ns = now - clock.now_ns

    @property
    def fault(self) -> DeviceFault | None:
        """The first fault, or None. A task that waits after a change of loops reads only this, and calls no method."""
        if running_clock() is not self.clock:
            self.follow_running_clock()
        return self._latch.fault

    def advance_time(self, seconds: float) -> None:
        """Let time pass. Entries of the clock run when they are due."""
        with self._lock:
            self.clock.spend(round(seconds * 1e9))

    def run_next(self) -> bool:
        """Advance to the next entry of the clock and run it. False if there is none."""
        with self._lock:
            due = self.clock.next_ns()
            if due is not None:
                self.clock.advance(due)
            return due is not None

    def _after(self, delay_ns: int, action: Callable[[], object]) -> None:
        self.clock.at(self.clock.now_ns + delay_ns, self, action)
        self._request_drains()

    def _request_drains(self) -> None:
        """Ask the loops to drain their ports, if no simulated loop advances the clock."""
        if not self.attached:
            for port in self._ports:
                port.request_drain()

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_ns} {text}")

    # The beginning of every method

    def _enter(self) -> None:
        self._begin(_method_name())

    def _begin(self, method: str) -> None:
        """Begin the method of this name."""
        if self._callback_thread and self._callback_thread == threading.get_ident():
            self.violations.append(f"V8: {method} was called by a driver's own callback")
        if running_clock() is not self.clock:
            self.follow_running_clock()  # a loop that continues after another one may not have opened a port
        with self._lock:
            self.clock.spend(QUERY_NS if method in QUERIES else self._choices.call_ns())
            if self._call_error is not None:
                # A job is not on the loop, and the loop has not seen the fault yet.
                if self._release_error is None and self._job is None:
                    self.refused.append(method)
                raise AiocudaError.again(self._call_error)
            self._calls += 1
            upset = self.upsets.due("refuse", method)
            if upset is not None:
                self._refuse(method, upset.code)

    def _enter_release(self) -> None:
        super()._enter_release()
        if not self.attached:
            self.follow_running_clock()
        with self._lock:
            self.clock.spend(self._choices.call_ns())

    def _refuse(self, method: str, code: int) -> None:
        self._note(f"refuse {method} {code}")
        kind = error_class(code)
        if kind is DeviceFault:
            raise AiocudaError.again(self._fail(code, 0, f"{method} answered a fault"))
        if kind is DeviceOutOfMemory:
            free, _ = self._memory.info(0)
            raise DeviceOutOfMemory(f"{method}: out of memory", code=code, call=method, requested=0, free=free)
        raise translate(code, method, "refused", "an upset of the simulated driver refuses this call")

    # Streams and events: the methods that the trace or the check of the order must see

    def event_query(self, event: int) -> bool:
        """True if all work before the event's last record is done. Takes 1 µs, as every query."""
        self._begin("event_query")  # the method that is called most often: its name is not looked up
        done = self._machine.event(event).is_done
        if done:
            self._order.event_seen_done(event)
            self._note(f"see {event} done")
        return done

    def stream_query(self, stream: int) -> bool:
        """True if all work that the stream has accepted is done. Takes 1 µs."""
        self._enter()
        found = self._machine.stream(stream)
        if found.is_idle:
            self._order.stream_seen_idle(found.handle)
        return found.is_idle

    def event_record(self, event: int, stream: int) -> None:
        super().event_record(event, stream)
        handle = self._machine.stream(stream).handle  # the first one; a default stream has several
        self._order.record(event, handle)
        self._note(f"record {event} in {handle}")

    def stream_wait(self, stream: int, event: int) -> None:
        super().stream_wait(stream, event)
        handle = self._machine.stream(stream).handle
        self._order.wait(handle, event)
        self._note(f"wait for {event} in {handle}")

    # Calls that wait for running work: the methods that only a job may call while there is some

    def load(self, device: int, program: Program) -> int:
        function = super().load(device, program)
        if program.name.isidentifier():  # else a function of `Stream.submit`, which is no kernel of CUDA
            self._check_in_job("load")
        return function

    def pin(self, address: int, nbytes: int) -> None:
        self._check_in_job("pin")
        super().pin(address, nbytes)

    def pinned_allocate(self, nbytes: int) -> int:
        self._check_in_job("pinned_allocate")
        return super().pinned_allocate(nbytes)

    def _release(self, kind: PageKind, address: int) -> None:
        self._check_in_job(_RELEASES[kind])
        super()._release(kind, address)

    def _check_in_job(self, method: str) -> None:
        """Record a violation if the thread of a simulated loop makes a call that waits, while the devices have work."""
        if self._job is not None or running_clock() is None or self._call_error is not None:
            return
        with self._lock:
            busy = [stream.handle for stream in self._machine.busy_streams()]
        if busy:
            self.violations.append(
                f"V16: {method} was called on the thread of the loop while streams {busy} have work: {WAITING[method]} "
                "waits for all running kernels, or holds all launches; call it in a job, by Driver.offload"
            )

    # Submission

    def _duration(self, kind: Kind, work: Work) -> float | None:
        """Return the duration in nanoseconds: the machine only compares and adds times."""
        if isinstance(work, KernelCall) and work.function.is_generator:
            return None
        modelled = round(work.seconds * 1e9) or WORK_NS
        duration = self._choices.duration_ns(self._duration_key, modelled)
        upset = self.upsets.due("slow")
        if upset is not None:
            duration += round(upset.seconds * 1e9)
        return duration

    def _submit(self, stream: Stream, kind: Kind, action: Any) -> None:
        wrong = None
        if kind == "allocate":
            self._order.allocate(action.address, action.nbytes, stream.handle)
        elif kind == "free":
            wrong = self._order.free(action[0].address, stream.handle)
        else:
            self._order.submit(stream.handle)
        if wrong is not None:
            self.violations.append(f"V11: {wrong}")
        self._note(f"submit {kind} in {stream.handle}")
        super()._submit(stream, kind, action)

    def _submit_work(self, stream: Stream, kind: Kind, work: Work, engine: Any) -> None:
        self._check_order(stream, work)
        self._note(f"submit {kind} in {stream.handle}")
        self._duration_key = stream.handle
        super()._submit_work(stream, kind, work, engine)
        entries = sum(command.kind not in _WITHOUT_ENTRY for command in stream.queue)
        if entries > MOST_ENTRIES:
            self.violations.append(
                f"V12: stream {stream.handle} was given {entries} operations: the caller would block"
            )

    def _submit_node(self, on: Stream, node: NodeWork, stream: Stream, branch: int) -> Command:
        """Submit a node of a graph. Each branch has its own pace; uses of memory count for the launch's stream."""
        if node.work is not None:
            self._check_order(on, node.work)
            self._duration_key = -branch or on.handle  # no handle is negative
        self._note(f"submit {node.kind} in {on.handle}, branch {branch}")
        return super()._submit_node(on, node, stream, branch)

    def _check_order(self, stream: Stream, work: Work) -> None:
        number = self._order.submit(stream.handle)
        for address in used_addresses(work):
            wrong = self._order.use(address, stream.handle, number)
            if wrong is not None:
                self.violations.append(f"V11: {wrong}")

    # Progress

    def _advance(self) -> None:
        if self._call_error is None and not self._machine.is_settled:
            self._step_at(self.now_ns + self._choices.submission_delay_ns())

    def _step_at(self, when: int) -> None:
        if self._next_step is None or when < self._next_step:
            self._next_step = when
            self.clock.at(when - self._offset_ns, self, lambda: self._run_step(when))
            self._request_drains()

    def _run_step(self, when: int) -> None:
        """Let the machine proceed to the driver's time."""
        if self._next_step == when:
            self._next_step = None
        with self._lock:
            if self._call_error is not None:
                return
            step = self._step(self.now_ns)
            for command in step.starts:
                self._note(f"start {self._label(command)}")
                if command.seconds is None:
                    self._paused_kernels[command] = command.action.run(
                        self._device_of(command), self._bytes_at, self.now
                    )
                    self._after(0, lambda command=command: self._resume(command))  # type: ignore[misc]
            if step.next is not None:
                self._step_at(int(step.next))

    def _execute(self, command: Command) -> None:
        if not self._end(command):
            super()._execute(command)

    def _complete(self, command: Command) -> None:
        self._note(f"reach {command.kind} in {command.stream.handle}")
        super()._complete(command)

    def _resume(self, command: Command) -> None:
        """Continue a host implementation that runs in parts, until its next pause."""
        with self._lock:
            if self._call_error is not None:
                return
            try:
                pause = next(self._paused_kernels[command], None)
            except IllegalAddressError as error:
                self._fail(700, self._device_of(command), f"illegal address in a {command.kind}: {error}")
                return
            except HostKernelError as error:
                self._fail(719, self._device_of(command), str(error), error.__cause__)
                return
            except Exception as error:  # noqa: BLE001 - as `_execute`
                self._fail(719, self._device_of(command), f"a {command.kind} raised {error!r}", error)
                return
            if pause is not None:
                self._after(max(1, round(pause * 1e9)), lambda: self._resume(command))
                return
            upset = self.upsets.due("slow")
            if upset is not None:
                self._after(round(upset.seconds * 1e9), lambda: self._finish(command))
                return
            self._finish(command)

    def _finish(self, command: Command) -> None:
        """End a command whose host implementation ran in parts."""
        with self._lock:
            if self._call_error is not None:
                return
            del self._paused_kernels[command]
            if not self._end(command):
                self._machine.finish(command, self.now_ns)
                self._advance()

    def _end(self, command: Command) -> bool:
        """Note the end of an engine's command. True if an upset makes it a fault."""
        self._note(f"end {self._label(command)}")
        upset = self.upsets.due("fault")
        if upset is not None:
            self._fail(upset.code, self._device_of(command), f"a {command.kind} faulted")
        return upset is not None

    def _device_of(self, command: Command) -> int:
        assert command.engine is not None
        return command.engine.device

    def _label(self, command: Command) -> str:
        return f"{command.kind} in {command.stream.handle}"

    def _call_host_function(self, function: Callable[[], object]) -> None:
        self._callback_thread = threading.get_ident()
        try:
            function()
        finally:
            self._callback_thread = 0

    # Notification

    def open_port(self, wake: Callable[[], None]) -> Port:
        """Return a port for one event loop. If that is a simulated loop, the driver uses its clock from now on."""
        self._check_open()
        self.follow_running_clock()
        port = SimulatedPort(self, wake)
        self._ports.append(port)
        return port

    def forget_port(self, port: SimulatedPort) -> None:
        """Remove a port that was closed."""
        if port in self._ports:
            self._ports.remove(port)

    def notifier(self, device: int, port: Port) -> SimulatedNotifier:
        self._enter_device(device)
        own = _own_port(port)
        return SimulatedNotifier(
            functools.partial(self._notify_after, self._machine.side_stream(device, PRIORITIES[1]), own)
        )

    def _notify_after(self, side: Stream, port: SimulatedPort, event: int, tag: int) -> None:
        """`Notifier.ring`."""
        self._begin("ring")
        with self._lock:
            self._machine.wait(side, self._machine.event(event))
            self._submit(side, "call", lambda: self._notify(port, tag))

    def _notify(self, port: SimulatedPort, tag: int) -> None:
        """The host function of a notifier."""
        times = 1
        delay = self._choices.notification_delay_ns()
        if self.upsets.due("lose") is not None:
            self._note("lose a notification")
            return
        late = self.upsets.due("delay")
        if late is not None:
            delay += round(late.seconds * 1e9)
        if self.upsets.due("repeat") is not None:
            times = 2
        for _ in range(times):
            self._after(delay, lambda: self._put(port, tag))

    def _put(self, port: SimulatedPort, tag: int) -> None:
        self._note("notify")
        self._call_host_function(lambda: port.put(tag))

    # Offloaded work and waiting

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work`` later, then put ``tag`` into the port. Without a simulated loop it runs on a thread."""
        self._check_open()
        own = _own_port(port)
        self.follow_running_clock()
        if self.attached:
            self._after(self._choices.job_ns(), lambda: self._run_job(work, own, tag))
        else:
            self._workers.submit(lambda: self._run_on_thread(work), own, tag)

    def worker_threads(self, threads: int, name: str, step: Callable[[], bool], port: Port, tag: int) -> _WorkerThreads:
        """Return threads on virtual time. Without a simulated loop they are those of `offload`."""
        self._check_open()
        return _WorkerThreads(self, step, _own_port(port), tag)

    def call_steps(self, step: Callable[[], bool]) -> None:
        """Call a function of worker threads until it returns False, each time after a while."""
        self.follow_running_clock()
        if not self.attached:
            self._workers.call_until_false(step)
            return

        def run() -> None:
            self._note("job")
            if step():
                self._after(self._choices.job_ns(), run)

        self._after(self._choices.job_ns(), run)

    def notify_later(self, port: SimulatedPort, tag: int) -> None:
        """Put a tag of worker threads into a port, a moment later."""
        if self.attached:
            self._after(self._choices.call_ns(), lambda: self._put(port, tag))
        else:
            port.put(tag)

    def _run_job(self, work: Callable[[], object], port: SimulatedPort, tag: int) -> None:
        self._note("job")
        job = self._job = _Job(lambda: self._after(self._choices.call_ns(), lambda: self._put(port, tag)))
        try:
            work()
        finally:
            self._job = None
            job.part_done()

    def _run_on_thread(self, work: Callable[[], object]) -> None:
        _served.run(self, work)

    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        """In a job, return and end the wait later. On a worker thread, wait. Elsewhere, advance the clock."""
        with self._lock:
            busy = [] if self._call_error is not None else [stream for stream in streams if not stream.is_idle]
            if not busy:
                then()
                return
            job = self._job
            wait = _StreamWait(len(busy), then, job, self._waits)
            for stream in busy:
                self._submit(stream, "call", wait.stream_done)
        if job is not None:
            return
        if _served.driver is self:
            wait.ended.wait()
            return
        while not wait.ended.is_set():
            if not self.run_next():
                raise RuntimeError("this call would block forever: the clock has no more entries")

    def _on_fault(self) -> None:
        if self._latch.fault is not None:
            self._note(f"fault {self._latch.fault.code}")
        for wait in list(self._waits):
            wait.end()

    def _thread_count(self) -> int:
        return self._workers.alive

    def _end_threads(self) -> None:
        self._workers.close()
        self._on_fault()


def _own_port(port: Port) -> SimulatedPort:
    """Return the port, or raise if it is not a port of a simulated driver."""
    if not isinstance(port, SimulatedPort):
        raise InvalidTypeError(f"{port!r} is no port of this driver; take one from its open_port()")
    return port


def _method_name() -> str:
    """Return the name of the public method that called `SimulatedDriver._enter`."""
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("_") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name
