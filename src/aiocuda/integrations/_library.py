"""Library: the functions that the integrations of all libraries have in common, and the import of a library."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

from .._base._user_code import function_name
from ..completion import Operation
from ..errors import InvalidTypeError
from ..lowlevel import ForeignStreams, check_submittable, submit_call
from ..stream import Stream

__all__ = ["Call", "Library", "leaves", "require"]

S = TypeVar("S")
T = TypeVar("T")


def require(module: str, library: str, at_least: tuple[int, int], package: str) -> ModuleType:
    """Import a module and return it.

    Parameters
    ----------
    module
        Its name, ``"torch"`` or ``"numba.cuda"``.
    library
        The library's name in errors.
    at_least
        The oldest version that works.
    package
        The package that has the module, as pip names it.

    Raises
    ------
    ImportError
        The module is not installed, or too old. An error of the module's own import is raised as it is.
    """
    oldest = ".".join(map(str, at_least))
    needs = f"this integration needs {library} {oldest} or newer"
    cure = f"pip install '{package}>={oldest}'"
    if not _is_installed(module):
        raise ImportError(f"{needs}, and {module} is not installed: {cure}", name=module)
    found = importlib.import_module(module)
    version = str(getattr(found, "__version__", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < at_least:
        raise ImportError(f"{needs}, and {version} is installed: {cure.replace('install', 'install --upgrade')}")
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


class Call(Generic[S]):
    """One call of a submitted function. `Library.submit` makes it, in the state that the caller has in its thread.

    Parameters
    ----------
    function
    theirs
        The library's object for the stream.
    index
        Of the device.
    """

    __slots__ = ("_function", "_theirs")

    #: Called with the result when the device has finished, unless it is None.
    on_result: Callable[[Any], object] | None = None

    def __init__(self, function: Callable[..., Any], theirs: S, index: int) -> None:
        self._function = function
        self._theirs = theirs

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with the library's object for the stream as its first argument; return its result."""
        return self._function(self._theirs, *args, **kwargs)


class Library(Generic[S]):
    """One library with its objects for our streams: submits functions, and launches graphs.

    Parameters
    ----------
    name
        The library's name in errors.
    make_stream
        Makes the library's object for a stream, of CUDA's handle and the device's index.
    call
        The class of the calls of submitted functions.
    host_call
        The same for streams whose device is no GPU, if the library then computes on the host.
    """

    def __init__(
        self, name: str, make_stream: Callable[[int, int], S], call: type[Call[S]],
        host_call: type[Call[None]] | None = None,
    ) -> None:  # fmt: skip
        self.streams = ForeignStreams(name, make_stream)
        self._call = call
        self._host_call = host_call
        self._stream_of: Callable[[Stream], S | None] = self.streams.if_on_gpu if host_call else self.streams.of

    def submit(
        self, stream: Stream, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any],
        name: str = "",
    ) -> Operation[T]:  # fmt: skip
        """Submit a function that enqueues work of the library. A function that was checked comes with its ``name``."""
        if not name:
            check_submittable(function)
            name = function_name(function)
        theirs = self._stream_of(stream)
        made: Any = self._host_call if theirs is None else self._call
        call = made(function, theirs, stream.device.index)
        return submit_call(stream, call.run, name, call.on_result, args, kwargs)

    def replay(self, stream: Stream, graph: Any, kind: type, kind_name: str, method: str = "launch") -> Operation[None]:
        """Launch a graph of the library, which has this type and this method."""
        if not isinstance(graph, kind):
            raise InvalidTypeError(f"replay takes a {kind_name}, not {graph!r}")
        self.streams.of(stream)  # raises if the stream's device is no GPU
        return self.submit(stream, getattr(graph, method), (), {})


def leaves(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of one type in nested mappings, lists, tuples, sets and dataclasses, in any order.

    An object is visited once, so that containers may contain themselves.
    """
    seen: set[int] = set()
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, kind):
            yield value
            continue
        if isinstance(value, Mapping):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            found.extend(parts)
