"""The hooks of hatchling: one compiles the core for wheels and editable installs, and generates its C for sdists.

``AIOCUDA_BUILD`` chooses: ``auto``, the default, compiles the core if a compiler and the headers of Python are there;
``compiled`` fails without them; ``python`` builds the pure form, which runs everywhere.

The other one writes README and the addresses of the project into the metadata.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["CoreBuildHook", "HomeHook"]

_VARIABLE = "AIOCUDA_BUILD"


def _builder() -> Any:
    """Return the module `build`, loaded from beside this file: aiocuda is not installed yet."""
    spec = importlib.util.spec_from_file_location("_aiocuda_core_build", Path(__file__).with_name("build.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CoreBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled core to what is built."""

    PLUGIN_NAME = "custom"

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return Cython as the one more requirement, if this build has to generate the C of the core."""
        builder = _builder()
        if self._chosen() == "python" or builder.has_generated_c():
            return []
        # An sdist gets the C on any machine; a wheel only where it can be compiled.
        return [builder.CYTHON] if self.target_name == "sdist" or builder.why_not_compiled() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the C to an sdist or the extension to a wheel, before hatchling collects the files.

        An editable install finds the extension beside the sources. ``version`` is what hatchling builds.
        """
        chosen, builder = self._chosen(), _builder()
        if chosen == "python":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="aiocuda-core-")
        try:
            if self.target_name == "sdist":
                source = builder.generate(Path(self._folder.name))
                build_data["force_include"][str(source)] = f"src/aiocuda/_core/{source.name}"
            elif version == "editable":
                builder.build()
            else:
                extension = builder.build(Path(self._folder.name))
                build_data["force_include"][str(extension)] = f"aiocuda/_core/{extension.name}"
                build_data["pure_python"] = False
                build_data["infer_tag"] = True  # the wheel is for this Python and this platform
        except builder.BuildError as error:
            if chosen == "compiled":
                raise
            self.app.display_warning(f"aiocuda is built without its compiled core: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()

    def _chosen(self) -> str:
        """Return the value of ``AIOCUDA_BUILD``, or its default."""
        chosen = os.environ.get(_VARIABLE) or "auto"
        if chosen not in ("auto", "compiled", "python"):
            raise ValueError(f"{_VARIABLE}={chosen!r}: use 'auto' (the default), 'compiled' or 'python'")
        return chosen


class HomeHook(MetadataHookInterface):
    """Makes the links of README absolute, and names the addresses of the project, once it has a home.

    The home is the address of a repository on GitHub: ``home`` of ``[tool.hatch.metadata.hooks.custom]``.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme`` and ``urls``, which `pyproject.toml` declares as dynamic."""
        home = self.config["home"].rstrip("/")
        metadata["urls"], metadata["readme"] = {}, "README.md"
        if not home:  # README stays as it is
            return
        text, source = (Path(self.root, name).read_text("utf-8") for name in ("README.md", "src/aiocuda/__init__.py"))
        tag = "v" + re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]

        def absolute(match: re.Match[str]) -> str:
            """Add the address after ``[text](``; for an image, which begins with ``!``, that of the raw file."""
            return f"{match[0]}{home}/{'raw' if match[1] else 'blob'}/{tag}/"

        text = re.sub(r"(!?)\[[^]]*\]\((?!https?:|#)", absolute, text)  # the beginnings of relative links
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        changes = f"{home}/blob/{tag}/CHANGELOG.md"
        metadata["urls"] = {"Homepage": home, "Changelog": changes, "Issues": f"{home}/issues"}
