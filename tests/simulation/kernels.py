"""The kernels of random programs. All programs share them: a kernel is loaded once on each device."""

from __future__ import annotations

from typing import Final

import numpy as np

from aiocuda.kernels import Kernel
from aiocuda.testing import kernels

__all__ = ["AFFINE", "BLEND"]

#: ``affine(data, n, factor, term)``: data = factor × data + term.
AFFINE: Final = Kernel(kernels.AFFINE.name, source=kernels.AFFINE.source, host=kernels.AFFINE.host)

#: ``blend(target, source, term, n)``: target = 3 × source + term.
BLEND: Final = Kernel(
    "blend",
    source="""
    extern "C" __global__ void blend(unsigned int* target, const unsigned int* source, unsigned int term, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) target[i] = 3u * source[i] + term;
    }
    """,
    host=lambda target, source, term, n: np.copyto(target, source * np.uint32(3) + np.uint32(term)),
)
