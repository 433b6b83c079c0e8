"""Steps: a pipeline whose caller is told of a step when the next but one has begun."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from typing import Self

from .._device import Device
from .._shutdown import all_ended, to_the_end
from ..errors import ClosedError, DeviceFault, InvalidTypeError, SkippedError
from ..pipeline import Pipeline, PipelineStats, Stage, TripleBuffer
from ..pipeline._failures import root_failure
from ._step import Step, StepConfig, StepTelemetry

__all__ = ["Steps"]

#: Steps under way at once: one is uploaded, one computed, one downloaded.
DEPTH = 3


class _UnderWay:
    """A step and the task that has it."""

    __slots__ = ("number", "over", "task")

    def __init__(self, pipeline: Pipeline, number: int, config: StepConfig) -> None:
        self.number = number
        self.over = asyncio.Event()  # it has finished, or was dropped and may still run
        self.task = asyncio.get_running_loop().create_task(_carried(pipeline, Step(number, config)))
        self.task.add_done_callback(lambda task: self.over.set())

    @property
    def failure(self) -> BaseException | None:
        """What it failed with; None while it has not finished."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return ClosedError(f"step {self.number} was cancelled")
        error = self.task.exception()
        return root_failure(error) if isinstance(error, Exception) else error


async def _carried(pipeline: Pipeline, step: Step) -> StepTelemetry:
    return step.told(await pipeline.execute_iteration(step))


class Steps:
    """Steps of one context, three of them under way, told of in order, each once.

    A step that fails takes those behind it along: they may stand on what it was to compute. Its own exception is
    raised, with what they have failed with by themselves as notes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._under_way: list[_UnderWay] = []  # in order
        self._turn = asyncio.Lock()  # who waits for the oldest one
        self._pipeline: Pipeline | None = None
        self._begun = 0
        self._closing = False  # no step begins any more
        self._closed = False

    @property
    def ring(self) -> TripleBuffer:
        """The slots."""
        return (self._pipeline or self._made()).ring

    def statistics(self) -> PipelineStats | None:
        """The pipeline's; None before there is one."""
        return None if self._pipeline is None else self._pipeline.statistics()

    async def step(self, config: StepConfig) -> StepTelemetry | None:
        """Begin one, and be told of the one before the last. Who is cancelled leaves that to the next call."""
        if not isinstance(config, StepConfig):
            raise InvalidTypeError(f"a step is said by an aiocuda.StepConfig, not {type(config).__name__}")
        async with self._turn:
            if len(self._under_way) == DEPTH:  # an earlier call was cancelled
                await self._finished(self._under_way[0])
            pipeline = self._made()
            if not self._begun:
                await pipeline.__aenter__()  # its streams stay open between steps
            self._under_way.append(_UnderWay(pipeline, self._begun, config))
            self._begun += 1
            if len(self._under_way) < DEPTH:
                await asyncio.sleep(0)  # its task enqueues it
                return None
            oldest = self._under_way[0]
            await self._finished(oldest)
            return self._told(oldest)

    async def flush(self) -> list[StepTelemetry]:
        """Be told of all others. A failure waits until those before it have been told of."""
        async with self._turn:
            steps = list(self._under_way)
            if self._closed:
                raise ClosedError("the context has been closed, and its steps with it")
            for step in steps:
                await step.over.wait()
                if step.failure is not None:
                    break
            if steps:
                await self._finished(steps[0])
            good = itertools.takewhile(lambda step: step.task.done() and step.failure is None, steps)
            return [self._told(step) for step in good]

    async def reset(self) -> None:
        """Drop what is under way, wait until nothing of it runs, and begin with step 0."""
        steps, self._under_way = self._under_way, []
        pipeline, self._pipeline = self._pipeline, None
        self._begun = 0
        for step in steps:
            step.over.set()
        if pipeline is not None:
            await to_the_end(_end(steps, pipeline))

    def _refuse(self) -> None:
        """Begin no step any more."""
        self._closing = True

    async def aclose(self) -> None:
        """Begin no step any more, wait for all of them, and raise what nobody was told of."""
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

    def _made(self) -> Pipeline:
        if self._closing:
            raise ClosedError("the context has been closed: no step begins any more")
        if self._pipeline is None:
            stages = [Stage("upload", Step.upload), Stage("compute", Step.compute), Stage("download", Step.download)]
            self._pipeline = Pipeline(self._device, stages, DEPTH)
        return self._pipeline

    async def _finished(self, step: _UnderWay) -> None:
        """Wait for the oldest step. If it has failed, wait for those behind it, and raise its failure."""
        await step.over.wait()
        self._check_under_way(step)
        error = step.failure
        if error is None:
            return
        behind, self._under_way = self._under_way[1:], []
        try:
            await to_the_end(_end_behind(error, behind, self._device._patience.left()))
        except asyncio.CancelledError:
            _report("failed whose caller was cancelled", error)
            raise
        raise error from error.__cause__

    def _told(self, step: _UnderWay) -> StepTelemetry:
        """It is the oldest, and done."""
        self._check_under_way(step)
        del self._under_way[0]
        return step.task.result()

    def _check_under_way(self, step: _UnderWay) -> None:
        if not self._under_way or step is not self._under_way[0]:
            raise ClosedError(f"step {step.number} was dropped, by reset_pipeline() or the context's end")


async def _end(steps: list[_UnderWay], pipeline: Pipeline) -> None:
    """They have been dropped: nobody asks for what they fail with."""
    failed = await _settled(steps, 0.0)
    await pipeline.aclose()
    # A fault, and the end of the device, everybody is told of.
    own = [one for one in failed if not isinstance(one[1], (ClosedError, DeviceFault, SkippedError))]
    if own:
        _note_others(own[0][1], own[1:])
        _report("failed after it had been dropped", own[0][1])


async def _end_behind(failure: BaseException, steps: list[_UnderWay], patience: float) -> None:
    """A step has failed: wait until those behind it have ended, and add their failures as notes."""
    _note_others(failure, await _settled(steps, patience))


async def _settled(steps: list[_UnderWay], patience: float) -> list[tuple[int, BaseException]]:
    """Wait until steps have ended: by themselves, for so many seconds, then by cancellation, which a pipeline bounds.

    The numbers of those that failed by themselves, and what they failed with.
    """
    await all_ended([step.task for step in steps], patience)
    failed = [(step.number, step.failure) for step in steps if not step.task.cancelled()]
    return [(number, failure) for number, failure in failed if failure is not None]


def _note_others(failure: BaseException, others: list[tuple[int, BaseException]]) -> None:
    """Add the failures of other steps as notes. What was skipped did nothing wrong, and a fault is one failure."""
    for number, other in others:
        if other is not failure and not isinstance(other, SkippedError) and not _same_fault(other, failure):
            failure.add_note(f"step {number}, which was under way behind it, has failed, too: {_described(other)}")


def _same_fault(one: BaseException, other: BaseException) -> bool:
    """Every operation of a device that has faulted fails with its fault."""
    return isinstance(one, DeviceFault) and isinstance(other, DeviceFault)


def _described(error: BaseException) -> str:
    """What a traceback says of it at its end."""
    return "".join(traceback.format_exception_only(error)).rstrip()


def _report(what: str, failure: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": f"aiocuda: a step {what}", "exception": failure})
