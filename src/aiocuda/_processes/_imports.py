"""What a fork server does before its first fork: it imports the packages that modules of the program name.

The server imports this module by its name, and then a name that `order_name` returns. That name is an order: no module
has it, and the search for it runs the order. This module needs only the standard library.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import random
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = ["ENVIRONMENT", "Order", "Source", "order_name"]

#: In the preparation data of a process: the environment of its parent, which the server has not seen.
ENVIRONMENT: Final = "aiocuda_environment"

#: An order is a name that begins with this. It has no dot, so no package is looked for.
_PREFIX: Final = "aiocuda-imports-"

#: Imports that take so many seconds are not repeated when a later one must be undone. A fork takes some milliseconds.
SLOW = 0.3

#: Seconds for the threads of a package to end at a fork.
_THREADS_END = 0.3

#: These files may be open in several processes.
_HARMLESS: Final = ("/dev/null", "/dev/random", "/dev/urandom")

#: Modules below these folders are not the program's own.
_INSTALLED: Final = tuple(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib"))

#: Packages whose generators each process seeds, wherever they are installed.
_SEEDED: Final = ("numpy", "torch")

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of sys/prctl.h

#: A module, and the names that are imported from it; they may be modules, too.
_Import: TypeAlias = tuple[str, tuple[str, ...]]


class Source(NamedTuple):
    """A module of the program, whose import statements are read. It is not imported itself."""

    name: str
    package: str  #: for relative imports
    file: str


class Order(NamedTuple):
    """What a server imports: these modules, and those that the sources name, found along this path, if it has parts."""

    path: tuple[str, ...]
    modules: tuple[str, ...]
    sources: tuple[Source, ...]


def order_name(order: Order) -> str:
    """Return the name whose import in a server runs the order."""
    return _PREFIX + base64.urlsafe_b64encode(json.dumps(order).encode()).decode()


class _OrderFinder:
    """A finder that finds nothing: it runs an order, if it is asked for one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith(_PREFIX):
            along, modules, sources = json.loads(base64.urlsafe_b64decode(name.removeprefix(_PREFIX)))
            _run(Order(tuple(along), tuple(modules), tuple(Source(*each) for each in sources)))


def _run(order: Order) -> None:
    """Import the packages in a child of this process, which returns. This process waits for the end of the child."""
    if sys.platform == "win32":
        raise NotImplementedError  # no server is made there
    spawn.prepare = _with_environment(spawn.prepare)
    sys.path[:] = order.path or sys.path
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _Imports(_imports_of(order)).run()
    os.register_at_fork(after_in_child=_seed(os.getpid()))
    signal.signal(signal.SIGINT, interrupt)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # else each process would write it


class _Imports:
    """The imports of a server. One that leaves what must not be forked, or ends the process, is undone by a fork.

    A process forks, and its child imports. If the child ends, the process forks again, and the next child leaves that
    import out. After slow imports the child does the same for the rest, so that no slow import is repeated.
    """

    def __init__(self, imports: Sequence[_Import]) -> None:
        self._imports = imports
        shared = memoryview(mmap.mmap(-1, 16)).cast("q")
        self._at = shared[:1]  # the number of the import that has begun
        self._server = shared[1:]  # the process that has done them all
        self._first = os.getpid()
        self._watch = _Watch()

    def run(self, start: int = 0, left_out: frozenset[int] = frozenset()) -> None:
        """Return in the process that has imported all, from one number on. This process ends with it."""
        if sys.platform == "win32":
            raise NotImplementedError  # no server is made there
        while child := os.fork():
            self._wait(child)
            if self._at[0] in left_out:
                os._exit(1)  # no import is the reason
            left_out |= {self._at[0]}
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        began = time.monotonic()
        for number in range(start, len(self._imports)):
            self._at[0] = number
            if number not in left_out:
                _import(*self._imports[number])
                if self._watch.must_not_be_forked():
                    os._exit(1)
                if time.monotonic() - began > SLOW:
                    self.run(number + 1, left_out)
                    return
        _prctl(_PR_SET_PDEATHSIG, 0)
        self._server[0] = os.getpid()

    def _wait(self, child: int) -> None:
        """Return if the child has ended before all is imported. If the parent ends, both end."""
        if sys.platform == "win32":
            raise NotImplementedError  # no server is made there
        parent = os.getppid()
        while not self._server[0]:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(0.02)  # noqa: TID251 - the end of either process is waited for
        # The first process is the one that the program has started. The server becomes its child when the others end.
        while os.getpid() == self._first and os.wait()[0] != self._server[0]:
            pass
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _with_environment(prepare: Any) -> Any:
    """Return the function that prepares a process, with the environment that its parent has now."""

    def prepare_with_environment(data: dict[str, Any]) -> None:
        if ENVIRONMENT in data:
            os.environ.clear()
            os.environ.update(data[ENVIRONMENT])
        importlib.invalidate_caches()  # files may be newer than the server
        prepare(data)

    return prepare_with_environment


def _seed(server: int) -> Callable[[], None]:
    """Return a function that gives each process of a server its own random numbers. `random` does it by itself."""

    def seed() -> None:
        if os.getppid() == server:
            if numpy := sys.modules.get("numpy.random"):
                numpy.seed()
            if torch := sys.modules.get("torch"):
                torch.default_generator.seed()  # that of a GPU is made, and seeded, in each process

    return seed


# -- the imports -----------------------------------------------------------------------------------------------------


def _imports_of(order: Order) -> list[_Import]:
    """Return what to import, each once, in the order of the statements."""
    found: dict[_Import, None] = {(name, ()): None for name in order.modules}
    own = {source.name for source in order.sources}
    for source in order.sources:
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            body = ast.parse(Path(source.file).read_bytes()).body
            found.update({each: None for each in _statements(body, source.package) if each[0] not in own})
    return list(found)


def _statements(body: Sequence[ast.stmt], package: str) -> Iterator[_Import]:
    """Yield what the import statements at the top of a module import."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError, ValueError):
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield name, tuple(alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, (ast.Try, ast.With)):
            yield from _statements(node.body, package)


def _import(name: str, names: Sequence[str]) -> None:
    """Import a module and modules of it, as the statement would. A process reports what fails here."""
    with contextlib.suppress(BaseException):
        module = importlib.import_module(name)
        for each in names:
            if not hasattr(module, each):
                importlib.import_module(f"{name}.{each}")


# -- what must not be forked -----------------------------------------------------------------------------------------


class _Watch:
    """What imports have left in this process that a fork would not copy, or that two processes must not share."""

    def __init__(self) -> None:
        self._files = _open_files()
        self._threads = _threads()
        self._modules = set(sys.modules)

    def must_not_be_forked(self) -> bool:
        """True after an import that has left a thread, an open file, or random numbers of the program.

        CUDA leaves open files of the GPU.
        """
        modules = [sys.modules[name] for name in sys.modules.keys() - self._modules]
        self._modules.update(sys.modules)
        return (
            not _open_files() <= self._files
            or any(map(_has_random_numbers, modules))
            or _lasting_threads() > self._threads
        )


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {each for each in found if each[1] not in _HARMLESS}


def _has_random_numbers(module: ModuleType) -> bool:
    """True if a module of the program has a generator: all processes would draw the same numbers."""
    file = getattr(module, "__file__", None)
    if not file or file.startswith(_INSTALLED) or module.__name__.partition(".")[0] in _SEEDED:
        return False
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    kinds = {random.Random}
    if numpy is not None:
        kinds |= {numpy.Generator, numpy.RandomState}
    if torch is not None:
        kinds.add(torch.Generator)
    return any(type(value) in kinds for value in tuple(vars(module).values()))


def _lasting_threads() -> int:
    """Return the number of threads that a fork does not end. OpenBLAS ends its own before each fork."""
    if sys.platform == "win32":
        raise NotImplementedError  # no server is made there
    if _threads() == 1:
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(0)
    ended, deadline = False, time.monotonic() + _THREADS_END
    while time.monotonic() < deadline and not (ended and _threads() == 1):
        ended = ended or os.waitpid(child, os.WNOHANG)[0] != 0
        time.sleep(1e-3)  # noqa: TID251 - no call waits for the end of threads
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return _threads()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


sys.meta_path.insert(0, _OrderFinder())
