"""Every module has a docstring, and the package is typed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

FILES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_module_has_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{name(path)} has no docstring"


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""
