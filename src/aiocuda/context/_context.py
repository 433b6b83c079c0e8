"""ManagedContext: a device, its streams, pool, coordinator and pipelines, as one object. Wiring, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio import _get_running_loop
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, TypeVar, get_args

from .._device import Device
from .._open import DriverName, open_device
from .._types import Priority, ProcessLocal
from ..completion._stream_queue import stream_queue
from ..coordination import AsyncCoordinator
from ..driver.protocol import Driver
from ..errors import ClosedError, InvalidArgumentError
from ..pipeline import Pipeline, Stage, TripleBuffer
from ..pool import StreamPool
from ..stream import Stream
from ._statistics import ContextStatistics
from ._step import StepConfig, StepTelemetry
from ._steps import Steps

__all__ = ["ManagedContext", "Purpose"]

#: What a stream of a context is for.
Purpose: TypeAlias = Literal["upload", "compute", "download", "telemetry", "control"]

#: What is not of normal priority: whoever steers goes first, whoever watches goes last.
_PRIORITIES: dict[str, Priority] = {"control": "high", "telemetry": "low"}

AnyPart = TypeVar("AnyPart", StreamPool, AsyncCoordinator, Pipeline, Steps)


class ManagedContext(ProcessLocal):
    """One object for a device and what works on it: streams by purpose, a pool, a coordinator, pipelines, steps.

    ::

        async with ManagedContext() as context:
            result = await context.stream("compute").upload(array)
            node = context.coordinator.upload(array)
            for noise in noises:
                telemetry = await context.triple_buffered_step(StepConfig({"noise": noise}, compute, ["energy"]))
            rest = await context.flush()

    or ``context = await ManagedContext()`` and ``await context.aclose()``. Parts are made when they are first asked
    for, and end with the context, before its device. It is entered once, and belongs to the loop in which it was.

    Parameters
    ----------
    index, driver
        As `open_device` takes them. A device that is open already is opened once more, on the same driver:
        ``driver=device.driver``, or ``"cuda"``, of which there is one.
    asynchronous
        False: the same awaitables and the same results, one operation after the other on the device's default stream;
        no stream and no notifier is made, see `open_device`. ``AIOCUDA_ASYNC``, 1 or 0, answers for None; it is 1
        unless set.

    Raises
    ------
    InvalidArgumentError
        ``AIOCUDA_ASYNC`` is neither; others as of `open_device`.
    """

    def __init__(
        self,
        index: SupportsIndex = 0,
        *,
        driver: DriverName | Driver = "auto",
        asynchronous: bool | None = None,
    ) -> None:
        self._opening = open_device(index, driver=driver, asynchronous=_is_asynchronous(asynchronous))
        self._opening.call, self._opening.noun = "ManagedContext()", "context"
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it was entered
        self._device: Device | None = None
        self._streams: dict[str, Stream] = {}
        self._pipelines: list[Pipeline] = []
        self._made: list[StreamPool | AsyncCoordinator | Pipeline | Steps] = []
        self._closing = False

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device.

        Raises
        ------
        ClosedError
            The context has not been entered.
        WrongLoopError
            It was, in another event loop.
        """
        device = self._device
        if device is None:
            raise ClosedError("this context is not open: use `async with ManagedContext() as context`")
        if _get_running_loop() not in (self._loop, None):
            raise device._device_state.wrong_loop(self._loop, "this context", "make one in each loop")
        return device

    @cached_property
    def pool(self) -> StreamPool:
        """Streams on loan."""
        return self._part(StreamPool(self.device))

    @cached_property
    def coordinator(self) -> AsyncCoordinator:
        """Operations in order, by what they read and write."""
        return self._part(AsyncCoordinator(self.device))

    @cached_property
    def _steps(self) -> Steps:
        return self._part(Steps(self.device))

    @property
    def triple_buffer(self) -> TripleBuffer:
        """The three slots of `triple_buffered_step`."""
        return self._steps.ring

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Those that `pipeline` has made."""
        return tuple(self._pipelines)

    def pipeline(
        self, stages: Sequence[Stage], depth: int = 3, *, streams: Sequence[Sequence[str]] | None = None,
        replay: bool | Sequence[str] = False,
    ) -> Pipeline:  # fmt: skip
        """A `Pipeline` on the device, which ends with the context."""
        made = self._part(Pipeline(self.device, stages, depth, streams=streams, replay=replay))
        self._pipelines.append(made)
        return made

    def stream(self, purpose: Purpose) -> Stream:
        """The stream for a purpose: ``"upload"``, ``"compute"``, ``"download"``, ``"telemetry"`` or ``"control"``.

        The program's own: parts have streams of their own. ``control`` has high priority, ``telemetry`` low.
        """
        device = self.device
        if not isinstance(purpose, str) or purpose not in get_args(Purpose):
            raise InvalidArgumentError(f"a stream is for {', '.join(get_args(Purpose))}, and not for {purpose!r}")
        self._check_open(device)
        stream = self._streams.get(purpose)
        if stream is None or stream.closed:
            stream = self._streams[purpose] = device.stream(_PRIORITIES.get(purpose, "normal"), purpose)
        return stream

    @cached_property
    def _parts(self) -> contextlib.AsyncExitStack:
        """What ends with the context, the device last. Nothing needs it before there is a part, or the end."""
        parts = contextlib.AsyncExitStack()
        assert self._device is not None  # there is no part before it
        parts.push_async_exit(self._device)
        return parts

    def _part(self, part: AnyPart) -> AnyPart:
        self._check_open(self.device)
        self._parts.push_async_exit(part)
        self._made.append(part)
        return part

    def _check_open(self, device: Device) -> None:
        if self._closing or device.closed:
            raise ClosedError("this context has been closed: make another one by ManagedContext()")

    def _refuse(self) -> None:
        """Refuse new work in all parts at once; each of them is closed in its turn."""
        self._closing = True
        for part in self._made:
            part._refuse()
        for stream in self._streams.values():
            if not stream.closed:
                stream_queue(stream).refuse(draining=True)

    # -- steps ---------------------------------------------------------------------------------------------------

    async def triple_buffered_step(self, config: StepConfig) -> StepTelemetry | None:
        """Begin a step, and return the telemetry of the step before the last; None for the first two.

        While this one is uploaded, the last one is computed and the one before it downloaded: three are under way, each
        with a slot of `triple_buffer`, and a call waits for the oldest. Calls from several tasks take turns.

        A call that is cancelled has begun its step if there was a slot for it. No telemetry is lost by that: the next
        call returns it, and is one step later from then on, until `flush`.

        Raises
        ------
        BaseException
            What the step before the last failed with, as it was raised, and never in a group; a note names the stage,
            and the step as item. The steps behind it may stand on what it was to compute: they end, and are not told
            of. What they have failed with by themselves is added as notes, and is not raised again, neither by `flush`
            nor by `aclose`. The next step goes on with the next number.
        ClosedError
            The step was dropped, by `reset_pipeline` or the context's end.
        """
        return await self._steps.step(config)

    async def flush(self) -> list[StepTelemetry]:
        """Wait for all steps under way; their telemetry, in order.

        If one of them has failed, this returns the telemetry of those before it, and the next call raises, as
        `triple_buffered_step` does.
        """
        return await self._steps.flush()

    async def reset_pipeline(self) -> None:
        """Drop the steps under way and the buffers of their slots; the next step has number 0.

        What the device was given it finishes first: this waits for it, up to `Device.drain_timeout`.
        """
        await self._steps.reset()

    # -- what is known, and the end ------------------------------------------------------------------------------

    def statistics(self) -> ContextStatistics:
        """A snapshot of what all parts say."""
        device, made = self.device, self.__dict__
        counts = device.statistics()
        return ContextStatistics(
            driver=device.driver.name,
            asynchronous=device.asynchronous,
            streams_created=counts.streams_created,
            device=counts,
            pool=self.pool.statistics() if "pool" in made else None,
            coordinator=self.coordinator.statistics() if "coordinator" in made else None,
            steps=self._steps.statistics() if "_steps" in made else None,
            pipelines=tuple(pipeline.statistics() for pipeline in self._pipelines),
        )

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for all work that was accepted, end all parts, then the device.

        Raises what a part failed with and no task was told of.
        """
        if self._device is not None:
            await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ClosedError("this context has been entered before: make another one by ManagedContext()")
        self._loop = asyncio.get_running_loop()
        try:
            self._device = await self._opening
        except BaseException:
            self._loop = None
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:  # noqa: PYI036 - passed on as it is
        self._refuse()
        if exc[0] is not None and not self.device.closed:
            self.device._patience.begin()
        await self._parts.__aexit__(*exc)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __repr__(self) -> str:
        if self._device is None:
            return "<ManagedContext, not open>"
        mode = "asynchronous" if self._device.asynchronous else "synchronous"
        return f"<ManagedContext on {self._device!r}, {mode}>"


def _is_asynchronous(asked: bool | None) -> bool:
    """The mode; the environment answers for None."""
    if asked is not None:
        return asked  # what it is, `open_device` looks at
    wanted = os.environ.get("AIOCUDA_ASYNC", "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"AIOCUDA_ASYNC={wanted!r}: it takes 1, for asynchronous, or 0")
    return wanted != "0"
