"""LoaderResources: the threads, processes, streams and memory of an open loader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from .._base._shutdown import end_tasks, finish_shielded
from .._base._tasks import start_task
from ..device import Device
from ..errors import ClosedError, DeviceFault
from ..lowlevel import owned, resources_of
from ..memory import PinnedBuffer
from ..stream import Stream
from ._job import BatchJob, RowQueue
from ._options import LoaderOptions
from ._processes import ProcessDecoders
from ._sampler import SampledOrder
from ._sharing import Payload, SharedFile, SharedSlots
from ._slow_samples import SlowSamples
from ._sources import BatchPlan, StreamReader
from ._statistics import LoaderMeter
from ._tensors import Tensors
from ._threads import LoaderThreads, ThreadDecoder
from ._upload import HostSlots, close_stream

__all__ = ["LoaderResources"]

#: Seconds of decoding for which a worker takes quick rows at once. Then the way to a process and back, about 100 µs,
#: counts little, and so do the lock of the queue and the clocks. A thread puts rows back that would take longer.
TAKE_SECONDS = {"process": 1e-3, "thread": 4e-3}

#: Seconds of quick rows that a worker takes at least, since each run is also work for the loop.
LEAST_SECONDS = 0.25e-3


class LoaderResources:
    """The threads, processes, streams and memory of an open loader. Made by `open`.

    Attributes
    ----------
    device, options, meter, tensors
    slots : HostSlots
    at_once : int
        The number of samples that are decoded at a time.
    now
        The driver's clock.
    slow : SlowSamples or None
        None with a timeout, which ends slow samples.
    turn
        Counts requests that were met without suspension.
    decode
        Decodes a batch, on threads or in processes; ``job.ended`` is called on the loop when it is done.
    """

    def __init__(
        self,
        device: Device,
        options: LoaderOptions,
        meter: LoaderMeter,
        payload: Payload | None,
        tensors: Tensors | None = None,
    ) -> None:
        self.device = device
        self.options = options
        self.meter = meter
        self.tensors = tensors
        self.now = device.driver.now
        self._device_resources = resources_of(device)
        self._reactor = self._device_resources.open_reactor()
        self.turn = self._reactor.hot.turn
        self.at_once = max(1, options.workers)
        self._expired: set[BatchJob] = set()  # threads have not returned from some of their samples
        self._closing = contextlib.AsyncExitStack()
        self._pins: list[contextlib.AbstractAsyncContextManager[PinnedBuffer]] = []  # of the shared slots
        self._rows = RowQueue(
            self.at_once, 0.0 if options.timeout is not None else TAKE_SECONDS[options.executor], LEAST_SECONDS
        )
        jobs = self._reactor.jobs
        decoder = ThreadDecoder(
            options.decoder(checks=device.checker is not None), options.layout is not None, self._rows, self.now,
            1 if options.timeout is not None else self.at_once,
        )  # fmt: skip
        of_threads = (None, None) if payload else (self._rows, decoder)
        self._threads = LoaderThreads(jobs, "aiocuda-loader", self.at_once, *of_threads)
        self.decode: Callable[[BatchJob], object] = self._threads.decode
        self._reader = self._threads
        if options.kind == "iterable" and options.workers:
            self._reader = LoaderThreads(jobs, "aiocuda-loader-source", 1)
        self._payload = payload
        self._processes: ProcessDecoders | None = None
        self.slots = HostSlots(device, options.layout)
        self._streams: list[Stream] = []
        self.slow: SlowSamples | None = None
        if options.timeout is None:
            self.slow = SlowSamples(lambda: (self._processes or decoder).running(), device.name)

    async def open(self) -> None:
        """Open the streams; start the processes, and page-lock the memory that they share with this process."""
        try:
            # One for each batch on its way and one for the batch in hand: work on a batch delays no upload.
            for number in range(self.options.prefetch + 1):
                stream = self.device.stream(name=f"loader {number}")
                self._streams.append(owned(stream))
            if self._payload is not None:
                await self._start_processes(self._payload)
        except BaseException:
            await finish_shielded(self.close())
            raise

    async def _start_processes(self, payload: Payload) -> None:
        options = self.options
        jobs = self._reactor.jobs

        made: list[SharedSlots | SharedFile] = []

        def make() -> tuple[SharedSlots, tuple[SharedFile, tuple[int, ...]]]:
            shared = SharedSlots(options.layout, options.prefetch, options.workers)
            made.append(shared)
            source = payload.file()
            made.append(source[0])
            return shared, source

        try:
            shared, source = await finish_shielded(jobs.run(make))
        except BaseException:  # or this task was cancelled meanwhile
            for each in made:
                await finish_shielded(self._off_loop(each.close))
            raise
        self._closing.push_async_callback(self._off_loop, shared.close)  # when no slot is page-locked any more
        self._processes = ProcessDecoders(
            source, payload.order, options.layout, shared, jobs, self._threads, self._rows, workers=options.workers,
            restarts=options.restarts, skips=options.on_error != "raise", timeout=options.timeout,
        )  # fmt: skip
        self.decode = self._processes.decode
        began = self.now()
        starting = start_task(self._processes.open)
        try:
            await self._lock_slots(shared)
            await asyncio.shield(starting)
            self.meter.note_start(self.now() - began)
        except BaseException:
            self._processes.kill()
            await finish_shielded(_ended(starting))
            raise

    async def _lock_slots(self, shared: SharedSlots) -> None:
        """Page-lock the memory of the slots, until the close."""
        self._closing.push_async_callback(self._unlock_slots)
        pinned: list[PinnedBuffer] = []
        for part in shared.slots():
            pin = self.device.pin(part)
            pinned.append(await pin.__aenter__())
            self._pins.append(pin)
        if pinned:
            self.slots = HostSlots(self.device, self.options.layout, pinned)

    async def _unlock_slots(self) -> None:
        """Unlock all slots together: they wait for one idle moment."""
        pins, self._pins = self._pins, []
        await end_tasks([start_task(_unlock, pin) for pin in pins])

    async def renew_source(self) -> None:
        """Have the processes load the source and the decoder again, if these have changed since the last epoch."""
        payload, processes = self._payload, self._processes
        if payload is None or payload.known is None or processes is None:
            return
        present = await self._reactor.jobs.run(payload.present)
        if present is not None and present != payload.known:
            payload.known = present
            processes.renew(present)

    async def read_sampler(self, epoch: int, position: int) -> SampledOrder | None:
        """Return the order that the sampler gives for an epoch, to be begun at a position; None without a sampler."""
        sampler, length = self.options.sampler, self.options.length
        if sampler is None or length is None:
            return None
        return await self._reactor.jobs.run(lambda: SampledOrder.read(sampler, epoch, length, position))

    # -- work on threads and in processes ------------------------------------------------------------------------

    def read(self, reader: StreamReader, read: Callable[[BatchPlan | None, BaseException | None], object]) -> None:
        """Read the samples of the next batch on a thread, then call ``read`` with them or with the error."""
        began = self.now()

        def ended(plan: BatchPlan | None, error: BaseException | None) -> None:
            self.meter.add_source(self.now() - began)
            read(plan, error)

        self._reader.start(reader.read, ended)

    def on_thread(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], object]) -> None:
        """Run a function on a worker thread, then call ``done`` with its result or its error."""
        self._threads.start(work, done)

    def set_aside(self, job: BatchJob) -> int:
        """Have other threads in place of those whose samples have expired; return how many these are."""
        self._expired.add(job)
        self._expired = {each for each in self._expired if each.expired}
        stuck = sum(each.expired for each in self._expired)
        if self.meter.note_set_aside(stuck):
            self._threads.set_stuck(stuck)
        return stuck

    # -- batches -------------------------------------------------------------------------------------------------

    def stream(self, number: int) -> Stream:
        """Return the stream of a batch."""
        return self._streams[number % len(self._streams)]

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def restarts(self) -> int:
        """Processes that were started in place of lost ones."""
        return 0 if self._processes is None else self._processes.restarts

    @property
    def pids(self) -> list[int]:
        """The process ids of the worker processes."""
        return [] if self._processes is None else self._processes.pids

    @property
    def has_timer(self) -> bool:
        """True if the loop has to watch the timeout of samples: processes do it themselves."""
        return self.options.timeout is not None and self._processes is None

    # -- the end -------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Start no more worker processes."""
        if self._processes is not None:
            self._processes.begin_close()

    def kill(self) -> None:
        """End the worker processes at once."""
        if self._processes is not None:
            self._processes.kill()

    @property
    def drain_seconds(self) -> float:
        """The seconds to wait for functions on threads and for the device."""
        return self._device_resources.deadline.left()

    async def settle(self, seconds: float | None) -> bool:
        """Wait until no function of the program runs; False if one on a thread does not return in this time.

        The functions of expired samples do not count. A process is killed if its function does not return.
        """
        began = self.now()
        parts: list[LoaderThreads | ProcessDecoders] = [] if self._processes is None else [self._processes]
        parts.append(self._threads)  # after the processes: their replies are loaded on threads
        if self._reader is not self._threads:
            parts.append(self._reader)
        for part in parts:
            left = None if seconds is None else max(0.0, seconds - (self.now() - began))
            if await part.settle(left):
                continue
            if isinstance(part, LoaderThreads):
                return False
            await part.end_requests()
        return True

    async def _off_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that may block."""
        run = asyncio.to_thread if self._device_resources.closed else self._reactor.jobs.run
        return await run(function, *args)

    async def close(self) -> None:
        """End the threads and processes, and close the streams. Their memory goes back when nothing uses it."""
        if self.slow is not None:
            self.slow.close()
        try:
            if self._processes is not None:
                await self._end_processes(self._processes)
        finally:
            self._threads.close()
            self._reader.close()
            closing = [start_task(close_stream, stream) for stream in self._streams]
            self._streams = []
            await end_tasks(closing, self._device_resources.deadline.left())
            self.slots.drop_shared()
            with contextlib.suppress(ClosedError, DeviceFault):
                await self._closing.aclose()

    async def _end_processes(self, processes: ProcessDecoders) -> None:
        processes.begin_close()
        if self._device_resources.closed:
            processes.kill()
        else:
            await self.settle(self._device_resources.deadline.left())
        await processes.close(self._off_loop)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, whatever it is."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it is not reported as never retrieved


async def _unlock(pin: contextlib.AbstractAsyncContextManager[PinnedBuffer]) -> None:
    with contextlib.suppress(ClosedError, DeviceFault):
        await pin.__aexit__(None, None, None)
