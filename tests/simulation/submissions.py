"""Submitted functions in a random program: each is called once, in the order of its stream, in the caller's context."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda.errors import SkippedError
from tests.simulation.error_log import PlannedError

if TYPE_CHECKING:
    from aiocuda import Operation
    from tests.simulation.actions import Actions

__all__ = ["SubmissionActions"]


class SubmissionActions:
    """Actions with `Stream.submit`. Checks V1, V2, V3, V4, V9 and V13."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._called: dict[tuple[int, str], list[int]] = {}  # numbers of the calls, by device and stream
        self._numbers = 0
        self._waiting: list[tuple[Operation[int], int]] = []
        self._checker.final_checks.append(self._check_end)

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return [self.submit, self.submit, self.submit, self.fail]

    async def submit(self) -> None:
        """Submit a function that uses a buffer and an array, and perhaps await its result."""
        actions = self._actions
        target = actions.target()
        stream = actions.stream(target.device)
        array = actions.values(16)
        actions.wait_for_users(stream, (target, True))
        self._numbers += 1
        number, mine = self._numbers, actions.task()
        called = self._called.setdefault((stream.device.index, stream.name), [])
        total = int(array.sum())

        def function(buffer: Any, array: Any) -> int:
            if called and called[-1] >= number:
                self._checker.report(f"V3 function {number} was called after function {called[-1]}")
            if actions.task() != mine:
                self._checker.report(f"V13 function {number} of task {mine} has the context of task {actions.task()}")
            called.append(number)
            return int(np.asarray(array).sum())

        operation = stream.submit(function, target.buffer, array)
        self._checker.borrow(operation, weakref.ref(array))
        actions.note_write(stream, target, operation, (target.version,), lambda before: before)
        self._waiting.append((operation, total))
        del array
        if actions.below(2):
            result = await operation
            if result != total:
                self._checker.report(f"V2 {operation!r} has the result {result} instead of {total}")

    async def fail(self) -> None:
        """Submit a function that raises, in a stream of its own: the next operation is skipped, the one after runs."""
        actions = self._actions
        async with actions.device().stream() as stream:
            error = PlannedError()
            failing, behind = stream.submit(_raise, error), stream.synchronize()
            if await self._error_of(failing) is not error and not self._upset():
                self._checker.report(f"V9 {failing!r} has not failed with its error")
            if not isinstance(await self._error_of(behind), SkippedError) and not self._upset():
                self._checker.report(f"V9 {behind!r} was not skipped")
            await actions.follow(stream.synchronize())

    async def _error_of(self, operation: Operation[Any]) -> BaseException | None:
        """Return the error of an operation, once it is done. The program has then read it."""
        try:
            await operation
        except Exception as error:  # noqa: BLE001 - it is compared
            self._checker.errors.record(error)
            return error
        return None

    def _upset(self) -> bool:
        return bool(self._checker.driver.upsets.happened)

    def _check_end(self) -> Iterator[str]:
        for operation, total in self._waiting:
            if operation.state == "done" and operation.result() != total:
                yield f"V2 {operation!r} has the result {operation.result()} instead of {total}"
        for called in self._called.values():
            if len(set(called)) != len(called):
                yield f"V1 a function was called twice: {called}"


def _raise(error: Exception) -> None:
    raise error
