"""What the verbs share: the machine, the memory, the latch, and why a verb is refused."""

from __future__ import annotations

import abc
import functools
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._types import ProcessLocal
from ...errors import (
    AiocudaError,
    ClosedError,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
)
from ._model import Model
from ._replay import Replay
from ._work import Function, TwinError, Work
from .rules import (
    Chooser,
    Command,
    DeviceMemory,
    Engine,
    HostPages,
    IllegalAddressError,
    Kind,
    Latch,
    Machine,
    Step,
    Stream,
)

__all__ = ["Core"]

_ILLEGAL_ADDRESS = 700
_LAUNCH_FAILED = 719

_drivers: weakref.WeakSet[Core] = weakref.WeakSet()


class Core(ProcessLocal, abc.ABC):
    """State of one driver without a GPU.

    Parameters
    ----------
    model
        Devices, memory, bandwidth and latency.
    choose
        Decides what CUDA's rules leave open; None takes the first.
    """

    #: How it is called, in `Devices.name` and in errors.
    name: str

    #: Milliseconds per unit of the machine's time.
    _ms_per_tick = 1e3

    def __init__(self, model: Model, choose: Chooser | None = None) -> None:
        self.model = model
        # Around the machine and the memory; never held while something runs or waits. Reentrant: the collector may run
        # in a verb, and there the finaliser of an `Event` that has outlived its device destroys its event.
        self._lock = threading.RLock()
        self._machine = Machine(model.devices, model.compute_slots, choose)
        self._memory = DeviceMemory(model.devices, model.memory)
        self._pages = HostPages()
        self.registry: dict[Any, Any] = {}
        self._functions: dict[int, Function] = {}
        self._imported: Counter[int] = Counter()  # how often a stream was imported, under its own name
        self._function_handles = itertools.count(1)
        self._graphs: dict[int, Replay] = {}
        self._graph_handles = itertools.count(1)
        self._latch = Latch()
        self._refusal: AiocudaError | None = None  # why no verb works any more: closed, forked, faulted
        self._farewell: AiocudaError | None = None  # why not even giving back works: closed, forked
        self._calls = 0  # `+= 1` without a lock: CPython switches threads at calls and jumps, and there is none in it
        _watch_forks()
        _drivers.add(self)

    # What a driver adds

    @abc.abstractmethod
    def _advance(self) -> None:
        """Something has changed: go on as far as it goes. The lock is held."""

    @abc.abstractmethod
    def _seconds(self, kind: Kind, work: Work) -> float | None:
        """How long an engine needs; None if it will be told when it is over."""

    @abc.abstractmethod
    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        """Wait for all that these streams have accepted so far, or for a fault, or for the end; then call that."""

    @abc.abstractmethod
    def _threads(self) -> int:
        """How many threads of ours are alive."""

    @abc.abstractmethod
    def _reached(self, function: Callable[[], object]) -> None:
        """A stream has reached a host function. The lock is held."""

    @abc.abstractmethod
    def _faulted(self) -> None:
        """A fault has been latched: nothing completes from here on. The lock is held."""

    @abc.abstractmethod
    def _dismiss(self) -> None:
        """The driver has been closed: end the threads."""

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
            self._refusal = self._farewell = ClosedError(f"the {self.name} driver has been closed; open a new one")
        self._dismiss()

    # Submission and progress

    def _submit(self, stream: Stream, kind: Kind, action: object) -> None:
        """Enqueue a command that takes no time. The lock is held."""
        self._machine.submit(stream, kind, action)
        self._advance()

    def _submit_work(self, stream: Stream, kind: Kind, work: Work, engine: Engine) -> None:
        """Enqueue a command that an engine carries out. The lock is held."""
        self._machine.submit(stream, kind, work, engine, self._seconds(kind, work))
        self._advance()

    def _step(self, now: float) -> Step:
        """Let the machine go on, and carry out what takes no time. The lock is held."""
        step = self._machine.step(now)
        for command in step.ends:
            if command.engine is None:
                self._carry_out(command)
            else:
                self._perform(command)
            if self._latch.fault is not None:
                return Step([], [], None)
        return step

    def _carry_out(self, command: Command) -> None:
        """Do a command that takes no time. The lock is held."""
        action = command.action
        command.action = None
        if command.kind == "call":
            self._reached(action)
        elif command.kind == "allocate":
            self._memory.map(action)
        else:
            try:
                self._memory.unmap(*action)
            except IllegalAddressError as error:
                self._fail(_ILLEGAL_ADDRESS, command.stream.device, str(error))

    def _perform(self, command: Command) -> None:
        """Do what an engine does for a command; what goes wrong is latched. The lock is not held."""
        work: Work = command.action
        engine = command.engine
        assert engine is not None  # else it would take no time
        device = engine.device
        try:
            work.perform(device, self._look)
        except IllegalAddressError as error:
            with self._lock:
                self._fail(_ILLEGAL_ADDRESS, device, f"illegal address in a {command.kind}: {error}")
        except TwinError as error:
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001 - latched; a host implementation's is a `TwinError` by now
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, f"a {command.kind} raised {error!r}", error)

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

    def _fail(self, code: int, device: int, reason: str, cause: BaseException | None = None) -> DeviceFault:
        """Latch a fault: from here on nothing completes. The lock is held."""
        fault = self._latch.set(code, device, reason, cause)
        if self._farewell is None:
            self._refusal = fault
        self._faulted()
        return fault


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_refuse_in_child)


def _refuse_in_child() -> None:
    """What it stands for stayed with the parent, and a lock that a thread held is held for good: refuse before it."""
    for driver in _drivers:
        driver._refusal = driver._farewell = ForkedProcessError(
            f"the {driver.name} driver was opened before fork(), and is the parent's; open a new one in this process"
        )
