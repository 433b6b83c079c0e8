"""sync_loader and sync_to_device: the batches of a loader for a training loop that blocks its thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, Literal, NamedTuple, Self, SupportsIndex, TypeVar, Unpack, overload

import numpy.typing as npt

from .._base._mistakes import keywords, or_none, refuses
from .._base._types import ProcessLocal, SourceLine
from .._processes._main_guard import check_main_guard
from ..device import Device, open_device
from ..driver import DriverName
from ..driver.protocol import Driver
from ..errors import BusyError, ClosedError, ForkedProcessError
from ..lowlevel import OPEN_DEVICES
from ..memory import DeviceBuffer
from ._advice import LoaderAdvice
from ._batch import Batch, memory_of
from ._loader import DataLoader, EpochBatches, loader_keywords
from ._names import lacks
from ._options import shard_of
from ._sources import MapSource
from ._statistics import DeviceBatchesStats, LoaderStats
from ._sync_batch import HeldBatch, SyncBatch
from ._tensor_batch import TensorBatch
from ._tensors import Tensors
from ._to_device import TO_DEVICE_CURES, DeviceBatches, DeviceIteration, to_device
from ._typed import LoaderKeywords, SyncBatchT

__all__ = ["SyncBatches", "SyncDeviceBatches", "SyncEpoch", "sync_loader", "sync_to_device"]

T = TypeVar("T")
Loader = TypeVar("Loader", bound=DataLoader[Any] | DeviceBatches[Any])


@overload
def sync_loader(
    source: MapSource | Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    output: Literal["torch"],
    **options: Unpack[LoaderKeywords],
) -> SyncBatches[TensorBatch]: ...


@overload
def sync_loader(
    source: MapSource | Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    output: None = None,
    **options: Unpack[LoaderKeywords],
) -> SyncBatches[SyncBatch]: ...


@loader_keywords
def sync_loader(
    source: MapSource | Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    output: Literal["torch"] | None = None,
    **options: Any,
) -> SyncBatches[Any]:
    """Return the batches of a loader for a training loop that blocks its thread.

    ::

        with sync_loader(files, fields=[((3, 224, 224), np.uint8), ((), np.int64)], decode=decode, batch_size=64,
                         workers=8, output="torch") as batches:
            for images, labels in batches:
                step(images, labels)

    A thread of its own opens the device and runs a `DataLoader` on its event loop, so the batches are loaded while the
    step runs. In an event loop that has a device open use `DataLoader`; a cell of a notebook has an event loop without
    one.

    Parameters
    ----------
    source
        See `DataLoader`.
    index, driver
        See `open_device`.
    options
        The other arguments of `DataLoader`. With ``output="torch"``, the batches are those of a `TensorBatch`, on the
        stream of PyTorch that is current where the ``for`` runs.
    """
    if options.get("executor") == "process":
        functions = {"source": source, "decode": options.get("decode")}
        check_main_guard(functions, "executor='process'", ", or use executor='thread'")
    at = SourceLine.of_caller()
    options["shard"] = shard_of(options.get("shard"), options.get("sampler"))
    thread = _LoopThread(index, driver, lambda device: DataLoader(device, source, output=output, **options).warn_at(at))
    return SyncBatches(thread, output)


@overload
def sync_to_device(
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    depth: int = 3,
    output: Literal["torch"],
) -> SyncDeviceBatches[TensorBatch]: ...


@overload
def sync_to_device(
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    depth: int = 3,
    output: None = None,
) -> SyncDeviceBatches[SyncBatch]: ...


@keywords(
    "sync_to_device takes a source, index=, driver=, depth= and output=",
    "sync_to_device(source), or sync_to_device(source, index=1) for another GPU",
    **{**TO_DEVICE_CURES, "device": "use index=, because sync_to_device opens the device"},
)
def sync_to_device(
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    index: SupportsIndex = 0,
    driver: DriverName | Driver = "auto",
    depth: int = 3,
    output: Literal["torch"] | None = None,
) -> SyncDeviceBatches[Any]:
    """Return the batches of another loader, copied to a device ahead of a training loop that blocks its thread.

    ::

        with sync_to_device(torch_loader, output="torch") as batches:
            for images, labels in batches:
                step(images, labels)

    A thread of its own opens the device and runs `to_device` on its event loop. In an event loop that has a device open
    use `to_device`.

    Parameters
    ----------
    source, depth, output
        See `to_device`. Another thread than the caller's reads the source. Tensors are on the stream of PyTorch that
        is current where the ``for`` runs.
    index, driver
        See `open_device`.
    """
    thread = _LoopThread(index, driver, lambda device: to_device(source, device, depth, output=output))
    return SyncDeviceBatches(thread, output)


class _Next(NamedTuple):
    """The next batch, or the end of the epoch, and the state of the loader after it; or the failure in its place."""

    held: HeldBatch | None
    state: Any  #: None if it is that of the loader
    error: Exception | None = None  #: not raised on the loop: asyncio would replace some by others, without the notes


class _Stopped(Exception):  # noqa: N818 - it leaves no function of this module
    """The program has left the block by an exception: worker processes end at once."""


class _LoopThread(Generic[Loader]):
    """The thread with the device, the event loop and the loader. It has no reference to `SyncBatches`.

    ``make`` returns the loader of a device.
    """

    def __init__(self, index: SupportsIndex, driver: DriverName | Driver, make: Callable[[Device], Loader]) -> None:
        self._open: Callable[[], Any] = lambda: open_device(index, driver=driver)
        self._opening: Any = None
        self._make = make
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop: asyncio.Event | None = None
        self._at_once = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._fetching: asyncio.Task[Any] | None = None
        self._held: dict[HeldBatch, None] = {}  # batches that were not freed
        self._thread = threading.Thread(target=self._run, name="aiocuda-sync-loader", daemon=True)
        self._process = os.getpid()
        self.loader: Loader | None = None
        self.device: Device | None = None

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the consumer's thread
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                self._error = error

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with self._opening as device:
            loader = self._make(device)
            async with loader:
                self.device, self.loader = device, loader
                self._ready.set_result(None)
                await self._stop.wait()
                if self._fetching is not None:
                    self._fetching.cancel()
                    await asyncio.wait({self._fetching})
                for held in tuple(self._held):  # was loaded, and not delivered
                    if not held.is_exported:
                        self._free(held, [])
                if self._at_once:
                    raise _Stopped

    async def fetch(self, batches: Any, *, with_state: bool) -> _Next:
        """Wait for the next batch. Return it with the state after it, if the batch after it may be fetched, too."""
        loader, device = self.loader, self.device
        assert loader is not None
        assert device is not None
        self._fetching = asyncio.current_task()
        try:
            batch = await loader.next_batch(batches)
        except StopAsyncIteration:
            return _Next(None, loader.state_dict() if with_state else None)
        except Exception as error:  # noqa: BLE001 - raised in the consumer's thread
            return _Next(None, None, error)
        finally:
            self._fetching = None
        held = HeldBatch(batch, device).open()
        self._held[held] = None
        return _Next(held, loader.state_dict() if with_state else None)

    async def free(self, ended: list[tuple[HeldBatch, list[int]]]) -> None:
        """Free the memory of batches after the events."""
        for held, events in ended:
            self._free(held, events)

    def _free(self, held: HeldBatch, events: list[int]) -> None:
        if held in self._held:
            del self._held[held]
            held.close(events)

    # -- the consumer's thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the device and the loader; raise what that raises."""
        self._opening = self._open()  # on this thread: warnings about the device name the line of the program
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.stop(at_once=True)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop."""
        assert self._loop is not None
        try:
            self.check_process()
        except ForkedProcessError:
            coroutine.close()
            raise
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise ClosedError("the thread of this loader has ended: make another one by sync_loader()") from self._error

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop and return its result."""

        async def run() -> T:
            return function()

        return self.submit(run()).result()

    def stop(self, *, at_once: bool = False, waits: bool = True) -> None:
        """Close the loader and the device, and wait for the end of the thread. Idempotent. In a fork, do nothing."""
        if os.getpid() != self._process:
            return
        self._at_once = self._at_once or at_once
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        if waits and self._thread.is_alive():
            self._thread.join()

    def drop(self) -> None:
        """Close the loader and the device: the program has dropped the loader, or ends.

        The garbage collector may call this on the thread itself, or on a thread of the loader: neither can wait.
        """
        self.stop(at_once=True, waits=threading.current_thread() is threading.main_thread())

    def check_process(self) -> None:
        """Raise in a forked child: it has no copy of the thread."""
        if os.getpid() != self._process:
            raise ForkedProcessError("the loader belongs to the parent process: make one in the child, or use spawn")

    def check(self) -> None:
        """Raise the error with which the thread has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error


@refuses(
    __next__="is no iterator: next(iter(loader)) is the first batch of the next epoch",
    __getitem__="is no list: `for batch in loader`; next(iter(loader)) is the first batch of the next epoch",
    __aenter__="is entered by a plain `with`; `async with` is for DataLoader(device, source) and to_device(…)",
)
class _Batches(ProcessLocal, Generic[Loader, SyncBatchT]):
    """The batches of a loader for a thread without an event loop.

    If ``fetches_ahead``, the batch after the one in hand is fetched in advance. It is dropped where an epoch is left.
    """

    def __init__(self, thread: _LoopThread[Loader], output: Literal["torch"] | None, *, fetches_ahead: bool) -> None:
        self._thread = thread
        self._output = output
        self._tensors: Tensors | None = None
        self._fetches_ahead = fetches_ahead
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._epoch: SyncEpoch[Any] | None = None
        self._pending: concurrent.futures.Future[_Next] | None = None  # the batch after the one in hand
        self._held: list[HeldBatch] = []  # delivered, and not given back
        self._reported: set[int] = set()
        self._kept = 0
        self._state: Any = None
        self._closed = False

    # -- epochs --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SyncBatchT]:
        """Return the batches of the next epoch; of the one that `load_state_dict` has named, from there on."""
        return SyncEpoch(self, None)

    def iteration(self, number: int | None) -> EpochBatches[Any] | DeviceIteration[Any]:
        """Return the batches of the loader for a `SyncEpoch`."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of batches of a whole epoch. `InvalidTypeError` if the source has no length."""
        ended = self._ended_loader
        return len(self._loader if ended is None else ended)

    def _asked(self, function: Callable[[Loader], T]) -> T:
        """Return the result of a function of the loader; after the end of the block, too."""
        ended = self._ended_loader
        if ended is not None:
            return function(ended)
        loader = self._loader
        return self._thread.call(lambda: function(loader))

    def __bool__(self) -> bool:
        return True  # also without batches

    def next_output(self, epoch: SyncEpoch[Any]) -> Any:
        """Return the next batch of an epoch, with ``output="torch"`` a `TensorBatch`; None at its end."""
        tensors = self._tensors
        if tensors is None:
            batch = self.next_batch(epoch)
            if batch is not None:
                self._fetch_ahead(epoch)
            return batch
        stream = tensors.current_stream()
        before = self._state
        batch = self.next_batch(epoch)
        if batch is None:
            return None
        held = self._held[-1]
        try:
            copied = tensors.copied(batch, memory_of(held.batch).form, batch.number, batch.indices, stream)
        except BaseException:
            self._state = before
            held.put_back()
            self._thread.call(self._loader.put_back)
            raise
        batch.free()
        self._thread.submit(self._thread.free(self._give_back()))
        self._fetch_ahead(epoch)
        return copied

    def next_batch(self, epoch: SyncEpoch[Any]) -> SyncBatch | None:
        """Return the next batch of an epoch; None at its end. A failure ends the epoch, a copy that fails does not."""
        try:
            batch = self._next_batch(epoch)
        except KeyboardInterrupt:
            raise
        except BaseException:
            epoch.end()
            raise
        if batch is None:
            epoch.end()
        return batch

    def _next_batch(self, epoch: SyncEpoch[Any]) -> SyncBatch | None:
        self._loader  # noqa: B018 - raises if it is not open
        self._thread.check_process()  # a batch that is being fetched never comes in a forked child
        if self._epoch is not epoch:
            if epoch.batches is not None:
                epoch.batches.check_new()
            self._drop_pending()
            self._epoch = epoch
        ended = self._give_back()
        batches = epoch.iteration()
        if ended:
            self._thread.submit(self._thread.free(ended))
        if self._pending is None:
            self._pending = self._fetch(batches)
        pending = self._pending
        try:
            held, state, error = pending.result()
        finally:
            if pending.done():  # otherwise Ctrl-C has ended the wait, and the next call waits for the batch again
                self._pending = None
        if error is not None:
            try:
                raise error
            finally:
                del error, pending  # its traceback refers to this frame
        self._state = state
        if held is None:
            return None
        self._held.append(held)
        return SyncBatch(held, self._download)

    def _fetch_ahead(self, epoch: SyncEpoch[Any]) -> None:
        if self._fetches_ahead:
            self._pending = self._fetch(epoch.iteration())

    def _fetch(self, batches: EpochBatches[Any] | DeviceIteration[Any]) -> concurrent.futures.Future[_Next]:
        return self._thread.submit(self._thread.fetch(batches, with_state=self._fetches_ahead))

    def _give_back(self, *, all_of_them: bool = False) -> list[tuple[HeldBatch, list[int]]]:
        """Return the batches that nothing uses any more, with the events after which their memory is free.

        With ``all_of_them`` they include those that the program keeps, but not those that another library holds.
        """
        ended, left = [], []
        for held in self._held:
            if held.is_exported or (held.kept and not held.freed and not all_of_them):
                if held.is_exported and not held.kept and id(held) not in self._reported:
                    self._reported.add(id(held))
                    self._kept += 1
                left.append(held)
                continue
            events = held.end()
            if events is None:
                left.append(held)
            else:
                self._reported.discard(id(held))
                ended.append((held, events))
        self._held = left
        return ended

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not self._fetches_ahead:
            pending.cancel()  # Ctrl-C has ended the wait for it: a cancelled request loses no batch
        try:
            held = pending.result().held
        except Exception:  # noqa: BLE001 - the program has left that epoch before the batch that has failed
            return
        if held is not None:
            self._thread.submit(self._thread.free([(held, [])]))

    def _download(self, batch: Batch, buffer: DeviceBuffer) -> npt.NDArray[Any]:
        async def download() -> npt.NDArray[Any]:
            return await batch.stream.download(buffer)

        return self._thread.submit(download()).result()

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> Any:
        """Return the state after the batches that were delivered: see that of `DataLoader`, or `DeviceBatches`."""
        return self._asked(lambda loader: loader.state_dict()) if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Go on after the batches of a state. See `DataLoader.load_state_dict`, or that of `DeviceBatches`."""
        loader = self._loader
        self._thread.call(lambda: loader.load_state_dict(state))
        self._state = None

    # -- open and close ------------------------------------------------------------------------------------------

    @property
    def _ended_loader(self) -> Loader | None:
        """The loader after the end of the block, where any thread may read it; else None."""
        return self._thread.loader if self._closed else None

    @property
    def _loader(self) -> Loader:
        if self._closed:
            raise ClosedError("this loader has been closed: make another one")
        if self._thread.loader is None:
            raise BusyError(
                "a loader has a thread and memory to release: use `with aiocuda.data.sync_loader(…) as batches`, or "
                "sync_to_device(…)"
            )
        return self._thread.loader

    def __enter__(self) -> Self:
        loop = asyncio._get_running_loop()  # in a notebook each cell has one
        if loop is not None and OPEN_DEVICES.on_loop(loop):
            raise BusyError(
                "sync_loader() and sync_to_device() block their thread, whose event loop has a device open: use "
                "`async with aiocuda.data.DataLoader(device, …) as loader`, or to_device(…)"
            )
        if self._closed:
            raise ClosedError("this loader has been closed: make another one")
        if self._finalizer is not None:
            raise BusyError("a loader is entered once: make another one")
        # It also ends the thread at the end of the program.
        self._finalizer = weakref.finalize(self, self._thread.drop)
        self._thread.start()
        if self._output is not None:
            assert self._thread.device is not None
            self._tensors = Tensors(self._thread.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._close(at_once=kind is not None)
        if kind is None:
            self._thread.check()

    def close(self) -> None:
        """End the epoch that is running, and the thread with its loader and device. Idempotent."""
        self._close(at_once=False)
        self._thread.check()

    def _close(self, *, at_once: bool) -> None:
        if self._closed or self._finalizer is None:
            self._closed = True
            return
        self._closed = True
        with contextlib.suppress(ClosedError, ForkedProcessError):
            self._thread.submit(self._thread.free(self._give_back(all_of_them=True)))
        self._finalizer.detach()
        self._thread.stop(at_once=at_once)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._thread.loader!r}>"


@lacks
class SyncBatches(_Batches[DataLoader[Any], SyncBatchT]):
    """The batches of a loader for a thread without an event loop. Made by `sync_loader`.

    ``with`` starts the thread of the loader and ends it: at the end of the block, at an exception, and at the end of
    the program. One thread uses it.
    """

    def __init__(self, thread: _LoopThread[DataLoader[Any]], output: Literal["torch"] | None) -> None:
        super().__init__(thread, output, fetches_ahead=True)

    def iteration(self, number: int | None) -> EpochBatches[Any]:
        """Return the batches of the loader for a `SyncEpoch`."""
        return EpochBatches(self._loader, number)

    @or_none
    def epoch(self, number: int) -> SyncEpoch[SyncBatchT]:
        """Return the batches of an epoch, as an iterator. It begins with the first request."""
        self._loader.epoch(number)  # checks it
        return SyncEpoch(self, number)

    def statistics(self) -> LoaderStats:
        """Return the statistics since the loader was made."""
        return dataclasses.replace(self._asked(lambda loader: loader.statistics()), kept=self._kept)

    def advice(self) -> LoaderAdvice:
        """Return the arguments that suit the measured times. See `DataLoader.advice`."""
        return self._asked(lambda loader: loader.advice())


class SyncDeviceBatches(_Batches[DeviceBatches[Any], SyncBatchT]):
    """The batches of another loader for a thread without an event loop. Made by `sync_to_device`.

    ``with`` starts the thread that reads the loader and ends it: at the end of the block, at an exception, and at the
    end of the program. One thread uses it. After ``break``, the next ``for`` is like the next ``async for`` over
    `DeviceBatches`.
    """

    def __init__(self, thread: _LoopThread[DeviceBatches[Any]], output: Literal["torch"] | None) -> None:
        # It is ahead, and a batch that is dropped may have no other copy.
        super().__init__(thread, output, fetches_ahead=False)

    def iteration(self, number: int | None) -> DeviceIteration[Any]:
        """Return the batches of the loader for a `SyncEpoch`."""
        return DeviceIteration(self._loader)

    def statistics(self) -> DeviceBatchesStats:
        """Return the statistics since these batches were made."""
        return dataclasses.replace(self._asked(lambda loader: loader.statistics()), kept=self._kept)


class SyncEpoch(ProcessLocal, Iterator[SyncBatchT]):
    """The batches of one epoch, as an iterator. Made by `SyncBatches.epoch` and ``for``, of `SyncDeviceBatches`, too.

    Attributes
    ----------
    number : int or None
        The epoch; None for the next one, whichever that is when the first batch is requested.
    batches
        Those of the loader; None before the first request.
    """

    def __init__(self, batches: _Batches[Any, SyncBatchT], number: int | None) -> None:
        self._batches = batches
        self._ended = False
        self.number = number
        self.batches: EpochBatches[Any] | DeviceIteration[Any] | None = None

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return len(self._batches)

    def end(self) -> None:
        """The epoch has no further batch, or has failed."""
        self._ended = True

    def iteration(self) -> EpochBatches[Any] | DeviceIteration[Any]:
        """Return the batches of the loader, for the first request and for all later ones."""
        if self.batches is None:
            self.batches = self._batches.iteration(self.number)
        return self.batches

    def __next__(self) -> SyncBatchT:
        if self._ended:
            raise StopIteration
        batch: SyncBatchT | None = self._batches.next_output(self)
        if batch is None:
            raise StopIteration
        return batch
