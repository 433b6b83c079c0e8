"""lifespan: opens the devices and batchers of a service, and closes them at its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TypeVar

from ..._base._advice import advise, is_advice_wanted
from ..._base._checks import flag, is_coroutine_function, is_function
from ..._base._collections import COLLECTIONS, Collection
from ..._base._mistakes import keywords
from ..._base._types import SourceLine
from ...errors import InvalidArgumentError, InvalidTypeError
from ._fault_exit import FaultExit

__all__ = ["lifespan"]

A = TypeVar("A")
S = TypeVar("S", bound=Mapping[str, Any] | None)

_CURE = "decorate the generator function with contextlib.asynccontextmanager"


@keywords(
    "lifespan takes setup, exit_on_fault= and freeze=",
    "lifespan takes the function alone, lifespan(setup, exit_on_fault=70): the server calls setup(app)",
    exit_code="use exit_on_fault=",
)
def lifespan(
    setup: Callable[[A], AbstractAsyncContextManager[S]], *, exit_on_fault: int | None = None, freeze: bool = True
) -> Callable[[A], AbstractAsyncContextManager[S]]:
    """Return a lifespan for Starlette or FastAPI, which opens devices and batchers and closes them at the end.

    ::

        @contextlib.asynccontextmanager
        async def setup(app):
            async with aiocuda.open_device() as device:
                async with MicroBatcher(infer, max_batch_size=32, device=device) as batcher:
                    yield {"batcher": batcher}

        app = FastAPI(lifespan=lifespan(setup, exit_on_fault=70))

    On SIGTERM, uvicorn stops listening and waits for the running requests. These are completed, because the batchers
    are still open. Then uvicorn leaves ``setup``: in the example first the batcher, which completes what it has
    accepted, then the device. Set two limits: ``--timeout-graceful-shutdown`` of uvicorn, after which it cancels the
    handlers of requests, and that of the supervisor, ``terminationGracePeriodSeconds`` of Kubernetes or
    ``TimeoutStopSec`` of systemd: the first limit, plus the time of a batch, plus a reserve.

    Parameters
    ----------
    setup
        A function that takes the application and returns an async context manager. The context manager yields the
        state of the application, or None. The state is a mapping; its items are attributes of ``request.state``.
    exit_on_fault
        An exit code from 1 to 255, such as 70. After a device fault the process ends with this code, because CUDA does
        not work in it any more; a supervisor starts a new one. It ends as on SIGTERM, so all requests are answered;
        handlers that need the device get a `DeviceFault`, see `error_responses`. A worker of ``uvicorn --workers`` ends
        in the same way, and uvicorn starts another. If ``setup`` fails by a fault, the server ends with its own exit
        code. The server has to run in the main thread, and to end on SIGTERM. Code that runs after the server has ten
        seconds, threads included; then the process ends without them. None leaves the process running.
    freeze
        Collect garbage when ``setup`` has yielded, and keep all objects that exist then out of later collections, by
        `gc.freeze`, until the application ends: with PyTorch, collections stop the service for 70 to 90 ms. It does
        nothing if the program has frozen objects or disabled the collector. False warns of the first long collection.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        ``setup`` or its state has the wrong type; the exit code is not from 1 to 255.
    """
    _check_setup(setup)
    _check_exit_code(exit_on_fault)
    line = SourceLine.of_caller()
    kept_out = frozen if flag(freeze, "freeze") else partial(advised, line)

    @contextlib.asynccontextmanager
    async def run(app: A) -> AsyncIterator[S]:
        with FaultExit(exit_on_fault) if exit_on_fault is not None else contextlib.nullcontext() as fault_exit:
            async with _opened(setup, app) as state:
                if state is not None and not isinstance(state, Mapping):
                    raise InvalidTypeError(f"setup yields a mapping or None, not {type(state).__name__}")
                with kept_out():
                    if fault_exit is not None:
                        fault_exit.serve()
                    yield state

    return run


def _check_exit_code(code: int | None) -> None:
    if code is not None:
        if isinstance(code, bool) or not isinstance(code, int):
            raise InvalidTypeError(f"exit_on_fault is an integer, an exit code such as 70, not {code!r}")
        if not 1 <= code <= 255:
            raise InvalidArgumentError(
                f"exit_on_fault is an exit code from 1 to 255, not {code}", argument="exit_on_fault"
            )


def _check_setup(setup: object) -> None:
    if not is_function(setup):
        raise InvalidTypeError(f"setup is a function that takes the application, not {setup!r}")
    if hasattr(type(setup), "__aenter__"):
        raise InvalidTypeError("setup was called already: pass the function, lifespan(setup), not lifespan(setup(app))")
    if hasattr(setup, "router"):
        raise InvalidTypeError("lifespan was given the application: Starlette(lifespan=lifespan(setup)), or FastAPI(…)")
    if inspect.isasyncgenfunction(setup) or inspect.isgeneratorfunction(setup) or is_coroutine_function(setup):
        raise InvalidTypeError(f"setup is a function that returns an async context manager, and this is not: {_CURE}")


def _opened(setup: Callable[[A], AbstractAsyncContextManager[S]], app: A) -> AbstractAsyncContextManager[S]:
    """Call ``setup``, and check its result."""
    manager = setup(app)
    if not hasattr(type(manager), "__aenter__"):
        raise InvalidTypeError(f"setup returned {manager!r}, and not an async context manager: {_CURE}")
    return manager


#: With so many frozen objects, the program has frozen some. Python 3.12 starts with 375.
FROZEN_BY_PROGRAM: Final = 1000

#: Seconds of a collection that are worth a warning.
LONG: Final = 0.02


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Collect garbage, and keep all objects that are left out of collections in the block.

    It does nothing if the program has frozen objects, or has disabled the collector.
    """
    if gc.get_freeze_count() >= FROZEN_BY_PROGRAM or not gc.isenabled():
        yield
        return
    COLLECTIONS.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def advised(line: SourceLine) -> Iterator[None]:
    """Warn about the first long collection in the block, once for each line of the program."""
    if not is_advice_wanted():
        yield
        return
    loop = asyncio.get_running_loop()

    def observe(collection: Collection) -> None:
        """Called by the collector, in any thread and at any line: the loop warns."""
        if collection.seconds >= LONG and not collection.intended and observe in COLLECTIONS.observers:
            COLLECTIONS.observers.remove(observe)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_advise, line, collection)

    COLLECTIONS.observers.append(observe)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # it has removed itself
            COLLECTIONS.observers.remove(observe)


def _advise(line: SourceLine, collection: Collection) -> None:
    advise(
        "garbage collections",
        line,
        f"{collection}: meanwhile no request was served. Let lifespan() freeze the objects of the start, freeze=True, "
        "or call gc.collect() and gc.freeze() when everything is loaded",
    )
