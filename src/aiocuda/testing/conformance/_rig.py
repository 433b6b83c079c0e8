"""`Rig`: creates streams, events and memory for a test, waits for them, and frees them at the end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from ..._base._stacks import formatted, stack_of
from ..._base._types import Dim3, Span
from ...driver.protocol import CudaSource, Program
from ...errors import AiocudaError
from ..kernels import AFFINE, EXTENT, HOLD, HOLDING, RAN_OUT, SAXPY, SCALARS, SPIN, STAMP, Sample

if TYPE_CHECKING:
    from types import TracebackType

    from ...driver.protocol import Driver, Node, Notifier

__all__ = ["Array", "Hold", "Rig", "address_of", "nap", "span", "unblocked", "wait_until"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Lets some time pass between two checks of a condition.
Pause: TypeAlias = Callable[[], object]

#: Seconds between two checks: short against all time limits, long against the work of a host driver's thread.
_TICK = 0.0005

_ONE: Dim3 = (1, 1, 1)

#: Seconds for a verb that may block. Initialising CUDA takes several seconds on a machine with many GPUs.
_BLOCKING = 60.0

_tags = itertools.count(1)

#: The loaded functions of each driver. Each is loaded once, by the first rig that needs it.
_functions: weakref.WeakKeyDictionary[Driver, dict[tuple[int, str], int]] = weakref.WeakKeyDictionary()


def nap() -> None:
    time.sleep(_TICK)  # noqa: TID251 - between two checks of a condition with a deadline


def wait_until(condition: Callable[[], bool], what: str, seconds: float, pause: Pause = nap) -> None:
    """Return once ``condition()`` is true. After ``seconds``, fail with the text ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        pause()


@contextlib.contextmanager
def unblocked(what: str, seconds: float, rescue: Callable[[], object]) -> Iterator[None]:
    """Fail if the body takes more than ``seconds``.

    Another thread then calls ``rescue``, so that the body can end. The failure shows the stack at that time.
    """
    stuck: list[str] = []
    caller = threading.get_ident()

    def expire() -> None:
        stuck.append(formatted(stack_of(caller)[:12]))
        rescue()

    watchdog = threading.Timer(seconds, expire)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
    if stuck:
        raise AssertionError(f"{what} blocked its caller for {seconds:g} s, here:\n{stuck[0]}")


class Hold:
    """A kernel that runs until it is released, or for a limited time.

    Parameters
    ----------
    words
        The memory that it shares with the host: its state, and the word that releases it.
    patience
        Seconds to wait for its start.
    pause
        Lets time pass while waiting.
    """

    def __init__(self, words: Array, patience: float, pause: Pause = nap) -> None:
        self._words = words
        self._patience = patience
        self._pause = pause

    @property
    def started(self) -> bool:
        return int(self._words[0]) != 0

    @property
    def running(self) -> bool:
        return int(self._words[0]) == HOLDING

    def wait_running(self) -> None:
        wait_until(lambda: self.started, "a held kernel starts", self._patience, self._pause)
        assert self.running, "a held kernel ended before it was released"

    def release(self) -> None:
        """Let the kernel end. Fail if it had already ended by itself."""
        assert int(self._words[0]) != RAN_OUT, "a held kernel ended by itself before its release: raise hold_seconds"
        self._words[1] = 1


def address_of(array: Array) -> int:
    return int(array.ctypes.data)


def span(memory: int | Array, count: int, dtype: str) -> Span:
    """Return a range of memory as a kernel argument."""
    return Span(memory if isinstance(memory, int) else address_of(memory), (count,), np.dtype(dtype).str)


class Rig:
    """Streams, events, memory, kernels and tags of one test on one device.

    When its block ends, the rig releases all holds, waits until its streams are idle, and frees everything it has made.

    Parameters
    ----------
    driver, device
        The driver under test, and the index of the device.
    patience
        Seconds to wait for something that must happen.
    hold_seconds
        Seconds after which a held kernel ends by itself.
    pause
        Lets time pass between two checks of a condition.

    Attributes
    ----------
    port : Port
        The port of the rig's notifiers.
    properties : DeviceProperties
        The properties of the device.
    releases : list of array
        The words of kernels that other code holds. The rig releases them at its end by setting the second word.
    """

    def __init__(
        self, driver: Driver, device: int = 0, *, patience: float = 5.0, hold_seconds: float = 10.0, pause: Pause = nap
    ) -> None:
        self.driver = driver
        self.pause = pause
        self.device = device
        self.patience = patience
        self.hold_seconds = hold_seconds
        self.port = driver.open_port(lambda: None)
        self._seen: list[int] = []
        self._armed: dict[int, Notifier] = {}
        self._idle: list[Notifier] = []
        self.properties = self.offload(lambda: driver.device_open(device))
        self._streams: list[int] = []
        self._events: list[int] = []
        self._memory: list[int] = []
        self._pinned: list[int] = []
        self._managed: list[int] = []
        self._graphs: list[int] = []
        self.releases: list[Array] = []
        # Page-locking memory and loading code may wait for running kernels, so both are done before any hold.
        self._arena = self.pinned(4 << 20)
        self._used = 0
        for sample in (AFFINE, EXTENT, HOLD, SAXPY, SCALARS, SPIN, STAMP):
            self.function(sample)
        self._words = self.small(256, "u4").reshape(128, 2)
        self._words[:] = 0
        self._held = 0
        self._side = self.stream()  # for preparing and freeing memory
        self._observers = _Observers(self)

    # ------------------------------------------------------------------------------------------------ making

    def stream(self, priority: int = 0) -> int:
        stream = self.driver.stream_create(self.device, priority)
        self._streams.append(stream)
        return stream

    def event(self, timing: bool = False) -> int:
        event = self.driver.event_create(self.device, timing)
        self._events.append(event)
        return event

    def record(self, stream: int) -> int:
        """Create an event and record it in ``stream``."""
        event = self.event()
        self.driver.event_record(event, stream)
        return event

    def destroy_stream(self, stream: int) -> None:
        self._streams.remove(stream)
        self.driver.stream_destroy(stream)

    def destroy_event(self, event: int) -> None:
        self._events.remove(event)
        self.driver.event_destroy(event)

    def pinned(self, count: int, dtype: str = "u1") -> Array:
        """Allocate page-locked memory, as an array of ``count`` items. Not while a kernel is held."""
        nbytes = count * np.dtype(dtype).itemsize
        address = self.offload(lambda: self.driver.pinned_allocate(nbytes))
        self._pinned.append(address)
        return _view(address, nbytes).view(dtype)

    def small(self, count: int, dtype: str = "u1", value: int = 0) -> Array:
        """Return some page-locked memory, each item ``value``. Also while a kernel is held."""
        nbytes = count * np.dtype(dtype).itemsize
        start = self._used
        self._used += -(-nbytes // 256) * 256
        assert self._used <= self._arena.nbytes, "the rig's page-locked memory is used up: take pinned() before a hold"
        array = self._arena[start : start + nbytes].view(dtype)
        array[:] = value
        return array

    def managed(self, count: int, dtype: str = "u1") -> Array:
        """Allocate managed memory, as an array of ``count`` items. Not while a kernel is held."""
        nbytes = count * np.dtype(dtype).itemsize
        address = self.offload(lambda: self.driver.managed_allocate(self.device, nbytes))
        self._managed.append(address)
        return _view(address, nbytes).view(dtype)

    def memory(self, nbytes: int, value: int = 0) -> int:
        """Allocate device memory, each byte ``value``, for all streams. Not while a kernel is held."""
        address = self.driver.allocate(self.device, nbytes, self._side)
        self._memory.append(address)
        self.driver.fill(self._side, address, bytes([value]), nbytes)
        self.finish(self._side)
        return address

    def clear(self, address: int, nbytes: int) -> None:
        """Set some device memory to 0, for all streams."""
        self.driver.fill(self._side, address, b"\0", nbytes)
        self.finish(self._side)

    def uploaded(self, array: Array) -> int:
        """Allocate device memory with the content of a small array, for all streams. Not while a kernel is held."""
        address = self.memory(array.nbytes)
        source = self.small(array.nbytes)
        source[:] = array.view("u1")
        self.driver.upload(self._side, address, address_of(source), array.nbytes)
        self.finish(self._side)
        return address

    def look(self, address: int, count: int, dtype: str = "u1") -> Array:
        """Return the present content of some device memory, read in a stream of the rig."""
        return self._observers.look(address, count, dtype)

    def free(self, address: int, stream: int) -> None:
        """Free device memory that `look` has read. Some of its downloads may still run."""
        self.finish(*self._observers.streams)
        self.driver.deallocate(address, stream)

    def graph(self, nodes: Sequence[Node]) -> int:
        """Build a graph. Not while a kernel is held."""
        graph: int = self.offload(lambda: self.driver.graph_build(self.device, nodes))
        self._graphs.append(graph)
        return graph

    def destroy_graph(self, graph: int) -> None:
        self._graphs.remove(graph)
        self.offload(lambda: self.driver.graph_destroy(graph))

    # ----------------------------------------------------------------------------------------------- kernels

    def function(self, sample: Sample) -> int:
        """Return the handle of a kernel, which is compiled and loaded on first use."""
        known = _functions.setdefault(self.driver, {})
        key = (self.device, sample.name)
        if key not in known:
            known[key] = self.offload(lambda: self._load(sample))
        return known[key]

    def launch(self, stream: int, sample: Sample, *arguments: Any, grid: Dim3 = _ONE, block: Dim3 = _ONE) -> None:
        """Launch a kernel. A `Span` becomes a pointer."""
        self.driver.launcher(stream, self.function(sample), grid, block, 0)(self.arguments(*arguments))

    def arguments(self, *arguments: Any) -> list[Any]:
        """Return arguments in the form that a launcher takes."""
        return [self.driver.argument(each) if isinstance(each, Span) else each for each in arguments]

    def affine(self, stream: int, address: int, count: int, factor: int, term: int) -> None:
        """Launch ``data = data * factor + term`` over ``count`` words."""
        self.launch(stream, AFFINE, span(address, count, "u4"), count, factor, term, block=(32, 1, 1))

    def hold_later(self, stream: int, *, grid: Dim3 = _ONE, block: Dim3 = _ONE) -> Hold:
        """Enqueue a kernel that holds its stream, and return without waiting for its start."""
        words = self._words[self._held]
        self._held += 1
        with self.unblocked("the launch of a kernel"):
            nanoseconds = int(self.hold_seconds * 1e9)
            self.launch(stream, HOLD, span(words, 2, "u4"), nanoseconds, grid=grid, block=block)
        return Hold(words, self.patience, self.pause)

    def hold(self, stream: int) -> Hold:
        """Hold a stream by a kernel that runs until it is released. Return when the kernel runs."""
        hold = self.hold_later(stream)
        hold.wait_running()
        return hold

    def release_all(self) -> None:
        """Release every hold, also those that have not started."""
        self._words[:, 1] = 1
        for words in self.releases:
            words[1] = 1

    # ----------------------------------------------------------------------------------------------- waiting

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once ``condition()`` is true. After ``patience`` seconds, fail with the text ``what``."""
        wait_until(condition, what, self.patience, self.pause)

    def finish(self, *streams: int) -> None:
        for stream in streams:
            self.wait_until(functools.partial(self.driver.stream_query, stream), f"stream {stream:#x} becomes idle")

    def finish_event(self, event: int) -> None:
        self.wait_until(lambda: self.driver.event_query(event), f"event {event:#x} is done")

    def witness(self) -> None:
        """Run one operation of each kind in a stream of the rig, and wait until they are done.

        If the driver had started earlier work by mistake, that work would also have run. So a test that calls this
        can check that something did *not* happen, without a pause.
        """
        self._observers.work()

    def unblocked(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Fail if the body does not come to its end while kernels are held; they are released then."""
        return unblocked(what, self.patience, self.release_all)

    # ------------------------------------------------------------------------------------------ notification

    def tag(self) -> int:
        """Return a tag that was never used before."""
        return next(_tags)

    def ring(self, event: int, tag: int | None = None) -> int:
        """Arm a notifier of the rig's port on an event. Return its tag."""
        tag = self.tag() if tag is None else tag
        notifier = self._idle.pop() if self._idle else self.driver.notifier(self.device, self.port)
        try:
            notifier.ring(event, tag)
        except AiocudaError:
            self._idle.append(notifier)
            raise
        self._armed[tag] = notifier
        return tag

    def make_notifiers(self, count: int) -> None:
        """Create so many notifiers for `ring`. CUDA may let the creation of a stream wait for every running kernel."""
        self._idle += [self.driver.notifier(self.device, self.port) for _ in range(count)]

    def tags(self) -> list[int]:
        """Return all tags that have arrived at the rig's port so far, in order."""
        for tag in self.port.drain():
            self._seen.append(tag)
            if tag in self._armed:
                self._idle.append(self._armed.pop(tag))
        return self._seen

    def wait_tags(self, *tags: int) -> None:
        """Return once all of ``tags`` have arrived."""
        self.wait_until(lambda: set(tags) <= set(self.tags()), f"tags {tags} arrive")

    def offload(self, work: Callable[[], Any]) -> Any:
        """Call a verb that may block on a worker thread of the driver, and return its result."""
        answers: list[Any] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                answers.append(work())
            except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
                failures.append(error)

        tag = self.tag()
        self.driver.offload(run, self.port, tag)
        wait_until(lambda: tag in self.tags(), "offloaded work ends", _BLOCKING, self.pause)
        if failures:
            raise failures[0]
        return answers[0]

    # --------------------------------------------------------------------------------------------------- end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release_all()
        if self.driver.fault is None:  # after a fault nothing can be freed
            self.finish(*self._streams)
            self.wait_until(lambda: bool(self.tags()) and not self._armed, "every armed notifier rings")
            for address in self._memory:
                self.driver.deallocate(address, self._side)
            self.finish(self._side)
            _each(self.driver.event_destroy, self._events)
            _each(self.driver.stream_destroy, self._streams)
            self.offload(lambda: _each(self.driver.graph_destroy, self._graphs))
            self.offload(lambda: _each(self.driver.pinned_deallocate, self._pinned))
            self.offload(lambda: _each(self.driver.managed_deallocate, self._managed))
        self.port.close()

    def _load(self, sample: Sample) -> int:
        image: bytes | None = None
        symbol: str | None = None
        if self.driver.wants_image:
            image, symbol, *_ = self.driver.compile(self.device, CudaSource(sample.name, sample.source))
        return self.driver.load(
            self.device,
            Program(
                sample.name,
                sample.format,
                image=image,
                symbol=symbol,
                host=sample.host,
                host_takes_grid=sample.host_takes_grid,
            ),
        )


class _Observers:
    """Four streams in which the rig observes memory and the progress of the device.

    All four do the same, and the first that finishes counts. On a GPU streams share 8 to 32 hardware queues. Work that
    shares a queue with a wait of the test is delayed, which breaks no rule. Streams that are created one after the
    other have different queues, so that one notifier or wait of the test does not delay all four.
    """

    _COUNT = 4
    _BYTES = 64

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._round = 0
        self.streams = [rig.stream() for _ in range(self._COUNT)]
        self._memory = [(rig.memory(self._BYTES), rig.memory(self._BYTES)) for _ in self.streams]
        self._host = [(rig.small(self._BYTES), rig.small(self._BYTES)) for _ in self.streams]

    def look(self, address: int, count: int, dtype: str) -> Array:
        targets = [self._rig.small(count, dtype) for _ in self.streams]

        def download(index: int) -> None:
            target = targets[index]
            self._rig.driver.download(self.streams[index], address_of(target), address, target.nbytes)

        return targets[self._run_on_idle("a download of device memory", download)]

    def work(self) -> None:
        """Run one operation of each kind, so that an uploaded value is downloaded again, and check the value."""
        rig, driver = self._rig, self._rig.driver
        self._round += 1

        def everything(index: int) -> None:
            stream = self.streams[index]
            first, second = self._memory[index]
            source, target = self._host[index]
            source[:] = self._round % 256
            driver.upload(stream, first, address_of(source), self._BYTES)
            driver.copy(stream, second, first, self._BYTES)
            rig.affine(stream, second, self._BYTES // 4, 1, 0)
            driver.fill(stream, first, b"\x00", self._BYTES)
            driver.download(stream, address_of(target), second, self._BYTES)

        index = self._run_on_idle("work in a stream that nothing holds", everything)
        assert (self._host[index][1] == self._round % 256).all()

    def _run_on_idle(self, what: str, enqueue: Callable[[int], None]) -> int:
        """Enqueue in every idle stream, and return the index of a stream that is idle again."""
        query = self._rig.driver.stream_query
        used = [index for index, stream in enumerate(self.streams) if query(stream)]
        for index in used:
            enqueue(index)
        finished: list[int] = []

        def one_has_finished() -> bool:
            finished.extend(index for index in used if query(self.streams[index]))
            return bool(finished)

        self._rig.wait_until(one_has_finished, what)
        return finished[0]


def _each(function: Callable[[int], object], handles: Iterable[int]) -> None:
    for handle in handles:
        function(handle)


def _view(address: int, nbytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
