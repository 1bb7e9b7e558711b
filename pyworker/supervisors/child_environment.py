"""The surroundings of a child process: environment variables, cores, a folder for temporary files.

Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

PYTHON_FOLDER = Path(__file__).resolve().parents[2]


def child_environment(threads: int) -> dict[str, str]:
    """Return the server's environment without PostgreSQL's variables (passwords among them) and another Python's."""
    foreign = ("PG", "PYTHON", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return inherited | {
        "PYTHONPATH": str(PYTHON_FOLDER),
        "PYTHONSAFEPATH": "1",  # keeps the working directory, the data directory, out of sys.path
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Long spinning makes a step ten times as slow when another process wants a core; no spinning makes it twice as
        # slow when none does.
        "GOMP_SPINCOUNT": "5000",
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),  # of tokenizers
    }


def spool_folder() -> Path:
    """Return the server's folder for temporary files: backups omit it, and a start of the server cleans it."""
    folder = Path.cwd() / "base" / "pgsql_tmp"  # in the data directory
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
