"""CoordinatorStreams: the streams of a coordinator, and the choice of a stream for each node."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .._base._types import Priority, SourceLine
from ..device import Device
from ..errors import ClosedError
from ..lowlevel import DeviceResources, Queue, open_stream, owned, queue_of, resources_of
from ._scheduled_node import ScheduledNode

if TYPE_CHECKING:
    from ..stream import Stream

__all__ = ["CoordinatorStreams"]

#: The stream priority of each rank.
LEVELS: tuple[Priority, ...] = ("high", "high", "normal", "low", "low")

#: How many prerequisites are checked for a stream that the node can continue.
MOST_CHECKED = 8


class CoordinatorStreams:
    """The streams of a coordinator, by role and priority. Each is created when it is first needed.

    Attributes
    ----------
    submitted : dict
        For each queue, the nodes that were submitted and are not known to have passed, in order. The queues of the
        program's own streams are included.
    held : dict
        For each queue on which open brackets enqueue, the number of these brackets.
    """

    __slots__ = ("_closing", "_groups", "_lanes", "_most", "_resources", "held", "submitted")

    def __init__(self, device: Device, most: int) -> None:
        self._resources = resources_of(device)
        self._most = {"upload": 1, "compute": most, "download": 1}
        self._groups: dict[tuple[str, Priority], dict[Queue, Stream]] = {}
        #: The streams of collectives: for kernels and for copies, of each device.
        self._lanes: dict[tuple[DeviceResources, str, Priority], Stream] = {}
        self.submitted: dict[Queue, deque[ScheduledNode[Any]]] = {}
        self.held: dict[Queue, int] = {}
        self._closing = False

    def refuse(self) -> None:
        """Refuse new work in all streams, except the work of open brackets. Idempotent."""
        if not self._closing:
            self._closing = True
            for group in self._groups.values():
                for queue in group:
                    if queue not in self.held:
                        self._resources.streams.refuse_but_accepted(queue)

    @staticmethod
    def closed() -> ClosedError:
        """Return the error of a coordinator that is closing or closed."""
        return ClosedError(
            "this coordinator has been closed, by itself or with its device: make another one by "
            "aiocuda.AsyncCoordinator(device)"
        )

    def hold(self, queue: Queue) -> None:
        """Note that a bracket opens: its task enqueues on this queue."""
        self.held[queue] = self.held.get(queue, 0) + 1
        if self._closing and not self._resources.closing:
            self._resources.streams.let_in(queue)

    def let_go(self, queue: Queue) -> None:
        """Note that the bracket has ended."""
        self.held[queue] -= 1
        if not self.held[queue]:
            del self.held[queue]
            if self._closing and self.owns(queue):
                self._resources.streams.refuse_but_accepted(queue)

    def first(self, role: str) -> Stream:
        """Return the first stream of normal priority of a role."""
        group = self._group(role, "normal")
        if self._closing and not group:
            raise self.closed()
        return next(iter(group.values())) if group else self._create(group, role, "normal")

    def all(self) -> list[Stream]:
        """Return all streams that were created."""
        return [stream for group in self._groups.values() for stream in group.values()]

    def everywhere(self) -> list[tuple[DeviceResources, Stream]]:
        """Return all streams that were created, with their devices: those of collectives, too."""
        found = [(self._resources, stream) for group in self._groups.values() for stream in group.values()]
        return found + [(resources, stream) for (resources, _, _), stream in self._lanes.items()]

    def queues(self) -> list[Queue]:
        """Return the queues of all streams that were created."""
        return [queue for group in self._groups.values() for queue in group] + [*map(queue_of, self._lanes.values())]

    def of_device(self, resources: DeviceResources, role: str, rank: int) -> Stream:
        """Return the stream of collectives on a device, for one role: ``"compute"`` or ``"copy"``.

        Only collectives enqueue on it, and none of them is accepted after `refuse`, so that does not concern it. Their
        nodes deliver its failures. While the coordinator's device closes, `let_in` opens it for those accepted before.
        """
        level = LEVELS[rank]
        stream = self._lanes.get((resources, role, level))
        if stream is None:
            # Without those of devices that were closed since.
            self._lanes = {key: lane for key, lane in self._lanes.items() if not (lane.closed and key[0].closed)}
            name = f"collective-{role}-{level}"
            loop_state = resources.loop_state(while_closing=resources is self._resources)
            opened = open_stream(resources, loop_state, level, name, str(SourceLine.of_caller()), base=self._resources)
            stream = self._lanes[resources, role, level] = owned(opened)
        return stream

    def let_in(self, resources: DeviceResources, queue: Queue) -> bool:
        """Open a stream that the coordinator's closing device has closed. Return whether it was closed."""
        return resources is self._resources and self._resources.streams.let_in(queue)

    def known(self, resources: DeviceResources, role: str, rank: int) -> Stream | None:
        """Return a stream that `of_device` has returned, if there is one."""
        return self._lanes.get((resources, role, LEVELS[rank]))

    def owns(self, queue: Queue) -> bool:
        """True if the queue belongs to the coordinator, so that only the coordinator enqueues on it."""
        return any(queue in group for group in self._groups.values())

    def choose(self, node: ScheduledNode[Any]) -> Stream:
        """Return the stream of a prerequisite that is the newest node there; else an idle or the least loaded one."""
        level = LEVELS[node.rank]
        group = self._groups.get((node.role, level))
        if group is None:
            group = self._group(node.role, level)
        submitted, held = self.submitted, self.held
        most = self._most[node.role]
        if most == 1 and group and not held:
            return next(iter(group.values()))
        checked = 0
        for other in node.prerequisites:
            operation = other.operation
            if operation is not None:
                queue: Queue = operation.queue
                if (
                    queue in group
                    and queue not in held
                    and not queue.on_host
                    and (nodes := submitted.get(queue))
                    and nodes[-1] is other
                ):
                    return group[queue]
            checked += 1
            if checked == MOST_CHECKED:
                break
        best: Stream | None = None
        least = 0
        for queue, stream in group.items():
            if queue in held:
                continue
            load = len(submitted.get(queue, ())) + (MOST_CHECKED if queue.on_host else 0)
            if not load:
                return stream
            if best is None or load < least:
                best, least = stream, load
        if best is None or len(group) < most:
            return self._create(group, node.role, level)
        return best

    def _group(self, role: str, level: Priority) -> dict[Queue, Stream]:
        group = self._groups.get((role, level))
        if group is None:
            group = self._groups[role, level] = {}
        return group

    def _create(self, group: dict[Queue, Stream], role: str, level: Priority) -> Stream:
        loop_state = self._resources.loop_state(while_closing=True)
        stream = open_stream(
            self._resources, loop_state, level, f"{role}-{level}-{len(group)}", str(SourceLine.of_caller())
        )
        if self._closing:
            self._resources.streams.refuse_but_accepted(queue_of(stream))
        group[queue_of(stream)] = owned(stream, closed_by="its coordinator")
        return stream
