"""The methods about kernels: compile, load, launch."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..._base._types import Dim3, Span
from ...errors import CompileError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ..protocol import CompiledKernel, CudaSource, Launcher, Program
from . import _abi
from ._core import ANY_DEVICE, Core, OpenDevice, StreamInfo
from ._entry import Word, reference, word

__all__ = ["BoundLaunch", "CudaCode", "parameter_layout"]


@dataclasses.dataclass(slots=True)
class _Function:
    """A kernel that is loaded on one device."""

    device: int
    name: str
    handle: int  #: ``CUfunction``
    owner: object  #: keeps a kernel of another library loaded
    format: str  #: as `Program.format`
    pack: struct.Struct
    offsets: tuple[int, ...]
    dynamic_limit: int  #: the current limit of dynamic shared memory of a launch, in bytes

    def allow(self, shared_bytes: int) -> None:
        """CUDA allows so many bytes of dynamic shared memory for a launch."""
        self.dynamic_limit = shared_bytes


@dataclasses.dataclass(slots=True)
class BoundLaunch:
    """The arguments of ``cuLaunchKernelEx``, converted, and the buffer for those of the kernel."""

    stream: StreamInfo
    pack_into: Callable[..., None]
    buffer: ctypes.Array[ctypes.c_char]
    config: Word
    kernel: Word
    parameters: Word | None  #: None for a kernel without parameters
    addresses: tuple[int, int, int]  #: of the configuration, of the function, and of the array of parameters or 0
    places: tuple[tuple[str, int], ...]  #: the letter and the address of each parameter


def parameter_layout(format: str) -> tuple[struct.Struct, tuple[tuple[int, int], ...]]:
    """Return the C layout of a kernel's parameters: a `struct.Struct`, and the (offset, size) of each parameter."""
    places = []
    for at, letter in enumerate(format):
        size = struct.calcsize("@" + letter)
        places.append((struct.calcsize("@" + format[: at + 1]) - size, size))
    return struct.Struct("@" + format), tuple(places)


class CudaCode(Core):
    """`aiocuda.driver.protocol.Code`."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        self._functions: dict[int, _Function] = {}
        self._shared_lock = threading.Lock()

    @property
    def wants_image(self) -> bool:
        """True: a GPU runs compiled code only."""
        return True

    def compile(self, device: int, source: CudaSource) -> CompiledKernel:
        opened = self.opened(device)
        from ._compiler import compile_cuda  # imported here, because few programs compile

        major, minor = opened.properties.compute_capability
        return compile_cuda(source, f"sm_{major}{minor}")

    def load(self, device: int, program: Program) -> int:
        """Load a kernel and return a function handle that stays valid as long as the driver. **May block.**

        The code is on the device when this returns, with any value of ``CUDA_MODULE_LOADING``. The layout of its
        parameters is compared with ``program.format``.
        """
        opened = self.opened(device)
        if program.loaded is not None:
            with opened.current:
                function = self._function(opened, program.loaded.handle, program)
        elif program.image is not None and program.symbol is not None:
            with opened.current:
                function = self._load_image(opened, program.image, program.symbol, program)
        else:
            raise UnsupportedError(f"kernel {program.name!r} has no CUDA image: give it a source")
        self.call_count += 1
        # Not CUDA's handle: a kernel of another library may be loaded twice, with different types of equal size.
        handle = next(self.handles)
        self._functions[handle] = function
        return handle

    def _load_image(self, opened: OpenDevice, image: bytes, symbol: str, program: Program) -> _Function:
        library = ctypes.c_uint64()
        code = self.release_gil.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0)
        self.check_code("cuLibraryLoadData", code, opened.index)
        try:
            return self._function(opened, self._find(opened, library.value, symbol, program), program)
        except BaseException:
            self.release_gil.cuLibraryUnload(library.value)
            raise

    def _find(self, opened: OpenDevice, library: int, symbol: str, program: Program) -> int:
        kernel = ctypes.c_uint64()
        code = self.release_gil.cuLibraryGetKernel(ctypes.byref(kernel), library, symbol.encode())
        if code == _abi.CUDA_ERROR_NOT_FOUND:
            raise CompileError(
                f"the image of kernel {program.name!r} has no symbol {symbol!r}: "
                "is it declared __global__, under this name?",
                code=code,
                call="cuLibraryGetKernel",
                log="",
            )
        self.check_code("cuLibraryGetKernel", code, opened.index)
        return kernel.value

    def _function(self, opened: OpenDevice, kernel: int, program: Program) -> _Function:
        """Return the function of a ``CUkernel`` in the current context, with its code on the device."""
        function = ctypes.c_uint64()
        code = self.release_gil.cuKernelGetFunction(ctypes.byref(function), kernel)
        self.check_code("cuKernelGetFunction", code, opened.index)
        code = self.release_gil.cuFuncLoad(function.value)  # else the first launch would load the code and block
        self.check_code("cuFuncLoad", code, opened.index)
        pack, places = parameter_layout(program.format)
        self._check_layout(opened, function.value, program, places)
        limit = self._dynamic_limit(opened, function.value)
        offsets = tuple(offset for offset, _ in places)
        return _Function(
            opened.index, program.name, function.value, program.loaded, program.format, pack, offsets, limit
        )

    def _dynamic_limit(self, opened: OpenDevice, function: int) -> int:
        limit = ctypes.c_int()
        code = self.release_gil.cuFuncGetAttribute(
            ctypes.byref(limit), _abi.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function
        )
        self.check_code("cuFuncGetAttribute", code, opened.index)
        return limit.value

    def _check_layout(
        self, opened: OpenDevice, function: int, program: Program, places: Sequence[tuple[int, int]]
    ) -> None:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for at in range(len(places) + 1):
            code = self.release_gil.cuFuncGetParamInfo(function, at, ctypes.byref(offset), ctypes.byref(size))
            if code and code != _abi.CUDA_ERROR_INVALID_VALUE:
                self.fail("cuFuncGetParamInfo", code, opened.index)
            exists = not code
            if at == len(places):
                if exists:
                    raise InvalidTypeError(
                        f"kernel {program.name!r} takes more than the {at} parameters of its format {program.format!r}",
                        parameter=at,
                    )
            elif not exists:
                raise InvalidTypeError(
                    f"kernel {program.name!r} takes {at} parameters, its format {program.format!r} has {len(places)}",
                    parameter=at,
                )
            elif (offset.value, size.value) != places[at]:
                raise InvalidTypeError(
                    f"parameter {at} of kernel {program.name!r} has {size.value} bytes at offset {offset.value}, but "
                    f"{program.format[at]!r} in its format {program.format!r} has {places[at][1]} at {places[at][0]}",
                    parameter=at,
                )

    def argument(self, span: Span) -> int:
        """Return a buffer's address."""
        return span.address

    def launcher(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> Launcher:
        """Bind everything that does not change from launch to launch.

        A launch packs the arguments into a buffer that is created here, and makes one call with four addresses: 0.5 µs
        of Python and `ctypes` for two pointers and two scalars. CUDA copies the arguments before the call returns.
        """
        bound = self.bind_launch(stream, function, grid, block, shared_bytes)
        info, pack_into, buffer = bound.stream, bound.pack_into, bound.buffer
        config, kernel, parameters = bound.config, bound.kernel, bound.parameters

        def launch(arguments: Sequence[Any]) -> None:
            if parameters is not None:
                pack_into(buffer, 0, *arguments)
            code = info.calls.cuLaunchKernelEx(config, kernel, parameters, None)
            if code:
                self.fail("cuLaunchKernelEx", code, info.device)
            self.call_count += 1

        return launch

    def bind_launch(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> BoundLaunch:
        """Check a launch, and convert everything that does not change from launch to launch."""
        info = self.stream_info(stream)
        known = self._functions.get(function)
        if known is None:
            raise self.unknown_handle("function", function)
        if info.device not in (known.device, ANY_DEVICE):
            raise WrongDeviceError(
                f"kernel {known.name!r} is loaded on device {known.device}, the stream is of device {info.device}"
            )
        self.check()
        if shared_bytes > known.dynamic_limit:
            self._raise_limit(known, shared_bytes)

        buffer = ctypes.create_string_buffer(max(known.pack.size, 1))
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(known.offsets))(*(start + offset for offset in known.offsets))
        config = _abi.CUlaunchConfig(*grid, *block, shared_bytes, info.handle, None, 0)
        parameters = reference(pointers) if known.offsets else None
        places = tuple((letter, start + offset) for letter, offset in zip(known.format, known.offsets, strict=True))
        addresses = ctypes.addressof(config), known.handle, ctypes.addressof(pointers) if known.offsets else 0
        return BoundLaunch(
            info, known.pack.pack_into, buffer, reference(config), word(known.handle), parameters, addresses, places
        )

    def _raise_limit(self, known: _Function, shared_bytes: int) -> None:
        opened = self.opened(known.device)
        with self._shared_lock, opened.current:
            # Another thread, or another handle of the same function, may have raised the limit. It is never lowered.
            known.allow(self._dynamic_limit(opened, known.handle))
            if shared_bytes <= known.dynamic_limit:
                return
            code = self.release_gil.cuFuncSetAttribute(
                known.handle, _abi.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
            if code == _abi.CUDA_ERROR_INVALID_VALUE:
                self.call_count += 1
                raise InvalidArgumentError(
                    f"kernel {known.name!r} cannot have {shared_bytes:,} bytes of dynamic shared memory: a block has "
                    f"{opened.properties.max_shared_bytes:,}, what the kernel declares itself included",
                    code=code,
                    call="cuFuncSetAttribute",
                )
            self.check_code("cuFuncSetAttribute", code, known.device)
            known.allow(shared_bytes)
        self.call_count += 1
