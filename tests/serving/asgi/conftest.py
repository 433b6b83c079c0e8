from __future__ import annotations

import pytest

from aiocuda.serving.asgi import _lifespan

try:
    import fastapi
    import starlette
    import uvicorn
except ImportError:  # a GPU machine often has none of them
    collect_ignore = [
        *("test_freeze.py", "test_decorator.py", "test_error_responses.py", "test_health.py", "test_lifespan.py"),
        *("test_exit_code.py", "test_uvicorn.py", "test_uvicorn_batcher.py"),
    ]
else:
    FRAMEWORKS = (fastapi, starlette, uvicorn)


@pytest.fixture(autouse=True)
def objects_of_other_tests_stay_unfrozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lifespan would visit all objects of the test process each time."""
    if "freezes" not in request.fixturenames:
        monkeypatch.setattr(_lifespan, "FROZEN_BY_PROGRAM", 0)
