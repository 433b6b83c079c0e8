"""The entry points of libcuda that are used here, and the two ways to call them.

The version of an entry is the CUDA version in which that form of the function appeared. ``cuGetProcAddress`` returns
exactly that form. The newest form in a newer driver may take other arguments than those given here. The forms are
those of the unsuffixed names in the headers of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NewType, TypeAlias

from ...errors import DriverNotAvailableError, InvalidArgumentError
from ._abi import CU_GET_PROC_ADDRESS_LEGACY_STREAM, CUmemLocation

__all__ = ["ENTRIES", "PREPARED", "Call", "Calls", "Word", "chosen_form", "reference", "resolve", "word"]

Call: TypeAlias = Callable[..., int]

#: An argument of 64 bits that `ctypes` passes without conversion. `word` and `reference` make it.
Word = NewType("Word", object)

#: A pointer, a handle, a ``CUdeviceptr`` or a ``size_t``: all have 64 bits and are passed in the same way. ``c_void_p``
#: converts a Python int in half the time of ``c_size_t`` or ``c_uint64`` (a call with two arguments: 0.18 µs and 0.33).
_WORD: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int
_UINT: Final = ctypes.c_uint

#: name → (version of the form, argument types). All of them return a ``CUresult``.
ENTRIES: Final[Mapping[str, tuple[int, tuple[type[Any], ...]]]] = {
    "cuInit": (2000, (_UINT,)),
    "cuGetErrorName": (6000, (_INT, _WORD)),
    "cuGetErrorString": (6000, (_INT, _WORD)),
    # devices and contexts
    "cuDeviceGetCount": (2000, (_WORD,)),
    "cuDeviceGet": (2000, (_WORD, _INT)),
    "cuDeviceGetName": (2000, (_WORD, _INT, _INT)),
    "cuDeviceGetAttribute": (2000, (_WORD, _INT, _INT)),
    "cuDeviceTotalMem": (3020, (_WORD, _INT)),
    "cuDeviceCanAccessPeer": (4000, (_WORD, _INT, _INT)),
    "cuDevicePrimaryCtxRetain": (7000, (_WORD, _INT)),
    "cuDevicePrimaryCtxRelease": (11000, (_INT,)),
    "cuDevicePrimaryCtxGetState": (7000, (_INT, _WORD, _WORD)),
    "cuCtxGetCurrent": (4000, (_WORD,)),
    "cuCtxGetDevice": (2000, (_WORD,)),
    "cuCtxPushCurrent": (4000, (_WORD,)),
    "cuCtxPopCurrent": (4000, (_WORD,)),
    "cuCtxEnablePeerAccess": (4000, (_WORD, _UINT)),
    "cuCtxGetStreamPriorityRange": (5050, (_WORD, _WORD)),
    # streams and events
    "cuStreamCreateWithPriority": (5050, (_WORD, _UINT, _INT)),
    "cuStreamDestroy": (4000, (_WORD,)),
    "cuStreamGetPriority": (5050, (_WORD, _WORD)),
    "cuStreamGetDevice": (12080, (_WORD, _WORD)),
    "cuStreamQuery": (2000, (_WORD,)),
    "cuStreamSynchronize": (2000, (_WORD,)),
    "cuStreamWaitEvent": (3020, (_WORD, _WORD, _UINT)),
    "cuStreamIsCapturing": (10000, (_WORD, _WORD)),
    "cuThreadExchangeStreamCaptureMode": (10010, (_WORD,)),
    "cuEventCreate": (2000, (_WORD, _UINT)),
    "cuEventDestroy": (4000, (_WORD,)),
    "cuEventRecord": (2000, (_WORD, _WORD)),
    "cuEventQuery": (2000, (_WORD,)),
    "cuEventElapsedTime": (12080, (_WORD, _WORD, _WORD)),
    "cuLaunchHostFunc": (10000, (_WORD, _WORD, _WORD)),
    # code
    "cuLibraryLoadData": (12000, (_WORD, _WORD, _WORD, _WORD, _UINT, _WORD, _WORD, _UINT)),
    "cuLibraryUnload": (12000, (_WORD,)),
    "cuLibraryGetKernel": (12000, (_WORD, _WORD, _WORD)),
    "cuKernelGetFunction": (12000, (_WORD, _WORD)),
    "cuFuncLoad": (12040, (_WORD,)),
    "cuFuncGetParamInfo": (12040, (_WORD, _WORD, _WORD, _WORD)),
    "cuFuncGetAttribute": (2020, (_WORD, _INT, _WORD)),
    "cuFuncSetAttribute": (9000, (_WORD, _INT, _INT)),
    "cuLaunchKernelEx": (11060, (_WORD, _WORD, _WORD, _WORD)),
    # graphs
    "cuGraphCreate": (10000, (_WORD, _UINT)),
    "cuGraphAddKernelNode": (12000, (_WORD, _WORD, _WORD, _WORD, _WORD)),
    "cuGraphAddMemcpyNode": (10000, (_WORD, _WORD, _WORD, _WORD, _WORD, _WORD)),
    "cuGraphAddMemsetNode": (10000, (_WORD, _WORD, _WORD, _WORD, _WORD, _WORD)),
    "cuGraphAddEmptyNode": (10000, (_WORD, _WORD, _WORD, _WORD)),
    "cuGraphInstantiateWithParams": (12000, (_WORD, _WORD, _WORD)),
    "cuGraphExecKernelNodeSetParams": (12000, (_WORD, _WORD, _WORD)),
    "cuGraphExecMemcpyNodeSetParams": (10020, (_WORD, _WORD, _WORD, _WORD)),
    "cuGraphExecMemsetNodeSetParams": (10020, (_WORD, _WORD, _WORD, _WORD)),
    "cuGraphLaunch": (10000, (_WORD, _WORD)),
    "cuGraphExecDestroy": (10000, (_WORD,)),
    "cuGraphDestroy": (10000, (_WORD,)),
    # memory
    "cuMemGetInfo": (3020, (_WORD, _WORD)),
    "cuPointerGetAttributes": (7000, (_UINT, _WORD, _WORD, _WORD)),
    "cuMemPoolCreate": (11020, (_WORD, _WORD)),
    "cuMemPoolDestroy": (11020, (_WORD,)),
    "cuMemPoolSetAttribute": (11020, (_WORD, _INT, _WORD)),
    "cuMemPoolGetAttribute": (11020, (_WORD, _INT, _WORD)),
    "cuMemPoolSetAccess": (11020, (_WORD, _WORD, _WORD)),
    "cuMemPoolTrimTo": (11020, (_WORD, _WORD)),
    "cuMemAllocFromPoolAsync": (11020, (_WORD, _WORD, _WORD, _WORD)),
    "cuMemFreeAsync": (11020, (_WORD, _WORD)),
    "cuMemHostAlloc": (2020, (_WORD, _WORD, _UINT)),
    "cuMemFreeHost": (2000, (_WORD,)),
    "cuMemHostRegister": (6050, (_WORD, _WORD, _UINT)),
    "cuMemHostUnregister": (4000, (_WORD,)),
    "cuMemAllocManaged": (6000, (_WORD, _WORD, _UINT)),
    "cuMemFree": (3020, (_WORD,)),
    "cuMemcpyHtoDAsync": (3020, (_WORD, _WORD, _WORD, _WORD)),
    "cuMemcpyDtoHAsync": (3020, (_WORD, _WORD, _WORD, _WORD)),
    "cuMemcpyDtoDAsync": (3020, (_WORD, _WORD, _WORD, _WORD)),
    "cuMemcpyPeerAsync": (4000, (_WORD, _WORD, _WORD, _WORD, _WORD, _WORD)),
    "cuMemsetD8Async": (3020, (_WORD, ctypes.c_ubyte, _WORD, _WORD)),
    "cuMemsetD16Async": (3020, (_WORD, ctypes.c_ushort, _WORD, _WORD)),
    "cuMemsetD32Async": (3020, (_WORD, _UINT, _WORD, _WORD)),
    "cuMemsetD2D32Async": (3020, (_WORD, _WORD, _UINT, _WORD, _WORD, _WORD)),
    "cuMemPrefetchAsync": (12020, (_WORD, _WORD, CUmemLocation, _UINT, _WORD)),
    "cuMemAdvise": (12020, (_WORD, _WORD, _INT, CUmemLocation)),
    "cuMemRangeGetAttribute": (8000, (_WORD, _WORD, _INT, _WORD, _WORD)),
}


#: Functions of hot paths. Their arguments are `Word` objects that were converted before: a launch with four arguments
#: then takes 0.17 µs instead of 0.36, a record 0.12 instead of 0.22, without the time of the driver itself. They would
#: cut a Python int to 32 bits; `Calls` therefore declares their types for mypy.
PREPARED: Final = frozenset(
    {
        *("cuEventQuery", "cuEventRecord", "cuGraphLaunch", "cuLaunchKernelEx", "cuStreamWaitEvent"),
        "cuThreadExchangeStreamCaptureMode",
    }
)


def word(value: int) -> Word:
    """Return a handle as a converted argument."""
    return Word(_WORD.from_param(value))


def reference(data: ctypes.c_int | ctypes.Structure | ctypes.Array[Any]) -> Word:
    """Return the address of data as a converted argument. It keeps the data alive."""
    return Word(ctypes.byref(data))


class Calls:
    """A table of the functions of `ENTRIES`, as attributes, in one form. `replace_with` replaces all of them."""

    __slots__ = tuple(ENTRIES)

    if TYPE_CHECKING:
        cuEventQuery: Callable[[Word], int]
        cuEventRecord: Callable[[Word, Word], int]
        cuGraphLaunch: Callable[[Word, Word], int]
        cuLaunchKernelEx: Callable[[Word, Word, Word | None, None], int]
        cuStreamWaitEvent: Callable[[Word, Word, Word], int]
        cuThreadExchangeStreamCaptureMode: Callable[[Word], int]

        def __getattr__(self, name: str) -> Call: ...

    def __init__(self, functions: Mapping[str, Call]) -> None:
        for name in ENTRIES:
            setattr(self, name, functions[name])

    @classmethod
    def answering(cls, code: int) -> Calls:
        """Return functions that return a code and do not call CUDA."""
        return cls(dict.fromkeys(ENTRIES, _answer(code)))

    @classmethod
    def keeping(cls, addresses: Mapping[str, int]) -> Calls:
        """The form that keeps the GIL: 0.3-1 µs a call, for calls that cannot wait."""
        return cls({name: _function(name, False, address) for name, address in addresses.items()})

    @classmethod
    def releasing(cls, addresses: Mapping[str, int]) -> Calls:
        """The form that releases the GIL: 4-5 ms a call beside a busy Python thread."""
        return cls({name: _function(name, True, address) for name, address in addresses.items()})

    def replace_with(self, other: Calls) -> None:
        """Replace all functions of this table by those of another one.

        A latched fault and a fork do so. Hot paths therefore need no test for either.
        """
        for name in ENTRIES:
            setattr(self, name, getattr(other, name))


def _answer(code: int) -> Call:
    def answer(*_: object) -> int:
        return code

    return answer


def _function(name: str, release: bool, address: int) -> Call:
    return _prototype(release, () if name in PREPARED else ENTRIES[name][1])(address)


@functools.cache
def _prototype(release: bool, arguments: tuple[type[Any], ...]) -> Callable[[int], Call]:
    form = ctypes.CFUNCTYPE if release else ctypes.PYFUNCTYPE
    return form(ctypes.c_int, *arguments)


def resolve(library: ctypes.CDLL) -> dict[str, int]:
    """Return the address of every function in `ENTRIES`. ``cuGetProcAddress``.

    The functions use the legacy default stream, never the per-thread one.
    """
    get = library.cuGetProcAddress_v2
    get.restype = ctypes.c_int
    get.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    addresses = {}
    for name, (version, _) in ENTRIES.items():
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = get(
            name.encode(), ctypes.byref(address), version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, ctypes.byref(status)
        )
        if code or not address.value:
            raise DriverNotAvailableError(
                f"the CUDA driver has no {name} of CUDA {version // 1000}.{version % 1000 // 10} "
                f"(code {code}, status {status.value}): install a newer driver",
                code=code,
                call="cuGetProcAddress",
            )
        addresses[name] = address.value
    return addresses


def chosen_form() -> Literal["keep", "release"]:
    """Return the value of ``AIOCUDA_GIL``: the form of calls that cannot wait."""
    value = os.environ.get("AIOCUDA_GIL", "keep")
    if value == "keep":
        return "keep"
    if value == "release":
        return "release"
    raise InvalidArgumentError(f"AIOCUDA_GIL={value!r}: use 'keep' (the default) or 'release'", variable="AIOCUDA_GIL")
