"""Submission: a function of the program that enqueues work of another library on a stream.

`SubmissionLimit` limits those on the device, `SubmissionPace` the time that they take in one iteration of the loop.
The "driver call" of an operation is the function that `Ring.submit` calls for it: here the program's function. To pump
a host queue is to submit its operations; a gate is what the oldest of them waits for (`HostQueue`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import weakref
from asyncio import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .._base._failure import Failure
from .._base._log import log
from .._base._user_code import LEAVES_LOOP, call, failure_of
from .._core import Estimate
from ..driver.protocol import Driver, Program
from ..errors import DeviceFault

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation

__all__ = ["SUBMIT_AHEAD", "Submission", "SubmissionLimit", "SubmissionPace", "submitting"]

#: Unfinished submissions of a stream on the device, unless `Device.stream` was asked for another number.
SUBMIT_AHEAD: Final = 2

#: Functions of a stream whose expected durations are kept.
MOST_ESTIMATES: Final = 256

#: A function that holds the loop for longer is logged.
SLOW_SECONDS: Final = 0.005

#: The most seconds for functions in one iteration of the loop. Later ones wait for the next iteration, in which the
#: other tasks of the loop run, too.
MOST_SECONDS: Final = 5e-3

#: Seconds. While the functions have taken less, no callback notes the end of the iteration: it would take 1 µs of each.
UNMARKED_SECONDS: Final = 5e-4


class _Submitting(threading.local):
    """The event loop whose thread runs a submitted function now.

    The function runs without a running loop, so that stream methods raise an error there; exports of buffers need the
    loop.
    """

    loop: asyncio.AbstractEventLoop | None = None


submitting: Final = _Submitting()


class SubmissionLimit:
    """The gate of the submissions of one stream: at most ``most`` of them are on the device and unfinished.

    A function may enqueue hundreds of kernels, and the thread that fills a hardware queue is blocked. So later
    submissions wait in the host queue.
    """

    __slots__ = ("_pace", "_queue", "_slow", "_unfinished", "estimates", "most")

    def __init__(self, queue: Ring, most: int) -> None:
        self._queue: Callable[[], Ring] = weakref.ref(queue)  # type: ignore[assignment]  # which owns it
        self._pace = queue.reactor.submission_pace
        self.most = most
        self._unfinished: deque[weakref.ref[StreamOperation[Any]]] = deque()  # the oldest first; some may have ended
        self.estimates: dict[str, Estimate] = {}  # by the functions' names
        self._slow: set[str] = set()  # names of functions that were reported

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether one more submission may go to the device, in this iteration of the loop."""
        unfinished = self._unfinished
        while len(unfinished) >= self.most:
            oldest = unfinished[0]()
            if oldest is not None and not oldest.is_settled:
                return False
            unfinished.popleft()
        if self._pace.is_used_up and not self._queue().shared:  # on a shared stream nothing may wait on the host
            self._pace.put_off(self._queue())
            return False
        return True

    def new_estimate(self, name: str) -> Estimate:
        """Return a new entry of `estimates`, which learns the duration of the submissions of one function."""
        if len(self.estimates) >= MOST_ESTIMATES:  # a program that makes its functions anew
            self.estimates.clear()
            self._slow.clear()
        estimate = self.estimates[name] = Estimate(name)
        return estimate

    def failure(self) -> Failure | None:
        """Return None: the gate does not fail."""
        return None

    def add(self, operation: StreamOperation[Any], name: str, seconds: float) -> None:
        """Count a submission, whose function took so long. `Ring.poll`, when it resolves it, pumps the host queue."""
        self._unfinished.append(weakref.ref(operation))
        self._pace.add(seconds)
        if seconds > SLOW_SECONDS and name not in self._slow:
            self._slow.add(name)
            log(
                "warning", "submission_slow", operation.context, function=name, stream=self._queue().name,
                seconds=round(seconds, 4),
            )  # fmt: skip


class Submission:
    """One call of a function, on the loop's thread, when the host queue of its stream has reached it.

    On a driver without a GPU, other libraries compute on the host. There the submission is also the gate of its
    operation: the function runs as host work of the driver, after the earlier work of the stream, and its operation
    follows when it has returned.
    """

    # Only for a driver without a GPU.
    _begun = _done = False
    _forget: Callable[[], object] | None = None
    _value: Any = None
    _error: BaseException | None = None

    def __init__(
        self, queue: Ring, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
        name: str, on_result: Callable[[Any], object] | None,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._name = name
        self._on_result = on_result

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the function, held until the device has finished."""
        return (*self._args, *self._kwargs.values())

    # -- on a GPU ------------------------------------------------------------------------------------------------

    def run(self, operation: StreamOperation[Any]) -> None:
        """Call the function, without a running loop. This is the driver call of its operation.

        A function that raises may have enqueued part of its work. So the operation counts as accepted and gets a late
        event (`StreamQueue.record_late`), until which its arguments are held.
        """
        queue = self._queue
        now = queue.now
        loop, outer = _get_running_loop(), submitting.loop
        began = now()
        try:
            try:
                submitting.loop = loop
                _set_running_loop(None)
                value = operation.value = operation.context.run(self._function, *self._args, **self._kwargs)
            finally:
                _set_running_loop(loop)
                submitting.loop = outer
            if value is not None and self._on_result is not None:  # call it after what is to be called already
                operation.on_settled = functools.partial(self._settled, operation, operation.on_settled)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised again
            operation.submitted_at = began  # as if accepted
            self._raise(failure_of(error))
        except BaseException as error:  # failed here: `Ring.submit` would take it for Ctrl-C in its own lines
            operation.submitted_at = began
            queue.rare.fail(operation, error)
            if isinstance(error, LEAVES_LOOP):
                raise
        finally:
            queue.rare.submissions.add(operation, self._name, now() - began)

    def _settled(self, operation: StreamOperation[Any], former: Callable[[], object] | None) -> None:
        """The operation's `on_settled`, when the device has finished with it: call the former one.

        Then call ``on_result`` with the value of the function, unless the operation has failed or was abandoned.
        """
        if former is not None:
            former()
        if not operation.is_unwanted and self._on_result is not None:
            self._on_result(operation.value)

    def _raise(self, error: BaseException) -> None:
        """Raise the error of the function; a `RuntimeError` for a `DeviceFault` if this device has not faulted."""
        if isinstance(error, DeviceFault) and self._queue.driver.fault is None:
            raise RuntimeError(f"{self._name} raised a DeviceFault, and this device has not faulted") from error
        raise error

    # -- on a driver without a GPU: the gate of the operation ------------------------------------------------------

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether the function has returned or failed. The first call starts it, as a chunk of the stream."""
        if not self._begun:
            self._begun = True
            context = operation.context.copy()  # hooks use the original, after a fault also while the thread runs
            host_work = HostWork.of(self._queue.driver, self._queue.device_state.device)
            launch, key = host_work.bind(self._queue.handle, lambda: context.run(self._compute))
            self._forget = functools.partial(host_work.forget, key)
            self._queue.rare.submit_chunk(launch, ((key,),), None, self._ended, operation.keep)
            self._queue.reactor.plan(self._queue)  # it watches the chunk, whose end calls `_ended`
        return self._done

    def failure(self) -> Failure | None:
        """Return None: the operation's own call raises the error of the function."""
        return None

    def _compute(self) -> None:
        """Call the function on a thread of the driver. It raises nothing: that would be a fault of the device."""
        try:
            self._value = call(self._function, *self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, on the loop's thread
            self._error = error

    def _ended(self) -> None:
        """Open the gate: the function has returned, or a fault or a refusal has prevented it."""
        if self._forget is not None:
            self._forget()
        self._done = True
        self._queue.rare.host_queue.pump()

    def finish(self, operation: StreamOperation[Any]) -> None:
        """Take the result of the function, or raise its error. This is the driver call of its operation.

        An error that is no `Exception` fails the operation here: `Ring.submit` would take it for Ctrl-C in its own
        lines. It is raised as well if it is to leave the loop.
        """
        error = self._error
        if error is None:
            operation.value = self._value
        elif isinstance(error, Exception):
            self._raise(error)
        else:
            operation.submitted_at = self._queue.driver.now()  # the function has run: the stream counts it as accepted
            self._queue.rare.fail(operation, error)
            if isinstance(error, LEAVES_LOOP):
                raise error


class HostWork:
    """Runs functions as kernels of a driver without a GPU, in stream order."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._functions: dict[int, Callable[[], object]] = {}
        self._keys = itertools.count(1)
        self._handle = driver.load(device, Program("Stream.submit", "Q", host=self._run))

    @classmethod
    def of(cls, driver: Driver, device: int) -> HostWork:
        """Return the host work of a device of the driver."""
        key = ("host_work", device)
        work: HostWork | None = driver.registry.get(key)
        if work is None:
            work = driver.registry[key] = cls(driver, device)
        return work

    def bind(self, stream: int, function: Callable[[], object]) -> tuple[Callable[..., object], int]:
        """Return a call that enqueues ``function`` on a stream, and the key that this call and `forget` take."""
        key = next(self._keys)
        self._functions[key] = function
        return self._driver.launcher(stream, self._handle, (1, 1, 1), (1, 1, 1), 0), key

    def forget(self, key: int) -> None:
        """Drop a function that the device has run, or will not run because its launch was refused."""
        self._functions.pop(key, None)

    def _run(self, key: int) -> None:
        self._functions.pop(key)()


class SubmissionPace:
    """The time that submitted functions have taken in this iteration of the loop, and the queues that wait.

    A hundred tasks that resume in one iteration would enqueue a hundred models in it, one after the other. There is one
    pace for each reactor. The time may include functions of earlier iterations, of `UNMARKED_SECONDS` in all.

    Attributes
    ----------
    is_used_up : bool
        True if no other function may be called in this iteration.
    """

    __slots__ = ("_loop", "_scheduled", "_seconds", "_waiting", "is_used_up")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._seconds = 0.0
        self._scheduled = self.is_used_up = False
        self._waiting: dict[Ring, None] = {}

    def put_off(self, queue: Ring) -> None:
        """Pump the host queue of this stream in the next iteration of the loop."""
        self._waiting[queue] = None

    def add(self, seconds: float) -> None:
        """Count the time of a function; once there is enough, have `_begin` reset the count in the next iteration."""
        self._seconds += seconds
        if self._seconds >= UNMARKED_SECONDS:
            self.is_used_up = self._seconds >= MOST_SECONDS
            if not self._scheduled:
                self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin an iteration of the loop: pump the host queues that wait, in order, until its time is used up."""
        self._scheduled = self.is_used_up = False
        self._seconds = 0.0
        try:
            while self._waiting and not self.is_used_up:
                queue = next(iter(self._waiting))
                del self._waiting[queue]
                queue.rare.host_queue.pump()
                queue.attend()
        finally:
            if self._waiting and not self._scheduled:  # Ctrl-C in a function
                self._schedule()
