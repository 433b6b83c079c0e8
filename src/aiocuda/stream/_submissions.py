"""Submissions: the functions of other libraries that a stream runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._checks import is_coroutine_function, is_function
from ..completion._prediction import Estimate
from ..completion._stream_queue import Every, Gate, StreamOperation, StreamQueue
from ..completion._submission import Submission, function_name
from ..errors import InvalidTypeError
from ..memory._buffer import DeviceBuffer, block_of
from ._memory_access import MemoryAccess

__all__ = ["Submissions", "check_submittable"]


def check_submittable(function: object) -> None:
    """Raise unless the argument is a plain function."""
    if is_coroutine_function(function):
        raise InvalidTypeError(
            f"submit takes a plain function that enqueues, and {function!r} is a coroutine function: submit the parts "
            "between its awaits"
        )
    if not is_function(function):
        raise InvalidTypeError(f"submit takes a function that enqueues work, not {function!r}")


class Submissions:
    """Enqueues functions that enqueue work of other libraries on one stream."""

    __slots__ = ("_access", "_on_host", "_queue")

    def __init__(self, queue: StreamQueue, access: MemoryAccess) -> None:
        self._queue = queue
        self._access = access
        self._on_host = not queue.driver.wants_image  # there the libraries compute on the host, too

    def enqueue(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StreamOperation[Any]:
        """Enqueue a function; see `aiocuda.Stream.submit`."""
        queue = self._queue
        queue.check()
        blocks = [block_of(each) for each in (*args, *kwargs.values()) if isinstance(each, DeviceBuffer)]
        locked = self._access.prepare_all(blocks)
        submission = Submission(queue, queue.submissions, function, args, kwargs)
        gate: Gate = submission if self._on_host else queue.submissions
        gate = gate if locked is None else Every((locked, gate))
        run = submission.finish if self._on_host else submission.run
        operation = queue.enqueue_submission(run, gate, submission, Estimate(function_name(function)))
        for memory in blocks:
            memory.uses[queue] = operation
        return operation
