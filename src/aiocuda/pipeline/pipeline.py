"""Pipeline: stages, a ring of slots, and items that go through them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Any, Self

from ..device import Device
from ..errors import BusyError, ClosedError, DeviceFault, InvalidArgumentError, InvalidTypeError
from .iteration import Iteration, Track
from .ring import TripleBuffer
from .run import Run, as_source, combine, leave, shielded
from .slot import Slot
from .stage import Stage, states_of
from .stats import Meter, PipelineStats

__all__ = ["Pipeline"]


class Pipeline:
    """Items go through named stages, several at a time: while one is uploaded, another is processed.

    Each stage has a stream of its own. Of one item, a stage that enqueues comes behind the stage before it by a wait on
    the device; the host waits only for a free slot, before a stage that awaits, and for the result. Results come in the
    order of the source. At most ``depth`` slots are busy, so a slow consumer bounds memory and work in flight.

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
        At least one; names differ.
    depth
        How many slots, 1 to 1024. Three keep upload, processing and download busy.

    Attributes
    ----------
    device : Device
    stages : tuple of Stage
    ring : TripleBuffer

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        No stage, two of one name, a depth out of range; something that is no device or no stage.
    """

    def __init__(self, device: Device, stages: Sequence[Stage], depth: int = 3) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a pipeline runs on an aiocuda.Device, not {type(device).__name__}")
        if isinstance(stages, Stage) or not isinstance(stages, Iterable):
            raise InvalidTypeError(f"stages is a sequence of aiocuda.Stage, not {stages!r}")
        self.device = device
        self.stages = tuple(stages)
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise InvalidTypeError(f"stages is a sequence of aiocuda.Stage, and one of them is {stage!r}")
        names = [stage.name for stage in self.stages]
        if not names:
            raise InvalidArgumentError("a pipeline needs at least one stage")
        if len(set(names)) < len(names):
            raise InvalidArgumentError(f"two stages have the same name: {', '.join(map(repr, names))}")
        self.ring = TripleBuffer(depth)
        states = states_of(self.stages)
        self._meter = Meter(self.stages, states)
        self._track = Track(device, self.stages, states, self._meter)
        self._numbers = 0
        self._running: Run | None = None
        self._single = 0  # iterations under way outside a run
        self._users = 0  # runs, iterations and `async with` blocks that need the streams
        self._closed = False

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self, source: Iterable[Any] | AsyncIterable[Any], *, overlap: bool | None = None
    ) -> AsyncGenerator[Any, None]:
        """The last stage's results, in the order of the source.

        A result may lie in the slot's memory: it stays valid until the next one is asked for. Whoever may leave the
        loop early does so inside ``async with contextlib.aclosing(pipeline.run(source)) as results``; without it the
        run ends when Python finalises the iterator.

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
            Another run of this pipeline has not ended.
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
        if overlap is False:
            return self._run_in_turn(items)
        return self._run(items)

    async def execute_iteration(self, item: Any) -> Any:
        """One item through all stages. Several calls at once overlap, and go through the stages in the order of calls.

        Raises
        ------
        BusyError
            A run of this pipeline has not ended.
        Exception
            What a stage failed with, as in `run`.
        """
        if self._running is not None:
            raise BusyError("this pipeline is running over a source: wait until that ends, or make another pipeline")
        self._single += 1
        try:
            async with self._streams():
                return await self._carry(item, None, overlap=True)
        finally:
            self._single -= 1

    async def _run(self, items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async with self._exclusively(), self._streams():
            run = self._running = Run(self, items)
            try:
                while (iteration := await run.next()) is not None:
                    yield await iteration.finish()
                    run.release(iteration)
            except Exception as error:
                raise combine(error, await run.close()) from error.__cause__
            finally:
                for error in await run.close():
                    self._report(error)
