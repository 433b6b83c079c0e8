"""The compiled core under AddressSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aiocuda._core import build
from tests.planting import PACKAGE
from tests.project.tree import ROOT

#: Code that the core calls back, and calls of libcuda by address.
TESTS = ("tests/core/test_reentrancy.py", "tests/core/test_over_libcuda.py", "tests/driver/cuda/test_native.py")


def _runtime() -> str | None:
    """Return the sanitizer's library, which has to be loaded first; None if the compiler has none."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    path = found.stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.mark.soak
@pytest.mark.skipif(build.why_not_compiled() is not None, reason=str(build.why_not_compiled()))
def test_core_touches_no_memory_that_is_not_its_own(tmp_path: Path) -> None:
    runtime = _runtime()
    if runtime is None:
        pytest.skip("gcc has no AddressSanitizer here")
    shutil.copytree(PACKAGE, tmp_path / "aiocuda", ignore=shutil.ignore_patterns("__pycache__", "_compiled*.so"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
        "AIOCUDA_CORE": "compiled",
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees each object
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves objects at its end
    }
    made = subprocess.run(
        [sys.executable, "-m", "aiocuda._core.build"],
        env={**environment, "CFLAGS": "-fsanitize=address -fno-omit-frame-pointer -g -O1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0", *TESTS],
        cwd=ROOT,
        env={**environment, "LD_PRELOAD": runtime},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    assert "AddressSanitizer" not in ran.stdout + ran.stderr
