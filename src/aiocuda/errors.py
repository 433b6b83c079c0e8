"""What can go wrong, named by what the caller can do about it.

::

    AiocudaError
     ├── InvalidArgumentError (ValueError)      the value is wrong: change the call
     ├── InvalidTypeError (TypeError)           the type is wrong: change the call
     ├── DeviceOutOfMemory (MemoryError)        free something, or ask for less
     └── (RuntimeError)
          ├── DeviceFault                       the process has lost CUDA: start a new one
          ├── ClosedError                       the device, stream or pool has been closed
          ├── BusyError                         it is in use just now: wait, then try again
          ├── StaleHandleError                  freed, returned or destroyed: do not use it again
          ├── WrongDeviceError                  belongs to another device
          ├── WrongLoopError                    belongs to another event loop or thread
          ├── ForkedProcessError                opened before fork(): open again, or spawn
          ├── UnsupportedError                  this driver or this hardware cannot do it
          ├── CompileError                      the kernel's source does not compile
          ├── CompilerNotFoundError             NVRTC is missing: install aiocuda[nvrtc]
          ├── CycleError                        dependencies go round in a circle
          ├── DeadlockError                     a wait that nothing can satisfy
          ├── QueueFullError                    a ``nowait`` call found no place free
          ├── SkippedError                      something that it depended on failed
          ├── BrokenBarrierError                a party left, or the barrier was aborted
          ├── NoEventLoopError                  there is no running event loop
          ├── DriverNotAvailableError           no GPU, no driver or no package for it
          └── DriverError                       what the driver answered has no better name

    Warning
     ├── HostDriverWarning (RuntimeWarning)     no GPU was found: running on the host driver
     ├── DrainTimeoutWarning (RuntimeWarning)   the device did not finish within drain_timeout
     ├── CleanupWarning (RuntimeWarning)        something could not be given back
     └── UnorderedAccessWarning (RuntimeWarning)  the checker found accesses that nothing puts in order

Driver codes become one of these at the driver's edge and nowhere else. Every error carries its data as
attributes and survives pickling.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AiocudaError",
    "BrokenBarrierError",
    "BusyError",
    "CleanupWarning",
    "ClosedError",
    "CompileError",
    "CompilerNotFoundError",
    "CycleError",
    "DeadlockError",
    "DeviceFault",
    "DeviceOutOfMemory",
    "DrainTimeoutWarning",
    "DriverError",
    "DriverNotAvailableError",
    "ForkedProcessError",
    "HostDriverWarning",
    "InvalidArgumentError",
    "InvalidTypeError",
    "NoEventLoopError",
    "QueueFullError",
    "SkippedError",
    "StaleHandleError",
    "UnorderedAccessWarning",
    "UnsupportedError",
    "WrongDeviceError",
    "WrongLoopError",
]


class AiocudaError(Exception):
    """Base of every error that aiocuda raises on purpose.

    Parameters
    ----------
    message
        What happened, the value that caused it, and the cure.
    **data
        Facts for programs. Each becomes an attribute of the error.
    """

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)

    def again(self) -> AiocudaError:
        """A new, equal error.

        A failure that reaches several waiters is raised once for each of them: raising one
        instance twice would mix their tracebacks.
        """
        twin = type(self)(*self.args)  # not `__new__`: a MemoryError's is another than an Exception's
        twin.__dict__.update(self.__dict__)
        twin.__dict__.pop("__notes__", None)
        for note in getattr(self, "__notes__", ()):
            twin.add_note(note)
        twin.__cause__ = self.__cause__
        return twin


class InvalidArgumentError(AiocudaError, ValueError):
    """A value cannot be used. Nothing was given to the driver."""


class InvalidTypeError(AiocudaError, TypeError):
    """A value has the wrong type. Nothing was given to the driver."""


class DeviceOutOfMemory(AiocudaError, MemoryError):  # noqa: N818 - the contract's name
    """The device has no room, after a trim and one retry. The next allocation may work.

    Attributes
    ----------
    requested, live, reserved, free
        Bytes asked for, handed out by us, held by the pool, and free on the device.
    """

    requested: int
    live: int
    reserved: int
    free: int


class DeviceFault(AiocudaError, RuntimeError):  # noqa: N818 - the contract's name
    """The device has faulted, and with it CUDA in this process. Only a new process recovers.

    Attributes
    ----------
    code
        The driver's code (``CUresult``); 0 on a driver that has none.
    device
        Index of the device that reported it first.
    operation
        The operation that saw it first, as text; it need not be the one that caused it.
    """

    code: int
    device: int
    operation: str | None


class ClosedError(AiocudaError, RuntimeError):
    """The device, stream, pool or loop has been closed."""


class BusyError(AiocudaError, RuntimeError):
    """In use just now. Wait for what the message names, then try again."""


class StaleHandleError(AiocudaError, RuntimeError):
    """The handle was freed, returned or destroyed; it never answers for its successor."""


class WrongDeviceError(AiocudaError, RuntimeError):
    """The object belongs to another device."""


class WrongLoopError(AiocudaError, RuntimeError):
    """The object belongs to another event loop or thread. No driver call was made."""


class ForkedProcessError(AiocudaError, RuntimeError):
    """CUDA does not survive ``fork()``. Open the device in the child, or start it with *spawn*."""


class UnsupportedError(AiocudaError, RuntimeError):
    """This driver, or this hardware, cannot do what was asked."""


class CompileError(AiocudaError, RuntimeError):
    """The kernel's source does not compile.

    Attributes
    ----------
    log
        The compiler's own words, at most 64 KiB.
    """

    log: str


class CompilerNotFoundError(AiocudaError, RuntimeError):
    """NVRTC is not installed. ``pip install "aiocuda[nvrtc]"`` brings it."""


class CycleError(AiocudaError, RuntimeError):
    """Dependencies go round in a circle. ``path`` names the nodes."""

    path: tuple[str, ...]


class DeadlockError(AiocudaError, RuntimeError):
    """A wait that nothing can satisfy."""


class QueueFullError(AiocudaError, RuntimeError):
    """No place is free, and the call was told not to wait: of an `EventPool`, all events are lent."""


class SkippedError(AiocudaError, RuntimeError):
    """Not run, because something before it failed. ``__cause__`` is that failure."""


class BrokenBarrierError(AiocudaError, RuntimeError):
    """A party of the barrier left, timed out or aborted it."""


class NoEventLoopError(AiocudaError, RuntimeError):
    """There is no running event loop. Call from a coroutine."""


class DriverNotAvailableError(AiocudaError, RuntimeError):
    """There is no GPU, no driver or no package for the driver asked for."""


class DriverError(AiocudaError, RuntimeError):
    """The driver answered an error that leaves the device usable and has no better name.

    Attributes
    ----------
    code
        The driver's code (``CUresult``).
    call
        The driver's function that answered it.
    """

    code: int
    call: str


class HostDriverWarning(RuntimeWarning):
    """No GPU was found; work runs on the host driver."""


class DrainTimeoutWarning(RuntimeWarning):
    """The device did not finish within ``drain_timeout``; what it may still touch stays allocated."""


class CleanupWarning(RuntimeWarning):
    """Something could not be given back."""


class UnorderedAccessWarning(RuntimeWarning):
    """Accesses to the same memory, one of them a write, that nothing puts in order. See ``open_device(check=True)``."""
