"""The import of a library that an integration needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType

__all__ = ["require"]


def require(module: str, library: str, at_least: tuple[int, int], package: str) -> ModuleType:
    """Import a module and return it.

    Parameters
    ----------
    module
        Its name, ``"torch"`` or ``"numba.cuda"``.
    library
        The library's name in errors.
    at_least
        The oldest version that works.
    package
        The package that has the module, as pip names it.

    Raises
    ------
    ImportError
        The module is not installed, or too old. An error of the module's own import is raised as it is.
    """
    oldest = ".".join(map(str, at_least))
    needs = f"this integration needs {library} {oldest} or newer"
    cure = f"pip install '{package}>={oldest}'"
    if not _is_installed(module):
        raise ImportError(f"{needs}, and {module} is not installed: {cure}", name=module)
    found = importlib.import_module(module)
    version = str(getattr(found, "__version__", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < at_least:
        raise ImportError(f"{needs}, and {version} is installed: {cure.replace('install', 'install --upgrade')}")
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False
