"""The build hook of hatchling: compiles the core for wheels and editable installs, and generates its C for sdists.

``AIOCUDA_BUILD`` chooses: ``auto``, the default, compiles the core if a compiler and the headers of Python are there;
``compiled`` fails without them; ``python`` builds the pure form, which runs everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["CoreBuildHook"]

_VARIABLE = "AIOCUDA_BUILD"


def _builder() -> Any:
    """Return `build`, which lies beside this file: aiocuda is not installed yet."""
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
        """Return Cython, if this build has to generate the C of the core."""
        builder = _builder()
        if self._chosen() == "python" or builder.has_generated_c():
            return []
        return [builder.CYTHON] if self.target_name == "sdist" or builder.can_compile() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or generate, before the files are collected."""
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
                build_data["infer_tag"] = True
        except builder.BuildError as error:
            if chosen == "compiled":
                raise
            self.app.display_warning(f"aiocuda is built without its compiled core: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()

    def _chosen(self) -> str:
        chosen = os.environ.get(_VARIABLE) or "auto"
        if chosen not in ("auto", "compiled", "python"):
            raise ValueError(f"{_VARIABLE}={chosen!r}: use 'auto' (the default), 'compiled' or 'python'")
        return chosen
