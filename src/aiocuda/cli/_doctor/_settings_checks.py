"""Checks of the kernel cache, the environment variables and the event loop."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import os
import shlex
import tempfile
from pathlib import Path
from typing import Final

from ..._base._off_loop import off_loop
from ...driver.cuda import CacheState, ProgramCache
from ...lowlevel import form_of_core
from .._report import printable
from ._finding import Problem, Result
from ._machine import Machine

__all__ = ["VARIABLES", "check_cache", "check_core", "check_environment", "check_event_loop"]

#: The variables of the library, and the values that each accepts; None for any.
VARIABLES: Final[dict[str, tuple[str, ...] | None]] = {
    "AIOCUDA_DRIVER": ("auto", "cuda", "host", "simulated"),
    "AIOCUDA_CACHE_DIR": None,
    "AIOCUDA_GIL": ("keep", "release"),
    "AIOCUDA_CORE": ("auto", "compiled", "python"),
    "AIOCUDA_BUILD": ("auto", "compiled", "python"),
    "AIOCUDA_CHECK": ("0", "1"),
    "AIOCUDA_ASYNC": ("0", "1"),
    "AIOCUDA_WARN": ("0", "1"),
}

#: The command that compiles the core.
_BUILD: Final = "python -m aiocuda._core.build"

#: A variable of this project's tests.
_OF_TESTS: Final = ("AIOCUDA_SOAK_SECONDS",)

#: Ignored entries of the cache that are named.
_MOST_NAMED: Final = 3


async def check_core(machine: Machine) -> Result:
    """Check that a GPU is used by the compiled core, unless ``AIOCUDA_CORE`` refuses it."""
    form = form_of_core()
    facts = [f"the core is {'compiled' if form.name == 'compiled' else 'in Python'}"]
    if form.missing is not None:
        facts.append(f"{form.missing}: {form.obstacle or _BUILD}")
    if form.missing is None or machine.used != "cuda":
        return Result(facts)
    text = "launches and awaits take more time of the host than with the compiled core"
    return Result(facts, [Problem(text, f"{_BUILD}, or set AIOCUDA_CORE=python")])


async def check_cache(machine: Machine) -> Result:
    """Check that the cache of compiled kernels is private and can be written, and that its entries are used."""
    cache = ProgramCache.default()
    if cache is None:
        text = "there is no directory for compiled kernels: HOME is not set"
        return Result([], [Problem(text, "set AIOCUDA_CACHE_DIR to a directory that you can write")])
    state = await off_loop(cache.inspect)
    directory = cache.directory
    shown = printable(directory)
    if not state.exists:
        return await off_loop(lambda: _missing_cache(directory, state))
    if state.unused:
        cure = f"chmod 700 {shlex.quote(shown)} as its owner, or set AIOCUDA_CACHE_DIR to a directory of your own"
        return Result([], [Problem(f"the kernel cache {shown} is not used: {state.unused}", cure)])
    facts = [f"{shown} (mode {state.mode:04o}) has {state.entries} kernels, {state.nbytes / 1e6:.1f} MB"]
    problems = []
    refused = await off_loop(lambda: _write_error(directory))
    if refused:
        cure = f"chmod u+rwx {shlex.quote(shown)}, or set AIOCUDA_CACHE_DIR to a directory that you can write"
        text = f"the kernel cache {shown} cannot be written ({refused}): each process compiles again"
        problems.append(Problem(text, cure))
    if state.ignored:
        named = ", ".join(f"{printable(name)} ({reason})" for name, reason in state.ignored[:_MOST_NAMED])
        text = f"{len(state.ignored)} entries are ignored: {named}"
        problems.append(Problem(text, f"rm -r {shlex.quote(shown)}: it is made again when a kernel is compiled"))
    return Result(facts, problems)


def _missing_cache(directory: str, state: CacheState) -> Result:
    shown = printable(directory)
    if state.unused:
        cure = "set AIOCUDA_CACHE_DIR to a directory"
        return Result([], [Problem(f"the kernel cache {shown} is not used: {state.unused}", cure)])
    parent = next(folder for folder in Path(directory).parents if folder.exists())
    refused = _write_error(parent)
    if not refused:
        return Result([f"{shown} does not exist yet: it is made when a kernel is compiled"])
    problem = f"{shown} cannot be made in {printable(str(parent))} ({refused}): each process compiles again"
    return Result([], [Problem(problem, "set AIOCUDA_CACHE_DIR to a directory that you can write")])


def _write_error(directory: str | Path) -> str:
    """Write a temporary file into a directory, and return the error; "" if there was none. **May block.**"""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"aiocuda")
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def check_environment(machine: Machine) -> Result:
    """Check the values of the library's variables, and find variables with misspelled names."""
    names = sorted(name for name in os.environ if name.startswith("AIOCUDA_") and name not in _OF_TESTS)
    wrong = {name: problem for name in names if (problem := _variable_problem(name, os.environ[name])) is not None}
    problems = [*wrong.values()]
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        text = f"CUDA_LAUNCH_BLOCKING={os.environ['CUDA_LAUNCH_BLOCKING']!r}: every launch blocks the event loop"
        problems.append(Problem(text, "unset CUDA_LAUNCH_BLOCKING"))
    facts = [f"{name}={os.environ[name]!r}" for name in names if name not in wrong]
    return Result(facts if facts or problems else ["no variable of aiocuda is set"], problems)


def _variable_problem(name: str, value: str) -> Problem | None:
    if name not in VARIABLES:
        near = difflib.get_close_matches(name, VARIABLES, 1, 0.8)
        cure = f"unset {printable(name)}" + (f", or set {near[0]} instead" if near else "")
        return Problem(f"{printable(name)} is no variable of aiocuda", cure)
    values = VARIABLES[name]
    if values is None or value in values or (not value and name != "AIOCUDA_GIL"):  # empty counts as unset
        return None
    accepted = ", ".join(values[:-1]) + f" or {values[-1]}"
    return Problem(f"{name}={value!r} is not accepted", f"set {name} to {accepted}, or unset it")


async def check_event_loop(machine: Machine) -> Result:
    """Check that the event loop watches descriptors, and does not run in debug mode."""
    loop = asyncio.get_running_loop()
    uvloop = "uvloop is installed" if importlib.util.find_spec("uvloop") else "uvloop is not installed"
    facts = [f"{type(loop).__module__}.{type(loop).__qualname__}", uvloop]
    problems = []
    if not _watches_descriptors(loop):
        problems.append(
            Problem(
                "the event loop does not watch descriptors, so results are found by timers, 1 to 16 ms late",
                "run the program with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)",
            )
        )
    if loop.get_debug():
        text = "asyncio's debug mode is on: each callback and task takes several times as long"
        problems.append(Problem(text, "unset PYTHONASYNCIODEBUG and PYTHONDEVMODE, and start Python without -X dev"))
    return Result(facts, problems)


def _watches_descriptors(loop: asyncio.AbstractEventLoop) -> bool:
    reader, writer = os.pipe()
    try:
        loop.add_reader(reader, lambda: None)
        loop.remove_reader(reader)
    except NotImplementedError:
        return False
    finally:
        os.close(reader)
        os.close(writer)
    return True
