"""Await the work of numba-cuda.

Numba has no current stream: kernels and copies name theirs. So a submitted function gets Numba's object for the stream
as its first argument: ``kernel[grid, block, stream](…)``.

Numba has no work without a GPU: on other drivers these functions raise `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..completion import Operation
from ..completion import wait as wait_for
from ..stream import Stream
from ._library import Call, Library, require

require("numba_cuda", "numba-cuda", (0, 15), "numba-cuda")  # the part of Numba that succeeds its own numba.cuda

from numba import cuda  # noqa: E402 - after the check of the version

__all__ = ["submit", "wait"]

P = ParamSpec("P")
T = TypeVar("T")


def _make_stream(handle: int, index: int) -> Any:
    with cuda.gpus[index]:
        return cuda.external_stream(handle)


class _CallOnDevice(Call[Any]):
    """One call of a function, with the stream's device as the current one."""

    __slots__ = ("_index",)

    def __init__(self, function: Callable[..., Any], theirs: Any, index: int) -> None:
        super().__init__(function, theirs, index)
        self._index = index

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with cuda.gpus[self._index]:
            return super().run(*args, **kwargs)


_library = Library("Numba", _make_stream, _CallOnDevice)


def submit(
    stream: Stream, function: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> Operation[T]:
    """Call ``function(numba_stream, *args, **kwargs)``, which enqueues work of Numba; the result is what it returns.

    It is `aiocuda.Stream.submit`, with Numba's object for the stream as the first argument and the stream's device as
    the current one.

    Parameters
    ----------
    stream
        A stream of aiocuda.
    function
        A plain function. Work that it enqueues on other streams is not waited for.
    *args, **kwargs
        Its arguments. They are held until the device has finished.

    Raises
    ------
    InvalidTypeError
        ``function`` is a coroutine function, or not callable.
    UnsupportedError
        The stream's device is no GPU.
    """
    return _library.submit(stream, function, args, kwargs)


def wait(x: Any = None) -> Operation[None]:
    """Do the same as `aiocuda.wait`; without an argument, for the default stream of the current device.

    It takes the place of ``await numba_stream.async_done()``, which runs a Python host function.
    """
    return wait_for(cuda.default_stream() if x is None else x)
