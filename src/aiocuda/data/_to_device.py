"""to_device: the batches of another loader, on a device."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .._checks import check_integer
from .._device import Device
from .._device_resources import resources_of
from .._shutdown import end_tasks, finish_shielded
from .._types import ProcessLocal, SourceLine
from .._user_code import LEAVES_LOOP
from ..errors import (
    BusyError,
    ClosedError,
    DeviceFault,
    DrainTimeoutWarning,
    InvalidArgumentError,
    InvalidTypeError,
)
from ..interchange._host_arrays import as_source
from ..memory._arrays import as_dtype
from ..stream import Stream
from ..stream._stream import owned
from ._batch import Batch
from ._collate import parts_of
from ._delivery import Delivery
from ._order import Order
from ._sources import AsyncReader, BatchPlan, StreamReader, kind_of
from ._threads import LoaderThreads
from ._upload import BatchUpload

__all__ = ["DeviceBatches", "to_device"]

#: The items of the source, one by one.
_ONE_BY_ONE = Order(1, False, (0, 1), None, 0, 0, 0)


def to_device(source: Iterable[Any] | AsyncIterable[Any], device: Device, depth: int = 3) -> DeviceBatches:
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
        Any iterable, which a thread reads, or an asynchronous iterable, which the loop reads. It is read once.
    device
    depth
        The number of batches that are read, uploaded or ready while the consumer has one.

    Raises
    ------
    InvalidArgumentError, InvalidTypeError
        An argument is wrong.
    """
    resources_of(device)  # refuses what is no device
    kind = kind_of(source)
    check_integer(depth, "depth")
    if depth < 1:
        raise InvalidArgumentError(f"depth is at least 1, not {depth}", depth=depth)
    if kind == "async":
        return DeviceBatches(source, AsyncReader(source, _ONE_BY_ONE), device, depth)  # type: ignore[arg-type]
    return DeviceBatches(source, StreamReader(source, _ONE_BY_ONE), device, depth)  # type: ignore[arg-type]


class _Loading:
    """A batch on its way."""

    __slots__ = ("error", "is_watched", "number", "upload")

    def __init__(self, number: int, upload: BatchUpload | None, error: BaseException | None) -> None:
        self.number = number
        self.upload = upload
        self.error = error
        self.is_watched = False


class DeviceBatches(ProcessLocal, AsyncIterator[Batch]):
    """The batches of another loader on a device, as an asynchronous iterator. Made by `to_device`.

    ``async with`` ends the thread that reads the source and closes the streams; the end of the source does so, too.
    """

    def __init__(self, source: Any, reader: StreamReader | AsyncReader, device: Device, depth: int) -> None:
        self.device = device
        self._source = source
        self._reader = reader
        self._depth = depth
        self._delivery = Delivery(device)
        self._threads: LoaderThreads | None = None
        self._streams: list[Stream] = []
        self._loading: deque[_Loading] = deque()
        self._is_reading = False
        self._read_task: asyncio.Task[None] | None = None
        self._exhausted = False
        self._waiter: asyncio.Future[None] | None = None
        self._requesting = False
        self._made_at = SourceLine.of_caller()
        self._closed = False

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

    async def __anext__(self) -> Batch:
        if self._requesting:
            raise BusyError("another task waits for the next of these batches: each batch goes to one task")
        self._requesting = True
        try:
            return await self._next()
        finally:
            self._requesting = False

    async def _next(self) -> Batch:
        if self._closed:
            raise StopAsyncIteration
        self._delivery.release()
        try:
            while True:
                self._fill()
                loading = self._loaded()
                if loading is not None:
                    self._fill()
                    assert loading.upload is not None
                    stream = self._stream(loading.number)
                    return self._delivery.deliver(loading.number, (), stream, loading.upload.memory)
                if self._exhausted and not self._loading:
                    break
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                if self._closed:
                    raise ClosedError("these batches were closed while a task waited for the next one: request no more")
        except asyncio.CancelledError:
            raise
        except BaseException:
            await finish_shielded(self._close())
            raise
        await self.aclose()
        raise StopAsyncIteration

    def _loaded(self) -> _Loading | None:
        """Return the next batch if its upload has ended; else have the consumer woken then."""
        if not self._loading:
            return None
        first = self._loading[0]
        if first.upload is None:
            assert first.error is not None
            raise first.error
        if first.upload.poll():
            error = first.upload.finish()
            if error is not None:
                raise error
            return self._loading.popleft()
        if not first.is_watched:
            first.is_watched = True
            first.upload.add_done_callback(lambda _: self._wake())
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the source ----------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Read the next batch, if there is room for it."""
        if self._exhausted or self._is_reading or len(self._loading) >= self._depth:
            return
        self._is_reading = True
        if isinstance(self._reader, AsyncReader):
            self._read_task = asyncio.get_running_loop().create_task(self._await_source(self._reader))
            return
        if self._threads is None:
            jobs = resources_of(self.device).open_reactor().jobs
            self._threads = LoaderThreads(jobs, "aiocuda-to-device", 1)
        self._threads.start(partial(_read, self._reader), self._read)

    async def _await_source(self, reader: AsyncReader) -> None:
        try:
            self._read(_parts(await reader.read()), None)
        except asyncio.CancelledError as caught:
            if self._closed:
                raise
            error = ClosedError("the source of these batches was cancelled")
            error.__cause__ = caught
            self._read(None, error)
        except BaseException as error:
            self._read(None, error)
            if isinstance(error, LEAVES_LOOP):
                raise

    def _read(self, result: tuple[int, dict[Any, Any]] | None, error: BaseException | None) -> None:
        """The next batch has been read."""
        self._is_reading = False
        if self._closed:
            return
        if result is None:
            self._exhausted = True
            if error is not None:
                self._loading.append(_Loading(-1, None, error))
        else:
            self._upload(*result)
            self._fill()
        self._wake()

    def _upload(self, number: int, parts: dict[Any, Any]) -> None:
        upload: BatchUpload | None = BatchUpload(self._stream(number))
        error: BaseException | None = None
        try:
            pool = resources_of(self.device).pinned_pool
            upload.start({name: _host_array(name, part, pool) for name, part in parts.items()})  # type: ignore[union-attr]
        except BaseException as caught:
            if isinstance(caught, LEAVES_LOOP):
                raise
            caught.add_note(f"in batch {number} of the source, counted from 0")
            upload, error, self._exhausted = None, caught, True
        self._loading.append(_Loading(number, upload, error))

    def _stream(self, number: int) -> Stream:
        # One for each batch on its way and one for the batch in hand: work on a batch delays no upload.
        while len(self._streams) <= self._depth:
            stream = self.device.stream(name=f"to_device {len(self._streams)}")
            self._streams.append(owned(stream, "to_device(source, device) as batches", self._made_at))
        return self._streams[number % len(self._streams)]

    # -- the end -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the thread and the uploads, and close the streams. The batch in hand is freed. Idempotent."""
        await finish_shielded(self._close())

    async def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._delivery.release()
        deadline = resources_of(self.device).deadline
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.wait({self._read_task})
        if isinstance(self._reader, AsyncReader):
            await self._reader.aclose()
        elif self._threads is not None:
            if await self._threads.settle(deadline.left()):
                self._threads.start(self._reader.close, _ignore)
            else:
                SourceLine.of_caller().warn(
                    "the source of to_device() did not return in time: its thread is set aside", DrainTimeoutWarning
                )
            self._threads.close()
        uploads = [each.upload for each in self._loading if each.upload is not None]
        self._loading.clear()
        loop = asyncio.get_running_loop()
        await end_tasks([loop.create_task(upload.settle()) for upload in uploads], deadline.left())
        for upload in uploads:
            upload.memory.free()
        streams, self._streams = self._streams, []
        await end_tasks([loop.create_task(_close(stream)) for stream in streams], deadline.left())

    def __repr__(self) -> str:
        return f"<DeviceBatches of {type(self._source).__name__}, depth {self._depth}>"


async def _close(stream: Stream) -> None:
    try:
        await stream.aclose()
    except DeviceFault:
        pass  # the consumer and every waiter have received it


def _read(reader: StreamReader) -> tuple[int, dict[Any, Any]] | None:
    return _parts(reader.read())


def _parts(plan: BatchPlan | None) -> tuple[int, dict[Any, Any]] | None:
    """Return the number of a batch, and its arrays by name; None at the end."""
    if plan is None:
        return None
    assert plan.samples is not None
    parts = parts_of(plan.samples[0], "a batch of the source")
    return plan.number, {name: _plain(part) for name, part in parts.items()}


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


def _ignore(result: object, error: BaseException | None) -> None:
    """The iterator of the source has been closed."""
