"""What the verbs of the host driver share: the machine, the lock around it, and who moves it.

Who moves the machine
    Whoever changes it, under the lock: a caller that enqueues, or a runner whose command has ended. Commands without
    time are carried out then and there. Commands with time go to an idle runner, and one of them stays with the
    runner that made it possible: a chain of kernels in one stream runs on one thread, with no hand-over. A thread
    that has nothing to do is not woken.

Time
    A transfer sleeps for what the model says, then moves its bytes, which comes on top: a tenth to a third of the
    stated time. Whoever measures one transfer and whoever measures many therefore find the same bandwidth.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...errors import (
    AiocudaError,
    ClosedError,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
)
from ..machine import (
    Command,
    DeviceMemory,
    Engine,
    HostPages,
    IllegalAddressError,
    Kind,
    Latch,
    Machine,
    Stream,
)
from ..workers import Workers
from .model import HostModel
from .runner import Runner
from .work import Function, TwinError, Work

__all__ = ["Core"]

_ILLEGAL_ADDRESS = 700
_LAUNCH_FAILED = 719

_drivers: weakref.WeakSet[Core] = weakref.WeakSet()


class Core:
    """State of one host driver.

    Parameters
    ----------
    model
        Devices, memory, bandwidth and latency.
    """

    def __init__(self, model: HostModel) -> None:
        self.model = model
        self._lock = threading.Lock()  # around the machine and the memory; never held while something runs or waits
        self._machine = Machine(model.devices, model.compute_slots)
        self._memory = DeviceMemory(model.devices, model.memory)
        self._pages = HostPages()
        self._functions: dict[int, Function] = {}
        self._function_handles = itertools.count(1)
        self._latch = Latch()
        self._refusal: AiocudaError | None = None  # why no verb works any more: closed, forked, faulted
        self._farewell: AiocudaError | None = None  # why not even giving back works: closed, forked
        self._calls = 0  # `+= 1` without a lock: CPython switches threads at calls and jumps, and there is none in it
        self._streams_created = 0
        self._runners: list[Runner] = []
        self._idle: list[Runner] = []  # last in, first out: the one that ran last is warm
        self._due: deque[Callable[[], object]] = deque()  # host functions that have been reached
        self._calling = threading.Lock()
        self._synchronizing: set[threading.Event] = set()
        self._workers = Workers()
        # Not at exit: the process must be able to drain then, and daemon threads end by themselves.
        weakref.finalize(self, _abandon, os.getpid(), self._runners).atexit = False
        _watch_forks()
        _drivers.add(self)

    # Refusals

    def _enter(self) -> None:
        """Begin a verb: refuse it, or count it."""
        if self._refusal is not None:
            raise self._refusal.again()
        self._calls += 1

    def _enter_release(self) -> None:
        """Begin a verb that gives something back, which a fault does not stop."""
        if self._farewell is not None:
            raise self._farewell.again()
        self._calls += 1

    def _device(self, device: int) -> int:
        if not isinstance(device, int) or isinstance(device, bool):
            raise InvalidTypeError(f"device {device!r} must be an int", device=device)
        if not 0 <= device < self.model.devices:
            raise InvalidArgumentError(
                f"there is no device {device}: this driver has {self.model.devices}, counted from 0", device=device
            )
        return device

    def _same_device(self, stream: Stream, device: int) -> None:
        if stream.device != device:
            raise WrongDeviceError(
                f"stream {stream.handle} belongs to device {stream.device}, not to device {device}",
                device=stream.device,
                expected=device,
            )

    @property
    def fault(self) -> DeviceFault | None:
        """The latch: the first fault of any device of this driver, for good."""
        return self._latch.fault

    def blame(self, operation: str) -> None:
        """Name the operation that saw the fault first. Later names are ignored."""
        if self._farewell is None and self._latch.fault is not None:
            with self._lock:
                self._latch.blame(operation)
                if self._farewell is None:
                    self._refusal = self._latch.fault

    def close(self) -> None:
        """End the threads; every verb then raises `ClosedError`. Idempotent, and does not wait.

        What has not completed never will. A twin that runs is not interrupted; its thread ends behind it.
        """
        if self._farewell is not None:  # also in a forked child, where the lock may be held for good
            return
        with self._lock:
            if self._farewell is not None:
                return
            self._refusal = self._farewell = ClosedError("the host driver has been closed; open a new one")
        self._workers.close()
        self._abandon_synchronizing()
        for runner in list(self._runners):
            runner.dismiss()

    # Submission and progress

    def _submit(self, stream: Stream, kind: Kind, action: object, engine: Engine | None = None) -> None:
        """Enqueue one command. The lock is held."""
        self._machine.submit(stream, kind, action, engine)
        self._advance()

    def _advance(self) -> None:
        """Go on as far as it goes, and hand what starts to runners. The lock is held."""
        if self._refusal is None and not self._machine.is_settled:
            for command in self._step():
                self._hand_over(command)

    def _step(self) -> list[Command]:
        """Carry out what takes no time; what takes some is returned."""
        starts, ends, _ = self._machine.step(time.monotonic())
        for command in ends:
            action = command.action
            command.action = None
            if command.kind == "call":
                self._due.append(action)
            elif command.kind == "allocate":
                self._memory.map(action)
            else:
                try:
                    self._memory.unmap(*action)
                except IllegalAddressError as error:
                    self._fail(_ILLEGAL_ADDRESS, command.stream.device, str(error))
                    return []
        return starts

    def _hand_over(self, command: Command) -> None:
        if self._idle:
            runner = self._idle.pop()
        else:
            try:
                runner = Runner(f"aiocuda-host-{len(self._runners)}")
            except RuntimeError as error:  # the process can have no more threads: say so, instead of never completing
                self._fail(_LAUNCH_FAILED, command.stream.device, f"no thread for a {command.kind}: {error}", error)
                return
            self._runners.append(runner)
        runner.assign(self._carry_out, command)

    def _carry_out(self, runner: Runner, command: Command) -> Command | None:
        """On a runner: do a command, end it, and return what to go on with."""
        work: Work = command.action
        engine = command.engine
        assert engine is not None  # else it would take no time
        device = engine.device
        try:
            due = command.started + work.seconds
            if work.is_transfer:
                runner.sleep_until(due)
            if self._refusal is None:
                work.perform(device, self._look)
            if not work.is_transfer:
                runner.sleep_until(due)
        except IllegalAddressError as error:
            with self._lock:
                self._fail(_ILLEGAL_ADDRESS, device, f"illegal address in a {command.kind}: {error}")
        except TwinError as error:
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001 - latched, as any other failure of a command
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, f"a {command.kind} raised {error!r}", error)
        return self._end(runner, command)

    def _end(self, runner: Runner, command: Command) -> Command | None:
        mine: Command | None = None
        with self._lock:
            if self._refusal is None:
                command.action = None
                self._machine.finish(command, time.monotonic())
                starts = self._step()
                if starts:
                    # A kernel runs at once, and a transfer sleeps first: whoever takes that may wake up late.
                    index = next((i for i, c in enumerate(starts) if c.kind == "kernel"), 0)
                    mine = starts.pop(index)
                    for other in starts:
                        self._hand_over(other)
            if mine is None:
                self._idle.append(runner)
        self._call()
        return mine

    def _call(self) -> None:
        """Call the host functions that have been reached, one after the other. The lock is not held."""
        while self._due and self._calling.acquire(blocking=False):
            try:
                while self._due:
                    self._due.popleft()()
            finally:
                self._calling.release()  # then look again: somebody may have come who could not acquire it

    def _look(self, device: int, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a range as a command on a device sees them."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self._lock:
            if self._memory.device_of(address) is not None:
                return self._memory.view(device, address, nbytes)
            found = self._pages.find(address, nbytes)
        if found is None:
            raise IllegalAddressError(f"{nbytes} bytes at {address:#x} are not memory that a device can reach")
        return found[1]

    def _fail(self, code: int, device: int, reason: str, cause: BaseException | None = None) -> None:
        """Latch a fault: from here on nothing completes. The lock is held."""
        fault = self._latch.set(code, device, reason, cause)
        if self._farewell is None:
            self._refusal = fault
        self._abandon_synchronizing()

    # Waiting, on worker threads only

    def _synchronize(self, streams: list[Stream]) -> None:
        """Wait for all that these streams have accepted so far, or for a fault, or for the end."""
        reached: list[threading.Event] = []
        with self._lock:
            for stream in streams:
                if not stream.is_idle:
                    event = threading.Event()
                    reached.append(event)
                    self._synchronizing.add(event)
                    self._submit(stream, "call", event.set)
        self._call()
        for event in reached:
            if self._refusal is None:
                event.wait()
            self._synchronizing.discard(event)

    def _abandon_synchronizing(self) -> None:
        for event in list(self._synchronizing):
            event.set()


def _abandon(pid: int, runners: list[Runner]) -> None:
    if os.getpid() == pid:  # a forked child has none of the threads
        for runner in list(runners):
            runner.dismiss()


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_refuse_in_child)


def _refuse_in_child() -> None:
    """The threads stayed with the parent, and a lock that one of them held is held for good: refuse before any lock."""
    for driver in _drivers:
        driver._refusal = driver._farewell = ForkedProcessError(
            "the host driver was opened before fork(), and its threads are the parent's; open a new one in this process"
        )
