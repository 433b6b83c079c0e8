"""Links of the documentation: their files and headings exist, and each page is in the table of contents once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.tree import ROOT

DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]

FENCE = re.compile(r"^(`{3,}|~{3,})(.*?)^\1$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\]\(\s*(?!https?:)([^)#\s]*)#?([^)\s]*)[^)]*\)")
SOURCE = re.compile(r'(?:src|srcset|href)="(?!https?:)([^"#]+)"')
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the text of a page without code and comments."""
    return COMMENT.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as MyST makes them."""
    headings = re.findall(r"^#{1,3} (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = prose(page)
    links = [*LINK.findall(CODE.sub("", text)), *((target, "") for target in SOURCE.findall(text))]
    broken = []
    for target, heading in links:
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (heading and heading not in anchors(path)):
            broken.append(f"{target}#{heading}")
    assert broken == []


def test_each_page_is_in_the_table_of_contents_once() -> None:
    entries = [
        line
        for tree in TOCTREE.findall(INDEX.read_text(encoding="utf-8"))
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path != INDEX]
    assert sorted(entries) == sorted(pages)
