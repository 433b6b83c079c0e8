"""R4: the packages of the extra `observe` are imported when an exporter is used, and named if they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import aiocuda.observe
from aiocuda._base._extras import install

EXPORTERS = {
    "NvtxInstrument": ("nvtx", "nvtx"),
    "OpenTelemetryInstrument": ("opentelemetry", "opentelemetry-api"),
    "PrometheusCollector": ("prometheus_client", "prometheus-client"),
}

#: Makes the packages of the extra impossible to import.
ABSENT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {[package for package, _ in EXPORTERS.values()]}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(program: str) -> Any:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
def test_missing_packages_are_named_with_the_cure() -> None:
    found = run(
        ABSENT
        + f"""
import json
import aiocuda
from aiocuda.observe import StreamProfiler, Timeline
errors = {{}}
for name in {list(EXPORTERS)}:
    for _ in range(2):
        try:
            getattr(aiocuda.observe, name)
        except ImportError as error:
            errors[name] = [str(error), error.name]
print(json.dumps(errors))
"""
    )
    assert found == {
        name: [f"{name} needs the package {distribution}: {install('observe', distribution)}", package]
        for name, (package, distribution) in EXPORTERS.items()
    }


@pytest.mark.slow
def test_packages_are_imported_when_an_exporter_is_used() -> None:
    packages = [package for package, _ in EXPORTERS.values()]
    found = run(
        f"""
import json, sys
import aiocuda.observe
before = [name for name in {packages} if name in sys.modules]
after = []
for name in {list(EXPORTERS)}:
    getattr(aiocuda.observe, name)
    after.append([package for package in {packages} if package in sys.modules])
print(json.dumps([before, after]))
"""
    )
    assert found == [[], [packages[:1], packages[:2], packages]]


def test_names_of_the_package() -> None:
    assert aiocuda.observe.__all__ == sorted(aiocuda.observe.__all__)
    assert set(aiocuda.observe.__all__) <= set(dir(aiocuda.observe))
    with pytest.raises(AttributeError, match=r"module 'aiocuda\.observe' has no attribute 'Missing'"):
        aiocuda.observe.Missing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_exporters_have_their_public_names(name: str) -> None:
    pytest.importorskip(EXPORTERS[name][0])
    exporter = getattr(aiocuda.observe, name)
    assert (exporter.__module__, exporter.__qualname__) == ("aiocuda.observe", name)
