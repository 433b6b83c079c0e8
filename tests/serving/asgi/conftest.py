from __future__ import annotations

from importlib.util import find_spec

#: Tests with frameworks and servers, which a GPU machine often has not.
WITH_FRAMEWORKS = [
    "test_decorator.py",
    "test_error_responses.py",
    "test_health.py",
    "test_lifespan.py",
    "test_uvicorn.py",
]

collect_ignore = [] if all(find_spec(name) for name in ("fastapi", "starlette", "uvicorn")) else WITH_FRAMEWORKS
