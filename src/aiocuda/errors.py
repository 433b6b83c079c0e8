"""The errors and warnings of aiocuda. The class of an error shows what to do about it.

::

    AiocudaError
     ├── InvalidArgumentError (ValueError)      a value is wrong: change the call
     ├── InvalidTypeError (TypeError)           a type is wrong: change the call
     ├── DeviceOutOfMemory (MemoryError)        free memory, or request less
     └── (RuntimeError)
          ├── DeviceFault                       CUDA has ended in this process: start a new one
          ├── ClosedError                       the device, stream or pool has been closed
          ├── BusyError                         it is in use: wait, then try again
          ├── StaleHandleError                  freed, returned or destroyed: do not use it again
          ├── WrongDeviceError                  belongs to another device
          ├── WrongLoopError                    belongs to another event loop or thread
          ├── ForkedProcessError                opened before fork(): open it in the child, or use spawn
          ├── UnsupportedError                  this driver, device or graph cannot do it
          ├── CompileError                      the source of the kernel does not compile
          ├── CompilerNotFoundError             NVRTC is missing: the extra nvrtc has it
          ├── CycleError                        dependencies that form a cycle
          ├── DeadlockError                     a wait that can never end
          ├── QueueFullError                    the limit is reached, and the call does not wait
          ├── SkippedError                      not run, because an earlier operation failed
          ├── BrokenBarrierError                a party left the barrier, or it was aborted
          ├── NoEventLoopError                  asyncio's event loop is not running
          ├── DeadlineError (TimeoutError)      the deadline of a request has passed, or would pass
          ├── ReplicaLostError                  the replica was lost while it ran the call
          ├── WorkerLostError                   a worker process of a data loader has ended
          ├── DriverNotAvailableError           no GPU, no driver or no package for it
          └── DriverError                       any other error code of the driver

    Warning
     ├── HostDriverWarning (RuntimeWarning)     no GPU was found: the host driver is used
     ├── DrainTimeoutWarning (RuntimeWarning)   the device did not finish within drain_timeout
     ├── CleanupWarning (RuntimeWarning)        a resource was not released
     ├── PerformanceWarning (RuntimeWarning)    the program uses the device in a slow way
     └── UnorderedAccessWarning (RuntimeWarning)  two accesses to the same memory have no order

Error codes of CUDA become one of these classes in the driver package only. Every error carries its data as attributes
and can be pickled.
"""

from __future__ import annotations

from typing import Any, Self

# Without `DeadlineError`, `ReplicaLostError` and `WorkerLostError`, which `aiocuda.serving`, `aiocuda.cluster` and
# `aiocuda.data` export.
__all__ = [
    "AiocudaError", "BrokenBarrierError", "BusyError", "CleanupWarning", "ClosedError", "CompileError",
    "CompilerNotFoundError", "CycleError", "DeadlockError", "DeviceFault", "DeviceOutOfMemory", "DrainTimeoutWarning",
    "DriverError", "DriverNotAvailableError", "ForkedProcessError", "HostDriverWarning", "InvalidArgumentError",
    "InvalidTypeError", "NoEventLoopError", "PerformanceWarning", "QueueFullError", "SkippedError", "StaleHandleError",
    "UnorderedAccessWarning", "UnsupportedError", "WrongDeviceError", "WrongLoopError",
]  # fmt: skip


class AiocudaError(Exception):
    """Base class of all errors that aiocuda raises on purpose.

    Parameters
    ----------
    message
        What happened, the value that caused it, and what to do about it.
    **data
        Facts for programs. Each becomes an attribute of the error.
    """

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)

    def again(self) -> AiocudaError:
        """Return an equal error, with the same notes and the same ``__cause__``.

        A failure that reaches several waiters is raised as a new object for each of them. Raising one object twice
        would mix the tracebacks.
        """
        copy = type(self)(*self.args)  # not by `__new__`: MemoryError has a `__new__` of its own
        copy.__dict__.update(self.__dict__)
        copy.__dict__.pop("__notes__", None)
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        copy.__cause__ = self.__cause__
        return copy


class InvalidArgumentError(AiocudaError, ValueError):
    """The value of an argument cannot be used: a negative size, arrays of different shapes, an unknown name.

    The call has changed nothing and made no driver call. The message shows the value and the values that are allowed.
    """


class InvalidTypeError(AiocudaError, TypeError):
    """An argument has the wrong type or dtype, or an object does not have the operation.

    The call has changed nothing and made no driver call. The message shows the argument and the type that is needed.
    """


class DeviceOutOfMemory(AiocudaError, MemoryError):  # noqa: N818 - the contract's name
    """The device has too little free memory for an allocation.

    Before it raises this, the library returns the unused memory of its pool to the device and tries once more. The call
    has enqueued nothing; the device and the stream can be used. Free buffers, or await operations that hold some, and
    try again; or request less.
    """

    requested: int  #: bytes that the call requested
    live: int  #: bytes in buffers of this library
    reserved: int  #: bytes that its pool holds, in use or not
    free: int  #: bytes that are free on the device

    def __new__(cls, *args: Any, **data: Any) -> Self:
        """Not that of `MemoryError`: tblib, which Dask installs for all pickles, cannot call it for a subclass."""
        return Exception.__new__(cls, *args)


class DeviceFault(AiocudaError, RuntimeError):  # noqa: N818 - the contract's name
    """The device has faulted: an illegal address, a failed assertion in a kernel, or a hardware error.

    A fault ends CUDA in the whole process, for all devices. All unfinished operations fail with this error, and every
    later call raises an equal one. Device memory is lost. End the process and start a new one; ``compute-sanitizer``
    finds the kernel that caused the fault. On the host and simulated drivers, an exception in the host implementation
    of a kernel is a fault, too, and is the ``__cause__`` of this error; there, a new device can be opened.
    """

    code: int  #: CUDA's error code (``CUresult``); 0 on a driver without codes
    device: int  #: index of the device that reported the fault first
    operation: str | None  #: the operation that reported it first, as text; an earlier one may have caused it
    was_raised: bool = False  # True if the program may have received an equal error

    def again(self) -> AiocudaError:
        self.was_raised = True
        return super().again()


class ClosedError(AiocudaError, RuntimeError):
    """The device, stream, pool, context or event loop has been closed, or is being closed.

    An operation fails with this error if it was abandoned, or withdrawn before it reached the device because its stream
    or device was left by an exception. A closed object cannot be opened again: create a new one.
    """


class BusyError(AiocudaError, RuntimeError):
    """The object is in use, or its result is not ready. The call has changed nothing.

    Examples are the result of an operation that has not finished, an array that an unfinished copy writes, and a stream
    that is lent. Wait for the object that the message names, then try again.
    """


class StaleHandleError(AiocudaError, RuntimeError):
    """The object was freed, returned to its pool or destroyed before this call. The call has changed nothing.

    CUDA may use the handle or the address for a new object. The library never confuses the two: the old object raises
    this error. Keep the object alive until its last use, or take a new one.
    """


class WrongDeviceError(AiocudaError, RuntimeError):
    """The object belongs to another device or driver. The call has enqueued nothing.

    Use a stream of the object's own device, or copy the data to this device with `Stream.copy`.
    """


class WrongLoopError(AiocudaError, RuntimeError):
    """The object belongs to another event loop or thread. No driver call was made.

    Streams, operations and pools belong to the event loop that created them; devices are shared by all loops of the
    process. Create a stream of the same device in this loop.
    """


class ForkedProcessError(AiocudaError, RuntimeError):
    """The device was opened before ``fork()``, and this is the child process. No driver call was made.

    CUDA does not work in a forked child. Open the device in the child, or start children with *spawn*.
    """


class UnsupportedError(AiocudaError, RuntimeError):
    """The driver, the device or a graph cannot do this. The call has enqueued nothing.

    The message names the reason and, if there is one, another way.
    """


class CompileError(AiocudaError, RuntimeError):
    """The source of a kernel does not compile, or does not declare the kernel.

    The operation that launched the kernel fails, and the next launch compiles again. Correct the source.
    """

    log: str  #: messages of the compiler, at most 64 KiB; empty if the compiler did not run


class CompilerNotFoundError(AiocudaError, RuntimeError):
    """CUDA's compiler library, NVRTC, is not installed: the extra ``nvrtc`` has it.

    The operation that launched the kernel fails. Kernels in the cache on disk need no compiler.
    """


class CycleError(AiocudaError, RuntimeError):
    """The new dependency would form a cycle, so the nodes would wait for each other. It was not added."""

    path: tuple[str, ...]  #: the nodes of the cycle, as text


class DeadlockError(AiocudaError, RuntimeError):
    """A wait that can never end, because tasks wait for each other; or one that exceeds a ``deadlock_timeout``.

    An example is a pool with all streams leased by waiting tasks. The last task that began to wait gets this error; the
    others go on when it returns the leases that it holds. A wait that may only be late, such as that for a party of a
    barrier, fails only in an `AsyncCoordinator` with a ``deadlock_timeout``.
    """

    path: tuple[str, ...]  #: the waits, as text: each task, what it waits for, and which task holds it


class QueueFullError(AiocudaError, RuntimeError):
    """The limit is reached, and the call does not wait: all events of an `EventPool` are lent.

    The call has changed nothing. Use the method that waits (``await pool.acquire()``), or release an event first.
    """


class SkippedError(AiocudaError, RuntimeError):
    """The operation was not run, because an operation before it failed. ``__cause__`` is that failure.

    The stream skips all operations until the failure has been raised to a caller or read by ``exception()``. Then it
    accepts new operations. The memory that skipped operations should have written has its old contents.
    """


class BrokenBarrierError(AiocudaError, RuntimeError):
    """A party of the barrier was cancelled, timed out or was refused, or the barrier was aborted.

    All parties of this round get this error, and so do parties that come later. Their streams do not wait for each
    other, and can be used. ``await barrier.reset()`` makes the barrier usable.
    """


class NoEventLoopError(AiocudaError, RuntimeError):
    """The call needs the running event loop of asyncio, and there is none. No driver call was made.

    Call it in a coroutine, under ``asyncio.run(main())``.
    """


class DriverNotAvailableError(AiocudaError, RuntimeError):
    """The requested driver cannot be used: there is no GPU, no NVIDIA driver, or a Python package is missing.

    The message names the missing part. ``driver="host"`` needs none of these.
    """


class DriverError(AiocudaError, RuntimeError):
    """A driver call returned an error code that has no class of its own. The device can still be used.

    If the call submitted an operation, that operation fails and later ones of its stream are skipped, see
    `SkippedError`.
    """

    code: int  #: CUDA's error code (``CUresult``)
    call: str  #: name of the driver function


class HostDriverWarning(RuntimeWarning):
    """No GPU was found, and the host driver is used. The message gives the reason.

    ``driver="host"`` chooses it without a warning; ``driver="cuda"`` raises `DriverNotAvailableError` instead.
    """


class DrainTimeoutWarning(RuntimeWarning):
    """The device did not finish its operations within ``drain_timeout`` seconds after an exception.

    The memory that these operations may still use stays allocated.
    """


class CleanupWarning(RuntimeWarning):
    """A resource could not be released. The message names it and the reason; its memory stays allocated."""


class PerformanceWarning(RuntimeWarning):
    """The program uses the device in a slow way. The message has the figures and the cure.

    It is issued once for each line of the program. ``AIOCUDA_WARN=0`` and Python's filters disable it.
    """


class UnorderedAccessWarning(RuntimeWarning):
    """Two accesses to the same memory, at least one of them a write, have no order. See ``open_device(check=True)``.

    Make one stream wait for the operation of the other: ``stream.wait(operation)``.
    """


class DeadlineError(AiocudaError, TimeoutError):
    """The deadline has passed, or the request was refused because it would miss it.

    A `MicroBatcher` does not pass a request to its function if it was refused, or expired before its batch began.
    """

    deadline_s: float  #: seconds from the call, as requested
    predicted_s: float | None  #: the predicted time of a request that was refused; None for one that has expired


class ReplicaLostError(AiocudaError, RuntimeError):
    """The replica was lost while it ran this call, or no replica is left.

    The method may have run in whole, in part or not at all. ``__cause__`` is the `DeviceFault` that ended the replica,
    if there is one. If the method may run twice, use ``call(…, retry=True)``.
    """

    replica: int | None  #: index of the replica; None if there is none to run the call
    epoch: int | None  #: the epoch that was lost
    reason: str  #: why it was lost


class WorkerLostError(AiocudaError, RuntimeError):
    """A worker process of a data loader has ended, and the loader may start no more processes in its place.

    The sample may have made it end: a decoder that crashes or takes too much memory. ``restarts=`` of the loader is the
    number of processes that it starts in place of lost ones.

    A function ``on_error=`` gets this error for a sample that has ended two processes, and is skipped.
    """

    index: int | None  #: the index of the sample that the process was decoding; None if it was decoding none
    exit_code: int | None  #: the exit code of the process; negative for a signal, None if unknown
