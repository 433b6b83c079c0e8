"""M2, M3: each integration imports its library, and says what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiocuda
from aiocuda import InvalidTypeError, UnsupportedError
from aiocuda.integrations._library import leaves, require


@pytest.mark.parametrize(
    ("module", "library", "message"),
    [
        ("torch", "torch", r"needs PyTorch 2\.4 or newer, and torch is not installed: pip install 'torch>=2\.4'"),
        ("cupy", "cupy", r"needs CuPy 13\.0 or newer, and cupy is not installed: pip install 'cupy-cuda13x>=13\.0'"),
        ("numba", "numba_cuda", r"needs numba-cuda 0\.15 or newer, .*: pip install 'numba-cuda>=0\.15'"),
        ("cuda_core", "cuda.core", r"needs cuda\.core 1\.0 or newer, .*: pip install 'cuda-core>=1\.0'"),
    ],
)
def test_missing_library(monkeypatch: pytest.MonkeyPatch, module: str, library: str, message: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find(name))
    sys.modules.pop(f"aiocuda.integrations.{module}", None)
    with pytest.raises(ImportError, match=message) as caught:
        importlib.import_module(f"aiocuda.integrations.{module}")
    assert caught.value.name == library


@pytest.mark.parametrize("version", ["1.9.0", "2.3.1+cu121", "0", "2.3.0rc2"])
def test_old_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (tmp_path / "oldlibrary.py").write_text(f"__version__ = {version!r}\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("oldlibrary", None)
    with pytest.raises(ImportError) as caught:
        require("oldlibrary", "Old", (2, 4), "old")
    assert str(caught.value) == (
        f"this integration needs Old 2.4 or newer, and {version} is installed: pip install --upgrade 'old>=2.4'"
    )


@pytest.mark.parametrize("version", ["2.4.0", "2.13.0+cpu", "3.0a1", "10.0"])
def test_new_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (tmp_path / "newlibrary.py").write_text(f"__version__ = {version!r}\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("newlibrary", None)
    assert require("newlibrary", "New", (2, 4), "new").__version__ == version


def test_error_of_the_library_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokenlibrary.py").write_text("import nothing_that_is_there\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_that_is_there"):
        require("brokenlibrary", "Broken", (1, 0), "broken")


def test_aiocuda_imports_no_integration() -> None:
    program = "import sys, aiocuda, aiocuda.integrations; print([n for n in sys.modules if '.integrations.' in n])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.asyncio
async def test_cuda_core_needs_a_gpu() -> None:
    pytest.importorskip("cuda.core")
    cuda_core: Any = importlib.import_module("aiocuda.integrations.cuda_core")
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        uses: list[Callable[[], object]] = [
            lambda: cuda_core.submit(stream, lambda theirs: None),
            lambda: cuda_core.device_of(stream),
        ]
        for use in uses:
            with pytest.raises(
                UnsupportedError, match=r"cuda\.core computes on a GPU, and .* belongs to the host driver"
            ):
                use()
        with pytest.raises(InvalidTypeError, match=r"replay takes a cuda\.core\.graph\.Graph, not 7"):
            cuda_core.replay(stream, 7)
        for wrong in (None, 7):
            with pytest.raises(InvalidTypeError, match="wait takes a stream, an event, a tensor"):
                cuda_core.wait(wrong)
        with pytest.raises(InvalidTypeError, match=r"this takes an aiocuda\.Stream, not 7"):
            cuda_core.submit(7, lambda theirs: None)


def test_leaves_of_nested_containers() -> None:
    import collections
    import dataclasses

    @dataclasses.dataclass
    class Answer:
        x: object
        rest: object = None

    Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - as libraries have it
    loop: list[object] = [1.0]
    loop.append(loop)
    nested = {"a": 2.0, "b": [3.0, (4.0, None)], "c": Answer(5.0, Answer({6.0})), "d": Pair(7.0, "no"), "e": loop}
    assert sorted(leaves(nested, float)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert list(leaves(1.5, float)) == [1.5]
    assert list(leaves("text", float)) == []
    assert list(leaves(Answer, float)) == []
