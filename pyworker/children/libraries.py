"""The libraries that processes of jobs need, imported when a process has time for it: they take seconds."""

from __future__ import annotations


def import_libraries() -> None:
    """Import what every kind of job needs: PyTorch and what uses it, except for its compiler."""
    from pg_tensile.execution.capture import compiler

    compiler.defer()
    import pyworker.children.memory  # noqa: F401
