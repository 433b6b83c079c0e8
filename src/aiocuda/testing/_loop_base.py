"""The base of `SimulatedLoop`: tasks, asynchronous generators, error reports, and the methods that it refuses."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

__all__ = ["LoopBase", "Task"]

_T = TypeVar("_T")

logger: Final = logging.getLogger("asyncio")


class Task(asyncio.Task[_T]):
    """A task with its number as its hash, so that the order of a set of tasks is the same in every process.

    `asyncio.TaskGroup`, `asyncio.Runner` and anyio's cancel scopes cancel their tasks in the order of a set. The order
    of a set of asyncio's own tasks depends on their addresses.
    """

    def __init__(self, coro: Coroutine[Any, Any, _T], *, order: int, **options: Any) -> None:
        self.order = order
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.order


class _Refused:
    """A method that this loop does not support: a call raises `NotImplementedError`."""

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: {self._cure}")


_NO_DESCRIPTORS: Final = (
    "a simulated loop watches no descriptors; use the simulated driver, whose port has none, or asyncio's own loop"
)
_NO_NETWORK: Final = "a simulated loop has no network; use an asyncio.Queue in place of the connection"
_NO_PROCESSES: Final = "no other process runs in virtual time; use a coroutine in its place"
_NO_SIGNALS: Final = "signals arrive in real time; use signal.signal, whose handler may call call_soon_threadsafe"
_NO_THREADS: Final = "a simulated loop has no threads; asyncio.to_thread calls its function in a turn of the loop"


class LoopBase(asyncio.AbstractEventLoop):
    """An event loop that behaves like asyncio's, without descriptors, network, processes, signals and threads."""

    add_reader: Any = _Refused(_NO_DESCRIPTORS)
    remove_reader: Any = _Refused(_NO_DESCRIPTORS)
    add_writer: Any = _Refused(_NO_DESCRIPTORS)
    remove_writer: Any = _Refused(_NO_DESCRIPTORS)
    sock_recv: Any = _Refused(_NO_NETWORK)
    sock_recv_into: Any = _Refused(_NO_NETWORK)
    sock_recvfrom: Any = _Refused(_NO_NETWORK)
    sock_recvfrom_into: Any = _Refused(_NO_NETWORK)
    sock_sendall: Any = _Refused(_NO_NETWORK)
    sock_sendto: Any = _Refused(_NO_NETWORK)
    sock_connect: Any = _Refused(_NO_NETWORK)
    sock_accept: Any = _Refused(_NO_NETWORK)
    sock_sendfile: Any = _Refused(_NO_NETWORK)
    sendfile: Any = _Refused(_NO_NETWORK)
    start_tls: Any = _Refused(_NO_NETWORK)
    create_connection: Any = _Refused(_NO_NETWORK)
    create_server: Any = _Refused(_NO_NETWORK)
    create_unix_connection: Any = _Refused(_NO_NETWORK)
    create_unix_server: Any = _Refused(_NO_NETWORK)
    create_datagram_endpoint: Any = _Refused(_NO_NETWORK)
    connect_accepted_socket: Any = _Refused(_NO_NETWORK)
    getaddrinfo: Any = _Refused(_NO_NETWORK)
    getnameinfo: Any = _Refused(_NO_NETWORK)
    connect_read_pipe: Any = _Refused(_NO_PROCESSES)
    connect_write_pipe: Any = _Refused(_NO_PROCESSES)
    subprocess_shell: Any = _Refused(_NO_PROCESSES)
    subprocess_exec: Any = _Refused(_NO_PROCESSES)
    add_signal_handler: Any = _Refused(_NO_SIGNALS)
    remove_signal_handler: Any = _Refused(_NO_SIGNALS)
    set_default_executor: Any = _Refused(_NO_THREADS)

    def __init__(self) -> None:
        self._tasks_made = itertools.count(1)
        self._asyncgens: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], None] = weakref.WeakKeyDictionary()
        self._asyncgens_shut = False
        self._task_factory: Callable[..., Any] | None = None
        self._exception_handler: Callable[..., object] | None = None
        self._current: asyncio.Handle | None = None  # in debug mode
        self._debug = sys.flags.dev_mode or (
            not sys.flags.ignore_environment and bool(os.environ.get("PYTHONASYNCIODEBUG"))
        )
        self._running = self._closed = False
        self._thread = threading.get_ident()

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    # -- futures, tasks, asynchronous generators -----------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> Any:
        """Schedule a coroutine. The loop numbers tasks without a name: asyncio's count is that of the whole process."""
        self._check_closed()
        order = next(self._tasks_made)
        name = options.pop("name", None)
        name = f"Task-{order}" if name is None else name
        if self._task_factory is None:
            return Task(coro, order=order, loop=self, name=name, **options)
        task = self._task_factory(self, coro, **{key: value for key, value in options.items() if value is not None})
        if isinstance(task, asyncio.Task):
            task.set_name(name)
        return task

    def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
        if factory is not None and not callable(factory):
            raise TypeError("task factory must be a callable or None")
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def _begin_asyncgen(self, agen: AsyncGenerator[Any, Any]) -> None:
        if self._asyncgens_shut:
            warnings.warn(
                f"asynchronous generator {agen!r} was scheduled after loop.shutdown_asyncgens() call",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        self._asyncgens[agen] = None

    def _finalize_asyncgen(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._asyncgens.pop(agen, None)
        if not self._closed:
            self.call_soon(self.create_task, agen.aclose())

    async def shutdown_asyncgens(self) -> None:
        self._asyncgens_shut = True
        closing = list(self._asyncgens)
        self._asyncgens.clear()
        results = await asyncio.gather(*(agen.aclose() for agen in closing), return_exceptions=True)
        for result, agen in zip(results, closing, strict=True):
            if isinstance(result, Exception):
                self.call_exception_handler(
                    {
                        "message": f"an error occurred during closing of asynchronous generator {agen!r}",
                        "exception": result,
                        "asyncgen": agen,
                    }
                )

    # -- errors, debugging ---------------------------------------------------------------------------------------

    def get_exception_handler(self) -> Any:
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[..., object] | None) -> None:
        if handler is not None and not callable(handler):
            raise TypeError(f"A callable object or None is expected, got {handler!r}")
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        exception = context.get("exception")
        if self._current is not None and "source_traceback" not in context:
            context["handle_traceback"] = getattr(self._current, "_source_traceback", None)
        lines = [context.get("message") or "Unhandled exception in event loop"]
        for key in sorted(context.keys() - {"message", "exception"}):
            value = context[key]
            if key in ("source_traceback", "handle_traceback"):
                if not value:
                    continue
                made = "".join(traceback.format_list(value)).rstrip()
                value = (
                    f"{'Object' if key == 'source_traceback' else 'Handle'} created at (most recent call last):\n{made}"
                )
            else:
                value = repr(value)
            lines.append(f"{key}: {value}")
        logger.error(
            "\n".join(lines),
            exc_info=None if exception is None else (type(exception), exception, exception.__traceback__),
        )

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        try:
            if self._exception_handler is not None:
                try:
                    _in_its_context(context, self._exception_handler, self, context)
                    return
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - the default handler reports it, and the context
                    context = {
                        "message": "Unhandled error in exception handler",
                        "exception": error,
                        "context": context,
                    }
            self.default_exception_handler(context)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            logger.error("Exception in default exception handler", exc_info=error)

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled
        if self._running:
            self._track_origins()

    def _track_origins(self) -> None:
        sys.set_coroutine_origin_tracking_depth(10 if self._debug else 0)

    def _check_closed(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def _check_not_running(self) -> None:
        if self._running:
            raise RuntimeError("This event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")

    def _check_callback(self, callback: object, method: str) -> None:
        """Check the thread and the callback. Only in debug mode, as in asyncio."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{method}(): called in another thread than the loop's own")
        if inspect.iscoroutine(callback) or inspect.iscoroutinefunction(callback):
            raise TypeError(f"coroutines cannot be used with {method}()")
        if not callable(callback):
            raise TypeError(f"a callable object was expected by {method}(), got {callback!r}")


def _in_its_context(context: dict[str, Any], function: Callable[..., object], *args: object) -> None:
    """Call a function in the context of the task, future or handle that an error report is about."""
    source = next((context[key] for key in ("task", "future", "handle") if context.get(key) is not None), None)
    get_context = getattr(source, "get_context", None)  # futures have none, nor have tasks and handles before 3.12
    if get_context is None:
        function(*args)
    else:
        get_context().run(function, *args)
