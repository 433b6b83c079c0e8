"""The address of the project is one setting: README, the metadata and the messages follow it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from aiocuda._base._extras import PACKAGES, install
from tests.project.tree import PACKAGE, ROOT

HOME = "https://github.com/someone/aiocuda"
LINK = re.compile(r"(!?)\[[^]]*\]\(([^)]*)\)")


def core_metadata(home: str) -> Any:
    """Return the metadata as hatchling builds it, with this home."""
    pytest.importorskip("hatchling")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    project = ProjectMetadata(str(ROOT), PluginManager())
    project.config["tool"]["hatch"]["metadata"]["hooks"]["custom"]["home"] = home
    return project.core


def test_without_a_home_readme_is_as_it_is_and_there_are_no_addresses() -> None:
    core = core_metadata("")
    assert core.readme == (ROOT / "README.md").read_text(encoding="utf-8")
    assert core.urls == {}


@pytest.mark.parametrize("home", [HOME, f"{HOME}/"])
def test_with_a_home_all_links_are_absolute(home: str) -> None:
    core, readme = core_metadata(home), (ROOT / "README.md").read_text(encoding="utf-8")
    assert core.readme_content_type == "text/markdown"
    links, own = LINK.findall(core.readme), LINK.findall(readme)
    assert len(links) == len(own) > 10
    for (image, target), (_, path) in zip(links, own, strict=True):
        kind = "raw" if image else "blob"
        assert re.fullmatch(rf"{HOME}/{kind}/v[^/]+/{re.escape(path)}", target), target
    assert LINK.sub("", core.readme) == LINK.sub("", readme), "nothing else has changed"
    assert set(core.urls) == {"Homepage", "Changelog", "Issues"}
    assert all(address.startswith(HOME) for address in core.urls.values())


@pytest.mark.parametrize("extra", sorted(PACKAGES))
def test_messages_name_the_packages_of_an_extra(extra: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["project"]["optional-dependencies"][extra]
    assert PACKAGES[extra].split() == [re.split("[^a-z-]", line)[0] for line in lines]


def test_messages_name_the_extra_once_there_is_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed metadata tells it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    named = "pip install nvtx opentelemetry-api prometheus-client"
    assert install("observe") == named  # not installed at all
    file = tmp_path / "aiocuda-9.dist-info" / "METADATA"
    file.parent.mkdir()
    for lines, command in (("", named), (f"Project-URL: Homepage, {HOME}\n", "pip install 'aiocuda[observe]'")):
        file.write_text(f"Metadata-Version: 2.4\nName: aiocuda\nVersion: 9\n{lines}", encoding="utf-8")
        importlib.invalidate_caches()
        assert install("observe") == command


def test_messages_may_name_one_package_of_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install("observe", "nvtx") == "pip install nvtx"


def test_no_other_text_of_the_library_tells_to_install_an_extra() -> None:
    naming = [path for path in PACKAGE.rglob("*.py") if re.search(r"install .?aiocuda\[", path.read_text("utf-8"))]
    assert naming == [PACKAGE / "_base" / "_extras.py"]
