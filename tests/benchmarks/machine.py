"""Where a run took place: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import aiocuda

ROOT = Path(__file__).parents[2]

#: The code that figures depend on. The figures of a first run do not make the tree of a second one dirty.
_CODE = ("src", "tests", "pyproject.toml")

_PACKAGES = (
    "numpy",
    "anyio",
    "structlog",
    "cuda-bindings",
    "cuda-core",
    "cupy-cuda13x",
    "spdl-core",
    "torch",
    "uvloop",
)


def describe() -> dict[str, Any]:
    """The machine, as its own process sees it. ``gpu`` is None where CUDA cannot be used; ``reason`` explains it."""
    found: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "cpu": _cpu(),
        "platform": platform.platform(),
        "gpu": None,
        "reason": None,
    }
    try:
        from cuda.bindings import driver

        _ask(driver.cuInit(0))
        count = int(_ask(driver.cuDeviceGetCount()))
        device = _ask(driver.cuDeviceGet(0))
        name = _ask(driver.cuDeviceGetName(256, device))
        version = int(_ask(driver.cuDriverGetVersion()))
    except (ImportError, RuntimeError) as error:
        found["reason"] = str(error)
        return found
    found["gpu"] = name.decode().partition("\0")[0]
    found["gpus"] = count
    found["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
    found["driver"] = _kernel_module()
    return found


def _ask(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != 0:
        raise RuntimeError(f"the CUDA driver answered {error.name}")
    return values[0] if values else None


def _cpu() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), None)
    except FileNotFoundError:
        return platform.processor() or None


def _kernel_module() -> str | None:
    """The driver's version, as nvidia-smi prints it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "aiocuda": aiocuda.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tree() -> dict[str, Any]:
    """The measured code: ``commit``, and ``dirty``, which is True if files differ from that commit. None: unknown.

    ``AIOCUDA_COMMIT`` has priority, because an exported copy may be inside another repository: a commit, with
    ``-dirty`` at its end if files differ from it.
    """
    said = os.environ.get("AIOCUDA_COMMIT")
    if said:
        return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
    try:
        head = _git("rev-parse", "HEAD").strip()
        return {"commit": head, "dirty": bool(_git("status", "--porcelain", "--", *_CODE))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
