"""Code: from a kernel's source to a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from ..._types import Dim3, Span

#: Launches with the arguments given, in stream order. Made once, called often.
Launcher: TypeAlias = Callable[[Sequence[Any]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class CudaSource:
    """CUDA C++ source of one kernel. It is code, as trusted as the program that holds it."""

    name: str  #: the kernel's name, as written in the source
    text: str
    include_dirs: tuple[str, ...] = ()
    includes: bool = True  #: False refuses every ``#include``


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What a driver needs to load one kernel. A driver takes what it can run."""

    name: str
    format: str  #: parameters as `struct` codes with native alignment, pointers as ``P``: ``"fPPi"``
    image: bytes | None = None  #: cubin or PTX
    symbol: str | None = None  #: the kernel's name in ``image``, mangled
    host: Callable[..., object] | None = None  #: the NumPy twin
    host_takes_grid: bool = False  #: the twin wants the keyword arguments ``grid`` and ``block``
    host_seconds: float | None = None  #: modelled time of one launch
    read_only: frozenset[int] = frozenset()  #: parameters that point to what the kernel only reads


class Code(Protocol):
    """Verbs about kernels."""

    @property
    def wants_image(self) -> bool:
        """Does `load` need `Program.image`? If not, it needs `Program.host`."""

    def compile(self, device: int, source: CudaSource) -> tuple[bytes, str]:
        """(image, mangled symbol) for a device's architecture. **May block.** ``nvrtcCompileProgram``.

        Asks the disk cache first. `CompileError` with the log, or `CompilerNotFoundError`. Only where
        `wants_image`.
        """

    def load(self, device: int, program: Program) -> int:
        """A function handle that lives as long as the driver. **May block.**

        ``cuLibraryLoadData``, ``cuLibraryGetKernel``, ``cuKernelGetFunction``: the code is on the device when
        this returns, so that a launch never loads. Image and format that do not agree: `InvalidTypeError`.
        Nothing to run: `UnsupportedError`.
        """

    def argument(self, span: Span) -> object:
        """What a launch takes for a buffer. Asked once per buffer, so that a launch is cheap."""

    def launcher(self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int) -> Launcher:
        """Bind all that does not change from launch to launch. ``cuLaunchKernelEx``.

        The launcher takes one value per letter of `Program.format`, `argument`'s for a pointer. It belongs to
        one thread at a time. The values' types and ranges have been checked by the caller.
        """
