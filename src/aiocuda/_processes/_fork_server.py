"""ProgramServer: a fork server that has imported the packages of the program. ForkedProcess: a process of it."""

from __future__ import annotations

import functools
import io
import operator
import os
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing import context, forkserver, popen_forkserver, process, reduction, spawn, util
from types import SimpleNamespace
from typing import Any

from . import _imports
from ._imports import ENVIRONMENT, Order, Source, order_name
from ._main_guard import imported_main

__all__ = ["ForkedProcess", "ProgramServer", "order_of", "server_of"]

#: Servers of one process. Further orders have a server without packages, so that programs that make new modules do not
#: fill the memory.
MOST_SERVERS = 4

#: Seconds between the requests for a process to a server that has ended: its first process ends a little later.
PAUSES = (0.01, 0.1, 0.5)


def order_of(modules: Iterable[str], objects: Iterable[object]) -> Order:
    """Return the order for the packages that the main module names, and the modules of these objects.

    Parameters
    ----------
    modules
        Further modules to import.
    objects
        Functions, classes, or instances of classes.
    """
    sources = {}
    for module in (imported_main(), *(sys.modules.get(_module_of(each)) for each in objects)):
        spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        if module is not None and file is not None:
            name = module.__name__ if spec is None else spec.name
            sources[name] = Source(name, module.__package__ or "", os.path.abspath(file))
    began_in = getattr(process, "ORIGINAL_DIR", None) or ""  # as `multiprocessing` does it
    path = tuple(each or began_in for each in sys.path if isinstance(each, str))
    return Order(path, tuple(modules), tuple(sources.values()))


def _module_of(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing if hasattr(thing, "__qualname__") else type(thing), "__module__", ""))


class ProgramServer:
    """A fork server of this library's own: the list of packages of the program's is not changed.

    It starts when it is made, on a thread. It ends when this process and all its processes have ended.

    Attributes
    ----------
    ready : threading.Event
        Is set when the server has imported the packages. Until then, the start of a process blocks.
    """

    def __init__(self, order: Order) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([_imports.__name__, order_name(order)])
        self.ready = threading.Event()
        threading.Thread(target=self._start, name="aiocuda-fork-server", daemon=True).start()

    def fork(self, fds: list[int]) -> tuple[int, int, int]:
        """Fork a process. **May block**, until the imports have ended.

        Return its id, the descriptor of its exit code, and that for its data. A server that was killed is started
        again.
        """
        for pause in (*PAUSES, None):
            try:
                status, data = self._server.connect_to_new_process(fds)
                try:
                    return forkserver.read_signed(status), status, data
                except BaseException:
                    _close(status, data)
                    raise
            except (EOFError, ConnectionError):
                if pause is None:
                    raise
                time.sleep(pause)  # noqa: TID251 - the parent of the server sees its end
        raise AssertionError

    def _start(self) -> None:
        """Start the server, and fork a process that ends at once: it begins when the imports have ended."""
        try:
            _, status, data = self.fork([])
            self.ready.set()
            with open(status, "rb", 0), open(data, "wb", 0) as file:
                # The preparation data, and a process whose exit code is 0, of the standard library only.
                file.write(reduction.ForkingPickler.dumps({}))
                file.write(reduction.ForkingPickler.dumps(SimpleNamespace(_bootstrap=operator.not_)))
                forkserver.read_signed(status)
        except (OSError, EOFError):
            pass  # the start of a process has the same error
        finally:
            self.ready.set()

    def forget(self) -> None:
        """This process is a fork: the server is that of the parent, and ends with it."""
        fd = getattr(self._server, "_forkserver_alive_fd", None)
        if fd is not None:
            os.close(fd)


_servers: dict[Order, ProgramServer] = {}
_lock = threading.Lock()


def server_of(order: Order) -> ProgramServer:
    """Return the server for an order: the same one for equal orders. Starts it, if there is none, without a wait."""
    with _lock:
        if order not in _servers and len(_servers) >= MOST_SERVERS:
            order = Order((), (), ())
        if order not in _servers:
            _servers[order] = ProgramServer(order)
        return _servers[order]


def _forget_servers() -> None:
    global _lock
    _lock = threading.Lock()
    for each in _servers.values():
        each.forget()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_servers)


class ForkedProcess(process.BaseProcess):
    """A process that a server forks. It has the arguments, the environment and the main module of a spawned one."""

    _start_method = "forkserver"

    def __init__(self, server: ProgramServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server

    def _Popen(self, process: process.BaseProcess) -> Any:  # noqa: N802 - the name in `multiprocessing`
        if sys.platform == "win32":
            raise NotImplementedError  # no server is made there
        return _Popen(process, self._server)

    def __reduce__(self) -> Any:
        """In its own process, this object is one of the standard library."""
        if sys.platform == "win32":
            raise NotImplementedError  # no server is made there
        state = {name: value for name, value in vars(self).items() if name != "_server"}
        return object.__new__, (context.ForkServerProcess,), state


if sys.platform == "win32":
    _Popen: Any = None  # no server is made there
else:

    class _Popen(popen_forkserver.Popen):
        """The start of a process by another server than that of `multiprocessing`, with the environment of now."""

        def __init__(self, process: process.BaseProcess, server: ProgramServer) -> None:
            self._server = server
            self._fds: list[int]
            super().__init__(process)

        def _launch(self, process: process.BaseProcess) -> None:
            data = {**spawn.get_preparation_data(process.name), ENVIRONMENT: dict(os.environ)}
            buffer = io.BytesIO()
            context.set_spawning_popen(self)
            try:
                reduction.dump(data, buffer)
                reduction.dump(process, buffer)
            finally:
                context.set_spawning_popen(None)
            self.pid, self.sentinel, write = self._server.fork(self._fds)
            # The process watches the other end: it is closed when this process has ended, or has closed this object.
            self.finalizer = util.Finalize(self, _close, (os.dup(write), self.sentinel))
            with open(write, "wb") as file:
                file.write(buffer.getbuffer())


def _close(*fds: int) -> None:
    for each in fds:
        os.close(each)
