"""Integrations: await the GPU work of other libraries.

``aiocuda.integrations.torch``
    PyTorch.
``aiocuda.integrations.cupy``
    CuPy.
``aiocuda.integrations.numba``
    numba-cuda.
``aiocuda.integrations.cuda_core``
    cuda.core, NVIDIA's Python interface to CUDA.

Importing a module imports its library. This package itself imports none.
"""
