"""The library never listens on a socket, unpickles data of others, runs text as Python, or runs a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project.tree import ROOT

SOURCES = sorted((ROOT / "src" / "aiocuda").rglob("*.py"))

#: Modules that listen or unpickle; functions that run text; methods that listen, or run a shell.
MODULES = {"dill", "ftplib", "http", "marshal", "pickle", "shelve", "socket", "socketserver", "ssl", "xmlrpc"}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "system", "popen", "create_server", "create_unix_server", "create_datagram_endpoint", "start_server",
    "start_unix_server",
}  # fmt: skip


#: These exchange pickles with processes that this process has started, through sockets that they inherit, or with the
#: workers of a Dask cluster, whose scheduler is on this machine or reached by TLS.
OWN_PROCESSES = {
    "src/aiocuda/cluster/_dask/_replica_actor.py": ["pickle"],
    "src/aiocuda/cluster/_local_engine.py": ["pickle"],
    "src/aiocuda/cluster/_replica_main.py": ["pickle"],
    "src/aiocuda/cluster/_messages.py": ["pickle"],
    "src/aiocuda/_processes/_messages.py": ["pickle", "socket"],
}


def forbidden(source: str) -> list[str]:
    """Return the forbidden names that a module uses."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            found += [name for name in names if not level and name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FUNCTIONS:
                found.append(function.id)
            elif isinstance(function, ast.Attribute) and function.attr in METHODS:
                found.append(function.attr)
            if any(keyword.arg == "shell" for keyword in node.keywords):
                found.append("shell=")
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append("allow_pickle=")
    return found


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from http.server import HTTPServer", "eval(x)", "loop.create_server(f)", "run(x, shell=True)"],
)
def test_forbidden_name_is_found(text: str) -> None:
    assert forbidden(text) != []


def test_nothing_listens_and_nothing_is_unpickled() -> None:
    assert {
        path.relative_to(ROOT).as_posix(): found for path in SOURCES if (found := forbidden(_read(path)))
    } == OWN_PROCESSES


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
