"""Kernels: CUDA C++ source or compiled code, with an optional host implementation for devices without a GPU."""

from __future__ import annotations

from ._kernel import Compilation, Kernel
from ._signature import Parameter, Signature

__all__ = ["Compilation", "Kernel", "Parameter", "Signature"]
