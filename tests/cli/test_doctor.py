"""``aiocuda doctor``: output, exit codes, and findings that need a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiocuda._base._extras import install
from tests.cli.programs import aiocuda, program
from tests.driver.cuda.fake import build
from tests.project.tree import ROOT

pytest.importorskip("typer")
pytest.importorskip("rich")

pytestmark = pytest.mark.slow

NAMES = [
    "driver", "versions", "nvrtc", "hardware_queues", "pinned_limit", "gil_contention", "timer_latency", "core",
    "cache", "environment", "event_loop",
]  # fmt: skip

#: Findings that depend on the load of the machine that runs the tests.
TIMED = {"gil_contention", "timer_latency"}


def findings(finished: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The findings by name, from JSON that has standard output to itself."""
    assert finished.stderr == ""
    told = json.loads(finished.stdout)
    assert list(told) == ["findings"]
    assert [finding["name"] for finding in told["findings"]] == NAMES
    for finding in told["findings"]:
        assert list(finding) == ["name", "ok", "detail", "cure"]
        assert finding["detail"]
        assert bool(finding["cure"]) is not finding["ok"]
    assert finished.returncode == int(not all(finding["ok"] for finding in told["findings"]))
    return {finding["name"]: finding for finding in told["findings"]}


def problems(found: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, finding in found.items() if not finding["ok"]} - TIMED


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine without a GPU and without a problem."""
    return {"AIOCUDA_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "-1"}


def test_a_missing_gpu_is_no_problem(sound: dict[str, str]) -> None:
    found = findings(aiocuda("doctor", "--json", **sound))
    assert problems(found) == set()
    assert "no GPU is used: " in found["driver"]["detail"]
    assert "the host driver is used" in found["driver"]["detail"]
    assert not (Path(sound["AIOCUDA_CACHE_DIR"])).exists()


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_missing_gpu_is_a_problem_if_cuda_is_asked_for(sound: dict[str, str], way: str) -> None:
    if way == "option":
        found = findings(aiocuda("doctor", "--json", "--driver", "cuda", **sound))
    else:
        found = findings(aiocuda("doctor", "--json", **sound, AIOCUDA_DRIVER="cuda"))
    assert problems(found) == {"driver"}
    assert found["driver"]["detail"].startswith("CUDA is not available: ")
    assert "CUDA_VISIBLE_DEVICES" in found["driver"]["cure"]


@pytest.mark.heavy
@pytest.mark.parametrize("driver", ["host", "simulated"])
def test_other_drivers(sound: dict[str, str], driver: str) -> None:
    found = findings(aiocuda("doctor", "--json", "--driver", driver, **sound))
    assert problems(found) == set()
    assert f"the {driver} driver is used" in found["driver"]["detail"]


@pytest.mark.heavy
def test_a_wrong_driver_is_a_usage_error_and_a_wrong_variable_a_finding(sound: dict[str, str]) -> None:
    refused = aiocuda("doctor", "--json", "--driver", "gpu")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no driver is called 'gpu'" in refused.stderr
    found = findings(aiocuda("doctor", "--json", **sound, AIOCUDA_DRIVER="gpu"))
    assert problems(found) == {"driver", "environment"}
    assert "AIOCUDA_DRIVER='gpu'" in found["driver"]["detail"]
    assert found["driver"]["cure"] == "unset the variable: env -u AIOCUDA_DRIVER aiocuda doctor"
    found = findings(aiocuda("doctor", "--json", **sound, AIOCUDA_WARN="2"))
    assert found["driver"]["cure"] == "unset the variable: env -u AIOCUDA_WARN aiocuda doctor"


def test_output_for_people_names_problem_and_cure(sound: dict[str, str]) -> None:
    finished = aiocuda("doctor", **sound, AIOCUDA_CHECK="\x1b[31m[bold]yes", PYTHONIOENCODING="ascii")
    assert (finished.returncode, finished.stderr) == (1, "")
    assert "problem" in finished.stdout.splitlines()[0]
    assert "\x1b" not in finished.stdout
    (line,) = [line for line in finished.stdout.splitlines() if "AIOCUDA_CHECK" in line and "PROBLEM" in line]
    assert r"AIOCUDA_CHECK='\x1b[31m[bold]yes' is not accepted" in line
    assert "cure: set AIOCUDA_CHECK to 0 or 1, or unset it" in finished.stdout
    for name in NAMES:
        assert name.replace("_", " ") in finished.stdout


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_small_limit_of_locked_memory(sound: dict[str, str]) -> None:
    pytest.importorskip("resource")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))"
    found = findings(program(limit, "doctor", "--json", "--driver", "host", **sound))
    assert problems(found) == {"pinned_limit"}
    assert "this process may lock 64 KiB (RLIMIT_MEMLOCK)" in found["pinned_limit"]["detail"]
    assert "Memory that CUDA pins does not count" in found["pinned_limit"]["detail"]
    assert "ulimit -l unlimited" in found["pinned_limit"]["cure"]


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_too_little_memory_for_pinned_arrays(sound: dict[str, str]) -> None:
    limit = """
        import pathlib, re, resource, threading
        from aiocuda.cli import _app

        threading.stack_size(256 << 10)  # the stacks of threads count
        used = int(re.search(r"VmSize:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (used + (56 << 20), resource.RLIM_INFINITY))
    """
    found = findings(program(limit, "doctor", "--json", "--driver", "host", **sound, MALLOC_ARENA_MAX="1"))
    assert "pinned_limit" in problems(found)
    assert "64 MiB of pinned memory: DeviceOutOfMemory: the host has no room" in found["pinned_limit"]["detail"]
    assert "ulimit -v unlimited" in found["pinned_limit"]["cure"]


# -- the compiler ------------------------------------------------------------------------------------------------------


def without_nvrtc(folder: Path) -> dict[str, str]:
    """Variables of an environment with all packages that are installed here, except NVRTC's."""
    import numpy as np

    packages = folder / "packages"
    packages.mkdir()
    for path in Path(np.__file__).parents[1].iterdir():
        if not path.name.startswith("nvidia"):
            (packages / path.name).symlink_to(path)
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(packages)]), "PATH": "/usr/bin:/bin"}


@pytest.mark.heavy
@pytest.mark.parametrize("driver", ["cuda", "host"])
def test_a_missing_compiler_is_a_problem_with_cuda(sound: dict[str, str], tmp_path: Path, driver: str) -> None:
    from tests.cli.programs import environment

    hidden = {**environment(**sound), **without_nvrtc(tmp_path)}
    hidden = {name: value for name, value in hidden.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-S", "-m", "aiocuda", "doctor", "--json", "--driver", driver],
        env=hidden, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = findings(finished)
    if "toolkit" in found["nvrtc"]["detail"]:
        pytest.skip("this machine has a CUDA toolkit")
    assert "NVRTC, which compiles kernels, is not installed" in found["nvrtc"]["detail"]
    assert found["nvrtc"]["ok"] is (driver == "host")
    if driver == "cuda":
        assert found["nvrtc"]["cure"] == install("nvrtc")


@pytest.mark.heavy
def test_without_the_cuda_package(sound: dict[str, str]) -> None:
    missing = "import sys; sys.modules['cuda'] = sys.modules['cuda.pathfinder'] = None"
    found = findings(program(missing, "doctor", "--json", "--driver", "cuda", **sound))
    assert {"driver", "nvrtc"} <= problems(found)
    assert "cuda-pathfinder is not installed" in found["driver"]["detail"]


# -- a GPU that is there and fails -------------------------------------------------------------------------------------

FAKE = """
    import os
    from tests.driver.cuda.fake import Fake

    fake = Fake(os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1")
    fake.value("cuDeviceGetCount", 1)
    {}
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a libcuda that has no device and answers as a test says."""
    if sys.platform != "linux":
        pytest.skip("the library is built for Linux")
    folder = tmp_path_factory.mktemp("libcuda")
    build(folder).rename(folder / "libcuda.so.1")
    return str(folder)


def with_fake(libcuda: str, answer: str, sound: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    """The findings beside a libcuda that answers as the given lines say."""
    sound.pop("CUDA_VISIBLE_DEVICES")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    more = {**sound, "LD_LIBRARY_PATH": libcuda, "PYTHONPATH": path}
    return findings(program(FAKE.format(answer), "doctor", "--json", *arguments, **more))


@pytest.mark.heavy
def test_a_gpu_that_fails_is_a_problem(libcuda: str, sound: dict[str, str]) -> None:
    found = with_fake(libcuda, "fake.answer('cuInit', 999)", sound)
    assert "driver" in problems(found)
    assert "cuInit" in found["driver"]["detail"]
    assert "nvidia-smi" in found["driver"]["cure"]


@pytest.mark.heavy
def test_an_old_driver_is_a_problem_if_cuda_is_asked_for(libcuda: str, sound: dict[str, str]) -> None:
    found = with_fake(libcuda, "fake.version(12040)", sound, "--driver", "cuda")
    assert problems(found) == {"driver"}
    assert "too old: it supports CUDA 12.4" in found["driver"]["detail"]
    assert "R580" in found["driver"]["cure"]


@pytest.mark.heavy
def test_a_gpu_without_memory_for_pinned_arrays(libcuda: str, sound: dict[str, str]) -> None:
    found = with_fake(libcuda, "fake.answer('cuMemHostRegister', 2)", sound, "--driver", "cuda")
    assert found["driver"]["ok"]
    assert "the cuda driver is used; Fake GPU answers" in found["driver"]["detail"]
    assert "the NVIDIA driver supports CUDA 13.0" in found["versions"]["detail"]
    assert not found["pinned_limit"]["ok"]
    assert "DeviceOutOfMemory" in found["pinned_limit"]["detail"]


@pytest.mark.heavy
def test_code_that_used_cuda_before(libcuda: str, sound: dict[str, str]) -> None:
    """A context is active: the number of hardware queues is fixed, at CUDA's default."""
    answer = "fake.value('cuDevicePrimaryCtxGetState', 1); fake.push(0x1234)"
    found = with_fake(libcuda, answer, sound, "--driver", "cuda")
    assert not found["hardware_queues"]["ok"]
    assert "other code of this process used CUDA before a device was opened" in found["hardware_queues"]["detail"]
    assert "8 hardware queues" in found["hardware_queues"]["detail"]
    assert found["hardware_queues"]["cure"].startswith("set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment")
