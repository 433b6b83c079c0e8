"""`Core`: the state that all methods of a driver without a GPU share, and its methods about devices."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import os
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._base._faults import FAULTS
from ..._base._types import DeviceProperties, ProcessLocal
from ...errors import (
    AiocudaError,
    ClosedError,
    DeviceFault,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    WrongDeviceError,
)
from ._model import NOTIFIERS, Model
from ._replay import Replay
from ._work import Function, HostKernelError, Work
from .rules import Chooser, Command, DeviceMemory, Engine, HostPages, IllegalAddressError, Kind, Machine, Step, Stream

__all__ = ["Core", "FaultLatch"]

_ILLEGAL_ADDRESS = 700
_LAUNCH_FAILED = 719

_drivers: weakref.WeakSet[Core] = weakref.WeakSet()


class FaultLatch:
    """The first fault of any device of one driver. Once set, it stays.

    A CUDA fault makes the whole process unable to use CUDA (measured on two devices), so a driver has one latch.
    """

    __slots__ = ("fault",)

    def __init__(self) -> None:
        self.fault: DeviceFault | None = None

    def set(self, code: int, device: int, reason: str, cause: BaseException | None = None) -> DeviceFault:
        """Latch a fault, unless there is one already. Return the latched fault."""
        if self.fault is None:
            self.fault = DeviceFault(
                f"device {device} has faulted: {reason} (CUDA error {code}). Its driver can do nothing more; open a "
                "new one",
                code=code,
                device=device,
                operation=None,
            )
            self.fault.__cause__ = cause
            FAULTS.report(self.fault, ends_process=False)
        return self.fault

    def blame(self, operation: str) -> None:
        """Add the name of the operation that detected the fault. Only the first call has an effect."""
        fault = self.fault
        if fault is not None and fault.operation is None:
            named = DeviceFault(
                f"{fault} (first seen by {operation})", code=fault.code, device=fault.device, operation=operation,
                was_raised=fault.was_raised,
            )  # fmt: skip
            named.__cause__ = fault.__cause__
            self.fault = named


class Core(ProcessLocal, abc.ABC):
    """State and device methods of a driver without a GPU. `aiocuda.driver.protocol.Devices`.

    Every method begins with `_enter`, or with `_enter_release` if it releases something. These raise the error that
    ends the use of the driver, if there is one. Then the method takes `_lock` and submits commands to `_machine`.

    Parameters
    ----------
    model
        Devices, memory, bandwidth and latency.
    choose
        Chooses between commands that CUDA's rules leave unordered. None chooses the first.
    """

    #: The driver's name, in `Devices.name` and in errors.
    name: str

    #: Milliseconds per unit of the machine's time.
    _ms_per_tick = 1e3

    def __init__(self, model: Model, choose: Chooser | None = None) -> None:
        self.model = model
        # Protects the machine and the memory. It is never held while work runs or waits. Reentrant: the garbage
        # collector may run inside a method, and the finalizer of an `Event` then destroys its event here.
        self._lock = threading.RLock()
        self._machine = Machine(model.devices, model.compute_slots, choose)
        self._memory = DeviceMemory(model.devices, model.memory)
        self._pages = HostPages()
        self.registry: dict[Any, Any] = {}
        self._functions: dict[int, Function] = {}
        self._imported: Counter[int] = Counter()  # imports of each stream, by its first handle
        self._function_handles = itertools.count(1)
        self._graphs: dict[int, Replay] = {}
        self._graph_handles = itertools.count(1)
        self._latch = FaultLatch()
        self._call_error: AiocudaError | None = None  # raised by every method: closed, forked or faulted
        self._release_error: AiocudaError | None = None  # raised also by methods that release: closed or forked
        self._calls = 0  # `+= 1` needs no lock: CPython switches threads at calls and jumps, and it contains none
        _watch_forks()
        _drivers.add(self)

    # To be implemented by a driver

    @abc.abstractmethod
    def _advance(self) -> None:
        """Let the machine proceed after a change. The caller holds the lock."""

    @abc.abstractmethod
    def _duration(self, kind: Kind, work: Work) -> float | None:
        """Return the time that an engine needs; None if the driver will call `Machine.finish`."""

    @abc.abstractmethod
    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        """Wait for the work that the streams have accepted, for a fault, or for `close`; then call ``then``."""

    @abc.abstractmethod
    def _thread_count(self) -> int:
        """Return the number of this driver's running threads."""

    @abc.abstractmethod
    def _call_host_function(self, function: Callable[[], object]) -> None:
        """Call a host function that a stream has reached, now or soon. The caller holds the lock."""

    @abc.abstractmethod
    def _on_fault(self) -> None:
        """Wake the waiting threads: after a fault no command completes. The caller holds the lock."""

    @abc.abstractmethod
    def _end_threads(self) -> None:
        """End the threads of a closed driver."""

    # Devices

    def describe(self) -> dict[str, float]:
        """Return the model's figures by name: bytes, seconds, bytes per second."""
        return dataclasses.asdict(self.model)

    def device_count(self) -> int:
        self._enter()
        return self.model.devices

    def device_open(self, device: int) -> DeviceProperties:
        self._enter()
        return self.model.properties(self.name, self._check_device(device))

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__, "python": platform.python_version()}

    def statistics(self) -> dict[str, int]:
        """Return counts by name. Default streams, and side streams of notifiers and graphs, are not included."""
        return {
            "streams": sum(stream.name == name for name, stream in list(self._machine.streams.items())),
            "events": len(self._machine.events),
            "graphs": len(self._graphs),
            "streams_created": self._machine.streams_created,
            "streams_kept": len(self._machine.kept),
            "threads": self._thread_count(),
            "calls": self._calls,
        }

    @property
    def fault(self) -> DeviceFault | None:
        return self._latch.fault

    def blame(self, operation: str) -> None:
        if self._release_error is None and self._latch.fault is not None:
            with self._lock:
                self._latch.blame(operation)
                if self._release_error is None:
                    self._call_error = self._latch.fault

    def close(self) -> None:
        """End the threads; every method then raises `ClosedError`. Idempotent. Does not wait.

        Unfinished commands never complete. A running host implementation is not interrupted; its thread ends when it
        returns.
        """
        if self._release_error is not None:  # also in a forked child, where the lock may be held forever
            return
        with self._lock:
            if self._release_error is not None:
                return
            self._call_error = self._release_error = ClosedError(
                f"the {self.name} driver has been closed; open a new one"
            )
        self._end_threads()

    def notifier_limit(self, device: int) -> int:
        """Return 24, as on a GPU with 32 hardware queues."""
        self._check_device(device)
        return NOTIFIERS

    # The beginning of every method

    def _enter(self) -> None:
        """Begin a method: raise if the driver cannot be used any more, else count the call."""
        if self._call_error is not None:
            raise AiocudaError.again(self._call_error)
        self._calls += 1

    def _enter_release(self) -> None:
        """Begin a method that releases something. A fault does not prevent it."""
        self._check_open()
        self._calls += 1

    def _enter_device(self, device: int) -> None:
        """Begin a method about a device."""
        self._enter()
        self._check_device(device)

    def _check_open(self) -> None:
        """Raise after `close`, and in a forked child. A fault does not matter."""
        if self._release_error is not None:
            raise AiocudaError.again(self._release_error)

    def _check_device(self, device: int) -> int:
        if not isinstance(device, int) or isinstance(device, bool):
            raise InvalidTypeError(f"device {device!r} must be an int", device=device)
        if not 0 <= device < self.model.devices:
            raise InvalidArgumentError(
                f"there is no device {device}: this driver has {self.model.devices}, counted from 0", device=device
            )
        return device

    def _check_same_device(self, stream: Stream, device: int) -> None:
        if stream.device != device:
            raise WrongDeviceError(
                f"stream {stream.handle} belongs to device {stream.device}, not to device {device}",
                device=stream.device,
                expected=device,
            )

    # Submission and progress

    def _submit(self, stream: Stream, kind: Kind, action: object) -> None:
        """Enqueue a command that takes no time. The caller holds the lock."""
        self._machine.submit(stream, kind, action)
        self._advance()

    def _submit_work(self, stream: Stream, kind: Kind, work: Work, engine: Engine) -> None:
        """Enqueue a command that an engine executes. The caller holds the lock."""
        self._machine.submit(stream, kind, work, engine, self._duration(kind, work))
        self._advance()

    def _step(self, now: float) -> Step:
        """Let the machine proceed to ``now`` and complete the commands that end. The caller holds the lock."""
        step = self._machine.step(now)
        for command in step.ends:
            if command.engine is None:
                self._complete(command)
            else:
                self._execute(command)
            if self._latch.fault is not None:
                return Step([], [], None)
        return step

    def _complete(self, command: Command) -> None:
        """Carry out a command that takes no time. The caller holds the lock."""
        action = command.take_action()
        if command.kind == "call":
            self._call_host_function(action)
        elif command.kind == "allocate":
            self._memory.map(action)
        else:
            try:
                self._memory.unmap(*action)
            except IllegalAddressError as error:
                self._fail(_ILLEGAL_ADDRESS, command.stream.device, str(error))

    def _execute(self, command: Command) -> None:
        """Execute the work of an engine; latch a failure as a fault. The caller does not hold the lock."""
        work: Work = command.take_action()
        engine = command.engine
        assert engine is not None  # a command without an engine takes no time
        device = engine.device
        try:
            work.perform(device, self._bytes_at)
        except IllegalAddressError as error:
            with self._lock:
                self._fail(_ILLEGAL_ADDRESS, device, f"illegal address in a {command.kind}: {error}")
        except HostKernelError as error:
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001 - latched; a host implementation's error is a `HostKernelError` here
            with self._lock:
                self._fail(_LAUNCH_FAILED, device, f"a {command.kind} raised {error!r}", error)

    def _bytes_at(self, device: int, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a range, for a command that runs on a device."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self._lock:
            if self._memory.device_of(address) is not None:
                return self._memory.view(device, address, nbytes)
            found = self._pages.find(address, nbytes)
        if found is None:
            raise IllegalAddressError(f"{nbytes} bytes at {address:#x} are not memory that a device can access")
        return found[1]

    def _fail(self, code: int, device: int, reason: str, cause: BaseException | None = None) -> DeviceFault:
        """Latch a fault: from now on no command completes. The caller holds the lock."""
        fault = self._latch.set(code, device, reason, cause)
        if self._release_error is None:
            self._call_error = fault
        self._on_fault()
        return fault

    def _refuse_after_fork(self) -> None:
        """Refuse all methods in a forked child, before they take a lock that a thread of the parent may hold."""
        self._call_error = self._release_error = ForkedProcessError(
            f"the {self.name} driver was opened before fork(), and is the parent's; open a new one in this process"
        )


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_refuse_all)


def _refuse_all() -> None:
    for driver in _drivers:
        driver._refuse_after_fork()
