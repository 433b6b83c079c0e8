"""Dispatcher: sends the calls of a cluster to its replicas."""

from __future__ import annotations

import asyncio
from typing import Any

from .._base._scope import Scope
from .._processes._failures import text_of
from ..errors import DeadlineError, InvalidTypeError, ReplicaLostError
from ._messages import Pickler, pack
from ._replicas import Replicas

__all__ = ["Dispatcher"]

#: A call whose replicas are lost so often is not sent to another one: it may be the reason.
MOST_LOSSES = 3


class Dispatcher:
    """Sends the calls of a cluster to its replicas. It belongs to one event loop.

    Parameters
    ----------
    replicas
    dumps
        Pickles arguments: that of the engine.
    scope
        That of the cluster.
    """

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

        Parameters
        ----------
        number, name
            Of the object, and of its class.
        method, args
        limit
            Seconds from now, or None. Negative if the deadline has passed.
        retry
            Send the call to another replica if its replica is lost.
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
