"""One file, one noun: none grows past what can be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

LONGEST = 400

FILES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines < LONGEST, f"{name(path)} has {lines} lines: it holds two nouns"
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{name(path)} does not say what it is"


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""
