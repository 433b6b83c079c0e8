"""CONTRIBUTING.md names every package and every folder of tests, and the files that it and the READMEs name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.tree import PACKAGE, ROOT

PAGE = ROOT / "CONTRIBUTING.md"
LINKING = [ROOT / "README.md", ROOT / "CHANGELOG.md", PAGE, *sorted(PACKAGE.rglob("README.md"))]

CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")

#: A test in a command: its file, and its function.
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


def folders(parent: Path) -> set[str]:
    """Return the folders that have Python files."""
    return {path.parent.name for path in parent.glob("*/*.py")}


def section(heading: str) -> str:
    """Return the text below a heading of the second level."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_package_is_on_the_map() -> None:
    named = set(re.findall(r"`(\w+)`", section("Map of the packages")))
    assert folders(PACKAGE) - named == set()


def test_every_folder_of_tests_is_on_the_map() -> None:
    named = set(re.findall(r"`(\w+)`", section("Map of the tests")))
    assert folders(ROOT / "tests") - named == set()


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_and_headings_exist(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for target, heading in LINK.findall(text):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {text.lower().replace(" ", "-") for text in headings}, heading


def test_tests_in_the_commands_exist() -> None:
    named = TEST.findall(section("Run tests"))
    assert named
    for file, function in named:
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")
