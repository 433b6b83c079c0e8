"""Run uvicorn with a service of this folder, and report the exit codes of its workers on stdout."""

from __future__ import annotations

import sys


def main(app: str, *options: str) -> None:
    """Run ``app``, as in ``service_program:app``."""
    import uvicorn.main
    from uvicorn.supervisors import multiprocess

    join = multiprocess.Process.join

    def report_exit_code(process: multiprocess.Process) -> None:
        join(process)
        sys.stdout.write(f"worker {process.pid} ended with {process.exitcode}\n")
        sys.stdout.flush()

    setattr(multiprocess.Process, "join", report_exit_code)  # noqa: B010 - a type checker forbids the assignment
    uvicorn.main.main([f"tests.serving.asgi.{app}", *options])


if __name__ == "__main__":
    main(*sys.argv[1:])
