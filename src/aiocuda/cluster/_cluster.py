"""Cluster: replicas of the program's classes; Dispatcher: sends their calls; ReplicaHandle: one of their objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .._base._checks import check_deadline, check_timeout, flag
from .._base._log import log
from .._base._mistakes import keywords, lacks, or_none
from .._base._owner import Outcome, Owner
from .._base._scope import Scope
from .._base._shutdown import DRAIN_TIMEOUT, finish_within
from .._base._types import ProcessLocal, SourceLine
from .._processes._failures import text_of
from ..errors import CleanupWarning, DeadlineError, InvalidArgumentError, InvalidTypeError, ReplicaLostError
from ._messages import Pickler, pack
from ._replica import Program
from ._replicas import LEAVE_SECONDS, Replicas
from ._statistics import ClusterStatistics

__all__ = ["Cluster", "ReplicaHandle"]

#: Seconds that accepted calls have when the cluster is closed.
CLOSE_TIMEOUT = 30.0

#: A call whose replicas are lost so often is not sent to another one: it may be the reason.
MOST_LOSSES = 3


@lacks
class Cluster(Owner):
    """Replicas of the program's classes, each in a process of its own. `open_cluster` opens it.

    It belongs to the event loop in which it was opened. A replica that is lost is started again; see `open_cluster`.
    """

    @or_none
    def __init__(self, replicas: Replicas, dumps: Pickler, check_class: Callable[[type], None]) -> None:
        if not isinstance(replicas, Replicas):
            raise InvalidTypeError("a cluster is opened by `async with open_cluster('local', replicas=2) as cluster`")
        self._replicas = replicas
        self._check_class = check_class
        self._spawned = 0  # for the numbers of the objects
        self._scope = Scope(
            "this cluster", "open one in this loop", "open another one by open_cluster",
            drain_seconds=lambda: DRAIN_TIMEOUT, loop=asyncio.get_running_loop(),
        )  # fmt: skip
        self._scope.must_end("`async with open_cluster(…) as cluster`", SourceLine.of_caller(), lambda: False)
        self._dispatcher = Dispatcher(replicas, dumps, self._scope)

    @keywords("the arguments of the class follow it, without keywords")
    async def spawn(self, cls: type, *args: Any) -> ReplicaHandle:
        """Call ``cls(*args)`` in every replica, and return a handle for calls.

        An object whose class has ``__aenter__`` and ``__aexit__`` is entered, and left when the cluster is closed. The
        constructor runs on a thread, ``__aenter__`` on the loop of the replica. ``__enter__`` is not called: a class
        without ``__aenter__`` that has it gives a `RuntimeWarning`. A replica that is started again creates the object
        again.

        Parameters
        ----------
        cls
            A class at the top of a module. It opens its own device: ``open_device()`` opens the GPU of the replica.
        *args
            Arguments that can be pickled. Arrays among them must not change while the cluster is open: a replica that
            is started again gets them again.

        Raises
        ------
        ReplicaLostError
            Each replica was lost while it created the object: its constructor may end the process. Objects of earlier
            classes are created again, and these losses do not count towards the limit of restarts. Or all replicas have
            reached that limit.
        ClosedError
            The cluster is closed.
        InvalidTypeError, InvalidArgumentError
            The class or an argument cannot be pickled, or the program's main module cannot be imported.
        Exception
            The exception of the constructor or of ``__aenter__``, with its traceback in the replica as a note.
        """
        self._scope.check()
        if not isinstance(cls, type):
            raise InvalidTypeError(
                f"spawn takes a class and its arguments, not {cls!r}: spawn(Model, 3.0) calls Model(3.0) in replicas"
            )
        if hasattr(cls, "__aenter__") and not hasattr(cls, "__aexit__"):
            raise InvalidTypeError(
                f"{cls.__qualname__} has __aenter__ and no __aexit__: a replica enters and leaves it"
            )
        if hasattr(cls, "__enter__") and not hasattr(cls, "__aenter__"):
            SourceLine.of_caller().warn(
                f"{cls.__qualname__} has __enter__ and no __aenter__: a replica does not enter it. Give it __aenter__ "
                "and __aexit__",
                RuntimeWarning,
            )
        self._check_class(cls)
        data, buffers = self._dispatcher.pack((cls, args), f"{cls.__qualname__} and its arguments")
        self._spawned += 1
        program = Program(self._spawned, cls.__name__, data, buffers)
        await self._replicas.create(program)
        return ReplicaHandle(self._dispatcher, program.number, program.name)

    @property
    def healthy(self) -> bool:
        """True while every replica runs, or is being restarted. A replica at the limit of its restarts makes it False.

        The cluster then serves with the other replicas.
        """
        return not self._scope.closing and all(replica.state != "stopped" for replica in self._replicas)

    def statistics(self) -> ClusterStatistics:
        """Return a snapshot of the cluster and its replicas."""
        return ClusterStatistics(self._replicas.statistics(), self._replicas.waiting, self._dispatcher.retries)

    def __repr__(self) -> str:
        states = [replica.state for replica in self._replicas]
        running, calls = states.count("running"), self._dispatcher.calls
        return f"<Cluster {running} of {len(states)} replicas running, {calls} calls in flight>"

    async def aclose(self, timeout_s: float | None = CLOSE_TIMEOUT) -> None:
        """Refuse new calls, wait for the accepted ones, leave the objects, and end the processes.

        A second call waits for the first. If the first call is cancelled, the calls have five more seconds; it raises
        when the processes have ended.

        Parameters
        ----------
        timeout_s
            Seconds that accepted calls have. None for no limit. Calls that need more raise `ReplicaLostError`.
        """
        await self._scope.aclose(self, check_timeout(timeout_s, "timeout_s"))

    def _refuse(self) -> None:
        self._replicas.begin_close()

    async def _drain(self) -> None:
        await self._dispatcher.idle()

    async def _release(self, outcome: Outcome) -> None:
        """Leave the objects, and end the processes. Calls that have no outcome yet raise `ReplicaLostError`."""
        errors: list[str] = []

        async def close() -> None:
            errors.extend(await self._replicas.close())

        await finish_within(2 * LEAVE_SECONDS, close())
        log("info", "cluster_closed")
        if errors:
            self._scope.place.warn(f"a cluster was closed with errors: {'; '.join(errors)}", CleanupWarning)


class Dispatcher:
    """Sends the calls of a cluster to its replicas. It belongs to one event loop. Each `ReplicaHandle` has it."""

    def __init__(self, replicas: Replicas, dumps: Pickler, scope: Scope) -> None:
        self.calls = 0  #: that have no outcome yet
        self.retries = 0  #: calls that were sent to another replica because theirs was lost
        self._replicas = replicas
        self._dumps = dumps
        self._scope = scope
        self._idle = asyncio.Event()
        self._idle.set()

    async def call(
        self, number: int, name: str, method: str, args: tuple[Any, ...], limit: float | None, retry: bool
    ) -> Any:
        """Run a method of an object in the replica with the least predicted work, and return its result.

        The limit is in seconds from now, and negative if the deadline has passed. With ``retry``, the call is sent to
        another replica if its replica is lost.
        """
        self._scope.check()
        if limit is not None and limit < 0.0:
            raise DeadlineError(
                f"{name}.{method}() was not called: its deadline had passed {-limit:.3g} s before",
                deadline_s=limit, predicted_s=None,
            )  # fmt: skip
        data, buffers = self.pack(args, f"the arguments of {method!r}")
        self.calls += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._call(number, name, method, data, buffers, retry)
        except TimeoutError:
            if limit is None or not deadline.expired():
                raise  # of the method
            raise DeadlineError(
                f"{name}.{method}() has not returned within {limit:g} s", deadline_s=limit, predicted_s=None
            ) from None
        finally:
            self.calls -= 1
            if not self.calls:
                self._idle.set()

    async def _call(
        self, number: int, name: str, method: str, data: bytes, buffers: list[memoryview], retry: bool
    ) -> Any:
        losses = 0
        while True:
            replica = await self._replicas.choose()
            try:
                packet = await replica.call(number, method, data, buffers)
            except ReplicaLostError as error:
                losses += 1
                if not retry:
                    raise
                if losses == MOST_LOSSES:
                    error.add_note(f"{losses} replicas were lost while they ran this call: it may be the reason")
                    raise
            else:
                return replica.result_of(packet, name, method)
            self.retries += 1

    def pack(self, value: Any, what: str) -> tuple[bytes, list[memoryview]]:
        """Return a pickled value and its large buffers. `InvalidTypeError` if it cannot be pickled."""
        try:
            return pack(value, self._dumps)
        except Exception as error:
            raise InvalidTypeError(
                f"{what} cannot be pickled: {text_of(error)}. Define classes and functions at the top of a module, and "
                "open files and devices in the replica"
            ) from error

    async def idle(self) -> None:
        """Wait until all calls have their outcome."""
        await self._idle.wait()


class ReplicaHandle(ProcessLocal):
    """An object that every replica of a cluster has created. `Cluster.spawn` returns it."""

    def __init__(self, dispatcher: Dispatcher, number: int, name: str) -> None:
        self._dispatcher = dispatcher
        self._number = number
        self._name = name

    @keywords(
        "call takes deadline_s= and retry=; the arguments of the method follow its name, without keywords",
        replica="the replica with the least predicted work runs the call; spawn makes an object in each",
        **dict.fromkeys(("timeout", "timeout_s", "deadline"), "use deadline_s=, the seconds from now"),
        **dict.fromkeys(("retries", "max_retries"), "use retry=True: at most two more replicas run the call"),
    )
    async def call(self, method: str, *args: Any, deadline_s: float | None = None, retry: bool = False) -> Any:
        """Run a method in the replica with the least predicted work, and return its result.

        Coroutine methods of a replica run on its loop, any number at a time. Plain methods run on one thread of their
        object, one after the other. Arguments and results are pickled; the bytes of arrays are sent from the arrays'
        own memory, so arguments must not change before the reply has arrived. A result is pickled before the next call
        begins, and an array that the object keeps is copied then. The time of the call is predicted by the mean of the
        measured times of the method.

        While no replica runs and at least one is being restarted, the call waits for it.

        Cancelling the call cancels its coroutine in the replica. A plain method goes on there if it has begun.

        Parameters
        ----------
        method
            The name of a public method.
        deadline_s
            Seconds from the call, at most a day; None for no limit. If it is negative, the method is not called.
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
            raise InvalidArgumentError(
                f"{method!r} is no public method: names with an underscore cannot be called. Give the class a method "
                "without it, which calls this one"
            )
        if isinstance(retry, int) and retry not in (False, True):
            raise InvalidTypeError(f"retry is True or False, not {retry}: with True, at most two more replicas run it")
        limit = check_deadline(deadline_s)
        return await self._dispatcher.call(self._number, self._name, method, args, limit, flag(retry, "retry"))

    def __repr__(self) -> str:
        return f"<ReplicaHandle of {self._name}>"

    if not TYPE_CHECKING:  # a type checker reports these by itself

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise InvalidTypeError(f"{self!r} is not called itself: use `await handle.call('method', …)`")

        def __getattr__(self, name: str) -> NoReturn:
            cure = f": a method of the replicas runs by `await handle.call({name!r}, …)`"
            if name in ("map", "remote", "submit", "apply"):
                cure = ": `await handle.call('method', …)`, and several by `await asyncio.gather(*calls)`"
            elif name in ("call_all", "broadcast"):
                cure = ": each call goes to one replica; open a cluster for each where all must get it"
            elif name in ("aclose", "close", "replicas", "statistics", "stats", "healthy"):
                cure = ": the cluster has aclose(), healthy and statistics()"
            elif name.startswith("_"):
                cure = ""
            raise AttributeError(f"{type(self).__name__} has no {name!r}{cure}", name=name)
