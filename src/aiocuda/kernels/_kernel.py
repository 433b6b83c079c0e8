"""Kernel: its code, its signature, and a host implementation that runs instead on a device without a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Self

from .._base._checks import is_coroutine_function, is_function
from .._base._mistakes import keywords, lacks, refuses
from .._base._types import SourceLine
from ..completion._waiting_calls import WaitingCalls
from ..driver.protocol import CompiledKernel, CudaSource, Driver, LoadedKernel, Program
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from ._binding import Converter, check_structures, converters
from ._object_code import check_object_code, read_object_code
from ._signature import Signature
from ._source import find_kernel, has_dynamic_shared, read_parameters, read_source, refuse_includes

__all__ = ["Compilation", "Kernel"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INSTANCE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*<[\w :,<>()*&+.-]*>", re.ASCII)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LAUNCH = "stream.launch(kernel, grid, block, *arguments)"

#: The options of NVRTC that open no file. A definition is one line of the program.
_OPTION = re.compile(
    r"--?(?:ftz|prec-div|prec-sqrt|fmad)=(?:true|false)|--?use_fast_math|-lineinfo|--generate-line-info"
    r"|--?maxrregcount=\d{1,3}|--?std=c\+\+\d\d|--?diag-(?:error|suppress|warn)=\d+(?:,\d+)*"
    r"|(?:-D|--define-macro=)[A-Za-z_]\w*(?:=(?:[^\x00-\x1f\x7f\s\\][^\x00-\x1f\x7f\\]*)?)?"
    r"|(?:-U|--undefine-macro=)[A-Za-z_]\w*",
    re.ASCII,
)
_OPTIONS = (
    "-ftz= -prec-div= -prec-sqrt= -fmad= (true or false), -use_fast_math, -DNAME=value, -UNAME, -maxrregcount=32, "
    "-lineinfo, -std=c++20 and -diag-suppress=177 (-diag-error=, -diag-warn=)"
)
_COMPILED = "compiled code becomes a kernel by Kernel.from_object_code(code, name, parameters)"
_SYMBOL = re.compile(r"[A-Za-z_.$][A-Za-z0-9_.$]*")


class Compilation(NamedTuple):
    """What the compiler reports of a kernel."""

    log: str  #: warnings, and what ptxas says of the kernel
    registers: int  #: of a thread
    shared_bytes: int  #: static shared memory of a block


class _Image(NamedTuple):
    """Code that was compiled elsewhere. ``read(capability)`` returns it, on a worker thread; the driver loads it."""

    read: Callable[[tuple[int, int]], bytes]
    symbol: str
    origin: str  #: as `Kernel.origin` returns it


@lacks
@refuses(
    __call__=f"is not called: a stream launches it, {_LAUNCH}",
    __getitem__=f"is not indexed by grid and block: a stream launches it, {_LAUNCH}",
)
class Kernel:
    """A kernel in CUDA C++, for all drivers. The constructor parses the source; it compiles and runs nothing.

    The first launch on a device compiles the kernel, on a worker thread, once per architecture and process. The result
    is kept in a cache on disk. A failed compilation is not kept: the next launch compiles again.

    Parameters
    ----------
    name
        Name of the ``__global__`` function, without namespaces. The source must declare it with its parameter list.
        ``"scale<float, 4>"`` is an instance of a template, together with ``parameters``.
    source
        CUDA C++, at most 16 MiB. It runs with all rights of the program.
    host
        The host implementation: a plain function that runs instead of the kernel on a device without a GPU. It gets
        the arguments of the kernel. Buffers are NumPy arrays, which it writes in place: ``x[:] = x + 1``, not
        ``x = x + 1``. Arrays for ``const`` pointers are read-only. If it declares the keyword arguments ``grid`` and
        ``block``, it gets these, too. It returns None or one of its arguments. A generator function may wait: it yields
        a number of seconds, and is sent the driver's time.
    host_seconds
        Modelled duration of one launch on the host driver. None: the measured duration of the host implementation.
    include_dirs
        Directories for ``#include``, in addition to CUDA's headers. A kernel with include directories is compiled once
        per process and not cached on disk, because a header may change.
    includes
        False refuses every ``#include``. The compiler can then open no file.
    options
        Options of the compiler, one string each, which the host driver ignores: ``-ftz=``, ``-prec-div=``,
        ``-prec-sqrt=`` and ``-fmad=`` with ``true`` or ``false``, ``-use_fast_math``, ``-DNAME=value``, ``-UNAME``,
        ``-maxrregcount=``, ``-lineinfo``, ``-std=``, ``-diag-error=``, ``-diag-suppress=`` and ``-diag-warn=``.
    parameters
        For an instance of a template only: its parameter list in C, with the template's parameters replaced,
        ``"float* x, int n"``. The first launch on a GPU compares the sizes with those of the compiled kernel.

    Raises
    ------
    InvalidTypeError, InvalidArgumentError
        A parameter cannot be used, an option is not in the list, or the host implementation cannot be called with the
        kernel's arguments.
    CompileError
        The source declares no such kernel, or has an ``#include`` with ``includes=False``.
    UnsupportedError
        The kernel is a template without ``parameters``, or has a parameter type that cannot be passed.

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
        *("__weakref__", "_code", "_convert", "_handles", "_images", "_lock", "_lock_owner", "_origins", "_sizes"),
        *("_has_dynamic_shared", "_takes_grid"),
        *("host", "host_seconds", "signature"),
    )

    @keywords(
        "Kernel takes a name, source=, host=, host_seconds=, include_dirs=, includes=, options= and parameters=",
        "a kernel has one positional argument, its name: Kernel(name, source=source, host=function)",
        ptx=_COMPILED,
        cubin=_COMPILED,
        code="it is called source",
    )
    def __init__(
        self,
        name: str,
        *,
        source: str | bytes,
        host: Callable[..., object] | None = None,
        host_seconds: float | None = None,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        includes: bool = True,
        options: Sequence[str] = (),
        parameters: str | None = None,
    ) -> None:
        _check_name(name, parameters)
        if not isinstance(includes, bool):
            raise InvalidTypeError(f"includes is True or False, not {includes!r}")
        text = read_source(source)
        directories = _directories(include_dirs)
        if not includes:
            refuse_includes(text)
        qualified, signature = find_kernel(text, name, parameters)
        names = dict.fromkeys(parameter.structure for parameter in signature.parameters if parameter.structure)
        code = CudaSource(qualified, text, directories, includes, _options(options), tuple(names))
        self._set_up(code, signature, host, host_seconds)
        self._has_dynamic_shared = has_dynamic_shared(text, name)

    @classmethod
    def from_cuda_core(cls, kernel: Any, parameters: str, host: Callable[..., object] | None = None) -> Self:
        """Make a kernel from one that cuda.core has compiled: no source is needed, and any compiler option is possible.

        Nothing is compiled or loaded here. The first launch on a device gets the function of the compiled kernel for
        that device, ``cuKernelGetFunction``, and compares the sizes of its parameters with ``parameters``. The kernel
        keeps the object of cuda.core alive; from the first launch on a GPU it stays loaded until the process ends.

        Parameters
        ----------
        kernel
            A ``cuda.core.Kernel``, which ``ObjectCode.get_kernel`` returns. Its code must be compiled for the devices
            that launch it.
        parameters
            The parameter list in C, because compiled code has no types: ``"const float* x, int n"``. ``""`` for none.
        host
            The host implementation, as for ``Kernel(...)``. Drivers without a GPU run it.

        Raises
        ------
        InvalidTypeError
            ``kernel`` is not a ``cuda.core.Kernel``, ``parameters`` is not a str, or the host implementation cannot be
            called with these parameters.
        InvalidArgumentError
            ``parameters`` is more than a parameter list, or has another number of parameters than the compiled kernel.
            The number is compared here if the thread has a current CUDA context, else at the first launch.
        UnsupportedError
            A parameter has a type that cannot be passed.
        """
        from ..driver.cuda._compiled import read_kernel  # imported here, because few programs use cuda.core

        loaded, name, count = read_kernel(kernel)
        signature = read_parameters(name, parameters)
        given = len(signature.parameters)
        if count is not None and count != given:
            raise InvalidArgumentError(
                f"parameters is {parameters!r}, which is {given} parameter{'s' * (given != 1)}; the compiled kernel "
                f"{name!r} takes {count}: write all of them, as in its source",
                expected=count,
                given=given,
            )
        return cls._from_code(loaded, signature, host)

    @classmethod
    def from_object_code(
        cls, code: bytes | str | os.PathLike[str], name: str, parameters: str,
        host: Callable[..., object] | None = None,
    ) -> Self:  # fmt: skip
        """Make a kernel from code that was compiled elsewhere. Nothing is loaded here, so it opens on every driver.

        Parameters
        ----------
        code
            A cubin, PTX, fatbin or LTO-IR: bytes, or the path of a file, which is read when a GPU loads the kernel.
            cuda.core links LTO-IR then. The code runs with all rights of the program.
        name
            The name of the function in the code: ``extern "C"``, or mangled.
        parameters, host
            As for `from_cuda_core`.

        Raises
        ------
        InvalidTypeError, InvalidArgumentError, UnsupportedError
            As for `from_cuda_core`.
        CompileError
            ``code`` is bytes that are truncated, or none of the four. For a file, and for code that CUDA refuses, such
            as that of another architecture, the first launch on a GPU raises it.
        """
        if not isinstance(code, bytes | str | os.PathLike) or (isinstance(code, str) and "\n" in code):
            raise InvalidTypeError(f"code is bytes or a path, not {type(code).__name__}; PTX as text: ptx.encode()")
        if not isinstance(name, str):
            raise InvalidTypeError(f"a kernel's name is a str, not {type(name).__name__}")
        if not _SYMBOL.fullmatch(name):
            raise InvalidArgumentError(f"{name!r} is no name in compiled code: that of C++ is mangled, '_Z4axpyPKfPfi'")
        signature = read_parameters(name, parameters)
        if isinstance(code, bytes):
            check_object_code(code, name)
        else:
            code = os.path.abspath(os.fsdecode(code))
        return cls._from_code(_Image(functools.partial(read_object_code, code, name), name, "code"), signature, host)

    @classmethod
    def _from_code(
        cls, code: LoadedKernel | _Image, signature: Signature, host: Callable[..., object] | None
    ) -> Self:  # fmt: skip
        made = cls.__new__(cls)
        made._set_up(code, signature, host, None)
        return made

    def _set_up(
        self,
        code: CudaSource | LoadedKernel | _Image,
        signature: Signature,
        host: Callable[..., object] | None,
        host_seconds: float | None,
    ) -> None:
        self.signature = signature
        self._takes_grid = host is not None and _takes_grid(host, self.signature)
        self.host = host
        self.host_seconds = _seconds(host_seconds)
        self._code = code
        self._has_dynamic_shared = False
        self._sizes: dict[str, int] = {}  # of structures, once it has been compiled
        self._convert = converters(self.signature, self._sizes)
        self._lock = threading.Lock()
        self._lock_owner = os.getpid()
        # Weak, so that a host driver that was closed and dropped is not kept alive by the kernels it has run.
        self._images: weakref.WeakKeyDictionary[Driver, dict[tuple[int, int], CompiledKernel]]
        self._images = weakref.WeakKeyDictionary()
        self._handles: weakref.WeakKeyDictionary[Driver, dict[int, int]] = weakref.WeakKeyDictionary()
        self._origins: weakref.WeakKeyDictionary[Driver, dict[int, str]] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name of the kernel, without namespaces; for an instance of a template with its arguments."""
        return self.signature.name

    @property
    def source(self) -> CudaSource:
        """The source and its compiler options. `UnsupportedError` for a kernel that was compiled elsewhere."""
        if not isinstance(self._code, CudaSource):
            raise UnsupportedError(f"{self!r} has no source: it was compiled elsewhere")
        return self._code

    def compile(self, arch: str = "sm_90") -> Compilation:
        """Compile the source for an architecture, and return what the compiler reports. **It blocks.**

        For tests and builds: it needs NVRTC and no GPU, nothing is loaded, and no launch uses the result.

        Raises
        ------
        CompileError
            The source does not compile; ``log`` has the compiler's messages.
        CompilerNotFoundError, UnsupportedError
            NVRTC is not installed, or does not support the architecture. The kernel has no source.
        BusyError
            An event loop runs on this thread.
        """
        if asyncio._get_running_loop() is not None:
            raise BusyError("kernel.compile blocks the event loop: `await device.load(kernel)`, or call it in a thread")
        from ..driver.cuda._compiler import report_cuda  # imported here, because few programs compile

        return Compilation(*report_cuda(self.source, arch))

    def __repr__(self) -> str:
        return f"<Kernel {self.signature}>"

    def __reduce__(self) -> tuple[Callable[..., Kernel], tuple[str]]:
        # Compiled code is not pickled: its handles are valid only in this process.
        if not isinstance(self._code, CudaSource):
            raise InvalidTypeError(f"{self!r} belongs to this process: it cannot be pickled or copied")
        make = functools.partial(
            Kernel,
            source=self._code.text,
            host=self.host,
            host_seconds=self.host_seconds,
            include_dirs=self._code.include_dirs,
            includes=self._code.includes,
            options=self._code.options,
            parameters=", ".join(map(str, self.signature.parameters)) if "<" in self.name else None,
        )
        return make, (self.name,)

    # Methods for a launch.

    def bind(self, arguments: Sequence[Any]) -> list[Any]:
        """Check the arguments of a launch, and convert them for the driver's launcher.

        Raises
        ------
        InvalidTypeError
            There are too few or too many arguments, or one has a wrong type: a NumPy array or a buffer of another dtype
            for a pointer, a float for an integer.
        InvalidArgumentError
            A number is outside the range of its C type.
        """
        if len(arguments) != len(self._convert):
            raise self.signature.count_error(arguments)
        values = []
        for convert, argument in zip(self._convert, arguments):  # noqa: B905 - just counted
            values.append(convert(argument))
        return values

    def check_structures(self, arguments: Sequence[Any]) -> None:
        """Check the arguments of a launch that was bound before the kernel was compiled.

        `InvalidTypeError` if the items of a buffer have another size than the structure that the kernel points to.
        """
        check_structures(self.signature, self._sizes, arguments)

    def writes(self, index: int) -> bool:
        """Return whether the kernel may write the memory of this argument: True for a pointer without ``const``."""
        parameter = self.signature.parameters[index]
        return parameter.is_pointer and not parameter.is_const

    # Methods for the first launch on a device. `program` and `load` may block.

    def program(self, driver: Driver, device: int) -> Program:
        """Return the compiled kernel, or its host implementation, for a driver. **May block**, to compile."""
        with self._locked():
            return self._program(driver, device)

    def load(self, driver: Driver, device: int) -> int:
        """Return the driver's handle of this kernel, loaded once per device. **May block.**

        Several threads may call it at the same time: one loads the kernel, the others wait.
        """
        with self._locked():
            handles = self._handles.setdefault(driver, {})
            if device not in handles:
                program = self._program(driver, device)
                if program.host is not None:
                    program = dataclasses.replace(program, host=_without_loop(program.host))
                handles[device] = WaitingCalls.of(driver).run("cuKernelGetFunction", driver.load, device, program)
                self._origins.setdefault(driver, {})[device] = self._origin(driver, device)
            return handles[device]

    def loaded(self, driver: Driver, device: int) -> int | None:
        """Return the handle if the kernel is loaded, otherwise None. Never blocks."""
        handles = self._handles.get(driver)
        return None if handles is None else handles.get(device)

    def origin(self, driver: Driver, device: int) -> str:
        """Return its origin: ``"compiled"``, ``"cache"``, ``"cuda.core"``, ``"code"``, ``"ptx"`` or ``"host"``."""
        return self._origins[driver][device]

    def _origin(self, driver: Driver, device: int) -> str:
        if not driver.wants_image:
            return "host"
        if isinstance(self._code, LoadedKernel):
            return "cuda.core"
        if isinstance(self._code, _Image):
            return self._code.origin
        compiled = self._images[driver][driver.device_open(device).compute_capability]
        return "cache" if compiled.from_cache else "compiled"

    def _locked(self) -> threading.Lock:
        # A forked child may inherit a lock that a thread of the parent held; that thread does not exist here.
        if self._lock_owner != os.getpid():
            self._lock, self._lock_owner = threading.Lock(), os.getpid()
        return self._lock

    def _program(self, driver: Driver, device: int) -> Program:
        image: bytes | None = None
        symbol: str | None = None
        loaded: LoadedKernel | None = None
        if isinstance(self._code, LoadedKernel):
            loaded = self._code
        elif not driver.wants_image:
            pass  # it runs the host implementation
        elif isinstance(self._code, _Image):
            image, symbol = self._code.read(driver.device_open(device).compute_capability), self._code.symbol
        else:
            images = self._images.setdefault(driver, {})
            capability = driver.device_open(device).compute_capability
            if capability not in images:
                images[capability] = driver.compile(device, self._code)
            image, symbol, _, sizes = images[capability]
            self._sizes.update(zip(self._code.structures, sizes, strict=False))
        parameters = enumerate(self.signature.parameters)
        read_only = frozenset(index for index, parameter in parameters if parameter.is_pointer and parameter.is_const)
        return Program(
            self.name,
            self.signature.format,
            image=image,
            symbol=symbol,
            loaded=loaded,
            host=self.host,
            host_takes_grid=self._takes_grid,
            host_seconds=self.host_seconds,
            read_only=read_only,
        )


def kernel_of_ptx(
    read: Callable[[str], str], name: str, parameters: str, host: Callable[..., object]
) -> Kernel:  # fmt: skip
    """Return a kernel that is shipped as PTX, so that it needs no compiler. ``read(name)`` returns the PTX."""
    image = _Image(lambda _: read(name).encode(), name, "ptx")
    return Kernel._from_code(image, read_parameters(name, parameters), host)


def converters_of(kernel: Kernel) -> tuple[Converter, ...]:
    """Return the functions that check and convert the kernel's arguments, one for each parameter."""
    return kernel._convert


def no_kernel(given: object) -> InvalidTypeError:
    """Return the error for a launch of something else."""
    cure = "Kernel(name, source=source, host=function) makes one, and a graph is run by graph.launch(stream)"
    return InvalidTypeError(f"launch takes an aiocuda.Kernel, not {type(given).__name__}: {cure}")


def check_shared_bytes(kernel: Kernel, shared_bytes: int) -> None:
    """Warn if a launch gives no dynamic shared memory to a kernel that declares some: a GPU would fault."""
    if kernel._has_dynamic_shared and not shared_bytes:
        SourceLine.of_caller().warn(
            f"{kernel!r} declares `extern __shared__`, and this launch has no shared_bytes=: launch it with the bytes, "
            "such as shared_bytes=4 * block for one float of each thread",
            RuntimeWarning,
        )


def _check_name(name: object, parameters: object) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(f"a kernel's name is a str, not {type(name).__name__}")
    if _INSTANCE.fullmatch(name):
        if parameters is None:
            raise InvalidArgumentError(
                f"{name!r} is an instance of a template, whose parameter list is not read from the source: pass it, as "
                "in parameters='float* x, int n'"
            )
    elif not _IDENTIFIER.fullmatch(name):
        raise InvalidArgumentError(
            f"{name!r} is not a kernel's name: it takes a C++ identifier, without namespaces (they are found in the "
            "source), or one with template arguments, such as 'scale<float, 4>'"
        )
    elif parameters is not None:
        raise InvalidArgumentError(
            f"parameters= is for an instance of a template, such as '{name}<float>', and {name!r} names none: the "
            "parameter list is read from the source"
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


def _options(options: object) -> tuple[str, ...]:
    if not isinstance(options, Sequence) or isinstance(options, str | bytes):
        raise InvalidTypeError(f"options is a sequence of strings, not {options!r}: write (option,) for one")
    for option in options:
        if not isinstance(option, str):
            raise InvalidTypeError(f"an option of the compiler is a str, not {option!r}")
        if not _OPTION.fullmatch(option):
            raise InvalidArgumentError(
                f"the option {option!r} is not taken: there are {_OPTIONS}. Directories for #include are include_dirs="
            )
    return tuple(options)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(f"host_seconds is a number of seconds or None, not {value!r}")
    if not 0 <= value < math.inf:
        raise InvalidArgumentError(f"host_seconds is {value!r}: it takes a finite number, 0 or more")
    return float(value)


def _takes_grid(host: Any, signature: Signature) -> bool:
    """Return whether a host implementation takes ``grid`` and ``block``. Raise if its parameters do not fit."""
    if not is_function(host):
        raise InvalidTypeError(f"host is a function or None, not {host!r}")
    if is_coroutine_function(host):
        raise InvalidTypeError(
            f"the host implementation of {signature} is a coroutine function: it runs on a worker thread; use `def`"
        )
    try:
        found = inspect.signature(host)
    except ValueError:  # a ufunc, or another function in C without a signature
        return False
    by_name = {name for name, parameter in found.parameters.items() if parameter.kind in _BY_NAME}
    takes_grid = by_name >= {"grid", "block"}
    try:
        found.bind(*signature.parameters, **(dict.fromkeys(("grid", "block")) if takes_grid else {}))
    except TypeError as error:
        called = f"{getattr(host, '__name__', 'host')}{found}"
        raise InvalidTypeError(
            f"the host implementation {called} cannot be called as {signature}: {error}. It takes "
            f"{len(signature.parameters)} arguments by position and, if it needs them, `*, grid, block`"
        ) from None
    return takes_grid


def _without_loop(host: Callable[..., object]) -> Callable[..., object]:
    """Return the host implementation as a function that runs without a running event loop.

    A driver without threads calls it on the loop's thread, inside a stream method. Calls of this library from there
    would seem to come from the program. Without a running loop they raise an error, as on a worker thread.
    """
    if not inspect.isgeneratorfunction(host):
        return functools.partial(_call_without_loop, host)

    def generator(*args: Any, **keywords: Any) -> Generator[Any, Any, Any]:
        running = host(*args, **keywords)
        sent: Any = None
        try:
            while True:
                try:
                    seconds = _call_without_loop(running.send, sent)
                except StopIteration as end:
                    return end.value
                sent = yield seconds
        finally:
            _call_without_loop(running.close)

    return generator


def _call_without_loop(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    loop = asyncio._get_running_loop()
    if loop is None:
        return function(*args, **keywords)
    asyncio._set_running_loop(None)
    try:
        return function(*args, **keywords)
    finally:
        asyncio._set_running_loop(loop)
        del loop  # the traceback of a fault keeps this frame, and the frame would keep the loop
