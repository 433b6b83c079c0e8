"""A kernel: CUDA C++ source, its signature, and the NumPy twin that stands in for it without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .._checks import is_coroutine_function, is_function
from .._mistakes import keyword_only, lacks
from ..driver.protocol import CudaSource, Driver, Program
from ..errors import InvalidArgumentError, InvalidTypeError
from ._binding import converters
from ._signature import Signature
from ._source import find_kernel, read_source, refuse_includes
from ._twin import out_of_loop

__all__ = ["Kernel"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_LAUNCH = "stream.launch(kernel, grid, block, *arguments)"


@lacks(
    launch=f"{_LAUNCH} launches it",
    forall=f"{_LAUNCH} launches it: choose grid and block yourself, such as (n + 255) // 256 and 256",
)
class Kernel:
    """One kernel, for every driver. Making one reads the source and runs nothing.

    It is compiled when a device first launches it: off the event loop, once per architecture and process, and kept in
    a cache on disk. A compilation that fails is not remembered: the next launch tries again.

    Parameters
    ----------
    name
        Of the ``__global__`` function, without its namespaces. The source declares it with its parameters spelled out.
    source
        CUDA C++, at most 16 MiB. It is code, as trusted as the program that holds it.
    host
        The NumPy twin for devices without a GPU, a plain function. It gets what the kernel gets, buffers as NumPy
        views that it writes in place (``x[:] = x + 1``, not ``x = x + 1``; those of ``const`` pointers are read-only),
        and, if it declares both, the keyword arguments ``grid`` and ``block``. It returns None, or what it was given. A
        generator function yields how many seconds it does nothing for, and is sent the driver's time.
    host_seconds
        Modelled time of one launch on the host driver; None takes the time that the twin takes.
    include_dirs
        Where ``#include`` looks besides CUDA's own headers. A kernel that has some is compiled once per process: what
        the headers hold is not known, so it is not cached on disk.
    includes
        False refuses every ``#include``, and the compiler then can open no file at all.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A parameter that cannot be used; a twin that cannot be called with the kernel's arguments.
    CompileError
        The source declares no such kernel, or includes something in spite of ``includes=False``.
    UnsupportedError
        A template, or a parameter type that cannot be passed.

    Examples
    --------
    >>> double = Kernel(
    ...     "twice",
    ...     source="__global__ void twice(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }",
    ...     host=lambda x, n: x.__imul__(2),
    ... )
    >>> double
    <Kernel twice(float* x, int n)>
    """

    __slots__ = (
        "__weakref__",
        "_convert",
        "_handles",
        "_images",
        "_lock",
        "_lock_owner",
        "_source",
        "_takes_grid",
        "host",
        "host_seconds",
        "signature",
    )

    signature: Signature
    host: Callable[..., object] | None
    host_seconds: float | None

    @keyword_only(1, "a kernel has one positional argument, its name: Kernel(name, source=source, host=function)")
    def __init__(
        self,
        name: str,
        *,
        source: str | bytes,
        host: Callable[..., object] | None = None,
        host_seconds: float | None = None,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        includes: bool = True,
    ) -> None:
        _check_name(name)
        if not isinstance(includes, bool):
            raise InvalidTypeError(f"includes is True or False, not {includes!r}")
        text = read_source(source)
        directories = _directories(include_dirs)
        if not includes:
            refuse_includes(text)
        qualified, self.signature = find_kernel(text, name)
        self._takes_grid = host is not None and _takes_grid(host, self.signature)
        self.host = host
        self.host_seconds = _seconds(host_seconds)
        self._source = CudaSource(qualified, text, directories, includes)
        self._convert = converters(self.signature)
        self._lock = threading.Lock()
        self._lock_owner = os.getpid()
        # Weak, so that a host driver that was closed and dropped is not kept alive by the kernels it has run.
        self._images: weakref.WeakKeyDictionary[Driver, dict[tuple[int, int], tuple[bytes, str]]]
        self._images = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[Driver, dict[int, int]] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.signature.name

    @property
    def source(self) -> CudaSource:
        """What is compiled."""
        return self._source

    def __repr__(self) -> str:
        return f"<Kernel {self.signature}>"

    if not TYPE_CHECKING:  # a type checker reports it by itself
        _is_function = False

        def __call__(self, *arguments: object, **keywords: object) -> NoReturn:
            raise InvalidTypeError(f"{self!r} is not called: a stream launches it, {_LAUNCH}")

        def __getitem__(self, extents: object) -> NoReturn:
            raise InvalidTypeError(f"{self!r} is not indexed by grid and block: a stream launches it, {_LAUNCH}")

    def __reduce__(self) -> tuple[Callable[..., Kernel], tuple[str]]:
        # What was compiled stays behind: its handles mean nothing to another process.
        make = functools.partial(
            Kernel,
            source=self._source.text,
            host=self.host,
            host_seconds=self.host_seconds,
            include_dirs=self._source.include_dirs,
            includes=self._source.includes,
        )
        return make, (self.name,)

    # What a launch asks for, from a stream.

    def bind(self, arguments: Sequence[Any]) -> list[Any]:
        """Check a launch's arguments, and turn them into what a driver's launcher takes.

        Raises
        ------
        InvalidTypeError
            Too few, too many, or one of a wrong type: a NumPy array or a buffer of another dtype for a pointer, a float
            for an integer.
        InvalidArgumentError
            A number that its C type cannot hold.
        """
        if len(arguments) != len(self._convert):
            raise self.miscounted(arguments)
        return [convert(argument) for convert, argument in zip(self._convert, arguments)]  # noqa: B905 - just counted

    def miscounted(self, arguments: Sequence[Any]) -> InvalidTypeError:
        """What a launch raises that is given too few arguments, or too many."""
        expected, given = len(self._convert), len(arguments)
        packed = given == 1 and isinstance(arguments[0], (tuple, list))  # as CuPy's kernels take them
        return InvalidTypeError(
            f"{self.signature} takes {expected} argument{'s' * (expected != 1)}, {given} given"
            + ": name them one by one behind the block, launch(kernel, grid, block, *arguments)" * packed,
            expected=expected,
            given=given,
        )

    def writes(self, index: int) -> bool:
        """May the kernel write what this argument points to? Only ``const`` says that it does not."""
        parameter = self.signature.parameters[index]
        return parameter.is_pointer and not parameter.is_const

    # What the first launch on a device needs. All but `loaded` are blocking.

    def program(self, driver: Driver, device: int) -> Program:
        """What the driver needs to load the kernel. **May block**, to compile."""
        with self._locked():
            return self._program(driver, device)

    def load(self, driver: Driver, device: int) -> int:
        """The driver's handle for this kernel, loaded once per device. **May block.**

        Any number of threads may ask at the same time: one works, the others wait for it.
        """
        with self._locked():
            handles = self._handles.setdefault(driver, {})
            if device not in handles:
                program = self._program(driver, device)
                if program.host is not None:
                    program = dataclasses.replace(program, host=out_of_loop(program.host))
                handles[device] = driver.load(device, program)
            return handles[device]

    def loaded(self, driver: Driver, device: int) -> int | None:
        """The handle if `load` has made one. Never blocks."""
        handles = self._handles.get(driver)
        return None if handles is None else handles.get(device)

    def _locked(self) -> threading.Lock:
        # A process forked while a thread of its parent compiled has that thread's lock and not the thread.
        if self._lock_owner != os.getpid():
            self._lock, self._lock_owner = threading.Lock(), os.getpid()
        return self._lock

    def _program(self, driver: Driver, device: int) -> Program:
        image: bytes | None = None
        symbol: str | None = None
        if driver.wants_image:
            images = self._images.setdefault(driver, {})
            capability = driver.device_open(device).compute_capability
            if capability not in images:
                images[capability] = driver.compile(device, self._source)
            image, symbol = images[capability]
        parameters = enumerate(self.signature.parameters)
        read_only = frozenset(index for index, parameter in parameters if parameter.is_pointer and parameter.is_const)
        return Program(
            self.name, self.signature.format, image, symbol, self.host, self._takes_grid, self.host_seconds, read_only
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a kernel's name is a str, not {type(name).__name__}")
    if not _IDENTIFIER.fullmatch(name):
        raise InvalidArgumentError(
            f"{name!r} is not a kernel's name: it takes a C++ identifier, without namespaces (they are found in the "
            f"source) and without template arguments (declare a plain kernel instead)"
        )


def _directories(include_dirs: object) -> tuple[str, ...]:
    if not isinstance(include_dirs, Sequence) or isinstance(include_dirs, str | bytes):
        raise InvalidTypeError(f"include_dirs is a sequence of paths, not {include_dirs!r}: write (path,) for one")
    made = []
    for directory in include_dirs:
        if not isinstance(directory, str | os.PathLike):
            raise InvalidTypeError(f"an include directory is a str or a path, not {directory!r}")
        path = os.fspath(directory)
        if not path or "\0" in path:
            raise InvalidArgumentError(f"{path!r} is no include directory")
        made.append(os.path.abspath(path))  # the compiler runs in another directory
    return tuple(made)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(f"host_seconds is a number of seconds or None, not {value!r}")
    if not 0 <= value < math.inf:
        raise InvalidArgumentError(f"host_seconds is {value!r}: it takes a finite number, 0 or more")
    return float(value)


def _takes_grid(host: Any, signature: Signature) -> bool:
    """Does the twin want ``grid`` and ``block``? Raises if it cannot be called as it will be."""
    if not is_function(host):
        raise InvalidTypeError(f"host is a function or None, not {host!r}")
    if is_coroutine_function(host):
        raise InvalidTypeError(f"the host twin of {signature} is a coroutine function: it runs on a worker; use `def`")
    try:
        twin = inspect.signature(host)
    except ValueError:  # a ufunc, or another function in C that does not tell
        return False
    by_name = {name for name, parameter in twin.parameters.items() if parameter.kind in _BY_NAME}
    takes_grid = by_name >= {"grid", "block"}
    try:
        twin.bind(*signature.parameters, **(dict.fromkeys(("grid", "block")) if takes_grid else {}))
    except TypeError as error:
        called = f"{getattr(host, '__name__', 'host')}{twin}"
        raise InvalidTypeError(
            f"the host twin {called} cannot be called as {signature}: {error}. It takes {len(signature.parameters)} "
            f"arguments by position and, if it wants them, `*, grid, block`"
        ) from None
    return takes_grid


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
