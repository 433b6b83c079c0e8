"""`Library`: libcuda, loaded, checked and initialised."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from typing import Final

from ...errors import AiocudaError, DriverError, DriverNotAvailableError, ForkedProcessError
from .._codes import FAULTS, translate
from ._entry import Calls, resolve

__all__ = ["FORKED", "MINIMUM_VERSION", "MOST_QUEUES", "QUEUES", "Library", "queues_for"]

#: CUDA 13.0, NVIDIA driver R580. cuda-python 13 and the code of its compiler need it.
MINIMUM_VERSION: Final = 13000

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT_QUEUES: Final = 8  # the default of the NVIDIA driver
MOST_QUEUES: Final = 32  #: the most hardware queues that the NVIDIA driver supports

FORKED: Final = (
    "CUDA was initialised before fork() and does not work in the child: start the child with 'spawn', "
    "or open devices in the child only"
)

_lock = threading.Lock()
_initialised_by: int | None = None  # the process in which cuInit was called


class Library:
    """libcuda, initialised.

    Parameters
    ----------
    path
        The library to load instead of the system's.

    Raises
    ------
    DriverNotAvailableError
        There is no driver, it is too old, or it finds no GPU.
    DriverError
        There is a driver, and it does not work.
    """

    def __init__(self, path: str | None = None) -> None:
        global _initialised_by
        if _initialised_by not in (None, os.getpid()):
            raise ForkedProcessError(FORKED)
        self.path: Final = path or ("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        try:
            library = ctypes.CDLL(self.path)
        except OSError as error:
            raise DriverNotAvailableError(f"no NVIDIA driver: {error}") from error
        self.version: Final = _version(library)
        if self.version < MINIMUM_VERSION:
            raise DriverNotAvailableError(
                f"the NVIDIA driver is too old: it supports CUDA {version_text(self.version)}, and "
                f"{version_text(MINIMUM_VERSION)} (driver R580) is needed"
            )
        self.addresses: Final[Mapping[str, int]] = resolve(library)
        #: They release the GIL, because `cuInit` and the calls made here may take seconds.
        self.calls: Final = Calls.releasing(self.addresses)
        _initialised_by = os.getpid()  # before the lock: a child that is forked now must not wait for it
        try:
            with _lock:
                self.hardware_queues: Final = self._initialise()
        except BaseException:
            _initialised_by = None  # nothing was initialised, so a forked child may try
            raise

    def _initialise(self) -> int:
        """Call ``cuInit`` and return the number of hardware queues of each device.

        It is CUDA's default if other code has started CUDA before, without the variable.
        """
        wanted = os.environ.get(QUEUES)
        if wanted is not None:
            self._init()
            return queues_for(wanted)
        context = ctypes.c_void_p()
        active = self.calls.cuCtxGetCurrent(ctypes.byref(context)) == 0 and bool(context.value)
        os.environ[QUEUES] = str(MOST_QUEUES)  # cuInit reads it: os.environ calls putenv
        try:
            self._init()
            active = active or any(self._is_active(device) for device in range(self.device_count()))
        except BaseException:
            del os.environ[QUEUES]
            raise
        if not active:
            return MOST_QUEUES
        del os.environ[QUEUES]  # it had no effect, so no other code should read it
        return _DEFAULT_QUEUES

    def _init(self) -> None:
        code = self.calls.cuInit(0)
        if code:
            raise self._error("cuInit", code)

    def _error(self, call: str, code: int) -> AiocudaError:
        name, text = self.describe(code)
        if code in FAULTS:  # no work has run yet, so this is no fault: the installation is broken
            return DriverError(
                f"{call}: {name} ({code}): {text}; the driver or its kernel module does not work: see nvidia-smi",
                code=code,
                call=call,
            )
        return translate(code, call, name, text)

    def _is_active(self, device: int) -> bool:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        code = self.calls.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        return code == 0 and bool(active.value)

    def device_count(self) -> int:
        """Return the number of devices. ``cuDeviceGetCount``."""
        count = ctypes.c_int()
        code = self.calls.cuDeviceGetCount(ctypes.byref(count))
        if code:
            raise self._error("cuDeviceGetCount", code)
        return count.value

    def describe(self, code: int) -> tuple[str, str]:
        """Return CUDA's name and description of a code. The calls use no device, so they work after a fault."""
        found = []
        for call in (self.calls.cuGetErrorName, self.calls.cuGetErrorString):
            text = ctypes.c_char_p()
            unknown = call(code, ctypes.byref(text)) or text.value is None
            found.append("" if unknown or text.value is None else text.value.decode(errors="replace"))
        return found[0] or "CUresult", found[1] or "a code that this driver does not describe"


def version_text(version: int) -> str:
    """Return a CUDA version as text: ``"13.2"`` for 13020."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(library: ctypes.CDLL) -> int:
    version = ctypes.c_int()
    library.cuDriverGetVersion.restype = ctypes.c_int
    library.cuDriverGetVersion.argtypes = [ctypes.c_void_p]
    code = library.cuDriverGetVersion(ctypes.byref(version))
    if code:
        raise DriverNotAvailableError(f"cuDriverGetVersion answered {code}: the NVIDIA driver is not working")
    return version.value


def queues_for(wanted: str) -> int:
    """Return the number of hardware queues for a value of ``CUDA_DEVICE_MAX_CONNECTIONS``."""
    try:
        return min(max(int(wanted), 1), MOST_QUEUES)
    except ValueError:
        return _DEFAULT_QUEUES
