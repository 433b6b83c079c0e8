from __future__ import annotations

try:
    import fastapi
    import starlette
    import uvicorn
except ImportError:  # a GPU machine often has none of them
    collect_ignore = [
        *("test_decorator.py", "test_error_responses.py", "test_health.py", "test_lifespan.py"),
        *("test_exit_code.py", "test_uvicorn.py", "test_uvicorn_batcher.py"),
    ]
else:
    FRAMEWORKS = (fastapi, starlette, uvicorn)
