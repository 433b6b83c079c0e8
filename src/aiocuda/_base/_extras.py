"""`install`: the command that installs the packages of an extra, for messages."""

from __future__ import annotations

__all__ = ["PACKAGES", "install"]

#: The packages of the extras that messages name, as `pyproject.toml` has them.
PACKAGES = {
    "cli": "rich typer",
    "cluster": "distributed",
    "nvrtc": "nvidia-cuda-cccl nvidia-cuda-nvrtc nvidia-cuda-runtime",
    "observe": "nvtx opentelemetry-api prometheus-client",
}


def install(extra: str, packages: str = "") -> str:
    """Return the command that installs an extra. It names the packages, all or these, if aiocuda is on no index.

    The metadata of an installed aiocuda that is on an index has the addresses of the project.
    """
    from importlib import metadata  # takes 20 ms, and only errors call this

    try:
        addresses = metadata.metadata("aiocuda").get_all("Project-URL")
    except metadata.PackageNotFoundError:  # it is imported from a checkout that is not installed
        addresses = None
    return f"pip install 'aiocuda[{extra}]'" if addresses else f"pip install {packages or PACKAGES[extra]}"
