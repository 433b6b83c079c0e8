"""Kernels: CUDA C++ source, with an optional NumPy twin for machines without a GPU."""

from __future__ import annotations

from .kernel import Kernel
from .signature import Parameter, Signature

__all__ = ["Kernel", "Parameter", "Signature"]
