"""mypy, with ``--strict``, and pyright find what is wrong in a program that uses aiocuda, and nothing else.

The programs are those of `tests.typing.programs`, which say what types they expect, and those of README, whose
functions have no annotations.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.project.test_docs import blocks
from tests.project.tree import ROOT, SOURCE

#: For each file, the lines with errors, and what is wrong there.
Found: TypeAlias = dict[str, dict[int, str]]

PROGRAMS = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/typing/programs").glob("typed_*.py"))
}

#: Functions without annotations are allowed, and checked.
UNTYPED = "# mypy: allow-untyped-defs, allow-untyped-calls, check-untyped-defs\n"

README = {f"readme_{number}": block.code + UNTYPED for number, block in enumerate(blocks(ROOT / "README.md"))}

#: Each line with ``# wrong`` has a mistake.
MISTAKES = """\
import numpy as np
import aiocuda
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.serving.asgi import health

async def infer(batch: Batch[str]) -> list[float]:
    batch.stream.upload()  # wrong
    batch.slot.sream  # wrong
    return [1.0]

async def main(device: aiocuda.Device, pipeline: aiocuda.Pipeline[int, float], stream: aiocuda.Stream) -> None:
    async with MicroBatcher(infer, max_batch_size=4, device=device) as batcher:
        await batcher.submit(3)  # wrong
        (await batcher.submit("3")).upper()  # wrong
    pipeline.run(["3"])  # wrong
    (await pipeline.execute_iteration(3)).upper()  # wrong
    (await (await pipeline.submit(3))).upper()  # wrong
    up, down = stream.upload(np.ones(4)), stream.download(stream.empty(4))
    (await aiocuda.gather(up, down)).upper()  # wrong
    (await aiocuda.gather(up, down))[0].upper()  # wrong
    await aiocuda.gather(infer)  # wrong
    await health(3, 4)  # wrong
"""


def mypy(folder: Path) -> Found:
    """Return what mypy finds in the programs of a folder."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy: pip install mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir=cache", "."]
    environment = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert re.search("^(Success|Found)", done.stdout, re.MULTILINE), done.stdout + done.stderr
    found: Found = {}
    for file, line, text in re.findall(r"^(.*)\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(file, {})[int(line)] = text
    return found


def pyright(folder: Path) -> Found:
    """Return what pyright, or basedpyright with pyright's rules, finds in the programs of a folder."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    command = shutil.which("basedpyright", path=path) or shutil.which("pyright", path=path)
    if command is None:
        pytest.skip("needs pyright: pip install basedpyright")
    settings = {"include": ["."], "extraPaths": [str(SOURCE)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [command, "--outputjson", "--pythonpath", sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found: Found = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            found.setdefault(Path(each["file"]).stem, {})[each["range"]["start"]["line"] + 1] = each["message"]
    return found


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [mypy, pyright])
def test_programs_pass_and_mistakes_are_found(check: Callable[[Path], Found], tmp_path: Path) -> None:
    for name, code in {**PROGRAMS, **README, "mistakes": MISTAKES}.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    found = check(tmp_path)
    wrong = [number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(found.pop("mistakes")) == wrong
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str) -> None:
    """The types that the programs assert are those of the objects."""
    program: Any = importlib.import_module(f"tests.typing.programs.{name}")
    asyncio.run(program.main())
