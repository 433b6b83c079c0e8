"""`open_device`, and the choice of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import operator
import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, TypeVar

import numpy as np

from .._base._advice import advise, is_advice_wanted
from .._base._checks import as_count, flag, has_gil
from .._base._clock import running_clock
from .._base._log import log, prepare
from .._base._mistakes import add_reader, keywords
from .._base._off_loop import off_loop
from .._base._processor import throttled_periods
from .._base._types import DeviceProperties, SourceLine
from .._core._form import BUILD, VARIABLE, form
from ..completion._advice import log_few_queues
from ..completion._wait_rule import CompletionPolicy, PolicyName
from ..driver import DriverName, driver_name
from ..driver.protocol import Driver
from ..errors import (
    DriverNotAvailableError,
    HostDriverWarning,
    InvalidArgumentError,
    InvalidTypeError,
    NoEventLoopError,
    UnsupportedError,
)
from ._device import Device
from ._open_devices import OPEN_DEVICES
from ._resources import resources_of
from .streams import Checker

__all__ = ["has_gpu", "open_device"]

T = TypeVar("T")


async def has_gpu() -> bool | None:
    """Return whether this process finds a GPU; None if ``AIOCUDA_DRIVER`` names a driver without one."""
    if driver_name("auto") not in ("auto", "cuda"):
        return None

    def look() -> bool:
        from ..driver.cuda import find as find_reason

        return find_reason() is None

    return await off_loop(look)


async def _offload(driver: Driver, work: Callable[[], T]) -> T:
    """Run a function that may block on a worker thread of the driver, before the loop has a reactor."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the event loop
            outcome.append(error)

    def look() -> None:
        if finished.done():
            return  # cancelled: the port may belong to another call
        port.drain()  # not the tags decide: one may be of an earlier call that was cancelled
        if outcome:
            finished.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(look)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop needs no wake-up
                raise

    port = driver.open_port(wake)
    with contextlib.closing(port):
        descriptor = port.fileno()
        if descriptor is not None:
            add_reader(loop, descriptor, look)
        try:
            driver.offload(run, port, 0)  # no reactor uses the tag 0
            await finished
        finally:
            if descriptor is not None and not loop.is_closed():
                loop.remove_reader(descriptor)
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def _first_use(driver: Driver, index: int, streams_ahead: int) -> DeviceProperties:
    """Open a device, make streams ahead, and read and import what is used from now on. **May block.**"""
    prepare()
    throttled_periods()
    properties = driver.device_open(index)
    if streams_ahead:
        driver.stream_reserve(index, streams_ahead)
    return properties


async def _opened_driver(which: DriverName | Driver, line: SourceLine) -> tuple[Driver, bool]:
    """Return the driver, and True if the device has to close it. ``line`` is that of a warning."""
    if not isinstance(which, str):
        if not callable(getattr(which, "event_query", None)):
            cure = ": leave it out for 'auto'" if which is None else ""
            raise InvalidTypeError(f"driver must be a name or a Driver, not {type(which).__name__}{cure}")
        return which, False
    name = driver_name(which)
    if name == "simulated":
        from ..driver.simulated import SimulatedDriver

        return SimulatedDriver(), True
    if name != "host":
        reason = await off_loop(_why_not_cuda)
        if reason is None:
            return await off_loop(_cuda), False
        if name == "cuda":
            raise DriverNotAvailableError(
                f"CUDA is not available: {reason}. Without a GPU use driver='host', or driver='auto', which takes CUDA "
                "where there is a GPU",
                driver=name,
                reason=reason,
            )
        line.warn(
            f"no GPU is used, work runs on the host driver: {reason}. To choose the host driver without this warning, "
            "use open_device(driver='host') or AIOCUDA_DRIVER=host",
            HostDriverWarning,
        )
    from ..driver.host import HostDriver

    return HostDriver(), True


def _check_index(driver: Driver, index: int) -> None:
    count = driver.device_count()
    if index >= count:
        cure = f"; driver={type(driver).__name__}(devices={index + 1}) has more" if driver.name != "cuda" else ""
        raise InvalidArgumentError(
            f"there is no device {index}: the {driver.name} driver has {count}, counted from 0{cure}", index=index
        )


def _why_not_cuda() -> str | None:
    from ..driver.cuda import _probe

    return _probe.find()


def _cuda() -> Driver:
    from ..driver.cuda import CudaDriver

    return CudaDriver.get()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Opening:
    """What `open_device` returns: await it, or enter it by ``async with``."""

    _index: int
    _which: DriverName | Driver
    _policy: CompletionPolicy
    _max_in_flight: int
    _check: bool
    _asynchronous: bool
    _streams_ahead: int
    _line: SourceLine
    _advises: bool = dataclasses.field(default_factory=is_advice_wanted)
    _begun: bool = False
    _device: Device | None = None
    _call: str = "open_device()"
    _noun: str = "device"

    def called(self, call: str, noun: str) -> Self:
        """Return the opening. Messages name the call that made it, and its result, like this."""
        self._call = call
        self._noun = noun
        return self

    def _cure(self) -> str:
        """Return the two ways to open the device, for messages."""
        call, noun = self._call, self._noun
        return f"use `async with aiocuda.{call} as {noun}`, or `{noun} = await aiocuda.{call}`"

    async def _open(self) -> Device:
        self._begun = True
        if asyncio._get_running_loop() is None:  # as in a task of trio
            raise NoEventLoopError(
                "a device is opened in asyncio's running event loop: under asyncio.run(main()), or "
                "anyio.run(main, backend='asyncio'); trio's loop is another kind"
            )
        driver, owned = await _opened_driver(self._which, self._line)
        try:
            if driver.name == "cuda" and not has_gil():
                raise UnsupportedError(
                    "CUDA on free-threaded Python is not tested: run with PYTHON_GIL=1, use a Python with the GIL, or "
                    "driver='host'"
                )
            if running_clock() is not None and driver.name != "simulated":
                raise InvalidArgumentError(
                    f"a simulated loop runs in virtual time, and the {driver.name} driver in real time: use "
                    "driver='simulated', or another loop",
                    driver=driver.name,
                )
            _check_index(driver, self._index)
            properties = await _offload(driver, lambda: _first_use(driver, self._index, self._streams_ahead))
            device = Device(
                driver, self._index, properties, self._policy, self._max_in_flight, owned, str(self._line),
                self._asynchronous,
            )  # fmt: skip
            resources = resources_of(device)
            resources.device_state.advises = self._advises
            if self._check:
                resources.check_with(Checker())
            try:
                resources.loop_state()
                log("info", "device_opened", device=device.name, index=self._index, driver=driver.name)
                log_few_queues(properties, self._index)
                if self._advises and driver.name == "cuda":
                    _advise_about_core(self._line)
            except BaseException:
                resources.mark_closed()  # no caller gets it
                raise
        except BaseException:
            if owned:
                driver.close()
            raise
        try:
            for observer in OPEN_DEVICES.observers:
                await observer.opened(device)
        except BaseException:
            await device.__aexit__(*sys.exc_info())  # no caller gets it
            raise
        return device

    def __await__(self) -> Generator[Any, None, Device]:
        return self._open().__await__()

    async def __aenter__(self) -> Device:
        self._device = await self._open()
        return self._device

    async def __aexit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on as it is
        assert self._device is not None
        await self._device.__aexit__(*exc)

    def __enter__(self) -> NoReturn:
        self._begun = True  # one error is enough: no warning when it is collected
        raise InvalidTypeError(f"a device is opened by `async with`, not `with`: {self._cure()}")

    def __exit__(self, *exc: object) -> None: ...

    def __del__(self) -> None:
        if not getattr(self, "_begun", True):
            self._line.warn(f"{self._call} was never awaited: {self._cure()}", RuntimeWarning)

    def __repr__(self) -> str:
        return f"<open_device() at {self._line}>"

    if not TYPE_CHECKING:  # a type checker reports it by itself

        def __getattr__(self, name: str) -> NoReturn:
            cure = f": {self._cure()}" if hasattr(Device, name) else ""
            if cure:
                self._begun = True  # one error is enough
            raise AttributeError(f"what open_device() returns is no device yet and has no {name!r}{cure}", name=name)


#: How often a GPU was opened without the compiled core.
_without_compiled_core = itertools.count()


def _advise_about_core(line: SourceLine) -> None:
    """Warn at the first opening of a GPU if the core is not compiled, unless ``AIOCUDA_CORE`` has chosen that."""
    missing = form().missing
    if missing is not None and not next(_without_compiled_core):
        advise(
            "core",
            line,
            f"{missing}, so it runs in Python: launches and awaits take more time of the host. Build it by "
            f"`{BUILD}`, or set {VARIABLE}=python",
        )


def _checks(check: bool | None) -> bool:
    """Return True if accesses are to be checked; None takes the value of ``AIOCUDA_CHECK``."""
    if check is not None:
        return flag(check, "check")
    wanted = os.environ.get("AIOCUDA_CHECK", "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"AIOCUDA_CHECK={wanted!r}: it takes 1 or 0")
    return wanted == "1"


def _checked(index: object) -> int:
    """Return the index of a device as an int."""
    try:
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(index, (bool, np.bool_)):
        has_index = isinstance(index, str) or hasattr(index, "index")  # torch.device has one
        cure = ": open_device(0, driver='cuda'), or open_device(driver='host')" if has_index else ""
        raise InvalidTypeError(f"a device's index is an integer, not {index!r}{cure}")
    if number < 0:
        raise InvalidArgumentError(f"a device's index is not negative, and this is {number}", index=number)
    return number


@keywords(
    "help(aiocuda.open_device) lists its parameters",
    "open_device takes the index alone without a keyword: open_device(0, driver='host')",
    **dict.fromkeys(
        ("memory_limit", "memory", "memory_fraction", "pool_size"),
        "device.memory.use(lambda upstream: aiocuda.memory.LimitResource(upstream, nbytes)) limits the memory",
    ),
    **dict.fromkeys(("device", "device_id", "gpu"), "open_device(0) takes the index first, or index=0"),
)
def open_device(
    index: SupportsIndex = 0,
    *,
    driver: DriverName | Driver = "auto",
    policy: PolicyName | CompletionPolicy = "balanced",
    max_in_flight: int = 400,
    check: bool | None = None,
    asynchronous: bool = True,
    streams_ahead: int = 64,
) -> _Opening:
    """Open a device: ``async with open_device() as device``, or ``await open_device()`` and ``await device.aclose()``.

    The end of the block waits for the work. After an exception or a cancellation it abandons work that is still on the
    host, and waits at most 5 seconds for work that the device has accepted. A `PerformanceWarning` reports slow ways to
    use the device, unless ``AIOCUDA_WARN`` is 0.

    Parameters
    ----------
    index
        Which of the driver's devices.
    driver
        ``"cuda"``, ``"host"``, ``"simulated"``, or a driver object. ``"auto"`` uses CUDA if there is a GPU, a driver
        and the package; otherwise the host driver, with one `HostDriverWarning`. A GPU that is present and fails
        raises. ``AIOCUDA_DRIVER`` replaces ``"auto"``.
    policy
        How the library sees that work is done: ``"latency"``, ``"balanced"``, ``"efficient"``, or a `CompletionPolicy`.
    max_in_flight
        The number of operations of one stream that the device holds at once; more wait on the host.
    check
        Look for unordered accesses to the same memory, and warn of them by `UnorderedAccessWarning` with both places in
        your code; `Device.checker`, one for all devices of a driver, has them all. Each method of a stream then takes
        some 20 µs longer. None takes the value of ``AIOCUDA_CHECK``, 1 or 0.
    asynchronous
        False: every stream of the device is its default stream, also for other libraries. Operations run one after the
        other, in the order in which they reach the device. No stream is created and no notifier is armed: a timer wakes
        waiters, some 1 ms late. Programs need no change, and results are the same. Priorities have no effect.
    streams_ahead
        The streams, with up to 24 for notifiers, that CUDA can create later without a wait: they are made here, and
        given back. A stream beyond them may wait for all running kernels, with the event loop and other threads that
        launch; the log event ``driver_call_waited`` reports it. 64 take 35 MB of device memory until the process
        ends, 256 take 143 MB, 0 makes none. Of several openings of a device, the greatest number counts.

    Raises
    ------
    DriverNotAvailableError
        The named driver is not available.
    NoEventLoopError
        It is awaited without asyncio's event loop, under trio for example.
    """
    number = _checked(index)
    most = as_count(max_in_flight, "max_in_flight")
    if not isinstance(asynchronous, bool):
        raise InvalidTypeError(f"asynchronous is True or False, not {asynchronous!r}")
    ahead = as_count(streams_ahead, "streams_ahead", least=0)
    if isinstance(driver, str):
        driver_name(driver)
    return _Opening(
        number, driver, CompletionPolicy.named(policy), most, _checks(check), asynchronous,
        ahead if asynchronous else 0, SourceLine.of_caller(),
    )  # fmt: skip
