"""Host arrays: the host side of a copy, as a NumPy array over the caller's memory.

The caller passes a NumPy array, an object with the buffer protocol, or an object with ``__dlpack__`` in host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..._base._arrays import as_dtype
from ...completion._progress import check_awaited
from ...errors import InvalidArgumentError, InvalidTypeError, WrongDeviceError
from .._buffer import DeviceBuffer
from .._pinned import PinnedBuffer, PinnedPool, pinned_block_of
from . import _dlpack

__all__ = ["as_source", "as_target"]


def as_source(source: object, pool: PinnedPool | None = None) -> npt.NDArray[Any]:
    """Return the array to copy from: of an array, a scalar, or an object with a buffer or ``__dlpack__`` on the host.

    With ``pool``, the pinned memory of another library becomes a `PinnedBuffer`, which the device reads directly.
    """
    if not isinstance(source, np.ndarray):
        if isinstance(source, np.generic):
            source = np.asarray(source)
        elif isinstance(source, (bytes, bytearray)):
            source = np.frombuffer(source, np.uint8)
        else:
            source = _exported(source, "from", "a NumPy array, a CPU tensor, bytes or a memoryview", pool)
    _check_layout(source, "source")
    return source


def as_target(target: object, pool: PinnedPool | None = None) -> npt.NDArray[Any]:
    """Return the array to copy into: of a writable array, or an object with a writable buffer or ``__dlpack__``.

    ``pool`` is that of `as_source`.
    """
    if not isinstance(target, np.ndarray):
        target = _exported(target, "into", "a NumPy array, a CPU tensor or a writable memoryview", pool)
    _check_layout(target, "target")
    if not target.flags.writeable:
        if isinstance(target, PinnedBuffer):
            pinned_block_of(target)  # raises if it has been freed: then it is read-only for that reason
        raise InvalidArgumentError(
            f"the target array of shape {target.shape} {target.dtype} is read-only: pass a writable one, such as "
            "np.empty_like(a)"
        )
    return target


def _exported(thing: object, way: str, cure: str, pool: PinnedPool | None) -> npt.NDArray[Any]:
    """Return the memory that an object exports by the buffer protocol or by DLPack, as an array."""
    try:
        return np.asarray(memoryview(thing))  # type: ignore[arg-type]  # refusing is its job
    except (TypeError, ValueError, NotImplementedError):
        pass  # no buffer protocol
    check_awaited(thing, f"what is to be copied {way}")
    if isinstance(thing, DeviceBuffer):
        raise InvalidTypeError(
            f"{thing!r} is on the device already: copy it by stream.copy(target, buffer), or download it"
        )
    if hasattr(type(thing), "__dlpack__"):
        if _dlpack.is_on_host(thing):
            array, pinned = _dlpack.host_array(thing)
            return pool.borrow_pinned(array) if pinned and pool is not None else array
        _check_cuda(thing, way)
    if hasattr(thing, "__dlpack__") or hasattr(thing, "__cuda_array_interface__"):
        cure = f"the buffer that stream.adopt(x) makes of it; or {cure}"
    if isinstance(thing, (type, np.dtype)):
        cure = "an array: a copy has the dtype of its buffer, and array.astype(dtype) converts it"
    raise InvalidTypeError(f"cannot copy {way} {type(thing).__name__}: pass {cure}")


def _check_cuda(thing: Any, way: str) -> None:
    """Refuse an object that is neither in host memory nor on a device that `Stream.adopt` can use."""
    kind = int(thing.__dlpack_device__()[0])
    if kind not in (_dlpack.CUDA, _dlpack.CUDA_MANAGED, _dlpack.EXTENSION):
        raise WrongDeviceError(
            f"cannot copy {way} {type(thing).__name__} on {_dlpack.device_name(kind)}: bring it to host memory first"
        )


def _check_layout(array: npt.NDArray[Any], role: str) -> None:
    """Raise unless the array is C-contiguous and its dtype is one that a device can hold."""
    as_dtype(array.dtype)
    if array.flags.c_contiguous:
        return
    if array.flags.f_contiguous:
        cure = "it is in Fortran order: pass np.ascontiguousarray(a), or a.T if the kernel reads it so"
    else:
        cure = f"its strides are {array.strides}: pass np.ascontiguousarray(a)"
    raise InvalidArgumentError(f"the {role} array must be C-contiguous; {cure}", strides=array.strides)
