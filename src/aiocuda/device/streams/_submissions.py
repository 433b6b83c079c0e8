"""Submissions: the functions of other libraries that a stream runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._base._checks import is_coroutine_function, is_function, is_plain
from ..._base._user_code import function_name
from ..._core import Ring, StreamOperation
from ...completion._host_queue import Every, Gate
from ...completion._submission import Submission
from ...errors import InvalidTypeError
from ...memory._buffer import DeviceBuffer, block_of
from ._memory_access import MemoryAccess

__all__ = ["Submissions", "check_submittable"]


def check_submittable(function: object) -> None:
    """Raise unless the argument is a plain function."""
    if is_plain(function):
        return
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

    def __init__(self, queue: Ring, access: MemoryAccess) -> None:
        self._queue = queue
        self._access = access
        self._on_host = not queue.driver.wants_image  # there the libraries compute on the host, too

    def enqueue(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = "",
        on_result: Callable[[Any], object] | None = None,
    ) -> StreamOperation[Any]:  # fmt: skip
        """Enqueue a function; see `aiocuda.Stream.submit`.

        Parameters
        ----------
        name
            The function's name in log events and errors, if it is not its own.
        on_result
            Called with the result when the device has finished, unless it is None. Only on a GPU.
        """
        queue = self._queue
        limit = queue.rare.submissions
        name = name or function_name(function)
        submission = Submission(queue, function, args, kwargs, name, on_result)
        gate: Gate = submission if self._on_host else limit
        things = (*args, *kwargs.values()) if kwargs else args
        blocks = [block_of(each) for each in things if isinstance(each, DeviceBuffer)] if things else []
        if blocks:
            locked = self._access.prepare_all(blocks)
            gate = gate if locked is None else Every((locked, gate))
        run = submission.finish if self._on_host else submission.run
        estimate = limit.estimates.get(name) or limit.new_estimate(name)
        operation: StreamOperation[Any] = queue.rare.enqueue_submission(run, gate, submission, estimate)
        for memory in blocks:
            memory.uses[queue] = operation
        return operation
