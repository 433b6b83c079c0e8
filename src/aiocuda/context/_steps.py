"""The steps of a context: their configuration and telemetry, and the runner, which runs three at a time."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import numpy.typing as npt

from .._base._checks import is_coroutine_function, is_function, several
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import end_tasks, finish_shielded
from .._base._tasks import start_task
from ..completion import Operation
from ..device import Device, Event
from ..errors import ClosedError, DeviceFault, InvalidArgumentError, InvalidTypeError, SkippedError
from ..lowlevel import as_source, resources_of
from ..pipeline import Pipeline, PipelineStats, Slot, Stage, TripleBuffer, root_failure

__all__ = ["StepConfig", "StepRunner", "StepTelemetry"]

#: A `Launch`, or a function that enqueues work on ``slot.stream`` and returns the operations.
Compute: TypeAlias = Callable[[Slot], Any]

#: Steps that run at the same time: one is uploaded, one computed, one downloaded.
DEPTH = 3


class StepConfig:
    """One step of `ManagedContext.triple_buffered_step`: its uploads, its computation, its downloads.

    Inputs and outputs are buffers of the step's slot: three steps at a time have three of each. Data that lasts from
    step to step is in buffers of the program, which ``compute`` uses: all steps compute in one stream, in order.

    ::

        def compute(slot):
            slot.stream.launch(relax, grid, block, field, slot.buffer("noise"), n)
            return slot.stream.launch(energy, 1, block, field, slot.buffer("energy", 1), n)

        config = StepConfig(upload={"noise": noise}, compute=compute, download=["energy"])

    Parameters
    ----------
    upload
        Arrays by name, as `Stream.upload` takes them. Each is copied to the slot's buffer of that name. They are
        borrowed until the step's telemetry is returned.
    compute
        A function of the `Slot`, or several functions in order. It enqueues work on ``slot.stream`` and returns the
        operation, several operations, or None. An `aiocuda.pipeline.Launch` is such a function.
    download
        Names of the slot's buffers to download into new arrays.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A name that is no string; an array that cannot be uploaded; an object that is not callable; a coroutine
        function.
    """

    __slots__ = ("compute", "download", "upload")

    def __init__(
        self,
        upload: Mapping[str, Any] | None = None,
        compute: Compute | Iterable[Compute] = (),
        download: Iterable[str] = (),
    ) -> None:
        given = {} if upload is None else upload
        if not isinstance(given, Mapping):
            raise InvalidTypeError(f"upload maps names to arrays, not {type(given).__name__}")
        self.upload: dict[str, npt.NDArray[Any]] = {_name(name): as_source(array) for name, array in given.items()}
        self.compute: tuple[Compute, ...] = _functions(compute)
        self.download = tuple(dict.fromkeys(map(_name, several(download, "download is a sequence of names"))))

    def __repr__(self) -> str:
        up, down = (", ".join(names) or "nothing" for names in (self.upload, self.download))
        return f"<StepConfig {up} → {len(self.compute)} functions → {down}>"


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
    return name


def _functions(compute: Compute | Iterable[Compute]) -> tuple[Compute, ...]:
    functions: tuple[Any, ...] = (compute,)
    if not callable(compute) and isinstance(compute, Iterable):
        functions = tuple(several(compute, "compute is a function of a slot, or several"))
    for function in functions:
        if not is_function(function):
            raise InvalidTypeError(
                f"compute is a function of a slot, or several, and {function!r} is none: a kernel is launched by "
                "aiocuda.pipeline.Launch(kernel, grid, block, …), or in a function by slot.stream.launch(…)"
            )
        if is_coroutine_function(function):
            raise InvalidArgumentError(
                f"compute enqueues, and {function!r} is a coroutine function: await before the step, or make a "
                "pipeline with a stage that awaits"
            )
    return functions


class StepTelemetry(NamedTuple):
    """The result of a finished step.

    Attributes
    ----------
    step
        The step's number, from 0, since the context was entered or since `ManagedContext.reset_pipeline`.
    outputs
        The downloaded arrays, by name. They are new for each step.
    stage_ms
        Milliseconds of device time of ``"upload"``, ``"compute"`` and ``"download"``, each between two timing events.
    """

    step: int
    outputs: dict[str, npt.NDArray[Any]]
    stage_ms: dict[str, float]


class Step:
    """One step: the item of a slot, and the task that runs it.

    Attributes
    ----------
    number : int
    config : StepConfig
    timing_events : dict of str to tuple of Event
        Two timing events around the work of each stage, by the stage's name.
    task : asyncio.Task
        It returns the step's telemetry.
    ended : asyncio.Event
        Set when the task has ended, or the step was dropped; then the task may still run.
    """

    __slots__ = ("config", "ended", "number", "task", "timing_events")

    def __init__(self, pipeline: Pipeline, number: int, config: StepConfig) -> None:
        self.number = number
        self.config = config
        self.timing_events: dict[str, tuple[Event, Event]] = {}
        self.ended = asyncio.Event()
        self.task = start_task(self._run, pipeline)
        self.task.add_done_callback(lambda task: self.ended.set())

    async def _run(self, pipeline: Pipeline) -> StepTelemetry:
        arrays = await pipeline.execute_iteration(self)
        outputs = dict(zip(self.config.download, arrays, strict=True))
        stage_ms = {stage: start.elapsed_ms(end) for stage, (start, end) in self.timing_events.items()}
        return StepTelemetry(self.number, outputs, stage_ms)

    @property
    def failure(self) -> BaseException | None:
        """The exception that the step failed with; None if it has not failed or not ended."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return ClosedError(f"step {self.number} was cancelled")
        error = self.task.exception()
        return root_failure(error) if isinstance(error, Exception) else error


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


class StepRunner(Owner):
    """Runs the steps of one context, three at a time. It returns their telemetry in order, each once.

    If a step fails, the later steps that have begun are dropped, because they may depend on its results. Its exception
    is raised; failures of their own are added to it as notes.
    """

    __slots__ = ("_begun", "_closed", "_device", "_lock", "_pipeline", "_running", "_scope")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[Step] = []  # in order; each until its telemetry is returned
        self._lock = asyncio.Lock()  # held by the call that waits for the oldest step
        self._pipeline: Pipeline | None = None
        self._begun = 0
        self._closed = False
        #: Left by an exception, it drops the steps at once. Their end waits for the device.
        self._scope = Scope("the context", "", "make another one", drain_seconds=lambda: 0.0)

    @property
    def ring(self) -> TripleBuffer:
        """The slots."""
        return (self._pipeline or self._opened()).ring

    def statistics(self) -> PipelineStats | None:
        """Return the pipeline's statistics; None before the first step."""
        return None if self._pipeline is None else self._pipeline.statistics()

    async def step(self, config: StepConfig) -> StepTelemetry | None:
        """Begin a step; see `ManagedContext.triple_buffered_step`."""
        if not isinstance(config, StepConfig):
            raise InvalidTypeError(f"a step is described by an aiocuda.StepConfig, not {type(config).__name__}")
        async with self._lock:
            if len(self._running) == DEPTH:  # an earlier call was cancelled
                await self._wait_for_oldest(self._running[0])
            pipeline = self._opened()
            if not self._begun:
                await pipeline.__aenter__()  # it keeps the streams open between steps
            self._running.append(Step(pipeline, self._begun, config))
            self._begun += 1
            if len(self._running) < DEPTH:
                await asyncio.sleep(0)  # the step's task enqueues its work
                return None
            oldest = self._running[0]
            await self._wait_for_oldest(oldest)
            return self._take_telemetry(oldest)

    async def flush(self) -> list[StepTelemetry]:
        """Wait for all steps, and return their telemetry; see `ManagedContext.flush`."""
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

    async def wait_for_steps(self) -> None:
        """Wait until the steps that have begun have ended, failed or not."""
        for step in tuple(self._running):
            await step.ended.wait()

    async def reset(self) -> None:
        """Drop the steps that have begun, wait until no work of them runs, and restart with step 0."""
        steps, self._running = self._running, []
        pipeline, self._pipeline = self._pipeline, None
        self._begun = 0
        for step in steps:
            step.ended.set()
        if pipeline is not None:
            await finish_shielded(_end_dropped(steps, pipeline))

    async def aclose(self) -> None:
        """Accept no more steps, wait for those that have begun, and raise the failures that no call has raised."""
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        """Do nothing: each step asks the scope."""

    async def _drain(self) -> None:
        while await self.flush():
            continue

    async def _release(self, outcome: Outcome) -> None:
        self._closed = True
        await self.reset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        await self._scope.exit(self, kind)

    def _opened(self) -> Pipeline:
        """Return the pipeline; the first call makes it."""
        if self._scope.closing:
            raise ClosedError("the context has been closed: no step begins any more")
        if self._pipeline is None:
            stages = [Stage("upload", _upload), Stage("compute", _compute), Stage("download", _download)]
            self._pipeline = Pipeline(self._device, stages, DEPTH)
        return self._pipeline

    async def _wait_for_oldest(self, step: Step) -> None:
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

    def _take_telemetry(self, step: Step) -> StepTelemetry:
        """Return the telemetry of the oldest step, which has ended."""
        self._check_is_oldest(step)
        del self._running[0]
        return step.task.result()

    def _check_is_oldest(self, step: Step) -> None:
        if not self._running or step is not self._running[0]:
            raise ClosedError(f"step {step.number} was dropped, by reset_pipeline() or the context's end")


async def _end_dropped(steps: list[Step], pipeline: Pipeline) -> None:
    """End steps that were dropped, close the pipeline, and report the failures, which no call raises."""
    failures = await _settle(steps, 0.0)
    await pipeline.aclose()
    # Every operation fails with a device's fault, or with the end of the device: those are raised elsewhere.
    own = [each for each in failures if not isinstance(each[1], (ClosedError, DeviceFault, SkippedError))]
    if own:
        _add_notes(own[0][1], own[1:])
        _report("failed after it had been dropped", own[0][1])


async def _add_later_failures(failure: BaseException, steps: list[Step], seconds: float) -> None:
    """Wait until the steps after a failed step have ended, and add their failures to its failure as notes."""
    _add_notes(failure, await _settle(steps, seconds))


async def _settle(steps: list[Step], seconds: float) -> list[tuple[int, BaseException]]:
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
