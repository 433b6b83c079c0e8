"""One compilation, in a separate process. `_compiler` runs this file as a script; no module imports it.

A small kernel takes 50 ms from the start of the process to its cubin, of which NVRTC takes 30. This script therefore
uses only ctypes, and not even `site`: an import of cuda.bindings would increase the time to 110 ms. It also does not
depend on the parent's ``sys.path``.

stdin
    A JSON object on one line, then the source.
stdout
    A JSON object on one line with ``result``, ``log``, ``symbols`` and ``size``, then the cubin.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

_POINTER = ctypes.c_void_p


def main() -> None:
    """Read the request, compile, write the answer."""
    header, _, text = sys.stdin.buffer.read().partition(b"\n")
    request = json.loads(header)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # NVRTC may print; stdout is for the answer only
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: no compilation outlives its program
    nvrtc = ctypes.CDLL(request["library"])
    _load_builtins(nvrtc, os.path.dirname(request["library"]))
    _limit_memory(request["memory"])
    if not request["includes"]:
        _compile(nvrtc, b"", [], {}, [])  # loads all files that NVRTC needs
        _forbid_files()
    result, log, symbols, image = _compile(nvrtc, text, request["options"], request["headers"], request["names"])
    header = json.dumps({"result": result, "log": log, "symbols": symbols, "size": len(image)}).encode()
    answer.write(header + b"\n" + image)
    answer.close()


def _load_builtins(nvrtc: ctypes.CDLL, folder: str) -> None:
    """Load the library that NVRTC opens by its name. The wheels of NVRTC 13.0 do not find it in their own folder."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    path = os.path.join(folder, f"libnvrtc-builtins.so.{major.value}.{minor.value}")
    if os.path.exists(path):
        ctypes.CDLL(path)


def _compile(
    nvrtc: ctypes.CDLL, text: bytes, options: list[str], headers: dict[str, str], names: list[str]
) -> tuple[str, str, list[str], bytes]:
    """Return (result, log, mangled names, cubin). Without names there is no cubin."""
    program = _POINTER()
    count = len(headers)
    result = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, b"kernel.cu", count, _strings([*headers.values()]), _strings([*headers])
    )
    for name in names:
        result = result or nvrtc.nvrtcAddNameExpression(program, name.encode())
    log = image = b""
    symbols = []
    if result == 0:
        result = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)[:-1]
        if result == 0 and names:
            image = _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            for name in names:
                symbol = ctypes.c_char_p()
                result = result or nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(symbol))
                symbols.append((symbol.value or b"").decode())
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    words = nvrtc.nvrtcGetErrorString(result).decode()
    return words, log.decode(errors="replace"), symbols, image


def _strings(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*[os.fsencode(value) for value in values])


def _bytes(program: ctypes.c_void_p, get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def _limit_memory(size: int) -> None:
    # A template with endless instantiation fills the machine's memory before the time limit ends.
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _forbid_files() -> None:
    # The operating system enforces it: descriptors 0 to 2 are open, and no other can be opened.
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


if __name__ == "__main__":
    main()
