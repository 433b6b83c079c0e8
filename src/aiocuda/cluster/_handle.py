"""ReplicaHandle: an object that every replica of a cluster has created."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from .._base._checks import check_deadline, flag
from .._base._mistakes import keywords
from .._base._types import ProcessLocal
from ..errors import InvalidArgumentError, InvalidTypeError
from ._dispatcher import Dispatcher

__all__ = ["ReplicaHandle"]


class ReplicaHandle(ProcessLocal):
    """An object that every replica of a cluster has created. `Cluster.spawn` returns it."""

    def __init__(self, dispatcher: Dispatcher, number: int, name: str) -> None:
        self._dispatcher = dispatcher
        self._number = number
        self._name = name

    @keywords("call takes deadline_s= and retry=; the arguments of the method follow its name, without keywords")
    async def call(self, method: str, *args: Any, deadline_s: float | None = None, retry: bool = False) -> Any:
        """Run a method in the replica with the least predicted work, and return its result.

        Coroutine methods of a replica run on its loop, any number at a time. Plain methods run on one thread of their
        object, one after the other. Arguments and results are pickled; the bytes of arrays are sent from the arrays'
        own memory, so they must not change before the reply has arrived. The time of the call is predicted by the mean
        of the measured times of the method.

        While no replica runs and at least one is being restarted, the call waits for it.

        Cancelling the call cancels its coroutine in the replica. A plain method goes on there if it has begun.

        Parameters
        ----------
        method
            The name of a public method.
        deadline_s
            Seconds from the call. None sets no limit. A negative deadline has passed: the method is not called.
        retry
            Send the call to another replica if its replica is lost. The method may then run several times, at most once
            in each epoch of a replica. After the third loss the call raises.

        Raises
        ------
        DeadlineError
            The deadline has passed. The method is cancelled; other calls are not affected.
        ReplicaLostError
            The replica was lost while it ran the call, or no replica is left.
        RemoteError
            The method's result or exception cannot be pickled, or the exception is no `Exception`.
        ClosedError
            The cluster is closed.
        InvalidArgumentError, InvalidTypeError
            An argument cannot be used, or cannot be pickled.
        AttributeError
            The class has no such method.
        Exception
            The exception of the method, with its traceback in the replica as a note.
        """
        if not isinstance(method, str):
            name = getattr(method, "__name__", "predict")
            raise InvalidTypeError(f"a method is given by its name, not {method!r}: use call({name!r}, …)")
        if method.startswith("_"):
            raise InvalidArgumentError(f"{method!r} is no public method: names with an underscore cannot be called")
        limit = check_deadline(deadline_s)
        return await self._dispatcher.call(self._number, self._name, method, args, limit, flag(retry, "retry"))

    def __repr__(self) -> str:
        return f"<ReplicaHandle of {self._name}>"

    if not TYPE_CHECKING:  # a type checker reports these by itself

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise InvalidTypeError(f"{self!r} is not called itself: use `await handle.call('method', …)`")

        def __getattr__(self, name: str) -> NoReturn:
            cure = (
                "" if name.startswith("_") else f": a method of the replicas runs by `await handle.call({name!r}, …)`"
            )
            raise AttributeError(f"{type(self).__name__} has no {name!r}{cure}", name=name)
