"""`compile_cuda`: CUDA C++ to a cubin, with NVRTC in a separate process, and with a cache on disk.

NVRTC runs in a process because it cannot be interrupted. A template with endless instantiation would block a worker
thread and fill the machine's memory. A process can have limits and can be killed. NVRTC also raises the stack limit of
its process, and overflows the stack on nested input. The process costs 20 ms per cache miss.

The result is a cubin and not PTX, because a driver does not accept PTX that is newer than itself. It runs any cubin of
its own major version for its architecture. Every driver from R580 on can therefore use the newest NVRTC.

The options are the architecture, C++17, the directories of headers, and those of the kernel, which name no file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing.spawn
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ..._base._extras import install
from ...errors import CompileError, CompilerNotFoundError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from ..protocol import CompiledKernel, CudaSource
from ._cache import ProgramCache

__all__ = ["COMPILE_SECONDS", "LOG_BYTES", "compile_cuda", "report_cuda"]

COMPILE_SECONDS: Final = 120.0
LOG_BYTES: Final = 64 << 10
_MESSAGE_CHARACTERS: Final = 2000
_MEMORY_BYTES: Final = 8 << 30
_CACHE_FORMAT: Final = 1  # to be increased when a key, an entry or an option changes its meaning

_ARCHITECTURE = re.compile(r"sm_[1-9][0-9]{1,2}[af]?")
_INCLUDE = re.compile(r"^[ \t]*(?:#|%:)[ \t]*include(?P<operand>\w*[^\n]*)", re.MULTILINE)
_MISSING = re.compile(r'cannot open source file "([^"]+)"')
_HOST_HEADER = re.compile(r"c?(?:math|stdio|stdlib|assert|float|limits|string|stddef)(?:\.h)?|iostream")
_SIZE = re.compile(r"PA(\d+)_c")  # in the mangled name of a function of a pointer to an array of char
_PLAIN_OPERAND = re.compile(r"""\s*[<"](?P<name>[^<>"]+)[>"]""")

# NVRTC has no system headers. These types are those of CUDA's <cuda/std/cstdint>, so that both can be included.
_STDINT: Final = """#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int64_t intptr_t;
typedef uint64_t uintptr_t;
"""


def compile_cuda(source: CudaSource, arch: str, *, timeout: float = COMPILE_SECONDS) -> CompiledKernel:
    """Return a kernel that is compiled for an architecture such as ``"sm_90"``. **May block.**

    The cache is not used for a source with its own include directories, or with an include by an absolute path or
    through a macro, because the included files may have changed.

    Raises
    ------
    CompileError
        The source does not compile, or not within ``timeout`` seconds or 8 GiB of memory.
    CompilerNotFoundError
        NVRTC is not installed, or there is no Python executable to run it in.
    UnsupportedError
        This NVRTC does not support the architecture.
    """
    library, options, cuda, is_fixed = _plan(source, arch)
    cache = ProgramCache.default()
    if cache is None or not is_fixed:
        return _compile(source, arch, library, options, timeout)[0]
    key = _key(source, options, library, cuda)
    entry = cache.get(key)
    if entry is None:
        compiled, _ = _compile(source, arch, library, options, timeout)
        words = (compiled.symbol, *map(str, compiled.sizes))
        cache.put(key, " ".join(words).encode() + b"\n" + compiled.image)
        return compiled
    line, _, image = entry.partition(b"\n")
    symbol, *sizes = line.decode().split(" ")
    return CompiledKernel(image, symbol, True, tuple(map(int, sizes)))


def report_cuda(source: CudaSource, arch: str) -> tuple[str, int, int]:
    """Return the compiler's log, the registers of a thread, and a block's bytes of static shared memory. **May block.**

    It raises what `compile_cuda` raises, and does not use the cache, which has no logs.
    """
    library, options, _, _ = _plan(source, arch)
    plain = dataclasses.replace(source, structures=())  # whose functions would be in the log
    compiled, log = _compile(plain, arch, library, [*options, "--ptxas-options=-v"], COMPILE_SECONDS)
    log = log.replace("\0", "")  # it is two logs
    used = log.partition(f"'{compiled.symbol}'")[2].partition("Compiling entry function")[0]
    registers, shared = re.search(r"Used (\d+) registers", used), re.search(r"(\d+) bytes smem", used)
    return log, int(registers[1]) if registers else 0, int(shared[1]) if shared else 0


def _plan(source: CudaSource, arch: str) -> tuple[str, list[str], tuple[str, ...], bool]:
    """Return NVRTC's path and options, CUDA's directories, and whether all included files are CUDA's own."""
    if not isinstance(arch, str):
        raise InvalidTypeError(f"{arch!r} is no architecture: it is a str such as 'sm_90', for compute capability 9.0")
    if not _ARCHITECTURE.fullmatch(arch):
        raise InvalidArgumentError(f"{arch!r} is no architecture: it takes one such as 'sm_90'")
    library = _library()
    own = source.include_dirs if source.includes else ()
    for directory in own:
        if not os.path.isdir(directory):
            raise InvalidArgumentError(f"include directory {directory!r} does not exist")
    operands = [match["operand"] for match in _INCLUDE.finditer(source.text)] if source.includes else []
    cuda = _cuda_headers() if operands else ()
    options = [f"--gpu-architecture={arch}", *(f"--include-path={path}" for path in (*own, *cuda)), *source.options]
    if not any(option.lstrip("-").startswith("std=") for option in source.options):
        options.append("--std=c++17")
    return library, options, cuda, not own and all(map(_is_known, operands))


def _library() -> str:
    """Return the path of NVRTC, or raise `CompilerNotFoundError` with the command that installs it."""
    missing = "NVRTC, which compiles kernels, is not installed"
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise CompilerNotFoundError(f"{missing}: {install('nvrtc')}") from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError as error:
        raise CompilerNotFoundError(f"{missing}: {install('nvrtc')}") from error
    return str(path)


def _cuda_headers() -> tuple[str, ...]:
    """Return the directories of CUDA's own headers that are installed."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = (find_nvidia_header_directory(name) for name in ("cudart", "cccl"))
    return tuple(dict.fromkeys(path for path in found if path is not None))


def _is_known(operand: str) -> bool:
    """True if the operand of an ``#include`` can only be one of CUDA's headers."""
    match = _PLAIN_OPERAND.match(operand)
    return match is not None and not os.path.isabs(match["name"]) and ".." not in match["name"]


def _key(source: CudaSource, options: list[str], library: str, headers: tuple[str, ...]) -> str:
    """Return a hash of everything that the cubin depends on."""
    # Two builds of NVRTC may have the same version, so its file is identified by size and time, as CUDA's headers are.
    status = os.stat(library)
    states = [(library, status.st_size, status.st_mtime_ns)]
    for directory in headers:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                status = entry.stat(follow_symlinks=False)
                states.append((entry.path, status.st_size, status.st_mtime_ns))
    parts = [_CACHE_FORMAT, _STDINT, source.name, source.text, source.includes, source.structures, options, states]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _measured(source: CudaSource) -> tuple[str, list[str]]:
    """Return functions to append to the source, and their names, which have the size of a structure when mangled.

    They are in the namespace of the kernel, so that a structure's name means the same there.
    """
    scopes = source.name.partition("<")[0].split("::")[:-1]
    texts = [
        f"__global__ void aiocuda_size_{index}(char (*)[sizeof({name})]) {{}}"
        for index, name in enumerate(source.structures)
    ]
    text = "".join(f"namespace {scope} {{ " for scope in scopes) + " ".join(texts) + " }" * len(scopes)
    return f"\n{text}\n" * bool(texts), ["::".join((*scopes, f"aiocuda_size_{at}")) for at in range(len(texts))]


def _compile(
    source: CudaSource, arch: str, library: str, options: list[str], timeout: float
) -> tuple[CompiledKernel, str]:
    """Return the kernel and the compiler's log."""
    measured, names = _measured(source)
    request = {
        "library": library,
        "names": [source.name, *names],
        "options": options,
        "headers": {"stdint.h": _STDINT, "cstdint": _STDINT} if source.includes and not source.include_dirs else {},
        "includes": source.includes,
        "memory": _MEMORY_BYTES,
    }
    try:
        done = _run(json.dumps(request).encode() + b"\n" + (source.text + measured).encode(), timeout)
    except subprocess.TimeoutExpired:
        message = f"kernel {source.name!r} did not compile within {timeout:g} s, and its compilation was stopped"
        raise CompileError(message, log="") from None
    header, end, image = done.stdout.partition(b"\n")
    answer: dict[str, Any] = json.loads(header) if end else {"size": None}
    if len(image) != answer["size"]:
        words = done.stderr.decode(errors="replace").strip()
        raise CompileError(
            f"the compiler of kernel {source.name!r} {_ending(done.returncode)}: {words[-_MESSAGE_CHARACTERS:]}",
            log=_cut(words),
        )
    log = _cut(answer["log"])
    if answer["result"] == "NVRTC_SUCCESS":
        symbol, *mangled = answer["symbols"]
        return CompiledKernel(image, symbol, sizes=tuple(int(_SIZE.findall(each)[-1]) for each in mangled)), log
    if answer["result"] == "NVRTC_ERROR_INVALID_OPTION":
        chosen = f" with {' '.join(source.options)}" if source.options else ""
        raise UnsupportedError(
            f"the NVRTC at {library} does not compile for {arch}{chosen}: {log.strip()}. The lowest of CUDA 13 is sm_75"
        )
    closed = "" if source.includes else " (includes=False, so it can open no file)"
    cure = ""
    if source.includes and (missing := _MISSING.search(log)):
        cure = f"\nname the directory of {missing[1]}: Kernel(…, include_dirs=[path])"
        if _HOST_HEADER.fullmatch(missing[1]):
            cure = (
                f"\nNVRTC has no headers of the host: leave {missing[1]} out. Math functions, printf and assert are "
                "built in, and the limits of types are in CUDA's <cuda/std/limits>"
            )
    raise CompileError(
        f"kernel {source.name!r} does not compile for {arch}{closed}: {answer['result']}\n"
        f"{log[:_MESSAGE_CHARACTERS]}{cure}",
        log=log,
    )


def _run(request: bytes, timeout: float) -> subprocess.CompletedProcess[bytes]:
    """Run `_nvrtc.py` in a separate process."""
    cure = "multiprocessing.set_executable() names a Python to compile kernels with, in a process of its own"
    executable = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    if not executable or (getattr(sys, "frozen", False) and executable == sys.executable):
        raise CompilerNotFoundError(f"this program is no Python executable: {cure}")
    script = Path(__file__).with_name("_nvrtc.py")
    # Ctrl-C interrupts this program, and not the compiler: it is therefore in another process group.
    group: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
    try:
        return subprocess.run(
            [executable, "-I", "-S", os.fspath(script)],
            input=request,
            capture_output=True,
            check=False,
            timeout=timeout,
            cwd=script.parent,  # `#include "x.h"` looks here first; the directory has no headers
            **group,
        )
    except OSError as error:
        raise CompilerNotFoundError(f"{executable} cannot be started ({error.strerror}): {cure}") from error


def _ending(status: int) -> str:
    """Return a description of the end of a process that sent no answer."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"


def _cut(log: str) -> str:
    """Return the beginning of a log: later errors are often consequences of the first."""
    encoded = log.encode()
    if len(encoded) <= LOG_BYTES:
        return log
    mark = "\n… cut here"
    return encoded[: LOG_BYTES - len(mark.encode())].decode(errors="ignore") + mark
