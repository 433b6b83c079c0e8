"""Pipeline: stages, a ring of slots, and the items that go through them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import Any, Self

from .._base._generic import Generic, Item, Result
from .._base._mistakes import keywords, lacks, refuses
from .._base._owner import Outcome, Owner
from .._base._processor import last_level_cache, processors_within_quota
from .._base._scope import Scope
from .._base._shutdown import finish_shielded, unlimited
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP
from ..device import Device
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, SkippedError
from ..lowlevel import resources_of
from ._advice import PipelineAdvice, advise
from ._failures import combine, report, report_unraised, root_failure
from ._item import SKIPPED, PipelineItem, settle_items
from ._plan import Plan
from ._resources import PipelineResources
from ._ring import TripleBuffer
from ._run import ActiveRun, PipelineRun
from ._single_items import SingleItems
from ._stage import Stage
from ._statistics import PipelineStats
from ._ticket import Ticket

__all__ = ["Pipeline"]


@lacks
@refuses(
    __enter__="is entered by `async with`, not `with`: `async with aiocuda.Pipeline(device, stages) as pipeline`",
    __call__="is not called: `async for result in pipeline.run(items)`, or `ticket = await pipeline.submit(item)`",
)
class Pipeline(Owner, Generic[Item, Result]):
    """Items go through named stages, several at a time: while one is uploaded, another is processed.

    Each stage has a stream of its own. The device orders the work of each stage after that of the stages before it, or
    of those that ``after`` names. The host waits only for a free slot, before a stage that awaits, and for results.
    Results come in the order of the source. At most ``depth`` slots are busy, so a slow consumer limits memory and
    unfinished work.

    ::

        pipeline = Pipeline(device, [Stage("upload", up), Stage("compute", compute), Stage("download", down)])
        async for result in pipeline.run(items):
            ...

    The streams are open while the pipeline has a run or an item; inside ``async with pipeline``, until the end of the
    block. Buffers stay with the slots.

    Parameters
    ----------
    device
        The device of the streams.
    stages
        At least one; their names differ. A stage comes after its prerequisites in the list. The result of the last
        stage is the result of the item.
    depth
        The number of slots, 1 to 1024. Three keep upload, processing and download busy.
    streams
        Groups of stages, by their names, that share a stream: ``[("scale", "add")]``. Every other stage has a stream of
        its own.
    replay
        True captures the device work of each stage that enqueues into a graph, once for each slot, and launches the
        graph for each later item. A sequence of names does so for these stages. Such a stage does the same work for
        every item: its function is called once for each slot, with the first item only. Data that changes comes from
        `Stage.prepare`, which writes the slot's pinned memory, or is an argument of a `Launch` that is a function of
        the slot. Downloads go to arrays that the stage names, for example the slot's pinned memory.

    Attributes
    ----------
    device : Device

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        No stage; two stages with one name; an unknown or later prerequisite; a depth out of range; an object that is no
        device or no stage; a stage to be replayed that awaits.
    """

    @keywords(
        "Pipeline takes a device, stages, depth=, streams= and replay=",
        "stages is a sequence of aiocuda.Stage: Pipeline(device, [Stage('up', up), Stage('down', down)], depth=3)",
        **dict.fromkeys(("buffers", "num_slots"), "use depth="),
    )
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
            kind = type(device).__name__
            raise InvalidTypeError(f"a pipeline runs on an aiocuda.Device, not on {kind}: Pipeline(device, stages)")
        self.device = device
        self._device_resources = resources_of(device)
        plan = Plan(stages, streams, replay)
        self._scope = Scope(
            "this pipeline", "make a pipeline in each loop, share the device", "make another one",
            drain_seconds=unlimited, wrong_loop=self._device_resources.device_state.wrong_loop,
        )  # fmt: skip
        self._resources = PipelineResources(device, plan, depth, self._scope)
        opened, resources = self._resources.streams, self._device_resources
        use = "`async with aiocuda.Pipeline(device, stages) as pipeline`"
        self._scope.must_end(use, SourceLine.of_caller(), lambda: resources.closed or not opened)
        self._run: ActiveRun | None = None  # it has the pipeline to itself
        self._singles = SingleItems(self._resources)
        self._open_streams: contextlib.AsyncExitStack | None = None  # for an `async with` block

    @property
    def ring(self) -> TripleBuffer:
        """The slots."""
        return self._resources.ring

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in their order."""
        return self._resources.plan.stages

    def set_order(self, names: Sequence[str]) -> None:
        """Change the order of the stages, between runs.

        The rules for ``stages`` hold for the new order: a stage without ``after`` comes after the one before it, and
        the last stage gives the result. Slots keep their buffers, replayed stages are captured again, and the
        statistics restart.

        Parameters
        ----------
        names
            The name of every stage, once.

        Raises
        ------
        InvalidArgumentError, InvalidTypeError
            A name is unknown, missing or given twice; a stage would come before its prerequisite.
        BusyError
            A run of this pipeline has not ended, or items are in flight.
        """
        plan = self._resources.plan.reordered(names)
        self._check_open()
        if self._scope.loop is not None:  # the streams are open
            self._scope.check_loop()
        self._check_no_run()
        self._check_no_single_items()
        self._resources.replan(plan)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, source: Iterable[Item] | AsyncIterable[Item], *, overlap: bool | None = None) -> PipelineRun[Result]:
        """Return the last stage's results, in the order of the source, as an asynchronous iterator.

        Parts of a result in the slot's memory are copied when the item's work has ended: the consumer owns its results.

        A loop that may be left early belongs inside ``async with contextlib.aclosing(pipeline.run(source)) as
        results``. Without it, a run that was left by `break` ends when Python finalises the iterator, or when the
        pipeline begins another run or is closed, whichever comes first. The next run begins when the items of the run
        before it have ended. If the loop is left early, also by an error or a cancellation, unfinished items have
        `Device.drain_timeout` seconds to end. The same applies to `asyncio.timeout` around a stage that never ends.

        Parameters
        ----------
        source
            Items, from an iterable or an asynchronous iterable. It is asked for the next item when a slot is free.
        overlap
            False awaits each stage of each item before the next one begins: the same work, one step after the other.
            None overlaps if there is more than one slot.

        Raises
        ------
        BusyError
            Another run of this pipeline has not ended, and a loop or a held iterator may continue it.
        InvalidArgumentError
            ``overlap=True`` for a pipeline of depth 1.
        Exception
            The failure of a stage or of the source, after the results before it; a note names stage and item. Then
            nothing is left unfinished, all slots are free, and the pipeline can run again. Failures of several items
            are raised as an `ExceptionGroup`. An item fails with `UnsupportedError` if its result has an array of
            another library in the slot's device memory, or is an object, such as a pydantic model, that holds memory
            which a graph of the program uses.
        """
        if overlap is not None and not isinstance(overlap, bool):
            raise InvalidTypeError(f"overlap is True, False or None, not {overlap!r}")
        if overlap and self.ring.depth == 1:
            raise InvalidArgumentError("a pipeline of depth 1 cannot overlap anything: give it more slots", depth=1)
        run = ActiveRun(self._resources, source)
        return run.iterate(self._one_by_one(run) if overlap is False else self._overlapped(run))

    async def execute_iteration(self, item: Item) -> Result:
        """Take one item through all stages, and return the last stage's result.

        Concurrent calls overlap; for a plain loop, use `submit`. The items go through the stages in the order of the
        calls. The slot is free when this returns. Parts of the result in its memory are copied, as in `run`.

        Raises
        ------
        BusyError
            A run of this pipeline has not ended.
        DeadlockError
            A stage has called this method, and the new item cannot pass the item of the stage.
        Exception
            The failure of a stage, as in `run`.
        """
        await self._check_free()
        result: Result = await self._singles.execute(item)
        return result

    async def submit(self, item: Item) -> Ticket[Result]:
        """Wait for a free slot, begin an item in it, and return its ticket, which is awaited for the result.

        A plain loop over this overlaps. The items go through the stages in the order of the calls. A slot is free when
        its item has ended, whether its ticket was awaited or not. Parts of the result in the slot's memory are copied,
        as in `run`. A call that is cancelled while it waits for a slot begins nothing.

        ::

            tickets = [await pipeline.submit(item) for item in items]
            results = [await ticket for ticket in tickets]

        Raises
        ------
        BusyError
            A run of this pipeline has not ended.
        ClosedError
            The pipeline has been closed, or has been left by an exception during the call.
        DeadlockError
            A stage has called this method, and all slots are held by items that wait for such calls, or that cannot
            pass these items.
        """
        await self._check_free()
        return await self._singles.submit(item)

    async def _check_free(self) -> None:
        """Raise unless an item outside of a run can begin."""
        self._scope.check_loop()
        await self._end_abandoned_run()
        self._check_no_run()
        self._check_open()

    async def _overlapped(self, run: ActiveRun) -> AsyncGenerator[Any, None]:
        """Yield the results of a run with overlap."""
        resources = await self._begin(run)
        failures: list[BaseException] = []
        try:
            async with resources:
                item: PipelineItem | None = None
                run.feeds = True
                try:
                    while (item := run.next_item_nowait(item) or await run.next_item()) is not None:
                        result = await item.finish()
                        if result is not SKIPPED:
                            delivered = resources.now()
                            yield result
                            del result  # it may be large
                            resources.meter.consumer_seconds += resources.now() - delivered
                except BaseException as error:
                    is_failure = isinstance(error, Exception) or error is run.source_error
                    if not (is_failure or (item is not None and error is item.failure)):
                        await run.close(failures)  # the consumer was cancelled, or closes the iterator
                        raise
                    failures.append(root_failure(error))
                    await run.close(failures)
                    if isinstance(error, LEAVES_LOOP):
                        raise
                    failure = combine(failures, "items of the pipeline")
                    failures[:] = [failure]  # reported if a cancellation replaces it, while the streams are closed
                    raise failure from failure.__cause__
                await run.close()
        except BaseException as error:
            report_unraised(error, failures, self.device)
            raise
        finally:
            self._end(run)

    async def _one_by_one(self, run: ActiveRun) -> AsyncGenerator[Any, None]:
        """Yield the results of a run without overlap."""
        resources = await self._begin(run)
        item: PipelineItem | None = None
        try:
            async with resources, contextlib.aclosing(run.source):
                index = 0
                async for value in run.source:
                    self._check_open()
                    slot = await resources.ring.reserve()
                    item = PipelineItem(resources, overlap=False)
                    item.begin(slot, value, index, resources.now())
                    try:
                        await item.run_stages()
                        result = await item.finish()
                        if result is not SKIPPED:
                            yield result
                        del result
                    except BaseException as error:
                        await finish_shielded(settle_items([item], resources, run.place))
                        if not isinstance(error, SkippedError):
                            raise
                        failure = root_failure(error)
                        raise failure from failure.__cause__
                    item.end()
                    resources.ring.end(item.slot)
                    index += 1
        except BaseException as error:
            report_unraised(error, () if item is None else (item.failure,), self.device)
            raise
        finally:
            self._end(run)

    # `_begin` and `_end` are no generator-based context manager: a loop that shuts down closes all generators together,
    # and would close that of the context manager before the run's own.

    async def _begin(self, run: ActiveRun) -> PipelineResources:
        """Make the run the only user of the pipeline."""
        await self._end_abandoned_run()
        resources = self._check_open()
        self._check_no_run()
        self._check_no_single_items()
        self._run = run
        run.loop = asyncio.get_running_loop()
        resources.begin_run()
        return resources

    def _end(self, run: ActiveRun) -> None:
        self._run = None
        self._resources.end_run()
        run.ended.set()

    async def _end_abandoned_run(self) -> None:
        """Wait until a run that was left by `break` has ended. Its items use the slots until then."""
        while self._run is not None and self._run.close_if_abandoned():
            await self._run.ended.wait()

    def _check_no_run(self) -> None:
        if self._run is not None:
            raise BusyError(
                "another run of this pipeline has not ended: leave a loop early inside "
                "`async with contextlib.aclosing(pipeline.run(source)) as results`, or make another pipeline"
            )

    def _check_no_single_items(self) -> None:
        if self._singles.unfinished:
            raise BusyError(
                f"{self._singles.unfinished} items of submit or execute_iteration are in flight in this pipeline: "
                "await them, or make another pipeline"
            )

    def _check_open(self) -> PipelineResources:
        if self._scope.closing:
            raise self._scope.closed_error()
        return self._resources

    # -- statistics ----------------------------------------------------------------------------------------------

    def statistics(self) -> PipelineStats:
        """Return the statistics of all runs since the last reset."""
        return self._resources.meter.statistics(self._resources.ring)

    def advice(self) -> PipelineAdvice:
        """Return the depth, streams and concurrency that suit the measured times of the stages, with the reasons.

        Run some tens of items with overlap first. The advice keeps the slowest stage always at work, by the median
        times, and so no other depth is faster. If the stages' times vary, it never reduces the depth or the number of
        streams, with one exception: slots whose pinned memory (`Slot.pinned`) is outside the processor's cache make the
        host slower, and the advice says so. Other pinned arrays do not count. Stages that await get as many items at a
        time as the processors are enough for; no more than now if they keep the event loop busy, or if threads share
        the GIL, which a run of 4 s measures. To follow it:
        ``Pipeline(device, stages, depth=advice.depth, streams=advice.streams)``, with stages that have
        ``concurrency=advice.concurrency[name]``. Depth and streams are for that concurrency.

        Raises
        ------
        BusyError
            Not every stage has been timed since the last reset.
        """
        resources = self._resources
        ring, watch = resources.ring, resources.blocking_watch
        return advise(
            resources.plan, resources.meter, ring.depth, ring.pinned_bytes, last_level_cache(),
            processors_within_quota(), () if watch is None else watch.blocking, resources.host_times(),
        )  # fmt: skip

    def reset_statistics(self) -> None:
        """Restart the statistics."""
        self._resources.reset_statistics()

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Refuse new items with `ClosedError`, end the active run, and release streams and buffers.

        This waits for the items of `execute_iteration` and `submit`. If ``async with`` is left by an exception, or a
        call is cancelled, the items of tickets end early, and their tickets fail with `ClosedError`. A second call
        waits for the same end.

        Raises
        ------
        WrongLoopError
            The streams are open in another event loop. The call changes nothing.
        """
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        """Do nothing: each request asks the scope."""

    def _withdraw(self) -> None:
        self._singles.withdraw()

    def _unfinished(self) -> int | None:
        is_idle = self._run is None and not self._singles.unfinished and self._open_streams is None
        return 0 if is_idle else None

    async def _drain(self) -> None:
        await self._end_run()
        await self._singles.wait(lambda: self._device_resources.deadline.left() if self._scope.left else None)

    async def _end_run(self) -> None:
        await self._end_abandoned_run()  # it reports its failures itself
        if self._run is not None and self._run.feeds:
            failures: list[BaseException] = []
            try:
                await self._run.close(failures)
            finally:
                report(failures, self.device)
        await self._end_abandoned_run()

    async def _release(self, outcome: Outcome) -> None:
        if outcome == "interrupted":
            self._resources.end_late()
        try:
            if self._open_streams is not None:
                await self._open_streams.aclose()
        finally:
            self._resources.free_buffers()

    async def __aenter__(self) -> Self:
        resources = self._check_open()
        self._scope.check_loop()
        if self._open_streams is None:
            self._open_streams = contextlib.AsyncExitStack()
        await self._open_streams.enter_async_context(resources)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        await self._scope.exit(self, kind)

    def __repr__(self) -> str:
        return f"<Pipeline {self._resources.plan}, {self.ring.busy} of {self.ring.depth} slots busy>"
