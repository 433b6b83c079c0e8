"""DataLoader: batches of a source on a device, loaded ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, NoReturn, Self, Unpack, overload

from .._base._checks import check_integer
from .._base._mistakes import keywords, or_none, refuses
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import finish_shielded, unlimited
from .._base._tasks import start_task
from .._base._types import ProcessLocal, SourceLine
from ..device import Device
from ..errors import (
    BusyError,
    ClosedError,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
)
from ..lowlevel import resources_of
from ._advice import LoaderAdvice, advise
from ._batch import Batch, Delivery
from ._epoch import EpochRun, LoadingBatch
from ._names import lacks
from ._options import Executor, LoaderOptions, OnError, shard_of
from ._resources import LoaderResources
from ._sharing import Payload
from ._sources import MapSource, Order, Positions, Shuffle
from ._state import LoaderState, Progress, merged
from ._statistics import LoaderMeter, LoaderStats
from ._tensor_batch import TensorBatch
from ._tensors import Tensors, check_output
from ._typed import BatchT, FieldLike, LoaderKeywords

__all__ = ["DataLoader", "EpochBatches", "loader_keywords"]

#: For the options, which `sync_loader` passes on.
loader_keywords = keywords(
    "help(aiocuda.data.DataLoader) lists its parameters, to which sync_loader adds index= and driver=",
    "DataLoader(device, source, batch_size=64), or sync_loader(source, batch_size=64) in a plain loop",
    *LoaderKeywords.__annotations__,
    dataset="it is called source",
    device="use index=, because sync_loader opens the device",
    num_workers="use workers=; with executor='process' they are processes",
    devices="a loader has one device: make one for each of them, with shard=(rank, number of them)",
    **dict.fromkeys(("driver", "index"), "open_device takes it, or sync_loader, which opens the device"),
    **dict.fromkeys(("num_threads", "threads"), "use workers="),
    **dict.fromkeys(("processes", "num_processes"), "use workers=, and executor='process'"),
    **dict.fromkeys(
        ("pin_memory", "pin_memory_device"), "leave it out, because the memory of batches is always pinned"
    ),
    **dict.fromkeys(("transform", "transforms"), "use decode=, a function of a sample"),
    **dict.fromkeys(("shape", "dtype"), "fields=[((3, 224, 224), np.uint8)] has the shape and the dtype of each field"),
    **dict.fromkeys(("seed", "rng"), "use shuffle=Shuffle(seed=0); decode(sample, *, rng) gets a generator"),
    **dict.fromkeys(("rank", "world", "world_size", "num_replicas"), "use shard=(rank, world size)"),
    **dict.fromkeys(("weights", "replacement"), "use sampler=, such as WeightedRandomSampler(weights, n) of torch"),
    **dict.fromkeys(("epochs", "repeat"), "each loop over the loader is an epoch"),
    as_torch="use output='torch'",
    check="set AIOCUDA_CHECK=1, or open_device(check=True)",
    retries="use on_error= for samples that fail, and restarts= for processes that end",
    collate_fn="use collate=; or fields= and decode(sample, out), which need no copy",
    prefetch_factor="use prefetch=, the number of batches in all",
    persistent_workers="leave it out, because workers live as long as the loader is open",
    batch_sampler="use sampler=, which gives the indices of single samples, and batch_size=",
    generator="use shuffle=Shuffle(seed=0)",
    multiprocessing_context="leave it out, because a server forks the processes of executor='process'",
    worker_init_fn="open files and set seeds when the source is first used",
)


@lacks
@refuses(
    __enter__="is entered by `async with`; sync_loader(source, …) is for a plain `with`",
    __getitem__="is no list: `async for batch in loader`, or `await anext(aiter(loader))` for the first batch",
)
class DataLoader(Owner, Generic[BatchT]):
    """Batches of a source on a device: samples are read, decoded, stacked and uploaded ahead, off the event loop.

    ::

        async with DataLoader(device, files, fields=[((3, 224, 224), np.uint8), ((), np.int64)], decode=decode,
                              batch_size=64, workers=8, executor="process", shuffle=Shuffle(seed=0)) as loader:
            async for images, labels in loader:
                await stream.launch(step, grid, block, images, labels, model)

    With ``fields``, ``decode(sample, out)`` writes all of each field into views of page-locked memory, which the device
    reads directly: there is no copy between the decoder and the upload. Without, ``decode(sample)`` returns arrays,
    which are stacked.

    Parameters
    ----------
    device
        Gets the batches.
    source
        An object with ``__len__`` and ``__getitem__`` (a list, a dataset of PyTorch or Hugging Face), whose items the
        workers read; an iterable, which a thread reads; or an asynchronous iterable, which the loop reads.
    fields
        The shape and the dtype of each field of one sample: ``[((3, 224, 224), np.uint8), ((), "i8")]``. Such fields
        are 0, 1, …: ``image, label = out``, and batches unpack, too. Or by name: ``{"image": ((3, 224, 224), "u1")}``.
    decode
        A plain function, for worker threads or processes. None takes samples as they are. If it names the keyword
        ``rng``, it gets a `numpy.random.Generator`. The seed of ``shuffle``, or 0, the epoch and the sample's position
        in the order of all ranks determine its values: they are the same in threads, in processes and after a resume,
        and a sample that is drawn twice gets two of them. With the keyword ``epoch`` it gets the epoch's number.
    batch_size
        Samples in a batch. The last batch, and batches with skipped samples, are shorter.
    drop_last
        True leaves out a last batch that is shorter.
    collate
        A function of the list of decoded samples of a batch, without ``fields``; it returns an array, a tuple or a
        mapping of arrays. None stacks the samples' parts.
    workers
        How many samples are decoded at a time; they may belong to one batch. 0 is one thread, which also reads the
        source.
    executor
        ``"thread"``: threads of this process, for decoders that release the GIL. ``"process"``: processes, which write
        into memory that they share with this one. Source and functions must be picklable then.
    ordered
        False delivers each batch as soon as it is ready. A state then names the batches that came ahead of the others.
    shuffle
        The order of the samples, a `Shuffle`. None is the order of the source.
    sampler
        An iterable of the indices of an epoch, in the order of all ranks, in place of ``shuffle``: by weights, or by
        length. An index may come again or be left out. A thread iterates it at the start of each epoch, after
        ``set_epoch(n)`` if it has that. Every rank has the same sampler with the same seed, and `shard` takes the
        rank's samples. A resumed epoch iterates it again, and the indices before the position must be the same.
    shard
        (rank, world size): this loader delivers every ``world size``-th sample, from sample ``rank`` on. Every rank
        gets the same number of samples; without ``drop_last``, samples of the start are repeated for that. None is
        (0, 1), with a warning where `torch.distributed` has several ranks.
    prefetch
        The number of batches that are decoded, uploaded or ready while the consumer has one. ``2 * workers`` if a
        sample is a whole batch.
    on_error
        What happens if a sample fails: ``"raise"`` ends the epoch with its exception, which has a note with the index.
        ``"skip"`` leaves the sample out. A function is called as ``on_error(error, index)``, and the sample is left
        out; its result is ignored, and it may raise to end the epoch. An exception of an iterable source always ends
        the epoch. A sample that has ended two worker processes has failed, too, with a `WorkerLostError`: it is left
        out, but not more than 16 such samples of an epoch.
    timeout
        Seconds for a sample, more than 0; then it fails with a `TimeoutError`. A thread cannot be stopped: another one
        takes its place until the function returns, for at most ``workers`` samples. A process is killed, which counts
        as a restart.
    restarts
        How many worker processes the loader starts in place of lost ones, in all. Those in place of the processes that
        a sample has ended, before it was left out for that, do not count.
    output
        ``"torch"`` delivers a `TensorBatch`: PyTorch's own tensors, on the stream of PyTorch that is current in the
        consumer's ``anext``; CPU tensors without CUDA. Without ``fields``, nested lists, tuples and dictionaries that
        ``decode`` returns keep their form, and strings and None become lists. None delivers a `Batch`.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        An argument is wrong; or, with processes, something cannot be pickled, or the program's main module starts the
        loader outside of ``if __name__ == "__main__":``.
    """

    @overload
    def __init__(
        self: DataLoader[TensorBatch],
        device: Device,
        source: MapSource | Iterable[Any] | AsyncIterable[Any],
        *,
        output: Literal["torch"],
        **options: Unpack[LoaderKeywords],
    ) -> None: ...

    @overload
    def __init__(
        self: DataLoader[Batch],
        device: Device,
        source: MapSource | Iterable[Any] | AsyncIterable[Any],
        *,
        output: None = None,
        **options: Unpack[LoaderKeywords],
    ) -> None: ...

    @loader_keywords
    def __init__(
        self,
        device: Device,
        source: MapSource | Iterable[Any] | AsyncIterable[Any],
        *,
        fields: Mapping[Any, FieldLike] | Sequence[FieldLike] | None = None,
        decode: Callable[..., Any] | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        executor: Executor = "thread",
        ordered: bool = True,
        shuffle: Shuffle | None = None,
        sampler: Iterable[int] | None = None,
        shard: tuple[int, int] | None = None,
        prefetch: int = 3,
        on_error: OnError = "raise",
        timeout: float | None = None,
        restarts: int = 1,
        output: Literal["torch"] | None = None,
    ) -> None:
        if not isinstance(device, Device):
            cure = "`async with aiocuda.open_device() as device`, or sync_loader(source, …) in a plain loop"
            raise InvalidTypeError(f"DataLoader(device, source, …) takes an aiocuda.Device, not {device!r:.60}: {cure}")
        self.device = device
        self._line: SourceLine | None = None  # that warnings are about
        self._options = options = LoaderOptions.checked(
            source, fields, decode, collate, shuffle, sampler, shard_of(shard, sampler), batch_size=batch_size,
            drop_last=drop_last, workers=workers, executor=executor, ordered=ordered, prefetch=prefetch,
            on_error=on_error, timeout=timeout, restarts=restarts,
        )  # fmt: skip
        self._payload: Payload | None = None
        if options.executor == "process":
            self._payload = Payload(
                options.decoder(checks=device.checker is not None), {"decode": decode, "source": source}
            )
        self._meter = LoaderMeter(device.driver.now, options.executor)
        self._progress = Progress(options)
        self._resources: LoaderResources | None = None
        self._restarts = 0  # of closed resources
        self._scope = Scope(
            repr(self), "close it there, and make a loader in each loop", "make another one",
            drain_seconds=unlimited, wrong_loop=resources_of(device).device_state.wrong_loop,
        )  # fmt: skip
        self._run: EpochRun | None = None
        self._run_end: asyncio.Task[bool] | None = None  # the newest end of a run
        self._batches: EpochBatches[Any] | None = None  # the iterator of the run
        self._delivery = Delivery(device)
        self._newest: LoadingBatch | None = None  # the batch that `put_back` would put back
        check_output(output)
        self._tensors = None if output is None else Tensors(device)
        self._requesting = False

    # -- epochs --------------------------------------------------------------------------------------------------

    @or_none
    def epoch(self, number: int) -> EpochBatches[BatchT]:
        """Return the batches of an epoch, as an asynchronous iterator. It begins with the first request.

        An epoch that was resumed by `load_state_dict` goes on there. Another epoch that is still running ends.
        """
        check_integer(number, "the number of an epoch, as in loader.epoch(0),")
        if number < 0:
            raise InvalidArgumentError(f"epochs are counted from 0, and this is {number}", epoch=number)
        return EpochBatches(self, number)

    def __aiter__(self) -> AsyncIterator[BatchT]:
        """Return the batches of the next epoch. After `load_state_dict`, go on in the epoch of the state."""
        return EpochBatches(self, None)

    def __len__(self) -> int:
        """The number of batches of a whole epoch.

        Raises
        ------
        InvalidTypeError
            The source has no length, or its sampler has none.
        """
        samples = self._options.epoch_samples
        if samples is None:
            raise InvalidTypeError(
                "the source or the sampler of this loader has no length, so the number of batches is known at the end "
                "only"
            )
        return len(Positions(samples, self._options.order(0)))

    def __bool__(self) -> bool:
        return True  # also without batches: it is a loader, and no container

    def next_output(self, batches: EpochBatches[Any]) -> Coroutine[Any, Any, Any]:
        """Return the next batch of an iterator: a `Batch`, or a `TensorBatch` with ``output="torch"``."""
        if self._tensors is None:
            return self.next_batch(batches)
        return self._tensors.next(partial(self.next_batch, batches), self)

    async def next_batch(self, batches: EpochBatches[Any]) -> Batch:
        """Return the next batch of an iterator. `StopAsyncIteration` at the end of its epoch."""
        if batches.ended:
            raise StopAsyncIteration
        if self._requesting:
            raise BusyError("another task waits for the next batch of this loader: each batch goes to one task")
        self._requesting = True
        try:
            requested = self._meter.note_request()
            resources = self._check_open()
            self.free_batch()
            if self._batches is not batches:
                batches.check_new()
                await self._end_run(resources)
                await self._check_open().renew_source()
                number, start = self._progress.coming(batches.number)
                sampled = await self._check_open().read_sampler(number, start)
                self._begin(batches, self._check_open(), *self._progress.begin(number, sampled))
            run = self._run
            assert run is not None
            try:
                while (loading := await run.next()) is not None:
                    if loading.error is not None:
                        raise loading.error
                    plan, upload = loading.plan, loading.upload
                    self._progress.delivered(plan.number, plan.end)
                    if loading.state == "ready":
                        assert upload is not None
                        self._meter.deliver(requested, len(loading.indices), plan.padded)
                        self._newest = None if self._tensors is None else loading
                        return self._delivery.deliver(plan.number, loading.indices, upload.stream, upload.memory)
                run.check_empty(self._line, is_first=self._run_end is None)
            except asyncio.CancelledError:
                raise
            except BaseException:
                batches.end()
                if not self._scope.closing:  # otherwise `aclose` ends the run, and this task does not wait for it
                    await self._end_run(resources)
                raise
            batches.end()
            self._progress.end_epoch()
            await self._end_run(resources)
            raise StopAsyncIteration
        finally:
            self._requesting = False

    def free_batch(self) -> None:
        """Free the memory of the batch in hand, unless something keeps it."""
        self._newest = None
        self._delivery.release()

    def put_back(self) -> None:
        """Deliver the batch in hand again at the next request: it did not reach the program."""
        newest, self._newest = self._newest, None
        if newest is None or self._run is None:
            return
        self._delivery.take_back()
        self._progress.take_back()
        self._meter.take_back(len(newest.indices), newest.plan.padded)
        self._run.put_back(newest)

    def warn_at(self, line: SourceLine) -> Self:
        """Return the loader, whose warnings are about this line: no line of the program is on the stack of its task."""
        self._line = line
        return self

    def _begin(
        self, batches: EpochBatches[Any], resources: LoaderResources, order: Order, ahead: frozenset[int]
    ) -> None:
        batches.begin()
        self._run = EpochRun(resources, self._scope, order, ahead)
        self._batches = batches
        self._meter.begin()

    async def _end_run(self, resources: LoaderResources) -> None:
        """End the epoch that is running, and wait until none of its work runs. Shielded from cancellation."""
        run, self._run, self._batches = self._run, None, None
        self._meter.end()
        if run is None:
            if self._run_end is not None and not self._run_end.done():
                await asyncio.wait({self._run_end})  # another task has begun it
            return
        self._run_end = start_task(run.close, resources.drain_seconds)
        if not await finish_shielded(self._run_end):
            self._scope.place.warn(
                "a function of a data loader did not return in time: its thread and its memory are set aside",
                DrainTimeoutWarning,
            )

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were delivered, the one in hand included, for `json.dumps`.

        Batches that were loaded ahead are loaded again after `load_state_dict`. For a source with a length it has less
        than 1 KB. It is a position in the order of all ranks, so the world size may change.
        """
        return self._progress.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches of a state. The next ``async for`` runs the epoch of the state.

        ``epoch(n)`` of another epoch begins at the start of that epoch.
        A state of the last batch has an empty rest: the first ``async for`` delivers no batch. The batch size and
        the workers may differ from those of the loader that returned the state.
        A stream is read again from its start, and the samples before the position are not decoded.

        Raises
        ------
        BusyError
            An epoch of this loader is running.
        InvalidArgumentError, InvalidTypeError
            The state is that of another source, or of another order.
        """
        if self._run is not None:
            raise BusyError("an epoch of this loader is running: load the state before the first batch is requested")
        self._progress.load(LoaderState.of(state))

    @staticmethod
    @keywords("it takes the states of all ranks", "merge_state_dicts([first, second])")
    def merge_state_dicts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the one state of all ranks, to be loaded by each rank of any world size.

        Raises
        ------
        InvalidArgumentError
            The states differ: the ranks have delivered different numbers of batches, or have different sources or
            orders. Or there is none.
        """
        return merged(states).to_dict()

    def statistics(self) -> LoaderStats:
        """Return the statistics since the loader was made."""
        restarts = self._restarts + (0 if self._resources is None else self._resources.restarts)
        return self._meter.statistics(max(1, self._options.workers), restarts, self._delivery.kept)

    def advice(self) -> LoaderAdvice:
        """Return the ``executor``, ``workers`` and ``prefetch`` that suit the measured times, with the reasons.

        Load for some seconds first: waits for the GIL are measured once, in the fourth second of an epoch. The advice
        is a step: follow it and measure again.

        Raises
        ------
        BusyError
            No batch has been delivered yet.
        """
        options = self._options
        samples = options.epoch_samples
        samples = self._meter.epoch_samples if samples is None else -(-samples // options.shard[1])
        return advise(self.statistics(), options.batch_size, options.prefetch, samples)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the worker processes."""
        return [] if self._resources is None else self._resources.pids

    # -- open and close ------------------------------------------------------------------------------------------

    def _check_open(self) -> LoaderResources:
        if self._scope.closing:
            raise self._scope.closed_error()
        if self._resources is None:
            raise BusyError("a loader has threads and memory to release: use `async with DataLoader(…) as loader`")
        self._scope.check_loop()
        return self._resources

    async def __aenter__(self) -> Self:
        with self._scope.entering():
            resources = LoaderResources(self.device, self._options, self._meter, self._payload, self._tensors)
            await resources.open()
        if self._scope.closing:
            await finish_shielded(resources.close())
            raise ClosedError("this loader was closed while it was being opened: make another one")
        self._resources = resources
        device_resources = resources_of(self.device)
        use = "`async with DataLoader(device, source) as loader`"
        self._scope.must_end(use, SourceLine.of_caller(), lambda: device_resources.closed)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        await self._scope.exit(self, kind)

    async def aclose(self) -> None:
        """End the epoch that is running, the threads and the processes. The batch in hand is freed. Idempotent.

        A second call waits until the first one has ended.

        Memory that is shared with worker processes is unlocked, by calls that wait for every running kernel of the
        process, and hold the launches of all threads meanwhile. So this waits, for at most a second, until no operation
        of this process is unfinished on any device of the driver.

        Raises
        ------
        BusyError
            An asynchronous source has called it, which would wait for itself.
        """
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        if self._resources is not None:
            self._resources.begin_close()

    def _withdraw(self) -> None:
        if self._resources is not None:
            self._resources.kill()

    def _unfinished(self) -> int | None:
        return 0 if self._resources is None else None

    async def _drain(self) -> None:
        # Each of its waits has a limit: a function on a thread is set aside if it does not return in time.
        resources = self._resources
        assert resources is not None
        try:
            self.free_batch()
        finally:
            await self._end_run(resources)

    async def _release(self, outcome: Outcome) -> None:
        resources = self._resources
        if resources is None:  # it was never opened
            return
        try:
            await resources.close()
        finally:
            self._restarts += resources.restarts
            self._resources = None

    def __iter__(self) -> NoReturn:
        raise InvalidTypeError(
            "a loader is iterated asynchronously, `async for batch in loader`; for a plain loop use "
            "`with aiocuda.data.sync_loader(source, …) as batches`"
        )

    def __repr__(self) -> str:
        options = self._options
        length = "unknown length" if options.length is None else f"{options.length} samples"
        return f"<DataLoader {length}, batch_size={options.batch_size}, {options.workers} {options.executor} workers>"


class EpochBatches(ProcessLocal, AsyncIterator[BatchT]):
    """The batches of one epoch, as an asynchronous iterator. Made by `DataLoader.epoch` and ``async for``.

    Attributes
    ----------
    number : int or None
        The epoch; None for the next one, whichever that is when the first batch is requested.
    has_begun : bool
        True after the first request.
    ended : bool
        True after the last batch, or after a failure.
    """

    def __init__(self, loader: DataLoader[BatchT], number: int | None) -> None:
        self._loader = loader
        self.has_begun = False
        self.number = number
        self.ended = False

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return len(self._loader)

    def check_new(self) -> None:
        """Raise `ClosedError` if the epoch was left: its place in the loader is that of another one."""
        if self.has_begun:
            raise ClosedError(
                "these batches have ended, since another epoch of the loader was begun: a loader runs one epoch at a "
                "time; make two loaders for two epochs at a time"
            )

    def begin(self) -> None:
        """The loader loads this epoch from now on."""
        self.has_begun = True

    def end(self) -> None:
        """The epoch has no further batch, or has failed."""
        self.ended = True

    def __anext__(self) -> Coroutine[Any, Any, BatchT]:
        return self._loader.next_output(self)
