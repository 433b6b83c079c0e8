"""to_device: the batches of another loader, on a device."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype
from .._base._checks import check_integer
from .._base._mistakes import keywords
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import end_tasks, unlimited
from .._base._tasks import start_task
from .._base._types import SourceLine
from .._base._user_code import LEAVES_LOOP, add_note, call, failure_of
from ..device import Device
from ..errors import (
    BusyError,
    CleanupWarning,
    ClosedError,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
)
from ..lowlevel import as_source, owned, resources_of
from ..stream import Stream
from ._batch import Batch, Delivery
from ._source_state import UNKNOWN, SourceState
from ._sources import AsyncReader, BatchPlan, Order, SourceKind, StreamReader, iterator_has_ended, kind_of
from ._statistics import DeviceBatchesStats, LoaderMeter
from ._tensor_batch import TensorBatch
from ._tensors import Tensors, check_output
from ._threads import LoaderThreads, ignore
from ._typed import BatchT
from ._upload import BatchUpload, close_stream, parts_of

__all__ = ["TO_DEVICE_CURES", "DeviceBatches", "DeviceIteration", "to_device"]

#: For arguments of other libraries, which `sync_to_device` takes for them, too.
TO_DEVICE_CURES: Final = {
    "prefetch": "use depth=, the number of batches that are read ahead",
    "prefetch_factor": "use depth=, the number of batches that are read ahead",
    "buffer": "use depth=, the number of batches that are read ahead",
    "buffer_size": "use depth=, the number of batches that are read ahead",
    "batch_size": "the source gives whole batches; DataLoader(device, dataset, batch_size=64) makes them",
    "workers": "the source has its own workers; DataLoader(device, dataset, workers=8) has those of aiocuda",
    "num_workers": "the source has its own workers; DataLoader(device, dataset, workers=8) has those of aiocuda",
    "non_blocking": "leave it out, because copies are always ahead of the consumer",
    "pin_memory": "leave it out, because pinned memory is used where the source has none",
    "dtype": "arrays keep their dtype: convert them in the source, or on the device",
    "stream": "leave it out, because each batch has a stream of its own",
}

#: The items of the source, one by one.
_ONE_BY_ONE = Order(1, False, (0, 1), None, 0, 0, 0)


@overload
def to_device(
    source: Iterable[Any] | AsyncIterable[Any], device: Device, depth: int = 3, *, output: Literal["torch"]
) -> DeviceBatches[TensorBatch]: ...


@overload
def to_device(
    source: Iterable[Any] | AsyncIterable[Any], device: Device, depth: int = 3, *, output: None = None
) -> DeviceBatches[Batch]: ...


@keywords(
    "to_device takes a source, a device, depth= and output=",
    "to_device(source, device) takes a source of batches and a device; sync_to_device(source) is for a plain loop",
    **TO_DEVICE_CURES,
)
def to_device(
    source: Iterable[Any] | AsyncIterable[Any],
    device: Device,
    depth: int = 3,
    *,
    output: Literal["torch"] | None = None,
) -> DeviceBatches[Any]:
    """Return the batches of another loader, copied to a device ahead of the consumer.

    ::

        async with to_device(torch_loader, device) as batches:
            async for batch in batches:
                await batch.stream.launch(step, grid, block, batch["image"], model)

    A batch of the source is a mapping, a tuple, a named tuple, a dataclass or a single array. Its arrays are NumPy
    arrays, numbers, or CPU tensors of another library, by DLPack. The device reads pinned tensors directly. A batch
    must stay unchanged until its upload is complete: loaders that use their arrays again need more than ``depth`` of
    them. The batches on the device are those of `DataLoader`: mappings by field, valid until the next one is requested.

    Parameters
    ----------
    source
        Any iterable, which a thread reads, or an asynchronous iterable, which the loop reads. Each ``async for``
        iterates it anew; see `DeviceBatches` for a source that is an iterator, or has a state. It is read ``depth``
        batches ahead: `DeviceBatches.state_dict` is its state without them.
    device
    depth
        The number of batches that are read, uploaded or ready while the consumer has one.
    output
        ``"torch"`` delivers a `TensorBatch`: PyTorch's own tensors, on the stream of PyTorch that is current in the
        consumer's ``anext``; CPU tensors without CUDA. Nested lists, tuples and dictionaries of the source's batches
        keep their form; strings, numbers and None pass through. None delivers a `Batch`.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        An argument is wrong.
    """
    if not isinstance(device, Device):
        cure = "`async with aiocuda.open_device() as device`, or sync_to_device(source) in a plain loop"
        raise InvalidTypeError(f"to_device(source, device) takes an aiocuda.Device, not {device!r:.60}: {cure}")
    kind = kind_of(source)
    check_integer(depth, "depth")
    if depth < 1:
        raise InvalidArgumentError(f"depth is at least 1, not {depth}", depth=depth)
    check_output(output)
    return DeviceBatches(source, kind, device, depth, None if output is None else Tensors(device))


class _Loading:
    """A batch on its way."""

    __slots__ = ("error", "number", "state", "upload")

    def __init__(self, number: int, upload: BatchUpload | None, error: BaseException | None, state: Any) -> None:
        self.number = number
        self.upload = upload
        self.error = error
        self.state = state  # of the source after the batch


class _Item(NamedTuple):
    """A batch that was read from the source, or the end."""

    number: int
    form: dict[Any, Any] | None  #: of a batch of tensors
    parts: dict[Any, Any] | None  #: the arrays of a batch by name; None at the end
    state: Any  #: of the source after it


class DeviceBatches(Owner, AsyncIterable[BatchT]):
    """The batches of another loader on a device. Made by `to_device`.

    Each ``async for`` iterates the source from its start, and ends the one that is still running. A source that is an
    iterator has one start only: after ``break``, the next ``async for`` goes on after the last delivered batch, and
    after its end the next one raises `InvalidArgumentError`. ``anext(batches)`` is the next batch of the iteration that
    is running; if there is none, it begins one, and the next ``async for`` goes on with it.

    A source has a state if it, or its iterator, has the methods ``state_dict`` and ``load_state_dict``, as PyTorch's
    ``StatefulDataLoader``, or ``get_state`` and ``set_state``, as Grain's iterators. Its state is copied after each
    batch. After ``break`` or a failure it is set back, and the next ``async for`` goes on after the last delivered
    batch. The end of the block sets it back, too.

    ``async with`` ends the thread that reads the source and closes the streams; the end of the source does so, too.
    """

    def __init__(self, source: Any, kind: SourceKind, device: Device, depth: int, tensors: Tensors | None) -> None:
        self.device = device
        self._tensors = tensors
        self._source = source
        self._kind = kind
        self._depth = depth
        self._delivery = Delivery(device)
        self._meter = LoaderMeter(device.driver.now, "process")  # samples no GIL: nothing is decoded here
        self._scope = Scope(
            repr(self), "close it there, and make a loader in each loop",
            "make others by to_device(source, device)", drain_seconds=unlimited,
            wrong_loop=resources_of(device).device_state.wrong_loop,
        )  # fmt: skip
        self._newest: tuple[SourcePass, _Loading] | None = None  # what `put_back` would put back
        self._pass: SourcePass | None = None  # the newest one
        self._loaded: Any = UNKNOWN  # the state of the source with which the next pass begins
        self._after: Any = UNKNOWN  # the state at the end of the pass before
        self._requesting = False
        self._made_at = SourceLine.of_caller()

    def __len__(self) -> int:
        """The number of batches, where the source has a length."""
        try:
            return len(self._source)
        except TypeError:
            raise InvalidTypeError(
                f"the source of these batches, of type {type(self._source).__name__}, has no length"
            ) from None

    def __bool__(self) -> bool:
        return True  # also without batches

    def __aiter__(self) -> AsyncIterator[BatchT]:
        self._check_open()
        return DeviceIteration(self)

    def __anext__(self) -> Coroutine[Any, Any, BatchT]:
        return self.next_output(None)

    def next_output(self, iteration: DeviceIteration[Any] | None) -> Coroutine[Any, Any, Any]:
        """Return the next batch of an iteration: a `Batch`, or a `TensorBatch` with ``output="torch"``."""
        if self._tensors is None:
            return self.next_batch(iteration)
        return self._tensors.next(partial(self.next_batch, iteration), self)

    async def next_batch(self, iteration: DeviceIteration[Any] | None) -> Batch:
        """Return the next batch of an iteration; None is the one that is running, or a new one."""
        if self._requesting:
            raise BusyError("another task waits for the next of these batches: each batch goes to one task")
        self._requesting = True
        try:
            self._scope.bind()
            if self._scope.closing:
                raise StopAsyncIteration
            requested = self._meter.note_request()
            self.free_batch()
            source_pass = self._running() if iteration is None else await iteration.source_pass()
            return await self._next(source_pass, requested)
        finally:
            self._requesting = False

    async def _next(self, source_pass: SourcePass, requested: float) -> Batch:
        if not source_pass.ended:
            self._meter.begin()
        try:
            loading = await source_pass.next()
            if loading is not None:
                upload = loading.upload
                assert upload is not None
                self._meter.add_upload(upload.nbytes, None)
                self._meter.deliver(requested, 0, 0)
                self._newest = None if self._tensors is None else (source_pass, loading)
                return self._delivery.deliver(loading.number, (), upload.stream, upload.memory)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._meter.end()
            if not self._scope.closing:  # otherwise `aclose` ends the pass, and this task does not wait for it
                await source_pass.aclose()
            raise
        self._meter.end()
        await source_pass.aclose()
        raise StopAsyncIteration

    def free_batch(self) -> None:
        """Free the memory of the batch in hand, unless something keeps it."""
        self._newest = None
        self._delivery.release()

    def put_back(self) -> None:
        """Deliver the batch in hand again at the next request: it did not reach the program."""
        newest, self._newest = self._newest, None
        if newest is None or newest[0].ended or self._scope.closing:
            return
        self._delivery.take_back()
        self._meter.take_back(0, 0)
        source_pass, loading = newest
        source_pass.put_back(loading)

    # -- passes over the source ----------------------------------------------------------------------------------

    def _running(self) -> SourcePass:
        """Return the newest pass, also if it has ended; the first one if there is none."""
        if self._pass is None:
            self._pass = self._begin(is_first=True)
        return self._pass

    def _begin(self, *, is_first: bool) -> SourcePass:
        state, self._loaded = SourceState(self._source, self._loaded), UNKNOWN
        return SourcePass(
            self._source, self._kind, self.device, self._depth, self._made_at, self._scope, state, self._meter,
            self._tensors, is_first=is_first,
        )  # fmt: skip

    async def pass_for_new_iteration(self) -> SourcePass:
        """Return the newest pass if an ``async for`` that begins goes on with it; else end it, and return a new one."""
        newest = self._running()
        if not newest.goes_on:
            await newest.aclose()
            self._check_open()
            self._after, self._loaded = newest.state.after, newest.state.start_of_next
            newest = self._pass = self._begin(is_first=False)
        newest.join()
        return newest

    def check_newest(self, source_pass: SourcePass) -> None:
        """Raise if another pass was begun: `StopAsyncIteration` if this one had ended before."""
        if source_pass is self._pass:
            return
        if source_pass.ended:
            raise StopAsyncIteration
        raise ClosedError(
            "this iteration has ended, since another `async for` over the same batches was begun: call to_device(…) "
            "twice for two at a time"
        )

    # -- state, statistics ----------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return the state of the source after the batches that were delivered, the one in hand included.

        It is a copy of the state that ``state_dict()`` of the source has returned then, or ``get_state()``; or those of
        its iterator. The source itself takes it, too: batches that were read ahead are not in it. If the iterator has
        the state, that before the first batch is the state of a new iterator, and one that is taken after the last
        batch has an empty rest.

        Raises
        ------
        InvalidTypeError
            Neither the source nor its iterator has a state.
        BusyError
            The source is being iterated for the first time, and none of its batches was delivered.
        """
        newest = self._pass
        for found in (UNKNOWN if newest is None else newest.state.after, self._loaded, self._after):
            if found is not UNKNOWN:
                return copy.deepcopy(found)
        state = SourceState(self._source) if newest is None else newest.state
        found = UNKNOWN
        if newest is None:  # nothing reads the source now
            found = state.take()
            if found is UNKNOWN:
                state.iterate(aiter if self._kind == "async" else iter)
                found = state.after
        elif not state.has_begun:
            raise BusyError("the source of these batches is being opened: take its state after the first batch")
        if found is UNKNOWN:
            raise state.error()
        return found

    def load_state_dict(self, state: Any) -> None:
        """Go on after the batches of a state of `state_dict`, or of the source itself.

        The source gets it when the first batch is requested. A state of the last batch has an empty rest: the first
        ``async for`` delivers no batch. If the source has no state, the first request raises `InvalidTypeError`.

        Raises
        ------
        BusyError
            The source is being iterated.
        """
        self._check_open()
        if self._pass is not None and not self._pass.ended:
            raise BusyError("the source of these batches is being iterated: load a state before the first batch")
        self._loaded, self._pass = copy.deepcopy(state), None

    # -- the end -------------------------------------------------------------------------------------------------

    def statistics(self) -> DeviceBatchesStats:
        """Return the statistics since these batches were made."""
        found = self._meter.statistics(0, 0, self._delivery.kept)
        return DeviceBatchesStats(
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(DeviceBatchesStats)}
        )

    def _check_open(self) -> None:
        if self._scope.closing:
            raise self._scope.closed_error()

    async def __aenter__(self) -> Self:
        self._scope.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        await self._scope.exit(self, kind)

    async def aclose(self) -> None:
        """End the thread and the uploads, and close the streams. The batch in hand is freed. Idempotent.

        A second call waits until the first one has ended.

        Raises
        ------
        BusyError
            An asynchronous source has called it, which would wait for itself.
        """
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        if self._pass is not None:
            self._pass.wake()

    async def _drain(self) -> None:
        # Each wait of a pass has a limit: a thread is set aside if the source does not return in time.
        if self._pass is not None:
            await self._pass.aclose()

    async def _release(self, outcome: Outcome) -> None:
        self._meter.end()
        self.free_batch()

    def __repr__(self) -> str:
        return f"<DeviceBatches of {type(self._source).__name__}, depth {self._depth}>"


class DeviceIteration(AsyncIterator[BatchT]):
    """One ``async for`` over `DeviceBatches`."""

    __slots__ = ("_batches", "_pass")

    def __init__(self, batches: DeviceBatches[BatchT]) -> None:
        self._batches = batches
        self._pass: SourcePass | None = None  # where its batches come from

    def __anext__(self) -> Coroutine[Any, Any, BatchT]:
        return self._batches.next_output(self)

    def check_new(self) -> None:
        """Raise `ClosedError` if another iteration was begun after this one."""
        if self._pass is not None:
            self._batches.check_newest(self._pass)

    async def source_pass(self) -> SourcePass:
        """Return the pass that the next batch comes from."""
        if self._pass is None:
            self._pass = await self._batches.pass_for_new_iteration()
        self._batches.check_newest(self._pass)
        return self._pass


class SourcePass(Owner):
    """One pass over the source: its batches on their way, with the thread or the task, and the streams, for them.

    Attributes
    ----------
    ended : bool
        True after the last batch, or after a failure.
    state : SourceState
    """

    def __init__(
        self, source: Any, kind: SourceKind, device: Device, depth: int, made_at: SourceLine, batches: Scope,
        state: SourceState, meter: LoaderMeter, tensors: Tensors | None, *, is_first: bool,
    ) -> None:  # fmt: skip
        self.ended = False
        self._tensors = tensors
        self.state = state
        self._meter = meter
        self._read_from = 0.0  # the time when the reading of the next batch began
        self._is_iterated = False
        self._source = source
        self._reader: AsyncReader | StreamReader
        if kind == "async":
            self._reader = AsyncReader(source, _ONE_BY_ONE, batches, lambda _: state.iterate(aiter))
        else:
            self._reader = StreamReader(source, _ONE_BY_ONE, lambda _: state.iterate(iter))
        self._device = device
        self._depth = depth
        self._made_at = made_at
        self._may_be_empty = state.after is not UNKNOWN or (is_first and not _is_finished(source))
        self._threads: LoaderThreads | None = None
        streams = self._streams = list[Stream]()
        self._loading: deque[_Loading] = deque()
        self._is_reading = False
        self._read_task: asyncio.Task[None] | None = None
        self._exhausted = False
        self._end_state: Any = UNKNOWN  # of the source after the last batch
        self._waiter: asyncio.Future[None] | None = None
        self._batches = batches
        self._scope = Scope("this iteration", "", "begin another one", drain_seconds=unlimited)
        resources, use = resources_of(device), "`async with to_device(source, device) as batches`"
        self._scope.must_end(use, made_at, lambda: resources.closed or not streams)

    @property
    def goes_on(self) -> bool:
        """True if the next ``async for`` goes on with this pass: the source has no other start, or none has begun."""
        is_open = not (self.ended or self._scope.closing)
        return is_open and not (self._is_iterated and self._reader.has_own_iterator)

    def join(self) -> None:
        """An ``async for`` gets the batches."""
        self._is_iterated = True

    async def next(self) -> _Loading | None:
        """Wait for the next batch; None after the last one."""
        try:
            while not self.ended:
                if self._scope.closing or self._batches.closing:
                    raise ClosedError("these batches were closed while a task waited for the next one: request no more")
                self._fill()
                loading = self._loaded()
                if loading is not None:
                    self._may_be_empty = True
                    self.state.deliver(loading.state)
                    self._fill()
                    return loading
                if self._exhausted and not self._loading:
                    self._check_empty()
                    self.state.deliver(self._end_state, is_end=True)
                    break
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.ended = True
            raise
        self.ended = True
        return None

    def put_back(self, loading: _Loading) -> None:
        """Return the newest batch of `next` again at the next call: it did not reach the program."""
        self._loading.appendleft(loading)
        self.state.take_back()

    def _check_empty(self) -> None:
        """Raise if the source gave no batch because it is an iterator that had ended before."""
        if not (self._may_be_empty or self._reader.has_own_iterator):
            raise iterator_has_ended(self._source, "to_device(…)")

    def _loaded(self) -> _Loading | None:
        """Return the next batch if its upload has ended; else have the consumer woken then."""
        if not self._loading:
            return None
        first = self._loading[0]
        if first.upload is None:
            assert first.error is not None
            raise failure_of(first.error)  # a bare StopAsyncIteration would end the iteration
        if first.upload.poll():
            error = first.upload.finish()
            if error is not None:
                raise failure_of(error)
            return self._loading.popleft()
        first.upload.watch(self.wake)
        return None

    def wake(self) -> None:
        """Let the task that waits for a batch look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the source ----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Read the next batch, if there is room for it."""
        if self._exhausted or self._is_reading or len(self._loading) >= self._depth:
            return
        self._is_reading = True
        self._read_from = self._device.driver.now()
        if isinstance(self._reader, AsyncReader):
            reading = start_task(self._await_source, self._reader)
            if not reading.done():  # an eager task that has ended may have begun the next one
                self._read_task = reading
            return
        if self._threads is None:
            jobs = resources_of(self._device).open_reactor().jobs
            self._threads = LoaderThreads(jobs, "aiocuda-to-device", 1)
        self._threads.start(partial(_read, self._reader, self.state, self._tensors), self._read)

    async def _await_source(self, reader: AsyncReader) -> None:
        try:
            plan = await reader.read()
            self._read(call(_item, plan, self.state, self._tensors), None)
        except asyncio.CancelledError as caught:
            if self._scope.closing:
                raise
            error = ClosedError("the source of these batches was cancelled")
            error.__cause__ = caught
            self._read(None, error)
        except BaseException as error:
            self._read(None, error)
            if isinstance(error, LEAVES_LOOP):
                raise

    def _read(self, item: _Item | None, error: BaseException | None) -> None:
        """The next batch has been read, or the end; None after a failure."""
        self._is_reading = False
        self._meter.add_source(self._device.driver.now() - self._read_from)
        if self._scope.closing:
            return
        if item is None:
            self._exhausted = True
            self._loading.append(_Loading(-1, None, error, UNKNOWN))
        elif item.parts is None:
            self._exhausted = True
            self._end_state = item.state
        else:
            self._upload(item.number, item.form, item.parts, item.state)
            self._fill()
        self.wake()

    def _upload(self, number: int, form: dict[Any, Any] | None, parts: dict[Any, Any], state: Any) -> None:
        upload = BatchUpload(self._stream(number), form)
        try:
            pool = resources_of(self._device).pinned_pool
            upload.start({name: _host_array(name, part, pool) for name, part in parts.items()})
        except BaseException as error:
            add_note(error, f"in batch {number} of the source, counted from 0")
            self._exhausted = True
            self._loading.append(_Loading(number, None, error, state))
            if isinstance(error, LEAVES_LOOP):
                self.wake()
                raise
        else:
            self._loading.append(_Loading(number, upload, None, state))

    def _stream(self, number: int) -> Stream:
        """Return the stream of a batch."""
        # One for each batch on its way and one for the batch in hand: work on a batch delays no upload.
        while len(self._streams) <= self._depth:
            stream = self._device.stream(name=f"to_device {len(self._streams)}")
            self._streams.append(owned(stream, self._made_at))
        return self._streams[number % len(self._streams)]

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End the reading and the uploads, and close the streams. A task that waits for a batch gets an error."""
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        self.wake()

    async def _drain(self) -> None:
        deadline = resources_of(self._device).deadline
        try:
            await self._close_source(deadline.left())
        finally:
            uploads = [each.upload for each in self._loading if each.upload is not None]
            self._loading.clear()
            await end_tasks([start_task(upload.settle) for upload in uploads], deadline.left())
            for upload in uploads:
                upload.memory.free()
            streams, self._streams = self._streams, []
            await end_tasks([start_task(close_stream, stream) for stream in streams], deadline.left())

    async def _release(self, outcome: Outcome) -> None:
        """Do nothing: the drain has closed the streams."""

    async def _close_source(self, seconds: float) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.wait({self._read_task})
        if isinstance(self._reader, AsyncReader):
            await self._reader.aclose()
            try:
                self.state.set_back()
            except Exception as error:  # noqa: BLE001 - it is reported
                self._is_set_back(None, error)
        elif self._threads is not None:
            try:
                if await self._threads.settle(seconds):
                    self._threads.start(self._reader.close, ignore)
                    if self.state.is_ahead:
                        self._threads.start(self.state.set_back, self._is_set_back)
                        await self._threads.settle(resources_of(self._device).deadline.left())
                else:
                    self._made_at.warn(
                        "the source of to_device() did not return in time: its thread is set aside", DrainTimeoutWarning
                    )
            except ClosedError:
                pass  # the device was closed before, and the thread ends with it
            finally:
                self._threads.close()

    def _is_set_back(self, result: object, error: BaseException | None) -> None:
        """The state after the delivered batches has been loaded into the source."""
        if error is not None:  # of a program that may not need the state
            self._made_at.warn(
                f"the source of to_device() was not set back to the last delivered batch: {error!r}", CleanupWarning
            )


def _read(reader: StreamReader, state: SourceState, tensors: Tensors | None) -> _Item:
    return _item(reader.read(), state, tensors)


def _item(plan: BatchPlan | None, state: SourceState, tensors: Tensors | None) -> _Item:
    """Return a batch that has been read, or the end, with the state of the source after it."""
    after = state.take()
    if plan is None:
        return _Item(-1, None, None, after)
    assert plan.samples is not None
    parts = parts_of(plan.samples[0], "a batch of the source")
    form, parts = (None, parts) if tensors is None else tensors.split(parts)
    return _Item(plan.number, form, {name: _plain(part) for name, part in parts.items()}, after)


def _plain(value: Any) -> Any:
    """Return numbers and lists as arrays, and arrays with contiguous memory."""
    if isinstance(value, (int, float, complex, list, tuple)):
        return np.asarray(value)
    if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
        return np.ascontiguousarray(value)
    return value


def _host_array(name: Any, value: Any, pool: Any) -> npt.NDArray[Any]:
    """Return a field of a batch as an array over host memory."""
    try:
        if isinstance(value, np.ndarray):
            as_dtype(value.dtype)
            if value.dtype.kind in "SU":
                raise InvalidTypeError(f"dtype {value.dtype} is text")
            return value
        return as_source(value, pool)
    except InvalidTypeError as error:
        raise InvalidTypeError(
            f"field {name!r} of a batch is no array of numbers but {type(value).__name__} ({error}): leave it out of "
            "the batches, for example by a generator around the source"
        ) from error


def _is_finished(source: Any) -> bool:
    """True for a generator that has ended."""
    if inspect.isgenerator(source):
        return source.gi_frame is None
    return inspect.isasyncgen(source) and source.ag_frame is None
