"""ReplicaServer: answers the requests of a cluster, in the process of a replica."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from .._base._fault_watch import FaultWatch
from .._base._faults import FAULTS
from .._base._tasks import start_task
from .._processes._failures import Failure, failure_from, text_of
from ..errors import ClosedError, DeviceFault
from ..lowlevel import OPEN_DEVICES
from ._messages import (
    ANY_EPOCH,
    Cancel,
    Create,
    Destroy,
    Packet,
    Pickler,
    Probe,
    RemoteError,
    Reply,
    Request,
    Run,
    Watch,
    pack_own,
)
from ._served_object import CURRENT, ReplicaInfo, ServedObject

__all__ = ["ReplicaServer", "SeenIds"]

#: The outcome of a method that was cancelled.
CANCELLED = Failure(None, "CancelledError", "")


class SeenIds:
    """A set of integers from 0 on that arrive roughly in order. It needs memory only for those after the first gap."""

    __slots__ = ("_after", "_below")

    def __init__(self) -> None:
        self._below = 0  # all integers below this one are in the set
        self._after: set[int] = set()  # those above

    def add(self, number: int) -> bool:
        """Add an integer. Return False if it was in the set."""
        if number < self._below or number in self._after:
            return False
        self._after.add(number)
        while self._below in self._after:
            self._after.remove(self._below)
            self._below += 1
        return True


class ReplicaServer:
    """Answers the requests of a cluster, in the process of a replica. Engines carry the messages.

    It runs each call at most once: the reply to a request that arrives twice is that of the first one. A reply is kept
    until the cluster reports that the call is settled.

    Parameters
    ----------
    info
    dumps
        Pickles results, on the loop or on the thread of an object: that of the engine.
    """

    def __init__(self, info: ReplicaInfo, dumps: Pickler) -> None:
        self.info = info
        self._dumps = dumps
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._context.run(CURRENT.set, info)
        self._objects: dict[int, ServedObject] = {}
        self._destroyed: set[int] = set()  # numbers of objects: a `Create` may arrive later than its `Destroy`
        self._seen = SeenIds()
        self._runs: dict[int, asyncio.Task[Packet]] = {}  # of calls that are not settled
        self._tasks: set[asyncio.Task[Packet]] = set()  # that have not ended
        self._watchers: list[asyncio.Future[Packet]] = []
        self._left: asyncio.Task[Packet] | None = None
        self._fault_watch = FaultWatch(self._loop, self._report_fault, FAULTS.of_process)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, packet: Packet) -> asyncio.Future[Packet]:
        """Begin to answer a request, and return the future of the reply."""
        request: Request = packet.message
        if request.epoch not in (ANY_EPOCH, self.info.epoch):
            return self._refused()
        for settled in request.settled:
            self._seen.add(settled)
            self._runs.pop(settled, None)
        body = request.body
        if isinstance(body, Run):
            return self._begin(packet, body)
        if isinstance(body, Cancel):
            return self._cancel(body)
        if isinstance(body, Watch):
            return self._watch()
        if isinstance(body, Probe):
            return self._start(self._reply, self._probe)
        if isinstance(body, Create):
            return self._start(self._reply, functools.partial(self._create, packet, body))
        if isinstance(body, Destroy):
            return self._start(self._reply, functools.partial(self._destroy, body))
        return self.leave()

    def _begin(self, packet: Packet, body: Run) -> asyncio.Future[Packet]:
        if not self._seen.add(body.id):
            known = self._runs.get(body.id)
            return self._refused() if known is None else known
        run = self._runs[body.id] = self._start(self._run, packet, body)
        return run

    def _cancel(self, body: Cancel) -> asyncio.Future[Packet]:
        for cancelled in body.ids:
            run = self._runs.get(cancelled)
            if run is not None:
                run.cancel()
            self._seen.add(cancelled)
        return self._done(Reply(self.info.epoch))

    def _watch(self) -> asyncio.Future[Packet]:
        watcher = self._loop.create_future()
        self._watchers.append(watcher)
        if self._fault_watch.fault is not None:
            self._report_fault()
        return watcher

    def leave(self) -> asyncio.Task[Packet]:
        """Cancel all methods, and leave all objects. Idempotent."""
        if self._left is None:
            self._left = self._start(self._reply, self._leave)
        return self._left

    # -- replies -------------------------------------------------------------------------------------------------

    def _start(self, function: Callable[..., Coroutine[Any, Any, Packet]], *args: Any) -> asyncio.Task[Packet]:
        task = start_task(function, *args, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _done(self, reply: Reply) -> asyncio.Future[Packet]:
        future = self._loop.create_future()
        future.set_result(Packet(reply))
        return future

    def _refused(self) -> asyncio.Future[Packet]:
        return self._done(Reply(self.info.epoch, accepted=False))

    async def _reply(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Packet:
        """Return the reply to a request that has no result. A task that is cancelled before it begins calls nothing."""
        try:
            await work()
        except BaseException as error:  # noqa: BLE001 - the cluster raises it
            return Packet(self._failed(error))
        return Packet(Reply(self.info.epoch))

    def _failed(self, error: BaseException, seconds: float = 0.0) -> Reply:
        fault = isinstance(error, DeviceFault) or self._fault_watch.fault is not None
        return Reply(self.info.epoch, failure=failure_from(error), fault=fault, seconds=seconds)

    async def _run(self, packet: Packet, body: Run) -> Packet:
        began = time.perf_counter()
        try:
            served = self._object(body.number)
            pack = functools.partial(self._pack, body.method)
            data, buffers = await served.run(body.method, packet.load(body.arguments), pack)
            seconds = time.perf_counter() - began
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            seconds = time.perf_counter() - began
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                # Nothing waits for this reply. The traceback takes most of the time of a call.
                return Packet(Reply(self.info.epoch, failure=CANCELLED, seconds=seconds))
            return Packet(self._failed(error, seconds))
        return Packet(Reply(self.info.epoch, data, seconds=seconds), buffers)

    def _pack(self, method: str, values: list[Any]) -> tuple[bytes, list[memoryview]]:
        kind = type(values[0]).__name__
        try:
            return pack_own(values, self._dumps)
        except Exception as error:
            text = (
                f"the result of {method!r}, of type {kind}, cannot be pickled: {text_of(error)}. Return arrays of the "
                "host, and lists instead of generators"
            )
            raise RemoteError(text, type_name=kind, text=text, traceback="") from error

    # -- objects -------------------------------------------------------------------------------------------------

    def _object(self, number: int) -> ServedObject:
        found = self._objects.get(number)
        if found is None:
            raise ClosedError("the object of this call has been left")
        return found

    async def _create(self, packet: Packet, body: Create) -> None:
        if self._left is not None:
            raise ClosedError("the replica is being closed")
        if body.number in self._destroyed:
            raise ClosedError("the object was left before this request to create it arrived")
        known = self._objects.get(body.number)
        if known is None:
            known = ServedObject(self._loop, lambda: _made(packet.load(body.program)), self._context)
            self._objects[body.number] = known
        await known.created()

    async def _destroy(self, body: Destroy) -> None:
        self._destroyed.add(body.number)
        known = self._objects.pop(body.number, None)
        if known is not None:
            await known.leave()

    async def _leave(self) -> None:
        self._fault_watch.stop()
        # Both: a task factory may return another future than its task, and an eager task is not `_left` yet.
        runs = self._tasks - {asyncio.current_task(), self._left}
        for run in runs:
            run.cancel()
        if runs:
            await asyncio.wait(runs)
        errors: list[BaseException] = []
        while self._objects:  # the last one first, as an exit stack
            _, each = self._objects.popitem()
            try:
                await each.leave()
            except BaseException as error:  # noqa: BLE001 - raised when all objects are left
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else BaseExceptionGroup("several objects were not left", errors)

    # -- life ----------------------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Ask all devices of this loop for a sign of life."""
        for opened in OPEN_DEVICES.on_loop(self._loop):
            if opened.device.asynchronous:  # else a ping waits for all work of the device
                try:
                    await opened.device.ping(None)
                except ClosedError:
                    pass  # its program has closed it meanwhile

    def _report_fault(self) -> None:
        fault = self._fault_watch.fault
        assert fault is not None
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(Packet(self._failed(fault)))


def _made(program: tuple[type, tuple[Any, ...]]) -> Any:
    cls, arguments = program
    return cls(*arguments)
