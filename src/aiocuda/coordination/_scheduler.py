"""Flow: a coordinator's operations on their way from registration through a place to their end.

One operation is in one of four parts of it. It *waits* until all that it comes behind stand in streams; then it is
*ready*, and waits for a place; then it is *given* to a stream, or is an *open* bracket; and at last it has finished. An
operation *stands* once later work can be put behind it on the device: its event has been recorded. One that will never
run, since what it needs has failed, stands for those that it came behind.

Whether something has passed is read from the operations of the streams, each stream from its oldest on, and the host is
not told of it: only where somebody waits, or something waits for a place, an operation is watched.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import weakref
from asyncio import _get_running_loop
from collections import deque
from typing import Any

from .._device import Device
from .._wakeups import Waiters, Wakes, wake_future
from ..completion._operation import DONE as OPERATION_DONE
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from . import _blocked, _checking, _deadlock, _ending, _failing, _watching
from ._dependencies import Graph
from ._node import DONE, GIVEN, OPEN, Cause, Node
from ._ready import Ready
from ._streams import Streams

__all__ = ["SAMPLED", "Scheduler"]

#: Every 16th operation is timed: to ask for the time four times costs as much as what would be measured.
SAMPLED = 15

#: In a burst without a turn of the loop the device is asked at most this often for room, in seconds.
ASK_AGAIN = 50e-6


class Scheduler:
    """All that a coordinator has under way, for one event loop."""

    def __init__(self, device: Device, max_in_flight: int, streams: int) -> None:
        self.device = device
        self.driver = device.driver
        self.max_in_flight = max_in_flight
        self.graph = Graph()
        self.ready = Ready()
        self.streams = Streams(device, streams)
        self.given = self.streams.given
        self.context = contextvars.Context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False  # registers nothing more; what was registered runs
        self.closed = False
        self.in_flight = 0
        #: Registered, and not standing yet.
        self.waiting: dict[Node[Any], None] = {}
        self.open: dict[Node[Any], asyncio.Task[Any] | None] = {}
        #: Brackets whose block nobody has entered yet: they are not registered, and may be waited for.
        self.unentered: weakref.WeakKeyDictionary[Node[Any], None] = weakref.WeakKeyDictionary()
        self.unread: dict[Cause, None] = {}
        self.met_now: deque[Node[Any]] = deque()
        self._settling = False
        self.tidying = False  # in the next turn
        self.lingering: list[Node[Any]] = []
        self.unaccepted: dict[StreamQueue, list[Node[Any]]] = {}
        self.blocked: dict[StreamQueue, dict[Node[Any], None]] = {}
        self.watched: dict[StreamQueue, Operation[Any]] = {}
        self.drainers: Waiters[asyncio.Future[None]] = Waiters()
        self._asked = 0.0
        self.number = 0  # of the last operation that was made
        self.inverted = False  # has an operation come behind one that was made later? Else no edge closes a cycle
        self.producers: Waiters[asyncio.Future[None]] = Waiters()
        self.called = 0  # of the producers, those that were woken and have not run yet
        #: Functions of the host that run.
        self.hosted: set[asyncio.Task[None]] = set()
        self.watch = _deadlock.Watch(self)
        # Counted where they happen.
        self.registered = self.progress = 0
        self.ended = [0] * 7  # by state
        self.kinds: dict[str, int] = {}
        self.overhead = 0.0
        self.most_waiting = 0

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it serves: the one that ran when it was first used."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return loop

    @functools.cached_property
    def wakes(self) -> Wakes:
        """The wake-ups of that loop."""
        return Wakes.of(self.loop)

    def check_loop(self) -> None:
        """Only that loop may use it."""
        running = _get_running_loop()
        if running is not self._loop or running is None:
            if running is None or self._loop is not None:
                raise self.device._device_state.wrong_loop(
                    self._loop, "this coordinator", "make one in each, share the device"
                )
            self._loop = running
            device = self.device
            if running is not None and not (device.closed or device.driver.fault):
                device._loop_states.here().fed_by(self)

    def check(self) -> None:
        """May something be registered now?"""
        if _get_running_loop() is not self._loop:
            self.check_loop()
        if self.closing or self.device._closing:
            raise self.streams.closed()
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()

    @property
    def running(self) -> asyncio.AbstractEventLoop | None:
        """The loop that it serves, if it has been used."""
        return self._loop

    # -- from registration to a place ----------------------------------------------------------------------------

    def register(self, node: Node[Any]) -> None:
        """Its edges are known: give it to a stream, or keep it."""
        self.registered += 1
        kind = node.kind
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if node._unmet:
            self.waiting[node] = None
            self.watch.look()
            return
        if self.in_flight >= self.max_in_flight:
            self.sweep()
        self._admit(node)
        if self.met_now or self.ready.size:
            now = self.driver.now()
            if now - self._asked > ASK_AGAIN:
                self.ask()
            else:
                self.settle()

    def met(self, node: Node[Any]) -> None:
        """The last of those that it comes behind stands now."""
        self.met_now.append(node)
        self.settle()

    def _admit(self, node: Node[Any]) -> None:
        """All that it comes behind stand."""
        cause = self._cause_of(node)
        if cause is not None:
            self.pass_over(node, cause)
        elif node._role == "host":
            self.waiting[node] = None
            assert node._work is not None
            node._work(None)  # type: ignore[arg-type]  # it needs no stream
        elif self.in_flight < self.max_in_flight and not self.ready.size:
            self._give(node)
        else:
            self.waiting[node] = None
            self.ready.push(node)
            self.watch.look()

    def _cause_of(self, node: Node[Any]) -> Cause | None:
        """Why it is not to run, if what it needs has failed, or it has itself."""
        cause = node._cause or node._poison
        if cause is None:
            for other, needs in node._needs.items():
                if needs:
                    operation = other._operation
                    if operation is not None and operation.status > OPERATION_DONE:
                        self.broken(other)  # it has come to its turn since anybody has looked
                    if other._cause is not None:
                        return other._cause
        return cause

    def settle(self) -> None:
        """Whoever can be given a place is given one."""
        if self._settling:
            return
        self._settling = True
        met, ready = self.met_now, self.ready
        try:
            while True:
                if met:
                    self._admit(met.popleft())
                elif ready.size and self.in_flight < self.max_in_flight:
                    node = ready.pop()
                    cause = self._cause_of(node)  # there may be more that it needs than when it was admitted
                    if cause is None:
                        self._give(node)
                    else:
                        self.pass_over(node, cause)
                else:
                    break
        finally:
            self._settling = False
        if ready.size:
            self.watch_for_room()
        if self.drainers:
            self._tell_drainers()
        if self.producers:
            self.call_producers()

    def _give(self, node: Node[Any]) -> None:
        """Give it to a stream, behind all that it comes behind."""
        stream = node.stream
        late: StreamQueue | None = None
        try:
            if stream is None:
                stream = self.streams.choose(node)
            queue = stream._queue
            if queue.closed:
                queue.let_in()  # unless the program has closed it, a stream of its own
                late = queue
            if queue.host_queue.entries:
                self.block(queue, node)
                return
            if self.ready.size:
                self.ready.served(node)
            follow = StreamQueue.follow if node._said is None else _checking.follow
            for other in node._needs:
                operation = other._operation
                if operation is not None:
                    if operation.queue is not queue:
                        follow(queue, operation)
                elif other._stands:
                    for operation in other._stands:
                        if operation.extra is not None and operation.failure is not None and not operation.is_settled:
                            operation = operation.queue.submit_marker()  # behind it, and not skipped with it
                        follow(queue, operation)
            node.given_at = began = self.driver.now()
            work = node._work
            if work is not None and node._said is not None:
                work = _checking.watched(node, work)
            operation = None if work is None else work(stream)
            if not node.id & SAMPLED:
                self.overhead -= self.driver.now() - began  # that is the stream's
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the operation's failure
            self.fail(node, error)
            return
        except BaseException as error:  # Ctrl-C: nobody knows how far it came
            self.fail(node, error)
            raise
        finally:
            if late is not None:
                late.closed = True
        node.stream = stream
        self.in_flight += 1
        self.progress += 1
        if operation is None:  # a bracket: its end is what stands
            node._state = OPEN
            self.waiting[node] = None
            self.streams.hold(queue)
            node._tell_given()
            return
        self.accept(node, queue, operation)

    def accept(self, node: Node[Any], queue: StreamQueue, operation: Operation[Any]) -> None:
        """A stream has it, or what ends it."""
        node._operation = operation
        node._state = GIVEN
        if node._said is not None:
            node._said.checker.stamp(queue, operation)
        node._work = None
        behind = self.given.get(queue)
        if behind is None:
            behind = self.given[queue] = deque()
        behind.append(node)
        if operation.lease is not None or operation.status >= OPERATION_DONE:
            self.stand(node)
        elif operation.failure is not None:
            self.refused(node, queue, operation)
        else:  # still on the host: a kernel that is being loaded, an array that is being staged
            self.waiting[node] = None
            self.unaccepted.setdefault(queue, []).append(node)
            self.mark(queue)
            node._tell_given()

    def stand(self, node: Node[Any]) -> None:
        node._standing = True
        self.waiting.pop(node, None)
        if node._waiters is not None:
            node._tell_given()
        if node._callbacks:
            self.watch_end(node)
        dependants = node._dependants
        if dependants is not None:
            node._dependants = None
            for dependant in dependants:
                dependant._unmet -= 1
                if not dependant._unmet:
                    self.met_now.append(dependant)
            self.settle()

    block = _blocked.block
    mark = _blocked.mark
    fail = _failing.fail
    pass_over = _failing.pass_over
    broken = _failing.broken
    stand_in = _failing.stand_in
    abandon = _failing.abandon
    refused = _failing.refused
    latched = _failing.latched
    note_unread = _failing.note_unread
    take_over = _failing.take_over
    tell = _failing.tell
    unready = _failing.unready

    # -- the end of an operation ---------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let go of all that is known to have passed."""
        for nodes in self.given.values():
            while nodes:
                node = nodes[0]
                operation = node._operation
                if operation is None or operation.status < OPERATION_DONE or not node._settled():
                    break
                self.in_flight -= 1
                self.finish(nodes.popleft())
        if self.lingering:
            lingering = self.lingering
            self.lingering = [node for node in lingering if not node._settled()]
            for node in lingering:
                if node._settled():
                    self.finish(node)

    def finish(self, node: Node[Any]) -> None:
        self.progress += 1
        operation = node._operation
        if operation is not None and operation.status > OPERATION_DONE:
            self.broken(node)
        if node._error is None:
            node._state = DONE
        elif node._state < DONE:
            node._state = node._ended_as()
        self.graph.forget(node)
        self.ended[node._state] += 1
        node._needs.clear()
        node._stands = ()
        if node._callbacks:
            node._tell_done()

    def advance(self) -> None:
        """Something has moved: let go of what has passed, and give what fits."""
        began = self.driver.now()
        before = self.overhead
        self.sweep()
        if self.driver.fault is not None:
            self.latched()
        self.settle()
        self.overhead = before + (self.driver.now() - began) / (SAMPLED + 1)

    def ask(self) -> None:
        """Ask the device how far it is."""
        for queue, nodes in list(self.given.items()):
            if nodes:
                queue.poll()
            elif queue not in self.watched:
                del self.given[queue]
        self._asked = self.driver.now()
        self.advance()

    def _tell_drainers(self) -> None:
        if not self.idle:
            self.watch_for_room()
            return
        self.wakes.wake_all(self.drainers, wake_future)

    @property
    def crowded(self) -> bool:
        """Do more wait than there are places, and will that change by itself?"""
        return len(self.waiting) > self.max_in_flight and self.in_flight > len(self.open)

    @property
    def idle(self) -> bool:
        """Has all that was registered finished?"""
        return not (self.in_flight or self.waiting or self.lingering)

    watch_for_room = _watching.watch_for_room
    watch_end = _watching.watch_end
    tidy_soon = _watching.tidy_soon
    until = _watching.until
    until_passed = _watching.until_passed
    room = _watching.room
    call_producer = _watching.call_producer
    call_producers = _watching.call_producers
    drain = _watching.drain

    # -- the end -------------------------------------------------------------------------------------------------

    refuse = _ending.refuse
    moving = _ending.moving
    close = _ending.close
    leave = _ending.leave
    read_all = _ending.read_all
