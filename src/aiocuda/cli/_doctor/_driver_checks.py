"""Checks of the driver, versions, compiler, hardware queues and pinned memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from typing import Final

from ... import __version__
from ..._base._extras import install
from ..._base._off_loop import off_loop
from ...driver.cuda import MINIMUM_VERSION, MOST_QUEUES, QUEUES, compile_cuda, queues_for, version_text
from ...driver.protocol import CudaSource
from ...errors import CompilerNotFoundError, DriverNotAvailableError, InvalidArgumentError
from ._finding import Problem, Result
from ._machine import PINNED_BYTES, Machine

__all__ = ["REQUIRED", "check_driver", "check_nvrtc", "check_pinned", "check_queues", "check_versions"]

#: The oldest versions that work. On other systems and without CUDA, those of ``cuda-`` and ``nvidia-`` may be missing.
REQUIRED: Final = {"numpy": "2.1", "anyio": "4.6", "structlog": "24.4"}
REQUIRED_FOR_CUDA: Final = {"cuda-pathfinder": "1.2.3", "cuda-bindings": "12.9", "nvidia-cuda-nvrtc": "13"}

#: Packages that are shown if they are installed.
SHOWN: Final = ("cuda-core", "torch", "cupy-cuda13x", "numba-cuda", "uvloop")

#: Packages that start CUDA themselves, for example to load a model.
OTHERS: Final = ("torch", "cupy-cuda13x", "numba-cuda")

#: Seconds for the compilation of a kernel of one line.
COMPILE_SECONDS: Final = 20.0

#: An architecture that every NVRTC 13 compiles for. It is used if there is no GPU.
ARCHITECTURE: Final = "sm_90"

#: Linux's default of ``RLIMIT_MEMLOCK`` since version 5.16.
LEAST_LOCKED_BYTES: Final = 8 << 20

_KERNEL: Final = 'extern "C" __global__ void doctor(int *x) { *x = 1; }'


async def check_driver(machine: Machine) -> Result:
    """Check that the driver and its first device answer. A missing GPU is a problem only if CUDA is asked for."""
    if machine.error is not None:
        return Result([], [Problem(_text(machine.error), _driver_cure(machine, machine.error))])
    if machine.reason is not None:
        return _without_cuda(machine, machine.reason)
    return Result([_device(machine)])


def _device(machine: Machine) -> str:
    assert machine.properties is not None
    answered = f"{machine.properties.name} answers within {machine.ping_seconds * 1e3:.2f} ms"
    return f"the {machine.used} driver is used; {answered}"


def _without_cuda(machine: Machine, reason: str) -> Result:
    if machine.asked == "cuda":
        return Result([], [Problem(f"CUDA is not available: {reason}", _missing_cure(machine))])
    used = _device(machine)
    if machine.has_usable_gpu:
        problem = f"there is a GPU ({machine.gpu_files[0]}), and CUDA is not available: {reason}"
        return Result([used], [Problem(problem, _missing_cure(machine))])
    return Result([f"no GPU is used: {reason}", used])


def _missing_cure(machine: Machine) -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return "unset CUDA_VISIBLE_DEVICES, or set it to the number of a GPU that `nvidia-smi -L` lists"
    if not _has("cuda.pathfinder"):
        return 'pip install "cuda-pathfinder>=1.2.3"'
    install = "install NVIDIA's driver R580 or newer, until `nvidia-smi` lists the GPU"
    if machine.has_usable_gpu:
        return f"{install}; in a container, start it with the GPU: docker run --gpus all"
    return f"without a GPU, use --driver host or AIOCUDA_DRIVER=host; with one, {install}"


def _driver_cure(machine: Machine, error: Exception) -> str:
    if isinstance(error, InvalidArgumentError):
        named = re.findall(r"\bAIOCUDA_[A-Z_]+", str(error)) or ["AIOCUDA_DRIVER"]
        return f"unset the variable: env {' '.join(f'-u {name}' for name in dict.fromkeys(named))} aiocuda doctor"
    if isinstance(error, DriverNotAvailableError):
        return _missing_cure(machine)
    if machine.asked in ("host", "simulated") or machine.used == "host":
        return "run `aiocuda info --driver host`, and report its output with this error"
    return (
        "run `nvidia-smi`: if it fails too, load the kernel module (sudo modprobe nvidia) or restart the machine; "
        "otherwise end the processes that it lists, and look for errors with `dmesg | grep -i -e nvrm -e xid`"
    )


async def check_versions(machine: Machine) -> Result:
    """Check the versions of Python's packages, and the CUDA version of the driver against them."""
    facts = [f"aiocuda {__version__}", f"Python {platform.python_version()}"]
    problems = []
    for name, least in {**REQUIRED, **REQUIRED_FOR_CUDA}.items():
        version, for_cuda = _installed(name), name in REQUIRED_FOR_CUDA
        if version is not None:
            facts.append(f"{name} {version}")
            if _numbers(version) < _numbers(least):
                problems.append(Problem(f"{name} {version} is older than {least}", f'pip install "{name}>={least}"'))
        elif not for_cuda:
            problems.append(Problem(f"{name} is not installed", f'pip install "{name}>={least}"'))
        elif machine.needs_cuda and name == "cuda-pathfinder":  # NVRTC has a finding of its own
            problems.append(Problem("cuda-pathfinder is not installed", 'pip install "cuda-pathfinder>=1.2.3"'))
    facts += [f"{name} {version}" for name in SHOWN if (version := _installed(name)) is not None]
    problems += _against_driver(machine, facts)
    return Result(facts, problems)


def _against_driver(machine: Machine, facts: list[str]) -> list[Problem]:
    """Return the packages that are made for a newer CUDA than the driver's. Adds the driver's version to the facts."""
    supported = machine.versions.get("cuda-driver")
    if supported is None:
        return []
    facts.append(f"the NVIDIA driver supports CUDA {supported}, and {version_text(MINIMUM_VERSION)} is needed")
    major = _numbers(supported)[0]
    return [
        Problem(
            f"{name} {version} is made for CUDA {_numbers(version)[0]}, and the driver supports CUDA {supported}",
            f'pip install "{name}<{major + 1}", or install a newer NVIDIA driver',
        )
        for name in REQUIRED_FOR_CUDA
        if name != "cuda-pathfinder" and (version := _installed(name)) is not None and _numbers(version)[0] > major
    ]


async def check_nvrtc(machine: Machine) -> Result:
    """Compile a kernel, without the cache. Without a GPU, a missing compiler is no problem."""
    arch = ARCHITECTURE
    if machine.used == "cuda" and machine.properties is not None:
        arch = "sm_{}{}".format(*machine.properties.compute_capability)
    # A source with include directories is not cached, so this is a compilation at each run.
    source = CudaSource("doctor", _KERNEL, include_dirs=(os.path.dirname(__file__),))
    try:
        compiled = await off_loop(lambda: compile_cuda(source, arch, timeout=COMPILE_SECONDS))
    except CompilerNotFoundError as error:
        if not machine.needs_cuda:
            return Result([f"{error}; the host driver needs no compiler"])
        return Result([], [Problem(str(error), _compiler_cure(error))])
    except Exception as error:  # noqa: BLE001 - the finding shows it
        cure = 'pip install --force-reinstall "nvidia-cuda-nvrtc>=13"'
        return Result([], [Problem(f"NVRTC does not compile for {arch}: {_text(error)}", cure)])
    version = _installed("nvidia-cuda-nvrtc")
    found = f"nvidia-cuda-nvrtc {version}" if version else "the NVRTC of a CUDA toolkit"
    return Result([f"{found} compiles a kernel for {arch} ({len(compiled.image):,} bytes)"])


def _compiler_cure(error: CompilerNotFoundError) -> str:
    if "set_executable" in str(error):
        return f"multiprocessing.set_executable({sys.executable!r}), before the first kernel"
    return install("nvrtc")


async def check_queues(machine: Machine) -> Result:
    """Check ``CUDA_DEVICE_MAX_CONNECTIONS``. Fewer than 32 hardware queues are a problem."""
    wanted, properties = machine.queues_wanted, machine.properties
    facts = []
    if properties is not None:
        modelled = "" if machine.used == "cuda" else " (a model)"
        facts.append(f"{properties.hardware_queues} hardware queues are used by the {machine.used} driver{modelled}")
    cure = f"set {QUEUES}={MOST_QUEUES}, or unset it: aiocuda then sets {MOST_QUEUES} before CUDA starts"
    if wanted is None:
        if machine.used == "cuda" and properties is not None and properties.hardware_queues < MOST_QUEUES:
            problem = "other code of this process used CUDA before a device was opened, and CUDA's default is in force"
            cure = f"set {QUEUES}={MOST_QUEUES} in the environment, or open the device first"
            return Result(facts, [Problem(problem, cure)])
        return Result([*facts, _unset_queues()])
    queues = queues_for(wanted)
    if queues == MOST_QUEUES:
        return Result([*facts, f"{QUEUES}={wanted!r}"])
    problem = f"{QUEUES}={wanted!r} gives CUDA {queues} hardware queues: streams that share one wait for each other"
    return Result(facts, [Problem(problem, cure)])


def _unset_queues() -> str:
    """Return what a program has if the variable is unset. The process of this command uses no other library."""
    fact = f"{QUEUES} is not set: aiocuda sets {MOST_QUEUES} before CUDA starts"
    others = [name for name in OTHERS if _installed(name)]
    if not others:
        return fact
    return (
        f"{fact}. A program that uses the GPU through {' or '.join(others)} before it opens a device has "
        f"{queues_for('')}, unless its environment sets {QUEUES}={MOST_QUEUES}"
    )


async def check_pinned(machine: Machine) -> Result:
    """Check that pinned memory can be allocated, and the limit of the system for locked memory."""
    size = f"{PINNED_BYTES >> 20} MiB"
    facts, problems = [], []
    if machine.pinned_error is not None:
        problems.append(Problem(f"{size} of pinned memory: {_text(machine.pinned_error)}", _memory_cure()))
    elif not machine.used:
        facts.append("no device was opened, so no pinned memory was allocated")
    elif machine.used == "cuda":
        facts.append(f"CUDA has page-locked {size}")
    else:
        facts.append(f"{size} were allocated; pinned memory of the {machine.used} driver is ordinary memory")
    locked = _limit("RLIMIT_MEMLOCK")
    if locked is None:
        facts.append("this process may lock any amount of memory")
    elif locked < LEAST_LOCKED_BYTES:
        problem = (
            f"this process may lock {_bytes(locked)} (RLIMIT_MEMLOCK), less than Linux's default of "
            f"{_bytes(LEAST_LOCKED_BYTES)}. Memory that CUDA pins does not count, but libraries that lock memory "
            "themselves fail, such as NCCL with RDMA"
        )
        cure = "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit of systemd; docker run --ulimit memlock=-1"
        problems.append(Problem(problem, cure))
    else:
        facts.append(f"RLIMIT_MEMLOCK is {_bytes(locked)}; memory that CUDA pins does not count")
    return Result(facts, problems)


def _memory_cure() -> str:
    for name, option in (("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")):
        limit = _limit(name)
        if limit is not None:
            return f"ulimit {option} unlimited ({name} is {_bytes(limit)})"
    return "end other programs that `top -o %MEM` lists; in a container, raise its limit: docker run --memory"


def _limit(name: str) -> int | None:
    """Return the soft limit of a resource in bytes; None if there is none, or if the system has no such limits."""
    if sys.platform == "win32":
        return None
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _bytes(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} bytes"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version, as far as they go: [13, 4] for "13.4rc1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else [0]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
