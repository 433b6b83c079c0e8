"""Kernels that cuda.core has compiled, and its linker.

The import of cuda.core takes 0.5 s. A program that has one of its kernels has imported it, and `link` imports it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from ...errors import CompileError, InvalidTypeError, UnsupportedError
from ..protocol import LoadedKernel

__all__ = ["link", "plain_name", "read_kernel"]

#: The name of a kernel whose real name the NVIDIA driver does not return.
_UNNAMED = "kernel"

_LENGTH = re.compile(r"L?(\d+)")


def read_kernel(kernel: object) -> tuple[LoadedKernel, str, int | None]:
    """Return the handle, the name and the number of parameters of a ``cuda.core.Kernel``.

    The number is None if the NVIDIA driver is older than CUDA 12.4, or if the thread has no current context.

    Raises
    ------
    InvalidTypeError
        The object is not a ``cuda.core.Kernel``.
    """
    core = sys.modules.get("cuda.core")
    known: tuple[Any, Any] = getattr(core, "Kernel", ()), getattr(core, "ObjectCode", ())  # since cuda.core 1.0
    if not isinstance(kernel, known[0]):
        if isinstance(kernel, known[1]):
            # Its repr loads the code, which may fail.
            described, cure = "an ObjectCode", "pass one kernel of it, `object_code.get_kernel(name)`"
        else:
            described = f"{kernel!r} ({type(kernel).__name__})"
            cure = "`program.compile('cubin').get_kernel(name)` of a cuda.core.Program returns one"
        raise InvalidTypeError(f"kernel is a cuda.core.Kernel, not {described}: {cure}")
    try:
        count = kernel.num_arguments
    except Exception:  # noqa: BLE001 - any error of cuda.core; the first launch compares the parameters, too
        count = None
    return LoadedKernel(int(kernel.handle), kernel), _name(kernel.handle), count


def _name(handle: object) -> str:
    from cuda.bindings.driver import cuKernelGetName  # cuda.core has imported it

    try:
        code, symbol = cuKernelGetName(handle)
    except RuntimeError:  # the NVIDIA driver does not have this function, which is of CUDA 12.3
        return _UNNAMED
    return plain_name(symbol.decode()) if int(code) == 0 else _UNNAMED


def plain_name(symbol: str) -> str:
    """Return the name of a function, without its namespaces and template arguments, from its symbol."""
    if not symbol.startswith("_Z"):
        return symbol
    # Each name has its length before it. After a name that is not nested, the types of the parameters follow.
    nested = symbol.startswith("_ZN")
    name, at = symbol, 2 + nested
    while match := _LENGTH.match(symbol, at):
        at = match.end() + int(match[1])
        name = symbol[match.end() : at]
        if not nested:
            break
    return name


def link(code: bytes, name: str, arch: str) -> bytes:
    """Return LTO-IR as a cubin for an architecture such as ``"sm_90"``. **May block.**

    Raises
    ------
    CompileError
        The linker refuses the code.
    UnsupportedError
        cuda.core or nvJitLink is not installed.
    """
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvJitLink")
    except (ImportError, RuntimeError) as error:  # DynamicLibNotFoundError is the latter
        raise UnsupportedError(
            f"kernel {name!r} is LTO-IR, which cuda.core links by nvJitLink: pip install cuda-core nvidia-nvjitlink"
        ) from error
    try:
        options = LinkerOptions(arch=arch, link_time_optimization=True)
        return bytes(Linker(ObjectCode.from_ltoir(code), options=options).link("cubin").code)
    except Exception as error:  # of cuda.core and of nvJitLink
        raise CompileError(f"the LTO-IR of kernel {name!r} cannot be linked for {arch}: {error}", log="") from error
