"""StepRunner: runs the steps of a context as items of a pipeline, three at a time."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Iterable
from typing import Any, Self

import numpy.typing as npt

from .._device import Device
from .._device_resources import resources_of
from .._event import Event
from .._shutdown import end_tasks, finish_shielded
from ..completion._operation import Operation
from ..errors import ClosedError, DeviceFault, InvalidTypeError, SkippedError
from ..pipeline import Pipeline, PipelineStats, Slot, Stage, TripleBuffer
from ..pipeline._failures import root_failure
from ._step import StepConfig, StepTelemetry

__all__ = ["StepRunner"]

#: Steps that run at the same time: one is uploaded, one computed, one downloaded.
DEPTH = 3


class Step:
    """One step, as the item of a slot.

    Attributes
    ----------
    number : int
    config : StepConfig
    timing_events : dict of str to tuple of Event
        Two timing events around the work of each stage, by the stage's name.
    """

    __slots__ = ("config", "number", "timing_events")

    def __init__(self, number: int, config: StepConfig) -> None:
        self.number = number
        self.config = config
        self.timing_events: dict[str, tuple[Event, Event]] = {}

    def telemetry(self, arrays: Iterable[npt.NDArray[Any]]) -> StepTelemetry:
        """Return the telemetry of the finished step, with its downloaded arrays."""
        outputs = dict(zip(self.config.download, arrays, strict=True))
        stage_ms = {stage: start.elapsed_ms(end) for stage, (start, end) in self.timing_events.items()}
        return StepTelemetry(self.number, outputs, stage_ms)


# -- the stages of a step --------------------------------------------------------------------------------------------


def _upload(slot: Slot) -> list[Any]:
    """Copy every input into the slot's buffer of its name."""
    step, stream = slot.item, slot.stream
    start = stream.record(timing=True)
    copies = [
        stream.copy(slot.buffer(name, array.shape, array.dtype), array) for name, array in step.config.upload.items()
    ]
    step.timing_events["upload"] = start, stream.record(timing=True)
    return copies


def _compute(slot: Slot) -> list[Any]:
    """Call the program's functions. The stage checks that they return operations."""
    step, stream = slot.item, slot.stream
    start = stream.record(timing=True)
    returned: list[Any] = []
    for function in step.config.compute:
        value = function(slot)
        if value is not None:
            returned += value if isinstance(value, (list, tuple)) else (value,)
    step.timing_events["compute"] = start, stream.record(timing=True)
    return returned


def _download(slot: Slot) -> list[Operation[npt.NDArray[Any]]]:
    """Download every output into a new array."""
    step, stream = slot.item, slot.stream
    start = stream.record(timing=True)
    downloads = [stream.download(slot.buffer(name)) for name in step.config.download]
    step.timing_events["download"] = start, stream.record(timing=True)
    return downloads


# -- running ---------------------------------------------------------------------------------------------------------


class StepTask:
    """The task that runs a step.

    Attributes
    ----------
    number : int
        The step's number.
    task : asyncio.Task
    ended : asyncio.Event
        Set when the task has ended, or the step was dropped; then the task may still run.
    """

    __slots__ = ("ended", "number", "task")

    def __init__(self, pipeline: Pipeline, number: int, config: StepConfig) -> None:
        self.number = number
        self.ended = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(_run(pipeline, Step(number, config)))
        self.task.add_done_callback(lambda task: self.ended.set())

    @property
    def failure(self) -> BaseException | None:
        """The exception that the step failed with; None if it has not failed or not ended."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return ClosedError(f"step {self.number} was cancelled")
        error = self.task.exception()
        return root_failure(error) if isinstance(error, Exception) else error


async def _run(pipeline: Pipeline, step: Step) -> StepTelemetry:
    return step.telemetry(await pipeline.execute_iteration(step))


class StepRunner:
    """Runs the steps of one context, three at a time. It returns their telemetry in order, each once.

    If a step fails, the later steps that have begun are dropped, because they may depend on its results. Its exception
    is raised; failures of their own are added to it as notes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[StepTask] = []  # in order; each until its telemetry is returned
        self._lock = asyncio.Lock()  # held by the call that waits for the oldest step
        self._pipeline: Pipeline | None = None
        self._begun = 0
        self._closing = False  # no step begins any more
        self._closed = False

    @property
    def ring(self) -> TripleBuffer:
        """The slots."""
        return (self._pipeline or self._opened()).ring

    def statistics(self) -> PipelineStats | None:
        """Return the pipeline's statistics; None before the first step."""
        return None if self._pipeline is None else self._pipeline.statistics()

    async def step(self, config: StepConfig) -> StepTelemetry | None:
        """Begin a step, and return the telemetry of the step before the last.

        After a cancelled call, the next call returns the telemetry that it would have returned.
        """
        if not isinstance(config, StepConfig):
            raise InvalidTypeError(f"a step is described by an aiocuda.StepConfig, not {type(config).__name__}")
        async with self._lock:
            if len(self._running) == DEPTH:  # an earlier call was cancelled
                await self._wait_for_oldest(self._running[0])
            pipeline = self._opened()
            if not self._begun:
                await pipeline.__aenter__()  # it keeps the streams open between steps
            self._running.append(StepTask(pipeline, self._begun, config))
            self._begun += 1
            if len(self._running) < DEPTH:
                await asyncio.sleep(0)  # the step's task enqueues its work
                return None
            oldest = self._running[0]
            await self._wait_for_oldest(oldest)
            return self._take_telemetry(oldest)

    async def flush(self) -> list[StepTelemetry]:
        """Wait for all steps, and return their telemetry.

        If a step fails, return the telemetry of those before it; the next call raises the failure.
        """
        async with self._lock:
            steps = list(self._running)
            if self._closed:
                raise ClosedError("the context has been closed, and its steps with it")
            for step in steps:
                await step.ended.wait()
                if step.failure is not None:
                    break
            if steps:
                await self._wait_for_oldest(steps[0])
            succeeded = itertools.takewhile(lambda step: step.task.done() and step.failure is None, steps)
            return [self._take_telemetry(step) for step in succeeded]

    async def reset(self) -> None:
        """Drop the steps that have begun, wait until no work of them runs, and restart with step 0."""
        steps, self._running = self._running, []
        pipeline, self._pipeline = self._pipeline, None
        self._begun = 0
        for step in steps:
            step.ended.set()
        if pipeline is not None:
            await finish_shielded(_end_dropped(steps, pipeline))

    def _refuse(self) -> None:
        """Accept no more steps."""
        self._closing = True

    async def aclose(self) -> None:
        """Accept no more steps, wait for those that have begun, and raise the failures that no call has raised."""
        self._refuse()
        try:
            while await self.flush():
                continue
        finally:
            self._closed = True
            await self.reset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            self._closing = self._closed = True
            await self.reset()

    def _opened(self) -> Pipeline:
        """Return the pipeline; the first call makes it."""
        if self._closing:
            raise ClosedError("the context has been closed: no step begins any more")
        if self._pipeline is None:
            stages = [Stage("upload", _upload), Stage("compute", _compute), Stage("download", _download)]
            self._pipeline = Pipeline(self._device, stages, DEPTH)
        return self._pipeline

    async def _wait_for_oldest(self, step: StepTask) -> None:
        """Wait for the oldest step. If it has failed, wait for the later steps, too, and raise its failure."""
        await step.ended.wait()
        self._check_is_oldest(step)
        error = step.failure
        if error is None:
            return
        later, self._running = self._running[1:], []
        try:
            await finish_shielded(_add_later_failures(error, later, resources_of(self._device).deadline.left()))
        except asyncio.CancelledError:
            _report("failed whose caller was cancelled", error)
            raise
        raise error from error.__cause__

    def _take_telemetry(self, step: StepTask) -> StepTelemetry:
        """Return the telemetry of the oldest step, which has ended."""
        self._check_is_oldest(step)
        del self._running[0]
        return step.task.result()

    def _check_is_oldest(self, step: StepTask) -> None:
        if not self._running or step is not self._running[0]:
            raise ClosedError(f"step {step.number} was dropped, by reset_pipeline() or the context's end")


async def _end_dropped(steps: list[StepTask], pipeline: Pipeline) -> None:
    """End steps that were dropped, close the pipeline, and report the failures, which no call raises."""
    failures = await _settle(steps, 0.0)
    await pipeline.aclose()
    # Every operation fails with a device's fault, or with the end of the device: those are raised elsewhere.
    own = [each for each in failures if not isinstance(each[1], (ClosedError, DeviceFault, SkippedError))]
    if own:
        _add_notes(own[0][1], own[1:])
        _report("failed after it had been dropped", own[0][1])


async def _add_later_failures(failure: BaseException, steps: list[StepTask], seconds: float) -> None:
    """Wait until the steps after a failed step have ended, and add their failures to its failure as notes."""
    _add_notes(failure, await _settle(steps, seconds))


async def _settle(steps: list[StepTask], seconds: float) -> list[tuple[int, BaseException]]:
    """Wait until steps have ended, and return the numbers and the failures of those that failed by themselves.

    After so many seconds they are cancelled; the pipeline limits how long they take to end then.
    """
    await end_tasks([step.task for step in steps], seconds)
    failures = [(step.number, step.failure) for step in steps if not step.task.cancelled()]
    return [(number, failure) for number, failure in failures if failure is not None]


def _add_notes(failure: BaseException, others: list[tuple[int, BaseException]]) -> None:
    """Add the failures of other steps as notes, without skipped steps and without the same device fault."""
    for number, other in others:
        is_same_fault = isinstance(other, DeviceFault) and isinstance(failure, DeviceFault)
        if other is not failure and not isinstance(other, SkippedError) and not is_same_fault:
            description = "".join(traceback.format_exception_only(other)).rstrip()
            failure.add_note(f"step {number}, which began after it, has failed, too: {description}")


def _report(what: str, failure: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": f"aiocuda: a step {what}", "exception": failure})
