"""ManagedContext: a device, its streams, pool, coordinator and pipelines, as one object."""

from __future__ import annotations

import os
from asyncio import _get_running_loop
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, SupportsIndex, TypeAlias, TypeVar, get_args

from .._base._mistakes import figures, keywords, lacks
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import finish_shielded, unlimited
from .._base._statistics import DeviceStatistics
from .._base._types import Priority
from ..coordination import AsyncCoordinator, CoordinatorStatistics
from ..device import Device, open_device
from ..driver import DriverName
from ..driver.protocol import Driver
from ..errors import ClosedError, InvalidArgumentError
from ..lowlevel import owned, queue_of, resources_of
from ..pipeline import Pipeline, PipelineStats, Stage, TripleBuffer
from ..pool import StreamPool, StreamPoolStatistics
from ..stream import Stream
from ._steps import StepConfig, StepRunner, StepTelemetry

__all__ = ["ContextStatistics", "ManagedContext", "Purpose"]

#: The purpose of a stream of a context.
Purpose: TypeAlias = Literal["upload", "compute", "download", "telemetry", "control"]

#: Streams of other purposes have normal priority.
_PRIORITIES: dict[str, Priority] = {"control": "high", "telemetry": "low"}

AnyPart = TypeVar("AnyPart", StreamPool, AsyncCoordinator, Pipeline, StepRunner)


@figures
class ContextStatistics(NamedTuple):
    """A snapshot of the statistics of a context and its parts.

    Attributes
    ----------
    driver
        ``"cuda"``, ``"host"`` or ``"simulated"``.
    asynchronous
        The mode.
    streams_created
        Streams that the driver has created since the context was entered, by the driver's count; it includes streams
        of other users of the same driver. 0 in synchronous mode. It does not include the streams that are made
        ahead when a device is opened, and the notifiers' streams: programs cannot enqueue on them.
    device
        The device's statistics since the context was entered.
    pool, coordinator
        Their statistics; None if the program has not used them.
    steps
        Statistics of the pipeline of `ManagedContext.triple_buffered_step`; None before the first step.
    pipelines
        Statistics of the pipelines that `ManagedContext.pipeline` has made, in that order.
    """

    driver: str
    asynchronous: bool
    streams_created: int
    device: DeviceStatistics
    pool: StreamPoolStatistics | None
    coordinator: CoordinatorStatistics | None
    steps: PipelineStats | None
    pipelines: tuple[PipelineStats, ...]


@lacks
class ManagedContext(Owner):
    """One object for a device and its parts: streams by purpose, a pool, a coordinator, pipelines, steps.

    ::

        async with ManagedContext() as context:
            result = await context.stream("compute").upload(array)
            node = context.coordinator.upload(array)
            for noise in noises:
                telemetry = await context.triple_buffered_step(StepConfig({"noise": noise}, compute, ["energy"]))
            rest = await context.flush()

    or ``context = await ManagedContext()`` and ``await context.aclose()``. A part is made at its first use, and closed
    with the context, before the device. A context is entered once, and belongs to the event loop of that moment.

    Parameters
    ----------
    index, driver
        As in `open_device`. A device that is open already is opened once more, on the same driver:
        ``driver=device.driver``, or ``"cuda"``, of which there is one.
    asynchronous
        False gives the same awaitables and the same results, one operation after the other on the device's default
        stream; no stream and no notifier is made, see `open_device`. None takes the mode from the environment variable
        ``AIOCUDA_ASYNC``, 1 or 0; the default is 1.

    Raises
    ------
    InvalidArgumentError
        ``AIOCUDA_ASYNC`` is neither 0 nor 1; also as in `open_device`.
    """

    @keywords(
        "ManagedContext takes the index of a device, driver= and asynchronous=",
        device="it opens the device: ManagedContext(0), and context.device is the device",
    )
    def __init__(
        self, index: SupportsIndex = 0, *, driver: DriverName | Driver = "auto", asynchronous: bool | None = None
    ) -> None:
        asynchronous = _is_asynchronous(asynchronous)
        opening = open_device(index, driver=driver, asynchronous=asynchronous)
        self._asynchronous = bool(asynchronous)
        self._opening = opening.called("ManagedContext()", "context")
        self._scope = Scope(
            "this context", "make one in each loop", "make another one by ManagedContext()",
            drain_seconds=unlimited,
        )  # fmt: skip
        self._device: Device | None = None
        self._streams: dict[str, Stream] = {}
        self._parts: list[StreamPool | AsyncCoordinator | Pipeline | StepRunner] = []

    @property
    def asynchronous(self) -> bool:
        """The mode, known before the entry: False if all work runs one after the other, on the default stream."""
        return self._asynchronous

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device.

        Raises
        ------
        ClosedError
            The context has not been entered.
        WrongLoopError
            It was entered in another event loop.
        """
        device = self._device
        if device is None:
            raise ClosedError("this context is not open: use `async with ManagedContext() as context`")
        if _get_running_loop() not in (self._scope.loop, None):
            raise self._scope.wrong_loop()
        return device

    @cached_property
    def pool(self) -> StreamPool:
        """The pool, which lends streams."""
        return self._part(StreamPool(self.device))

    @cached_property
    def coordinator(self) -> AsyncCoordinator:
        """The coordinator, which orders operations by the buffers that they read and write."""
        return self._part(AsyncCoordinator(self.device))

    @cached_property
    def _step_runner(self) -> StepRunner:
        return self._part(StepRunner(self.device))

    @property
    def triple_buffer(self) -> TripleBuffer:
        """The three slots of `triple_buffered_step`."""
        return self._step_runner.ring

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that `pipeline` has made. Making one forgets those that have been closed."""
        return tuple(part for part in self._parts if isinstance(part, Pipeline))

    def pipeline(
        self, stages: Sequence[Stage], depth: int = 3, *, streams: Sequence[Sequence[str]] | None = None,
        replay: bool | Sequence[str] = False,
    ) -> Pipeline:  # fmt: skip
        """Return a new `Pipeline` on the device. The context closes it."""
        return self._part(Pipeline(self.device, stages, depth, streams=streams, replay=replay))

    def stream(self, purpose: Purpose) -> Stream:
        """Return the stream for a purpose: ``"upload"``, ``"compute"``, ``"download"``, ``"telemetry"``, ``"control"``.

        These streams are for the program: the parts have streams of their own. ``control`` has high priority,
        ``telemetry`` low priority.
        """
        device = self.device
        if not isinstance(purpose, str) or purpose not in get_args(Purpose):
            raise InvalidArgumentError(f"a stream is for {', '.join(get_args(Purpose))}, and not for {purpose!r}")
        self._check_open(device)
        if purpose not in self._streams or self._streams[purpose].closed:
            stream = device.stream(_PRIORITIES.get(purpose, "normal"), purpose)
            self._streams[purpose] = owned(stream)
        return self._streams[purpose]

    def _part(self, part: AnyPart) -> AnyPart:
        self._check_open(self.device)
        self._scope.adopt(part, part._scope)
        self._parts = [*(known for known in self._parts if not known._scope.closed), part]
        return part

    def _check_open(self, device: Device) -> None:
        if self._scope.closing or device.closed:
            raise self._scope.closed_error()

    def _refuse(self) -> None:
        for stream in self._streams.values():
            if not stream.closed:
                resources_of(self._device).streams.refuse_but_accepted(queue_of(stream))

    # -- steps ---------------------------------------------------------------------------------------------------

    async def triple_buffered_step(self, config: StepConfig) -> StepTelemetry | None:
        """Begin a step, and return the telemetry of the step before the last; None for the first two steps.

        While this step is uploaded, the last one is computed and the one before it downloaded. Each of the three has a
        slot of `triple_buffer`. The call waits for the oldest step. Calls from several tasks take turns.

        A cancelled call has begun its step if there was a slot for it. No telemetry is lost: the next call returns it,
        and from then on calls return telemetry one step later than before, until `flush`.

        Raises
        ------
        BaseException
            The failure of the step before the last, as the step raised it, never in a group; a note names the stage,
            and the step as item. The two steps after it may depend on its results, so they end without telemetry. Their
            own failures are added as notes; neither `flush` nor `aclose` raises them again. The next step has the next
            number.
        ClosedError
            `reset_pipeline` or the end of the context has dropped the step.
        """
        return await self._step_runner.step(config)

    async def flush(self) -> list[StepTelemetry]:
        """Wait for all steps that have begun, and return their telemetry in order.

        If a step has failed, return the telemetry of the steps before it; the next call raises the failure, as
        `triple_buffered_step` does.
        """
        return await self._step_runner.flush()

    async def reset_pipeline(self) -> None:
        """Drop the steps that have begun, and the buffers of their slots; the next step has number 0.

        This waits until the device has finished their work, up to `Device.drain_timeout`.
        """
        await self._step_runner.reset()

    # -- waiting, statistics and the end -------------------------------------------------------------------------

    async def synchronize(self) -> None:
        """Wait for all work of this loop on the device, failed or not.

        This is the work of all streams of the device, also of those outside of the context, the operations of
        `coordinator`, and the steps that have begun; their telemetry is kept for the next calls. Failures are not
        raised here, but by awaiting the operations. Work that other tasks enqueue meanwhile may still run.

        Raises
        ------
        ClosedError
            The context has not been entered, or has been closed.
        WrongLoopError
            It was entered in another event loop.
        """
        device, made = self.device, self.__dict__
        self._check_open(device)
        if "_step_runner" in made:
            await self._step_runner.wait_for_steps()
        if "coordinator" in made:
            await self.coordinator.drain()
        await device.drain()

    def statistics(self) -> ContextStatistics:
        """Return a snapshot of the statistics of the device and all parts."""
        device, made = self.device, self.__dict__
        counts = device.statistics()
        return ContextStatistics(
            driver=device.driver.name,
            asynchronous=device.asynchronous,
            streams_created=counts.streams_created,
            device=counts,
            pool=self.pool.statistics() if "pool" in made else None,
            coordinator=self.coordinator.statistics() if "coordinator" in made else None,
            steps=self._step_runner.statistics() if "_step_runner" in made else None,
            pipelines=tuple(pipeline.statistics() for pipeline in self.pipelines),
        )

    async def aclose(self) -> None:
        """Refuse new work with `ClosedError`, wait for all accepted work, close all parts, then the device.

        A failure of a part that no call has raised is raised here. A second call waits for the same end.

        Raises
        ------
        WrongLoopError
            The context was entered in another event loop. The call changes nothing.
        """
        await self._end(None)

    def _withdraw(self) -> None:
        resources_of(self._device).deadline.begin()

    async def _drain(self) -> None:
        """Do nothing: the device waits for the streams of the context."""

    async def _release(self, outcome: Outcome) -> None:
        """Do nothing: the device has been closed, as the first child."""

    async def __aenter__(self) -> Self:
        if self._scope.entered:
            raise ClosedError("this context has been entered before: make another one by ManagedContext()")
        with self._scope.entering():
            device = await self._opening
        if self._scope.closing:
            await finish_shielded(device.aclose())
            raise ClosedError("this context was closed while it was being opened: make another one")
        self._device = device
        self._scope.adopt(self._device, self._device._scope)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *exc: object) -> None:
        await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        if self._device is None:
            if self._scope.entered:
                self._scope.check_loop()
                self._scope.refuse(self)  # `__aenter__` closes the device when it is open
            return
        loop = self._scope.loop
        if loop is not None and loop.is_closed():  # the device can still be closed
            self._scope.unbind()
        await self._scope.exit(self, None if error is None else type(error), error)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __repr__(self) -> str:
        if self._device is None:
            return "<ManagedContext, not open>"
        mode = "asynchronous" if self._asynchronous else "synchronous"
        return f"<ManagedContext on {self._device!r}, {mode}>"


def _is_asynchronous(asked: bool | None) -> bool:
    """Return the mode; for None, that of the environment."""
    if asked is not None:
        return asked  # `open_device` checks its type
    wanted = os.environ.get("AIOCUDA_ASYNC", "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"AIOCUDA_ASYNC={wanted!r}: it takes 1, for asynchronous, or 0")
    return wanted != "0"
