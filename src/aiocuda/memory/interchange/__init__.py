"""Interchange: device memory and streams that aiocuda shares with other libraries.

``_dlpack``
    DLPack capsules: made, read and taken.
``_array_interface``
    ``__cuda_array_interface__``: written and read.
``_exports``
    Our buffers in other libraries.
``_foreign``
    Memory of other libraries that our buffers use: `aiocuda.Stream.adopt`.
``_host_arrays``
    The host side of a copy as an array: NumPy's, the buffer protocol's, or DLPack's.
``_loan``
    Our streams, lent to other libraries.
``_streams``
    Streams of other libraries, found by CUDA's handle.

Memory lies below this package. It calls `Exports` through the protocols `BufferExports` and `HostExports`, and
`ForeignMemory` through `AdoptedMemory`.
"""
