"""What an engine does for one command.

A transfer sleeps first and moves its bytes at the end, so that a buffer's content changes when the transfer completes
and not before. A kernel runs first and sleeps out what is left of its modelled time.
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
from ..protocol._code import Program

__all__ = [
    "DeviceCopy",
    "Fill",
    "Function",
    "KernelCall",
    "PeerCopy",
    "Pointer",
    "Prefetch",
    "Transfer",
    "TwinError",
    "Work",
    "touched",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: The bytes of a range as a command on a device sees them: (device, address, nbytes). `IllegalAddressError` if not
#: there.
Look: TypeAlias = Callable[[int, int, int], Bytes]


class TwinError(Exception):
    """A kernel's twin raised. The cause is what it raised."""


class Work(Protocol):
    """The action of a command that takes time."""

    @property
    def seconds(self) -> float:
        """Modelled time, of which as much is slept as the work itself does not take."""

    @property
    def is_transfer(self) -> bool:
        """Sleep first, on an engine that takes one after the other?"""

    def perform(self, device: int, look: Look) -> None:
        """Do it, on whatever thread."""


@dataclasses.dataclass(slots=True)
class Transfer:
    """Between a device and the host, whose side was looked up when the copy was enqueued."""

    seconds: float
    address: int  # on the device
    host: Bytes
    up: bool
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, look: Look) -> None:
        """Move the bytes."""
        there = look(device, self.address, self.host.size)
        if self.up:
            np.copyto(there, self.host)
        else:
            np.copyto(self.host, there)


@dataclasses.dataclass(slots=True)
class PeerCopy:
    """From one device to another, pushed by the source's copy engine."""

    seconds: float
    target: int
    target_device: int
    source: int
    nbytes: int
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, look: Look) -> None:
        """Move the bytes."""
        np.copyto(look(self.target_device, self.target, self.nbytes), look(device, self.source, self.nbytes))


@dataclasses.dataclass(slots=True)
class Prefetch:
    """Managed memory is where it is on the host: a prefetch takes its time and moves nothing."""

    seconds: float
    is_transfer: ClassVar[bool] = True

    def perform(self, device: int, look: Look) -> None:
        """Nothing is left to do."""


@dataclasses.dataclass(slots=True)
class DeviceCopy:
    """Within one device. Takes what the copy takes."""

    target: int
    source: int
    nbytes: int
    seconds: ClassVar[float] = 0.0
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, look: Look) -> None:
        """Move the bytes."""
        np.copyto(look(device, self.target, self.nbytes), look(device, self.source, self.nbytes))


@dataclasses.dataclass(slots=True)
class Fill:
    """A pattern, repeated. Takes what the fill takes."""

    target: int
    pattern: bytes
    count: int
    seconds: ClassVar[float] = 0.0
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, look: Look) -> None:
        """Write the pattern, a word of up to 8 bytes at a time."""
        there = look(device, self.target, len(self.pattern) * self.count)
        word = min(len(self.pattern), 8)
        there.view(f"u{word}").reshape(self.count, -1)[:] = np.frombuffer(self.pattern, f"u{word}")


class Pointer(NamedTuple):
    """A buffer as a kernel's argument."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Function:
    """A kernel that has been loaded: its twin, and how to make its arguments."""

    __slots__ = ("converters", "device", "name", "naps", "read_only", "seconds", "takes_grid", "twin")

    def __init__(self, device: int, program: Program, twin: Callable[..., object]) -> None:
        self.device = device
        self.name = program.name
        self.twin = twin
        self.takes_grid = program.host_takes_grid
        self.seconds = program.host_seconds or 0.0
        self.naps = inspect.isgeneratorfunction(twin)
        self.read_only = program.read_only
        self.converters = tuple(_converter(program, code) for code in program.format)


@dataclasses.dataclass(slots=True)
class KernelCall:
    """One launch. The twin gets views for pointers, and NumPy scalars of the parameters' C types.

    A twin that is a generator function runs bit by bit: it yields how many seconds it does nothing for, and is sent
    the driver's time then. So it may wait for something, on a driver that has no threads as well.
    """

    function: Function
    values: tuple[Any, ...]
    keywords: Mapping[str, object]
    seconds: float
    is_transfer: ClassVar[bool] = False

    def perform(self, device: int, look: Look) -> None:
        """Call the twin."""
        for nap in self.naps(device, look, time.monotonic):
            time.sleep(nap)  # noqa: TID251 - on a runner, which stands for an engine

    def naps(self, device: int, look: Look, now: Callable[[], float]) -> Iterator[float]:
        """Call the twin, bit by bit: in between it does nothing for so many seconds."""
        function = self.function
        arguments: list[Any] = [
            np.ndarray(value.shape, value.dtype, look(device, value.address, value.nbytes))
            if convert is None
            else convert(value)
            for convert, value in zip(function.converters, self.values, strict=True)
        ]
        for index in function.read_only:
            arguments[index].flags.writeable = False
        # The `yield` stands outside of `_guarded`: a GeneratorExit there ends this generator, since its driver is
        # closed or has faulted. A GeneratorExit of the twin is an exception like any other.
        returned = self._guarded(function.twin, *arguments, **self.keywords)
        if function.naps:
            running, sent = returned, None
            while True:
                nap, returned = self._guarded(_advance, running, sent)
                if nap is None:
                    break
                yield nap
                sent = now()
        self._guarded(_check_in_place, returned, arguments)

    def _guarded(self, part: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of a part of the twin. Whatever that raises is the cause of a `TwinError`."""
        try:
            return part(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - raised as TwinError
            # The latch keeps the reason for good. It must not keep the frames from here up: they hold the driver.
            trace = error.__traceback__
            raise TwinError(f"the twin of kernel {self.function.name!r} raised {error!r}") from error.with_traceback(
                None if trace is None else trace.tb_next
            )


def _advance(running: Any, sent: float | None) -> tuple[float | None, object]:
    """Run a generator twin to its next nap: (seconds, None), or (None, what it returned) at its end."""
    try:
        nap = running.send(sent)
    except StopIteration as end:
        return None, end.value
    if nap is None:
        return None, None
    seconds = float(nap)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"it yielded {nap!r}: a twin yields how many seconds it does nothing for")
    return seconds, None


def _check_in_place(returned: object, arguments: list[Any]) -> None:
    """A twin that returns a new array has most likely written none of those that it was given."""
    if isinstance(returned, np.ndarray) and not any(
        isinstance(argument, np.ndarray) and np.may_share_memory(returned, argument) for argument in arguments
    ):
        raise TypeError(
            f"it returned a new array of shape {returned.shape} {returned.dtype}, which goes nowhere: a twin writes "
            "the arrays that it is given, as in `x[:] = x + 1` or `np.add(x, 1, out=x)`, and returns None"
        )


def touched(work: Work) -> list[int]:
    """The addresses of device memory, and of buffers, that a command is given."""
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
    """What makes a scalar of a `struct` code; None for a pointer."""
    if code == "P":
        return None
    if code not in "?bBhHiIlLqQefd":
        raise InvalidArgumentError(
            f"kernel {program.name!r}: {code!r} in format {program.format!r} is no parameter that a twin can take; "
            "use one letter of ?bBhHiIlLqQefdP for each",
            format=program.format,
        )
    convert: Callable[[Any], object] = np.dtype(np.dtype(code).str).type  # by size: int64, never longlong
    return convert
