"""Pipeline: stages, a ring of slots, and items that go through them."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from typing import Any, Self

from .._device import Device
from .._shutdown import to_the_end
from .._types import Place, ProcessLocal
from .._user_code import LEAVES_LOOP
from ..errors import BusyError, ClosedError, InvalidArgumentError, InvalidTypeError, SkippedError
from ._advice import PipelineAdvice, advise
from ._failures import but_closed, causes, combine, first_cause
from ._iteration import Iteration
from ._plan import Plan
from ._results import PipelineRun
from ._ring import TripleBuffer
from ._run import Run, Source, as_source, leave
from ._stage import Stage
from ._statistics import PipelineStats
from ._track import Track

__all__ = ["Pipeline"]


class _Course:
    """A run, from its first item to its end."""

    def __init__(self) -> None:
        #: The generator of the results. Once it is dead, the event loop closes it.
        self.generator: Callable[[], AsyncGenerator[Any, None] | None]
        #: The iterator that the consumer holds, if the consumer does.
        self.results: Callable[[], PipelineRun | None]
        self.run: Run | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.place = Place.of_caller()
        self.ended = asyncio.Event()

    def close_if_abandoned(self) -> bool:
        """Return True if its consumer has left it by `break`. Then it is being closed."""
        if self.loop is not asyncio.get_running_loop():
            return False  # it cannot be waited for here
        if self.generator() is None:
            return True
        results = self.results()
        return results is not None and results._close_if_left()


class Pipeline(ProcessLocal):
    """Items go through named stages, several at a time: while one is uploaded, another is processed.

    Each stage has a stream of its own. Of one item, a stage that enqueues comes behind the stage before it, or those
    that it names, by a wait on the device; the host waits only for a free slot, before a stage that awaits, and for the
    result. Results come in the order of the source. At most ``depth`` slots are busy, so a slow consumer bounds memory
    and work in flight.

    ::

        pipeline = Pipeline(device, [Stage("upload", up), Stage("compute", compute), Stage("download", down)])
        async for result in pipeline.run(items):
            ...

    Streams are opened by the first run and closed when the last one has ended; inside ``async with pipeline`` they stay
    open until the block's end. Buffers stay with the slots.

    Parameters
    ----------
    device
        Where the streams are.
    stages
        At least one; names differ. What each comes behind stands before it. The last one's result is the item's.
    depth
        How many slots, 1 to 1024. Three keep upload, processing and download busy.
    streams
        Groups of stages, by their names, that share a stream: ``[("scale", "add")]``. The others have one each.
    replay
        True captures what each stage that enqueues gives the device into a graph, once for each slot, and launches that
        for each item from then on; a sequence of names does so for these stages. Such a stage does the same for every
        item: its function is called once for each slot, and sees the first item only. What changes comes in through
        `Stage.prepare`, which writes the slot's pinned memory, or is an argument of a `Launch` that is a function of
        the slot. Downloads go to arrays that the stage names, the slot's pinned memory say.

    Attributes
    ----------
    device : Device
    stages : tuple of Stage

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        No stage, two of one name, one that comes behind an unknown or a later one, a depth out of range; something that
        is no device or no stage; a stage to be replayed that awaits.
    """

    def __init__(
        self,
        device: Device,
        stages: Sequence[Stage],
        depth: int = 3,
        *,
        streams: Sequence[Sequence[str]] | None = None,
        replay: bool | Sequence[str] = False,
    ) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pipeline runs on an aiocuda.Device, not {type(device).__name__}")
        self.device = device
        plan = Plan(stages, streams, replay)
        self.stages = plan.stages
        self._track = Track(device, plan, depth)
        self._course: _Course | None = None  # the run under way, which has the pipeline to itself
        self._taken = 0  # items outside a run
        self._single = 0  # iterations under way outside a run
        self._alone: asyncio.Future[None] | None = None  # when there is none, while `aclose` waits for that
        self._held = contextlib.AsyncExitStack()  # the streams, for an `async with` block
        self._closed = False

    @property
    def ring(self) -> TripleBuffer:
        """The slots."""
        return self._track.ring

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, source: Iterable[Any] | AsyncIterable[Any], *, overlap: bool | None = None) -> PipelineRun:
        """The last stage's results, in the order of the source.

        A result may lie in the slot's memory: it stays valid until the next one is asked for.

        A loop that may be left early belongs inside ``async with contextlib.aclosing(pipeline.run(source)) as
        results``. Without it, a run that was left by `break` ends when Python finalises the iterator, or when the
        pipeline begins another run or is closed, whichever comes first. The next run begins when the items of the one
        before have ended. Leaving early, by an error or a cancellation too, gives what is under way
        `Device.drain_timeout` seconds to end; so does `asyncio.timeout` around a stage that never ends.

        Parameters
        ----------
        source
            Items, from an iterable or an asynchronous iterable. It is asked for the next one when a slot is free.
        overlap
            False awaits each stage of each item before anything else is begun: the same work, one step after the other.
            None overlaps wherever there is more than one slot.

        Raises
        ------
        BusyError
            Another run of this pipeline has not ended, and a loop or a held iterator may go on with it.
        InvalidArgumentError
            Overlap asked of a pipeline of depth 1.
        Exception
            What a stage or the source failed with, once the results before it have been delivered; a note names stage
            and item. Nothing is left in flight then, all slots are free, and the pipeline can run again. Several items'
            failures come as an `ExceptionGroup`.
        """
        if overlap is not None and not isinstance(overlap, bool):
            raise InvalidTypeError(f"overlap is True, False or None, not {overlap!r}")
        if overlap and self.ring.depth == 1:
            raise InvalidArgumentError("a pipeline of depth 1 cannot overlap anything: give it more slots", depth=1)
        items = as_source(source)
        course = _Course()
        generator = self._in_turn(items, course) if overlap is False else self._overlapped(items, course)
        results = PipelineRun(generator)
        course.generator, course.results = weakref.ref(generator), weakref.ref(results)
        return results

    async def execute_iteration(self, item: Any) -> Any:
        """One item through all stages. Several calls at once overlap, and go through the stages in the order of calls.

        The slot goes to the next item at once: the last stage returns memory of its own, not the slot's.

        Raises
        ------
        BusyError
            A run of this pipeline has not ended.
        Exception
            What a stage failed with, as in `run`.
        """
        await self._end_of_abandoned_run()
        self._check_no_run()
        track = self._opened()
        self._single += 1
        iteration: Iteration | None = None
        try:
            async with track:
                slot = await track.ring.reserve()
                iteration = Iteration(track, slot, item, self._taken, track.now(), overlap=True)
                self._taken += 1
                try:
                    await iteration.carry()
                    result = await iteration.finish()
                except BaseException:
                    await to_the_end(leave(track, [iteration], Place.of_caller()))
                    raise
                track.release(slot)
                return result
        except BaseException as error:
            self._left(error, () if iteration is None else (iteration.failure,))
            raise
        finally:
            self._single -= 1
            if self._alone is not None and not self._single and not self._alone.done():
                self._alone.set_result(None)

    async def _overlapped(self, items: Source, course: _Course) -> AsyncGenerator[Any, None]:
        track = await self._begin(course)
        failures: list[BaseException] = []
        try:
            async with track:
                iteration: Iteration | None = None
                run = course.run = Run(track, items, course.place)
                try:
                    while (iteration := run.begun() or await run.next()) is not None:
                        result = await iteration.finish()
                        began = track.now()
                        yield result
                        del result  # the slot's, or the consumer's
                        track.meter.consumer_seconds += track.now() - began
                        run.release(iteration)
                except BaseException as error:
                    told = isinstance(error, Exception) or error is run.source_error
                    if not (told or (iteration is not None and error is iteration.failure)):
                        await run.close(failures)  # the consumer has left: cancelled, or closing the iterator
                        raise
                    failures.append(first_cause(error))
                    await run.close(failures)
                    if isinstance(error, LEAVES_LOOP):
                        raise
                    failure = combine(failures, "items of the pipeline")
                    failures.clear()  # it tells of them
                    raise failure from failure.__cause__
                await run.close()
        except BaseException as error:
            self._left(error, failures)
            raise
        finally:
            self._end(course)

    async def _in_turn(self, items: Source, course: _Course) -> AsyncGenerator[Any, None]:
        track = await self._begin(course)
        iteration: Iteration | None = None
        try:
            async with track, contextlib.aclosing(items):
                index = 0
                async for item in items:
                    self._opened()
                    iteration = Iteration(track, await track.ring.reserve(), item, index, track.now(), overlap=False)
                    try:
                        await iteration.carry()
                        yield await iteration.finish()
                    except BaseException as error:
                        await to_the_end(leave(track, [iteration], course.place))
                        if not isinstance(error, SkippedError):
                            raise
                        failure = first_cause(error)
                        raise failure from failure.__cause__
                    track.release(iteration.slot)
                    index += 1
        except BaseException as error:
            self._left(error, () if iteration is None else (iteration.failure,))
            raise
        finally:
            self._end(course)

    # No context managers made of generators: a loop that closes closes every generator at once, and theirs first.

    async def _begin(self, course: _Course) -> Track:
        """The pipeline is the run's alone."""
        await self._end_of_abandoned_run()
        track = self._opened()
        self._check_no_run()
        if self._single:
            raise BusyError("this pipeline executes single iterations: await them, or make another pipeline")
        self._course = course
        course.loop = asyncio.get_running_loop()
        return track

    def _end(self, course: _Course) -> None:
        self._course = None
        course.ended.set()

    async def _end_of_abandoned_run(self) -> None:
        """Wait until a run that was left by `break` has ended. Its items use the slots until then."""
        while self._course is not None and self._course.close_if_abandoned():
            await self._course.ended.wait()

    def _check_no_run(self) -> None:
        if self._course is not None:
            raise BusyError(
                "another run of this pipeline has not ended: leave a loop early inside "
                "`async with contextlib.aclosing(pipeline.run(source)) as results`, or make another pipeline"
            )

    def _opened(self) -> Track:
        if self._closed:
            raise ClosedError("this pipeline has been closed: make another one")
        return self._track

    def _left(self, error: BaseException, failures: Iterable[BaseException | None]) -> None:
        """Report the failures that an error does not tell of: the consumer is cancelled, or closes the iterator."""
        if not isinstance(error, Exception):
            self._report([failure for failure in failures if failure is not None and failure is not error])

    def _report(self, failures: list[BaseException]) -> None:
        """Give failures without a waiter to the loop's exception handler."""
        message = "aiocuda: a pipeline's item or source failed after the consumer had left"
        told = [one for one in causes(failures) if not isinstance(one, LEAVES_LOOP)]  # those have left the loop
        if self.device.closed or self.device._closing:
            told = but_closed(told)  # whoever closes the device under a run ends the items, too
        for error in told:
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    # -- what is known -------------------------------------------------------------------------------------------

    def statistics(self) -> PipelineStats:
        """Figures of all runs since the last reset."""
        return self._track.meter.statistics(self.ring)

    def advice(self) -> PipelineAdvice:
        """Which depth, and how many streams, the measured times of the stages want, and why.

        Run some tens of items first, overlapped. What is advised keeps the busiest stage at work all the time, by its
        median times, and so is as quick as any depth; it is never a smaller depth, nor fewer streams, where the stages'
        times vary. Follow it by ``Pipeline(device, stages, depth=advice.depth, streams=advice.streams)``.

        Raises
        ------
        BusyError
            Not every stage has been timed since the last reset.
        """
        return advise(self._track.plan, self._track.meter, self.ring.depth)

    def reset_statistics(self) -> None:
        """Begin the figures anew."""
        self._track.meter.reset()
        self.ring.reset_statistics()

    # -- the end -------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        self._closed = True

    async def aclose(self) -> None:
        """Refuse new items with `ClosedError`, end the run that is under way, and let go of streams and buffers.

        Items of `execute_iteration` that are under way are waited for; left by an exception, ``async with`` does not
        wait for them. Idempotent.
        """
        await self._end_run()
        while self._single:
            if self._alone is None or self._alone.done():
                self._alone = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._alone})
        await self._let_go()

    async def _end_run(self) -> None:
        self._refuse()
        await self._end_of_abandoned_run()  # which reports its failures by itself
        if self._course is not None and self._course.run is not None:
            failures: list[BaseException] = []
            try:
                await self._course.run.close(failures)
            finally:
                self._report(failures)
        await self._end_of_abandoned_run()

    async def _let_go(self) -> None:
        await self._held.aclose()
        self._track.free_buffers()

    async def __aenter__(self) -> Self:
        await self._held.enter_async_context(self._opened())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            await self._end_run()
            await self._let_go()

    def __repr__(self) -> str:
        return f"<Pipeline {self._track.plan}, {self.ring.busy} of {self.ring.depth} slots busy>"
