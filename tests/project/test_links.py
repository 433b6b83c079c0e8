"""Links of the documentation: their files and headings exist, and each page is in one of the two sidebars once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.tree import ROOT

DOCS = ROOT / "docs"
#: The root of each sidebar: of the users, and of the maintainers.
ROOTS = [DOCS / "index.md", DOCS / "maintainers.md"]

#: Links in the sidebar of the users.
MOST_LINKS = 48

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


def sidebar(root: Path) -> list[str]:
    """Return the pages in the sidebar of a root page."""
    trees = TOCTREE.findall(root.read_text(encoding="utf-8"))
    return [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]


def test_each_page_is_in_one_sidebar_once() -> None:
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path not in ROOTS]
    assert sorted(entry for root in ROOTS for entry in sidebar(root)) == sorted(pages)


def test_the_sidebar_of_the_users_is_short() -> None:
    assert len(sidebar(ROOTS[0])) <= MOST_LINKS
