"""Opening a device: which driver serves, and why."""

from __future__ import annotations

import asyncio
import operator
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from ._checks import flag
from ._device import Device
from ._device_resources import resources_of
from ._types import Place
from .completion._policy import CompletionPolicy, PolicyName
from .driver._clock import running_clock
from .driver.protocol import Driver
from .errors import (
    DriverNotAvailableError,
    HostDriverWarning,
    InvalidArgumentError,
    InvalidTypeError,
    NoEventLoopError,
    UnsupportedError,
)
from .stream import Checker

__all__ = ["DriverName", "driver_name", "off_loop", "open_device"]

T = TypeVar("T")

DriverName: TypeAlias = Literal["auto", "cuda", "host", "simulated"]

_NAMES = ("auto", "cuda", "host", "simulated")


async def off_loop(work: Callable[[], T]) -> T:
    """Run what may block on a daemon thread of its own. Only for what comes before there is a driver."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 - handed over whole: the loop decides
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            if not loop.is_closed():  # a loop that has gone wants no answer
                raise

    threading.Thread(target=run, name="aiocuda-open", daemon=True).start()
    return await future


async def _offload(driver: Driver, work: Callable[[], T]) -> T:
    """Run what may block where the driver has it run, before there is a reactor to hear of it."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again on the loop
            outcome.append(error)

    def look() -> None:
        if port.drain() and not told.done():
            told.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(look)
        except RuntimeError:
            if not loop.is_closed():  # a loop that has gone wants no answer
                raise

    port = driver.open_port(wake)
    descriptor = port.fileno()
    if descriptor is not None:
        loop.add_reader(descriptor, look)
    try:
        driver.offload(run, port, 0)  # a tag that no reactor gives
        await told
    finally:
        if descriptor is not None and not loop.is_closed():
            loop.remove_reader(descriptor)
        port.close()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def driver_name(which: object) -> str:
    """The name that was asked for; the environment answers for ``"auto"``."""
    if not isinstance(which, str):
        raise InvalidTypeError(f"driver must be one of {', '.join(_NAMES)} or a Driver, not {type(which).__name__}")
    if which not in _NAMES:
        raise InvalidArgumentError(f"no driver is called {which!r}; there are {', '.join(_NAMES)}", driver=which)
    if which != "auto":
        return which
    wanted = os.environ.get("AIOCUDA_DRIVER", "auto") or "auto"
    if wanted == "auto" and running_clock() is not None:
        return "simulated"  # in virtual time there is no other
    if wanted not in _NAMES:
        raise InvalidArgumentError(f"AIOCUDA_DRIVER={wanted!r} names no driver; there are {', '.join(_NAMES)}")
    return wanted


async def _opened_driver(which: DriverName | Driver) -> tuple[Driver, bool]:
    """(driver, whether it is ours to close)."""
    if not isinstance(which, str):
        if not callable(getattr(which, "event_query", None)):
            raise InvalidTypeError(f"driver must be a name or a Driver, not {type(which).__name__}")
        return which, False
    name = driver_name(which)
    if name == "simulated":
        from .driver.simulated import SimulatedDriver

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
        Place.of_caller().warn(
            f"no GPU is used, work runs on the host driver: {reason}. driver='host' or AIOCUDA_DRIVER=host says so "
            "without this warning",
            HostDriverWarning,
        )
    from .driver.host import HostDriver

    return HostDriver(), True


def _why_not_cuda() -> str | None:
    from .driver.cuda import _probe

    return _probe.find()


def _cuda() -> Driver:
    from .driver.cuda import CudaDriver

    return CudaDriver.get()


class _Opening:
    """What `open_device` returns: await it, or enter it."""

    __slots__ = (
        *("_asynchronous", "_begun", "_check", "_device", "_index", "_max_in_flight"),
        *("_place", "_policy", "_which", "call", "noun"),
    )

    def __init__(
        self, index: int, which: DriverName | Driver, policy: CompletionPolicy, max_in_flight: int, check: bool,
        asynchronous: bool, place: Place,
    ) -> None:  # fmt: skip
        self._index = index
        self._which = which
        self._policy = policy
        self._max_in_flight = max_in_flight
        self._check = check
        self._asynchronous = asynchronous
        self._place = place
        self._begun = False
        self._device: Device | None = None
        #: What was written to get it, and what it is to become, for messages. `ManagedContext` has words of its own.
        self.call, self.noun = "open_device()", "device"

    def _cure(self) -> str:
        """The two ways to it, for those who have missed both."""
        return f"use `async with aiocuda.{self.call} as {self.noun}`, or `{self.noun} = await aiocuda.{self.call}`"

    async def _open(self) -> Device:
        self._begun = True
        if asyncio._get_running_loop() is None:  # trio's tasks get here, too
            raise NoEventLoopError(
                "a device is opened in asyncio's running event loop: under asyncio.run(main()), or "
                "anyio.run(main, backend='asyncio'); trio's loop is another kind"
            )
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise UnsupportedError("free-threaded Python is not supported yet: run with PYTHON_GIL=1 or a usual build")
        driver, owned = await _opened_driver(self._which)
        try:
            if running_clock() is not None and driver.name != "simulated":
                raise InvalidArgumentError(
                    f"a simulated loop runs in virtual time, and the {driver.name} driver in real time: use "
                    "driver='simulated', or another loop",
                    driver=driver.name,
                )
            count = driver.device_count()
            if self._index >= count:
                raise InvalidArgumentError(
                    f"there is no device {self._index}: the {driver.name} driver has {count}", index=self._index
                )
            properties = await _offload(driver, lambda: driver.device_open(self._index))
            device = Device(
                driver, self._index, properties, self._policy, self._max_in_flight, owned, str(self._place),
                self._asynchronous,
            )  # fmt: skip
            resources = resources_of(device)
            if self._check:
                resources.checker = Checker()
            try:
                resources.loop_state()
            except BaseException:
                resources.mark_closed()  # no caller gets it
                raise
        except BaseException:
            if owned:
                driver.close()
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
        self._begun = True  # it has been told
        raise InvalidTypeError(f"a device is opened by `async with`, not `with`: {self._cure()}")

    def __exit__(self, *exc: object) -> None: ...

    def __del__(self) -> None:
        if not getattr(self, "_begun", True):
            self._place.warn(f"{self.call} was never awaited: {self._cure()}", RuntimeWarning)

    def __repr__(self) -> str:
        return f"<open_device() at {self._place}>"

    if not TYPE_CHECKING:  # a type checker says it by itself

        def __getattr__(self, name: str) -> NoReturn:
            cure = f": {self._cure()}" if hasattr(Device, name) else ""
            if cure:
                self._begun = True  # it has been told
            raise AttributeError(f"what open_device() returns is no device yet and has no {name!r}{cure}", name=name)


def _checks(check: bool | None) -> bool:
    """Are accesses looked at? The environment answers for None."""
    if check is not None:
        return flag(check, "check")
    wanted = os.environ.get("AIOCUDA_CHECK", "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"AIOCUDA_CHECK={wanted!r}: it takes 1 or 0")
    return wanted == "1"


def open_device(
    index: SupportsIndex = 0,
    *,
    driver: DriverName | Driver = "auto",
    policy: PolicyName | CompletionPolicy = "balanced",
    max_in_flight: int = 400,
    check: bool | None = None,
    asynchronous: bool = True,
) -> _Opening:
    """Open a device: ``async with open_device() as device``, or ``await open_device()`` and ``await device.aclose()``.

    Leaving the block waits for the work. By an exception or a cancellation it abandons what is still on the host and
    gives what the device has accepted 5 seconds.

    Parameters
    ----------
    index
        Which of the driver's devices.
    driver
        ``"cuda"``, ``"host"``, ``"simulated"``, or a driver object. ``"auto"`` takes CUDA where there is a GPU, a
        driver and the package; elsewhere the host driver, with one `HostDriverWarning`. A GPU that is there and fails
        raises. ``AIOCUDA_DRIVER`` answers for ``"auto"``.
    policy
        How waits learn that work is done: ``"latency"``, ``"balanced"``, ``"efficient"``, or a `CompletionPolicy`.
    max_in_flight
        Operations of one stream that the device holds at once; more wait on the host.
    check
        Look for accesses to the same memory that nothing puts in order, and warn of them by `UnorderedAccessWarning`
        with both places in your code; `Device.checker` has them all. Each verb of a stream then costs some 20 µs more.
        ``AIOCUDA_CHECK=1`` answers for None.
    asynchronous
        False: every stream of the device is its default stream, and so is what others call by that name. Work goes one
        operation after the other, in the order in which it reaches the device; no stream is made and no notifier, so
        who waits is told by a timer, some 1 ms late. Code stays as it is, and so do results. Priorities mean nothing.

    Raises
    ------
    DriverNotAvailableError
        The driver asked for by name is not there.
    NoEventLoopError
        It is awaited without asyncio's loop, under trio for example.
    """
    try:
        number = operator.index(index)
    except TypeError:
        number = None
    if number is None or isinstance(index, (bool, np.bool_)):
        raise InvalidTypeError(f"a device's index is an integer, not {index!r}")
    if number < 0:
        raise InvalidArgumentError(f"a device's index is not negative, and this is {number}", index=number)
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int):
        raise InvalidTypeError(f"max_in_flight is an integer, not {max_in_flight!r}")
    if max_in_flight < 1:
        raise InvalidArgumentError(f"max_in_flight is at least 1, and this is {max_in_flight}", limit=max_in_flight)
    if not isinstance(asynchronous, bool):
        raise InvalidTypeError(f"asynchronous is True or False, not {asynchronous!r}")
    if isinstance(driver, str):
        driver_name(driver)
    named = CompletionPolicy.named(policy)
    return _Opening(number, driver, named, max_in_flight, _checks(check), asynchronous, Place.of_caller())
