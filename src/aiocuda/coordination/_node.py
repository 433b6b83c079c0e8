"""Node: the awaitable handle of one coordinated operation."""

from __future__ import annotations

import contextvars
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from .._base._label import shown
from .._base._mistakes import lacks, refuses
from .._base._types import ProcessLocal
from ..errors import InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from ..completion import Operation
    from ..memory import DeviceBuffer
    from ..stream import Stream

__all__ = ["KINDS", "PRIORITIES", "RANKS", "Kind", "Node", "NodePriority", "check_priority"]

T_co = TypeVar("T_co", covariant=True)

#: The kinds of coordinated operations. Collectives have a kind here, but other libraries enqueue them.
Kind: TypeAlias = Literal[
    "kernel", "transfer", "synchronization", "reduction", "broadcast", "all-reduce", "barrier", "host"
]
KINDS: tuple[Kind, ...] = (
    "kernel", "transfer", "synchronization", "reduction", "broadcast", "all-reduce", "barrier", "host",
)  # fmt: skip

NodePriority: TypeAlias = Literal["critical", "high", "normal", "low", "cleanup"]
#: From the first to be submitted to the last.
PRIORITIES: tuple[NodePriority, ...] = ("critical", "high", "normal", "low", "cleanup")
#: The rank of each priority: its index.
RANKS: dict[str, int] = {name: rank for rank, name in enumerate(PRIORITIES)}


def check_priority(priority: object) -> int:
    """Return the rank of a priority."""
    rank = RANKS.get(priority) if isinstance(priority, str) else None
    if rank is None:
        raise InvalidArgumentError(f"priority is one of {', '.join(PRIORITIES)}, not {priority!r}")
    return rank


@lacks
@refuses("is a node, and not its result: await it first, and use its result", "__getitem__", "__array__", "__float__")
class Node(ProcessLocal, Generic[T_co]):
    """An operation of an `aiocuda.AsyncCoordinator`. ``await`` it for its result.

    The methods of the coordinator create nodes. A node is submitted to a stream when all its dependencies have been
    submitted and a place is free. The stream then waits for the dependencies on the device. A node finishes after all
    its dependencies, whether they succeeded or failed. Cancelling an await changes only that await.

    Attributes
    ----------
    id : int
        Increases with each operation of the coordinator.
    kind : str
        ``"kernel"``, ``"transfer"``, ``"synchronization"``, ``"reduction"``, ``"broadcast"``, ``"all-reduce"``,
        ``"barrier"`` or ``"host"``.
    description : str
    label : str or None
        The label that `aiocuda.label` or ``label=`` gave to the node. The operation in the stream has the same.
    stream : Stream or None
        The stream that the node was submitted to; before that, the requested stream.
    registered_at, given_at : float
        Seconds of the driver's clock; ``given_at`` is 0 until the node is submitted to a stream.
    """

    id: int
    kind: Kind
    description: str
    label: str | None
    stream: Stream | None
    registered_at: float
    given_at: float

    @property
    @abstractmethod
    def priority(self) -> NodePriority:
        """The priority. Ageing (see `AsyncCoordinator`) does not change it.

        It can be set while the node waits: the node takes its place among the waiting nodes of that priority, in the
        order of registration. Ageing counts from the registration. Setting it later raises `BusyError`.
        """

    @priority.setter
    @abstractmethod
    def priority(self, priority: NodePriority) -> None: ...

    @property
    @abstractmethod
    def operation(self) -> Operation[Any] | None:
        """The operation in the stream; None until the node is submitted, and if it never is."""

    @property
    @abstractmethod
    def dependencies(self) -> tuple[Node[Any], ...]:
        """The unfinished nodes that this one waits for, named or inferred."""

    @property
    @abstractmethod
    def buffer(self) -> DeviceBuffer:
        """The buffer that an upload fills. Other operations of the coordinator can use it immediately.

        Raises
        ------
        DeviceOutOfMemory
            The buffer could not be allocated, so the upload has failed.
        InvalidTypeError
            The node is not an upload.
        """

    @property
    @abstractmethod
    def state(self) -> str:
        """``"waiting"``, ``"open"`` (a bracket), then its operation's state; ``"skipped"`` if it has no operation."""

    @property
    @abstractmethod
    def seen_state(self) -> str:
        """The state as the loop has last seen it, without a query: for log events and ``repr``."""

    @abstractmethod
    def done(self) -> bool:
        """True if the node has finished: done, failed, skipped or abandoned. Queries the device as `Operation.done`."""

    @abstractmethod
    def _has_finished(self) -> bool:
        """Do the same as `done`, without a query."""

    @abstractmethod
    def result(self) -> T_co:
        """Return the result.

        Raises
        ------
        BusyError
            The node has not finished: await it.
        ClosedError
            The node was abandoned.
        SkippedError
            A dependency failed; ``__cause__`` is the first failure.
        Exception
            The node's own failure.
        """

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return the failure, or None. Raises `BusyError` until the node has finished."""

    def cancelled(self) -> bool:
        """Return False, as `Operation.cancelled` does. `asyncio.wait` calls it."""
        return False

    @abstractmethod
    def add_done_callback(
        self, fn: Callable[[Node[Any]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call ``fn(node)`` on the loop once the node has finished; in the next iteration if it has finished already.

        The default context is a copy of the caller's, so the callback sees the caller's context variables.
        """

    @abstractmethod
    def remove_done_callback(self, fn: Callable[[Node[Any]], object]) -> int:
        """Remove all callbacks equal to ``fn``; return their number."""

    @abstractmethod
    def abandon(self) -> bool:
        """Withdraw the node if it has not been submitted: it never runs, and nodes that need it are skipped.

        If it has been submitted, it runs and only its result is dropped. Waiters get a `ClosedError`. Returns False if
        the node had finished.
        """

    async def wait(self) -> T_co:
        """Return the result, as awaiting the node does. A coroutine, as ``TaskGroup.create_task`` needs it."""
        return await self

    @abstractmethod
    def __await__(self) -> Generator[Any, None, T_co]: ...

    @property
    def name(self) -> str:
        """The kind, id, description and label, as error messages show them."""
        description = f" {self.description!r}" if self.description else ""
        return f"{self.kind} {self.id}{description}" + ("" if self.label is None else f" {shown(self.label)}")

    def __repr__(self) -> str:
        hint = "" if self._has_finished() else "; coroutine: .wait()"  # for asyncio.create_task(node), which refuses it
        return f"<Node {self.name}: {self.seen_state}{hint}>"

    def __bool__(self) -> NoReturn:
        raise InvalidTypeError(f"{self!r} is neither true nor false: await it first, or ask it whether it is done()")
