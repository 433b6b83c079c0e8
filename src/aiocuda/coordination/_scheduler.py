"""Scheduler: submits the operations of a coordinator to streams, and notices when they have finished.

The README.md of this package in the repository describes the life of a node.

The scheduler reads from the operations of the streams what has passed, for each stream from the oldest operation on. It
does not ask for notifications, except for a few operations: where a task waits, or a node waits for a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from .._base._failure import Poison
from .._base._user_code import LEAVES_LOOP
from .._base._wakeups import MOST_PER_TURN, Waiters, Wakes, wake_future
from ..device import Device
from ..errors import ClosedError, InvalidArgumentError
from ..lowlevel import Queue, StreamOperation, queue_of, resources_of, when_accepted, when_passed
from ._accesses import Access, DeclaredAccesses
from ._coordinator_streams import CoordinatorStreams
from ._deadlock_detector import DeadlockDetector
from ._dependencies import DependencyGraph
from ._host_functions import HostFunctions
from ._outside_nodes import OutsideNodes
from ._ready_queue import ReadyQueue
from ._scheduled_node import (
    ABANDONED,
    FAILED,
    OPEN,
    OPERATION_DONE,
    READY,
    WAITING,
    RootFailure,
    ScheduledNode,
)
from ._unpolled_nodes import UnpolledNodes

__all__ = ["SAMPLED", "Scheduler"]

#: Seconds between two queries for a program that asks for a node without an await.
GLANCE_SECONDS = 20e-6

#: Every 16th operation is timed: reading the clock four times costs as much as the measured work.
SAMPLED = 15

#: In a burst of registrations without an iteration of the loop, the device is polled at most this often, in seconds.
POLL_AGAIN = 50e-6

#: How many unread failures are kept until the coordinator ends; older ones go to the loop's exception handler.
MOST_UNREAD = 256


class Scheduler:
    """All unfinished work of a coordinator, on one event loop.

    Attributes
    ----------
    loop_in_use : asyncio.AbstractEventLoop or None
        The loop on which the coordinator was first used; None before that.
    context : contextvars.Context
        An empty context for callbacks that belong to no task.
    closing, closed : bool
        ``closing``: nothing more can be registered, but registered work runs. ``closed``: nothing more is submitted.
    graph : DependencyGraph
    ready : ReadyQueue
    streams : CoordinatorStreams
    detector : DeadlockDetector
    submitted : dict
        For each queue, the submitted nodes that are not known to have passed; the same dict as ``streams.submitted``.
    in_flight : int
        How many places are taken, by submitted nodes and open brackets.
    waiting : dict
        The registered nodes that are not waitable yet.
    open : dict
        The open brackets, with their tasks.
    unentered : dict
        The registered brackets that have not been entered. They are not in ``waiting``: `drain` does not wait for them.
    substituted : list
        Nodes without an operation of their own, until the device has passed their substitutes.
    unread : dict
        The failures that the program has not received, oldest first.
    host_functions : HostFunctions
    outside : OutsideNodes
    others : tuple of Scheduler
        Other coordinators with nodes that nodes here wait for, or have waited for.
    has_back_edges : bool
        True if a node depends on a node that was created later. Otherwise a new edge to an older node closes no cycle.
    number, registered : int
        How many nodes were created and registered.
    progress : int
        How many submissions and ends of nodes there were.
    finished : list of int
        How many nodes finished, by phase.
    kinds : dict
        How many nodes were registered, by kind.
    overhead : float
        Host seconds of the scheduler, of the sampled nodes.
    unpolled : UnpolledNodes
    """

    __slots__ = ("__weakref__", "_asked_at", "_blocked", "_drainers", "_in_host_queue", "_met", "_polled_at",
                 "_producers", "_submitting", "_tidy_scheduled", "_wakes", "_watched", "_woken_producers",
                 "closed", "closing", "context", "detector", "device", "driver", "finished", "graph",
                 "has_back_edges", "host_functions", "in_flight", "kinds", "loop_in_use", "max_in_flight",
                 "number", "open", "others", "outside", "overhead", "progress", "ready", "registered",
                 "resources", "streams", "submitted", "substituted", "unentered", "unpolled", "unread",
                 "waiting")  # fmt: skip

    def __init__(self, device: Device, max_in_flight: int, streams: int, deadlock_timeout: float | None = None) -> None:
        self.device = device
        self.resources = resources_of(device)
        self.driver = device.driver
        self.max_in_flight = max_in_flight
        self.loop_in_use: asyncio.AbstractEventLoop | None = None
        self.context = contextvars.Context()
        self.closing = False
        self.closed = False
        self.graph = DependencyGraph()
        self.ready: ReadyQueue[ScheduledNode[Any]] = ReadyQueue()
        self.streams = CoordinatorStreams(device, streams)
        self.detector = DeadlockDetector(self, deadlock_timeout)
        self.submitted = self.streams.submitted
        self.in_flight = 0
        self.waiting: dict[ScheduledNode[Any], None] = {}
        self.open: dict[ScheduledNode[Any], asyncio.Task[Any] | None] = {}
        self.unentered: dict[ScheduledNode[Any], None] = {}
        self.substituted: list[ScheduledNode[Any]] = []
        self.unread: dict[RootFailure, None] = {}
        self.host_functions = HostFunctions(self)
        self.outside = OutsideNodes(self)
        self.others: tuple[Scheduler, ...] = ()
        self.has_back_edges = False
        #: Nodes without unmet prerequisites, until `submit_ready` admits them.
        self._met: deque[ScheduledNode[Any]] = deque()
        self._submitting = False
        #: Nodes with an operation in the host queue of its stream.
        self._in_host_queue: dict[Queue, list[ScheduledNode[Any]]] = {}
        #: Nodes that wait until the host queue of their stream is empty.
        self._blocked: dict[Queue, dict[ScheduledNode[Any], None]] = {}
        #: For each queue, the operation that calls `advance` when it ends.
        self._watched: dict[Queue, StreamOperation[Any]] = {}
        self._tidy_scheduled = False
        self._polled_at = 0.0
        self._asked_at = -1.0  # the time of the last question of the program that made no query
        self._drainers: Waiters[asyncio.Future[None]] = Waiters()
        self._producers: Waiters[asyncio.Future[None]] = Waiters()
        self._wakes: Wakes | None = None
        self._woken_producers = 0  # producers that were woken and have not run yet
        self.number = self.registered = self.progress = 0
        self.finished = [0] * (ABANDONED + 1)
        self.kinds: dict[str, int] = {}
        self.overhead = 0.0
        self.unpolled = UnpolledNodes()

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the coordinator: the one that ran when it was first used."""
        loop = self.loop_in_use
        if loop is None:
            loop = self.loop_in_use = asyncio.get_running_loop()
        return loop

    @property
    def wakes(self) -> Wakes:
        """The wake-ups of the loop."""
        wakes = self._wakes
        if wakes is None:
            wakes = self._wakes = Wakes.of(self.loop)
        return wakes

    @property
    def has_listeners(self) -> bool:
        """True if the device has listeners, which need to see that an operation is awaited."""
        return self.resources.device_state.hot.listeners is not None

    def check_loop(self) -> None:
        """Raise `WrongLoopError` on another loop than the coordinator's."""
        running = _get_running_loop()
        if running is not self.loop_in_use or running is None:
            if running is None or self.loop_in_use is not None:
                raise self.resources.device_state.wrong_loop(
                    self.loop_in_use, "this coordinator", "make one in each, share the device"
                )
            self.loop_in_use = running
            device = self.device
            if running is not None and not (device.closed or device.driver.fault):
                resources_of(device).loop_states.here().add_source(self)

    def check(self) -> None:
        """Raise an error if nothing can be registered now."""
        if _get_running_loop() is not self.loop_in_use:
            self.check_loop()
        if self.closing or self.resources.closing:
            raise self.streams.closed()
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()

    def meet(self, other: Scheduler) -> None:
        """Raise an error unless nodes of this coordinator can wait for nodes of another one."""
        other.check_loop()
        if other.driver is not self.driver:
            raise InvalidArgumentError(
                f"a coordinator of {self.device.name} cannot wait for a node of {other.device.name}, which has "
                "another driver: await the node first"
            )
        if other.closed:
            raise other.streams.closed()
        if other not in self.others:
            self.others = (*(each for each in self.others if not each.closed), other)
            # The numbers of their nodes do not compare: a cycle may go through any of them.
            self.has_back_edges = other.has_back_edges = True

    def connected(self) -> list[Scheduler]:
        """Return this coordinator, and those with nodes that its nodes may wait for, directly or indirectly."""
        found = [self]
        for scheduler in found:  # the list grows meanwhile
            found.extend(other for other in scheduler.others if other not in found and not other.closed)
        return found

    # -- from registration to submission -------------------------------------------------------------------------

    def register(self, node: ScheduledNode[Any], accesses: list[Access]) -> None:
        """Add the edges that the accesses imply; then submit the node, or keep it until it can be submitted."""
        if accesses:
            self.graph.add(node, accesses)
        checker = self.resources.checker
        if checker is not None:
            node.declare(DeclaredAccesses.of(checker, accesses))
        if node.role == "host":  # the function needs the results on the host, not only in stream order
            for other in node.prerequisites:
                node.wait_until_done(other)
        self.registered += 1
        kind = node.kind
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if node.unmet:
            if node.role == "bracket":
                self.unentered[node] = None
                return
            node.keep_context()
            self.waiting[node] = None
            self.detector.start()
            return
        if self.in_flight >= self.max_in_flight:
            self.collect_finished()
        if (
            node.role != "host"
            and not (node.prerequisites or node.root_failure or node.poison)
            and node.context is None
            and self.in_flight < self.max_in_flight
            and not self.ready.size
        ):
            self._submit(node)
        else:
            self._admit(node)
        if node.phase == READY and node.role != "host":
            node.keep_context()
        if self._met or self.ready.size:
            now = self.driver.now()
            if now - self._polled_at > POLL_AGAIN:
                self.poll()
            else:
                self.submit_ready()

    def add_dependency(self, dependent: ScheduledNode[Any], prerequisite: ScheduledNode[Any]) -> None:
        """Add an edge to a registered node that still waits."""
        self.graph.check_acyclic(dependent, prerequisite)
        reason = dependent.why_not_waiting()
        if reason is not None:
            raise ClosedError(f"{dependent!r} {reason}: name its dependencies when it is created")
        was_ready = not dependent.unmet
        dependent.depend_on(prerequisite, True, until_done=dependent.role == "host")
        if was_ready and (dependent.unmet or prerequisite.root_failure is not None):
            self._withdraw_ready(dependent)
            if not dependent.unmet:  # the prerequisite is waitable, and has failed
                self.prerequisites_met((dependent,))

    def change_rank(self, node: ScheduledNode[Any], rank: int) -> None:
        """Let a waiting node wait for its place in another rank."""
        if node.phase == WAITING or any(node in nodes for nodes in self._blocked.values()):
            node.rank = rank
        else:
            self.ready.change_rank(node, rank)
            self.watch_progress()

    def enter(self, bracket: ScheduledNode[Any]) -> None:
        """Let a bracket wait for its prerequisites and its place: a task enters its block."""
        bracket.keep_context()
        bracket.role = "compute"
        self._leave_unentered(bracket)
        if bracket.unmet:
            self.detector.start()
            return
        if self.in_flight >= self.max_in_flight:
            self.collect_finished()
        self.prerequisites_met((bracket,))
        if self.ready.size and self.driver.now() - self._polled_at > POLL_AGAIN:
            self.poll()

    def drop(self, bracket: ScheduledNode[Any]) -> None:
        """Withdraw a bracket that the program has dropped, on the loop. Any thread: the garbage collector may run."""
        loop = self.loop_in_use
        if bracket in self.unentered and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._dropped, bracket, context=self.context)

    def _dropped(self, bracket: ScheduledNode[Any]) -> None:
        if bracket in self.unentered:
            self._withdraw_unentered(bracket, "was dropped before a task entered its block")

    def _withdraw_unentered(self, bracket: ScheduledNode[Any], reason: str) -> None:
        """Withdraw a bracket that no task can enter any more. That is a failure if a node needs it."""
        failure = bracket.fail(ClosedError(f"{bracket.name} {reason}: it never ran"))
        if any(node.prerequisites[bracket] for node in bracket.dependents or ()):
            self.note_unread(failure)
        else:
            bracket.deliver_failure()
        self._end_unentered(bracket, ABANDONED)

    def _end_unentered(self, bracket: ScheduledNode[Any], phase: int) -> None:
        """End a bracket that has not been entered. It keeps its place in the graph until its prerequisites are met."""
        self._leave_unentered(bracket)
        bracket.end_early(phase)
        if not bracket.unmet:
            self.prerequisites_met((bracket,))

    def _leave_unentered(self, bracket: ScheduledNode[Any]) -> None:
        del self.unentered[bracket]
        self.waiting[bracket] = None
        bracket.unmet -= 1

    def prerequisites_met(self, nodes: Iterable[ScheduledNode[Any]]) -> None:
        """Admit nodes that have no unmet prerequisites any more."""
        self._met.extend(nodes)
        self.submit_ready()

    def _admit(self, node: ScheduledNode[Any]) -> None:
        """Submit a node without unmet prerequisites, put it into the ready queue, or skip it."""
        failure = node.blocking_failure()
        if failure is not None:
            self._skip(node, failure)
        elif node.role == "host":
            self.waiting[node] = None
            node.phase = READY
            assert node.work is not None
            self._call_in_context(node, node.work, None)
        elif self.in_flight < self.max_in_flight and not self.ready.size:
            if node.context is None:
                self._submit(node)
            else:
                self._call_in_context(node, self._submit, node)
        else:
            self.waiting[node] = None
            node.phase = READY
            self.ready.push(node)
            self.detector.start()

    def submit_ready(self) -> None:
        """Submit as many nodes as there are places."""
        if self._submitting:
            return
        self._submitting = True
        met, ready = self._met, self.ready
        try:
            while True:
                if met:
                    self._admit(met.popleft())
                elif ready.size and self.in_flight < self.max_in_flight:
                    node = ready.pop()
                    failure = node.blocking_failure()  # a prerequisite may have failed since the node was admitted
                    if failure is None:
                        self._call_in_context(node, self._submit, node)
                    else:
                        self._skip(node, failure)
                else:
                    break
        finally:
            self._submitting = False
        if ready.size:
            self.watch_progress()
        if self._drainers:
            self._wake_drainers()
        if self._producers:
            self._wake_producers()

    @staticmethod
    def _call_in_context(node: ScheduledNode[Any], function: Callable[..., object], argument: object) -> None:
        """Call a function in the context of a node that has waited; of a node that has not, in the present one."""
        context, node.context = node.context, None
        if context is None:
            function(argument)
        else:
            context.run(function, argument)

    def _submit(self, node: ScheduledNode[Any]) -> None:
        """Submit a node to a stream, after waits for its prerequisites. Hot: it writes slots of the node."""
        late: Queue | None = None
        try:
            stream = self.streams.choose(node) if node.stream is None else node.stream
            queue = queue_of(stream)
            if queue.obstacles and self.resources.streams.let_in(queue):  # raises if the program has closed its stream
                late = queue
            busy = queue if node.find_busy is None and not self.substituted else node.busy_queue(queue)
            if busy.on_host:
                self._block(busy, node)
                return
            if self.ready.size:
                self.ready.served(node)
            follow = self.resources.follow
            for other in node.prerequisites:
                operation = other.operation
                if operation is None:
                    other.follow_substitutes(queue, follow)
                elif operation.queue is not queue:
                    follow(queue, operation)
            node.given_at = began = self.driver.now()
            operation = None if node.work is None else node.work(stream)
            if not node.id & SAMPLED:
                self.overhead -= self.driver.now() - began  # the time of the stream's own method
        except Exception as error:  # noqa: BLE001 - any error is the failure of the operation
            self.fail(node, error)
            return
        except BaseException as error:  # Ctrl-C: it is unknown what was enqueued
            self.fail(node, error)
            raise
        finally:
            if late is not None:
                self.resources.streams.refuse_but_accepted(late)
        node.stream = stream
        self.in_flight += 1
        self.progress += 1
        if operation is None:  # a bracket: it becomes waitable when its block ends
            node.phase = OPEN
            self.waiting[node] = None
            self.streams.hold(queue)
            node.wake_waiters()
            return
        self.accept(node, queue, operation)

    def accept(self, node: ScheduledNode[Any], queue: Queue, operation: StreamOperation[Any]) -> None:
        """Note that a stream has accepted the operation of a node, or the end of a bracket."""
        nodes = self.submitted.get(queue)
        if nodes is None:
            nodes = self.submitted[queue] = deque()
        nodes.append(node)
        refused = not operation.submitted_at and self._was_refused(operation)
        waitable = not refused and (operation.lease is not None or operation.status >= OPERATION_DONE)
        if waitable:
            self.waiting.pop(node, None)
        node.submitted_as(operation, queue, waitable)
        if waitable:
            return
        if refused or operation.failure is not None:
            self._fail_refused(node, queue, operation)
        else:  # still on the host: a kernel that is being loaded, an array that is being staged
            self.waiting[node] = None
            self._in_host_queue.setdefault(queue, []).append(node)
            when_accepted(queue, self._accepted, self.context)
            node.wake_waiters()

    # -- streams with a non-empty host queue ---------------------------------------------------------------------

    def _block(self, queue: Queue, node: ScheduledNode[Any]) -> None:
        """Keep a node until the host queue of its stream is empty.

        If it followed an operation that is still on the host, a failure of that operation would become its own.
        """
        self.waiting[node] = None
        node.phase = READY
        node.keep_context()
        if queue not in self._blocked:
            self._blocked[queue] = {}
            if queue not in self._in_host_queue:
                when_accepted(queue, self._accepted, self.context)
        self._blocked[queue][node] = None

    def _accepted(self, queue: Queue) -> None:
        for node in self._in_host_queue.pop(queue, ()):
            operation = node.operation
            if operation is None:
                continue
            if self._was_refused(operation):
                self._fail_refused(node, queue, operation)
            elif operation.lease is not None or operation.status >= OPERATION_DONE:
                self.waiting.pop(node, None)
                node.become_waitable()
            else:
                self._in_host_queue.setdefault(queue, []).append(node)
        if queue in self._in_host_queue:
            when_accepted(queue, self._accepted, self.context)
        else:
            for node in self._blocked.pop(queue, ()):
                self.ready.push(node)
        self.advance()

    # -- failures ------------------------------------------------------------------------------------------------

    def fail(
        self, node: ScheduledNode[Any], error: BaseException, delivered: bool = False, raised: bool = False
    ) -> None:
        """Fail a node that submitted nothing; its prerequisites replace it.

        ``delivered``: the program has received the error already. ``raised``: a function of the program raised it.
        """
        failure = node.fail_by_program(error, raised)
        if delivered or isinstance(error, (asyncio.CancelledError, *LEAVES_LOOP)):  # it ends the task, or the loop
            failure.delivered = True
        else:
            self.note_unread(failure)
        self.substitute(node)

    def _skip(self, node: ScheduledNode[Any], failure: RootFailure) -> None:
        """Skip a node that needs a node that has failed."""
        node.skip(failure)
        self.substitute(node)

    def substitute(self, node: ScheduledNode[Any], mark: StreamOperation[Any] | None = None) -> None:
        """Let the prerequisites of a node, and a mark in its own stream, replace the operation that it lacks."""
        node.substitute(mark)
        if node.substitutes:
            self.substituted.append(node)
        else:
            self._finish(node)
        self.waiting.pop(node, None)
        node.become_waitable()

    def _was_refused(self, operation: StreamOperation[Any]) -> bool:
        """Return whether a stream has refused or skipped an operation, which then has no event.

        It may have failed in its turn while the waits before it, for its prerequisites, are not over.
        """
        return operation.failure is not None and not operation.submitted_at and self.driver.fault is None

    def _fail_refused(self, node: ScheduledNode[Any], queue: Queue, operation: StreamOperation[Any]) -> None:
        """Fail a node after its stream refused the operation. The stream continues: the node delivers the failure."""
        failure = operation.failure
        assert failure is not None
        spoiled = failure.poison
        if node.root_failure is not None:  # the block of a bracket has raised, and the end of the bracket was refused
            self.take_over(spoiled)
        else:
            spoiled.delivered = True
            error = spoiled.error if self.streams.owns(queue) else operation.value
            self.note_unread(node.fail(error))
        for part in node.parts:  # the other streams of a collective continue, too: the node has one failure for all
            if part.queue.poison is not None:
                part.queue.poison.delivered = True
                after = part.queue.mark()  # a refused operation may have reached the device
                if after is not None:
                    node.parts += (after,)
        mark = queue.mark()  # after anything of the node that the stream may have accepted
        if mark is not None and mark.failure is not None:
            mark.failure.poison.delivered = True
        # The stream may have skipped the waits for the prerequisites, too: the substitutes include the prerequisites.
        self.submitted[queue].remove(node)
        self.in_flight -= 1
        node.operation = None
        self.substitute(node, mark)

    def take_over(self, spoiled: Poison) -> None:
        """Deliver an undelivered failure of a stream through the coordinator, so that the stream continues."""
        if not spoiled.delivered:
            spoiled.delivered = True
            self.note_unread(RootFailure(spoiled.error, spoiled.where))

    def note_unread(self, failure: RootFailure) -> None:
        """Keep a failure that the program has not received; report the oldest if there are too many."""
        self.unread[failure] = None
        if len(self.unread) > MOST_UNREAD:
            for old in list(self.unread)[: MOST_UNREAD // 2]:
                del self.unread[old]
                if not old.delivered:
                    old.delivered = True
                    message = f"aiocuda: the failure of {old.name} was never retrieved"
                    self.loop.call_exception_handler({"message": message, "exception": old.error})

    def read_all(self) -> list[BaseException]:
        """Return the failures that the program has not received, and mark them as delivered."""
        failures = [failure for failure in self.unread if not failure.delivered]
        self.unread.clear()
        for failure in failures:
            failure.delivered = True
        return [failure.again() for failure in failures]

    def _fail_after_fault(self) -> None:
        """Fail all waiting nodes: the device has faulted."""
        fault = self.driver.fault
        if fault is None:
            return
        for node in [*self.waiting, *self.unentered]:
            if node.phase < OPEN and node.root_failure is None:
                node.fail(fault.again()).delivered = True  # every operation of the device delivers the fault
                node.end_early(FAILED)
        self.outside.abandon_events()  # no event is recorded any more, and no bracket is entered
        for bracket in list(self.unentered):
            self._end_unentered(bracket, FAILED)
        while self.ready.size:
            self._met.append(self.ready.pop())
        for nodes in self._blocked.values():
            self._met.extend(nodes)
        self._blocked.clear()

    def abandon(self, node: ScheduledNode[Any]) -> bool:
        """Withdraw a node, or drop its result. Returns False if it had finished or cannot be withdrawn."""
        self.check_loop()
        if node._has_finished():
            return False
        if node.phase >= OPEN:
            return node.operation is not None and node.error is None and node.operation.abandon()
        if node.role == "host" and node.phase == READY:
            return False  # the function runs
        node.fail(node.withdrawal_error())
        node.deliver_failure()
        if node in self.unentered:
            self._end_unentered(node, ABANDONED)
            return True
        was_ready = node in self.waiting and not node.unmet
        if was_ready:
            self._withdraw_ready(node)
        node.end_early(ABANDONED)
        if was_ready:
            self.prerequisites_met((node,))
        return True

    def _withdraw_ready(self, node: ScheduledNode[Any]) -> None:
        """Move a node without unmet prerequisites from READY back to WAITING."""
        if node.phase == WAITING:  # not admitted yet: a task factory, or an eager task, runs inside `submit_ready`
            self._met.remove(node)
            return
        node.phase = WAITING
        for nodes in self._blocked.values():
            if node in nodes:
                del nodes[node]
                return
        self.ready.remove(node)

    # -- progress ------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Query the device for all streams; collect what has finished, and submit what fits."""
        budget = MOST_PER_TURN  # for all streams together, as in the reactor
        for queue, nodes in list(self.submitted.items()):
            if nodes:
                budget -= queue.poll(budget) if budget > 0 else 0
            elif queue not in self._watched and self.submitted.get(queue) is nodes:
                del self.submitted[queue]  # a query may run code of the program, which polls, too
        self._polled_at = self.driver.now()
        self.advance()

    def glance(self) -> None:
        """Query the device for a program that asks for a node without an await: at most once in 20 µs."""
        is_own = _get_running_loop() is self.loop
        if is_own and not self.closed:
            now = self.driver.now()
            if now - self._polled_at >= GLANCE_SECONDS or now == self._asked_at:  # as `Ring.glance`
                self.poll()
            else:
                self._asked_at = now

    def advance(self) -> None:
        """Collect what has finished, and submit what fits."""
        began = self.driver.now()
        before = self.overhead
        self.collect_finished()
        if self.driver.fault is not None:
            self._fail_after_fault()
        self.submit_ready()
        self.overhead = before + (self.driver.now() - began) / (SAMPLED + 1)

    def collect_finished(self) -> None:
        """Finish all nodes that are known to have passed, and release their places."""
        for nodes in list(self.submitted.values()):  # what a node releases may run code of the program, which polls
            while nodes:
                node = nodes[0]
                operation = node.operation
                if operation is None or operation.status < OPERATION_DONE:
                    break
                if operation.status > OPERATION_DONE and (not node.is_settled() or self._was_refused(operation)):
                    break  # `_accepted` fails the node of a refused operation
                self.in_flight -= 1
                self._finish(nodes.popleft())
        if self.substituted:
            settled = [node for node in self.substituted if node.is_settled()]
            if settled:
                self.substituted = [node for node in self.substituted if node not in settled]
            for node in settled:
                self._finish(node)

    def _finish(self, node: ScheduledNode[Any]) -> None:
        self.progress += 1
        phase = node.finish()
        self.graph.forget(node)
        self.finished[phase] += 1
        self.unpolled.add(node)
        if node.callbacks:
            node.call_callbacks()

    def watch_progress(self) -> None:
        """Ask for one notification per stream: for the middle node if nodes are ready, otherwise for the newest.

        For the oldest node if a critical or high node is ready.
        """
        hurry = self.ready.highest < 2
        for queue, nodes in list(self.submitted.items()):  # to watch may run code of the program
            if not nodes or (queue in self._watched and not hurry):
                continue
            node = nodes[0 if hurry else len(nodes) // 2] if self.ready.size else nodes[-1]
            operation = node.operation
            if operation is None or self._watched.get(queue) is operation:
                continue
            self._watch(queue, operation)
        if self.substituted and not self._watched:
            for operation in self.substituted[-1].substitutes:
                if operation.queue not in self._watched:
                    self._watch(operation.queue, operation)
        self.detector.start()

    def _watch(self, queue: Queue, operation: StreamOperation[Any]) -> None:
        self._watched[queue] = operation
        when_passed(operation, functools.partial(self._watched_passed, operation), self.context)

    def _watched_passed(self, operation: StreamOperation[Any], _: StreamOperation[Any]) -> None:
        if self._watched.get(operation.queue) is operation:
            del self._watched[operation.queue]
        self.advance()

    def watch_end(self, node: ScheduledNode[Any]) -> None:
        """Call the callbacks of a submitted node when it has finished."""
        for operation in node.operations():
            when_passed(operation, functools.partial(self._passed, node), self.context)

    def _passed(self, node: ScheduledNode[Any], operation: StreamOperation[Any]) -> None:
        self.advance()
        if node.callbacks is None:
            return
        if node._has_finished():
            node.call_callbacks()  # an abandoned node has finished, although the device may still work on it
        elif not operation.is_settled:
            when_passed(operation, functools.partial(self._passed, node), self.context)

    def tidy_soon(self) -> None:
        """Collect what has finished, once per iteration of the loop: a node was awaited, so memory can be released."""
        if not self._tidy_scheduled:
            self._tidy_scheduled = True
            self.loop.call_soon(self._tidy)

    def _tidy(self) -> None:
        self._tidy_scheduled = False
        if not self.closed:
            self.poll()

    # -- waiting -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if all registered nodes have finished, except brackets that no task has entered."""
        return not (self.in_flight or self.waiting or self.substituted)

    async def drain(self) -> None:
        """Wait until `idle`."""
        self.check_loop()
        while True:
            self.poll()
            if self.idle or self.closed:
                return
            drainer: asyncio.Future[None] = self.loop.create_future()
            self._drainers.add(drainer)
            try:
                self.watch_progress()
                await drainer
            finally:
                self._drainers.discard(drainer)

    def _wake_drainers(self) -> None:
        if not self.idle:
            self.watch_progress()
            return
        self.wakes.wake_all(self._drainers, wake_future)

    @property
    def _crowded(self) -> bool:
        """True if more nodes wait than there are places, and nodes that are not brackets hold some of the places."""
        return len(self.waiting) > self.max_in_flight and self.in_flight > len(self.open)

    async def room(self) -> None:
        """Wait until at most ``max_in_flight`` nodes wait on the host."""
        self.check_loop()
        self.poll()
        await asyncio.sleep(0)  # a task that produces without end must let other tasks run
        while self._crowded and not self.closed:
            producer: asyncio.Future[None] = self.loop.create_future()
            self._producers.add(producer)
            self.watch_progress()
            try:
                await producer
            finally:
                if not self._producers.discard(producer):
                    self._woken_producers -= 1
                    if self._producers:  # this task may register nothing: then there is room for another one
                        self.loop.call_soon(self._wake_producers)

    def _wake_producers(self) -> None:
        """Wake as many producers as there is room for, in the order of their calls."""
        if self._producers and not self._crowded:
            self.wakes.wake(self._wake_producer)

    def _wake_producer(self) -> bool:
        """Wake one producer if there is room for it and for the producers that were woken but have not run yet."""
        if not self._producers or (
            self.in_flight > len(self.open) and len(self.waiting) + self._woken_producers > self.max_in_flight
        ):
            return False
        self._woken_producers += 1
        wake_future(self._producers.pop())
        return True

    # -- the end -------------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Refuse new nodes, and new work in the coordinator's streams. Any thread.

        Registered nodes run. Inside open brackets, the methods of streams work until the block ends.
        """
        self.closing = True
        if self.loop_in_use is _get_running_loop():  # otherwise the device closes the streams, on their loop
            self.streams.refuse()
            if self.resources.closing:  # a device that closes withdraws what waits for a task
                self._abandon_unentered()
            for bracket in list(self.unentered):
                self._withdraw_unentered(bracket, "was never entered by `async with`, and the coordinator closes")

    def moving(self) -> bool:
        """True if a registered node will be submitted or finish without an action of a task. Any thread.

        A node needs a task if it waits for an event that is not recorded or for a bracket that is not left, or if open
        brackets hold all places. If it waits for a node of another coordinator, that one may move.
        """
        return bool(self.waiting) and any(scheduler._moves() for scheduler in self.connected())

    def _moves(self) -> bool:
        """True if a node of this coordinator will be submitted or finish without an action of a task."""
        if self.closed or not (self.in_flight < self.max_in_flight or self.in_flight > len(self.open)):
            return False
        return any(
            node.phase != OPEN and all(other.waitable or other.role == "outside" for other in list(node.prerequisites))
            for node in list(self.waiting)
        )

    def leave(self) -> None:
        """Close without waiting: abandon the nodes that have not been submitted, and cancel the host functions.

        Submitted operations continue. Tasks that wait for abandoned nodes get a `ClosedError`. Idempotent.
        """
        if self.closed:
            return
        self.closing = self.closed = True
        self.streams.refuse()
        self._abandon_unentered()
        for node in list(self.waiting):
            self.abandon(node)
        self.outside.abandon_events()
        self.host_functions.cancel()
        self.detector.stop()
        self.graph.clear()
        self.collect_finished()
        for resources, stream in self.streams.everywhere():
            resources.streams.give_up(queue_of(stream))
        if self._drainers or self._producers:
            self.wakes.wake_all(self._drainers, wake_future)
            self.wakes.wake_all(self._producers, wake_future)

    def _abandon_unentered(self) -> None:
        """Withdraw the brackets that have not been entered, and so wake the tasks that wait for them."""
        for node in list(self.unentered):
            self.abandon(node)
