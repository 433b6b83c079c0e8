"""Kernels: CUDA C++ source, with an optional host implementation for devices without a GPU.

Files
    `_kernel`     `Kernel`
    `_source`     finds the declaration of a kernel in its source
    `_signature`  the parameters: C types, `struct` codes and dtypes
    `_binding`    checks and converts the arguments of a launch
    `_extent`     checks grid, block and shared memory of a launch
"""

from __future__ import annotations

from ._kernel import Kernel
from ._signature import Parameter, Signature

__all__ = ["Kernel", "Parameter", "Signature"]
