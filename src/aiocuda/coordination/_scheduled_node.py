"""ScheduledNode: a node as the scheduler sees it: its edges, its phase, its failure."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .._base._checks import check_callback
from .._base._failure import Failure, raisable
from .._base._label import LABEL
from .._base._wakeups import Callback, Waiters, wake_future
from ..errors import BusyError, ClosedError, InvalidTypeError, SkippedError, StaleHandleError
from ..lowlevel import State, StreamOperation
from ._node import PRIORITIES, Kind, Node, NodePriority, check_priority

if TYPE_CHECKING:
    from ..lowlevel import Queue
    from ..memory import DeviceBuffer
    from ..stream import Stream
    from ._accesses import DeclaredAccesses
    from ._bracket import Bracket
    from ._scheduler import Scheduler

__all__ = ["TRANSITIONS", "RootFailure", "ScheduledNode"]

T_co = TypeVar("T_co", covariant=True)

# The states of operations, as plain integers: they are compared in hot functions.
OPERATION_DONE, OPERATION_ABANDONED = int(State.DONE), int(State.ABANDONED)

# The phases of a node, in order. From DONE on it has finished. A SUBMITTED node finishes when its operation does; the
# scheduler notices that later.
WAITING, READY, OPEN, SUBMITTED, DONE, FAILED, SKIPPED, ABANDONED = range(8)

#: The phases that can follow each phase.
TRANSITIONS: dict[int, frozenset[int]] = {
    # READY: no place is free, the stream's host queue is not empty, or a host function runs.
    # SUBMITTED directly: it is submitted at registration, or it fails and its prerequisites replace it.
    WAITING: frozenset((READY, OPEN, SUBMITTED, FAILED, ABANDONED)),
    READY: frozenset((WAITING, OPEN, SUBMITTED, FAILED, ABANDONED)),  # WAITING: `add_dependency`
    OPEN: frozenset((SUBMITTED,)),
    SUBMITTED: frozenset((DONE, FAILED, SKIPPED, ABANDONED)),
    DONE: frozenset(),
    FAILED: frozenset(),
    SKIPPED: frozenset(),
    ABANDONED: frozenset(),
}

#: `Node.state` of each phase.
_STATES = ("waiting", "waiting", "open", "given", "done", "failed", "skipped", "abandoned")


class RootFailure:
    """The first failure of a chain: the error of one node, and the reason why other nodes were skipped.

    Parameters
    ----------
    error
        The error.
    name
        The name of the node or operation that failed.
    failure
        The failure of an operation of another stream. Delivering this root failure delivers that failure, too.
    raised
        True if a function of the program raised the error.

    Attributes
    ----------
    delivered : bool
        True once the program has received the failure, from this node or from a node that was skipped because of it.
    """

    __slots__ = ("_failure", "_raised", "_trace", "delivered", "error", "name")

    def __init__(
        self, error: BaseException, name: str, failure: Failure | None = None, *, raised: bool = False
    ) -> None:
        self.error = error
        self.name = name
        self._raised = raised
        self._trace = error.__traceback__ if raised else None
        self._failure = failure
        self.delivered = False

    def again(self) -> BaseException:
        """Return the error for one more waiter. An error that the program raised is the same object for each waiter."""
        return self.error.with_traceback(self._trace) if self._raised else raisable(self.error)

    def deliver(self) -> None:
        """Note that the program has received the failure."""
        self.delivered = True
        if self._failure is not None:
            self._failure.poison.delivered = True


class ScheduledNode(Node[T_co]):
    """A node of a coordinator's graph: all that the scheduler knows about one operation.

    A node is *waitable* once later work can wait for it on the device: its operation has an event, or substitutes
    replace it. A node that never runs has no operation; its *substitutes* are the newest operations, one per stream,
    that it would have waited for.

    Attributes
    ----------
    role : str
        ``"upload"``, ``"compute"``, ``"download"``, ``"host"``, ``"bracket"`` (not entered yet), ``"outside"`` (an
        operation of another stream) or ``"event"`` (an event that has not been recorded).
    rank : int
        Index into `PRIORITIES`; ageing decreases it.
    phase : int
        A key of `TRANSITIONS`.
    prerequisites : dict
        The nodes that this one waits for. The value is True if it needs their data, False if only the order matters.
    unmet : int
        How many prerequisites are not waitable yet, or not finished where the host needs that. The entry of a task into
        the block of a bracket counts as one.
    dependents : list or None
        The nodes that wait until this one is waitable.
    waitable : bool
    substitutes : tuple of Operation
    find_busy : callable or None
        Given the queue of a collective's node, returns another queue of it that has operations on the host, if any.
    parts : tuple of Operation
        The newest operations of a collective on other streams than that of its operation, which waits for them.
    value
        The result, if no operation has it.
    error : BaseException or None
        The failure of this node: its own, or a `SkippedError`.
    root_failure : RootFailure or None
        The failure that made this node fail.
    poison : RootFailure or None
        The failure because of which bytes that this node reads were never written.
    failure_delivered : bool
        True once the program has received this node's failure.
    work : callable or None
        Submits the operation to a stream. For a host function, starts it; the argument is None.
    copies_out : bool
        True for a download: after the device is done, the host writes the caller's array.
    declared : DeclaredAccesses or None
        The declared accesses, if the device has a checker.
    callbacks : Waiters or None
        The callbacks that run when the node has finished.
    context : contextvars.Context or None
        The context variables with which the node is submitted: None while those of the running task are right.
    bracket : weakref.ref or None
        The bracket of which this is the node.
    """

    # Attributes that few nodes change are class attributes: setting twenty instance attributes takes longer than
    # enqueuing a kernel.
    given_at = 0.0
    operation: StreamOperation[Any] | None = None
    phase = WAITING
    unmet = 0
    dependents: list[ScheduledNode[Any]] | None = None
    waitable = False
    substitutes: tuple[StreamOperation[Any], ...] = ()
    find_busy: Callable[[Queue], Queue] | None = None
    parts: tuple[StreamOperation[Any], ...] = ()
    value: Any = None
    error: BaseException | None = None
    root_failure: RootFailure | None = None
    poison: RootFailure | None = None
    failure_delivered = False
    work: Callable[..., Any] | None = None
    copies_out = False
    declared: DeclaredAccesses | None = None
    callbacks: Waiters[Callback] | None = None
    context: contextvars.Context | None = None
    label: str | None = None
    bracket: weakref.ref[Bracket] | None = None
    is_copy: bool = False
    _risen = 0  # how many ranks it had risen by ageing when its priority was set last
    _waiters: Waiters[asyncio.Future[None]] | None = None  # until the node is open or submitted

    def __init__(
        self, scheduler: Scheduler, number: int, kind: Kind, role: str, rank: int, description: str,
        stream: Stream | None, registered_at: float,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.id = number
        self.kind = kind
        self.description = description
        self.stream = stream
        self.registered_at = registered_at
        self.role = role
        self._priority = self.rank = rank
        self.prerequisites: dict[ScheduledNode[Any], bool] = {}

    # -- the public interface ------------------------------------------------------------------------------------

    @property
    def priority(self) -> NodePriority:
        return PRIORITIES[self._priority]

    @priority.setter
    def priority(self, priority: NodePriority) -> None:
        rank = check_priority(priority)
        self.scheduler.check_loop()
        reason = self.why_not_waiting()
        if reason is not None:
            raise BusyError(f"{self!r} {reason}: only an operation that waits takes another priority")
        self._risen = max(self._priority, self._risen) - self.rank
        self._priority = rank
        self.scheduler.change_rank(self, max(0, rank - self._risen))

    @property
    def dependencies(self) -> tuple[Node[Any], ...]:
        return tuple(node.public for node in self.prerequisites if not node._has_finished())

    @property
    def public(self) -> Node[Any]:
        """The node as the program knows it: the bracket, if this is the node of one that still exists."""
        bracket = None if self.bracket is None else self.bracket()
        return self if bracket is None else bracket

    @property
    def buffer(self) -> DeviceBuffer:
        if self.role != "upload":
            raise InvalidTypeError(f"{self!r} fills no buffer: only an upload does")
        if self.value is None:
            self.result()
        return cast("DeviceBuffer", self.value)

    @property
    def state(self) -> str:
        self.done()
        return self.seen_state

    @property
    def seen_state(self) -> str:
        phase = self.phase
        if phase == SUBMITTED:
            operation = self.operation
            if not self._has_finished():
                return "submitted" if operation is None else operation.seen_state
            if self.error is None:  # without an operation: a host function, which has returned
                return "done" if operation is None else operation.seen_state
            phase = self._unsuccessful_phase()
        return _STATES[phase]

    def done(self) -> bool:
        if not self._has_finished():
            self.scheduler.glance()
        return self._has_finished()

    def _has_finished(self) -> bool:
        if self.phase != SUBMITTED:
            return self.phase >= DONE
        operation = self.operation
        if operation is not None:
            return operation.status >= OPERATION_DONE
        return all(operation.is_settled for operation in self.substitutes)

    def result(self) -> T_co:
        error = self.exception()
        if error is not None:
            raise error
        value = self.value
        if value is None:
            if self.is_copy:
                raise StaleHandleError(f"the result of {self!r} was freed when the program dropped the node: keep it")
            if self.operation is not None:
                value = self.operation.result()
        return cast("T_co", value)

    def exception(self) -> BaseException | None:
        if not self._has_finished():
            raise BusyError(f"{self!r} has not finished: await it")
        operation = self.operation
        if self.error is None and operation is not None and operation.status > OPERATION_DONE:
            self.adopt_operation_failure()
        self.deliver_failure()
        failure, error = self.root_failure, self.error
        return failure.again() if failure is not None and failure.error is error else error and raisable(error)

    def set_label(self, label: str) -> None:
        """Give the node, and the operation that it submits, another label than that of the task."""
        self.label = label
        self.context = contextvars.copy_context()
        self.context.run(LABEL.set, label)

    def keep_context(self) -> None:
        """Keep the context variables of the running task: the node is submitted later, perhaps by another task."""
        if self.context is None:
            self.context = contextvars.copy_context()

    def add_done_callback(
        self, fn: Callable[[Node[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        check_callback(fn, context)
        scheduler = self.scheduler
        scheduler.check_loop()
        if context is None:
            context = contextvars.copy_context()
        if self._has_finished():
            scheduler.loop.call_soon(fn, self.public, context=context)
            return
        if self.callbacks is None:
            self.callbacks = Waiters()
            if self.phase == SUBMITTED:
                scheduler.watch_end(self)
        self.callbacks.add(Callback(fn, context))

    def remove_done_callback(self, fn: Callable[[Node[Any]], object]) -> int:
        check_callback(fn)
        return 0 if self.callbacks is None else self.callbacks.remove(fn)

    def abandon(self) -> bool:
        return self.scheduler.abandon(self)

    def __await__(self) -> Generator[Any, None, T_co]:
        scheduler = self.scheduler
        scheduler.check_loop()
        if self.phase < SUBMITTED:
            yield from self.until(SUBMITTED)
        operation = self.operation
        if operation is not None:
            was_done = operation.status >= OPERATION_DONE
            try:
                yield from operation.__await__()
            except Exception:
                if operation.status < OPERATION_DONE:
                    raise  # not the operation's own failure; `result` raises that one
            if not was_done:
                scheduler.tidy_soon()
        elif self.phase == SUBMITTED:
            yield from self._until_substitutes_pass()
        return self.result()

    @property
    def has_result(self) -> bool:
        """True if a finished node keeps a result."""
        return self.phase == DONE and (
            self.value is not None or (self.operation is not None and self.operation.value is not None)
        )

    def without_result(self) -> ScheduledNode[T_co]:
        """Return a copy of a finished node that does not keep the result."""
        node: ScheduledNode[T_co] = ScheduledNode.__new__(ScheduledNode)
        node.__dict__.update(self.__dict__, value=None, operation=None, callbacks=None, is_copy=True)
        return node

    def why_not_waiting(self) -> str | None:
        """Return why it is too late to change the dependencies and the priority; None while the node waits."""
        if self.phase < OPEN:
            if self.role == "host" and self.phase == READY:
                return "runs already"
            return None if self.unmet or self in self.scheduler.waiting else "is being given to a stream"
        if self.phase == OPEN:
            return "is open: its block has begun"
        if self.error is not None:
            phase = self._unsuccessful_phase() if self.phase == SUBMITTED else self.phase
            return f"has ended: it is {_STATES[phase]}"
        if self.role == "host" or self._has_finished():
            return "has ended"
        return "has been given to a stream"

    # -- waiting -------------------------------------------------------------------------------------------------

    def until(self, phase: int) -> Generator[Any, None, None]:
        """Wait until the node has reached ``phase``: SUBMITTED or OPEN."""
        while self.phase < phase:
            future: asyncio.Future[None] = self.scheduler.loop.create_future()
            if self._waiters is None:
                self._waiters = Waiters()
            self._waiters.add(future)
            try:
                with self.scheduler.detector.waiting(self, future):
                    yield from future
            finally:
                if self._waiters is not None:
                    self._waiters.discard(future)

    def _until_substitutes_pass(self) -> Generator[Any, None, None]:
        """Wait until the device is done with the substitutes, whether they succeeded or failed."""
        for operation in self.substitutes:
            if operation.status < OPERATION_DONE:
                with contextlib.suppress(Exception):  # a failure of another node, which delivers it
                    yield from operation.__await__()
            if not operation.is_settled:
                yield from operation.settle().__await__()

    def wake_waiters(self) -> None:
        """Wake the tasks that wait until the node is open or submitted."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            self.scheduler.wakes.wake_all(waiters, wake_future)

    def call_callbacks(self) -> None:
        """Schedule the callbacks: the node has finished."""
        callbacks, self.callbacks = self.callbacks, None
        if callbacks is not None:
            self.scheduler.wakes.wake_all(callbacks, self._call_soon)

    def _call_soon(self, callback: Callback) -> None:
        self.scheduler.loop.call_soon(callback.function, self.public, context=callback.context)

    # -- edges ---------------------------------------------------------------------------------------------------

    def depend_on(self, other: ScheduledNode[Any], needs_data: bool, until_done: bool = False) -> None:
        """Add an edge, or strengthen an existing one.

        Parameters
        ----------
        other
            The prerequisite.
        needs_data
            True if this node is skipped when the prerequisite fails.
        until_done
            True if this node is not submitted before the host has seen that the prerequisite is done.
        """
        if other is self:
            return
        known = self.prerequisites.get(other)
        if known is None:
            self.prerequisites[other] = needs_data
            if other.id > self.id:
                self.scheduler.has_back_edges = True
            if not other.waitable:
                self.unmet += 1
                if other.dependents is None:
                    other.dependents = [self]
                else:
                    other.dependents.append(self)
        elif needs_data and not known:
            self.prerequisites[other] = True
        if until_done:
            self.wait_until_done(other)

    def wait_until_done(self, other: ScheduledNode[Any]) -> None:
        """Stay in WAITING until the host has seen that ``other`` is done, even if this node never runs."""
        if not other._has_finished():
            self.unmet += 1
            other.add_done_callback(self._prerequisite_done, context=self.scheduler.context)

    def _prerequisite_done(self, other: Node[Any]) -> None:
        self.unmet -= 1
        if not self.unmet:
            self.scheduler.prerequisites_met((self,))

    def drop_prerequisite(self, other: ScheduledNode[Any]) -> None:
        """Remove an edge, also that of `wait_until_done`."""
        if other.dependents is not None and self in other.dependents:
            other.dependents.remove(self)
            self.unmet -= 1
        self.unmet -= other.remove_done_callback(self._prerequisite_done)
        del self.prerequisites[other]
        if other.role == "event" and not (other.dependents or other.callbacks):
            self.scheduler.outside.forget_event(other)

    def blocking_failure(self) -> RootFailure | None:
        """Return the failure because of which the node must not run: its own, or of a prerequisite that it needs."""
        failure = self.root_failure or self.poison
        if failure is None:
            for other, needs_data in self.prerequisites.items():
                if needs_data:
                    operation = other.operation
                    if operation is not None and operation.status > OPERATION_DONE:
                        other.adopt_operation_failure()  # the scheduler has not noticed the failure yet
                    if other.root_failure is not None:
                        return other.root_failure
        return failure

    # -- from WAITING to SUBMITTED -------------------------------------------------------------------------------

    def declare(self, declared: DeclaredAccesses) -> None:
        """Let the checker use these accesses instead of those of the stream method that the node calls."""
        self.declared = declared
        if self.work is not None and self.role != "host":
            self.work = declared.checked(self.work)

    def submitted_as(self, operation: StreamOperation[Any], queue: Queue, waitable: bool) -> None:
        """Move to SUBMITTED: the queue has accepted the operation. ``waitable``: its event has been recorded."""
        self.operation = operation
        self.phase = SUBMITTED
        self.work = None
        if self._waiters is not None and self.scheduler.has_listeners:
            # The tasks that await this node will await the operation, in the next iteration of the loop: it may have
            # been resolved by then, and listeners need to see that it is awaited.
            operation.add_done_callback(_nothing)
        if self.declared is not None:
            self.declared.checker.stamp(queue, operation)
        if waitable:
            if self._waiters is None and self.dependents is None and not self.callbacks:
                self.waitable = True
            else:
                self.become_waitable()

    def attach(self, operation: StreamOperation[Any]) -> None:
        """Move to SUBMITTED: ``operation`` is in a stream that the coordinator may not own."""
        self.phase = SUBMITTED
        failure = operation.failure
        if failure is not None:
            self.error = operation.value
            self.root_failure = RootFailure(failure.poison.error, repr(operation), failure)
            self.root_failure.delivered = True  # the operation delivers its failure, not the coordinator

    def substitute(self, mark: StreamOperation[Any] | None = None) -> None:
        """Move to SUBMITTED without an operation: the substitutes are the newest operations of all prerequisites.

        ``mark`` is an operation of this node's own stream that is among them.
        """
        newest: dict[Queue, StreamOperation[Any]] = {} if mark is None else {mark.queue: mark}
        for operations in (self.parts, *(other.operations() for other in self.prerequisites)):
            for operation in operations:
                known = newest.get(operation.queue)
                if not operation.is_settled and (known is None or known.id < operation.id):
                    newest[operation.queue] = operation
        self.substitutes = tuple(newest.values())
        self.work = self.context = None
        if self.phase < SUBMITTED:
            self.phase = SUBMITTED

    def busy_queue(self, queue: Queue) -> Queue:
        """Return a queue with operations on the host, for which the node must wait; its own queue if there is none.

        That of a substitute that is on the host: it may be skipped with the work for which it stands.
        """
        if not queue.on_host and self.find_busy is not None:
            queue = self.find_busy(queue)
        if not queue.on_host:
            for other in self.prerequisites:
                for substitute in other.substitutes if other.operation is None else ():
                    if substitute.queue.on_host and not substitute.submitted_at and substitute.failure is None:
                        return substitute.queue
        return queue

    def follow_substitutes(self, queue: Queue, follow: Callable[[Queue, StreamOperation[Any]], None]) -> None:
        """Let later work of a queue wait for the substitutes of this node."""
        for substitute in self.substitutes:
            operation: StreamOperation[Any] | None = substitute
            if substitute.failure is not None and not substitute.is_settled:
                operation = substitute.queue.mark(after_end=True)  # comes after it, but is not skipped with it
            if operation is not None:
                follow(queue, operation)

    def operations(self) -> tuple[StreamOperation[Any], ...]:
        """Return the operations that later work waits for."""
        return self.substitutes if self.operation is None else (self.operation,)

    def become_waitable(self) -> None:
        """Wake the waiters, and release the dependents: later work can wait for this node on the device."""
        self.waitable = True
        if self._waiters is not None:
            self.wake_waiters()
        if self.callbacks:
            self.scheduler.watch_end(self)
        dependents = self.dependents
        if dependents is not None:
            self.dependents = None
            met: dict[Scheduler, list[ScheduledNode[Any]]] = {self.scheduler: []}
            for dependent in dependents:
                dependent.unmet -= 1
                if not dependent.unmet:
                    met.setdefault(dependent.scheduler, []).append(dependent)
            for scheduler, nodes in met.items():
                scheduler.prerequisites_met(nodes)

    # -- failures ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, *, shown: BaseException | None = None, raised: bool = False) -> RootFailure:
        """Record a failure of this node, and return it. The phase does not change.

        Parameters
        ----------
        error
            The root failure.
        shown
            The error that waiters get; the default is ``error``.
        raised
            True if a function of the program raised the error.
        """
        self.error = error if shown is None else shown
        self.root_failure = failure = RootFailure(error, self.name, raised=raised)
        return failure

    def fail_by_program(self, error: BaseException, raised: bool = False) -> RootFailure:
        """Do the same, but waiters get a `ClosedError` for a `CancelledError`: only the cancelled task gets that."""
        shown: BaseException = error
        if isinstance(error, asyncio.CancelledError):
            shown = ClosedError(f"{self.name} was left by {type(error).__name__} before its end")
        return self.fail(error, shown=shown, raised=raised)

    def skip(self, failure: RootFailure) -> None:
        """Record that the node does not run because of a failure of another node."""
        if self.root_failure is None:  # otherwise it was withdrawn, or has failed itself
            self.root_failure = failure
            self.error = SkippedError(f"{self.name} was not run: {failure.name} failed before it: {failure.error}")
            self.error.__cause__ = failure.error

    def adopt_operation_failure(self) -> None:
        """Make the failure of the node's operation the failure of the node."""
        operation = self.operation
        if self.root_failure is not None or operation is None or operation.status <= OPERATION_DONE:
            return
        failure = operation.failure
        if operation.status == OPERATION_ABANDONED:
            self.error = self.error or operation.exception()
            if failure is None:
                return  # only the result was dropped: dependents run
            error = failure.poison.error
        elif failure is not None and self.scheduler.streams.owns(operation.queue):
            error = self.error = failure.poison.error  # also if the operation that failed is another one of this node
        else:
            error = self.error = operation.value
        if failure is not None:
            failure.poison.delivered = True
        self.root_failure = RootFailure(error, self.name)
        self.scheduler.note_unread(self.root_failure)

    def deliver_failure(self) -> None:
        """Note that the program has received the failure of this node, if there is one."""
        if self.root_failure is not None:
            self.failure_delivered = True
            self.root_failure.deliver()

    def withdrawal_error(self) -> ClosedError:
        """Return the error of a node that was withdrawn."""
        return ClosedError(f"{self.name} was abandoned before it was given to a stream: it never ran")

    # -- the end -------------------------------------------------------------------------------------------------

    def end_early(self, phase: int) -> None:
        """Move to FAILED or ABANDONED, and wake all waiters.

        The node keeps its place in the graph: its dependents still wait for its prerequisites.
        """
        self.phase = phase
        self.work = self.context = None
        self.wake_waiters()
        self.call_callbacks()

    def finish(self) -> int:
        """Move to a final phase, unless the node ended early; drop the edges. Return the phase."""
        operation = self.operation
        if operation is not None and operation.status > OPERATION_DONE:
            self.adopt_operation_failure()
        if self.error is None:
            self.phase = DONE
        elif self.phase < DONE:
            self.phase = self._unsuccessful_phase()
        for part in self.parts:
            if part.failure is not None:  # the failure of this node tells the program of it
                part.failure.poison.delivered = True
        self.prerequisites.clear()
        self.substitutes = self.parts = ()
        return self.phase

    def _unsuccessful_phase(self) -> int:
        failure = self.root_failure
        if isinstance(self.error, SkippedError) and failure is not None and failure.error is not self.error:
            return SKIPPED
        return ABANDONED if failure is None or isinstance(failure.error, asyncio.CancelledError) else FAILED

    def is_settled(self) -> bool:
        """True if the device, too, is done with the node."""
        operation = self.operation
        if operation is None:
            return all(operation.is_settled for operation in self.substitutes)
        return operation.is_settled


def _nothing(operation: StreamOperation[Any]) -> None:
    """Do nothing: a callback that stands for tasks which are about to wait."""
