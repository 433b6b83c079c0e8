"""Tests of the packages from pool to cluster import a name from where it is public."""

from __future__ import annotations

from tests.project.private_imports import PrivateImport, private_imports


def test_names_with_a_public_home_are_imported_from_there() -> None:
    found = [(each, home) for each in private_imports() if (home := each.public_home()) is not None]
    assert [f"{each.file}: {each.name} is in {home}" for each, home in found] == []


def test_private_import_is_found() -> None:
    known = PrivateImport("pipeline", "tests/pipeline/test_x.py", "aiocuda.pipeline._ring", "PipelineRing")
    assert known.public_home() == "aiocuda.pipeline"
    assert known._replace(module="aiocuda.device._resources", name="resources_of").public_home() == "aiocuda.lowlevel"
    assert known._replace(module="aiocuda.pipeline._meter", name="Meter").public_home() is None
