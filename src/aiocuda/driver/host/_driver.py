"""`HostDriver`: the methods of `aiocuda.driver.software`, executed by threads.

Progress
    The thread that changes the machine also lets it proceed, under the lock: a caller that enqueues, or a runner at
    the end of its command. It carries out commands that take no time. It passes commands that take time to idle
    runners, except one, which the runner executes itself: a chain of kernels in one stream runs on one thread without
    a hand-over. A runner without a command sleeps.

Time
    A transfer sleeps for its modelled time and then moves its bytes. Moving takes a tenth to a third of the modelled
    time in addition, so a measurement of one transfer and of many transfers finds the same bandwidth.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from .. import _port as ports
from .._workers import NativeWorkers, Workers
from ..protocol import Port
from ..software import Model, Recorded
from ..software._model import BANDWIDTH, LATENCY, MEMORY, PRIORITIES
from ..software._work import Work
from ..software.rules import Command, Kind, Stream
from ._runner import Runner

__all__ = ["HostDriver", "HostNotifier"]

_LAUNCH_FAILED = 719


class HostNotifier:
    """A side stream whose host function puts a tag into a port. `aiocuda.driver.protocol.Notifier`."""

    __slots__ = ("_call_after", "_port")

    def __init__(self, call_after: Callable[[int, Callable[[], object]], None], port: ports.Port) -> None:
        self._call_after = call_after  # calls a function on the side stream when an event's last record is done
        self._port = port

    def ring(self, event: int, tag: int) -> None:
        """Put ``tag`` into the port when ``event``'s last record is done; immediately if it is done already."""
        self._call_after(event, functools.partial(self._port.put, tag))


class HostDriver(Recorded):
    """A driver without a GPU: a state machine applies CUDA's ordering rules, and threads execute the work.

    Transfers take the time that ``latency`` and ``bandwidth`` give. They sleep during it, so that copies and kernels
    overlap even on two cores. Kernels run as their host implementations. No method waits for the device, except those
    that may block. Threads start when there is work for them; they end with `close`, or when the driver is collected.

    A command that accesses memory which is not allocated latches a `DeviceFault`, and so does a host implementation
    that raises. Unlike on a GPU, a new driver can be opened immediately.

    Parameters
    ----------
    devices
        The number of devices, 1 to 64.
    memory
        Bytes of each device. Default 4 GiB; the host allocates pages when they are first used.
    bandwidth
        Bytes per second of each copy engine; a device has one for each direction. Default 2 GB/s.
    latency
        Seconds before the first byte of a transfer. Default 10 µs.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        A value is out of range, or not a number.
    """

    name = "host"

    #: False: the runners need the GIL. An await of an empty kernel takes 190 µs with polling, 120 µs with notifiers.
    polls_freely: Final = False

    #: Return a monotonic time in seconds. This is the clock's own function, because every enqueue calls it.
    now = staticmethod(time.monotonic)

    def __init__(
        self, devices: int = 1, memory: int = MEMORY, bandwidth: float = BANDWIDTH, latency: float = LATENCY
    ) -> None:
        super().__init__(Model(devices, memory, bandwidth, latency))
        self._runners: list[Runner] = []
        self._idle: list[Runner] = []  # last in, first out: the caches of the newest one are warm
        self._host_functions: deque[Callable[[], object]] = deque()  # reached by a stream, not called yet
        self._calling = threading.Lock()  # held by the thread that calls them
        self._synchronizing: set[threading.Event] = set()
        self._workers = Workers()
        # Not at exit: the process must be able to drain then, and daemon threads end by themselves.
        weakref.finalize(self, _end_runners, os.getpid(), self._runners).atexit = False

    def __repr__(self) -> str:
        return f"HostDriver({', '.join(f'{name}={value:g}' for name, value in self.describe().items())})"

    # Notification

    def open_port(self, wake: Callable[[], None]) -> Port:
        self._check_open()
        return ports.open_port(wake)

    def offload(self, work: Callable[[], object], port: Port, tag: int) -> None:
        """Run ``work`` on a worker thread, then put ``tag`` into the port. A fault does not prevent it."""
        self._check_open()
        self._workers.submit(work, ports.native_port(port), tag)

    def worker_threads(self, threads: int, name: str, step: Callable[[], bool], port: Port, tag: int) -> NativeWorkers:
        """Return new daemon threads. A fault does not end them."""
        self._check_open()
        return NativeWorkers(threads, name, step, port, tag)

    def notifier(self, device: int, port: Port) -> HostNotifier:
        """Return a new notifier. Its side stream is not counted in `statistics`."""
        self._enter_device(device)
        with self._lock:
            native = ports.native_port(port)
            side = self._machine.side_stream(device, PRIORITIES[1])
            return HostNotifier(functools.partial(self._call_after, side), native)

    def _call_after(self, side: Stream, event: int, function: Callable[[], object]) -> None:
        """Call a function on a side stream when an event's last record is done."""
        self._enter()
        with self._lock:
            self._machine.wait(side, self._machine.event(event))
            self._submit(side, "call", function)
        self._call_host_functions()

    # Progress

    def _duration(self, kind: Kind, work: Work) -> None:
        """None: the runner ends the command."""

    def _call_host_function(self, function: Callable[[], object]) -> None:
        self._host_functions.append(function)  # called later, without the lock

    def _advance(self) -> None:
        if self._call_error is None and not self._machine.is_settled:
            for command in self._step(time.monotonic()).starts:
                self._assign(command)

    def _assign(self, command: Command) -> None:
        """Pass a command to an idle or a new runner."""
        if self._idle:
            runner = self._idle.pop()
        else:
            try:
                runner = Runner(f"aiocuda-host-{len(self._runners)}")
            except (RuntimeError, MemoryError) as error:
                # No thread: latch a fault, or the command would never complete.
                self._fail(_LAUNCH_FAILED, command.stream.device, f"no thread for a {command.kind}: {error}", error)
                return
            self._runners.append(runner)
        runner.assign(self._run, command)

    def _run(self, runner: Runner, command: Command) -> Command | None:
        """On a runner: execute a command, end it, and return the runner's next command."""
        try:
            return self._run_command(runner, command)
        except Exception as error:  # noqa: BLE001 - such as a MemoryError: the command would never complete
            with self._lock:
                self._fail(_LAUNCH_FAILED, command.stream.device, f"a {command.kind} ended by {error!r}", error)
            return None

    def _run_command(self, runner: Runner, command: Command) -> Command | None:
        work: Work = command.action
        due = command.started + work.seconds
        if work.is_transfer:
            runner.sleep_until(due)
        if self._call_error is None:
            self._execute(command)
        if not work.is_transfer and self._call_error is None:
            runner.sleep_until(due)
        return self._end(runner, command)

    def _end(self, runner: Runner, command: Command) -> Command | None:
        next_command: Command | None = None
        with self._lock:
            if self._call_error is None:
                self._machine.finish(command, time.monotonic())
                starts = self._step(time.monotonic()).starts
                if starts:
                    # Keep a kernel, which runs immediately. A transfer sleeps first, so its runner may wake up late.
                    index = next((i for i, c in enumerate(starts) if c.kind == "kernel"), 0)
                    next_command = starts.pop(index)
                    for other in starts:
                        self._assign(other)
            if next_command is None:
                self._idle.append(runner)
        self._call_host_functions()
        return next_command

    def _call_host_functions(self) -> None:
        """Call the host functions that streams have reached, in order. The caller does not hold the lock."""
        while self._host_functions and self._calling.acquire(blocking=False):
            try:
                while self._host_functions:
                    self._host_functions.popleft()()
            finally:
                self._calling.release()  # then test again: another thread may have appended one and failed to acquire

    # Waiting, and the end

    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        """Wait on a `threading.Event` for each stream. Only called on worker threads."""
        reached: list[threading.Event] = []
        with self._lock:
            for stream in streams:
                if not stream.is_idle:
                    event = threading.Event()
                    reached.append(event)
                    self._synchronizing.add(event)
                    self._submit(stream, "call", event.set)
        self._call_host_functions()
        for event in reached:
            if self._call_error is None:
                event.wait()
            self._synchronizing.discard(event)
        then()

    def _on_fault(self) -> None:
        for event in list(self._synchronizing):
            event.set()

    def _thread_count(self) -> int:
        return self._workers.alive + sum(runner.is_alive for runner in list(self._runners))

    def _end_threads(self) -> None:
        self._workers.close()
        self._on_fault()
        for runner in list(self._runners):
            runner.dismiss()


def _end_runners(pid: int, runners: list[Runner]) -> None:
    if os.getpid() == pid:  # a forked child has none of the threads
        for runner in list(runners):
            runner.dismiss()
