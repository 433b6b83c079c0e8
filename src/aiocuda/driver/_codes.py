"""The error class of every ``CUresult``.

There are three kinds of codes, by their effect::

    FAULTS    the process cannot use CUDA any more, on any device   DeviceFault, latched by the driver
    LOST      one handle is unusable                                StaleHandleError
    others    only this call failed; it may be repeated             a class for the reason, else DriverError

Every code has a class: a code that is in no table, such as one of a newer driver, is a `DriverError`.
"""

from __future__ import annotations

from typing import Final

from ..errors import (
    AiocudaError,
    BusyError,
    ClosedError,
    CompileError,
    DeviceFault,
    DeviceOutOfMemory,
    DriverError,
    DriverNotAvailableError,
    InvalidArgumentError,
    StaleHandleError,
    UnsupportedError,
)

__all__ = ["FAULTS", "LOST", "MIG", "error_class", "translate"]

#: After such a code every later call returns it, on the other devices, too (measured on two H200s).
FAULTS: Final = frozenset(
    (
        214,  # ECC_UNCORRECTABLE
        220,  # NVLINK_UNCORRECTABLE
        226,  # CONTAINED
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        710,  # ASSERT
        *range(714, 720),  # HARDWARE_STACK_ERROR … LAUNCH_FAILED
        721,  # TENSOR_MEMORY_LEAK
        810,  # MPS_CLIENT_TERMINATED
        911,  # EXTERNAL_DEVICE
        999,  # UNKNOWN
    )
)

#: One handle is unusable.
LOST: Final = frozenset(
    (
        201,  # INVALID_CONTEXT
        400,  # INVALID_HANDLE
        709,  # CONTEXT_IS_DESTROYED
        917,  # STREAM_DETACHED
    )
)

_CLASSES: Final[dict[int, type[AiocudaError]]] = {
    **dict.fromkeys(FAULTS, DeviceFault),
    **dict.fromkeys(LOST, StaleHandleError),
    1: InvalidArgumentError,  # INVALID_VALUE
    2: DeviceOutOfMemory,  # OUT_OF_MEMORY
    4: ClosedError,  # DEINITIALIZED
    34: DriverNotAvailableError,  # STUB_LIBRARY
    36: UnsupportedError,  # CALL_REQUIRES_NEWER_DRIVER
    46: BusyError,  # DEVICE_UNAVAILABLE
    100: DriverNotAvailableError,  # NO_DEVICE
    101: InvalidArgumentError,  # INVALID_DEVICE
    200: CompileError,  # INVALID_IMAGE
    209: CompileError,  # NO_BINARY_FOR_GPU
    217: UnsupportedError,  # PEER_ACCESS_UNSUPPORTED
    218: CompileError,  # INVALID_PTX
    222: CompileError,  # UNSUPPORTED_PTX_VERSION
    225: CompileError,  # UNSUPPORTED_DEVSIDE_SYNC
    300: CompileError,  # INVALID_SOURCE
    302: CompileError,  # SHARED_OBJECT_SYMBOL_NOT_FOUND
    600: BusyError,  # NOT_READY
    701: InvalidArgumentError,  # LAUNCH_OUT_OF_RESOURCES
    711: UnsupportedError,  # TOO_MANY_PEERS
    712: BusyError,  # HOST_MEMORY_ALREADY_REGISTERED
    713: StaleHandleError,  # HOST_MEMORY_NOT_REGISTERED
    720: InvalidArgumentError,  # COOPERATIVE_LAUNCH_TOO_LARGE
    801: UnsupportedError,  # NOT_SUPPORTED
    802: BusyError,  # SYSTEM_NOT_READY
    **dict.fromkeys(range(900, 909), BusyError),  # STREAM_CAPTURE_UNSUPPORTED … STREAM_CAPTURE_WRONG_THREAD
    912: InvalidArgumentError,  # INVALID_CLUSTER_SIZE
}

#: A GPU in MIG mode shows its instances in its place, and CUDA one of them per process.
MIG: Final = "one in MIG mode is seen by its instances only: see `nvidia-smi -L`"

_CURES: Final[dict[int, str]] = {
    **dict.fromkeys(FAULTS, "CUDA is lost to this process: start a new one"),
    2: "free something, or ask for less",
    4: "the process is ending",
    34: "a stub of libcuda was loaded: take its directory off the library path",
    46: "another process holds the device in exclusive mode, or nobody may: see `nvidia-smi -q -d COMPUTE`",
    **dict.fromkeys((100, 101), f"see nvidia-smi, and CUDA_VISIBLE_DEVICES; {MIG}"),
    201: "no CUDA context is current on this thread, or it has been destroyed",
    209: "compile for the architecture of this device",
    222: "update the NVIDIA driver, or compile with an older CUDA",
    701: "use fewer threads per block, registers or parameters",
    802: "start its daemons (nvidia-fabricmanager), then try again",
    803: "the driver's library and its kernel module differ: reboot after the update",
    **dict.fromkeys(range(900, 909), "a stream is being captured into a graph: end the capture first"),
}


def error_class(code: int) -> type[AiocudaError]:
    """Return the error class of a ``CUresult``. `ValueError` for 0, which is no error."""
    if code == 0:
        raise ValueError("CUDA_SUCCESS is not an error")
    return _CLASSES.get(code, DriverError)


def translate(code: int, call: str, name: str, text: str, device: int = -1) -> AiocudaError:
    """Return the error for a code.

    Parameters
    ----------
    code, call
        The ``CUresult``, and the function that returned it.
    name, text
        CUDA's name and description of the code.
    device
        The device's index; -1 if it is not known.
    """
    message = f"{call}: {name} ({code}): {text}"
    if device >= 0:
        message = f"device {device}: {message}"
    if code in _CURES:
        message = f"{message}; {_CURES[code]}"
    kind = error_class(code)
    if kind is DeviceFault:
        return DeviceFault(message, code=code, call=call, device=device, operation=None)
    if kind is DeviceOutOfMemory:  # a caller that knows the sizes replaces it
        return DeviceOutOfMemory(message, code=code, call=call, requested=0, live=0, reserved=0, free=0)
    if kind is CompileError:
        return CompileError(message, code=code, call=call, log="")
    return kind(message, code=code, call=call)
