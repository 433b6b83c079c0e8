"""ServedObject: an object of the program in a replica; `current_replica`: the replica in which its code runs."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .._base._checks import is_coroutine_function
from .._base._tasks import start_task
from .._base._user_code import call
from ..errors import ClosedError, InvalidTypeError

__all__ = ["CURRENT", "ReplicaInfo", "ServedObject", "current_replica"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One replica of a cluster, as its own code sees it."""

    index: int  #: from 0 to ``replicas - 1``
    replicas: int  #: the number of replicas of the cluster
    epoch: int  #: 1 in the first process of this replica, and one more in each process that takes its place


#: The replica in which a task or a thread runs.
CURRENT: contextvars.ContextVar[ReplicaInfo | None] = contextvars.ContextVar("aiocuda_replica", default=None)


def current_replica() -> ReplicaInfo | None:
    """Return the replica that the calling code runs in; None outside of a replica.

    It is known in the constructor and in all methods of a class that `Cluster.spawn` has created::

        class Trainer:
            def __init__(self):
                replica = aiocuda.cluster.current_replica()
                self.shard = (replica.index, replica.replicas)    # for DataLoader(shard=…)
    """
    return CURRENT.get()


class ServedObject:
    """An object of the program in a replica. It is created, entered and left in a task of its own.

    Coroutine methods run on the loop, any number at a time. The constructor and plain methods run on one thread of the
    object, one after the other, so that they do not block the loop.

    Parameters
    ----------
    create
        Returns the object; called on the thread.
    context
        The context variables of its methods.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, create: Callable[[], Any], context: contextvars.Context
    ) -> None:
        self._loop = loop
        self._context = context
        self._thread = ThreadPoolExecutor(1, "aiocuda-replica-object")
        self._object: Any = None
        self._failure: BaseException | None = None  # it was not created, or its context has failed
        self._left = loop.create_future()  # set by `leave`
        self._entered = asyncio.Event()
        self._task = start_task(self._live, create, context=context)

    async def _live(self, create: Callable[[], Any]) -> None:
        try:
            made = self._object = await self._on_thread(create)
            if hasattr(type(made), "__aenter__") and hasattr(type(made), "__aexit__"):
                async with made:
                    await self._wait_for_leave()
            else:
                await self._wait_for_leave()
        except BaseException as error:  # noqa: BLE001 - `created`, `run` or `leave` raises it
            self._failure = error
        finally:
            self._entered.set()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_leave(self) -> None:
        self._entered.set()
        await self._left

    async def _on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        run = functools.partial(self._context.copy().run, call, function, *arguments)
        return await self._loop.run_in_executor(self._thread, run)

    async def created(self) -> None:
        """Wait until the object is created and entered. Raise what its class has raised."""
        await self._entered.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self, method: str, arguments: tuple[Any, ...], pack: Callable[[list[Any]], T]) -> T:
        """Run a method, and return its result as packed by ``pack``, which takes it from a list.

        It is packed before the next call of a plain method begins, and before another coroutine runs: they may write to
        an array that was returned.
        """
        await self.created()
        if self._left.done():
            raise ClosedError("the object of this call has been left")
        function = self._method(method)
        if is_coroutine_function(function):
            return pack([await function(*arguments)])
        outcome = await self._on_thread(_run_plain, function, arguments, pack)
        return pack([await outcome]) if inspect.isawaitable(outcome) else outcome

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method of the object. Raise an error that lists its methods if there is none of this name."""
        kind = type(self._object)
        try:
            function = getattr(self._object, name)
        except AttributeError as error:
            if error.name != name or error.obj is not self._object:
                raise  # of a property
            methods = [each for each in dir(kind) if not each.startswith("_") and callable(getattr(kind, each, None))]
            text = f"{kind.__name__} has no method {name!r}; it has {', '.join(methods) or 'none'}"
            raise AttributeError(text, name=name) from None
        if not callable(function):
            raise InvalidTypeError(
                f"{kind.__name__}.{name} is not a method: {function!r}. A method of the class can return it"
            )
        result: Callable[..., Any] = function
        return result

    async def leave(self) -> None:
        """Leave the object, and wait until it is left. Raise what its ``__aexit__`` has raised."""
        was_entered = self._entered.is_set() and self._failure is None
        if not self._left.done():
            self._left.set_result(None)
        if not was_entered:
            self._task.cancel()  # it is being created, or was not
        await asyncio.wait({self._task})
        if was_entered and self._failure is not None:
            raise self._failure


def _run_plain(function: Callable[..., Any], arguments: tuple[Any, ...], pack: Callable[[list[Any]], T]) -> Any:
    """Call a plain method, and return its packed result, or the awaitable that it has returned."""
    values = [function(*arguments)]
    return values[0] if inspect.isawaitable(values[0]) else pack(values)
