"""Compiles the kernels of reduce and all_reduce: ``python -m tests.coordination.reductions`` writes their PTX."""

from __future__ import annotations

import hashlib
import lzma
import re
from pathlib import Path

import aiocuda.coordination

__all__ = ["PTX", "SOURCE", "compiled", "main", "stamped"]

_FOLDER = Path(aiocuda.coordination.__file__).parent
SOURCE = _FOLDER / "_reductions.cu"
PTX = _FOLDER / "_reductions.ptx.xz"


def compiled() -> str:
    """Return the PTX of `_reductions.cu` for compute_75, in the oldest version of PTX for that."""
    from cuda.bindings import nvrtc

    def check(result: tuple[object, ...]) -> object:
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    program = check(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []))
    options = [b"--gpu-architecture=compute_75"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = bytearray(check(nvrtc.nvrtcGetPTXSize(program)))  # type: ignore[call-overload]  # it is an int
    check(nvrtc.nvrtcGetPTX(program, text))
    ptx = text.rstrip(b"\0").decode()
    return re.sub(r"^\.version .*$", ".version 6.3", ptx, flags=re.MULTILINE)


def stamped(source: bytes, ptx: str) -> str:
    """Return PTX behind a line with the hash of its source and its text: a test compares them without a compiler."""
    digest = hashlib.sha256(source + b"\0" + ptx.encode()).hexdigest()
    return f"// SHA-256 of {SOURCE.name} and of the lines below: {digest}\n{ptx}"


def main() -> None:
    """Write the PTX, compressed."""
    ptx = stamped(SOURCE.read_bytes(), compiled())
    PTX.write_bytes(lzma.compress(ptx.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
