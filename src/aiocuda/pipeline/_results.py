"""PipelineRun: the results of one run, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from types import AsyncGeneratorType
from typing import Any, NoReturn, cast

from .._types import ProcessLocal
from ..errors import ClosedError, InvalidTypeError

__all__ = ["PipelineRun"]


class PipelineRun(ProcessLocal, AsyncIterator[Any]):
    """The results of one run of a pipeline, in the order of its source. Made by `Pipeline.run`.

    The run begins when the first result is asked for::

        async with contextlib.aclosing(pipeline.run(source)) as results:
            async for result in results:
                ...

    A loop that was left by `break` may be continued by another loop over the same run, until the pipeline begins
    another run, which closes this one.
    """

    __slots__ = ("__weakref__", "_closing", "_has_looped", "_loops", "_results")

    def __init__(self, results: AsyncGenerator[Any, None]) -> None:
        self._results = cast("AsyncGeneratorType[Any, None]", results)
        #: The iterators of `async for` loops over it. A loop that ends or is left drops its own.
        self._loops: weakref.WeakSet[_Loop] = weakref.WeakSet()
        self._has_looped = False
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:  # noqa: PYI034 - each loop has an iterator of its own
        """Return an iterator for one loop. When the loop is left, Python drops it, and the run knows."""
        loop = _Loop(self)
        self._loops.add(loop)
        self._has_looped = True
        return loop

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        """Return the next result.

        Raises
        ------
        ClosedError
            A later run of the pipeline, or the pipeline's `aclose`, has closed this run, whose loop had been left.
        """
        self._has_looped = False  # the program holds the run, and goes on without a loop
        return self._next()

    def _next(self) -> Coroutine[Any, Any, Any]:
        if self._closing is not None:
            raise ClosedError(
                "this run was left by `break`, and its pipeline has closed it since, for another run or at its own end"
            )
        return self._results.__anext__()

    async def aclose(self) -> None:
        """End the run. What is under way has `Device.drain_timeout` seconds to end. Idempotent."""
        if self._closing is None:
            await self._results.aclose()
        else:
            await asyncio.wait({self._closing})

    def _close_if_left(self) -> bool:
        """Begin to close the run if its last loop was left. Return True if the run is being closed.

        Its pipeline calls this. The end of the run reports what fails; the task has no result.
        """
        if self._closing is None and self._has_looped and not self._loops and not self._results.ag_running:
            self._closing = asyncio.get_running_loop().create_task(_close(self._results), name="aiocuda-pipeline-left")
        return self._closing is not None

    def __await__(self) -> NoReturn:
        raise InvalidTypeError(
            "a pipeline's run is iterated and not awaited: `async for result in pipeline.run(source)`; "
            "for one item, `await pipeline.execute_iteration(item)`"
        )

    def __iter__(self) -> NoReturn:
        raise InvalidTypeError(
            "a pipeline's run is iterated asynchronously: `async for result in pipeline.run(source)`, or "
            "`[result async for result in pipeline.run(source)]`"
        )


class _Loop(AsyncIterator[Any]):
    """The iterator of one `async for` loop over a run."""

    __slots__ = ("__weakref__", "_run")

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self._run._next()


async def _close(results: AsyncGenerator[Any, None]) -> None:
    await results.aclose()
