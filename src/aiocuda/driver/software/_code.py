"""The methods about kernels, without a GPU: kernels run as their host implementations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ..._base._types import Dim3, Span
from ...errors import StaleHandleError, UnsupportedError, WrongDeviceError
from ..protocol import CompiledKernel, CudaSource, Launcher, Program
from ._core import Core
from ._work import Function, KernelCall, Pointer

__all__ = ["Code"]


class FunctionHandle(int):
    """A handle of a function, with which the driver forgets the function. Launchers and graphs keep theirs."""

    def __new__(cls, number: int, functions: dict[int, Function]) -> Self:
        return super().__new__(cls, number)

    def __init__(self, number: int, functions: dict[int, Function]) -> None:
        self._functions = functions  # of the driver

    def __del__(self) -> None:
        self._functions.pop(int(self), None)


class Code(Core):
    """`aiocuda.driver.protocol.Code` without a GPU."""

    @property
    def wants_image(self) -> bool:
        """False: this driver runs host implementations only."""
        return False

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        """Raise `UnsupportedError`: there is no architecture to compile for."""
        self._enter()
        raise UnsupportedError(
            f"kernel {source.name!r} cannot be compiled on the {self.name} driver, which runs host implementations",
            kernel=source.name,
        )

    def load(self, device: int, program: Program) -> int:
        """Return a handle of the kernel's host implementation. `UnsupportedError` if it has none."""
        self._enter_device(device)
        if program.host is None:
            cure = f"Kernel({program.name!r}, ..." if program.loaded is None else "Kernel.from_cuda_core(kernel, ..."
            raise UnsupportedError(
                f"kernel {program.name!r} has no host implementation, and the {self.name} driver can run nothing else; "
                f"give it one: {cure}, host=function)",
                kernel=program.name,
            )
        function = Function(device, program, program.host)
        with self._lock:
            handle = FunctionHandle(next(self._function_handles), self._functions)
            self._functions[int(handle)] = function
        return handle

    def argument(self, span: Span) -> object:
        """Return the span with its size in bytes and its NumPy dtype."""
        dtype = np.dtype(span.dtype)
        return Pointer(span.address, math.prod(span.shape) * dtype.itemsize, span.shape, dtype)

    def launcher(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> Launcher:
        """Bind a stream, a host implementation and a grid. ``shared_bytes`` is ignored."""
        self._enter()
        on = self._machine.stream(stream)
        loaded = self._find_function(function, on.device, f"stream {stream}")
        engine = self._machine.engine(on.device, "compute")
        keywords = {"grid": grid, "block": block} if loaded.takes_grid else {}

        def launch(values: Sequence[Any]) -> None:
            self._enter()
            if self._machine.streams.get(stream) is not on:
                raise StaleHandleError(f"stream {stream} was destroyed", handle=stream)
            call = KernelCall(loaded, tuple(values), keywords, loaded.seconds)
            with self._lock:
                self._submit_work(on, "kernel", call, engine)

        return launch

    def _find_function(self, function: int, device: int, what: str) -> Function:
        """Return a function. `WrongDeviceError`, naming ``what`` is to run it, unless it was loaded on the device."""
        try:
            loaded = self._functions[function]
        except KeyError:
            raise StaleHandleError(f"{function} is not a function of this driver", handle=function) from None
        if loaded.device != device:
            raise WrongDeviceError(
                f"kernel {loaded.name!r} was loaded on device {loaded.device}, and {what} belongs to device {device}; "
                "load it there",
                device=loaded.device,
                expected=device,
            )
        return loaded
