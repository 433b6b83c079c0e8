"""Kernels: CUDA C++ source, with an optional NumPy twin for machines without a GPU."""

from __future__ import annotations

from ._kernel import Kernel
from ._signature import Parameter, Signature

__all__ = ["Kernel", "Parameter", "Signature"]
