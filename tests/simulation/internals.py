"""Access to internals of aiocuda: the only module of this package that uses private names of the library.

The invariants are about states that no public method returns, such as the event of an operation or the number of armed
notifiers. If such an internal changes, only this module has to follow.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from aiocuda._core import INTERNAL, Operation, State, StreamOperation, stream_operation
from aiocuda.completion._host_queue import MOST_PER_PUMP
from aiocuda.completion._progress import TRANSITIONS
from aiocuda.completion._submission import Submission
from aiocuda.coordination._bracket import scheduled as bracket_node
from aiocuda.coordination._scheduled_node import ScheduledNode
from aiocuda.coordination._scheduler import Scheduler
from aiocuda.device._event import Event
from aiocuda.device._resources import resources_of
from aiocuda.memory._buffer import DeviceBuffer

if TYPE_CHECKING:
    from aiocuda import AsyncCoordinator, Device, EventPool, Stream, StreamPool
    from aiocuda._core import Ring
    from aiocuda.completion._notifiers import NotifierPool
    from aiocuda.coordination import Node
    from aiocuda.driver.simulated import SimulatedDriver

__all__ = [
    "MOST_PER_PUMP",
    "TRANSITIONS",
    "RungNotifiers",
    "State",
    "call_count",
    "changed_operations",
    "check_chunks",
    "device_bytes",
    "device_has_finished",
    "error_of",
    "event_handle",
    "event_is_lent",
    "event_limit",
    "events_in_use",
    "failure_was_seen",
    "for_program",
    "free_notifier_tokens",
    "has_exported",
    "has_exports",
    "has_failed",
    "hook_of",
    "idle_event_handles",
    "in_flight_limit",
    "is_device_done",
    "is_idle",
    "limit_chunks",
    "loop_is_closed",
    "loop_states",
    "nodes_that_wait_for_a_place",
    "on_accept",
    "operations_before",
    "pinned_ranges",
    "pool_device",
    "pool_size",
    "queue_of",
    "queue_of_stream",
    "root_failure_is_unseen",
    "scheduled",
    "state_of",
    "stream_handle",
    "was_submitted",
    "watch_queue",
]

# -- operations --------------------------------------------------------------------------------------------------------


def state_of(operation: Operation[Any]) -> State:
    """Return the state of an operation."""
    return State(stream_operation(operation).status)


def changed_operations(states: dict[Operation[Any], State]) -> list[Operation[Any]]:
    """Return the operations with another state than the given one. Called after each step of the loop."""
    known: Any = states  # every operation is a `StreamOperation`; this runs too often for a call per operation
    return [operation for operation, state in known.items() if operation.status != state]


def has_failed(operation: Operation[Any]) -> bool:
    """True if an operation has failed, or will fail or be skipped when it is resolved."""
    return stream_operation(operation).failure is not None


def failure_was_seen(operation: Operation[Any]) -> bool:
    """True if a failed operation has raised its failure in a waiter."""
    failure = stream_operation(operation).failure
    return failure is not None and failure.delivered


def error_of(operation: Operation[Any]) -> BaseException:
    """Return the error of a failed operation, without marking its failure as seen."""
    error: BaseException = stream_operation(operation).value
    return error


def was_submitted(operation: Operation[Any]) -> bool:
    """True if the stream has accepted the operation."""
    return stream_operation(operation).submitted_at > 0


def device_has_finished(operation: Operation[Any]) -> bool:
    """True if aiocuda counts the device as finished with an operation, whatever the operation's state is."""
    return stream_operation(operation).is_settled


def event_handle(operation: Operation[Any]) -> int | None:
    """Return the handle of the event that was recorded after an operation; None if it has none now."""
    lease = stream_operation(operation).lease
    return None if lease is None else lease.handle


def is_device_done(driver: SimulatedDriver, operation: Operation[Any]) -> bool:
    """True if the simulated device has finished an operation, or the operation has no event."""
    handle = event_handle(operation)
    event = None if handle is None else driver._machine.events.get(handle)
    return event is None or event.is_done


def queue_of(operation: Operation[Any]) -> Ring:
    """Return the stream queue of an operation."""
    return stream_operation(operation).queue


def loop_is_closed(operation: Operation[Any]) -> bool:
    """True if the event loop of an operation was closed."""
    return stream_operation(operation).queue.loop.is_closed()


def operations_before(operation: Operation[Any]) -> list[Operation[Any]]:
    """Return the submitted operations of the same stream up to this one, without those that have failed.

    The event of an operation that failed may have been recorded late, after more than the operation itself.
    """
    return [
        each for each in stream_operation(operation).queue.pending if each.id <= operation.id and each.failure is None
    ]


# -- queues and notifiers ----------------------------------------------------------------------------------------------


class _WatchedPending(deque[StreamOperation[Any]]):
    """The pending operations of a stream queue. Reports submissions out of order, and every operation that leaves."""

    def __init__(
        self,
        operations: Iterable[StreamOperation[Any]],
        report: Callable[[str], object],
        on_resolve: Callable[[StreamOperation[Any]], object],
    ) -> None:
        super().__init__(operations)
        self._report = report
        self._on_resolve = on_resolve
        self._newest = 0

    def append(self, operation: StreamOperation[Any]) -> None:
        if operation.kind != INTERNAL:
            if operation.id < self._newest:
                self._report(f"V3 {operation!r} was submitted after a later operation of its stream")
            self._newest = operation.id
        super().append(operation)

    def popleft(self) -> StreamOperation[Any]:
        operation = super().popleft()
        self._on_resolve(operation)
        return operation


def watch_queue(
    queue: Ring, report: Callable[[str], object], on_resolve: Callable[[StreamOperation[Any]], object]
) -> None:
    """Report the submissions and resolutions of a queue from now on. A second call for the same queue does nothing."""
    if type(queue.pending) is not _WatchedPending:
        queue.pending = _WatchedPending(queue.pending, report, on_resolve)


class RungNotifiers:
    """The notifiers of one loop that are armed or have rung, until the loop has read their tags."""

    def __init__(self, notifier_pool: NotifierPool) -> None:
        # Ports outlive their loops, and this port refers to `_read_tags`: a strong reference would keep the pool.
        self._notifier_pool = weakref.ref(notifier_pool)
        self._unread: dict[int, int] = {}  # tag → index of the notifier
        self._drain = notifier_pool.port.drain
        notifier_pool.port.drain = self._read_tags  # type: ignore[method-assign]

    def _read_tags(self) -> list[int]:
        tags = self._drain()
        for tag in tags:
            self._unread.pop(tag, None)
        return tags

    def has_early_reuse(self) -> bool:
        """True if a notifier counts as free although the loop has not read its tag yet."""
        notifier_pool, unread = self._notifier_pool(), self._unread
        if notifier_pool is None or not (notifier_pool.armed or unread):
            return False
        for tag, armed in notifier_pool.armed.items():
            unread[tag] = armed.index
        return not set(unread.values()).isdisjoint(notifier_pool._free)


def loop_states(device: Device) -> Iterator[tuple[Iterable[Ring], bool, NotifierPool]]:
    """Yield the stream queues, "has seen a fault", and the notifier pool of every loop that uses a device."""
    for loop_state in resources_of(device).loop_states._loop_states.values():
        reactor = loop_state.reactor
        yield loop_state.queues, reactor.hot.faulted, reactor.notifier_pool


def retired_operations(device: Device) -> int:
    """Return the number of operations of streams that were closed."""
    return sum(loop_state.reactor.submitted for loop_state in resources_of(device).loop_states._loop_states.values())


def check_chunks(queue: Ring, report: Callable[[str], object]) -> None:
    """V4: report buffers that count as unused although a submitted chunk, or a submitted function, uses them."""
    for chunk in queue.pending:
        if chunk.kind is not INTERNAL or chunk.keep is None:
            continue
        kept: Any = chunk.keep
        for part in kept.arguments if isinstance(kept, Submission) else kept:
            if isinstance(part, DeviceBuffer):
                use = part._block.uses.get(queue)
                if use is None or use.is_settled:
                    report(f"V4 {part!r} counts as unused, and a submitted chunk of {queue.name} uses it")


# -- devices and the simulated driver ----------------------------------------------------------------------------------


def idle_event_handles(device: Device) -> list[int]:
    """Return the handles of the events that no operation uses."""
    return [lease.handle for lease in resources_of(device).device_state.leases.plain]


def in_flight_limit(device: Device) -> int:
    """Return the number of operations that a stream of this device submits at most."""
    return resources_of(device).device_state.max_in_flight


def free_notifier_tokens(device: Device) -> int:
    """Return how many more notifiers may be armed."""
    return len(resources_of(device).device_state.budget.tokens)


def has_exports(device: Device) -> bool:
    """True if another library still holds memory of this device. That memory stays allocated."""
    return bool(device.memory.exports.held)


def limit_chunks(device: Device, most: int) -> None:
    """Limit the pinned chunks of the running loop, so that staged copies wait for each other's chunks."""
    resources_of(device).loop_states.here().staging.most_chunks = most


def call_count(driver: SimulatedDriver) -> int:
    """Return the number of driver calls so far. `statistics` would count as a call itself."""
    return driver._calls


def device_bytes(driver: SimulatedDriver, index: int) -> int:
    """Return the bytes that are allocated on a device."""
    return driver._memory._pools[index].used


def pinned_ranges(driver: SimulatedDriver) -> int:
    """Return the number of ranges of pinned memory."""
    return len(driver._pages._ranges)


def queue_of_stream(stream: Stream) -> Ring:
    """Return the stream queue of a stream."""
    return stream._queue


def has_exported(stream: Stream) -> bool:
    """True if a live buffer of a stream is, or may be, in use by another library."""
    return any(block.is_exported or block.has_interface for block in stream._allocations.live())


def hook_of(stream: Stream) -> object:
    """Return what runs in place of the methods of a stream; None if nothing does."""
    return stream._hook


def stream_handle(stream: Stream) -> int:
    """Return the first handle of a stream, as `Stream.handle` does, without exporting the stream.

    A stream that had been exported, and was taken again by another `Stream`, has more than one.
    """
    queue = stream._queue
    driver: Any = queue.driver
    handle: int = driver._machine.stream(queue.handle).handle
    return handle


def is_idle(driver: SimulatedDriver, stream: Stream) -> bool:
    """True if the simulated device has finished all work of a stream."""
    return driver._machine.stream(stream._queue.handle).is_idle


# -- pools and coordinators --------------------------------------------------------------------------------------------


def pool_device(pool: StreamPool) -> Device:
    """Return the device of a stream pool."""
    return pool._device


def pool_size(pool: StreamPool) -> tuple[int, int]:
    """Return how many streams a pool has, and how many it may have."""
    return len(pool._places), pool._maximum


def event_limit(pool: EventPool, timing: bool | None = None) -> int:
    """Return how many events a pool may have on loan; with ``timing``, how many of that kind."""
    return pool._limit if timing is None else pool._limits[timing]


def event_is_lent(event: Event, pool: EventPool) -> bool:
    """True if an event is on loan from a pool."""
    return event._lease is not None and event.lender is pool


def events_in_use(driver: SimulatedDriver) -> int:
    """Return the number of CUDA events that `Event` objects of the program hold. Slow: it visits all objects."""
    events = [thing for thing in gc.get_objects() if issubclass(type(thing), Event)]  # a proxy raises
    held = (event._lease for event in events if event._device_state.driver is driver)
    return len({lease.handle for lease in held if lease is not None})


def scheduled(node: Node[Any]) -> ScheduledNode[Any]:
    """Return the node that the scheduler knows. That of a bracket does not keep the bracket."""
    found = bracket_node(node)
    assert isinstance(found, ScheduledNode)
    return found


def for_program(node: Node[Any]) -> Node[Any]:
    """Return the bracket of a node, if it has one that still exists; otherwise the node."""
    return scheduled(node).public


def nodes_that_wait_for_a_place(coordinator: AsyncCoordinator) -> list[Node[Any]]:
    """Return the nodes of which the next one that gets a place is chosen."""
    ranks = coordinator._scheduler.ready._ranks
    return [node for rank in ranks for node in rank.nodes[rank.first :] if isinstance(node, ScheduledNode)]


def root_failure_is_unseen(node: Node[Any]) -> bool:
    """True if a node failed, or was skipped, because of a failure that no caller has seen."""
    root_failure = scheduled(node).root_failure
    return root_failure is not None and not root_failure.delivered


def on_accept(
    coordinator: AsyncCoordinator, before_accept: Callable[[Node[Any], Operation[Any], bool], object]
) -> None:
    """Call ``before_accept(node, operation, too_many)`` for every operation that a coordinator submits.

    ``too_many`` is True if the coordinator has more operations in flight than it may have.
    """

    class Watched(Scheduler):
        __slots__ = ()

        def accept(self, node: ScheduledNode[Any], queue: Any, operation: StreamOperation[Any]) -> None:
            before_accept(node, operation, self.in_flight > self.max_in_flight)
            super().accept(node, queue, operation)

    coordinator._scheduler.__class__ = Watched
