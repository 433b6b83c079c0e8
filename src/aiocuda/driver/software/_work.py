"""The work of an engine for one command.

A transfer sleeps first and moves its bytes at the end, so that a buffer's content changes when the transfer completes
and not before. A kernel runs first and then sleeps for the rest of its modelled time.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgumentError
from ..protocol import Program

__all__ = [
    "DeviceCopy",
    "Fill",
    "Function",
    "HostKernelError",
    "KernelCall",
    "PeerCopy",
    "Pointer",
    "Prefetch",
    "Transfer",
    "Work",
    "used_addresses",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: (device, address, nbytes) → the bytes of a range, for a command on a device. `IllegalAddressError` if it has no such
#: range.
BytesAt: TypeAlias = Callable[[int, int, int], Bytes]


class HostKernelError(Exception):
    """A kernel's host implementation raised. Its exception is the cause."""


class Work(Protocol):
    """The action of a command that takes time."""

    @property
    def seconds(self) -> float:
        """The modelled time. If the work takes less, the engine sleeps for the difference."""

    @property
    def is_transfer(self) -> bool:
        """True if the engine sleeps before the work."""

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        """Execute the work, on any thread."""


@dataclasses.dataclass(slots=True)
class Transfer:
    """A copy between a device and the host. The host memory was looked up when the copy was enqueued."""

    seconds: float
    address: int  # on the device
    host: Bytes
    up: bool
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        there = bytes_at(device, self.address, self.host.size)
        if self.up:
            np.copyto(there, self.host)
        else:
            np.copyto(self.host, there)


@dataclasses.dataclass(slots=True)
class PeerCopy:
    """A copy from one device to another, executed by the source's copy engine."""

    seconds: float
    target: int
    target_device: int
    source: int
    nbytes: int
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        np.copyto(bytes_at(self.target_device, self.target, self.nbytes), bytes_at(device, self.source, self.nbytes))


@dataclasses.dataclass(slots=True)
class Prefetch:
    """A prefetch. Managed memory is always on the host, so a prefetch takes time and moves nothing."""

    seconds: float
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        """Do nothing."""


@dataclasses.dataclass(slots=True)
class DeviceCopy:
    """A copy within one device. It has no modelled time."""

    target: int
    source: int
    nbytes: int
    seconds: ClassVar[float] = 0.0
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        np.copyto(bytes_at(device, self.target, self.nbytes), bytes_at(device, self.source, self.nbytes))


@dataclasses.dataclass(slots=True)
class Fill:
    """A fill with a repeated pattern. It has no modelled time."""

    target: int
    pattern: bytes
    count: int
    seconds: ClassVar[float] = 0.0
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        """Write the pattern, a word of up to 8 bytes at a time."""
        there = bytes_at(device, self.target, len(self.pattern) * self.count)
        word = min(len(self.pattern), 8)
        there.view(f"u{word}").reshape(self.count, -1)[:] = np.frombuffer(self.pattern, f"u{word}")


class Pointer(NamedTuple):
    """A buffer, as an argument of a kernel."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Function:
    """A loaded kernel: its host implementation, and the conversion of its arguments."""

    __slots__ = ("converters", "device", "host", "is_generator", "name", "read_only", "seconds", "takes_grid")

    def __init__(self, device: int, program: Program, host: Callable[..., object]) -> None:
        self.device = device
        self.name = program.name
        self.host = host
        self.takes_grid = program.host_takes_grid
        self.seconds = program.host_seconds or 0.0
        self.is_generator = inspect.isgeneratorfunction(host)
        self.read_only = program.read_only
        self.converters = tuple(_converter(program, code) for code in program.format)


@dataclasses.dataclass(slots=True)
class KernelCall:
    """One launch. The host implementation receives array views for pointers, and NumPy scalars of the C types.

    A host implementation that is a generator function runs in parts: it yields a pause in seconds, and receives the
    driver's time after the pause. It can therefore wait for something, also on a driver without threads.
    """

    function: Function
    values: tuple[Any, ...]
    keywords: Mapping[str, object]
    seconds: float
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, bytes_at: BytesAt) -> None:
        """Call the host implementation, and sleep for its pauses."""
        for pause in self.run(device, bytes_at, time.monotonic):
            time.sleep(pause)  # noqa: TID251 - on a `Runner`, which is the thread of an engine

    def run(self, device: int, bytes_at: BytesAt, now: Callable[[], float]) -> Iterator[float]:
        """Call the host implementation; yield its pauses in seconds."""
        function = self.function
        arguments: list[Any] = [
            np.ndarray(value.shape, value.dtype, bytes_at(device, value.address, value.nbytes))
            if convert is None
            else convert(value)
            for convert, value in zip(function.converters, self.values, strict=True)
        ]
        for index in function.read_only:
            arguments[index].flags.writeable = False
        # The `yield` is not inside `_call`: a GeneratorExit at the `yield` ends this generator, because its driver was
        # closed or has faulted. A GeneratorExit of the host implementation is treated as any other exception.
        returned = self._call(function.host, *arguments, **self.keywords)
        if function.is_generator:
            generator, sent = returned, None
            while True:
                pause, returned = self._call(_next_pause, generator, sent)
                if pause is None:
                    break
                yield pause
                sent = now()
        self._call(_check_in_place, returned, arguments)

    def _call(self, part: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Return the result of a part of the host implementation. Raise `HostKernelError` from its exception."""
        try:
            return part(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - raised as HostKernelError
            # The fault latch keeps the exception forever. It must not keep the frames above, which refer to the driver.
            trace = error.__traceback__
            is_shape = isinstance(error, ValueError) and "broadcast" in str(error)
            cure = " (its arrays have the shapes of the buffers, and not of the grid)" if is_shape else ""
            raise HostKernelError(
                f"the host implementation of kernel {self.function.name!r} raised {error!r}{cure}"
            ) from error.with_traceback(None if trace is None else trace.tb_next)


def _next_pause(generator: Any, sent: float | None) -> tuple[float | None, object]:
    """Run a generator to its next pause. Return (seconds, None), or (None, returned value) at its end."""
    try:
        pause = generator.send(sent)
    except StopIteration as end:
        return None, end.value
    if pause is None:
        return None, None
    seconds = float(pause)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"it yielded {pause!r}; it must yield the seconds of a pause, 0 or more and finite")
    return seconds, None


def _check_in_place(returned: object, arguments: list[Any]) -> None:
    """Raise if a new array is returned: the host implementation has then probably not written its arguments."""
    if isinstance(returned, np.ndarray) and not any(
        isinstance(argument, np.ndarray) and np.may_share_memory(returned, argument) for argument in arguments
    ):
        raise TypeError(
            f"it returned a new array of shape {returned.shape} {returned.dtype}, which is lost: a host implementation "
            "writes the arrays that it receives, as in `x[:] = x + 1` or `np.add(x, 1, out=x)`, and returns None"
        )


def used_addresses(work: Work) -> list[int]:
    """Return the addresses of device memory, and of buffers, among a command's arguments."""
    if isinstance(work, Transfer):
        return [work.address]
    if isinstance(work, (DeviceCopy, PeerCopy)):
        return [work.target, work.source]
    if isinstance(work, Fill):
        return [work.target]
    if isinstance(work, KernelCall):
        return [value.address for value in work.values if isinstance(value, Pointer)]
    return []


def _converter(program: Program, code: str) -> Callable[[Any], object] | None:
    """Return the function that makes a scalar of a `struct` code; None for a pointer."""
    if code == "P":
        return None
    if code not in "?bBhHiIlLqQefd":
        raise InvalidArgumentError(
            f"kernel {program.name!r}: {code!r} in format {program.format!r} cannot be a parameter "
            "of a host implementation; use one letter of ?bBhHiIlLqQefdP for each",
            format=program.format,
        )
    convert: Callable[[Any], object] = np.dtype(np.dtype(code).str).type  # by size: int64, never longlong
    return convert
