"""Compiles the kernels of reduce and all_reduce: ``python -m tests.coordination.reductions`` writes their PTX."""

from __future__ import annotations

import re
from pathlib import Path

import aiocuda.coordination

__all__ = ["PTX", "compiled", "main", "version"]

_FOLDER = Path(aiocuda.coordination.__file__).parent
PTX = _FOLDER / "_reductions.ptx"


def compiled() -> str:
    """Return the PTX of `_reductions.cu` for compute_80, in the oldest version of PTX that has its instructions."""
    from cuda.bindings import nvrtc

    def check(result: tuple[object, ...]) -> object:
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    source = (_FOLDER / "_reductions.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"_reductions.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_80"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = bytearray(check(nvrtc.nvrtcGetPTXSize(program)))  # type: ignore[call-overload]  # it is an int
    check(nvrtc.nvrtcGetPTX(program, text))
    ptx = text.rstrip(b"\0").decode()
    return re.sub(r"^\.version .*$", ".version 7.0", ptx, flags=re.MULTILINE)


def version() -> tuple[int, int]:
    """Return the version of NVRTC."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def main() -> None:
    """Write the PTX."""
    PTX.write_text(compiled())


if __name__ == "__main__":
    main()
